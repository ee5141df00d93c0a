"""Chooses between kernels: Triton on a GPU, the torch reference elsewhere. `QKVCACHE_KERNELS=torch` or `triton` forces one (triton on a
CPU needs its interpreter, `TRITON_INTERPRET=1`).

Where there is no Triton kernel for a codec or a shape, the torch reference runs; on a GPU, where it is slow, with one warning.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from . import counted, matmul
from . import evict as evicting
from . import pages as paged
from . import rotate as rotating
from . import sum_attention as reference
from .attend import Options, attend_observed
from .evict import StaticTensors
from .pages import PagedInputs, PageOptions, Pages
from .segments import AttentionInputs, Buffers, Exact, KeysOrValues, Pair, layout_of

if TYPE_CHECKING:
    from types import ModuleType

_NO_KERNEL = "no fused attention for head_dim {} in {}: torch operations instead, which are slow"
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
    """The module of the fused kernels, imported on first use: it needs Triton."""
    from . import fused

    return fused


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@functools.lru_cache(maxsize=32)
def prepare(codecs: tuple[Codec, Codec], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Allocates the tensors that are cached for these codecs and for keys and values `[B, H, T, dim]` of `dtype`: `tables.py` says why."""
    if on_triton(device):
        from .tables import tables
        from .triton_dequantize import table_of

        tables(codecs, *dims, device)
    for codec, dim in zip(codecs, dims, strict=True):
        token = torch.zeros(1, 1, 1, dim, dtype=dtype, device=device)
        statistics = codec.calibrate(token)
        codec.dequantize(codec.quantize(token, statistics) | statistics, dim)  # the torch operations cache constants, too
        if on_triton(device) and (layout := layout_of(codec)):
            table_of(layout, token)
            table_of(layout, token.bfloat16())  # for dequantizing


def fuses(query: Tensor, attention_inputs: AttentionInputs) -> bool:
    """Whether the fused kernel attends to these inputs. Warns once if kernels are on and it cannot."""
    if not (attention_inputs.exact and on_triton(query.device)):
        return False
    if fused().supports(attention_inputs, query):
        return True
    _warn_once(_NO_KERNEL.format(attention_inputs.key.shape[3], attention_inputs.key.dtype))
    return False


def attends_in_tiles(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None) -> bool:
    """Whether the fused kernel for many rows serves causal attention to these inputs, and is faster than dequantizing them."""
    if attention_inputs.paged is not None or torch.compiler.is_compiling() or not (attention_inputs.exact and on_triton(query.device)):
        return False
    return fused().supports(attention_inputs, query) and fused().tiled(query, attention_inputs, mask, {"causal": True}) is not None


