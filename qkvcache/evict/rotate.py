"""Rotary embedding (RoPE) in plain torch: pairs of channels rotated by an angle for each position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, by: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """`x` `[B, H, T, D]` rotated by `by * inv_freq`, in its dtype: angles in fp64, which distant positions need, products in fp32 at least.

    Args:
        by: positions, `[B or 1, T or 1]`.
        inv_freq: the angle of each pair of channels for one position, fp64 `[R/2]`; channels beyond R are unchanged.
        interleaved: pairs are channels (2i, 2i+1), else (i, i + R/2).
    """
    angles = by.double()[:, None, :, None] * inv_freq
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(x.device, dtype), angles.sin().to(x.device, dtype)
    channels = 2 * len(inv_freq)
    half = channels // 2
    first, second = (slice(0, channels, 2), slice(1, channels, 2)) if interleaved else (slice(half), slice(half, channels))
    one, two, rotated = x[..., first], x[..., second], torch.empty_like(x)
    rotated[..., first] = torch.addcmul(one * cos, two, sin, value=-1)
    rotated[..., second] = torch.addcmul(two * cos, one, sin)
    rotated[..., channels:] = x[..., channels:]
    return rotated
