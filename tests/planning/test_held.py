"""Planned bytes are the bytes that a real cache then holds: to the byte, save for what a sliding layer notes of its window."""

import pytest
import torch
import transformers as hf

from qkvcache import CompressedCache, policies
from qkvcache.caches.memory import bytes_by_role
from qkvcache.evict.layer import EvictingLayer
from qkvcache.planning import plan
from qkvcache.planning.model import shapes
from qkvcache.releases import passing
from qkvcache.storage import growth
from tests.evict.matrix import POLICIES, SHARED, KeyNorm
from tests.matrix import COVER, FORMATS, MODELS, THREE, by_layer, covering, model, slowly

MODEL_NAMES = ("llama", "gemma3", "phi3", "qwen3")
SHARES = {
    "h2o_share": lambda budget: policies.H2O(budget=0.3, num_sink_tokens=4),
    "share_and_recent": lambda budget: policies.TOVA(budget=policies.Budget(20, 0.25), recent=10, interval=7),
    "intervals": lambda budget: KeyNorm(budget=10 * budget, recent=40),
}
ALL_POLICIES = {"none": lambda budget: None} | POLICIES | SHARES
ROWS = 2
NOTE = 8
"""Bytes of the tensor in which a sliding layer of transformers keeps its window."""
COUNTS = 32
"""Bytes a row of what a layer counts for attention over pages, once it has run."""
PARTS = ("codes", "scales", "exact", "bookkeeping")


def read(name: str, prompt: int, steps: int, **options) -> CompressedCache:
    """A cache in which the tiny model `name` has read a prompt, and then `steps` tokens one by one."""
    network = model(name, "eager" if name in ("gemma2", "gpt_oss") else "sdpa")
    cache = CompressedCache(network.config, **options)
    ids = torch.randint(3, 99, (ROWS, prompt))
    with torch.inference_mode():
        network(input_ids=ids, **passing(cache))
        for _ in range(steps):
            network(input_ids=ids[:, :1], **passing(cache))
    return cache


def drive(name: str, prompt: int, steps: int, rows: int = ROWS, **options) -> CompressedCache:
    """The same without the model: keys and values, and the attention on them where a policy looks at it."""
    config = MODELS[name]()
    cache = CompressedCache(config, **options)
    for layer, shape in zip(cache.layers, shapes(config, 4), strict=True):
        for tokens in (prompt, *[1] * steps):
            new = torch.rand(rows, shape.heads, tokens, shape.head_dim)
            queries = torch.rand(rows, shape.query_heads, tokens, shape.head_dim)
            layer.update(new, new)
            if isinstance(layer, EvictingLayer):
                layer.begin_attention(None, queries, 1.0)
                columns = layer.stored + tokens
                if layer.is_static and tokens == 1:
                    columns = layer.num_sink_tokens + layer.storage.slots + layer.residual_length + 1
                layer.end_attention(torch.rand(rows, shape.heads, columns) if layer.policy.observation_window else None)
    return cache


def check(cache: CompressedCache, name: str, prompt: int, steps: int, **options) -> None:
    memory = cache.memory()
    planned = plan(MODELS[name](), context=prompt + steps, prompt=prompt, batch=ROWS, dtype=torch.float32, **options)
    windows = NOTE * sum(hasattr(layer, "sliding_window") for layer in cache.layers)
    of_planned = {part: ROWS * getattr(planned.request, part) for part in PARTS}
    of_cache = {part: getattr(memory, part) for part in PARTS}
    assert of_planned == of_cache | {"exact": of_cache["exact"] - windows}
    assert ROWS * planned.dense == memory.dense - windows
    assert planned.bytes_per_gpu == pytest.approx(cache.nbytes, rel=0.01)


@pytest.mark.parametrize("name", slowly([name for name in MODELS if name != "deepseek_v3"], {*MODEL_NAMES, "qwen3_next", "gemma4"}))
@pytest.mark.filterwarnings("ignore:no layer of this model has full attention")
def test_models(name):
    """Layers that slide, that are linear, that share keys; head_dims that differ by layer; other names in the config."""
    for options in ({"format": FORMATS["int8_token"], "residual_length": 8}, {"format": "nvfp4", "policy": policies.KeyDiff(budget=20)}):
        check(read(name, 60, 2, **options), name, 60, 2, **options)


def test_latents():
    """One for all heads, on each GPU. A rotated key takes 8 bits."""
    for format in ("int8", "turboquant_4bit_nc"):
        check(read("deepseek_v3", 150, 2, format=format), "deepseek_v3", 150, 2, format=format)
    assert plan(hf.DeepseekV3Config(), context=1000, dtype="bfloat16").bytes_per_token == 61 * 2 * (512 + 64)
    assert plan(hf.DeepseekV3Config(), context=1000, tensor_parallel=8).dense == 8 * plan(hf.DeepseekV3Config(), context=1000).dense


IN_LAYERS = [
    *(("llama", *pair) for pair in covering(ALL_POLICIES, COVER, strength=1)),
    *(("phi3", *pair) for pair in covering(["none", "keydiff", "h2o_share"], COVER, strength=1)),
]


