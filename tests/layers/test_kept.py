"""What kernels and codecs keep for the process is made when storage is taken: `kernels/tables.py` says why."""

import functools
import importlib
import sys

import pytest
import torch

from qkvcache.kernels import attend_on_codes
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import FORMATS as REGISTRY
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
    for name in ("qkvcache.kernels.dispatch", "qkvcache.kernels.tables", "qkvcache.kernels.triton_dequantize", "qkvcache.formats.packing"):
        module = importlib.import_module(name)
        for x in vars(module).values():
            if isinstance(x, functools._lru_cache_wrapper):
                x.cache_clear()
    layer = CompressedLayer(REGISTRY[format], 0, 0, 40)
    layer.update(*new(1, 1, dims=(DIM, DIM)))
    before = kept()
    assert before["qkvcache.kernels.dispatch.prepare"]
    for _ in range(2):
        key, _ = layer.update(*new(1, 1, dims=(DIM, DIM)))
    attend_on_codes(torch.randn(1, HEADS, 1, DIM), key.attention_inputs)
    layer.dense()
    no_tensors = {
        f"qkvcache.kernels.{name}"
        for name in (
            "fused.architecture",
            "plan._kind",
            "triton_store._storing",
            "dispatch._module",
            "triton_dequantize.tile",
            "triton_dequantize.supports",
        )
    }
    no_tensors |= {f"qkvcache.formats.codebooks.{name}" for name in ("grid_levels", "grid_steps", "midpoints")}
    no_tensors |= {"qkvcache.kernels.segments.names"}
    assert {name for name, count in kept().items() if count != before.get(name, 0)} <= no_tensors
