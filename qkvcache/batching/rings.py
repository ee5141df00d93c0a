"""`Rings`: the last tokens of each request in the model's dtype.

Token `n` of a request is in slot `n % R` of its ring. Its codes are in the pages too, so that a ring may be dropped at any time: its
request then reads codes, and gets a ring again with its next token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import Pair


@dataclass(slots=True)
class Ring:
    """The ring `row` of a request. It has the tokens `since` to `end`, at most as many as there are slots."""

    row: int
    since: int
    end: int


class Rings:
    """Rings of `slots` tokens of `heads` heads with `head_dim` channels, for `count` requests and `layers` layers.

    Row 0 receives writes that are never read.
    """

    def __init__(self, layers: int, count: int, heads: int, slots: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.slots = slots
        with torch.inference_mode(False):
            self.tensor = torch.zeros(layers, 2, count + 1, heads, slots, head_dim, dtype=dtype, device=device)
        self.free = list(range(count, 0, -1))
        self.by_request: dict[str, Ring] = {}
        """Rings by request, the least recently used first."""
        self.copies: list[tuple[int, int]] = []
        """Rows of forked requests, and the rows to copy them to."""

    def layer(self, index: int) -> Pair:
        """Keys and values, `[F, H, R, D]` each."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def advance(self, request: str, past: int, count: int) -> Ring:
        """The ring of a request with `past` tokens, for `count` more: its own, a free one, or that of the least recently used request."""
        ring = self.by_request.pop(request, None)
        if ring is None:
            row = self.free.pop() if self.free else self.by_request.pop(next(iter(self.by_request))).row
            ring = Ring(row, past, past)
        if ring.end != past:
            ring.since = past
        ring.end = past + count
        self.by_request[request] = ring
        return ring

    def of(self, request: str, past: int) -> Ring:
        """The ring of a request with `past` tokens; an empty one if it has none."""
        ring = self.by_request.get(request)
        return Ring(0, past, past) if ring is None or ring.end != past else Ring(ring.row, ring.since, past)

    def release(self, request: str) -> None:
        if ring := self.by_request.pop(request, None):
            self.free.append(ring.row)

    def fork(self, source: str, request: str) -> None:
        """Assigns a free ring, if any, to `request`, for the tokens of the ring of `source`, which `copy` copies."""
        if (ring := self.by_request.get(source)) and self.free:
            self.by_request[request] = Ring(self.free.pop(), ring.since, ring.end)
            self.copies.append((ring.row, self.by_request[request].row))

    def copy(self) -> None:
        """Copies the rings of forked requests."""
        copies, self.copies = self.copies, []
        for source, row in copies:
            self.tensor[:, :, row] = self.tensor[:, :, source]

    def tokens(self, ring: Ring, sinks: int) -> int:
        """How many of the last tokens attention reads from the ring, if the first `sinks` are stored elsewhere."""
        return max(min(self.slots, ring.end - max(ring.since, sinks)), 0)

    @staticmethod
    def unroll(ring: Tensor, row: int, begin: int, end: int) -> Tensor:
        """Tokens `begin` to `end` of a row of `[F, H, R, D]`, in their order: `[1, H, T, D]`."""
        slots, count = ring.shape[2], end - begin
        at = begin % slots
        tail = ring[row : row + 1, :, at : at + count]
        return tail if tail.shape[2] == count else torch.cat([tail, ring[row : row + 1, :, : count - tail.shape[2]]], dim=2)
