"""`QuantizedTokens`: the base of the stores of a layer's quantized keys and values, in chunks or in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels import Pair


class QuantizedTokens:
    """Quantized keys and values of `dims` channels, and the statistics that all tokens share.

    Args:
        per_head: each head has its own copy of buffers that heads could share, since after evictions a slot holds
            another token in each head.
    """

    def __init__(self, codecs: tuple[Codec, Codec], dims: Sequence[int], per_head: bool = False):
        self.codecs, self.dims, self.per_head = codecs, tuple(dims), per_head
        self.has_statistics = any(codec.keeps(dim) for codec, dim in zip(codecs, dims, strict=True))
        """Whether the codecs keep buffers that all tokens share."""
        self.statistics: tuple[Codes, Codes] = {}, {}
        """Buffers that all tokens share. They must be `calibrated` before a token is quantized."""
        self.calibrated = False

    def calibrate(self, x: Pair, is_valid: Tensor | None = None) -> None:
        """Computes the statistics from keys and values `[B, H, T, D]`; later calls change nothing. `is_valid`: the
        tokens that are not padding, bool `[B, T]`; None: all."""
        if self.calibrated:
            return
        self.calibrated = True
        self._allocate_statistics(x)
        for codec, statistics, new in zip(self.codecs, self.statistics, x, strict=True):
            if statistics:
                for name, value in codec.calibrate(new.detach(), is_valid).items():
                    statistics[name].copy_(value)

    def _allocate_statistics(self, like: Pair) -> None:
        if self.has_statistics and not any(self.statistics):
            with torch.inference_mode(False):
                key, value = (codec.allocate_statistics(x, self.per_head) for codec, x in zip(self.codecs, like, strict=True))
            self.statistics = key, value

    def _load_statistics(self, given: tuple[Codes, Codes]) -> None:
        for kept, side in zip(self.statistics, given, strict=True):
            for name, x in side.items():
                kept[name].copy_(x)
                self.calibrated = True
