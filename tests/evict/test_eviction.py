"""Caches that evict, in models: budgets hold, padding and the cut of a text change nothing, and what is large enough is exact."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache
from qkvcache.attention import route
from qkvcache.evict.policies.budget import LEAST
from qkvcache.policies import H2O, AdaKV, Budget, KeyDiff, SlidingWindow, SnapKV
from qkvcache.releases import passing
from tests.allocations import reachable, storages
from tests.evict.matrix import BY_HEAD, EACH_KIND, NAMED, POLICIES, KeyNorm
from tests.matrix import ATTENTION, UNSUPPORTED, covering, model, slowly
from tests.reference import ZONES, assert_close, count_decoded_layers, forward
from tests.seeds import SEED
from tests.tolerance import TURNED, of_model, turned

PADS = (0, 5, 14)
CUTS = {"whole": (30, 1, 1, 3, 1, 1), "chunked": (4, 17, 9, 1, 1, 3, 1, 1)}  # a boundary in the padding
LENGTH = sum(CUTS["whole"])
IMPLEMENTATIONS = ("sdpa", "eager")


def inputs(pads=PADS, length=LENGTH, seed=1):
    """Rows that hold no token twice: in layer 0 only rounding would tell the norms of its keys apart."""
    torch.manual_seed(SEED + seed)
    ids = 3 + torch.stack([torch.randperm(97)[:length] for _ in pads])
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    return ids * mask, mask


def run(network, cache, sizes, text=None, check=None):
    """Logits of the real tokens of each step, `[N, V]`."""
    ids, mask = text or inputs()
    begin, logits = 0, []
    for size in sizes:
        logits.append(forward(network, cache, ids, mask, begin, begin + size))
        begin += size
        if check:
            check(begin)
    return logits


def kept(cache, row=None):
    """Positions held in each full-attention layer."""
    found = []
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == "EvictingLayer":
            positions = cache.kept_positions(index)
            found += [
                [[p for p in head if p >= 0] for head in r] for r in (positions if row is None else positions[row : row + 1]).tolist()
            ]
    return found


def check_rows(network, make, sizes, tolerance=None, text=None):
    """Every row of a padded batch keeps and says what its text alone does. Returns the cache of the batch."""
    ids, mask = text or inputs()
    together, steps = make(), mask.split(sizes, dim=1)
    said = run(network, together, sizes, (ids, mask))
    by_row = [logits.split(step.sum(-1).tolist()) for logits, step in zip(said, steps, strict=True)]
    for row in range(len(ids)):
        single, mine = make(), ids[row : row + 1, mask[row].bool()]
        counts = [count for step in steps if (count := int(step[row].sum()))]
        got = torch.cat(run(network, single, counts, (mine, torch.ones_like(mine))))
        assert kept(single) == kept(together, row)
        assert_close(torch.cat([logits[row] for logits in by_row]), got, tolerance or of_model(network))
    return together


OF_EVICTION = ("layer", "storage", "metadata", "head_pages", "by_head", "tail", "slot_pages")
HOLDING = ("layers", "storage", "kernels", *(f"evict.{name}" for name in OF_EVICTION))
"""Modules of what holds tokens."""


def live_bytes(cache):
    """Bytes of all tensors reachable from the layers, each storage once."""
    return sum(storages(reachable(*cache.layers, modules=tuple(f"qkvcache.{name}" for name in HOLDING))).values())


@pytest.mark.parametrize(("name", "budget"), covering(POLICIES, [12, 21], strength=1))
@pytest.mark.parametrize("format", slowly([None, "int8"], ["int8"]))
def test_the_budget_is_full_at_every_step_and_never_exceeded(name, budget, format):
    network = model("llama", layers=2)
    cache = CompressedCache(network.config, policy=POLICIES[name](budget), format=format, num_sink_tokens=2, residual_length=3)

    def check(seen):
        for layer in range(2):
            assert cache.stored_length(layer) == min(seen, budget), seen
            assert cache.get_seq_length(layer) == seen
            assert cache.kept_positions(layer).shape == (1, 2, min(seen, budget))
        assert cache.nbytes == live_bytes(cache)
        assert cache.memory().dense == 2 * 2 * 2 * 32 * 4 * seen

    run(network, cache, (30, *[1] * 6, 3), inputs((0,), 39), check)


SHARES = [H2O(budget=0.5, recent=0.25), H2O(budget=Budget(4, 0.3), recent=3), KeyNorm(budget=0.4, recent=0.2)]
OF_CODES = slowly(NAMED, ["h2o", "key_norm", "h2o_shared", "snapkv_shared"])
INTERVAL = SnapKV(budget=15, interval=4, window_size=4, recent=3)
PADDED = [
    *((NAMED[name](25), "chunked", None) for name in slowly(NAMED, EACH_KIND)),  # rows of 16, 25 and 30 tokens after the prompt
    *((NAMED[name](15), "whole", format) for name, format in covering(OF_CODES, ["int8", "turboquant_k8v4"], strength=1)),
    *((policy, *row) for policy in (INTERVAL, *BY_HEAD) for row in (("whole", "int8"), ("chunked", None))),
    *(pytest.param(policy, "whole", None, marks=pytest.mark.sums) for policy in (*SHARES, AdaKV(H2O(budget=0.5, recent=3)))),
]


@pytest.mark.parametrize(("policy", "cut", "format"), PADDED, ids=str)
def test_a_padded_row_equals_its_prompt_alone(policy, cut, format):
    """Prompts below, at and above the budget; a chunk that ends in the padding; steps of several tokens."""
    network, options = model("llama", layers=2), ZONES["zones"] | {"format": format} if format else {}
    check_rows(network, functools.partial(CompressedCache, network.config, policy=policy, **options), CUTS[cut], TURNED if format else None)


@pytest.mark.sums
@pytest.mark.parametrize("attention", slowly([name for name in ATTENTION if name != "eager"], ["sdpa"]))
@pytest.mark.parametrize("name", slowly(POLICIES, ["h2o", "tova", "snapkv", "keydiff"]))
@pytest.mark.parametrize("format", slowly([None, "int8", "turboquant_3bit_nc"], ["int8"]))
def test_many_tokens_in_chunks_keep_what_a_dense_layer_keeps(monkeypatch, name, attention, format):
    """Of rows with padding, without dequantizing a layer."""
    network, sizes, found = model("llama", attention), (25, 20, 33, 19), []
    for chunked in (True, False):
        cache = CompressedCache(network.config, policy=POLICIES[name](20), format=format, num_sink_tokens=2, residual_length=3)
        with monkeypatch.context() as patch, count_decoded_layers() as decoded:
            if not chunked:
                patch.setattr(route, "supports", lambda *args: False)
            logits = run(network, cache, sizes, inputs(length=sum(sizes)))
        assert bool(decoded) != chunked
        found.append((kept(cache), torch.cat(logits)))
    assert found[0][0] == found[1][0]
    assert_close(found[0][1], found[1][1], turned(format) if format else of_model(network, sum(sizes)))


@pytest.mark.slow
@pytest.mark.parametrize("attention", IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("budget", [12, 16, 30])
@pytest.mark.parametrize("name", POLICIES)
def test_padded_rows_of_other_budgets(name, budget, cut, attention):
    network = model("llama", attention)
    check_rows(network, functools.partial(CompressedCache, network.config, policy=POLICIES[name](budget)), CUTS[cut])


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize(
    "policy",
    [
        H2O(budget=0.5), H2O(budget=Budget(5, 0.2), recent=4), SnapKV(budget=20, interval=8, window_size=4, recent=3),
        KeyNorm(budget=17, interval=5, recent=3),
        SlidingWindow(window_length=11, interval=11), KeyDiff(budget=0.3, interval=4), H2O(budget=Budget(share=1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_shares_and_intervals_stay_within_the_budget(policy, format):
    budget, network = policy.budgets[0], model("llama", layers=1)
    for sizes in CUTS.values():
        cache = CompressedCache(network.config, policy=policy, format=format, num_sink_tokens=2, residual_length=3)
        least = []

        def check(seen, cache=cache, least=least):
            limit = budget.tokens + int(budget.share * seen + 1e-9)
            if budget.share:
                limit = max(
                    limit, LEAST, policy.num_sink_tokens + (policy.recent if isinstance(policy.recent, int) else 0) + (policy.interval or 1)
                )
            held = cache.stored_length(0)
            assert held <= limit, seen
            least.append(held >= min(seen, limit) - (policy.interval or 1) + 1)

        run(network, cache, sizes, inputs((0,)), check)
        if not budget.share or policy.budget == 1.0:
            assert all(least)  # and no more than `interval - 1` places stay empty


@pytest.mark.parametrize("chunk", slowly([None, 7], [7]))
@pytest.mark.parametrize("name", slowly(NAMED, ["sink_window", "h2o", "keydiff", "expected_attention", "snapkv_shared"]))
def test_generate_equals_a_manual_loop(name, chunk):
    network, (ids, mask) = model("llama", layers=2), inputs(PADS, 29)
    ours, manual = (CompressedCache(network.config, policy=NAMED[name](14)) for _ in range(2))
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": chunk}
    expected = network.generate(input_ids=ids, attention_mask=mask, **passing(ours), **options)
    begin = 0
    for size in ([7] * 4 + [1] if chunk else [29]) + [1] * 9:
        logits = forward(network, manual, ids, mask, begin, begin + size)
        begin += size
        if begin >= 29:
            last = logits.view(3, -1, 100)[:, -1] if size == 1 else logits[mask.sum(-1).cumsum(0) - 1]
            ids = torch.cat([ids, last.argmax(-1)[:, None]], 1)
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    assert torch.equal(ids, expected)
    assert kept(ours) == kept(manual) and ((ours.kept_positions() >= 0).sum((1, 2)) == 2 * 14).all()


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("sdpa", torch.bfloat16), pytest.param("eager", torch.float32, marks=pytest.mark.slow),
        pytest.param("sdpa", torch.float32, marks=pytest.mark.slow), pytest.param("eager", torch.bfloat16, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", slowly(NAMED, EACH_KIND))
def test_a_budget_that_is_not_reached_changes_no_bit(name, attention, dtype):
    network = _cast(attention, dtype)
    for sizes, text in ((CUTS["chunked"], inputs()), (CUTS["whole"], inputs((0,)))):
        ours = run(network, CompressedCache(network.config, policy=NAMED[name](LENGTH)), sizes, text)
        theirs = run(network, DynamicCache(config=network.config), sizes, text)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@functools.lru_cache
def _cast(attention, dtype):
    return copy.deepcopy(model("llama", attention, layers=1)).to(dtype)


HYBRID = ["gemma3", "gemma2", "gpt_oss", "gemma3n", "gemma4", "qwen3_next", "mistral", "gpt2", "phi3", "qwen3"]
OF_KINDS = ["gemma3", "gpt_oss", "gemma3n", "gemma4", "qwen3_next", "gpt2"]
"""One of each kind: layers that slide, attention sinks, shared keys, two head_dims, linear layers, absolute positions."""
FASTEST = {"gemma2": "eager", "gpt_oss": "eager"}  # the others run with matrix.ALL


@pytest.mark.sums
@pytest.mark.filterwarnings("ignore:no layer of this model", "ignore:attention code calls")
@pytest.mark.parametrize(
    ("name", "attention"),
    [(n, a) for n in slowly(HYBRID, OF_KINDS) for a in slowly(ATTENTION, [FASTEST.get(n, "sdpa")]) if (n, a) not in UNSUPPORTED],
)
def test_models(name, attention):
    """Full-attention layers evict; padded rows equal their prompts alone. KeyNorm would rank rounding errors where models norm keys."""
    network = model(name, attention)
    plain = DynamicCache(config=network.config)
    both = H2O(budget=15, recent=4), KeyDiff(budget=15, recent=3)
    for policy in slowly(both, [both[HYBRID.index(name) % 2]]):
        cache = CompressedCache(network.config, policy=policy)
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert type(ours).__name__ == ("EvictingLayer" if type(theirs).__name__ == "DynamicLayer" else type(theirs).__name__)
        check_rows(network, functools.partial(CompressedCache, network.config, policy=policy), CUTS["whole"])
    ours = run(network, CompressedCache(network.config, policy=H2O(budget=99)), CUTS["chunked"])
    theirs = run(network, DynamicCache(config=network.config), CUTS["chunked"])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, of_model(network))
