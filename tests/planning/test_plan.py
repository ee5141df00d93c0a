"""What `plan` answers, and what it refuses."""

import json
import weakref

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qkvcache import formats, plan, policies
from qkvcache.planning import plan_all
from qkvcache.planning.model import activation_bytes, weights_bytes
from qkvcache.planning.plan import in_words
from qkvcache.releases import passing
from tests.evict.matrix import KeyNorm
from tests.matrix import ENCODER_DECODERS, MODELS, model

LLAMA = MODELS["llama"]()
TOKEN = 3 * 2 * 2 * 32 * 2
"""Bytes of a token of LLAMA in bfloat16."""


def test_without_format_and_policy_it_is_a_dynamic_cache():
    found = plan(LLAMA, context=100)
    assert found.bytes_per_request == found.dense == 100 * TOKEN and found.ratio == 1
    assert found.dtype == "bfloat16" and found.name == "dense bfloat16" and found.fits
    for dtype in (torch.float32, "float32"):
        wide = plan(LLAMA, context=100, dtype=dtype)
        assert wide.dense == 2 * found.dense and wide.dtype == "float32"


def test_requests_and_longest_context_are_the_most_that_fit():
    memory = {"gpu_memory": 1e6, "weights_memory": 0.2e6}
    found = plan(LLAMA, format="int4", context=300, batch=3, **memory)
    for requests, fits in ((found.requests, True), (found.requests + 1, False)):
        of = plan(LLAMA, format="int4", context=300, batch=requests, **memory)
        assert of.fits is fits and (of.spare >= 0) is fits
        assert of.spare == 0.8e6 - requests * of.bytes_per_request - of.activations
    longest = found.longest_context
    fits = plan(LLAMA, format="int4", context=longest, batch=3, **memory)
    assert fits.fits and not plan(LLAMA, format="int4", context=longest + 1, batch=3, **memory).fits
    assert fits.bytes_per_gpu == 3 * fits.bytes_per_request <= 0.8e6 - fits.activations


@pytest.mark.parametrize("max_length", [None, 20_000])
def test_pages_in_host_memory_leave_room_on_the_gpu(max_length):
    """The GPU keeps 10 of 38 bytes of each token and head, and blocks for twice the budget."""
    options = {"format": "turboquant_4bit_nc", "context": 20_000, "max_length": max_length, "gpu_memory": 1e9, "weights_memory": 0}
    heads = 3 * 2
    found = plan(LLAMA, **options, attention_budget=1024, offload_pages=True)
    assert found.host / heads == pytest.approx((20_000 - 69) * 38, rel=0.01) and "in host memory" in str(found)
    assert found.spare == 1e9 - found.bytes_per_gpu - found.activations
    beside = 2 * 1024 * 38 + 2 * 69 * 64  # slots, and the exact tokens in bfloat16
    assert found.bytes_per_gpu / heads == pytest.approx(20_000 * 10 + beside, rel=0.05)
    assert plan(LLAMA, **options).host == 0
    with pytest.raises(ValueError, match="attention_budget=64 without a format"):
        plan(LLAMA, context=100, attention_budget=64)


def test_what_stops_growing_has_no_longest_context():
    memory = {"gpu_memory": 1e7, "weights_memory": 0}
    found = plan(LLAMA, policy=policies.SinkWindow(window_length=100), context=5000, **memory)
    assert found.unbounded and found.longest_context is None and "any length" in str(found)
    tiny = plan(LLAMA, format="int8", context=900, batch=10, **memory)
    assert not plan(LLAMA, format="int8", context=tiny.longest_context + 1, batch=10, **memory).fits
    assert plan(LLAMA, format="int8", context=10, batch=10_000, **memory).longest_context == 0
    assert plan(LLAMA, context=10, batch=100_000, **memory).longest_context == 0


def test_tensor_parallel_ranks_hold_their_heads():
    whole, halves = (plan(LLAMA, format="int8", context=500, tensor_parallel=n) for n in (1, 2))
    parts = ("codes", "scales", "exact")
    assert all(getattr(halves.request, part) == getattr(whole.request, part) for part in parts)
    # What all heads share, each rank has for itself, and its own tables.
    assert halves.request.bookkeeping == 2 * whole.request.bookkeeping > 0
    assert halves.bytes_per_gpu == halves.bytes_per_request // 2
    shared = formats.Int8(scale="token", center=False)
    whole, halves = (plan(LLAMA, format=shared, context=500, tensor_parallel=n) for n in (1, 2))
    assert halves.request.scales == 2 * whole.request.scales and halves.request.codes == whole.request.codes
    one, two = (plan(LLAMA, context=500, tensor_parallel=n, gpu_memory=2e6 / n, weights_memory=1e6) for n in (1, 2))
    assert two.activations > one.activations and two.spare == one.spare - (two.activations - one.activations)


