"""What compressed pages take for granted of transformers' continuous batching; on releases before it, that they are refused."""

from __future__ import annotations

import inspect
import re

import pytest
import transformers
from packaging.version import Version

from qkvcache import continuous_batching, formats
from qkvcache.batching.context import OLDEST, check_config
from tests.matrix import FORMATS, MODELS, UNSUPPORTED, model

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:continuous batching on compressed pages")]
TOO_OLD = Version(transformers.__version__) < Version(OLDEST)
recent = pytest.mark.skipif(TOO_OLD, reason=f"transformers before {OLDEST}")


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.skipif(not TOO_OLD, reason=f"transformers {OLDEST} or later")
def test_older_releases_are_refused():
    with pytest.raises(NotImplementedError, match=f"need {OLDEST} or later"):
        continuous_batching(model("llama"))


@recent
def test_names():
    from transformers.generation.continuous_batching import PagedAttentionCache, RequestState, Scheduler, continuous_api
    from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
    from transformers.generation.continuous_batching.cache_allocators import CacheAllocator, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs, HostDeviceIOPair
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
    assert parameters(manager.__init__) == ["model", "generation_config", "continuous_batching_config", "workload_hints"]
    assert parameters(manager.switch_to_cb_friendly_attn) == ["model", "auto_switch_to_flash"]
    assert parameters(transformers.GenerationMixin.init_continuous_batching) == [
        "generation_config", "continuous_batching_config", "workload_hints",
    ]  # fmt: skip
    assert {"_create_batch_processor", "warmup", "stop", "destroy", "is_running"} <= set(dir(manager))
    assert parameters(processor.__init__) == [
        "cache", "config", "generation_config", "continuous_batching_config", "logit_processor", "input_queue", "cancel_queue",
        "output_router", "background_thread_status", "model_device", "model_dtype", "scheduler", "distributed_helper",
    ]  # fmt: skip
    assert parameters(PagedAttentionCache.__init__) == [
        "config", "continuous_batching_config", "device", "distributed_helper", "dtype", "model_supports_logits_to_keep",
    ]  # fmt: skip
    assert parameters(PagedAttentionMemoryHandler.__init__) == [
        "config", "cb_config", "dtype", "bytes_per_sector", "tokens_per_sector", "bytes_per_block", "attn_types",
        "model_supports_logits_to_keep",
    ]  # fmt: skip
    assert parameters(CacheAllocator._before_cache_tensor_init) == [
        "index", "layer_indices", "tokens_per_page", "bytes_per_page", "allow_block_sharing",
    ]  # fmt: skip
    rows = ["request_id", "past_length", "query_length"]
    assert parameters(FullAttentionCacheAllocator.fill_block_table) == [*rows, "block_table"]
    assert parameters(PagedAttentionCache.extend_read_and_write_indices) == [*rows, "read_index", "write_index"]
    assert parameters(Scheduler.__init__) == ["cache", "safety_margin", "max_requests_per_batch"]
    # What is called when: preemption alone frees without caching, a completed step marks, and a fork copies, through the cache.
    assert "free_blocks(state.request_id, no_cache=True)" in inspect.getsource(OffloadingManager)
    source = inspect.getsource(processor)
    assert "No requests can be scheduled and no requests can be offloaded." in source
    assert "self.cache.mark_complete_blocks(state, future_state.complete_blocks)" in source
    assert "self.cache.perform_cache_copy(" in source
    # Both are made of the same class, and prepared for all requests at once; a request's past is that before the call.
    assert parameters(ContinuousBatchingIOs.prepare_batch_tensors) == [
        "requests_in_batch", "logits_processors", "use_decode_fast_path", "num_q_tokens", "max_kv_read", "use_padding",
    ]  # fmt: skip
    source = inspect.getsource(ContinuousBatchingIOs.prepare_batch_tensors)
    assert "past_length = state.position_offset" in source
    assert "self.cache.extend_read_and_write_indices(" in source and "self.cache.fill_block_table(" in source
    assert "self.host_io = ContinuousBatchingIOs(" in inspect.getsource(HostDeviceIOPair)
    assert parameters(PagedAttentionCache.can_store_request_tokens) == ["state", "request_len", "dry_run"]
    # What our requests are made of, and where they end.
    assert parameters(manager.add_request) == [
        "input_ids", "request_id", "max_new_tokens", "streaming", "record_timestamps", "eos_token_id", "logit_processor_kwargs",
    ]  # fmt: skip
    assert {"input_queue", "_wake_up_loop", "_request_counter", "_request_lock"} <= set(
        re.findall(r"self\.(\w+)", inspect.getsource(manager))
    )
    assert parameters(RequestState.update_and_check_completion) == ["token_id", "logprob"]
    assert "state.position_offset += prefill_length" in inspect.getsource(Scheduler._infer_request_tokens)
    assert parameters(ContinuousBatchingLogitsProcessorList.prepare_tensor_args) == ["requests_in_batch", "arg_storage"]
    assert "def _get_graph_key(self)" in inspect.getsource(ContinuousBatchingIOs)


@recent
@pytest.mark.parametrize("name", MODELS)
def test_models_are_served_or_refused(name):
    """Before anything is changed."""
    network = model(name, "eager" if (name, "sdpa") in UNSUPPORTED else "sdpa")
    served = {"llama", "qwen3", "phi3", "gpt2"}
    if name not in served:
        with pytest.raises(NotImplementedError, match="sliding_attention|linear_attention|latents"):
            continuous_batching(network)
        assert "init_continuous_batching" not in network.__dict__
        return
    from .requests import answers, prompts, serving

    with continuous_batching(network, "int8", residual_length=4), serving(network, new=4, max_batch_tokens=40) as manager:
        assert [len(tokens) for tokens in answers(manager, prompts(70, 3))] == [4, 4]
    assert network.config._attn_implementation == "sdpa"


@recent
def test_models_with_attention_code_of_their_own_are_refused():
    with pytest.raises(NotImplementedError, match="gptj computes attention itself"):
        check_config(transformers.GPTJConfig())


@recent
def test_arguments_are_refused_where_they_are_given(tmp_path):
    network = model("llama")
    for error, options in (
        (ValueError, {"format": "int9"}),
        (ValueError, {"format": FORMATS["fp8_tensor"]}),
        (ValueError, {"residual_length": -1}),
        (TypeError, {"num_sink_tokens": 1.5}),
        (TypeError, {"statistics": 3}),
        (ValueError, {"statistics": tmp_path / "nothing"}),
        (NotImplementedError, {"format": [formats.Int8(), formats.Identity(), formats.Int8()]}),
    ):
        with pytest.raises(error):
            continuous_batching(network, **options)
    with pytest.raises(TypeError, match="must be a transformers model"):
        continuous_batching(network.config)
    with continuous_batching(network), pytest.raises(ValueError, match="already"):
        continuous_batching(network)
    assert "init_continuous_batching" not in network.__dict__
    with continuous_batching(network, "int8"):
        from .requests import pool

        with pytest.raises(ValueError, match="page_size=100"):
            network.init_continuous_batching(continuous_batching_config=pool(page_size=100)).warmup()
    assert network.config._attn_implementation == "sdpa"


@recent
def test_statistics_are_kept_and_fit_one_model_and_format(tmp_path):
    from .requests import answers, prompts, serving

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
