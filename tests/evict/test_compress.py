"""A context that is read twice (KVzip): its scores against the weights of dense attention, padding, budgets, formats."""

import copy

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from qkvcache import CompressedCache, plan, policies
from qkvcache.evict.compress import Reading
from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.policies.budget import ONE
from qkvcache.evict.policies.kvzip import weigh_heads
from qkvcache.releases import passing
from tests.allocations import Allocations
from tests.matrix import UNSUPPORTED, covering, model, slowly
from tests.seeds import SEED

LENGTH, BUDGET = 37, 16


class Words:
    """A tokenizer whose instructions are three tokens, or four for later chunks."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [90, 91, 92, 93][: 4 if "part" in text else 3]}


def kvzip(**options):
    return policies.KVzip(**{"budget": BUDGET, "recent": 3, "chunk_size": 12, "interval": 1, "alpha_safeguard": None} | options)


def text(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(SEED))


def compressed(network, ids, policy=None, tokenizer=None, mask=None, chunk=None, **options) -> CompressedCache:
    cache = CompressedCache(network.config, policy=policy or kvzip(), **options)
    cache.compress(network, ids, tokenizer=tokenizer, attention_mask=mask, prefill_chunk_size=chunk, progress=False)
    return cache


@torch.no_grad()
def oracle(ids, policy, tokenizer) -> list[torch.Tensor]:
    """Scores `[H, T]` of each layer, of one prompt, from the weights of a dense run: the context, and after it a chunk again, which
    sees the sinks, the chunk and itself."""
    length, sinks, scores = ids.shape[1], policy.num_sink_tokens, [torch.zeros(2, ids.shape[1]) for _ in range(3)]
    for begin in range(sinks, length, policy.chunk_size):
        chunk = list(range(begin, min(begin + policy.chunk_size, length)))
        asked = [] if tokenizer is None else tokenizer("part" if begin > sinks else "", add_special_tokens=False)["input_ids"]
        hint = ids[0, begin - min(8, begin - sinks) : begin].tolist() if asked else []
        reading = torch.tensor([asked + hint + ids[0, chunk].tolist()])
        total = length + reading.shape[1]
        local = torch.zeros(total, dtype=torch.bool).index_fill(0, torch.tensor([*range(sinks), *chunk, *range(length, total)]), True)
        seen = torch.ones(total, total).tril().bool() & ((torch.arange(total) < length)[:, None] | local)
        mask = torch.zeros(1, 1, total, total).masked_fill(~seen, -torch.inf)
        read = model("llama", "eager")(torch.cat([ids, reading], dim=1), attention_mask=mask, use_cache=False, output_attentions=True)
        for score, weights in zip(scores, read.attentions, strict=True):
            score[:, chunk] = weights[0, :, length:, chunk].pow(3).sum(1).pow(1 / 3).view(2, 2, -1).amax(1)
    return scores


@pytest.mark.parametrize("tokenizer", [Words(), None])
def test_those_with_the_largest_attention_are_kept(tokenizer):
    network, policy = model("llama"), kvzip()
    ids = text(1)
    cache = compressed(network, ids, policy, tokenizer)
    for number, scores in enumerate(oracle(ids, policy, tokenizer)):
        for head in range(2):
            free = sorted(range(4, LENGTH - 3), key=lambda p: (float(scores[head, p]), p))  # noqa: B023
            expected = sorted([*range(4), *free[-(BUDGET - 7) :], *range(LENGTH - 3, LENGTH)])
            assert cache.kept_positions(number)[0, head].tolist() == expected


def kept(cache, layer, row=0) -> list[list[int]]:
    """Positions that each head retains."""
    return [[p for p in head if p >= 0] for head in cache.kept_positions(layer)[row].tolist()]


@pytest.mark.parametrize(("alpha", "own"), [(0.0, 0), (0.7, 4), (1.0, 9)])
@pytest.mark.parametrize("format", [None, "int8"])
def test_heads_of_all_layers_share_their_budgets(alpha, own, format):
    """One ranking of all tokens that are not protected, among which each head has its first `own`."""
    network, policy = model("llama"), kvzip(alpha_safeguard=alpha)
    cache = compressed(network, text(1), policy, Words(), format=format, residual_length=3)
    scores = torch.stack(oracle(text(1), policy, Words()))
    expected = {(layer, head): {*range(4), *range(LENGTH - 3, LENGTH)} for layer in range(3) for head in range(2)}
    ranked = sorted(
        ((float(scores[layer, head, p]), p, layer, head) for layer, head in expected for p in range(4, LENGTH - 3)), reverse=True
    )
    for key, retained in expected.items():
        retained.update([p for _, p, *at in ranked if tuple(at) == key][:own])
    for _, position, *at in ranked:
        if sum(map(len, expected.values())) < 6 * BUDGET:
            expected[tuple(at)].add(position)
    assert {(layer, head): set(kept(cache, layer)[head]) for layer, head in expected} == expected
    assert (len({len(retained) for retained in expected.values()}) > 1) == (alpha < 1)


def test_budgets_that_grow_keep_the_weights_of_heads():
    """And copies of rows have them."""
    network, policy, ids = model("llama"), kvzip(budget=0.5, chunk_size=20, alpha_safeguard=0.2, interval=1), text(2, 60)
    cache = compressed(network, ids[:, :LENGTH], policy, format="int8", residual_length=3)
    weights = [layer.storage.metadata.head_weights for layer in cache.layers]
    assert len(torch.cat(weights, dim=1).unique()) > 6
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache = copy.deepcopy(cache)
    rows = torch.tensor([1, 1, 0, 0])

    def expected(seen: int) -> torch.Tensor:
        protected, rest = policy.protected_and_rest(policies.Budget(share=0.5), seen)
        return protected + (rest * torch.stack(weights)[:, rows, :, 0] + 2**22 >> 32)

    counts = expected(LENGTH)
    with torch.no_grad():
        for seen in range(LENGTH, 60):
            assert counts.tolist() == [[[len(head) for head in kept(cache, layer, row)] for row in range(4)] for layer in range(3)]
            network(ids[rows, seen : seen + 1], **passing(cache))
            counts = torch.minimum(counts + 1, expected(seen + 1))  # tokens that were evicted do not come back
    assert cache.nbytes == sum(x.nbytes for layer in cache.layers for _, x in layer.tensors())


PLANNED = [(150, 300, 1), (0.3, 400, 3), (0.7, 80, 2), (100, 60, 1)]


@pytest.mark.parametrize(("budget", "length", "rows"), slowly(PLANNED, [(0.3, 400, 3), (100, 60, 1)]))
def test_the_most_is_planned(budget, length, rows):
    """Also if rows of a batch need room in different layers."""
    network, ids = model("llama"), text(rows, length + 20)
    options = {
        "policy": kvzip(budget=budget, alpha_safeguard=0.2),
        "format": "turboquant_4bit_nc",
        "num_sink_tokens": 2,
        "residual_length": 3,
    }
    cache = CompressedCache(network.config, **options)
    cache.compress(network, ids[:, :length], progress=False)
    full = []
    for seen in range(length, length + 21, 10):
        planned = plan(network.config, context=seen, prompt=length, batch=rows, dtype=torch.float32, **options)
        assert planned.at_most and planned.bytes_per_request * rows >= cache.nbytes
        full.append(cache.nbytes / (planned.bytes_per_request * rows))
        with torch.no_grad():
            for at in range(seen, min(seen + 10, length + 20)):
                network(ids[:, at : at + 1], **passing(cache))
    assert max(full) > 0.75


def test_a_snapshot_goes_on():
    snapshots = pytest.importorskip("qkvcache.prefix.snapshot")
    network, ids = model("llama"), text(2, 50)
    cache, again = (CompressedCache(network.config, policy=kvzip(alpha_safeguard=0.2), format="int8") for _ in range(2))
    cache.compress(network, ids[:, :LENGTH], progress=False)
    for into, layer in zip(again.layers, cache.layers, strict=True):
        snapshots.restore(into, snapshots.snapshot(layer, row=1), "cpu")
    cache.batch_select_indices([1])
    with torch.no_grad():
        ours, theirs = (network(ids[1:, LENGTH:], **passing(x)).logits for x in (again, cache))
    assert torch.equal(ours, theirs) and [kept(again, i) for i in range(3)] == [kept(cache, i) for i in range(3)]


def test_a_layer_of_protected_tokens_takes_nothing_from_others():
    network, (small, large) = model("llama"), (7, 20)
    cache = compressed(network, text(1), kvzip(budget=[large, small, large], alpha_safeguard=0.2))
    counts = [sum(map(len, kept(cache, layer))) for layer in range(3)]
    assert counts[1] == 2 * small and counts[0] + counts[2] == 4 * large


def test_weights_of_heads():
    """Of equal scores, those of the first heads count; a row whose budgets hold all tokens has no weights."""
    scores = [torch.tensor([[[5.0, 1.0, 1.0], [1.0, 0.0, 9.0]], [[1.0, 1.0, 1.0]] * 2]), torch.tensor([[[7.0, 1.0, 8.0]]] * 2)]
    scores[0][1, 0, 1] = -torch.inf
    zero, rest = torch.zeros(2, 1, 1, dtype=torch.int64), torch.tensor([2, 3])[:, None, None]
    cases = [
        (rest, zero, zero, [[[1.5, 0.5], [1, 1]], [[1], [1]]]),
        (zero + 1, zero, zero, [[[0, 1], [1, 0]], [[2], [2]]]),
        (zero + 1, zero + 1, zero, [[[1, 1], [1, 1]], [[1], [1]]]),
    ]
    for budget, first, second, expected in cases:
        assert [(x[..., 0] / ONE).tolist() for x in weigh_heads(scores, [budget, budget], [first, second])] == expected


@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("alpha", [None, 0.2])
def test_a_padded_row_equals_its_prompt_alone(format, alpha):
    """Rows of 37, 24 and 10 tokens: in three chunks, in two, and within the budget."""
    network, pads, policy = model("llama"), (0, 13, 27), kvzip(alpha_safeguard=alpha)
    ids = text(3)
    mask = torch.arange(LENGTH) >= torch.tensor(pads)[:, None]
    together = compressed(network, ids, policy, Words(), mask.long(), format=format, residual_length=3)
    for row, pad in enumerate(pads):
        alone = compressed(network, ids[row : row + 1, pad:], policy, Words(), format=format, residual_length=3)
        assert [kept(together, layer, row) for layer in range(3)] == [kept(alone, layer) for layer in range(3)]


@pytest.mark.parametrize("options", [{}, {"format": "int8"}, {"format": "int8", "max_length": 64}, {"skip_layers": (1,)}])
def test_generate_goes_on_within_the_budget(options):
    network, ids = model("llama"), text(2, 50)
    cache = compressed(network, ids[:, :LENGTH], **options)
    evicting = [i for i in range(3) if i not in options.get("skip_layers", ())]
    assert [cache.stored_length(i) for i in evicting] == [BUDGET] * len(evicting) and cache.get_seq_length() == LENGTH
    network.generate(ids, **passing(cache), max_new_tokens=5, do_sample=False, eos_token_id=None, disable_compile=True)
    assert [cache.stored_length(i) for i in evicting] == [BUDGET] * len(evicting) and cache.get_seq_length() == 54
    assert cache.kept_positions(0)[0, 0, -12:].tolist() == list(range(42, 54))  # what came later stays before the context


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_below_the_budget_nothing_changes(name):
    """And layers with a window are left as the context left them."""
    network, ids = model(name), text(2, 50)
    cache, dense = compressed(network, ids[:, :LENGTH], kvzip(budget=60)), DynamicCache(config=network.config)
    with torch.no_grad():
        network(ids[:, :LENGTH], **passing(dense))
        ours, theirs = (network(ids[:, LENGTH:], **passing(x)).logits for x in (cache, dense))
    assert torch.equal(ours, theirs)


def test_what_is_refused():
    network, ids = model("llama"), text(1)
    cache = CompressedCache(network.config, policy=kvzip())
    with pytest.raises(ValueError, match=r"call cache.compress\(model, ids\)"), torch.no_grad():
        network(ids, **passing(cache))
    with pytest.raises(ValueError, match=r"ids \[37\]"):
        cache.compress(network, ids[0])
    with pytest.raises(TypeError, match=r"compress of 'a context': expected token ids \[B, T\]"):
        cache.compress(network, "a context")
    with pytest.raises(ValueError, match="prefill_chunk_size=0: must be 1 or more tokens"):
        cache.compress(network, ids, prefill_chunk_size=0)
    with pytest.raises(TypeError, match="prefill_chunk_size must be a number of tokens"):
        cache.compress(network, ids, prefill_chunk_size=0.5)
    cache.compress(network, ids, progress=False)
    with pytest.raises(ValueError, match="compress after 37 tokens"):
        cache.compress(network, ids)
    cache.reset()
    cache.compress(network, ids, progress=False)
    with pytest.raises(ValueError, match="only KVzip reads a context twice"):
        CompressedCache(network.config, policy="h2o").compress(network, ids)
    with pytest.raises(ValueError, match="needs the config"):
        CompressedCache(policy=kvzip())


class Keys(TorchFunctionMode):
    """The numbers of keys that attention gets, in the order of its calls."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.counts.append(args[1].shape[2])
        elif func is torch.nn.functional.softmax:
            self.counts.append(args[0].shape[-1])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "qkvcache"])
