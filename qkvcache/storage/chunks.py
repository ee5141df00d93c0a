"""Chunks: where the quantized tokens of one layer live.

Storage grows by chunks, each a whole number of pages of `PAGE` tokens, and every buffer that a codec declares has a plane of its own in a
chunk, `[B, H, tokens, width]`. Appending writes in place into free slots; nothing that is stored is moved, concatenated or requantized.
Where tokens are evicted, `put` writes the codes of others over theirs, in each head apart; survivors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Body, Packed, Pair, chunk_table, encode_into, encodes

PAGE = 64
MAX_GROWTH = 16 * PAGE
BLOCK = 2**20
"""Elements that are quantized, or dequantized by the torch reference, at a time: the bound on temporaries (4 MiB in fp32). Fewer cost a CPU
more in calls than they save in cache."""
GROUP = 16
"""Tokens that leave the residual together, where quantizing one by one would cost too much."""
ROWS = 8
"""Of the table at first, where chunks may join."""


def growth(length: int, missing: int) -> int:
    """Tokens in the chunk that joins `length` stored tokens when `missing` find no place."""
    # An eighth of what is there keeps chunks few and the idle share small.
    return max(-(-missing // PAGE), min(length // 8, MAX_GROWTH) // PAGE) * PAGE


def block_of(like: Tensor) -> int:
    """Tokens `[B, H, T, D]` in a block, a whole number of pages."""
    batch, heads, _, dim = like.shape
    return max(BLOCK // (batch * heads * dim) // PAGE, 1) * PAGE


class Chunks:
    """Quantized keys and values of `dims` channels.

    Args:
        per_head: buffers that all heads share are held by each: after evictions a slot holds another token in every head.
        rows: how many chunks the table has room for at first.
        fixed: the first chunk stays where it is.
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], per_head: bool = False, rows: int = ROWS, fixed: bool = False):
        self.codecs, self.dims, self.per_head, self.rows, self.fixed = codecs, tuple(dims), per_head, rows, fixed
        self.keeps = any(codec.keeps(dim) for codec, dim in zip(codecs, dims, strict=True))
        """Whether there are buffers that are kept once."""
        self.chunks: list[tuple[Codes, Codes]] = []
        self.once: tuple[Codes, Codes] = {}, {}
        """Buffers kept once; there is no token whose codes refer to them before they are `fitted`."""
        self.fitted = False
        self.length = self.capacity = 0
        self.table: Tensor | None = None
        self.body: Body | None = None
        """What kernels read, renewed when chunks come, go or move."""

    def __getstate__(self) -> dict:
        """Of copies, whose chunks lie elsewhere than the table says."""
        return self.__dict__ | {"body": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.bind()

    def bind(self) -> None:
        """Writes down where chunks are. The table stays where it is as long as it has rows for them."""
        self.capacity = sum(map(_tokens, self.chunks))
        if not self.capacity:
            self.body = self.table = None
            return
        chunks = tuple((key | self.once[0], value | self.once[1]) for key, value in self.chunks)
        device = next(iter(chunks[0][0].values())).device
        while self.rows < len(chunks):
            self.rows *= 2
        with torch.inference_mode(False):
            if self.table is None or self.table.shape[0] < self.rows or self.table.device != device:
                self.table = torch.zeros(self.rows, 8, dtype=torch.int64, device=device)
            self.table[: len(chunks)].copy_(chunk_table(chunks), non_blocking=True)
        self.body = Body(*self.codecs, chunks, self.length, self.table)

    def reserve(self, tokens: int, like: Pair) -> bool:
        """Makes room for `tokens` more of the rows, heads, channels, dtype and device of `like`, in one chunk; whether it had to."""
        missing = self.length + tokens - self.capacity
        if missing <= 0 and self.chunks:
            return False
        if not self.length and not self.fixed:  # one chunk of all
            missing += self.capacity
            self.chunks.clear()
        slots = growth(self.length, max(missing, 1))
        with torch.inference_mode(False):  # what is made in inference mode may be written in no other
            key, value = (codec.allocate(x, slots, self.per_head) for codec, x in zip(self.codecs, like, strict=True))
        self._keep_once(like)
        self.chunks.append((key[0], value[0]))
        self.bind()
        return True

    def fit(self, x: Pair, real: Tensor | None = None) -> None:
        """Fills the buffers that are kept once, unless they are, from `x` `[B, H, T, D]`, as far as it is `real`, bool `[B, T]`."""
        if self.fitted:
            return
        self.fitted = True
        self._keep_once(x)
        for codec, once, new in zip(self.codecs, self.once, x, strict=True):
            if once:
                for name, value in codec.fit(new.detach(), real).items():
                    once[name].copy_(value)

    def _keep_once(self, like: Pair) -> None:
        """Makes the buffers that are kept once, where there are none."""
        if self.keeps and not any(self.once):
            with torch.inference_mode(False):
                key, value = (codec.allocate(x, 0, self.per_head)[1] for codec, x in zip(self.codecs, like, strict=True))
            self.once = key, value

    def append(self, x: Pair) -> None:
        """Quantizes keys and values `[B, H, T, D]` into the next `T` slots: in one launch where there is a kernel, else block by block."""
        self.reserve(x[0].shape[2], x)
        self.fit(x)
        by_kernel = encodes(self.codecs, x)
        for chunk, at, part in self.free(x[0].shape[2]):
            new = x[0][:, :, part], x[1][:, :, part]
            if by_kernel:
                encode_into(self.codecs, new, chunk, self.once, at)
                continue
            block = min(map(block_of, new))
            for codec, planes, once, side in zip(self.codecs, chunk, self.once, new, strict=True):
                for start, tokens in zip(range(at, at + side.shape[2], block), side.split(block, dim=2), strict=True):
                    for name, codes in codec.encode(tokens, once).items():
                        planes[name][:, :, start : start + tokens.shape[2]] = codes
        self.length += x[0].shape[2]

    def free(self, tokens: int) -> Iterator[tuple[tuple[Codes, Codes], int, slice]]:
        """Where the next `tokens` tokens go: a chunk, the slot in it, and which of the tokens."""
        begin, end, start = self.length, self.length + tokens, 0
        for chunk in self.chunks:
            stop = start + _tokens(chunk)
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield chunk, low - start, slice(low - begin, high - begin)
            start = stop

    def packed(self, side: int, limit: int) -> Iterator[Packed]:
        """The keys (0) or values (1) that are stored now, in order: views of at most `limit` tokens. Chunks never move."""
        chunks = self.body.chunks if self.body else ()
        return _packed(self.codecs[side], side, chunks, self.once[side], self.length, limit, self.dims[side])

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens and gives back the chunks that fall empty, but the first."""
        self.length = min(self.length, length)
        start = kept = 0
        for chunk in self.chunks:
            kept += start < self.length or not start
            start += _tokens(chunk)
        if kept < len(self.chunks):
            del self.chunks[kept:]
            self.bind()

    def grow(self, tokens: int, like: Pair) -> None:
        """Adds `tokens` slots that hold nothing: zeros, which are numbers in every format."""
        self.reserve(tokens, like)
        for chunk, at, part in self.free(tokens):
            for plane in (*chunk[0].values(), *chunk[1].values()):
                plane[:, :, at : at + part.stop - part.start].zero_()
        self.length += tokens

    def move(self, planes: tuple[Codes, Codes], slots: int) -> None:
        """Moves what is stored into `planes`, buffers kept once among them, of `slots` slots, all of which count as used then."""
        self._join()
        held = [(chunk | once, once) for chunk, once in zip(self.chunks[0] if self.chunks else ({}, {}), self.once, strict=True)]
        names = [{b.name for b in codec.buffers(dim) if b.tokens == "once"} for codec, dim in zip(self.codecs, self.dims, strict=True)]
        for (codes, once), new in zip(held, planes, strict=True):
            for name, x in codes.items():
                if x is not new[name]:
                    used = 1 if name in once else self.length
                    new[name][:, :, :used].copy_(x[:, :, :used])
        key, value = ({name: x for name, x in new.items() if name not in once} for new, once in zip(planes, names, strict=True))
        first, second = ({name: new[name] for name in once} for new, once in zip(planes, names, strict=True))
        self.chunks, self.once, self.length = [(key, value)], (first, second), slots
        self.bind()

    def load(self, codes: tuple[Codes, Codes], once: tuple[Codes, Codes], like: Pair, copy: Callable[[Tensor, Tensor], object]) -> None:
        """Takes copies of `codes` `[B, H, T, width]` and of buffers kept once, where there are any, into empty chunks; `copy(to, from)`."""
        tokens = next((x.shape[2] for x in codes[0].values()), 0)
        self._keep_once(like)
        if tokens:
            self.reserve(tokens, like)
        for chunk, at, part in self.free(tokens):
            for planes, given in zip(chunk, codes, strict=True):
                for name, plane in planes.items():
                    copy(plane[:, :, at : at + part.stop - part.start], given[name][:, :, part])
        for kept, given in zip(self.once, once, strict=True):
            for name, x in given.items():
                copy(kept[name], x)
                self.fitted = True
        self.length = tokens

    def take(self, index: Tensor) -> tuple[Codes, Codes]:
        """Codes of the tokens `index` `[B, H, N]` of each head, bit for bit, from slots of a single chunk."""
        key, value = (
            {
                name: plane.expand(-1, index.shape[1], -1, -1).gather(2, index.unsqueeze(-1).expand(*index.shape, plane.shape[3]))
                for name, plane in codes.items()
            }
            for codes in self.chunks[0]
        )
        return key, value

    def put(self, index: Tensor, accepted: Tensor, new: tuple[Codes, Codes]) -> None:
        """Writes codes `[B, H, N, width]` into the slots `index` `[B, H, N]`, all of which differ, where `accepted`."""
        self._join()
        for planes, codes in zip(self.chunks[0], new, strict=True):
            for name, plane in planes.items():
                where = index.unsqueeze(-1).expand(*index.shape, plane.shape[3])
                plane.scatter_(2, where, torch.where(accepted.unsqueeze(-1), codes[name], plane.gather(2, where)))

    def _join(self) -> None:
        """One chunk of all: what is written here and there must not be looked for. Seldom, since chunks grow by an eighth."""
        if len(self.chunks) > 1:
            with torch.inference_mode(False):
                key, value = (
                    {name: torch.cat([chunk[side][name] for chunk in self.chunks], dim=2) for name in self.chunks[0][side]}
                    for side in (0, 1)
                )
            self.chunks = [(key, value)]
            self.bind()

    def map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        """Replaces every tensor by `fn(tensor)`; `fn` may change the rows or the device, one tensor at a time. With `in_place` it changes
        the order of rows, in what is used of the tensors."""
        if in_place:
            left = self.length
            for pair in self.chunks:
                for plane in (*pair[0].values(), *pair[1].values()):
                    used = plane[:, :, : max(left, 0)]
                    used.copy_(fn(used))
                left -= _tokens(pair)
            for plane in (*self.once[0].values(), *self.once[1].values()):
                plane.copy_(fn(plane))
            return
        with torch.inference_mode(False):
            groups = [{name: fn(x) for name, x in group.items()} for pair in (*self.chunks, self.once) for group in pair]
        pairs = list(zip(groups[::2], groups[1::2], strict=True))
        self.once = pairs.pop()
        self.chunks = pairs
        self.bind()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales` or `bookkeeping`."""
        for pair in (*self.chunks, self.once):
            for codec, codes, dim in zip(self.codecs, pair, self.dims, strict=True):
                yield from codec.roles(codes, dim)
        if self.table is not None:
            yield "bookkeeping", self.table


def _packed(
    codec: Codec, side: int, chunks: Sequence[tuple[Codes, Codes]], once: Codes, left: int, limit: int, head_dim: int
) -> Iterator[Packed]:
    for chunk in chunks:
        used = min(left, _tokens(chunk))
        for at in range(0, used, limit):
            stop = min(at + limit, used)
            codes = {name: plane if name in once else plane[:, :, at:stop] for name, plane in chunk[side].items()}
            yield Packed(codec, codes, stop - at, head_dim)
        left -= used


def _tokens(chunk: tuple[Codes, Codes]) -> int:
    return next(iter(chunk[0].values())).shape[2]
