"""The choice of blocks under an attention budget, in torch and in kernels, against one row after another; and attention over the choice."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qkvcache.kernels import PagedInputs, attend_pages
from qkvcache.kernels.attend.reference import attend_pages as attend_in_torch
from qkvcache.kernels.paged_inputs import BEGIN, RING_START, RING_TOKENS, SINKS
from qkvcache.kernels.pages import BLOCK
from qkvcache.select import budget
from qkvcache.select import select_blocks as selecting
from qkvcache.select.budget import WHOLE, Budget
from qkvcache.select.dispatch import BlockSelect
from qkvcache.select.select_blocks import block_weights, choose_blocks, over_blocks, select_blocks, upper_logits
from tests.kernels.paged_inputs import build, divided, row
from tests.kernels.test_fused_attend import KINDS
from tests.kernels.test_pages import DEVICE, KERNELS, compare, split
from tests.matrix import FORMATS, slowly
from tests.softmax import attention_weights

LENGTHS = [230, 70, 0]
ROWS = len(LENGTHS)
BY_KEYS = (
    "identity", "int8", "int8_halves", "fp8_token", "int4", "int4_vllm", "nvfp4_mse", "turboquant_4bit_nc",
    "turboquant_3bit_nc",
)  # fmt: skip
"""Formats whose keys the kernels read in different ways."""


def inputs_of(format: str, tokens: int = 2 * BLOCK, share: int = 0, dim: int = 64, **options) -> PagedInputs:
    inputs = build(FORMATS[format], LENGTHS, ring=5, ring_tokens=[5, 4, 2], dims=(dim, dim), **options)
    return inputs.twin(select=BlockSelect(Budget(tokens, share)))


def queries_like(inputs: PagedInputs, queries: int = 1, group: int = 2) -> Tensor:
    batch, (_, heads, _, dim) = len(inputs.rows), inputs.ring[0].shape
    return torch.randn(batch, heads * group, queries, dim, device=inputs.rows.device).to(inputs.ring[0].dtype)


def weights_of(query: Tensor, inputs: PagedInputs, b: int, h: int, mask: Tensor | None, **options) -> Tensor:
    """The weights of the blocks of a row and head."""
    begin, sinks, length = *inputs.rows[b, [BEGIN, SINKS]].tolist(), int(inputs.pages.lengths[b])
    if length <= begin:
        return torch.zeros(-(-length // BLOCK))
    key = row(inputs, b, h, 0)[None, None, sinks : sinks + length - begin]
    shown = None if mask is None else mask[b : b + 1, :, :, sinks : sinks + length - begin]
    weights, _ = attention_weights(query[b : b + 1].unflatten(1, (inputs.ring[0].shape[1], -1))[:, h], key, shown, **options)
    return F.pad(weights.sum((0, 1, 2)), (begin, -length % BLOCK)).view(-1, BLOCK).sum(1).float()


@pytest.mark.parametrize(("masked", "begin"), [("", 0), ("bool", 5), ("float", 0), ("", 40)])
def test_the_weight_of_a_block(masked, begin):
    inputs = inputs_of("int8", begin=begin)
    query = queries_like(inputs, queries=3)
    mask = None
    if masked:
        mask = torch.rand(ROWS, 1, 3, 400) < 0.6 if masked == "bool" else torch.randn(ROWS, 1, 3, 400)
    if masked == "bool":
        mask[1] = False  # padding alone
    weights = block_weights(upper_logits(query, inputs, mask, None, 0.3, 5.0), 2)
    for b, h in itertools.product(range(ROWS), range(2)):
        mine, wanted = weights[b, h], weights_of(query, inputs, b, h, mask, scaling=0.3, softcap=5.0)
        torch.testing.assert_close(mine[: len(wanted)], wanted, rtol=1e-3, atol=1e-4)
        assert (mine[len(wanted) :] == 0).all()


@pytest.mark.parametrize(("tokens", "share", "begin"), [(1, 0, 0), (2 * BLOCK, 0, 40), (BLOCK, WHOLE // 2, 5), (10**6, 0, 70)])
def test_the_largest_weights_are_chosen(tokens, share, begin):
    """Each row reads as many blocks as the budget allows, in ascending order, with the entries of their pages; none before the first token
    that may be read."""
    inputs = inputs_of("int8", tokens, share, begin=begin)
    weights = torch.rand(ROWS, 2, -(-inputs.max_length // BLOCK))
    selection = choose_blocks(weights, inputs, inputs.select.budget)
    for b, length in enumerate(LENGTHS):
        first = begin // BLOCK
        stored = max(-(-length // BLOCK) - first, 0)
        count = min(max(-(-tokens // BLOCK), -(-share * stored // WHOLE)), stored)
        for h in range(2):
            wanted = sorted((first + weights[b, h, first : first + stored].topk(count).indices).tolist())
            assert selection.blocks[b, h, :count].tolist() == wanted
            assert selection.entries[b, h, :count].tolist() == [int(inputs.pages.table[b, n * BLOCK // 64]) for n in wanted]
            places = [n * BLOCK + i for n in wanted for i in range(BLOCK) if n * BLOCK + i < length]
            assert selection.lengths[b, h] == len(places)
            found = selection.places()[b, h].tolist()
            assert found[: len(places)] == places and set(found[len(places) :]) <= {-1}


@pytest.mark.parametrize(("queries", "begin"), [(1, 0), (3, 5), (1, 40)])
def test_attention_reads_the_chosen_blocks_alone(queries, begin):
    """The output is that under a mask which hides all other quantized tokens."""
    inputs = inputs_of("turboquant_4bit_nc", begin=begin)
    query = queries_like(inputs, queries)
    selection = select_blocks(query, inputs, inputs.select.budget)
    read = over_blocks(inputs, selection)
    shown = torch.ones(ROWS, 4, 1, 400, dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        sinks = int(inputs.rows[b, SINKS])
        for h in range(4):
            shown[b, h, 0, sinks : sinks + max(length - begin, 0)] = False
            chosen = selection.places()[b, h // 2]
            shown[b, h, 0, sinks + chosen[chosen >= begin] - begin] = True
    out, lse = attend_in_torch(query, read, causal=True)
    wanted, wanted_lse = attend_in_torch(query, inputs, shown, causal=True)
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


def overlap(mine, wanted) -> bool:
    """Whether two choices are the same but for blocks of nearly equal weight."""
    return torch.equal(mine.lengths, wanted.lengths) and torch.equal(mine.places(), wanted.places())


@KERNELS
@pytest.mark.parametrize("format", slowly(FORMATS, BY_KEYS))
def test_the_kernels(format, monkeypatch):
    from qkvcache.select import triton_select_blocks

    dim = KINDS.get(format, 64)
    inputs = inputs_of(format, dim=dim, begin=5, device=DEVICE)
    query = queries_like(inputs)
    wanted = select_blocks(query.float(), inputs, inputs.select.budget)
    mine = triton_select_blocks.select_blocks(query, inputs, inputs.select.budget)
    assert overlap(mine, wanted)
    for b, length in enumerate(LENGTHS):
        used = min(2, -(-length // BLOCK))
        assert torch.equal(mine.entries[b, :, :used], wanted.entries[b, :, :used])
    compare(monkeypatch, format, query, over_blocks(inputs, mine))


@KERNELS
@pytest.mark.parametrize(("queries", "masked", "begin"), [(1, "", 40), (1, "float", 5), (5, "bool", 70), (5, "float", 0)])
def test_the_kernels_with_everything_that_attention_has(queries, masked, begin, monkeypatch):
    from qkvcache.select import triton_select_blocks

    inputs = inputs_of("int8", share=WHOLE // 3, begin=begin, device=DEVICE)
    query = queries_like(inputs, queries)
    mask = {"": None, "bool": torch.rand(ROWS, 1, queries, 400) < 0.6, "float": torch.randn(1, 4, 1, 400)}[masked]
    mask = None if mask is None else mask.to(DEVICE)
    options = {"scaling": 0.3, "softcap": 5.0}
    wanted = select_blocks(query.float(), inputs, inputs.select.budget, mask, **options)
    parted = divided(inputs, splits=split(inputs.pages.lengths)) if begin else inputs
    mine = triton_select_blocks.select_blocks(query, parted, inputs.select.budget, mask, **options)
    assert overlap(mine, wanted)
    chosen = over_blocks(inputs, mine)
    compare(monkeypatch, "int8", query, chosen, mask, causal=queries > 1, sinks=torch.randn(4, device=DEVICE), **options)


@KERNELS
@pytest.mark.parametrize("masked", ["columns", "bool"])
def test_groups_of_queries_choose_for_themselves(masked, monkeypatch):
    """Each group reads what the queries alone read that end with it; through the kernels as in torch."""
    monkeypatch.setattr(selecting, "GROUP", 4)
    monkeypatch.setattr(selecting, "SAMPLED", 2)
    monkeypatch.setattr(budget, "LEAST_SKIPPED", 0)
    inputs = inputs_of("int8", device=DEVICE).anew(ring=(torch.randn(ROWS + 2, 2, 12, 64, device=DEVICE).half(),) * 2)
    inputs.rows[:, RING_START], inputs.rows[:, RING_TOKENS] = 7, torch.tensor([12, 11, 10], device=DEVICE)
    query = queries_like(inputs, 6)
    mask = (torch.rand(ROWS, 1, 6 if masked == "bool" else 1, 400) < 0.6).to(DEVICE)
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    kernels = attend_pages(query, inputs, mask, causal=True)[0]
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    out, lse = attend_pages(query, inputs, mask, causal=True)
    torch.testing.assert_close(kernels.float(), out.float(), rtol=1e-2, atol=2e-3)
    for begin, end in ((0, 4), (4, 6)):
        ends = inputs.rows.clone()
        ends[:, RING_TOKENS] -= 6 - end
        part = mask[:, :, begin:end] if masked == "bool" else mask
        alone, alone_lse = attend_pages(query[:, :, begin:end], inputs.anew(rows=ends), part, causal=True)
        torch.testing.assert_close(out[:, :, begin:end], alone)
        torch.testing.assert_close(lse[:, :, begin:end], alone_lse)


@KERNELS
@pytest.mark.parametrize("begin", [0, 40])
def test_the_kernels_where_all_tokens_are_read(begin, monkeypatch):
    """A step that is captured once serves few tokens, too: nothing is scored, and all blocks are chosen."""
    from qkvcache.select import triton_select_blocks

    inputs = inputs_of("turboquant_4bit_nc", tokens=256, begin=begin, device=DEVICE)
    query = queries_like(inputs)
    mine = triton_select_blocks.select_blocks(query, inputs, inputs.select.budget)
    assert mine.lengths.tolist() == [[max(length - begin // BLOCK * BLOCK, 0)] * 2 for length in LENGTHS]
    read = over_blocks(inputs, mine)
    torch.testing.assert_close(attend_in_torch(query, read)[0], attend_in_torch(query, inputs)[0])
    compare(monkeypatch, "turboquant_4bit_nc", query, read)
