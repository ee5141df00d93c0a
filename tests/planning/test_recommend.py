"""What `recommend` answers can be typed, does what it says, and follows what was measured."""

import copy
import json
from importlib import import_module

import pytest
import torch
import transformers as hf

import qkvcache
from qkvcache import CompressedCache, plan, recommend
from qkvcache.evict.choices import repeated, stream
from qkvcache.formats import REGISTRY
from qkvcache.planning.plan import Plan
from tests.matrix import MODELS
from tests.planning.llama import LLAMA_70B

module = import_module("qkvcache.planning.recommend")  # behind the function of the same name
CHOICES = {choice.call: choice for workload in module.WORKLOADS for n in (1000, 50_000) for choice in module.ladder(workload, n)}
STREAM, KVZIP = (module.Choice(**make(1000, module.MEASURED)) for make in (stream, repeated))
CHOICES[STREAM.call] = STREAM
SMALL = MODELS["llama"]()
LLAMA = copy.deepcopy(LLAMA_70B)
LLAMA.num_hidden_layers = 4  # each takes a while to plan


def made(call: str, config):
    names = {name: getattr(qkvcache, name) for name in qkvcache.__all__}
    return eval(call, names | {"config": config, "DynamicCache": hf.DynamicCache})


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_the_call_makes_what_was_planned(choice):
    cache = made(choice.call, SMALL)
    assert isinstance(cache, CompressedCache)
    assert cache.format == REGISTRY[choice.format or "identity"] and cache.policy == choice.policy
    planned = CompressedCache(SMALL, format=choice.format, policy=choice.policy)
    for layer, of_plan in zip(cache.layers, planned.layers, strict=True):
        names = ("num_sink_tokens", "residual_length", "budget", "interval")
        assert [getattr(layer, name, None) for name in names] == [getattr(of_plan, name, None) for name in names]
    if choice not in (STREAM, KVZIP):
        assert made(choice.call[:-1] + ", max_length=2000)", SMALL).max_length == 2000


def test_budgets_are_shares_of_the_context_in_tokens():
    found = recommend(LLAMA, workload="continue", context=131_072)
    assert found.call == 'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget=65_536))'
    assert found.plan.name == "turboquant_4bit_nc + SnapKV 65,536"
    (half,) = module.of_rooms("continue", 1000)
    assert "budget=500" in half.call and half.policy.budget == 500


def format_of(**options) -> str:
    found = recommend(LLAMA, **{"context": 100_000} | options)
    assert isinstance(found.plan, Plan) and found.reason and found.call in str(found)
    return found.plan.name


def test_by_context_and_workload():
    assert format_of(context=2000) == "int8"
    assert format_of(context=10_000) == "turboquant_4bit_nc"
    assert format_of(context=10_000, workload="continue") == "turboquant_4bit_nc"
    assert format_of() == format_of(workload="question") == "turboquant_4bit_nc"
    assert format_of(workload="continue") == "turboquant_4bit_nc + SnapKV 50,000"
    assert format_of(streaming=True) == "SinkWindow 1,024"
    assert format_of(workload="continue", chat=True) == "turboquant_4bit_nc", "a chat goes back to what it has read"


def test_nothing_that_may_be_asked_for_is_evicted():
    memory = {"gpu_memory": 1e6, "weights_memory": 0, "context": 100_000}  # too little for any
    for options in ({"workload": "facts"}, {"chat": True, "workload": "continue"}):
        found = recommend(LLAMA, **options, **memory)
        assert not found.plan.fits and found.plan.policy is None and "qkvcache profile-heads" in found.reason
    assert recommend(LLAMA, workload="question", **memory).plan.policy == "SnapKV 50,000"
    assert recommend(LLAMA, workload="continue", **memory).plan.policy == "SnapKV 50,000"


def test_facts_are_evicted_by_a_second_reading_of_each_context():
    """Seven of eight dense contexts are left to those that are compressed, besides the last."""
    options = {"context": 100_000, "weights_memory": 0}
    dense = plan(LLAMA, context=100_000).dense
    of_kvzip = plan(LLAMA, format=KVZIP.format, policy=KVZIP.policy, context=100_000)
    each, memory = of_kvzip.bytes_per_request, 8 * dense + of_kvzip.activations
    most = 7 * dense // each + 1
    found = recommend(LLAMA, batch=most, gpu_memory=memory, **options)
    assert found.call == KVZIP.call and "cache.compress(model, ids" in found.reason and found.fits
    assert found.plan.requests == most and "until it has been read twice" in found.reason
    tight = recommend(LLAMA, batch=most + 2, gpu_memory=memory, **options)
    assert not tight.fits and tight.reason.startswith("Does not fit") and f"; {most} would." in tight.plan.verdict
    assert f"hold {most} such requests" in tight.reason  # as the first sentence says
    assert recommend(LLAMA, batch=most, chat=True, gpu_memory=memory, **options).plan.policy is None
    assert recommend(LLAMA, batch=10, gpu_memory=0.9 * dense, **options).plan.policy is None  # no context fits uncompressed


