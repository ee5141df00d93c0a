"""Bits by layer from one reading of a prompt."""

import pytest
import torch
from torch import Tensor

from qkvcache import CompressedCache, bits_by_layer, demo, plan
from qkvcache.evaluation.bits_by_layer import output_errors
from qkvcache.evaluation.quality import Passages, divergence
from qkvcache.formats import FormatByLayer, HadaQuant
from qkvcache.formats.outlying import Int8Keys
from qkvcache.releases import passing
from tests.matrix import by_layer, model

IDS = torch.arange(400) * 37 % 97 + 3


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output of causal attention, token by token."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.mT * 0.25).masked_fill(~torch.ones(query.shape[2], key.shape[2]).tril().bool(), -torch.inf)
    return weights.softmax(-1) @ value


def test_errors_are_those_of_attention_over_what_is_held():
    """Of 128 tokens, the 64 queries of the second half are all that are examined."""
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 128, 16, generator=source) for heads in (4, 2, 2))
    noise = 0.1 * torch.randn(2, 2, 128, 16, generator=source)
    found, energy = output_errors(query, 0.25, (key, value), [(key + noise, value + noise)], recent=0)
    exact = attended(query, key, value)[:, :, 64:]
    for side, other in zip(found, (attended(query, key + noise, value), attended(query, key, value + noise)), strict=True):
        assert side == pytest.approx([(other[:, :, 64:] - exact).square().mean().item()], rel=1e-4)
    assert energy == pytest.approx(exact.square().mean().item(), rel=1e-5)
    assert output_errors(query, 0.25, (key, value), [(key + noise, value + noise)], recent=128)[0] == [[0.0], [0.0]]


def test_padding_is_no_part_of_it():
    source = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 200, 16, generator=source) for heads in (4, 2, 2))
    held = [(key + 0.1, value * 1.1)]
    valid = torch.arange(200)[None] >= 50
    for x in (key, value, *held[0]):
        x[:, :, :50] = 1e3
    with_padding = output_errors(query, 0.25, (key, value), held, 8, valid)
    for x in (key, value, *held[0]):
        x[:, :, :50] = -7
    assert with_padding == output_errors(query, 0.25, (key, value), held, 8, valid)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n"])
def test_full_attention_layers_have_formats_within_the_budget(name):
    network = model(name)
    format = bits_by_layer(network, IDS[None, :200], bits=2.5)
    assert len(format.formats) == len(by_layer(network.config)) and all(isinstance(x, HadaQuant) for x in format.formats)
    assert sum(x.key_bits + x.value_bits for x in format.formats) <= 5 * len(format.formats)
    assert plan(network.config, format=format, context=300).request.total


def test_padded_prompts_have_the_bits_of_the_prompt_alone():
    network, ids = model("llama"), IDS[None, :200]
    padded, mask = torch.cat([ids.new_zeros(1, 60), ids], 1), torch.ones(1, 260, dtype=torch.int64)
    mask[:, :60] = 0
    alone = bits_by_layer(network, ids, bits=2.5)
    assert bits_by_layer(network, padded, bits=2.5, attention_mask=mask) == alone


def test_the_choice_is_closer_than_one_format_in_the_same_bytes():
    """The embedded model, whose last layer's keys cause half of the divergence."""
    network, tokenizer = demo.load()
    ids = torch.tensor(demo.text_ids(tokenizer))[3000:3600][None]
    passages = Passages.read(network, ids, 500)

    def kl(format) -> float:
        return divergence(network, passages, lambda: CompressedCache(network.config, format=format)).kl

    format = bits_by_layer(network, ids[:, :500], bits=3)
    assert format.bytes_per_token(64) <= HadaQuant(3, 3).bytes_per_token(64)
    assert kl(format) < 0.85 * kl(HadaQuant(3, 3)) and kl(format) < 0.85 * kl(HadaQuant(4, 2))


def test_outlying_keys_take_int8(monkeypatch, tmp_path):
    monkeypatch.setattr("qkvcache.evaluation.bits_by_layer.FAR", 0.0)
    network = model("llama")
    format = bits_by_layer(network, IDS[None, :200], bits=2)
    assert format == FormatByLayer((Int8Keys(HadaQuant(2, 2)),) * len(format.formats))
    cache = CompressedCache(network.config, format=format)
    with torch.no_grad():
        for part in IDS[None, :202].split([200, 2], dim=1):
            network(part, **passing(cache))
    cache.save(tmp_path / "cache")
    again = CompressedCache.load(tmp_path / "cache", network.config)
    assert again.format == format and torch.equal(again.layers[0].dense()[0], cache.layers[0].dense()[0])


def test_what_it_cannot_read_is_refused():
    network, ids = model("llama"), IDS[None, :200]
    with pytest.raises(ValueError, match=r"bits=5"):
        bits_by_layer(network, ids, bits=5)
    with pytest.raises(TypeError, match="must be a number"):
        bits_by_layer(network, ids, bits="3")
    with pytest.raises(ValueError, match="context=60: must be more than"):
        bits_by_layer(network, ids[:, :60])
