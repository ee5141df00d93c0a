"""Chooses between kernels: Triton on a GPU, the torch reference elsewhere. `QKVCACHE_KERNELS=torch` or
`triton` forces one (triton on a CPU needs its interpreter, `TRITON_INTERPRET=1`).

Where there is no Triton kernel for a codec or a shape, the torch reference runs; on a GPU, where it is slow, with one warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor

from ...formats.base import Codec
from ..attend.reference import OPTIONS, Options, attend
from ..attend.reference import attend_pages as attend_pages_in_torch
from ..inputs import AttentionInputs
from ..paged_inputs import PagedInputs
from ..pages import Pages
from ..segments import Exact, KeysOrValues, Packed, Pair, layout_of
from ..store import reference as stores
from ..work import TOGETHER, Splits
from .handles import ORDER

_NO_KERNEL = "no fused attention for head_dim {} in {}: torch operations instead, which are slow"
BACKENDS = ("torch", "triton")
_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def on_triton(device: torch.device) -> bool:
    """Whether kernels for tensors on `device` are Triton's.

    Raises ValueError if QKVCACHE_KERNELS holds something else than "torch" or "triton", or "triton" for a CPU without the interpreter.
    """
    forced = os.environ.get("QKVCACHE_KERNELS")
    if forced:
        if forced not in BACKENDS:
            raise ValueError(f"QKVCACHE_KERNELS={forced!r}: expected 'torch' or 'triton'")
        if forced == "triton" and device.type == "cpu" and not _INTERPRETED:
            raise ValueError("QKVCACHE_KERNELS='triton' for tensors of the CPU: set TRITON_INTERPRET=1 before Python starts, or unset it")
        return forced == "triton"
    return device.type == "cuda" and _HAS_TRITON


@functools.cache
def module(name: str) -> ModuleType:
    """A module of kernels, imported on first use: it needs Triton. `name`: within `kernels`; after a dot, within the package."""
    for thread in _LOADING:
        if thread is not threading.current_thread():
            thread.join()
    return importlib.import_module(f"..{name}", __package__)


_LOADING: list[threading.Thread] = []


def load_ahead() -> None:
    """Begins, in other threads, what the first prompt of a process would wait for a second, if a GPU is in use: to import the kernels of a
    prompt and of a step, and to hash the files of Triton, by which it looks up compiled kernels."""
    if not _LOADING and torch.cuda.is_initialized() and on_triton(torch.device("cuda")):
        _LOADING.extend(threading.Thread(target=load, daemon=True) for load in (_import_kernels, _hash_triton))
        for thread in _LOADING:
            thread.start()


def _import_kernels() -> None:
    for name in ("store.triton_store", "attend.plan"):
        importlib.import_module(f"..{name}", __package__)


def _hash_triton() -> None:
    if triton_key := getattr(importlib.import_module("triton.runtime.cache"), "triton_key", None):
        triton_key()


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


@functools.lru_cache(maxsize=32)
def prepare(codecs: tuple[Codec, Codec], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Allocates the tensors that are cached for these codecs and for keys and values `[B, H, T, dim]` of `dtype`: `tables.py` says why."""
    if on_triton(device):
        module("host.tables").tables(codecs, *dims, device)
    for codec, dim in zip(codecs, dims, strict=True):
        token = torch.zeros(1, 1, 1, dim, dtype=dtype, device=device)
        statistics = codec.calibrate(token)
        codec.dequantize(codec.quantize(token, statistics) | statistics, dim)  # the torch operations cache constants, too
        if on_triton(device) and (layout := layout_of(codec)):
            table_of = module("store.triton_dequantize").table_of
            table_of(layout, token)
            table_of(layout, token.bfloat16())  # for dequantizing


_STEPS: set[tuple] = set()
"""Kinds of steps that `compile_step` has compiled."""


def _kind_of_step(inputs: PagedInputs) -> tuple:
    return *inputs.pages.codecs, *[(x.shape[1], x.shape[3], x.dtype, x.device) for x in inputs.ring]


def compiles_step(inputs: PagedInputs) -> bool:
    """Whether `compile_step` would compile something for these inputs."""
    return on_triton(inputs.ring[0].device) and _kind_of_step(inputs) not in _STEPS


