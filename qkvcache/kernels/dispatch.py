"""Which code runs: Triton on a GPU, the torch reference elsewhere. `QKVCACHE_KERNELS=torch` or `triton` forces one (triton on a CPU needs
its interpreter, `TRITON_INTERPRET=1`).

What Triton cannot do for a codec or a shape runs in torch, on a GPU with one warning, since it is slow there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from . import column_mass as reference
from . import counted
from . import retire as forgetting
from .attend import attend, attend_observed
from .retire import Places
from .segments import Buffers, Exact, Pair, Payload, Side

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
def fused() -> ModuleType:
    from . import fused

    return fused


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@functools.lru_cache(maxsize=32)
def prepare(codecs: tuple[Codec, Codec], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Has all made that is made once for these codecs, and keys and values of this kind: `tables.py` says why."""
    if on_triton(device):
        from .tables import tables
        from .triton_decode import describe, table_of

        tables(codecs, *dims, device)
    for codec, dim in zip(codecs, dims, strict=True):
        token = torch.zeros(1, 1, 1, dim, dtype=dtype, device=device)
        once = codec.fit(token)
        codec.decode(codec.encode(token, once) | once, dim)  # torch operations keep constants, and kernels use some of them
        if on_triton(device) and (spec := describe(codec)):
            table_of(spec, token)
            table_of(spec, token.bfloat16())  # of what decodes


def fuses(query: Tensor, payload: Payload) -> bool:
    """Whether the fused kernel is there for this; if it should be and is not, with a warning."""
    if not (payload.exact and on_triton(query.device)):
        return False
    if fused().supports(payload, query):
        return True
    dim, dtype = payload.key.shape[3], payload.key.dtype
    _warn_once(f"no fused attention for head_dim {dim} in {dtype}: torch operations instead, which are slow")
    return False


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
    if torch.compiler.is_compiling():
        if payload.buffers is not None:
            return attend_on_buffers(query, payload.buffers, mask, scaling=scaling, softcap=softcap, sinks=sinks)
        if len(payload.exact):
            return torch.ops.qkvcache.attend(query, *payload.arguments, mask, sinks, scaling, softcap, causal)[0]
    elif fuses(query, payload):
        return fused().fused_attend(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks)[0]
    return attend(query, payload, mask, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks)


def observe_on_codes(
    query: Tensor,
    payload: Payload,
    mask: Tensor | None = None,
    *,
    observed: Tensor,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_observed`, by the fused kernel where there is one."""
    if torch.compiler.is_compiling() and len(payload.exact):
        out, _, mass = torch.ops.qkvcache.attend(query, *payload.arguments, mask, sinks, scaling, softcap, causal, observed)
        return out, mass
    if fuses(query, payload):
        options = {"scaling": scaling, "causal": causal, "softcap": softcap, "sinks": sinks, "observed": observed}
        out, _, mass = fused().fused_attend(query, payload, mask, **options)
        return out, mass
    return attend_observed(query, payload, mask, observed=observed, scaling=scaling, causal=causal, softcap=softcap, sinks=sinks)


def attend_on_buffers(
    query: Tensor,
    held: Buffers,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query a row, `[B, Hq, 1, Dv]`, over a storage, counting on the device. `mask` is by column."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.attend_buffers(query, *held.arguments, mask, sinks, scaling, softcap)
    payload = whole(held)
    if fuses(query, payload):
        return fused().fused_attend(query, payload, mask, scaling=scaling, softcap=softcap, sinks=sinks)[0]
    return counted.attend_on_slots(query, held, mask, scaling=scaling, softcap=softcap, sinks=sinks)


def whole(held: Buffers) -> Payload:
    """What attention over a storage reads where only the device knows how many tokens there are: as many as there are columns."""
    shapes = ((*x.shape[:2], held.columns, x.shape[3]) for x in held.residual)
    key, value = (Side.of((), shape, x.dtype, x.device) for shape, x in zip(shapes, held.residual, strict=True))
    body = held.body if torch.compiler.is_compiling() else replace(held.body, tokens=held.columns)
    return Payload(key, value, body, (*held.sinks, *held.residual), held)


def step(held: Buffers, x: Pair) -> None:
    """Takes keys and values `[B, H, T, D]`, counting on the device: in one launch where there is a kernel and the ring has room."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.step(*held.arguments, *x)
        return
    take = counted.step
    if encodes(held.codecs, x):
        from .triton_step import step_kv as take
    for part in zip(*(side.split(1 if held.grows else held.residual[0].shape[2], dim=2) for side in x), strict=True):
        take(held, part)


def launch_of_step(held: Buffers, x: Pair) -> Callable[[Pair], None] | None:
    """`step` for tokens like `x`, with all prepared that stays the same from step to step; None where there is no kernel for it."""
    if not encodes(held.codecs, x):
        return None
    from .triton_step import Step

    return Step(held, x)


def arrive(held: Places, x: Pair, new: Sequence[Tensor | None], real: Tensor | None) -> None:
    """`retire.arrive`, in one launch where there are kernels."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.arrive(*held.arguments, *x, list(new), real)
        return
    take = forgetting.arrive
    if on_triton(held.seen.device):
        from .triton_retire import arrive as take
    take(held, x, new, real)


def retire(held: Places, order: Tensor) -> Tensor:
    """`retire.retire`, in one launch where there is a kernel for the codecs."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.retire(*held.arguments, order)
    move = forgetting.retire
    shared = any(
        b.heads == "shared" and b.tokens == "each"
        for codec, x in zip(held.codecs, held.ring, strict=True)
        for b in codec.buffers(x.shape[3])
    )
    if encodes(held.codecs, held.ring) and not shared:  # what heads share they hold each, where each has its own slot
        from .triton_retire import retire as move
    return move(held, order)


def unfold(held: Buffers, new: Pair | None) -> Pair:
    """All tokens at their columns, `[B, H, columns, D]` each, and then those of `new`; zeros beyond. Counts on the device."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.unfold(*held.arguments, *(new or (None, None)))
    return counted.unfold(held, new, dense)


def column_mass(
    query: Tensor,
    key: Tensor,
    observed: Tensor,
    visible: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention mass of a prefill, fp32 `[B, H, T]`: `column_mass.py` says of what."""
    if on_triton(query.device):
        from . import triton_column_mass as kernels

        if kernels.supports(query, key):
            return kernels.column_mass(query, key, observed, visible, scaling=scaling, softcap=softcap, sinks=sinks, lse=lse)
    return reference.column_mass(query, key, observed, visible, scaling=scaling, softcap=softcap, sinks=sinks, lse=lse)


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


def dense_payload(payload: Payload) -> Pair:
    """Keys and values of a payload in the model's dtype, in compiled code; of a storage at their columns, zeros beyond."""
    if payload.buffers is not None:
        return torch.ops.qkvcache.unfold(*payload.buffers.arguments, None, None)
    return torch.ops.qkvcache.dense(*payload.arguments)


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