@pytest.mark.parametrize(("name", "policy", "format"), IN_LAYERS)
def test_every_format_and_every_policy(name, policy, format):
    """In the layers alone."""
    options = {"format": FORMATS[format], "policy": ALL_POLICIES[policy](40)}
    check(drive(name, 80, 2, **options), name, 80, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("policy", ["none", "keydiff"])
def test_formats_by_layer(name, policy):
    options = {"format": by_layer(MODELS[name]()), "policy": ALL_POLICIES[policy](50)}
    check(drive(name, 100, 30, **options), name, 100, 30, **options)


@pytest.mark.parametrize(("name", "policy", "format"), covering(MODEL_NAMES, ALL_POLICIES, THREE, strength=1))
def test_formats_and_policies_in_models(name, policy, format):
    options = {"format": FORMATS[format], "policy": ALL_POLICIES[policy](40)}
    check(read(name, 150, 2, **options), name, 150, 2, **options)


@pytest.mark.parametrize(("zones", "prompt"), covering([(0, 0), (4, 64), (100, 3), (3, 1)], [1, 5, 80, 200], strength=1))
def test_zones_and_steps(zones, prompt):
    for options in ({"format": FORMATS["fp8_tensor"]}, {"format": "int4", "policy": KeyNorm(budget=0.3)}):
        options |= {"num_sink_tokens": zones[0], "residual_length": zones[1]}
        check(drive("llama", prompt, 20, **options), "llama", prompt, 20, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_layers": (0, -1)},
        {"skip_layers": (1,), "policy": policies.TOVA(budget=0.5)},
        {"policy": policies.TOVA(budget=[20, 100, policies.Budget(30, 0.1)])},
        {"policy": policies.SinkWindow(window_length=30, positions="cache")},
    ],
)
def test_layers_that_differ(options):
    check(drive("llama", 150, 40, format="int4", **options), "llama", 150, 40, format="int4", **options)


@pytest.mark.parametrize("policy", [None, KeyNorm(budget=0.9), KeyNorm(budget=policies.Budget(100, 0.5), interval=20)])
def test_chunks_that_grow_while_tokens_come_one_by_one(policy):
    """By an eighth, which is more than a page from 1,024 tokens on."""
    config = MODELS["llama"]()
    options = {"format": "int8", "policy": policy, "num_sink_tokens": 0, "residual_length": 0}
    cache = CompressedCache(config, **options)
    layer, token = cache.layers[0], torch.rand(1, 2, 1, 32)
    for seen in range(1100, 1500):
        new = token.expand(-1, -1, 1100 if seen == 1100 else 1, -1)
        layer.update(new, new)
        if policy:
            layer.begin_attention(None)
            layer.end_attention(None)
        if seen % 37 == 0:
            assert plan(config, context=seen, prompt=1100, dtype=torch.float32, **options).bytes_per_request == 3 * cache.nbytes, seen


@pytest.mark.parametrize("interval", [1, 100])
def test_heads_that_share_a_budget_hold_at_most_what_is_planned(interval):
    """Their pages grow by an eighth too, and exactly as planned until some tokens go."""
    config, budget, full = MODELS["llama"](), 1400, 0
    options = {"format": "int8", "num_sink_tokens": 0, "residual_length": 0}
    options["policy"] = policies.AdaKV(policies.H2O(budget=budget, recent=0, num_sink_tokens=0, interval=interval), 0.1)
    layer = CompressedCache(config, **options)._maker.new()
    for seen in range(1280, 1700):
        new = torch.rand(1, 2, 1280 if seen == 1280 else 1, 32)
        layer.update(new, new)
        layer.begin_attention(None)
        skew = torch.tensor([1.0, 1.0 if seen < 1600 else 1e4])[:, None]
        layer.end_attention(torch.rand(1, 2, layer.stored + new.shape[2]) * skew)
        if seen % 37 == 0 or seen == 1699:
            held = bytes_by_role(layer.tensors())
            planned = plan(config, context=seen, prompt=1280, dtype=torch.float32, **options)
            assert planned.at_most and all(3 * held[part] <= getattr(planned.request, part) for part in PARTS)
            if seen < budget - interval:
                assert planned.bytes_per_request - 3 * sum(held.values()) in (0, 3 * COUNTS)
            else:
                full += 3 * sum(held.values()) > 0.97 * planned.bytes_per_request
    assert full > 5


@pytest.mark.parametrize(("name", "format"), covering(SHARED, ["identity", "turboquant_3bit_nc", "fp8_tensor"], strength=1))
def test_every_policy_that_shares_budgets(name, format):
    for budget, prompt, steps in ((40, 80, 2), (90, 80, 2), (90, 80, 15)):
        options = {"format": FORMATS[format], "policy": SHARED[name](budget)}
        memory = drive("llama", prompt, steps, **options).memory()
        planned = plan(MODELS["llama"](), context=prompt + steps, prompt=prompt, batch=ROWS, dtype=torch.float32, **options)
        assert all(0 <= ROWS * getattr(planned.request, part) - getattr(memory, part) <= 0.5 * getattr(memory, part) for part in PARTS)
        assert planned.dense * ROWS == memory.dense
        if prompt + steps < budget:
            assert planned.bytes_per_request * ROWS - memory.total in (0, 3 * ROWS * COUNTS)


