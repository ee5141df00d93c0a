"""`Chunks`: the quantized tokens of one layer.

Storage grows by chunks, whole pages of `PAGE` tokens. In a chunk, every buffer that a codec declares is a plane `[B, H,
slots, width]`. Appending writes into free slots; stored tokens are neither moved nor requantized. Eviction overwrites
the codes of evicted tokens with those of new ones (`scatter`), separately in each head; retained tokens keep their
slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Packed, Pair, QuantizedRegion, chunk_table, quantize_into, quantizes
from ..kernels.segments import join_tokens, packed
from .quantized import QuantizedTokens

PAGE = 64
"""Tokens of a page."""
MAX_GROWTH = 16 * PAGE
"""Tokens of the largest chunk that is added in steps of one token."""
BLOCK = 2**20
"""Elements that torch quantizes or dequantizes at a time. It bounds temporaries (4 MiB in fp32); on a CPU, smaller
blocks cost more in calls than they save in cache misses."""
GROUP = 16
"""Tokens that are quantized together in eager steps of one token without a kernel."""
ROWS = 8
"""Initial rows of the chunk table, if chunks can be added."""


def growth(length: int, missing: int) -> int:
    """Slots of the chunk that is added to `length` stored tokens when `missing` tokens have no slot."""
    # An eighth of the stored tokens keeps both chunks and unused slots few.
    return max(-(-missing // PAGE), min(length // 8, MAX_GROWTH) // PAGE) * PAGE


def block_of(like: Tensor) -> int:
    """Tokens of a block of keys or values like `like` `[B, H, T, D]`: a whole number of pages."""
    batch, heads, _, dim = like.shape
    return max(BLOCK // (batch * heads * dim) // PAGE, 1) * PAGE


class Chunks(QuantizedTokens):
    """Quantized keys and values of `dims` channels, in slots that are the same in all heads.

    Args:
        per_head: as in QuantizedTokens.
        rows: initial rows of the chunk table.
        static: the first chunk keeps its address.
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], per_head: bool = False, rows: int = ROWS, static: bool = False):
        super().__init__(codecs, dims, per_head)
        self.rows, self.static = rows, static
        self.chunks: list[tuple[Codes, Codes]] = []
        self.length = self.ahead = self.capacity = 0
        """`length`: stored tokens. `ahead`: tokens after them whose codes are written already. `capacity`: slots."""
        self.table: Tensor | None = None
        self.region: QuantizedRegion | None = None
        """The input of kernels; `bind` renews it when chunks are added, removed or moved."""

    def __getstate__(self) -> dict:
        """Leaves out `region`: the table of a copy would hold the addresses of the original's chunks."""
        return self.__dict__ | {"region": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Writes the addresses of the chunks into the table, which keeps its own address while it has enough rows."""
        self.capacity = sum(map(_tokens, self.chunks))
        if not self.capacity:
            self.region = self.table = None
            return
        chunks = tuple((key | self.statistics[0], value | self.statistics[1]) for key, value in self.chunks)
        device = next(iter(chunks[0][0].values())).device
        while self.rows < len(chunks):
            self.rows *= 2
        table = chunk_table(chunks, self.codecs, self.rows)
        with torch.inference_mode(False):
            if self.table is None or self.table.shape != table.shape or self.table.device != device:
                self.table = torch.empty_like(table, device=device)
            self.table.copy_(table, non_blocking=True)
        self.region = QuantizedRegion(*self.codecs, chunks, self.length, self.table)

    def reserve(self, tokens: int, like: Pair) -> bool:
        """Makes room for `tokens` more in one chunk, with the rows, heads, channels, dtype and device of `like`; returns whether a chunk
        was added."""
        missing = self.length + tokens - self.capacity
        if missing <= 0 and self.chunks:
            return False
        if not self.length and not self.static:  # one chunk for all tokens
            missing += self.capacity
            self.chunks.clear()
        slots = growth(self.length, max(missing, 1))
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            key, value = (codec.allocate(x, slots, self.per_head) for codec, x in zip(self.codecs, like, strict=True))
        self._allocate_statistics(like)
        self.chunks.append((key, value))
        self.bind()
        return True

    def simulate(self, length: Callable[[int], int], groups: int, like: Pair) -> None:
        """Allocates as one chunk the slots of all chunks after `groups` groups of tokens; after `k` of them the region
        holds `length(k)` tokens. Nothing is stored: for planning, on the meta device."""
        slots, chunks, k = self.capacity, len(self.chunks), 0
        while slots < length(groups):
            k = bisect_left(range(groups), slots + 1, lo=k + 1, key=length)  # the first group without room
            added, missing = growth(length(k - 1), length(k) - slots), length(groups) - slots
            repeats = -(-missing // added) if length(k - 1) // 8 >= MAX_GROWTH == added else 1  # later chunks have the same size
            slots, chunks = slots + repeats * added, chunks + repeats
        self.rows = max(self.rows, 1 << max(chunks - 1, 0).bit_length())
        self.length, self.chunks = 0, []
        if slots:
            self.reserve(slots, like)
        self._allocate_statistics(like)
        self.length = length(groups)

    def append(self, x: Pair) -> None:
        """Quantizes and stores keys and values `[B, H, T, D]`."""
        self.write(x)
        self.count(x[0].shape[2])

    def count(self, tokens: int) -> None:
        """Counts the next `tokens` slots as stored. Their codes are written already, or will be before they are
        read."""
        self.length += tokens
        self.ahead = max(self.ahead - tokens, 0)

    def write(self, x: Pair) -> None:
        """Quantizes keys and values `[B, H, T, D]` into the next `T` slots without codes, in one launch if there is a
        kernel, else block by block."""
        self.reserve(self.ahead + x[0].shape[2], x)
        self.calibrate(x)
        by_kernel = quantizes(self.codecs, x)
        for chunk, at, part in self.free_slots(x[0].shape[2]):
            new = x[0][:, :, part], x[1][:, :, part]
            block = new[0].shape[2] if by_kernel else min(map(block_of, new))
            for key, value in zip(*(side.split(block, dim=2) for side in new), strict=True):
                quantize_into(self.codecs, (key, value), chunk, self.statistics, at)
                at += block
        self.ahead += x[0].shape[2]

    def free_slots(self, tokens: int) -> Iterator[tuple[tuple[Codes, Codes], int, slice]]:
        """Yields the places of the next `tokens` tokens: a chunk, the first slot in it, and the slice of the tokens
        that it takes."""
        begin, start = self.length + self.ahead, 0
        end = begin + tokens
        for chunk in self.chunks:
            stop = start + _tokens(chunk)
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield chunk, low - start, slice(low - begin, high - begin)
            start = stop

    def packed(self, side: int, limit: int) -> Iterator[Packed]:
        """Views of the keys (0) or values (1) stored at the time of the call, in order, each of at most `limit`
        tokens."""
        chunks = self.region.chunks if self.region else ()
        return packed(self.codecs[side], [chunk[side] for chunk in chunks], self.length, self.dims[side], limit)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens and frees empty chunks, except the first."""
        self.length, self.ahead = min(self.length, length), 0
        start = kept = 0
        for chunk in self.chunks:
            kept += start < self.length or not start
            start += _tokens(chunk)
        if kept < len(self.chunks):
            del self.chunks[kept:]
            self.bind()

    def append_zeros(self, tokens: int, like: Pair) -> None:
        """Adds `tokens` slots without a token. Their codes are zeros, which every format dequantizes to finite numbers."""
        self.reserve(tokens, like)
        for chunk, at, part in self.free_slots(tokens):
            for plane in (*chunk[0].values(), *chunk[1].values()):
                plane[:, :, at : at + part.stop - part.start].zero_()
        self.length += tokens

    def move_to(self, planes: tuple[Codes, Codes], slots: int) -> None:
        """Copies the stored tokens and the statistics into `planes` of `slots` slots. All slots then count as
        stored."""
        self._join()
        sides = []
        for codec, dim, stored, statistics, new in zip(
            self.codecs, self.dims, self.chunks[0] if self.chunks else ({}, {}), self.statistics, planes, strict=True
        ):
            for name, x in (stored | statistics).items():
                if x is not new[name]:
                    used = 1 if name in statistics else self.length
                    new[name][:, :, :used].copy_(x[:, :, :used])
            once = {b.name for b in codec.buffers(dim) if b.tokens == "once"}
            sides.append(({n: x for n, x in new.items() if n not in once}, {n: x for n, x in new.items() if n in once}))
        (key, key_statistics), (value, value_statistics) = sides
        self.chunks, self.statistics, self.length = [(key, value)], (key_statistics, value_statistics), slots
        self.bind()

    def snapshot(self, rows: slice) -> tuple[Codes, Codes]:
        """Codes of the stored tokens, `[rows, H, T, width]` each; views if they are in one chunk."""
        if not self.length:
            return {}, {}
        parts = [list(self.packed(side, self.length)) for side in (0, 1)]
        key, value = (
            {name: join_tokens([part.codes[name][rows] for part in side]) for name in planes}
            for side, planes in zip(parts, self.chunks[0], strict=True)
        )
        return key, value

    def form(self, like: Pair, codes: Tensor) -> tuple[Codes, Codes]:
        """Empty codes for keys and values like `like`, for the number of tokens in the `codes` of a snapshot."""
        key, value = (codec.allocate(x, codes.shape[2], self.per_head) for codec, x in zip(self.codecs, like, strict=True))
        return key, value

    def load(self, codes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], like: Pair) -> None:
        """Copies `codes` `[B, H, T, width]` and `statistics`, if there are any, into empty chunks."""
        self._allocate_statistics(like)
        if codes[0]:
            self.extend(codes, like)
        self._load_statistics(statistics)

    def extend(self, codes: tuple[Codes, Codes], like: Pair) -> None:
        """Adds the tokens of `codes`, `[B, H, T, width]` each."""
        tokens = next(iter(codes[0].values())).shape[2]
        self.reserve(tokens, like)
        for chunk, at, part in self.free_slots(tokens):
            for planes, given in zip(chunk, codes, strict=True):
                for name, plane in planes.items():
                    count = part.stop - part.start
                    plane.narrow(2, at, count).copy_(given[name].narrow(2, part.start, count))
        self.length += tokens

    def gather(self, index: Tensor) -> tuple[Codes, Codes]:
        """The codes in slots `index` `[B, H, N]` of each head, `[B, H, N, width]` each. There must be a single chunk."""
        key, value = (
            {
                name: plane.expand(-1, index.shape[1], -1, -1).gather(2, index.unsqueeze(-1).expand(*index.shape, plane.shape[3]))
                for name, plane in codes.items()
            }
            for codes in self.chunks[0]
        )
        return key, value

    def scatter(self, index: Tensor, accepted: Tensor, new: tuple[Codes, Codes]) -> None:
        """Writes the codes `new`, `[B, H, N, width]` each, into slots `index` `[B, H, N]` where `accepted` `[B, H, N]`.
        The slots of a head must differ."""
        self._join()
        for planes, codes in zip(self.chunks[0], new, strict=True):
            for name, plane in planes.items():
                where = index.unsqueeze(-1).expand(*index.shape, plane.shape[3])
                plane.scatter_(2, where, torch.where(accepted.unsqueeze(-1), codes[name], plane.gather(2, where)))

    def _join(self) -> None:
        """Joins all chunks, so that slots can be written by index. Chunks grow by an eighth, so this is rare."""
        if len(self.chunks) > 1:
            with torch.inference_mode(False):
                key, value = (
                    {name: torch.cat([chunk[side][name] for chunk in self.chunks], dim=2) for name in self.chunks[0][side]}
                    for side in (0, 1)
                )
            self.chunks = [(key, value)]
            self.bind()

    def map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows or the device. With `in_place`, `fn` only reorders rows, and the
        used slots of each tensor are overwritten."""
        if in_place:
            left = self.length + self.ahead
            for pair in self.chunks:
                for plane in (*pair[0].values(), *pair[1].values()):
                    used = plane[:, :, : max(left, 0)]
                    used.copy_(fn(used))
                left -= _tokens(pair)
            for plane in (*self.statistics[0].values(), *self.statistics[1].values()):
                plane.copy_(fn(plane))
            return
        with torch.inference_mode(False):
            groups = [{name: fn(x) for name, x in group.items()} for pair in (*self.chunks, self.statistics) for group in pair]
        pairs = list(zip(groups[::2], groups[1::2], strict=True))
        self.statistics = pairs.pop()
        self.chunks = pairs
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        for pair in (*self.chunks, self.statistics):
            for codec, codes, dim in zip(self.codecs, pair, self.dims, strict=True):
                yield from codec.roles(codes, dim)
        if self.table is not None:
            yield "bookkeeping", self.table


def _tokens(chunk: tuple[Codes, Codes]) -> int:
    return next(iter(chunk[0].values())).shape[2]
