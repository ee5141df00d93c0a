"""Which code runs: Triton on a GPU, the torch reference elsewhere. `QKVCACHE_KERNELS=torch` or `triton` forces one (triton on a CPU needs
its interpreter, `TRITON_INTERPRET=1`).

What Triton cannot do for a codec or a shape runs in torch, on a GPU with one warning, since it is slow there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .attend import attend
from .segments import Exact, Payload, Side

if TYPE_CHECKING:
    from types import ModuleType

BACKENDS = ("torch", "triton")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def on_triton(device: torch.device) -> bool:
    """Whether kernels for tensors on `device` are Triton's.

    Raises ValueError if QKVCACHE_KERNELS holds something else than "torch" or "triton".
    """
    forced = os.environ.get("QKVCACHE_KERNELS")
    if forced:
        if forced not in BACKENDS:
            raise ValueError(f"QKVCACHE_KERNELS={forced!r}: expected 'torch' or 'triton'")
        return forced == "triton"
    return device.type == "cuda" and _HAS_TRITON


@functools.cache
def _fused() -> ModuleType:
    from . import fused

    return fused


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def attend_on_codes(
    query: Tensor,
    payload: Payload,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend`, by the fused kernel where there is one."""
    if payload.exact and on_triton(query.device):
        if _fused().supports(payload, query):
            from .ops import attend_op

            return attend_op(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks)[0]
        dim, dtype = payload.key.shape[3], payload.key.dtype
        _warn_once(f"no fused attention for head_dim {dim} in {dtype}: torch operations instead, which are slow")
    return attend(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks)


def encodes(codecs: tuple[Codec, Codec], x: tuple[Tensor, Tensor]) -> bool:
    """Whether `encode_into` can store these keys and values."""
    if not on_triton(x[0].device):
        return False
    from .triton_encode import supports

    return all(supports(codec, side.shape[3]) for codec, side in zip(codecs, x, strict=True))


def encode_into(
    codecs: tuple[Codec, Codec], x: tuple[Tensor, Tensor], planes: tuple[Codes, Codes], once: tuple[Codes, Codes], start: int
) -> None:
    """Encodes keys and values `[B, H, T, D]` into slots `start` to `start + T` of planes `[B, H, slots, width]`, in one launch."""
    from .triton_encode import encode_kv

    x = tuple(side if side.stride(-1) == 1 else side.contiguous() for side in x)  # type: ignore[assignment]
    encode_kv(list(zip(codecs, x, planes, once, strict=True)), start)


def dense(side: Side) -> Tensor:
    """All tokens of `side` in the model's dtype: the only place where a whole history is decoded."""
    if on_triton(side.device):
        from .triton_decode import decode, supports

        if all(isinstance(s, Exact) or supports(s.codec, s.head_dim) for s in side.segments):
            out = torch.empty(side.shape, dtype=side.dtype, device=side.device)
            start = 0
            for segment in side.segments:
                part = out[:, :, start : start + segment.tokens]
                start += segment.tokens
                if isinstance(segment, Exact):
                    part.copy_(segment.x)
                else:
                    decode(segment.codec, segment.codes, part)
            return out
    return side.dense()
