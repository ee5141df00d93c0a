"""Models that have layers other than full attention, beside it or alone."""

import functools
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from qkvcache import CompressedCache, H2OCache, SinkCache
from qkvcache.policies import H2O
from tests.matrix import _TINY, covering
from tests.reference import Mode, assert_close, forward
from tests.seeds import SEED
from tests.tolerance import TURNED, of_model

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
ORDERS = {"full first": (FULL, SPARSE, FULL, SPARSE), "sparse first": (SPARSE, FULL, SPARSE, FULL)}
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "identity": functools.partial(CompressedCache, format="identity"),
    "preallocated": functools.partial(CompressedCache, format="identity", max_length=40),
    "int8": functools.partial(CompressedCache, format="int8", num_sink_tokens=0),
    "h2o": functools.partial(H2OCache, budget=12),
    "sinks": functools.partial(SinkCache, window_length=8, positions="original"),
}


@functools.lru_cache
def sparse_beside_full(order: str, attention: str):
    """A MiniMax-M3, whose sparse layers read all keys of its few tokens."""
    pytest.importorskip("transformers.models.minimax_m3_vl")
    layers, experts = ORDERS[order], {"num_local_experts": 4, "num_experts_per_tok": 2}
    index = {"index_n_heads": 2, "index_head_dim": 32, "index_block_size": 128}
    size = {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    config = AutoConfig.for_model("minimax_m3_vl_text", **_TINY | size | experts | index)
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize(("order", "attention", "kind"), covering(ORDERS, ["sdpa", "eager"], CACHES, strength=1))
def test_a_padded_row_is_the_row_alone(order, attention, kind):
    """The mask of a step, which all layers share, has columns for what the layer holds that holds most."""
    network, end = sparse_beside_full(order, attention), 0
    ids, mask = Mode((0, 7), (24, 1, 1, 3, 1)).inputs()
    padded, alone = (CACHES[kind](network.config) for _ in range(2))
    for size in (24, 1, 1, 3, 1):
        begin, end = end, end + size
        got = forward(network, padded, ids, mask, begin, end)
        expected = forward(network, alone, ids[1:, 7:], mask[1:, 7:], max(begin - 7, 0), end - 7)
        assert_close(got[-len(expected) :], expected, of_model(network) if kind != "int8" else TURNED)


@pytest.mark.parametrize("options", [{"max_length": 64, "policy": H2O(budget=12)}, {"compile": True}])
def test_fixed_sizes_beside_other_layers_are_refused(options):
    config = sparse_beside_full("full first", "sdpa").config
    name = next(iter(options))
    with pytest.raises(NotImplementedError, match=rf"{name}.*layer 1: MiniMaxM3VLSparseStaticCacheLayer.*leave out {name}"):
        CompressedCache(config, format="int8", **options)


def test_the_warning_names_what_the_layers_are():
    config = AutoConfig.for_model("recurrent_gemma")
    says = r"no layer of this model has full attention, but \w+SlidingWindow\w*.*: nothing will be compressed"
    with pytest.warns(UserWarning, match=f"{says}$"):
        CompressedCache(config, format="int8")
    with pytest.warns(UserWarning, match=f"{says} and no token evicted$"):
        H2OCache(config, budget=16)


def test_layers_without_a_static_cache_are_refused():
    """DeepSeek-V4 tells transformers of its layers when its model is imported, and of no static ones."""
    pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = AutoConfig.for_model("deepseek_v4")
    with pytest.warns(UserWarning, match="nothing will be compressed"):
        cache = CompressedCache(config, format="int8")
    assert len(cache.layers) == config.num_hidden_layers
    says = "no such cache for layers of deepseek_v4 of type 'heavily_compressed_attention': leave out max_length"
    with pytest.raises(NotImplementedError, match=re.escape(says)):
        CompressedCache(config, format="int8", max_length=64)