@pytest.mark.parametrize("budget", [policies.Budget(60, heads=(3.0, 1.0)), policies.Budget(1500, 0.1, heads=(1.0, 5.0))], ids=str)
def test_budgets_by_head_are_planned_exactly(budget):
    """Also while only some heads are full, and pages grow by an eighth."""
    config, prompt = MODELS["llama"](), 70 if not budget.share else 1100
    policy = policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3)
    options = {"format": "int8", "policy": policy, "num_sink_tokens": 2, "residual_length": 3}
    layer = CompressedCache(config, **options)._maker.new()
    for seen in range(prompt, prompt + 220):
        new = torch.rand(1, 2, prompt if seen == prompt else 1, 32)
        layer.update(new, new)
        layer.begin_attention(None)
        layer.end_attention(torch.rand(1, 2, layer.stored + new.shape[2]))
        if seen % 71 == 0:
            held = sum(bytes_by_role(layer.tensors()).values())
            assert plan(config, context=seen, prompt=prompt, dtype=torch.float32, **options).bytes_per_request - 3 * held in (0, 3 * COUNTS)


def test_the_most_that_is_planned_is_reached():
    """By heads that leave a page unfilled each."""
    policy = policies.AdaKV(policies.H2O(budget=65, recent=0, num_sink_tokens=0, interval=1), 1.0)
    options = {"format": "int8", "policy": policy, "num_sink_tokens": 0, "residual_length": 0}
    memory = drive("llama", 130, 10, **options).memory()
    planned = plan(MODELS["llama"](), context=140, prompt=130, batch=ROWS, dtype=torch.float32, **options)
    assert memory.codes == ROWS * planned.request.codes and memory.scales == ROWS * planned.request.scales
    assert "takes at most" in str(planned) and planned.as_json()["at_most"]


def test_far_from_the_prompt_chunks_count_as_one_by_one():
    region = 1000 - 4 - 65
    slots = growth(0, region)
    for context in range(1001, 40_000):
        left = context - 4 - 65
        if left > slots:
            slots += growth(region, left - slots)
        region = left
        if context % 4999 == 0:
            planned = plan(MODELS["llama"](), format="int8", context=context, prompt=1000, dtype=torch.float32)
            assert planned.request.codes == 3 * 2 * 2 * 32 * slots
            assert planned.request.exact == 3 * 2 * 2 * 32 * 4 * (4 + 65)


COUNTERS = 200
"""Bytes a layer that no plan counts: counters, addresses, what rows have seen."""


@pytest.mark.parametrize("rows", slowly([1, 3], [3]))
@pytest.mark.parametrize("policy", ["none", *POLICIES])
def test_preallocated_caches(policy, rows):
    config = MODELS["llama"]()
    formats = COVER if policy == "none" else ("fp8", "int8_token")
    for format in formats:
        for skip_layers in ((), (1,)) if policy in ("none", "h2o") else ((),):
            options = {"format": FORMATS[format], "policy": ALL_POLICIES[policy](40), "skip_layers": skip_layers, "max_length": 700}
            memory = drive("llama", 150, 2, rows, **options).memory()
            planned = plan(config, context=152, batch=rows, dtype=torch.float32, **options)
            for part in ("codes", "scales", "exact"):
                assert abs(rows * getattr(planned.request, part) - getattr(memory, part)) < 3 * 8 * rows + 1, part  # frozen scales, twice
            assert 0 <= memory.bookkeeping - rows * planned.request.bookkeeping <= 3 * COUNTERS
            assert planned.bytes_per_gpu == pytest.approx(memory.total, rel=0.01, abs=3 * COUNTERS)
            assert planned.dense * rows == memory.dense


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen3"])
def test_preallocated_caches_in_models(name):
    for options in ({"format": FORMATS["int8_token"]}, {"format": "nvfp4", "policy": policies.KeyDiff(budget=40)}):
        network = model(name)
        cache = CompressedCache(network.config, max_length=2000, **options)
        with torch.inference_mode():
            for tokens in (60, 1, 1):
                network(input_ids=torch.randint(3, 99, (ROWS, tokens)), **passing(cache))
        planned = plan(MODELS[name](), context=62, batch=ROWS, dtype=torch.float32, max_length=2000, **options)
        assert planned.bytes_per_gpu == pytest.approx(cache.nbytes, rel=0.01)


def test_a_static_cache_of_transformers():
    config = MODELS["gemma3"]()
    cache = hf.StaticCache(config, 300)
    with torch.inference_mode():
        model("gemma3")(input_ids=torch.randint(3, 99, (1, 20)), **passing(cache))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert plan(config, context=20, max_length=300, dtype=torch.float32).bytes_per_request == held
