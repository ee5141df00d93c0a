"""Models spread by accelerate or tensor parallelism, and layers that leave their device."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import parse
from torch import Tensor

from qkvcache import CompressedCache, TurboQuantCache
from qkvcache.layers.compressed import CompressedLayer
from tests.caches import tensor_parallel
from tests.matrix import CACHES, COVER, FORMATS, THREE, model, slowly
from tests.processes import ranks
from tests.reference import ZONES, assert_close, count_decoded_layers, prompt, run
from tests.tolerance import of_model

ZONE = ZONES["zones"]


def filled(format: str, rows: int = 2) -> CompressedLayer:
    layer = CompressedLayer(FORMATS[format], **ZONE)
    layer.update(torch.randn(rows, 2, 40, 32), torch.randn(rows, 2, 40, 32))
    return layer


@pytest.mark.parametrize("format", COVER)
def test_offload_asks_every_tensor_to_leave(format, monkeypatch):
    layer = filled(format)
    table = layer.storage.tokens.table  # which is made anew: it says where the others are
    expected = {x.untyped_storage().data_ptr() for _, x in layer.tensors() if x is not table}
    left, stock = set(), Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda x, device, **options: (left.add(x.untyped_storage().data_ptr()), stock(x, device, **options))[1]
    )
    layer.offload()
    assert left == expected


class Moving(CompressedCache):
    """Offloads its layers when transformers' Cache does, which asks for streams of a GPU."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        self.layers[(layer_idx + 1) % len(self.layers)].prefetch()
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.layers[layer_idx].offload()
        return result


@pytest.mark.parametrize("format", THREE)
def test_offloaded_layers_compute_statistics_without_padding(format, monkeypatch):
    network, left, stock = model("llama"), [], CompressedLayer._move
    options = {"inputs": prompt(2), "max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    expected = run(network, CompressedCache(network.config, format=FORMATS[format], **ZONE), **options)
    monkeypatch.setattr(CompressedLayer, "_move", lambda layer, *to: (left.append(layer), stock(layer, *to))[1])
    cache = Moving(network.config, format=FORMATS[format], **ZONE)
    got = run(network, cache, **options)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
    # Eight forward passes offload each layer, the prompt's among them, and prefetch it but for the first time.
    assert [left.count(layer) for layer in cache.layers] == [8 + 8, *[8 + 7] * (len(cache.layers) - 1)]


@pytest.mark.parametrize("cache", slowly(CACHES, ["fp8", "turboquant_3bit", "by_layer"]))
def test_accelerate_hooks_on_every_module(cache):
    accelerate = pytest.importorskip("accelerate")
    network = model("llama")
    expected = run(network, CACHES[cache](network.config, **ZONE), prompt(2))
    for module in network.modules():
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True))
    try:
        got = run(network, CACHES[cache](network.config, **ZONE), prompt(2))
    finally:
        accelerate.hooks.remove_hook_from_submodules(network)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3n"])
def test_accelerate_dispatch(name):
    accelerate = pytest.importorskip("accelerate")
    if name == "gemma3n" and parse(transformers.__version__) < parse("5.20"):
        pytest.skip("transformers loses shared keys under accelerate before 5.20")
    network = copy.deepcopy(model(name))
    expected = run(network, TurboQuantCache(network.config, **ZONE))
    dispatched = accelerate.dispatch_model(network, {"": "cpu"}, main_device="cpu", force_hooks=True)
    with count_decoded_layers() as dense:  # hooks move the handles that gemma3n's layers share
        got = run(dispatched, TurboQuantCache(network.config, **ZONE))
    assert torch.equal(got, expected)
    assert not dense


def test_tensor_parallelism(tmp_path):
    """Two gloo processes, each with one of two KV heads, equal one process."""
    checkpoint = tmp_path / "model"
    model("llama").save_pretrained(checkpoint)
    script = Path(__file__).with_name("tensor_parallel.py")
    programs = ranks(script, [checkpoint, tmp_path / "two", "auto"], 2)
    tensor_parallel.main(str(checkpoint), str(tmp_path / "one"), None)
    for program in programs:
        program.result()
    one, two = (torch.load(tmp_path / name) for name in ("one", "two"))
    assert (one["identity heads"], two["identity heads"]) == (2, 1)
    assert_close(two["identity"], one["identity"], of_model(model("llama")))
    # Sums in another order may turn a code; a head that lacks its neighbour's half of the layer would be off by far more.
    assert_close(two["turboquant_4bit_nc"], one["turboquant_4bit_nc"], 1e-2)