def test_weights_are_counted_without_loading_them():
    expected = sum(x.numel() for x in model("llama").parameters()) * 2
    assert weights_bytes(LLAMA, torch.bfloat16) == expected
    assert plan(LLAMA, context=10, gpu_memory=1e9).weights_memory == expected


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (hf.FalconConfig(hidden_size=64, num_attention_heads=4, alibi=False), 1),
        (hf.FalconConfig(hidden_size=64, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, alibi=False), 4),
        (hf.GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, multi_query=True), 1),
    ],
)
def test_heads_are_those_that_the_cache_is_given(config, heads):
    config.num_hidden_layers, config.vocab_size = 2, 100
    cache = hf.DynamicCache(config=config)
    with torch.inference_mode():
        hf.AutoModelForCausalLM.from_config(config).eval()(input_ids=torch.randint(3, 99, (1, 20)), **passing(cache))
    assert cache.layers[0].keys.shape[1] == heads
    assert plan(config, context=20, dtype=torch.float32).dense == 2 * 2 * cache.layers[0].keys.nbytes


def test_words():
    found = plan(LLAMA, format="int8", policy=policies.H2O(budget=0.25), context=600, gpu_memory=80e9, batch=2)
    for part in ("llama, int8 + H2O 25%", "600 tokens", "80.0 GB", "2 requests of up to", "512 positions"):
        assert part in str(found), part
    assert str(found).startswith("Fits: 2 requests, 80.0 GB to spare. llama")
    assert str(plan(LLAMA, context=600, gpu_memory=2e9, tensor_parallel=2)).startswith("Fits: one request, 2.0 GB on each GPU to spare.")
    assert json.loads(json.dumps(found.as_json()))["bytes_per_request"] == found.bytes_per_request
    larger = plan(LLAMA, format="int8", policy=policies.H2O(budget=1024), context=60)
    assert larger.ratio < 1 and f"{1 / larger.ratio:.2f}x more than 46.1 kB dense" in str(larger)
    assert "9.00x more than" in str(plan(LLAMA, context=100, max_length=900))
    assert not plan(MODELS["qwen3_next"](), context=10).notes
    tight = plan(LLAMA, format="int8", context=5000, gpu_memory=1e6, weights_memory=0, batch=2)
    assert not tight.fits and str(tight).startswith(
        f"Does not fit: 2 requests, for which {in_words(-tight.spare)} are missing; none would."
    )


def test_activations_of_a_prompt_are_what_it_allocates():
    """The largest sum of live tensors of a prompt beside its cache; what a step reads in chunks is named too."""
    config = hf.LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, vocab_size=64
    )
    tokens = 512
    llama = hf.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    cache = hf.DynamicCache(config=config)
    with torch.inference_mode(), Peak() as peak:
        llama(torch.randint(0, 64, (1, tokens)), **passing(cache), logits_to_keep=1)
    each = activation_bytes(config, torch.bfloat16)
    measured = (peak.most - plan(config, context=tokens, dtype="bfloat16").dense) / tokens
    assert 0.8 * measured < each < 1.1 * measured
    found = plan(config, format="int8", context=10_000, batch=2, gpu_memory=1e9, dtype="bfloat16")
    assert found.activations == int(1.3 * 4096 * each) and found.prefill_chunk_size == 2048
    assert f"prefill_chunk_size=2048): at once, their activations take {in_words(each * 20_000)}." in found.notes[0]
    for options in ({"prompt": 4000}, {"gpu_memory": None}, {"context": 4096}):
        assert "prefill_chunk_size" not in str(plan(config, **{"context": 10_000, "gpu_memory": 1e9} | options))
    many = plan(config, context=10_000, batch=1000)
    assert many.prefill_chunk_size == 64 and many.activations == int(1.3 * 64_000 * each)
    unknown = plan(hf.MixtralConfig(num_hidden_layers=2), context=10_000, gpu_memory=1e9, weights_memory=0)
    assert unknown.activations is None and "not known, and not counted" in str(unknown)


def test_activations_are_part_of_what_must_fit():
    """As the caches and the weights."""
    options = {"format": "int8", "context": 30_000, "batch": 3, "weights_memory": 0}
    found = plan(LLAMA, **options)
    all_of_it = found.bytes_per_gpu + found.activations
    assert plan(LLAMA, **options, gpu_memory=all_of_it).fits and not plan(LLAMA, **options, gpu_memory=all_of_it - 1).fits


