"""Trellis-coded quantization (Marcellin and Fischer, 1990): channels share the choice of their levels, at no bits more.

`2^(b + 1)` levels, ascending, are dealt to four subsets in turn. One bit a channel, the path p, says which subset: the other b - 1 bits,
the index i, say which of its levels. Channels go in blocks of 16, and a block's path bites its own tail, so that each decodes alone:

    subset(t) = 2 * (p[t] ^ p[t + 2]) + p[t + 1]        positions modulo 16
    level(t)  = LEVELS[4 * i(t) + subset(t)]

Each bit of the path takes part in three subsets: four states, of which the encoder finds the best closed path of all 2^16 by the Viterbi
algorithm, once for each state that it may begin in. Decoding is parallel: two shifts and an xor for all channels of a word.

Mean squared error on N(0, 1), against Lloyd-Max of the same bits: 2 bits .0890 for .1175, 3 bits .0245 for .0345, 4 bits .0065 for .0095.
Blocks of 8, whose codes would fill a word of 32 bits each, would err 6 % more at 3 and 4 bits; eight states and
a path over all channels, as in the literature, would gain 3 % more; with 16 channels closed, no step waits for 128 others.

planes      path, 16 bits a block: word j is block j, of the words j and j + D/16 of codes in `packing.py`'s order of 2 bits:
            t = 4 n + 2 h + o for channel 2 n + o of the word j (h = 0) or j + D/16 (h = 1)                                      D / 8 bytes
            2 bits   index, likewise, but that t = 4 n + 2 h + o is in bit 4 n + 2 (1 - h) + o                                   D / 8 bytes
            3 bits   indices, as codes of 2 bits are packed                                                                      D / 4 bytes
            4 bits   low bits of indices likewise; and behind the path, in its order, whether levels are negative: of these the low
                     bits are flipped, so that they count from zero outwards like those of the others                D / 4 + D / 8 bytes
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Buffer, Codes, check_option
from .codebooks import TRELLIS, trellis_levels
from .packing import as_rows, constants, gather, pack2
from .rotated import Quantizer

BLOCK = 16
FINE = 16
"""Parts of a step of the grid that channels are rounded to, so that the search is exact in integers and the same everywhere."""
LIMIT = 8191
"""Where channels are clipped, in these parts."""
DROPPED = {2: 8, 3: 6, 4: 4}
"""Low bits of a squared error that the search does not look at: one or two hundredths of the mean error."""
AT_ONCE = {2: 4, 3: 4, 4: 2}
"""Channels that one look at a table decodes: a table of four with 4 bits would be too large for caches."""
MOST = 8191
"""What one channel can add to the error of a path; sixteen of it fit beside 14 bits of path in an int32."""


@dataclass(frozen=True)
class Trellis(Quantizer):
    """Blocks of 16 channels to the closed path of least squared error."""

    bits: Literal[2, 3, 4]

    def __post_init__(self) -> None:
        check_option("bits", self.bits, TRELLIS)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        index = Buffer("codes", torch.uint8, head_dim // 8) if self.bits == 2 else Buffer("low", torch.uint8, head_dim // 4)
        return index, Buffer("high", torch.uint8, head_dim // (4 if self.bits == 4 else 8))

    def encode(self, x: Tensor) -> Codes:
        step, counts = TRELLIS[self.bits]
        path, index = search(_in_time(x), step / FINE, tuple(FINE * n + FINE // 2 for n in counts), DROPPED[self.bits])
        at = torch.arange(BLOCK, device=x.device)
        high = (path << at).sum(-1)
        if self.bits == 2:
            return {"codes": _bytes((index << (at ^ 2)).sum(-1)), "high": _bytes(high)}
        if self.bits == 4:
            negative = 1 - (index >> 2)
            index = index & 3 ^ 3 * negative
            high = torch.cat([high, (negative << at).sum(-1)], dim=-1)
        return {"low": pack2(_in_channels(index).to(torch.uint8)), "high": _bytes(high)}

    def levels(self, codes: Codes) -> Tensor:
        path = _words(codes["high"])
        if self.bits == 4:
            path, negative = path.tensor_split(2, -1)
        count = AT_ONCE[self.bits]
        n = torch.arange(0, BLOCK, count, device=path.device)
        window = (path | path << BLOCK).unsqueeze(-1) >> n & 2 ** (count + 2) - 1  # of `count` channels: their bits, and two more
        if self.bits == 2:
            index = _words(codes["codes"]).unsqueeze(-1) >> n & 15
        else:
            low = (_words(codes["low"]).unsqueeze(-1) >> torch.arange(0, BLOCK, 4, device=path.device) & 15).unflatten(-2, (2, -1))
            if self.bits == 3:
                index = low[..., 0, :, :] | low[..., 1, :, :] << 4
            else:
                index = low.movedim(-3, -1).flatten(-2) | (negative.unsqueeze(-1) >> n & 3) << 4
        values = gather((window | index << count + 2).flatten(-2), _table(self.bits, path.device))
        return _in_channels(values.unflatten(-1, (-1, BLOCK)))

    def refuses(self, head_dim: int) -> str | None:
        if head_dim % BLOCK:
            return f"a trellis runs through {BLOCK} channels at a time, and it is no multiple of that; use 'int8'"
        return None


def search(x: Tensor, part: float, positive: tuple[int, ...], dropped: int) -> tuple[Tensor, Tensor]:
    """The best closed path of blocks `[..., 16]` and indices into its subsets, int32 `[..., 16]`, for levels `positive * part` and their
    negatives.

    Of paths that err alike by what the search sees, the least as a number wins, among those of a start; then the first start.
    """
    fine = (x * (1 / part)).floor().nan_to_num(0.0).clamp(-LIMIT, LIMIT).int()
    levels = torch.tensor([-n for n in reversed(positive)] + list(positive), dtype=torch.int32, device=x.device)
    distances = (fine.unsqueeze(-1) - levels.view(-1, 4).T.reshape(4, *[1] * x.dim(), -1)).abs()
    nearest = (distances << 3 | torch.arange(levels.numel() // 4, device=x.device, dtype=torch.int32)).amin(-1)
    errors, indices = (nearest >> 3) ** 2, nearest & 7
    errors = ((errors - errors.min(0).values) >> dropped).clamp_max(MOST) << 14
    best = torch.full(x.shape[:-1], torch.iinfo(torch.int32).max, dtype=torch.int32, device=x.device)
    word = torch.zeros_like(best)
    for start in range(4):
        found = _closed(errors, start)
        better = found < best
        best, word = torch.where(better, found, best), torch.where(better, (found & 2**14 - 1) << 2 | start, word)
    path = word.unsqueeze(-1) >> torch.arange(BLOCK, device=x.device) & 1
    subset = 2 * (path ^ path.roll(-2, -1)) + path.roll(-1, -1)
    return path.int(), indices.gather(0, subset.unsqueeze(0).long())[0]


def _closed(errors: Tensor, start: int) -> Tensor:
    """The error of the best path that begins, and ends, in the bits 0 and 1 of `start`, with its bits 2 to 15 below it.

    `errors` int32 `[4, ..., 16]`, of each subset. A state is the two latest bits, the older one first; bit t + 2 decides channel t.
    """
    older, newer = start & 1, start >> 1
    state = {(older, newer): torch.zeros_like(errors[0, ..., 0])}
    for t in range(BLOCK):
        new: dict[tuple[int, int], Tensor] = {}
        for bit in (0, 1) if t < 14 else ((older, newer)[t - 14],):
            for (before, last), error in state.items():
                error = error + errors[2 * (before ^ bit) + last, ..., t] + (bit << t if t < 14 else 0)
                new[last, bit] = torch.minimum(new[last, bit], error) if (last, bit) in new else error
        state = new
    return state[older, newer]


def _in_time(x: Tensor) -> Tensor:
    """Channels `[..., D]` to blocks `[..., D / 16, 16]` in the order of their paths."""
    return x.unflatten(-1, (2, -1, 4, 2)).movedim(-4, -2).flatten(-3)


def _in_channels(x: Tensor) -> Tensor:
    """Undoes `_in_time`."""
    return x.unflatten(-1, (4, 2, 2)).movedim(-2, -4).flatten(-4)


def _bytes(words: Tensor) -> Tensor:
    return words.to(torch.int32).to(torch.uint16).view(torch.uint8)


def _words(packed: Tensor) -> Tensor:
    return packed.view(torch.uint16).long()


@functools.lru_cache(maxsize=16)
def _table(bits: int, device: torch.device) -> Tensor:
    """Of the bits of path and the indices of channels `AT_ONCE`, in the order of their planes, the levels of these."""
    count = AT_ONCE[bits]
    first = count + 2
    at = torch.arange(2 ** (first + count * (bits - 1)), device=device)
    columns = []
    for t in range(count):
        subset = 2 * ((at >> t ^ at >> t + 2) & 1) + (at >> t + 1 & 1)
        index = at >> first + (t ^ 2) & 1 if bits == 2 else at >> first + 2 * t & 3
        if bits == 4:
            negative = at >> first + 4 + t & 1
            index = index ^ 3 * negative | 4 * (1 - negative)
        columns.append(constants(trellis_levels(bits), device)[4 * index + subset])
    return as_rows(torch.stack(columns, dim=-1))