def compile_step(inputs: PagedInputs, query: Tensor, mask: Tensor | None, **options: Unpack[Options]) -> None:
    """Begins to compile, in other threads, what a step of one token launches: storing it, and attention of
    `query`, `[B, Hq, 1, D]`, under `mask` to `inputs`. Does so once for layers that are alike."""
    _STEPS.add(_kind_of_step(inputs))
    if not module("attend.launches").supports(inputs, query):
        return
    key, value = (x[:, :, :1] for x in inputs.ring)
    with module("host.launch").compiling_ahead():
        if launch := launch_of_step(inputs, (key, value)):
            launch((key, value))
        module("attend.plan").attend_pages(query, inputs, mask, **options)


def fuses(kernels: str, inputs: PagedInputs, query: Tensor, *others: Any) -> bool:
    """Whether the fused kernel in `kernels`, a name for `module`, attends to these inputs. Warns once if kernels are on and it cannot."""
    if not on_triton(query.device):
        return False
    supported = module(kernels).supports(inputs, query, *others)
    if not supported:
        _warn_once(_NO_KERNEL.format(query.shape[3], query.dtype))
    return supported


def attends_in_tiles(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None) -> bool:
    """Whether the fused kernel for many rows serves causal attention to these inputs. Dequantizing is faster
    where pages lie in host memory, which it reads once."""
    inputs = attention_inputs.paged
    if inputs is None or inputs.pages.on_host or torch.compiler.is_compiling() or not on_triton(query.device):
        return False
    fused = module("attend.launches")
    return fused.supports(inputs, query) and fused.tiled(query, inputs, mask, {"causal": True}) is not None


