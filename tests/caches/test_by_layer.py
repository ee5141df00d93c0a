"""Caches with a format for each layer: each layer holds what it holds in a cache of that format alone."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from qkvcache import CompressedCache, H2OCache, SinkCache, attach, policies
from qkvcache.formats import FormatByLayer, Identity
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import MODELS, by_layer, model
from tests.reference import ZONES, prompt, run

ZONE = ZONES["zones"]
ODD = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=400, head_dim=100)
LLAMA = by_layer(MODELS["llama"]())


@pytest.mark.parametrize("options", [{}, {"policy": policies.KeyDiff(budget=20)}, {"max_length": 70}], ids=["all", "evicting", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma3n"])
def test_each_layer_stores_as_in_a_cache_of_its_format_alone(name, options):
    if name == "gemma3n" and options:
        pytest.skip("layers that share keys")
    config = MODELS[name]()
    formats = by_layer(config)
    mixed = CompressedCache(config, format=formats, **ZONE, **options)
    alone = {format: CompressedCache(config, format=format, **ZONE, **options) for format in formats}
    full = [i for i, layer in enumerate(mixed.layers) if isinstance(layer, CompressedLayer)]
    assert [mixed.layers[i].format for i in full] == formats and len(set(formats)) > 1
    torch.manual_seed(0)
    for tokens in (30, 1, 5, 1):
        for i, format in zip(full, formats, strict=True):
            new = torch.randn(2, 2, tokens, 32)
            for layer in (mixed.layers[i], alone[format].layers[i]):
                layer.update(new, new)
                if options.get("policy"):
                    layer.begin_attention(None)
                    layer.end_attention(None)
    for i, format in zip(full, formats, strict=True):
        for ours, theirs in zip(mixed.layers[i].dense(), alone[format].layers[i].dense(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_repr_and_memory_speak_of_all():
    config = MODELS["llama"]()
    cache = CompressedCache(config, format=LLAMA, **ZONE)
    run(model("llama"), cache)
    assert "format=1 hadaquant_k3v2 + 1 fp8_token + 1 turboquant_k8v4_uncentered" in repr(cache) and "3 of 3 compressed" in repr(cache)
    memory = cache.memory()
    assert memory.total == cache.nbytes and memory.codes == sum(
        x.nbytes for layer in cache.layers for role, x in layer.tensors() if role == "codes"
    )
    assert cache.format == FormatByLayer(tuple(LLAMA))


def test_a_calibration_file_in_every_place_that_takes_a_format(tmp_path):
    path, network = tmp_path / "calibrated.json", model("llama")
    FormatByLayer(tuple(LLAMA)).save(path)
    expected = run(network, CompressedCache(network.config, format=LLAMA, **ZONE))
    with attach(network, lambda config: CompressedCache(config, format=str(path), **ZONE)):
        assert torch.equal(run(network, None), expected)
    options = {"format": path, "num_sink_tokens": 2}
    for cache in (
        SinkCache(network.config, window_length=20, positions="original", **options),
        H2OCache(network.config, budget=20, **options),
    ):
        assert [layer.format for layer in cache.layers] == LLAMA
        assert run(network, cache).shape == expected.shape and cache.stored_length() <= 22


def test_layers_that_are_skipped_have_a_place_in_the_sequence():
    config = MODELS["llama"]()
    cache = CompressedCache(config, format=LLAMA, skip_layers=(1,), policy=policies.KeyDiff(budget=[20, 30], recent=3))
    assert [layer.format for layer in cache.layers] == [LLAMA[0], Identity(), LLAMA[2]]
    assert [layer.budget.tokens for layer in (cache.layers[0], cache.layers[2])] == [20, 30]
    mixed = CompressedCache(config, format=["identity", *LLAMA[1:]], **ZONE)
    run(model("llama"), mixed)
    dense = DynamicCache(config=config)
    run(model("llama"), dense, prompt())
    assert mixed.nbytes < mixed.memory().dense


@pytest.mark.parametrize(
    ("args", "format", "says"),
    [
        ((MODELS["llama"](),), LLAMA[:2], "2 formats for 3 full-attention layers"),
        ((MODELS["gemma3"](),), LLAMA, "3 formats for 2 full-attention layers"),
        ((), LLAMA, "3 formats by layer need the config"),
        ((ODD,), ["int8", "nvfp4"], "format 'nvfp4' cannot hold keys of head_dim 100"),
        ((MODELS["llama"](),), ["int8", "int8", "int9"], "'int9' is unknown"),
    ],
)
def test_what_is_refused(args, format, says):
    with pytest.raises(ValueError, match=says):
        CompressedCache(*args, format=format)


def test_the_warning_of_biased_keys_names_the_layers_format():
    cache = CompressedCache(MODELS["llama"](), format=LLAMA)
    new = torch.randn(1, 2, 40, 32) + 100
    cache.update(new, new, 0)
    with pytest.warns(UserWarning, match=r"format='turboquant_k8v4_uncentered'.*layer 2"):
        for _ in range(2):  # no attention tells which tokens of the first step are padding
            cache.update(new, new, 2)
