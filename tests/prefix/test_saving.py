"""Caches that change hands: pickled, as files, from another library's cache."""

import copy
import io
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from qkvcache import CompressedCache, TurboQuantCache, formats, policies
from qkvcache.releases import passing
from tests.evict.matrix import POLICIES
from tests.matrix import covering, model
from tests.prefix.made import ZONES, flipped, rewrite

KINDS = {
    "growing": {"format": "turboquant_4bit_nc"},
    "preallocated": {"format": "int8", "max_length": 200},
    "compiled": {"format": "int8", "compile": True},
    "by layer": {"format": [formats.Int8(), "hadaquant_k3v2", "fp8"], "skip_layers": (-1,)},
    "budget": {"format": "int8", "attention_budget": 64},
    "offloaded pages": {"format": "int8", "attention_budget": 64, "offload_pages": True},
    "evicting": {"format": "int8", "policy": POLICIES["h2o"](40)},
    "evicting_preallocated": {"format": "int8", "policy": POLICIES["h2o"](40), "max_length": 200},
    "keydiff": {"format": "int8", "policy": POLICIES["keydiff"](40)},
    "pages of heads": {"format": "int8", "policy": policies.AdaKV(policies.SnapKV(budget=40, recent=8, window_size=8))},
}
SEEN = ("growing", "preallocated", "compiled", "budget", "offloaded pages", "keydiff")
"""Kinds that need nothing but keys and values of a prompt."""
MODELS = ["llama", "gemma3", "falcon_h1", "deepseek_v3", "gemma4"]
IDS = torch.randint(3, 60, (2, 120), generator=torch.Generator().manual_seed(1))


def made(architecture: str, name: str, kind=CompressedCache) -> CompressedCache:
    """Skips the combinations that the cache refuses."""
    options = dict(KINDS[name])
    config = model(architecture).config
    if name == "by layer":
        count = sum(layer.__class__.__name__ in ("CompressedLayer", "HybridLayer") for layer in kind(config, format="int8").layers)
        options["format"] = [options["format"][i % 3] for i in range(count)]
        options["skip_layers"] = ()
    try:
        return kind(config, **ZONES, **options)
    except (NotImplementedError, ValueError) as reason:
        pytest.skip(str(reason))


@torch.no_grad()
def read(cache, ids: torch.Tensor, architecture: str, **options) -> torch.Tensor:
    return model(architecture)(ids, **passing(cache), **options).logits


def filled(architecture: str, name: str) -> CompressedCache:
    cache = made(architecture, name)
    for tokens in (100, 1, 1):
        read(cache, IDS[:, :tokens], architecture)
    return cache


def same(one, other, architecture: str) -> None:
    """Both go on alike, and evict alike: every answer is the same, but for the order in which a ring is summed."""
    for tokens in (1, 5, 1, 1):
        assert_close(read(one, IDS[:, :tokens], architecture), read(other, IDS[:, :tokens], architecture), rtol=1e-4, atol=1e-4)


