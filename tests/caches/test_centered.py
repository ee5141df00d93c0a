"""Means of keys and values in whole caches: what padding does to them, when they are taken, and what they survive."""

import inspect
import textwrap

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, HadaQuantCache, demo
from qkvcache.formats import HadaQuant
from qkvcache.releases import passing
from tests.evict.matrix import KeyNorm
from tests.matrix import ATTENTION, covering, model
from tests.reference import assert_close
from tests.tolerance import of_model

KINDS = {
    "growing": lambda config, **options: HadaQuantCache(config, num_sink_tokens=0, residual_length=4, **options),
    "static": lambda config, **options: HadaQuantCache(config, num_sink_tokens=0, residual_length=4, max_length=96, **options),
    "evicting": lambda config, **options: HadaQuantCache(config, policy=KeyNorm(budget=28, recent=8), **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def means(cache) -> list[torch.Tensor]:
    """Of keys and of values of each layer, `[B, H, 1, D]`."""
    held = (layer.storage.tokens.statistics for layer in cache.layers)
    return [statistics["center"].clone() for sides in held for statistics in sides]


def read(name: str, attention: str, kind: str, ids: torch.Tensor, mask: torch.Tensor | None = None):
    net = model(name, attention)
    cache = KINDS[kind](net.config)
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        net(ids, attention_mask=mask, position_ids=positions, **passing(cache))
    cache.layers[0].commit()
    return net, cache


@pytest.mark.parametrize(("attention", "kind"), covering(ATTENTION, KINDS, strength=1))
def test_padding_does_not_count(attention, kind):
    ids = torch.randint(3, 100, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    ids[1, :25] = 0
    _, together = read("llama", attention, kind, ids, mask)
    _, alone = read("llama", attention, kind, ids[1:, 25:])
    for padded, plain in zip(means(together), means(alone), strict=True):
        assert_close(padded[1:], plain, of_model(model("llama", attention)))
        assert padded[:1].abs().amax() > 0.05


@every_kind
def test_frozen_after_the_first_step(kind):
    net, cache = read("llama", "sdpa", kind, torch.randint(3, 100, (1, 40)))
    before = means(cache)
    with torch.no_grad():
        for step in (1, 20, 1, 1):
            net(torch.randint(3, 100, (1, step)), **passing(cache))
    assert all(torch.equal(a, b) for a, b in zip(before, means(cache), strict=True))


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_cropped_to_nothing_means_are_taken_anew(kind):
    net, cache = read("llama", "sdpa", kind, torch.randint(3, 100, (1, 40)))
    fresh = KINDS[kind](net.config)
    before = means(cache)
    cache.crop(-40)
    ids = torch.randint(3, 100, (1, 30))
    with torch.no_grad():
        net(ids, **passing(cache))
        net(ids, **passing(fresh))
    for new, wanted, old in zip(means(cache), means(fresh), before, strict=True):
        assert torch.equal(new, wanted) and not torch.equal(new, old)


def test_another_text():
    """Means of prose, then source code, or German: keys err less around them than around nothing, values at most 2 % more; nothing is taken
    anew until nothing is left."""
    net, tokenizer = demo.load()
    prose, code = demo.text_ids(tokenizer)[:256], tokenizer(inspect.getsource(textwrap.dedent)).input_ids[:128]
    german = tokenizer("Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung " * 6).input_ids[:128]
    format, plain = HadaQuant(3, 3), HadaQuant(3, 3, center=False)
    for other in (code, german):
        exact, cache = DynamicCache(config=net.config), CompressedCache(net.config, format=format)
        with torch.no_grad():
            net(torch.tensor([prose + other]), **passing(exact))
            net(torch.tensor([prose]), **passing(cache))
            cache.layers[0].commit()
            before = means(cache)
            net(torch.tensor([other]), **passing(cache))
            assert all(torch.equal(a, b) for a, b in zip(before, means(cache), strict=True))
            cache.crop(-len(prose + other))
            net(torch.tensor([other]), **passing(cache))
            cache.layers[0].commit()
            assert not any(torch.equal(a, b) for a, b in zip(before, means(cache), strict=True))
        for layer in exact.layers:
            for x, codec, uncentred, factor in (
                (layer.keys, format.key, plain.key, 0.95),
                (layer.values, format.value, plain.value, 1.02),
            ):
                statistics, new = codec.calibrate(x[:, :, : len(prose)]), x[:, :, len(prose) :]
                got, without = (c.dequantize(c.quantize(new, statistics) | statistics, new.shape[3]) for c in (codec, uncentred))
                assert (got - new).norm() < factor * (without - new).norm()


def test_a_step_that_nobody_saw_is_taken_in():
    """Attention of the model's own: the layer is asked again before anyone has reported."""
    cache = CompressedCache(format=HadaQuant(), num_sink_tokens=0, residual_length=4)
    x = torch.randn(1, 2, 40, 64)
    cache.update(x, x, 0)
    layer = cache.layers[0]
    assert layer.pending and cache.get_seq_length() == 40
    assert cache.memory().codes and not layer.pending
    torch.testing.assert_close(layer.dense()[0][:, :, -4:], x[:, :, -4:], rtol=0, atol=0)


@every_kind
def test_one_token_then_many(kind):
    """A first block of one token is next to no mean."""
    first = torch.randint(3, 100, (1, 1))
    net, cache = read("llama", "sdpa", kind, first)
    dense = DynamicCache(config=net.config)
    ids = torch.randint(3, 100, (1, 20))
    with torch.no_grad():
        net(first, **passing(dense))
        got, wanted = (torch.cat([net(part, **passing(past)).logits for part in ids.split(1, 1)], 1) for past in (cache, dense))
    assert (got - wanted).norm() < 0.35 * wanted.norm()
