"""A cache in plain torch that says what a compressed cache is: it keeps every token twice and never loses anything.

A layer has seen `T` tokens, keys and values `[B, H, T, D]` each. They lie in three zones:

    sinks      the first `num_sink_tokens`, in the model's dtype
    codes      the tokens after the sinks, as the format stores them
    residual   the newest token and the `residual_length` before it, in the model's dtype

A token is quantized once, when it leaves the residual, and its codes never change. `crop` takes tokens from the end; it does not bring
exact tokens back. Rows are independent: beams, forks and batches reorder, repeat and select them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qkvcache.formats import Codec, Format

Pair = tuple[Tensor, Tensor]


# --8<-- [start:layer]
@dataclass
class PlainLayer:
    """One layer. `exact` and `coded` hold all tokens, `[B, H, T, D]`; `quantized` counts those after the sinks that are codes."""

    format: Format
    num_sink_tokens: int
    residual_length: int
    exact: list[Tensor] = field(default_factory=list)
    coded: list[Tensor] = field(default_factory=list)
    statistics: list[dict[str, Tensor]] = field(default_factory=list)
    quantized: int = 0

    @property
    def seen(self) -> int:
        return self.exact[0].shape[2] if self.exact else 0

    def update(self, new: Pair) -> Pair:
        """Adds the tokens of a step. Returns what its attention reads: the tokens of the step exactly, and the past as it is stored: of a
        step of one token, with that token; of others, before them."""
        if not self.seen:  # the first step decides the mean of channels
            self.exact = [x[:, :, :0] for x in new]
            self.coded = [x[:, :, :0] for x in new]
            self.statistics = [codec.calibrate(x) for codec, x in zip(self.format.codecs(), new, strict=True)]
        before = self.dense()
        for side, (codec, x) in enumerate(zip(self.format.codecs(), new, strict=True)):
            self.exact[side] = torch.cat([self.exact[side], x], dim=2)
            self.coded[side] = torch.cat([self.coded[side], _coded(codec, x, self.statistics[side])], dim=2)
        self.quantized = max(self.quantized, self.seen - self.num_sink_tokens - self.residual_length - 1)
        if new[0].shape[2] == 1:
            return self.dense()
        key, value = (torch.cat(pair, dim=2) for pair in zip(before, new, strict=True))
        return key, value

    def dense(self) -> Pair:
        """All tokens as the cache holds them."""
        first, last = self.num_sink_tokens, self.num_sink_tokens + self.quantized
        key, value = (
            torch.cat([exact[:, :, :first], coded[:, :, first:last], exact[:, :, last:]], dim=2)
            for exact, coded in zip(self.exact, self.coded, strict=True)
        )
        return key, value

    def crop(self, tokens: int) -> None:
        """Removes the last `tokens` tokens."""
        kept = max(self.seen - tokens, 0)
        self.exact, self.coded = ([x[:, :, :kept] for x in zone] for zone in (self.exact, self.coded))
        self.quantized = min(self.quantized, max(kept - self.num_sink_tokens, 0))

    def select(self, rows: Tensor) -> None:
        """Makes row `i` a copy of row `rows[i]`."""
        self.exact, self.coded = ([x[rows] for x in zone] for zone in (self.exact, self.coded))
        self.statistics = [{name: x[rows] for name, x in side.items()} for side in self.statistics]

    def fork(self) -> PlainLayer:
        return copy.deepcopy(self)


def _coded(codec: Codec, x: Tensor, statistics: dict[str, Tensor]) -> Tensor:
    """Keys or values `[B, H, T, D]`, quantized and dequantized."""
    return codec.dequantize(codec.quantize(x, statistics) | statistics, x.shape[3], x.dtype)


# --8<-- [end:layer]