@pytest.mark.parametrize("pads", [(0, 0), (0, 9)])
def test_the_cost_of_a_reading_does_not_depend_on_the_context(pads, implementation):
    """It attends to four sinks, the twelve tokens of a chunk, and itself."""
    network = model("llama", implementation)
    for length in (28, 52):
        mask = torch.arange(length) >= torch.tensor(pads)[:, None]
        with Keys() as seen:
            compressed(network, text(2, length), mask=mask.long())
        assert seen.counts == [length] * 3 + [28] * (3 * (length // 12))


@pytest.mark.parametrize(
    ("name", "implementation"),
    covering(["llama", "gemma2", "gpt_oss", "gemma3n", "gemma4"], ["eager", "qkvcache", "flex_attention"], strength=1),
)
def test_attention_implementations_score_alike(name, implementation):
    """Rows of 37 and 24 tokens. The last layers of gemma3n and gemma4 have no keys of their own."""
    if (name, implementation) in UNSUPPORTED:
        pytest.skip("by transformers")
    ids, mask = text(2), torch.arange(LENGTH) >= torch.tensor([[0], [13]])
    stock, other = (
        compressed(model(name, kind), ids, kvzip(), Words(), mask.long())
        for kind in ("eager" if (name, "sdpa") in UNSUPPORTED else "sdpa", implementation)
    )
    full = [i for i, layer in enumerate(stock.layers) if isinstance(layer, EvictingLayer)]
    assert full and [kept(stock, i, row) for i in full for row in range(2)] == [kept(other, i, row) for i in full for row in range(2)]


@pytest.mark.parametrize("pad", [0, 13])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_context_that_is_read_in_chunks(name, pad):
    network, ids = model(name, "eager"), text(2)
    mask = (torch.arange(LENGTH) >= torch.tensor([0, pad])[:, None]).long()
    whole, chunks = (compressed(network, ids, kvzip(), Words(), mask, chunk) for chunk in (None, 10))
    full = [i for i, layer in enumerate(whole.layers) if isinstance(layer, EvictingLayer)]
    assert [kept(whole, i, row) for i in full for row in range(2)] == [kept(chunks, i, row) for i in full for row in range(2)]


@pytest.mark.parametrize(("chunk", "share"), [(None, 1.05), (64, 0.7)])
def test_the_peak_is_that_of_a_prefill_or_below(chunk, share):
    network, ids = model("llama"), text(1, 1024)
    with torch.no_grad(), Allocations() as dense:
        network(ids, **passing(DynamicCache(config=network.config)), logits_to_keep=1)
    with Allocations() as twice:
        compressed(network, ids, kvzip(budget=64, chunk_size=64), chunk=chunk)
    assert twice.peak <= share * dense.peak


def test_fast_attention_gets_no_mask_of_queries_by_tokens():
    """Flash attention, which is causal to the lower right itself, gets none, or which tokens there are."""
    query, is_valid = torch.zeros(2, 4, 3, 8), torch.ones(2, 9, dtype=torch.bool)
    columns = torch.zeros(2, 6, dtype=torch.int64)
    assert Reading(columns, is_valid, padded=False).mask("flash_attention_2", query) is None
    is_valid[1, 4] = False
    assert torch.equal(Reading(columns, is_valid, padded=True).mask("flash_attention_2", query), is_valid)


def test_flops_can_be_counted():
    """Under a dispatch mode, torch cannot make the mask that flash attention takes."""
    network, ids = model("llama"), text(2)
    with FlopCounterMode(display=False) as counter:
        cache = compressed(network, ids, kvzip())
    assert counter.get_total_flops() > 0
    assert [kept(cache, layer) for layer in range(3)] == [kept(compressed(network, ids, kvzip()), layer) for layer in range(3)]