def by_torch(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    assert len(file.getvalue()) < 1.1 * cache.nbytes + 40_000  # each slab once, and what pickle says of classes
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize(("architecture", "name"), covering(["llama", "gemma3", "falcon_h1"], KINDS, strength=1))
def test_a_copy_of_a_cache_goes_on_alike(architecture, name):
    cache = filled(architecture, name)
    for copied in (by_torch(cache), pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        same(copied, copy.deepcopy(cache), architecture)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_cache_on_a_gpu_changes_hands(name, tmp_path):
    """By `torch.save`, as a file, and from a dense cache, with kernels."""
    network, ids = copy.deepcopy(model("llama")).cuda(), IDS.cuda()

    @torch.no_grad()
    def answers(cache, begin: int = 100) -> list[torch.Tensor]:
        cuts = [(begin, begin + 1), (begin + 1, begin + 6), (begin + 6, begin + 7)]
        return [network(ids[:, first:last], **passing(cache)).logits for first, last in cuts]

    cache = made("llama", name)
    with torch.no_grad():
        network(ids[:, :100], **passing(cache))
    others = [by_torch(cache)]
    if name != "evicting_preallocated":
        cache.save(tmp_path / "cache")
        others.append(CompressedCache.load(tmp_path / "cache", network.config, device="cuda"))
    if name in SEEN:
        source = DynamicCache(config=network.config)
        with torch.no_grad():
            network(ids[:, :100], **passing(source))
        others.append(CompressedCache.from_cache(source, network.config, **ZONES, **KINDS[name]))
    expected = answers(cache)
    for other in others:
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(answers(other), expected, strict=True))


REFUSED = "a preallocated|StaticSlidingLayer"


@pytest.mark.parametrize(("architecture", "name"), covering(MODELS, KINDS, strength=1))
def test_a_saved_cache_goes_on_alike(architecture, name, tmp_path):
    cache = filled(architecture, name)
    if name == "evicting_preallocated" or (name in ("preallocated", "compiled") and architecture in ("gemma3", "gemma4")):
        with pytest.raises(NotImplementedError, match=rf"save of layer \d+: .*({REFUSED}).*torch\.save"):
            cache.save(tmp_path / "cache")
        assert not list(tmp_path.iterdir())
        return
    cache.save(tmp_path / "cache")
    other = CompressedCache.load(tmp_path / "cache", model(architecture).config)
    assert (tmp_path / "cache").stat().st_size < 1.1 * cache.nbytes + 20_000
    assert type(other.policy) is type(cache.policy) and repr(other).split("tokens")[0] == repr(cache).split("tokens")[0]
    same(other, cache, architecture)


def test_an_empty_cache_and_one_of_a_subclass_are_saved(tmp_path):
    config = model("llama").config
    cache = TurboQuantCache(config, preset="3bit_nc", boundary_layers=1)
    cache.save(tmp_path / "empty")
    other = CompressedCache.load(str(tmp_path / "empty"), config)
    assert other.get_seq_length() == 0 and other.format == cache.format
    same(other, cache, "llama")


class Own(policies.KeyDiff):
    """A policy of a user."""


def test_options_of_other_libraries_are_not_saved(tmp_path):
    config = model("llama").config
    for policy in (POLICIES["custom"](40), Own(budget=40)):
        with pytest.raises(NotImplementedError, match=r"save of policy=.*torch\.save"):
            CompressedCache(config, policy=policy).save(tmp_path / "cache")
    with pytest.raises(NotImplementedError, match="without a config"):
        CompressedCache(format="int8").save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def other_options(tensors, data) -> None:
    data["header"] = data["header"].replace("true", "false", 1)


DAMAGES = {
    "flipped": (lambda path: path.write_bytes(flipped(path.read_bytes())), "contents of layer"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated or damaged"),
    "empty": (lambda path: path.write_bytes(b""), "truncated or damaged"),
    "pickle": (lambda path: torch.save({}, path), "truncated or damaged"),
    "foreign": (lambda path: save_file({"x": torch.ones(1)}, path), "it is no saved cache"),
    "version": (lambda path: rewrite(path, lambda tensors, data: data.update(qkvcache_cache="99")), "version 99.*upgrade"),
    "options": (lambda path: rewrite(path, other_options), "header was changed"),
    "missing": (lambda path: rewrite(path, lambda tensors, data: tensors.pop("1.key.residual")), "layer 1 were changed"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "no regular file"),
    "fifo": (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_of_a_cache_is_refused(damage, tmp_path):
    path, (change, says) = tmp_path / "cache", DAMAGES[damage]
    filled("llama", "growing").save(path)
    change(path)
    with pytest.raises(ValueError, match=f"is refused: .*{says}"):
        CompressedCache.load(path, model("llama").config)


def test_a_file_of_another_model_is_refused(tmp_path):
    filled("llama", "growing").save(tmp_path / "cache")
    config = copy.deepcopy(model("llama").config)
    config.hidden_size *= 2
    with pytest.raises(ValueError, match="is refused: it is of a model with hidden_size=.*, and the config has"):
        CompressedCache.load(tmp_path / "cache", config)
    with pytest.raises(ValueError, match="model_type='llama', and the config has 'gemma3_text'"):
        CompressedCache.load(tmp_path / "cache", model("gemma3").config)
    with pytest.raises(ValueError, match="2 devices for"):
        CompressedCache.load(tmp_path / "cache", model("llama").config, device=["cpu"] * 2)
    with pytest.raises(FileNotFoundError):
        CompressedCache.load(tmp_path / "none", model("llama").config)


# From a cache of transformers.


@pytest.mark.parametrize(("architecture", "name"), covering([*MODELS, "qwen3_next"], SEEN, strength=1))
def test_a_converted_cache_goes_on_as_one_that_read(architecture, name):
    if name in ("preallocated", "compiled") and architecture in ("gemma3", "gemma4"):
        pytest.skip("the window has slid")
    for padding in (0, 40)[: 2 - (architecture == "deepseek_v3")]:  # a prompt of latents does not tell its padding
        cache, source = made(architecture, name), DynamicCache(config=model(architecture).config)
        mask = torch.ones(2, 100, dtype=torch.long)
        mask[0, :padding] = 0
        for each in (cache, source):
            read(each, IDS[:, :100], architecture, attention_mask=mask)
        dense = [x for layer in source.layers if getattr(layer, "keys", None) is not None for x in (layer.keys, layer.values)]
        before = [x.clone() for x in dense]
        other = CompressedCache.from_cache(source, model(architecture).config, attention_mask=mask, **ZONES, **KINDS[name])
        assert all(map(torch.equal, before, dense))
        assert other.nbytes <= cache.nbytes and other.get_seq_length() == 100  # windows are views of the prompt before the next step
        for tokens in (1, 1, 5, 1):
            mask = torch.nn.functional.pad(mask, (0, tokens), value=1)
            answers = [read(each, IDS[:, :tokens], architecture, attention_mask=mask) for each in (other, cache)]
            assert torch.equal(*answers)


def test_windows_are_taken_from_a_cache_without_a_config():
    """Which holds all tokens in each layer."""
    config, source, cache = model("gemma3").config, DynamicCache(), made("gemma3", "growing")
    read(source, IDS[:, :100], "gemma3")
    read(cache, IDS[:, :100], "gemma3")
    same(CompressedCache.from_cache(source, config, **ZONES, **KINDS["growing"]), cache, "gemma3")


def converted(source, architecture: str = "llama", **options):
    return TurboQuantCache.from_cache(source, model(architecture).config, **options)


def test_what_cannot_be_converted_is_refused():
    config = model("llama").config
    source = DynamicCache(config=config)
    read(source, IDS, "llama")
    assert type(converted(source, preset="3bit_nc")) is TurboQuantCache
    for policy in ("h2o", "tova", "snapkv", "expected_attention", "custom"):
        with pytest.raises(NotImplementedError, match="ranks tokens by attention .*keydiff"):
            converted(source, policy=POLICIES[policy](40))
    with pytest.raises(ValueError, match=r"attention_mask \[2, 7\] for a cache of 2 rows and 120 tokens"):
        converted(source, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="max_length=50"):
        converted(source, max_length=50)
    with pytest.raises(ValueError, match=r"layers for a model of"):
        converted(source, "falcon_h1")
    with pytest.raises(NotImplementedError, match="layer 0, a CompressedLayer: pass a DynamicCache"):
        converted(filled("llama", "growing"))
    with pytest.raises(NotImplementedError, match="layer 0, a StaticLayer: pass a DynamicCache"):
        converted(StaticCache(config, 20))
    with pytest.raises(TypeError, match="self_attention_cache"):
        converted(EncoderDecoderCache(source, DynamicCache()))
    with pytest.raises(TypeError, match="of a tuple"):
        converted(())
