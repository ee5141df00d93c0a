"""Inputs of attention as a layer makes them: exact zones around pages of codes, in slabs of several sizes and in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from qkvcache.formats import Format
from qkvcache.kernels import AttentionInputs, KeysOrValues
from qkvcache.kernels.store.reference import quantize_into
from qkvcache.storage import RowPages, attention_inputs_of


def assert_fake(operator: Any, arguments: Sequence[Any]) -> None:
    """The compiler is told the shapes, strides and dtypes of the tensors that an operator returns. (`opcheck` copies handles.)"""
    wanted = tree_leaves(operator(*arguments))
    with FakeTensorMode() as mode:
        found = tree_leaves(operator(*tree_map_only(Tensor, mode.from_tensor, arguments)))
    told, returned = ([(x.shape, x.squeeze().stride(), x.dtype) for x in outputs] for outputs in (found, wanted))
    assert told == returned, f"{told} {returned}"


def by_address(tokens: RowPages) -> RowPages:
    """Lets kernels read the empty pages, whatever the device is."""
    tokens.pool.by_address = True
    tokens.bind()
    return tokens


def build(
    format: Format, key: Tensor, value: Tensor, first: int, recent: int, cuts: Sequence[int] = (), per_head: bool = False
) -> AttentionInputs:
    """Keys `[B, H, T, D]` and values, all but the first and the recent tokens packed.

    `cuts` are token counts of the body after which a slab of pages is added if all are full. The table names the pages of a slab in any
    order. Slots without a token hold nan, or codes that show. `per_head`: as layers that evict have them.
    """
    tokens = by_address(RowPages(format.codecs(), (key[:, :, :0], value[:, :, :0]), per_head))
    begin, end = first, key.shape[2] - recent
    edges = [begin, *(begin + cut for cut in cuts), end]
    for low, high in zip(edges, edges[1:], strict=False):
        if high > low:
            x = key[:, :, low:high], value[:, :, low:high]
            held = tokens.numbers.shape[1]
            if tokens.reserve(high - low):
                shuffle(tokens, held)
            tokens.calibrate(x)
            place = torch.arange(tokens.length, tokens.length + high - low, device=key.device)
            quantize_into(tokens.pages, x, tokens.pages.slots(place))  # by the torch reference, whatever kernels there are
            tokens.count(high - low)
    return attention_inputs_of((key[:, :, :begin], value[:, :, :begin]), tokens, (key[:, :, end:], value[:, :, end:]))


def shuffle(tokens: RowPages, held: int) -> None:
    """Sets all bits of the pages in columns from `held` on, which are new, and exchanges them for each other."""
    new = tokens.numbers[:, held:]
    for slab in tokens.pool.slabs:
        if slab.first >= new.min():
            slab.data.fill_(0xFF)
    order = torch.randperm(new.size).numpy()
    tokens.numbers = numpy.concatenate([tokens.numbers[:, :held], new.ravel()[order].reshape(new.shape)], axis=1)
    tokens.bind()


def exactly(side: KeysOrValues) -> Tensor:
    """What the codes stand for, in float64, not rounded to the model's dtype."""
    return replace(side, dtype=torch.float32).dense().double()


def assert_near(out: Tensor, wanted: Tensor, limit: float, lse: Tensor | None = None, wanted_lse: Tensor | None = None) -> None:
    """Outputs up to `limit`, RMS of the difference over RMS; and normalisers, where scores of N(0, 1) reach about 5."""
    assert out.shape == wanted.shape and out.isfinite().all()
    error = ((out.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error <= limit, f"relative error {error:.2e} > {limit:.1e}"
    if lse is not None:
        torch.testing.assert_close(lse, wanted_lse, rtol=limit, atol=5 * limit)
