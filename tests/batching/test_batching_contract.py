"""Tests of the behavior of transformers' continuous batching on which compressed pages rely."""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from families_models import build

from qkvcache import continuous_batching, formats
from qkvcache.batching.context import check_config
from qkvcache.releases import LAST_TESTED
from tests.matrix import MODELS, UNSUPPORTED, model
from tests.releases import BATCHING

if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)

from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler, group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import Scheduler

from qkvcache.batching.transformers import OVERRIDDEN, CompressedManager, CompressedPagedCache, release

from .requests import ZONES, answers, assert_same, greedy, pool, prompts, serving, single

pytestmark = pytest.mark.contract
manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
CALLED = {
    transformers.GenerationMixin.init_continuous_batching: "generation_config continuous_batching_config workload_hints",
    manager.__init__: "model generation_config continuous_batching_config workload_hints",
    processor.__init__: (
        "cache config generation_config continuous_batching_config logit_processor input_queue cancel_queue output_router "
        "background_thread_status model_device model_dtype scheduler distributed_helper"
    ),
    processor._handle_request_error: "error state",
    Scheduler.__init__: "cache safety_margin max_requests_per_batch",
    Scheduler.add_waiting_request: "state",
    Scheduler._get_waiting_candidates: "",
    Scheduler._infer_request_tokens: "state request_ids_to_remove_from_waiting",
    Scheduler.clear_cancelled_requests: "",
    Scheduler.finish_request: "request_id",
    ContinuousBatchingLogitsProcessorList.check_kwargs: "kwargs",
    PagedAttentionMemoryHandler.__init__: (
        "config cb_config dtype bytes_per_sector tokens_per_sector bytes_per_block attn_types model_supports_logits_to_keep kv_tp_size"
    ),
    PagedAttentionCache.__init__: "config continuous_batching_config device distributed_helper dtype model_supports_logits_to_keep",
    FullAttentionCacheAllocator._before_cache_tensor_init: "index layer_indices tokens_per_page bytes_per_page allow_block_sharing",
    FullAttentionCacheAllocator._after_cache_tensor_init: "non_trash_bytes bytes_per_sector cache_tensor pool",
    FullAttentionCacheAllocator.get_bytes_per_page: "num_key_value_heads head_dim cache_dtype page_size",
    FullAttentionCacheAllocator.acquire_prefix_blocks: "request_id prefix_len block_ids",
    FullAttentionCacheAllocator.mark_complete_blocks: "request_id token_ids new_new_blocks",
    BlockLedger.release: "block_id no_cache",
    CachePool.free_blocks: "index block_ids",
    group_layers_by_attn_type: "config",
    CachePool.__init__: "num_sectors num_allocators num_reserved_sectors",
    update_cb_config_after_cache_creation: "cb_config num_blocks max_batch_tokens",
}
"""The parameters of functions that are called."""


@pytest.mark.parametrize("function", CALLED, ids=lambda function: function.__qualname__)
def test_parameters(function):
    assert [name for name in inspect.signature(function).parameters if name != "self"] == CALLED[function].split()


def test_the_manager_adds_requests_as_that_of_transformers():
    for name, last in (("add_request", "eos_token_id"), ("add_requests", "max_new_tokens")):
        ours, stock = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (CompressedManager, manager))
        assert ours[: ours.index(last) + 1] == stock[: stock.index(last) + 1] and stock[-1] == "logit_processor_kwargs"


def test_changed_parameters_are_refused():
    """With the release that is installed, those that are supported, and the difference."""
    assert len(OVERRIDDEN) > 15
    says = rf"from 5.24 on, .* up to {LAST_TESTED}; {re.escape(transformers.__version__)} differs.*takes \['self', 'request_id'\], not"
    with pytest.raises(NotImplementedError, match=says):
        release.check_parameters({Scheduler.finish_request: ["self", "request_id", "reason"]})


def test_one_folder_knows_continuous_batching():
    """The server has its own contract test: it is a subclass of transformers' server."""
    from tests.test_house import FILES, imports

    stock = "transformers.generation.continuous_batching"
    knowing = [name for name in FILES if any(found.startswith(stock) for found in imports(name))]
    assert {name.rpartition("/")[0] for name in knowing} == {"batching/transformers"}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_served_or_refused(name):
    """Before anything is changed."""
    network = model(name, "eager" if (name, "sdpa") in UNSUPPORTED else "sdpa")
    served = {"llama", "qwen3", "phi3", "gpt2", "gemma2", "gemma3", "gpt_oss", "mistral"}
    if name not in served:
        says = "has (linear_attention|hybrid) layers: .*no allocator|MLA.: .* cannot store|shares keys|of several sizes"
        with pytest.raises(NotImplementedError, match=says):
            continuous_batching(network)
        assert "init_continuous_batching" not in network.__dict__
        return
    with continuous_batching(network, "int8", residual_length=4), serving(network, new=4, max_batch_tokens=40) as manager:
        assert [len(tokens) for tokens in answers(manager, prompts(70, 3))] == [4, 4]
    assert network.config._attn_implementation != "qkvcache_pages"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.FalconConfig, "falcon computes attention itself"),
        (transformers.DiffLlamaConfig, "diffllama computes with keys or values"),
        (transformers.Llama4TextConfig, "has chunked_attention layers: .* no allocator"),
        (transformers.BambaConfig, "has linear_attention layers: .* no allocator"),
        (transformers.FalconH1Config, "has hybrid layers: .* no allocator .* attention alone"),
        (transformers.DeepseekV3Config, "latents of 512 channels and rotated keys of 64 .MLA.: .* cannot store them"),
        (transformers.Gemma4TextConfig, "heads of several sizes"),
    ],
)
def test_models_that_are_refused(config, says):
    with pytest.raises(NotImplementedError, match=says):
        check_config(config())