class Peak(TorchDispatchMode):
    """The largest sum of the bytes of storages that operations made and that are alive."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(found)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return found

    def _gone(self, key, size):
        self.alive.remove(key)
        self.now -= size


def test_every_format_that_holds_the_heads_has_a_row():
    rows = plan_all(LLAMA, context=1000, gpu_memory=1e9, dtype="bfloat16")
    assert [row.format for row in rows] == [None, *(name for name in formats.REGISTRY if name != "identity")]
    assert len({row.weights_memory for row in rows}) == 1
    refused = MODELS["llama"]()
    refused.head_dim = 80
    assert "int4" not in {row.format for row in plan_all(refused, context=1000)}
    assert [row.format for row in plan_all(LLAMA, ["int8"], context=1000)] == [None, "int8"]
    evicting = plan_all(LLAMA, policy="keydiff", context=3000)
    assert evicting[0].policy is None and all(row.policy == "KeyDiff 1,024" for row in evicting[1:])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"context": 0}, ValueError, "context=0"),
        ({"context": 5.0}, TypeError, "context"),
        ({"batch": 0}, ValueError, "batch=0: must be 1 or more requests"),
        ({"tensor_parallel": 0}, ValueError, "tensor_parallel=0: must be 1 or more GPUs"),
        ({"prompt": 0}, ValueError, "prompt=0"),
        ({"format": "int9"}, ValueError, "int9"),
        ({"format": "int8", "skip_layers": (7,)}, ValueError, "skip_layers"),
        ({"format": "int8", "skip_layers": 0}, TypeError, "skip_layers=0: expected a tuple"),
        ({"tensor_parallel": 4}, ValueError, r"tensor_parallel=4 does not divide 2 KV heads: expected one of \[1, 2\]"),
        ({"dtype": "bf16"}, ValueError, "dtype='bf16'"),
        ({"dtype": "nn"}, ValueError, "dtype='nn'"),
        ({"dtype": torch.int8}, ValueError, "dtype=torch.int8"),
        ({"dtype": 16}, TypeError, "dtype .* got 16"),
        ({"gpu_memory": "80GB"}, TypeError, "number of bytes"),
        ({"gpu_memory": -1.0}, ValueError, "gpu_memory=-1.0"),
        ({"gpu_memory": float("inf"), "weights_memory": 0}, ValueError, "gpu_memory=inf.*finite"),
        ({"gpu_memory": 1e9, "weights_memory": float("inf")}, ValueError, "weights_memory=inf"),
        ({"gpu_memory": 1e9, "weights_memory": float("nan")}, ValueError, "weights_memory=nan"),
        ({"weights_memory": "foo"}, TypeError, "weights_memory .* got 'foo'"),
        ({"weights_memory": -5}, ValueError, "weights_memory=-5"),
        ({"num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
        ({"residual_length": "a"}, TypeError, "residual_length .* got 'a'"),
        ({"gpu_memory": 1e5, "weights_memory": 1e6}, ValueError, "leaves nothing beside 1.0 MB of weights"),
    ],
)
def test_wrong_input_is_explained(options, error, says):
    with pytest.raises(error, match=says):
        plan(LLAMA, **{"context": 100} | options)


def test_what_a_config_does_not_tell_is_refused():
    indexed = MODELS["deepseek_v3"]()
    indexed.index_head_dim = 128
    with pytest.raises(NotImplementedError, match="keys of an indexer"):
        plan(indexed, context=10)
    with pytest.raises(TypeError, match="model.config"):
        plan("llama", context=10)
    with pytest.raises(NotImplementedError, match="encoder"):
        plan(ENCODER_DECODERS["t5"](), context=10)
    unknown = MODELS["gemma3"]()
    unknown.layer_types = ["compressed_sparse_attention"] * 4
    with pytest.raises(NotImplementedError, match="compressed_sparse_attention"):
        plan(unknown, context=10)
    quantized = MODELS["llama"]()
    quantized.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="weights_memory="):
        plan(quantized, context=10, gpu_memory=1e9)


def test_max_length_is_taken_at_once_and_the_longest_fits():
    memory = {"gpu_memory": 1e6, "weights_memory": 0.2e6}
    short, long = (plan(LLAMA, format="int4", context=context, max_length=900, **memory) for context in (10, 900))
    assert short.request == long.request and short.ratio < long.ratio
    longest = short.longest_context
    assert plan(LLAMA, format="int4", context=longest, max_length=longest, **memory).fits
    assert not plan(LLAMA, format="int4", context=longest + 1, max_length=longest + 1, **memory).fits
    assert plan(LLAMA, context=10, max_length=900).bytes_per_request == 900 * TOKEN
    evicting = plan(LLAMA, policy=KeyNorm(budget=50), context=10, max_length=900, gpu_memory=1e9)
    assert evicting.unbounded and evicting.request == plan(LLAMA, policy=KeyNorm(budget=50), context=10, max_length=100).request
    with pytest.raises(ValueError, match="context=901 does not fit in max_length=900"):
        plan(LLAMA, format="int4", context=901, max_length=900)
    with pytest.raises(NotImplementedError, match="max_length"):
        plan(LLAMA, policy=KeyNorm(budget=0.5), context=10, max_length=900)
