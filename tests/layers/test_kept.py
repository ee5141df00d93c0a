"""What kernels and codecs keep for the process is made when storage is taken: `kernels/tables.py` says why."""

import functools
import gc
import importlib
import sys
import weakref

import pytest
import torch

from qkvcache import CompressedCache
from qkvcache.kernels import attend_on_codes
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.policies import H2O
from qkvcache.releases import passing
from tests.matrix import FORMATS, model
from tests.updates import DIM, HEADS, new

KINDS = ["identity", "int8_asymmetric", "fp8_tensor", "int4_group", "nvfp4", "turboquant_3bit_nc"]


def kept() -> dict[str, int]:
    """How often anything was made that is kept for the process."""
    modules = [module for name, module in sys.modules.items() if name.startswith("qkvcache.")]
    caches = {x for module in modules for x in vars(module).values() if isinstance(x, functools._lru_cache_wrapper)}
    return {f"{x.__module__}.{x.__qualname__}": x.cache_info().misses for x in caches}


KEPT = [(format, "torch") for format in (*KINDS, "nvfp4_mse", "hadaquant_k4v3")]
KEPT += [(format, "triton") for format in ("identity", "nvfp4_mse", "turboquant_3bit_nc")]


@pytest.mark.parametrize(("format", "kernels"), KEPT)
def test_what_is_kept_is_made_before_the_first_step(format, kernels, monkeypatch):
    """A first step in a CUDA graph would have it made in the memory of the graph."""
    pytest.importorskip("triton")
    monkeypatch.setenv("QKVCACHE_KERNELS", kernels)
    for name in (
        "qkvcache.kernels.host.dispatch",
        "qkvcache.kernels.host.tables",
        "qkvcache.kernels.store.triton_dequantize",
        "qkvcache.formats.packing",
    ):
        module = importlib.import_module(name)
        for x in vars(module).values():
            if isinstance(x, functools._lru_cache_wrapper):
                x.cache_clear()
    layer = CompressedLayer(FORMATS[format], 0, 0, 40)
    layer.update(*new(1, 1, dims=(DIM, DIM)))
    before = kept()
    assert before["qkvcache.kernels.host.dispatch.prepare"]
    for _ in range(2):
        key, _ = layer.update(*new(1, 1, dims=(DIM, DIM)))
    attend_on_codes(torch.randn(1, HEADS, 1, DIM), key.attention_inputs)
    layer.dense()
    no_tensors = {
        f"qkvcache.kernels.{name}"
        for name in (
            "attend.launches.architecture",
            "attend.plan._kind",
            "store.triton_store._launcher",
            "host.dispatch.module",
            "store.triton_dequantize.tile",
            "store.triton_dequantize.supports",
        )
    }
    no_tensors |= {f"qkvcache.formats.codebooks.{name}" for name in ("grid_levels", "grid_steps", "midpoints")}
    no_tensors |= {"qkvcache.kernels.segments.names"}
    assert {name for name, count in kept().items() if count != before.get(name, 0)} <= no_tensors


@torch.no_grad()
@pytest.mark.parametrize("policy", [None, H2O(budget=32)], ids=["", "evicts"])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_a_prompt_is_not_kept_alive(format, policy, monkeypatch):
    """Not even as an argument that a launch does not read."""
    pytest.importorskip("triton")
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    network, keys, update = model("llama"), [], CompressedCache.update

    def watched(self, key, value, *args, **kwargs):
        keys.extend([weakref.ref(key), weakref.ref(value)] if key.shape[2] > 1 else [])
        return update(self, key, value, *args, **kwargs)

    monkeypatch.setattr(CompressedCache, "update", watched)
    cache, ids = CompressedCache(network.config, format=format, policy=policy), torch.randint(3, 60, (1, 80))
    for part in (ids, ids[:, :1]):
        network(part, **passing(cache))
    gc.collect()
    assert keys and not any(key() is not None for key in keys)