@pytest.mark.parametrize("name", ["bart", "bigbird_pegasus"])
def test_models_that_take_no_positions_are_refused(name):
    """They would take the position of each request from the length of the cache."""
    with pytest.raises(NotImplementedError, match="ForCausalLM counts positions from the length of its cache"):
        continuous_batching(build(name), "int8")


def test_a_layer_that_stores_nothing_ends_the_batch(monkeypatch):
    """Its answers would be those of the new tokens alone."""
    network = model("llama")
    monkeypatch.setattr(network.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with continuous_batching(network, "identity"):
        (output,) = network.generate_batch(prompts(20), generation_config=greedy(4), continuous_batching_config=pool()).values()
    assert re.search(r"LlamaForCausalLM: layers \[1\] stored nothing", output.error)


@pytest.mark.parametrize("config", [transformers.GPTNeoXConfig, functools.partial(transformers.BertConfig, is_decoder=True)])
def test_models_that_transformers_pages_do_not_fit(config):
    """Those that pass no keywords to `update`, and those that ask the cache for its length."""
    network = transformers.AutoModelForCausalLM.from_config(
        config(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2)
    ).eval()
    with continuous_batching(network, "identity", **ZONES), serving(network, new=4) as manager:
        got = answers(manager, prompts(70, 9))
    for one, tokens in zip(prompts(70, 9), got, strict=True):
        assert_same(tokens, single(network, one, None, new=4, cache=transformers.DynamicCache()))


@pytest.mark.parametrize("change", [lambda x: x.transpose(1, 2), lambda x: torch.cat([x, x], dim=1), lambda x: x.repeat(1, 2, 1, 1)])
def test_a_model_that_changes_its_keys_is_refused(change):
    """Pages would hold others than those it attends to."""
    key, _ = CompressedPagedCache.update(SimpleNamespace(store=None), *torch.zeros(2, 1, 2, 3, 8), 0)
    assert key.shape == (1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="after it passed them to the cache"):
        change(key)


def test_arguments_are_refused_where_they_are_given(tmp_path):
    network = model("llama")
    for error, options in (
        (ValueError, {"format": "int9"}),
        (ValueError, {"residual_length": -1}),
        (TypeError, {"num_sink_tokens": 1.5}),
        (ValueError, {"attention_budget": 0}),
        (TypeError, {"statistics": 3}),
        (ValueError, {"statistics": tmp_path / "nothing"}),
        (NotImplementedError, {"format": [formats.Int8(), formats.Identity(), formats.Int8()]}),
        (NotImplementedError, {"attention_budget": 64, "offload_pages": True}),
    ):
        with pytest.raises(error):
            continuous_batching(network, **options)
    with pytest.raises(TypeError, match="must be a transformers model"):
        continuous_batching(network.config)
    with continuous_batching(network), pytest.raises(ValueError, match="already"):
        continuous_batching(network)
    assert "init_continuous_batching" not in network.__dict__
    with continuous_batching(network, "int8"), pytest.raises(ValueError, match="page_size=100"):
        network.init_continuous_batching(continuous_batching_config=pool(page_size=100)).warmup()
    assert network.config._attn_implementation == "sdpa"


def test_statistics_are_kept_and_fit_one_model_and_format(tmp_path):
    network, ids, path = model("llama"), prompts(30, 20), tmp_path / "statistics.safetensors"
    with continuous_batching(network, "int8", residual_length=0) as batching, serving(network, new=4) as manager:
        with pytest.raises(ValueError, match="no statistics yet"):
            batching.statistics.save(path)
        first = answers(manager, ids)
        batching.statistics.save(path)
        assert answers(manager, ids) == first
    with continuous_batching(network, "int8", residual_length=0, statistics=path), serving(network, new=4) as manager:
        assert answers(manager, ids) == first
    with pytest.raises(ValueError, match="of format 'int8'"):
        continuous_batching(network, "int4", statistics=path)
    with continuous_batching(model("qwen3"), "int8", statistics=path), pytest.raises(ValueError, match="another model"):
        model("qwen3").init_continuous_batching().warmup()