def attend_on_codes(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
    """`attend`, by the fused kernel where there is one. Without a mask, it attends over pages if heads have pages of their own."""
    inputs = attention_inputs.paged
    if torch.compiler.is_compiling() and attention_inputs.compiled:
        given = [options.get(name) for name in OPTIONS]
        shape = list(attention_inputs.value.shape[1:])
        return torch.ops.qkvcache.attend(query, inputs.handle, ORDER[query.device], shape, mask, *given)[0]
    if inputs is not None and not (attention_inputs.by_head and mask is not None):  # which is by column
        kernel = fuses("attend.launches", inputs, query)
        by_pages = kernel or attention_inputs.by_head
        if by_pages or chooses(inputs, query):
            keys = None if by_pages else [x for x in attention_inputs.key.segments if isinstance(x, Packed)]
            return _attend_pages(kernel, query, inputs, mask, keys, **options)[0]
    return attend(query, attention_inputs, mask, **options)


def plan_on_codes(query: Tensor, attention_inputs: AttentionInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Any:
    """The plan of `attend_on_codes` for layers that are alike (`plan.Plan`); None where there is no kernel,
    or each layer chooses what it reads."""
    inputs = attention_inputs.paged
    return None if inputs is None or attention_inputs.by_head else plan_pages(query, inputs, mask, **options)


def plan_pages(query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> Any:
    """The plan of `attend_pages` for layers that are alike (`plan.Plan`); None as in `plan_on_codes`."""
    if chooses(inputs, query) or not fuses("attend.launches", inputs, query):
        return None
    return module("attend.plan").plan_pages(query, inputs, mask, **options)


def chooses(inputs: PagedInputs, query: Tensor) -> bool:
    """Whether attention of `query` reads chosen tokens of `inputs`."""
    return inputs.select is not None and inputs.select.chooses(query, inputs)


def attend_pages(query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    """`attend.attend_pages`, by the fused kernel where there is one."""
    return _attend_pages(fuses("attend.launches", inputs, query), query, inputs, mask, **options)


def _attend_pages(
    by_kernel: bool,
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None,
    keys: list[Packed] | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """`attend_pages` in eager code, over the blocks that the inputs choose, if they do. `keys`: as in `Select.attend`."""
    attend = module("attend.plan").attend_pages if by_kernel else attend_pages_in_torch
    if inputs.select is None or not inputs.select.chooses(query, inputs):
        return attend(query, inputs, mask, **options)
    return inputs.select.attend(attend, by_kernel, query, inputs, mask, keys, **options)


def split_rows(
    lengths: Tensor, max_length: int, codecs: tuple[Codec, Codec], heads: int, head_dim: int, shares: Tensor | None = None
) -> Splits | None:
    """`Splits` of rows with `lengths` tokens in pages, int32 `[B]`, at most `max_length`, of `heads` KV heads,
    stored by `codecs`; None where the torch reference attends. `shares`: as in `Splits.of`."""
    if not on_triton(lengths.device):
        return None
    programs = module("attend.launches").programs_of(codecs, head_dim, lengths.device)
    return Splits.of(lengths, max_length, max(programs // heads, 1), shares)


def reads_together(groups: int, head_dim: int, device: torch.device) -> bool:
    """Whether kernels read what rows of a batch share once for `TOGETHER` of them, with `groups` query heads of a KV head."""
    return on_triton(device) and head_dim <= 128 and groups * TOGETHER <= module("attend.launches").OF_SHARED.rows


def _serve(kernels: str, codecs: tuple[Codec, Codec], x: Pair) -> bool:
    """Whether `kernels` know these codecs for keys and values `[B, H, T, D]`."""
    return on_triton(x[0].device) and all(map(module(kernels).supports, codecs, [side.shape[3] for side in x]))


def quantizes(codecs: tuple[Codec, Codec], x: Pair) -> bool:
    """Whether kernels can quantize these keys and values `[B, H, T, D]`."""
    return _serve("store.triton_quantize", codecs, x)


def dequantizes(pages: Pages, out: Pair) -> bool:
    """Whether a kernel can dequantize these pages into `out`, keys and values `[B, H, T, D]`."""
    return pages.by_page and _serve("store.triton_dequantize", pages.codecs, out)


def quantize_into(pages: Pages, x: Pair, slots: Tensor | int, zones: Sequence[tuple[Pair, Tensor]] = ()) -> None:
    """`reference.quantize_into`, in one launch where there is a kernel."""
    kernels = module("store.triton_store") if pages.by_page and quantizes(pages.codecs, x) else stores
    kernels.quantize_into(pages, x, slots, zones)


def dequantize_pages(pages: Pages, out: Pair, begin: int = 0) -> None:
    """`reference.dequantize_pages`, in one launch where there is a kernel."""
    kernels = module("store.triton_dequantize") if dequantizes(pages, out) else stores
    kernels.dequantize_pages(pages, out, begin)


def calibrate(inputs: PagedInputs, begun: Tensor, x: Pair, is_valid: Tensor | None) -> None:
    """`reference.calibrate` of the pages of `inputs`, in compiled code."""
    torch.ops.qkvcache.calibrate(inputs.handle, ORDER[x[0].device], begun, *x, is_valid)


def step(inputs: PagedInputs, x: Pair) -> None:
    """Stores keys and values `[B, H, T, D]`, counting on the device: `reference.step`, in one launch where there is a kernel."""
    if torch.compiler.is_compiling():
        torch.ops.qkvcache.step(inputs.handle, ORDER[x[0].device], *x)
    elif launch := launch_of_step(inputs, x):
        launch(x)
    else:
        stores.step(inputs, x)
        if inputs.pages.on_host:
            inputs.pages.copy_of(x[0].shape[2])()


def launch_of_step(inputs: PagedInputs, x: Pair) -> Callable[[Pair], None] | None:
    """`step` for tokens of the shape and dtype of `x`, with all other arguments prepared; None if there is no kernel for it."""
    if not (inputs.pages.by_page and quantizes(inputs.pages.codecs, x)):
        return None
    launch = module("store.triton_store").launch_of_step(inputs, x)
    if not inputs.pages.on_host:
        return launch
    copy = inputs.pages.copy_of(x[0].shape[2])

    def stored(x: Pair) -> None:
        launch(x)
        copy()

    return stored


def unfold(inputs: PagedInputs, columns: int, new: Pair) -> Pair:
    """`reference.unfold`: keys and values at their columns, `[B, H, columns, D]` each, followed by `new` `[B, H, T, D]`; zeros beyond."""
    if torch.compiler.is_compiling():
        return torch.ops.qkvcache.unfold(inputs.handle, ORDER[new[0].device], columns, *new)
    return stores.unfold(inputs, columns, new)


def read(x: Tensor) -> Tensor:
    """A tensor that operators write behind a handle, as it is now."""
    return torch.ops.qkvcache.read(x, ORDER[x.device]) if torch.compiler.is_compiling() else x


def dense(side: KeysOrValues) -> Tensor:
    """All tokens of `side` in the model's dtype, `[B, H, T, D]`: the only place where a whole layer is dequantized."""
    if on_triton(side.device):
        kernels = module("store.triton_dequantize")
        if all(isinstance(s, Exact) or kernels.supports(s.codec, s.head_dim) for s in side.segments):
            out = torch.empty(side.shape, dtype=side.dtype, device=side.device)
            for segment, part in zip(side.segments, out.split([s.tokens for s in side.segments], dim=2), strict=True):
                if isinstance(segment, Exact):
                    part.copy_(segment.x)
                else:
                    kernels.decode(segment.codec, segment.codes, part)
            return out
    return side.dense()
