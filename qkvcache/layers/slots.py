"""Slots: where the compressed tokens of one side (keys or values) of one layer live.

Storage grows by slabs, each a whole number of pages of `PAGE` tokens, and every buffer that the codec declares has a plane of its own in a
slab, `[B, H, tokens, width]`. Appending writes in place into free slots; nothing that is stored is ever moved, concatenated or rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..formats.base import Codec, Codes

PAGE = 64
MAX_GROWTH = 16 * PAGE


class Slots:
    """Append-only storage of `codec`'s buffers for vectors of `head_dim` channels."""

    def __init__(self, codec: Codec, head_dim: int):
        self.codec, self.head_dim = codec, head_dim
        self.slabs: list[Codes] = []
        self.once: Codes = {}
        self.length = 0

    @property
    def capacity(self) -> int:
        return sum(map(_tokens, self.slabs))

    def reserve(self, tokens: int, like: Tensor) -> None:
        """Makes room for `tokens` more of the rows, heads, dtype and device of `like`, in one slab."""
        missing = self.length + tokens - self.capacity
        if missing <= 0:
            return
        # An eighth of what is there keeps slabs few and the idle share small.
        pages = max(-(-missing // PAGE), min(self.length // 8, MAX_GROWTH) // PAGE)
        batch, heads = like.shape[:2]
        self.slabs.append(
            {
                buffer.name: torch.empty(
                    (batch, heads if buffer.heads == "each" else 1, pages * PAGE, buffer.width),
                    dtype=buffer.dtype or like.dtype,
                    device=like.device,
                )
                for buffer in self.codec.buffers(self.head_dim)
                if buffer.tokens == "each"
            }
        )

    def append(self, x: Tensor) -> None:
        """Encodes `x` `[B, H, T, D]` into the next `T` slots."""
        if not self.length:
            self.once = self.codec.fit(x)
        codes = self.codec.encode(x, self.once)
        self.reserve(x.shape[2], x)
        begin, end, start = self.length, self.length + x.shape[2], 0
        for slab in self.slabs:
            stop = start + _tokens(slab)
            low, high = max(begin, start), min(end, stop)
            if low < high:
                with torch.inference_mode():  # a slab made in inference mode may be written in no other; one made outside in any
                    for name, plane in slab.items():
                        plane[:, :, low - start : high - start] = codes[name][:, :, low - begin : high - begin]
            start = stop
        self.length = end

    def blocks(self, limit: int) -> Iterator[tuple[Codes, int]]:
        """The stored tokens in order: views of at most `limit` tokens, each with its token count. Views stay valid: slabs never move."""
        left = self.length
        for slab in self.slabs:
            used = min(left, _tokens(slab))
            for at in range(0, used, limit):
                stop = min(at + limit, used)
                yield {name: plane[:, :, at:stop] for name, plane in slab.items()} | self.once, stop - at
            left -= used

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens and gives back the slabs that fall empty."""
        self.length = min(self.length, length)
        start, kept = 0, []
        for slab in self.slabs:
            if start < self.length:
                kept.append(slab)
            start += _tokens(slab)
        self.slabs = kept

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`; `fn` may change the rows or the device, one tensor at a time."""
        for group in (*self.slabs, self.once):
            for name in group:
                group[name] = fn(group[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role, `codes` or `scales`."""
        roles = {buffer.name: buffer.role for buffer in self.codec.buffers(self.head_dim)}
        for group in (*self.slabs, self.once):
            for name, tensor in group.items():
                yield roles[name], tensor


def _tokens(slab: Codes) -> int:
    return next(iter(slab.values())).shape[2]
