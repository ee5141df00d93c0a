"""`Rings`: the last tokens of each request in the model's dtype.

Token `n` of a request is in slot `n % R` of its ring. Its codes are also in the pages, so that a ring may be dropped at
any time: the request then reads codes, and gets a ring again with its next token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from ..kernels import Pair

Ints = numpy.ndarray
"""One number for each request, int64 `[B]`."""


class Rings:
    """Rings of `slots` tokens of `heads` heads with `head_dim` channels, for `count` requests and `layers` layers.

    Row 0 receives writes that are never read. `read`: whether rows with one new token, and chunks, read rings; else `reproducible.py` does.
    """

    def __init__(
        self,
        layers: int,
        count: int,
        heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        read: bool = True,
    ):
        self.slots, self.count, self.read = slots, count, read
        with torch.inference_mode(False):
            self.tensor = torch.zeros(layers, 2, count + 1, heads, slots, head_dim, dtype=dtype, device=device)
        self.free = list(range(count, 0, -1))
        self.by_request: dict[str, int] = {}
        """Rows by request."""
        self.copies: list[tuple[int, int]] = []
        """Rows of forked requests, and the rows to copy them to."""
        self._requests = [""] * (count + 1)
        self._since, self._end, self._used = numpy.zeros((3, count + 1), numpy.int64)
        """Each row holds the tokens from `since` to `end`, as far as it has slots. `_used`: the step that used it last."""
        self._now = 0

    def layer(self, index: int) -> Pair:
        """Keys and values, `[F, H, R, D]` each."""
        return self.tensor[index, 0], self.tensor[index, 1]

    def extend(self, requests: Sequence[str], past: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Assigns rings to requests with `past` tokens, for their next tokens up to `end`: their own, free ones, or the rings of the least
        recently used requests. Returns the rows, and for each the first token from which it has all."""
        rows = numpy.array([self.by_request.get(request, 0) for request in requests])
        self._now += 1
        self._used[rows] = self._now  # before the others take rows
        for i in (rows == 0).nonzero()[0]:
            rows[i] = self._take(requests[i])
        since = numpy.where(self._end[rows] == past, self._since[rows], past)
        self._since[rows], self._end[rows] = since, end
        return rows, since

    def tokens(self, since: Ints, end: Ints, begin: Ints) -> Ints:
        """The number of tokens from `begin` on that attention reads from rings with the tokens `since` to `end`."""
        most = self.slots if self.read else 0
        return numpy.minimum(numpy.maximum(end - numpy.maximum(since, begin), 0), most)  # half the time of `clip`

    def release(self, request: str) -> None:
        if row := self.by_request.pop(request, 0):
            self.free.append(row)

    def fork(self, source: str, request: str) -> None:
        """Assigns a free ring, if any, to `request`, for the tokens of the ring of `source`, which `copy` copies."""
        if (old := self.by_request.get(source, 0)) and self.free:
            row = self._take(request)
            self._since[row], self._end[row] = self._since[old], self._end[old]
            self.copies.append((old, row))

    def copy(self) -> None:
        """Copies the rings of forked requests."""
        copies, self.copies = self.copies, []
        for source, row in copies:
            self.tensor[:, :, row] = self.tensor[:, :, source]

    def _take(self, request: str) -> int:
        """Returns an empty row for `request`: a free one, else the row of the least recently used request."""
        if self.free:
            row = self.free.pop()
        else:
            row = 1 + int(self._used[1:].argmin())
            del self.by_request[self._requests[row]]
        self.by_request[request], self._requests[row], self._end[row], self._used[row] = row, request, -1, self._now
        return row