def test_a_chat_shares_its_beginning():
    chat = recommend(LLAMA, context=9000, chat=True)
    assert "PrefixStore" in chat.reason


def test_memory_moves_the_choice_to_the_closest_cache_that_fits():
    memory = {"gpu_memory": 80e9, "weights_memory": 141e9, "tensor_parallel": 8, "context": 131_072}
    for workload in module.WORKLOADS:
        ladder = module.ladder(workload, memory["context"])
        held = [plan(LLAMA, format=c.format, policy=c.policy, **memory).requests for c in ladder]
        for requests in held:
            found = recommend(LLAMA, workload=workload, batch=requests, **memory)
            first = next(i for i, most in enumerate(held) if most >= requests)
            assert found.call == ladder[first].call and found.plan.fits
        found = recommend(LLAMA, workload=workload, batch=10**6, **memory)
        assert found.call == ladder[-1].call and str(found).startswith("Does not fit: 1,000,000 requests, for which")
        assert held == sorted(held), "each is smaller than the one before"


def test_what_need_not_be_compressed_is_left_dense():
    for config, context in ((SMALL, 40), (MODELS["mistral"](), 10_000)):
        found = recommend(config, context=context)
        assert type(made(found.call, config)) is hf.DynamicCache


def test_a_dense_cache_is_taken_only_where_it_fits():
    compressed = next(found for n in range(60, 300) if 1 < (found := plan(SMALL, format="int8", context=n)).ratio < 1.05)
    between = (compressed.bytes_per_request + compressed.dense) / 2
    for memory, kind in ((between, CompressedCache), (2 * between, hf.DynamicCache)):
        found = recommend(SMALL, context=compressed.context, gpu_memory=memory + compressed.activations, weights_memory=0)
        assert found.plan.fits and isinstance(made(found.call, SMALL), kind)
    nothing = recommend(SMALL, context=compressed.context, gpu_memory=between / 10, weights_memory=0)
    assert not nothing.fits and str(nothing).startswith("Does not fit: one request, for which")


def test_models_that_allow_less():
    config = hf.BloomConfig(vocab_size=100, hidden_size=128, n_layer=2, n_head=2)
    found = recommend(config, context=100_000, workload="continue")
    assert found.plan.policy is None and made(found.call, config)
    with pytest.raises(NotImplementedError, match="ALiBi"):
        recommend(config, context=1000, streaming=True)
    own = hf.GPTNeoConfig(vocab_size=100, hidden_size=128, num_layers=2, num_heads=2, attention_types=[[["global"], 2]])
    assert recommend(own, context=100_000, workload="continue").plan.policy is None
    with pytest.raises(NotImplementedError, match="AttentionInterface"):
        plan(own, policy="h2o", context=1000)
    odd = MODELS["llama"]()
    odd.head_dim = 42  # in no four-bit packing
    found = recommend(odd, context=100_000)
    assert made(found.call, odd) and not REGISTRY[found.plan.format].refuses(42)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"workload": "chat"}, ValueError, "workload='chat': expected 'facts', 'question' or 'continue'"),
        ({"streaming": True, "chat": True}, ValueError, "choose one"),
        ({"context": -1}, ValueError, "context=-1"),
        ({"dtype": torch.int8}, ValueError, "dtype=torch.int8"),
        ({"tensor_parallel": 3}, ValueError, "KV heads"),
    ],
)
def test_wrong_input_is_explained(options, error, says):
    with pytest.raises(error, match=says):
        recommend(SMALL, **{"context": 100} | options)


def test_an_answer_names_the_model_behind_each_number():
    for choice in CHOICES.values():
        if any(word in choice.why for word in ("KL", "recall")):
            assert module.MEASURED in choice.why


def test_latents_are_planned():
    found = recommend(MODELS["deepseek_v3"](), context=50_000)
    assert found.call == module.FOUR_BITS.call and found.plan.ratio > 2


def test_host_memory_is_named_where_it_makes_the_requests_fit():
    memory = {"context": 100_000, "batch": 8, "weights_memory": 0}
    smallest = plan(LLAMA, format="hadaquant_k3v2", **memory)
    for share, named in ((0.9, True), (0.1, False)):
        found = recommend(LLAMA, chat=True, gpu_memory=share * smallest.bytes_per_gpu + smallest.activations, **memory)
        assert not found.fits and ("offload_pages=True) fits" in found.reason) is named
    assert "offload_pages" not in recommend(LLAMA, context=100_000).reason  # nobody asked


def test_json():
    named = recommend(SMALL, context=5000, gpu_memory=1e9, dtype="float16")
    assert named == recommend(SMALL, context=5000, gpu_memory=1e9, dtype=torch.float16)
    found = json.loads(json.dumps(named.as_json()))
    assert found["plan"]["dtype"] == "float16" and found["plan"]["codes"] > 0
