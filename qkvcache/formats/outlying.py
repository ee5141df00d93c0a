"""Keys with outlying channels, which few bits break: how they are recognized, and the format that holds them.

Codes of few bits spread over the range of a vector. A channel far above the others leaves these few levels or
none. The mean of such a channel is subtracted (`centered.py`); but where a bias makes it, RoPE turns the bias
from one position to the next, and the mean of a channel that turns fast is near zero. Layer 0 of
Qwen2.5-Coder-0.5B has such keys: with 4 bits it makes three fifths of the model's divergence or more
(`eval/results/quality.jsonl`). Values need not change.

The root mean square of the largest channel after centring, over the root mean square of all channels, in the largest head:
                    64 tokens       1,024 tokens
Qwen2.5-Coder-0.5B  5.1 to 5.2      4.7 to 4.8       layer 0
                    2.5 to 3.1      2.2 to 2.6       the largest of the other layers
SmolLM2-135M        3.0 to 3.5      2.6 to 3.0       the largest of all layers
embedded model      2.8 to 3.2      2.7 to 2.9       the largest of all layers

Among fewer tokens the first one, to which the others attend, makes outlying channels in every model: up to
4.1 of 32 tokens, and 5.2 of 16. One channel pair that RoPE turns makes at most sqrt(D / 2): 5.7 of 64
channels, 4 of 32, of which nothing can be told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Codec, Format
from .centered import Centered, spread
from .int8 import Int8

FAR = 4.0
"""The ratio of the largest channel to all channels above which keys count as outlying."""
LEAST, MOST = 64, 1024
"""The fewest tokens of a row that tell, and the most that are examined."""


@dataclass(frozen=True)
class Int8Keys(Format):
    """The values of `format` beside keys in INT8, quantized around their mean."""

    format: Format

    @property
    def name(self) -> str:
        return f"{self.format.name}_int8_keys"

    def codecs(self) -> tuple[Codec, Codec]:
        layout = self.format.key.packed_layout
        return Int8(halves=layout is not None and layout.upper is not None).key, self.format.value

    @staticmethod
    def instead_of(format: Format) -> Int8Keys | None:
        """The format that takes the place of `format` for outlying keys. None for keys of 8 bits or more,
        which hold such channels, and for keys that are not quantized around their mean, the form of a
        format's authors."""
        layout = format.key.packed_layout
        return Int8Keys(format) if isinstance(format.key, Centered) and layout is not None and layout.bits < 8 else None


@torch.no_grad()
def outlying(keys: Tensor, is_valid: Tensor | None = None) -> float:
    """The root mean square of the largest channel of keys `[B, H, T, D]` after centring, over the root mean
    square of all channels, in the row and head where it is largest; 0 if every row has fewer than `LEAST`
    tokens. Examines the last `MOST` tokens. `is_valid`: bool `[B, T]`, False for padding; None: no padding.
    Waits for the device."""
    if keys.shape[2] < LEAST:
        return 0.0
    keys, is_valid = keys[:, :, -MOST:], None if is_valid is None else is_valid[:, -MOST:]
    energy = spread(keys, is_valid)
    ratio = energy.amax(-1) / energy.mean(-1).clamp_min(torch.finfo(energy.dtype).tiny)
    if is_valid is not None:
        ratio = ratio.where(is_valid.sum(-1)[:, None, None] >= LEAST, 0)
    return ratio.nan_to_num(0).amax().sqrt().item()
