"""Slots: where the compressed tokens of one side (keys or values) of one layer live.

Storage grows by slabs, each a whole number of pages of `PAGE` tokens, and every buffer that the codec declares has a plane of its own in a
slab, `[B, H, tokens, width]`. Appending writes in place into free slots; nothing that is stored is ever moved, concatenated or rewritten.
Where tokens are evicted, `put` writes the codes of others over theirs, in each head apart; survivors stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import encode_into, encodes

PAGE = 64
MAX_GROWTH = 16 * PAGE


def growth(length: int, missing: int) -> int:
    """Tokens in the slab that joins `length` stored tokens when `missing` find no place."""
    # An eighth of what is there keeps slabs few and the idle share small.
    return max(-(-missing // PAGE), min(length // 8, MAX_GROWTH) // PAGE) * PAGE


class Slots:
    """Storage of `codec`'s buffers for vectors of `head_dim` channels. With `per_head`, buffers that all heads share are held by each:
    after evictions a slot holds another token in every head."""

    def __init__(self, codec: Codec, head_dim: int, per_head: bool = False):
        self.codec, self.head_dim, self.per_head = codec, head_dim, per_head
        self.keeps = codec.keeps(head_dim)
        self.slabs: list[Codes] = []
        self.once: Codes = {}
        self.length = 0
        self.version = 0
        """Changes whenever slabs come, go or move: what was derived from where they are is stale then."""

    @property
    def capacity(self) -> int:
        return sum(map(_tokens, self.slabs))

    def reserve(self, tokens: int, like: Tensor) -> None:
        """Makes room for `tokens` more of the rows, heads, channels, dtype and device of `like`, in one slab."""
        missing = self.length + tokens - self.capacity
        if missing <= 0:
            return
        self.version += 1
        self.slabs.append(_slab(self.codec, like, growth(self.length, missing), self.per_head))

    def fit(self, x: Tensor, real: Tensor | None = None) -> None:
        """Fills the buffers that are kept once, if nothing has, from `x` `[B, H, T, D]`, as far as it is `real`, bool `[B, T]`."""
        if self.keeps and not self.once:
            self.once = self.codec.fit(x.detach(), real)

    def append(self, x: Tensor) -> None:
        """Encodes `x` `[B, H, T, D]` into the next `T` slots."""
        self.fit(x)
        codes = self.codec.encode(x, self.once)
        self.reserve(x.shape[2], x)
        for slab, at, new in self.free(x.shape[2]):
            for name, plane in slab.items():
                plane[:, :, at : at + new.stop - new.start] = codes[name][:, :, new]
        self.length += x.shape[2]

    def free(self, tokens: int) -> Iterator[tuple[Codes, int, slice]]:
        """Where the next `tokens` tokens go: a slab, the slot in it, and which of the tokens."""
        begin, end, start = self.length, self.length + tokens, 0
        for slab in self.slabs:
            stop = start + _tokens(slab)
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield slab, low - start, slice(low - begin, high - begin)
            start = stop

    def blocks(self, limit: int) -> Iterator[tuple[Codes, int]]:
        """The tokens that are stored now, in order: views of at most `limit`, each with its token count. Slabs never move."""
        return _blocks(tuple(self.slabs), self.once, self.length, limit)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens and gives back the slabs that fall empty."""
        self.length = min(self.length, length)
        start, kept = 0, []
        for slab in self.slabs:
            if start < self.length:
                kept.append(slab)
            start += _tokens(slab)
        self.version += len(kept) != len(self.slabs)
        self.slabs = kept
        if not self.length:
            self.once = {}

    def grow(self, tokens: int, like: Tensor) -> None:
        """Adds `tokens` slots that hold nothing: zeros, which are numbers in every format."""
        self.reserve(tokens, like)
        for slab, at, part in self.free(tokens):
            for plane in slab.values():
                plane[:, :, at : at + part.stop - part.start].zero_()
        self.length += tokens

    def move(self, planes: Codes, slots: int, like: Tensor, real: Tensor | None) -> None:
        """Moves what is stored into `planes`, buffers kept once among them, of `slots` slots, all of which count as used then. `like`:
        tokens to fit those from, if nothing is stored yet, as far as they are `real`."""
        if like.shape[2]:
            self.fit(like, real)
        self._join()
        for slab, used in ((self.slabs[0] if self.slabs else {}, self.length), (self.once, 1)):
            for name, x in slab.items():
                if x is not planes[name]:
                    planes[name][:, :, :used].copy_(x[:, :, :used])
        self.once = {name: planes[name] for name in self.once}
        self.slabs, self.length = [{name: x for name, x in planes.items() if name not in self.once}], slots
        self.version += 1

    def take(self, index: Tensor) -> Codes:
        """Codes of the tokens `index` `[B, H, N]` of each head, bit for bit, from slots of a single slab."""
        return {
            name: plane.expand(-1, index.shape[1], -1, -1).gather(2, index.unsqueeze(-1).expand(*index.shape, plane.shape[3]))
            for name, plane in self.slabs[0].items()
        }

    def put(self, index: Tensor, accepted: Tensor, codes: Codes) -> None:
        """Writes codes `[B, H, N, width]` into the slots `index` `[B, H, N]`, all of which differ, where `accepted`."""
        self._join()
        for name, plane in self.slabs[0].items():
            where = index.unsqueeze(-1).expand(*index.shape, plane.shape[3])
            plane.scatter_(2, where, torch.where(accepted.unsqueeze(-1), codes[name], plane.gather(2, where)))

    def _join(self) -> None:
        """One slab of all: what is written here and there must not be looked for. Seldom, since slabs grow by an eighth."""
        if len(self.slabs) > 1:
            self.version += 1
            with torch.inference_mode(False):
                self.slabs = [{name: torch.cat([slab[name] for slab in self.slabs], dim=2) for name in self.slabs[0]}]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`; `fn` may change the rows or the device, one tensor at a time."""
        self.version += 1
        with torch.inference_mode(False):
            for group in (*self.slabs, self.once):
                for name in group:
                    group[name] = fn(group[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role, `codes` or `scales`."""
        for group in (*self.slabs, self.once):
            yield from self.codec.roles(group, self.head_dim)


@torch.compiler.disable(reason="what a compiled graph makes in inference mode may be written in no other")
@torch.inference_mode(False)
def _slab(codec: Codec, like: Tensor, tokens: int, per_head: bool) -> Codes:
    return codec.allocate(like, tokens, per_head, torch.empty)[0]


def append_both(slots: tuple[Slots, Slots], x: tuple[Tensor, Tensor], block: int, real: Tensor | None = None) -> None:
    """Encodes keys and values `[B, H, T, D]` into the next `T` slots: in one launch where there is a kernel, else by `block` tokens. Those
    that are `real`, bool `[B, T]` (None: all), say what is kept once."""
    for side, new in zip(slots, x, strict=True):
        side.reserve(new.shape[2], new)
        side.fit(new, real)
    key, value = slots
    if not encodes((key.codec, value.codec), x):
        for side, new in zip(slots, x, strict=True):
            for part in new.split(block, dim=2):
                side.append(part)
        return
    tokens = x[0].shape[2]
    for (k_slab, at, part), (v_slab, _, _) in zip(key.free(tokens), value.free(tokens), strict=True):
        parts = (x[0][:, :, part], x[1][:, :, part])
        encode_into((key.codec, value.codec), parts, (k_slab, v_slab), (key.once, value.once), at)
    for side in slots:
        side.length += tokens


def _blocks(slabs: tuple[Codes, ...], once: Codes, left: int, limit: int) -> Iterator[tuple[Codes, int]]:
    for slab in slabs:
        used = min(left, _tokens(slab))
        for at in range(0, used, limit):
            stop = min(at + limit, used)
            yield {name: plane[:, :, at:stop] for name, plane in slab.items()} | once, stop - at
        left -= used


def _tokens(slab: Codes) -> int:
    return next(iter(slab.values())).shape[2]
