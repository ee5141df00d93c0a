"""Answers that depend on the prompt alone: not on what was stored of it, on how steps divided it, or on the requests beside it.

The rule: every token, of a prompt or of an answer, attends to the exact tokens of its own page, to the codes of all pages before it, and to
the exact first tokens. So keys and values are a function of the tokens up to their position, whether they are computed now or were stored.

The arithmetic: sums are rounded in an order that depends on shapes. Shapes depend here on positions alone: attention runs for `TILE`
queries at a time, which begin at a multiple of `TILE`, over the keys up to their end; and matrices are multiplied by `ROWS` rows at a time.
Missing rows are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..attention.full import full_attention
from ..kernels import Pair
from .varlen import Sequences

TILE = 64
ROWS = 16, 256
"""On a CPU, where more rows take longer, and on a GPU, where reading the weights does."""
PRODUCTS: dict[Callable, int] = {F.linear: 0, torch.addmm: 1}
SUMS: dict[Callable, int] = {F.rms_norm: 0, F.layer_norm: 0}
"""Functions of torch whose result has the rows of an argument, `[..., K]`, by its number: products, and sums, which a CPU
computes for each row by itself, and a GPU as the number of rows suggests."""


class FixedRows(TorchFunctionMode):
    """Linear layers, and norms on a GPU, take a fixed number of rows at a time within this context."""

    def __init__(self, on_cpu: bool):
        super().__init__()
        self._rows, self._functions = (ROWS[0], PRODUCTS) if on_cpu else (ROWS[1], PRODUCTS | SUMS)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given, at = kwargs or {}, self._functions.get(func)
        mean = func is torch.Tensor.mean and self._rows == ROWS[1] and args[1:] == (-1,) and given == {"keepdim": True}
        if not mean and (at is None or len(args) <= at):
            return func(*args, **given)
        at = at or 0
        x = args[at]
        rows = x.flatten(0, -2)
        parts = [func(*args[:at], part, *args[at + 1 :], **given) for part in padded(rows, 0, self._rows).split(self._rows)]
        return torch.cat(parts)[: len(rows)].unflatten(0, x.shape[:-1])


def padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """`x` with zeros at the end of a dimension, up to a multiple."""
    missing = -x.shape[dim] % multiple
    return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim) if missing else x


def attend_by_page(query: Tensor, codes: Pair, exact: Sequence[Pair], sequences: Sequences, page_size: int, **options: Any) -> Tensor:
    """Attention `[1, Q, Hq, D]` of queries `[1, Hq, Q, D]` of `sequences`.

    Args:
        codes: keys and values of all tokens of all sequences, dequantized, `[1, H, T, D]` each.
        exact: keys and values of each sequence's tokens from the page of its first query on, `[1, H, T', D]` each.
        options: see `full_attention`.
    """
    queries = query.split(sequences.queries, dim=2)
    keys, values = (x.split(sequences.keys, dim=2) for x in codes)
    tiles = [
        tile for part in zip(queries, zip(keys, values, strict=True), exact, strict=True) for tile in _tiles(*part, page_size, options)
    ]
    return torch.cat(tiles, dim=1)


def _tiles(query: Tensor, codes: Pair, exact: Pair, page_size: int, options: dict[str, Any]) -> Iterator[Tensor]:
    """Yields attention of one tile of a sequence after another, without what pads it."""
    end = codes[0].shape[2]
    begin = end - query.shape[2]
    first = begin // page_size * page_size
    before = query.new_zeros(*query.shape[:2], begin - first, query.shape[3])
    queries = padded(torch.cat([before, query], dim=2), 2, TILE)
    for page in range(first, end, page_size):
        own = slice(page - first, page - first + page_size)
        key, value = (padded(torch.cat([x[:, :, :page], y[:, :, own]], 2), 2, TILE) for x, y in zip(codes, exact, strict=True))
        for start in range(max(page, begin // TILE * TILE), min(page + page_size, end), TILE):
            seen, tile = start + TILE, queries[:, :, start - first : start - first + TILE]
            out, _ = full_attention(None, tile, key[:, :, :seen], value[:, :, :seen], None, is_causal=True, **options)  # type: ignore[arg-type]
            yield out[:, max(begin - start, 0) : end - start]
