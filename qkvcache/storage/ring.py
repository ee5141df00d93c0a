"""Rings of exact tokens: token `i` of those in a ring is in slot `(start + i) % R`.

Growing and preallocated layers have as many tokens in the ring as follow from the tokens seen: `start` is the
number of quantized tokens. Rings of requests (`batching/rings.py`) keep it by the token's number, too. A
layer that drops tokens keeps `start`, since its ring takes in the tensors of a prompt as they are, and
padding leaves it for the sinks and for the front of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def in_order(ring: Tensor, start: int, count: int) -> Tensor:
    """`count` tokens of a ring `[B, H, R, ...]` in token order, of which the first is in slot `start % R`."""
    at = start % max(ring.shape[2], 1)
    first = ring[:, :, at : at + count]
    missing = count - first.shape[2]
    return torch.cat([first, ring[:, :, :missing]], dim=2) if missing else first


def put(ring: Tensor, start: int, new: Tensor) -> None:
    """Writes tokens `new` `[B, H, N, ...]`, at most `R`, into a ring `[B, H, R, ...]` from slot `start % R` on."""
    at, count = start % max(ring.shape[2], 1), new.shape[2]
    first = min(count, ring.shape[2] - at)
    ring[:, :, at : at + first] = new[:, :, :first]
    if first < count:
        ring[:, :, : count - first] = new[:, :, first:]
