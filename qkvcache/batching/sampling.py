"""Temperature, top_p and seed of each request in a batch.

A request's next token is the one with the largest sum of processed logit and Gumbel noise, so that each token is drawn
with its probability. The noise is a hash of the request's seed, the position and the token: it is the same in any
batch, on any rank, and after a preemption.
"""

from __future__ import annotations

import hashlib
import secrets
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

GREEDY = {"temperature": 1.0, "top_p": 1.0, "seed": 0}
"""Arguments of a request that takes the most probable token."""


def sampling_options(
    default: GenerationConfig, temperature: float | None = None, top_p: float | None = None, seed: int | None = None
) -> dict[str, Any]:
    """The arguments of a request. Temperature 0 is greedy. Without a temperature, the request samples if the default
    does or if `top_p` is given."""
    if temperature is not None and not (isinstance(temperature, Real) and 0 <= temperature < float("inf")):
        raise ValueError(f"temperature={temperature!r}: expected a number of at least 0")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}: expected a number above 0, at most 1")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}: expected an integer")
    if temperature == 0 or (temperature is None and top_p is None and not default.do_sample):
        return dict(GREEDY)
    if temperature is None:
        temperature = (default.do_sample and default.temperature) or 1.0
    if top_p is None:
        top_p = (default.do_sample and default.top_p) or 1.0
    seed = secrets.randbits(62) if seed is None else seed
    # Division by a smaller number overflows; the seed of a greedy request is 0.
    return {"temperature": max(float(temperature), 1e-4), "top_p": float(top_p), "seed": 2 * seed + 1}


def key(seed: int, position: int, child: str) -> int:
    """A 32-bit key of a request with this seed at a position; 0 if it is greedy. `child`: which fork it is, if any."""
    if not seed:
        return 0
    digest = hashlib.blake2b(f"{seed} {position} {child}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, fp32 `[B, count]`, from int32 keys `[B, 1]`, by MurmurHash3's finalizer of token and key."""
    bits = torch.arange(count, dtype=torch.int32, device=keys.device) * -1640531535 + keys
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * -2048144789
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * -1028477387
    bits = bits ^ (bits >> 16 & 0xFFFF)
    share = ((bits >> 8 & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log1p(-share))
