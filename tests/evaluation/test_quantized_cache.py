"""transformers' QuantizedCache is measured as ours: its bytes and its steps. A layer that quantizes as HQQ does stands in where neither
quanto nor HQQ is installed."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, cache_utils

from qkvcache import demo
from qkvcache.caches.memory import live_tensors
from qkvcache.evaluation.quality import at_once, held_bytes


class StandIn(cache_utils.QuantizedLayer):
    """Eight bits a value, and an fp32 scale for each group, in a pair of codes and metadata."""

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, dict]:
        groups = tensor.float().reshape(-1, self.q_group_size)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (groups / scale).round().to(torch.int8), {"scale": scale, "shape": tensor.shape, "dtype": tensor.dtype}

    def _dequantize(self, quantized: tuple[Tensor, dict]) -> Tensor:
        codes, meta = quantized
        return (codes * meta["scale"]).to(meta["dtype"]).reshape(meta["shape"])


@pytest.fixture(scope="module")
def loaded():
    model, tokenizer = demo.load()
    return model, demo.text_ids(tokenizer)


@pytest.fixture(params=["stand-in", "quanto", "hqq"])
def backend(request, monkeypatch):
    """What `QuantizedCache` is made of."""
    if request.param == "stand-in":
        monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", StandIn)
        return "quanto"
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[request.param])
    return request.param


def test_every_live_tensor_of_a_quantized_cache_is_counted_once(backend, loaded):
    config = loaded[0].config
    heads, dim, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    cache = QuantizedCache(backend, config, residual_length=64)
    for tokens in (96, 5):
        for index in range(layers):
            cache.update(*torch.randn(2, 1, heads, tokens, dim, dtype=torch.bfloat16), index)
    values, residual = 96 * heads * dim, 5 * heads * dim
    stand_in = type(cache.layers[0]) is StandIn
    quantized = values + values // 64 * 4 if stand_in else values // 2 + values // 64 * 2 * 2  # a scale, or a scale and a zero in 16 bit
    assert held_bytes(cache) == 2 * layers * (quantized + 2 * residual)


def test_shared_memory_counts_once_and_numbers_do_not():
    whole = torch.zeros(8)
    assert [x.shape for x in live_tensors({"a": (whole, [whole[:2]], 3), "b": None, "c": "codes"})] == [(8,), (2,)]


def test_a_quantized_cache_is_read_token_by_token(backend, loaded):
    cache = QuantizedCache(backend, loaded[0].config)
    assert at_once(cache) == 1 < at_once(DynamicCache(config=loaded[0].config))