def attend_on_codes(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """`attend`, by the fused kernel where there is one. Without a mask, over pages if there are such."""
    return observe_on_codes(query, attention_inputs, mask, **options)[0]


def observe_on_codes(
    query: Tensor,
    attention_inputs: AttentionInputs,
    mask: Tensor | None = None,
    *,
    observed: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """`attend_observed`, by the fused kernel where there is one."""
    if attention_inputs.paged is not None and mask is None and observed is None:  # the sums of pages are by slot
        out, _, attention_sums = attend_pages(query, attention_inputs.paged, **options)
    elif torch.compiler.is_compiling() and attention_inputs.buffers is not None and observed is None:
        out = attend_on_buffers(query, attention_inputs.buffers, mask, **options)
        attention_sums = out.new_empty(0)
    elif torch.compiler.is_compiling() and len(attention_inputs.exact):
        given = [observed if name == "observed" else options.get(name) for name in paged.OPTIONS]
        out, attention_sums = torch.ops.qkvcache.attend(query, *attention_inputs.arguments, mask, *given)
    elif fuses(query, attention_inputs):
        out, _, attention_sums = fused().fused_attend(query, attention_inputs, mask, observed=observed, **options)
    else:
        out, attention_sums = attend_observed(query, attention_inputs, mask, observed=observed, **options)
    return out, attention_sums


def attend_on_buffers(query: Tensor, buffers: Buffers, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """Attention of one query of each row, `[B, Hq, 1, D]` to `[B, Hq, 1, Dv]`, over storage that counts on the device. `mask` is by
    column."""
    if torch.compiler.is_compiling():
        sinks, scaling, softcap = options.get("sinks"), options.get("scaling"), options.get("softcap")
        return torch.ops.qkvcache.attend_buffers(query, *buffers.arguments, mask, sinks, scaling, softcap)
    attention_inputs = whole(buffers)
    if fuses(query, attention_inputs):
        return fused().fused_attend(query, attention_inputs, mask, **options)[0]
    return counted.attend_on_slots(query, buffers, mask, **options)


def attend_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, **options: Unpack[PageOptions]
) -> tuple[Tensor, Tensor, Tensor]:
    """`pages.attend_pages`, by the fused kernel where there is one."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.attend_pages(query, *inputs.arguments, mask, *[options.get(name) for name in paged.OPTIONS])
    if on_triton(query.device):
        if fused().supports(inputs, query):
            return fused().attend_pages(query, inputs, mask, **options)
        _warn_once(_NO_KERNEL.format(query.shape[3], query.dtype))
    return paged.attend_pages(query, inputs, mask, **options)


def quantize_pages(
    codecs: tuple[Codec, Codec], x: Pair, planes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], slots: Tensor
) -> None:
    """`pages.quantize_pages`, in one launch where there is a kernel."""
    if quantizes(codecs, x):
        from .triton_quantize import contiguous, quantize_kv

        quantize_kv(codecs, contiguous(x), planes, statistics, 0, slots)
        return
    paged.quantize_pages(codecs, x, planes, statistics, slots)


def store_rows(x: Pair, ring: Pair, ring_slots: Tensor, sinks: Pair, sink_slots: Tensor) -> None:
    """`pages.store_rows`, in one launch where there are kernels."""
    store = paged.store_rows
    if on_triton(x[0].device):
        from .triton_store_rows import store_rows as store
    store(x, ring, ring_slots, sinks, sink_slots)


def dequantize_pages(pages: Pages, out: Pair, begin: int = 0) -> None:
    """`pages.dequantize_pages`, in one launch for keys and one for values where there is a kernel."""
    if on_triton(out[0].device):
        from .triton_dequantize import dequantize_pages, supports

        if all(supports(codec, side.shape[3]) for codec, side in zip(pages.codecs, out, strict=True)):
            dequantize_pages(pages, out, begin)
            return
    paged.dequantize_pages(pages, out, begin)


def gather_rows(inputs: PagedInputs, new: Pair, starts: tuple[Tensor, Tensor], tiles: Tensor, out: Pair) -> None:
    """`pages.gather_rows`, in one launch where there is a kernel."""
    if on_triton(out[0].device):
        from .triton_dequantize import supports
        from .triton_gather import gather_rows

        if all(supports(codec, side.shape[3]) for codec, side in zip(inputs.pages.codecs, out, strict=True)):
            gather_rows(inputs, new, starts, tiles, out)
            return
    paged.gather_rows(inputs, new, starts, tiles, out)


def whole(buffers: Buffers) -> AttentionInputs:
    """The inputs of attention over storage that counts on the device, sized for `buffers.columns` tokens."""
    shapes = ((*x.shape[:2], buffers.columns, x.shape[3]) for x in buffers.residual)
    key, value = (KeysOrValues.of((), shape, x.dtype, x.device) for shape, x in zip(shapes, buffers.residual, strict=True))
    region = buffers.region if torch.compiler.is_compiling() else replace(buffers.region, tokens=buffers.columns)
    return AttentionInputs(key, value, region, (*buffers.sinks, *buffers.residual), buffers)


def step(buffers: Buffers, x: Pair) -> None:
    """Stores keys and values `[B, H, T, D]`, counting on the device: `counted.step`, in one launch where there is a kernel. More tokens
    than the ring has slots are stored in several steps."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.step(*buffers.arguments, *x)
        return
    for part in zip(*(side.split(1 if buffers.grows else buffers.residual[0].shape[2], dim=2) for side in x), strict=True):
        if launch := launch_of_step(buffers, part):
            launch(part)
        else:
            counted.step(buffers, part)


def launch_of_step(buffers: Buffers, x: Pair) -> Callable[[Pair], None] | None:
    """`step` for tokens of the shape and dtype of `x`, with all other arguments prepared; None if there is no kernel for it."""
    if not quantizes(buffers.codecs, x):
        return None
    from .triton_step import launch_of_step

    return launch_of_step(buffers, x)


def store_exact(buffers: Buffers, exact: Pair, sinks: tuple[int, int], begin: int, slot: int, lengths: tuple[int, int]) -> None:
    """`counted.store_exact`, in one launch where there are kernels."""
    store = counted.store_exact
    if on_triton(buffers.state.device):
        from .triton_store_exact import store_exact as store
    store(buffers, exact, sinks, begin, slot, lengths)


def append_token(static: StaticTensors, x: Pair, new: Sequence[Tensor | None], is_valid: Tensor | None) -> None:
    """`evict.append_token`, in one launch where there are kernels."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.append_token(*static.arguments, *x, list(new), is_valid)
        return
    append = evicting.append_token
    if on_triton(static.row_lengths.device):
        from .triton_evict import append_token as append
    append(static, x, new, is_valid)


def evict_token(static: StaticTensors, order: Tensor) -> Tensor:
    """`evict.evict_token`, in one launch where there is a kernel for the codecs."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.evict_token(*static.arguments, order)
    evict = evicting.evict_token
    shared = any(
        b.heads == "shared" and b.tokens == "each"
        for codec, x in zip(static.codecs, static.ring, strict=True)
        for b in codec.buffers(x.shape[3])
    )
    if quantizes(static.codecs, static.ring) and not shared:  # each head stores a copy of shared buffers, since it evicts on its own
        from .triton_evict import evict_token as evict
    return evict(static, order)


def unfold(buffers: Buffers, new: Pair | None) -> Pair:
    """`counted.unfold`: keys and values at their columns, `[B, H, columns, D]` each, followed by `new` `[B, H, T, D]`; zeros beyond."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.unfold(*buffers.arguments, *(new or (None, None)))
    return counted.unfold(buffers, new, dense)


def quadratic_form(x: Tensor, matrices: Tensor) -> Tensor:
    """`matmul.quadratic_form`, in one launch where there is a kernel."""
    if on_triton(x.device) and not (x.is_meta or torch.compiler.is_compiling()):
        from . import triton_quadratic_form

        if triton_quadratic_form.supports(x):
            return triton_quadratic_form.quadratic_form(x, matrices)
    return matmul.quadratic_form(x, matrices)


def rotate(x: Tensor, by: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """`rotate.rotate`, in one launch where there is a kernel, which has no gradients."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    if on_triton(x.device) and not (differentiated or x.is_meta or torch.compiler.is_compiling()):
        from . import triton_rotate

        if triton_rotate.supports(x):
            return triton_rotate.rotate(x, by, inv_freq, interleaved)
    return rotating.rotate(x, by, inv_freq, interleaved)


@functools.wraps(reference.sum_attention)
def sum_attention(query: Tensor, key: Tensor, observed: Tensor, visible: Tensor | None = None, **options: Any) -> Tensor:
    """`sum_attention.sum_attention`, by kernels where there are: the accumulated attention of many queries, fp32 `[B, H, T]`."""
    by_head = visible is not None and visible.dim() == 3
    if on_triton(query.device) and (options.get("lse") is not None or not by_head):
        from . import triton_sum_attention as kernels

        if kernels.supports(query, key):
            if not by_head:
                return kernels.sum_attention(query, key, observed, visible, **options)
            return kernels.sum_attention(query, key, observed, **options).masked_fill_(~visible, 0)  # type: ignore[operator]
    return reference.sum_attention(query, key, observed, visible, **options)


def quantizes(codecs: tuple[Codec, Codec], x: tuple[Tensor, Tensor]) -> bool:
    """Whether kernels can quantize these keys and values `[B, H, T, D]`."""
    if not on_triton(x[0].device):
        return False
    from .triton_quantize import supports

    return all(supports(codec, side.shape[3]) for codec, side in zip(codecs, x, strict=True))


def quantize_into(
    codecs: tuple[Codec, Codec], x: tuple[Tensor, Tensor], planes: tuple[Codes, Codes], statistics: tuple[Codes, Codes], start: int
) -> None:
    """Quantizes keys and values `[B, H, T, D]` into slots `start` to `start + T` of planes `[B, H, slots, width]`, in one launch; needs
    `quantizes`. `statistics`: the buffers that are kept once, `[B, H, 1, width]`."""
    from .triton_quantize import contiguous, quantize_kv

    quantize_kv(codecs, contiguous(x), planes, statistics, start)


def dense_attention_inputs(attention_inputs: AttentionInputs) -> Pair:
    """Keys and values `[B, H, T, D]` of the attention inputs in the model's dtype, in compiled code. For storage that counts on the device,
    `T` is its columns, with zeros where there is no token."""
    if attention_inputs.buffers is not None:
        return torch.ops.qkvcache.unfold(*attention_inputs.buffers.arguments, None, None)
    return torch.ops.qkvcache.dense(*attention_inputs.arguments)


def dense(side: KeysOrValues) -> Tensor:
    """All tokens of `side` in the model's dtype, `[B, H, T, D]`: the only place where a whole layer is dequantized."""
    if on_triton(side.device):
        from .triton_dequantize import decode, supports

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
