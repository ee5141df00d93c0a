"""Host side of the fused kernel: which codecs it reads, how the work is split, and the launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from ..formats.base import PackedLayout
from .pages import PagedInputs
from .segments import AttentionInputs, layout_of, planes_of
from .tables import Tables, tables
from .triton_attend import attend_kernel, attend_pages_kernel
from .triton_join import reduce_kernel, rotate_kernel
from .triton_sum_splits import BODY_GRAIN, EXACT_GRAIN, sum_splits_kernel


@dataclass(frozen=True)
class Launch:
    """How the kernel is launched: tokens in a tile, tiles in flight, registers a thread (None: as many as it takes), programs for a
    multiprocessor, warps of a program, query rows of a program."""

    tile: int = 32
    stages: int = 2
    registers: int | None = 168
    programs: int = 12
    warps: int = 1
    rows: int = 8


LAUNCHES = {
    ("lut4", "int4"): Launch(stages=3),
    ("int8", "int4"): Launch(64, 3, None, 24),
    **{(kind, kind): Launch(64, 3, None) for kind in ("half", "int8", "uint8", "e4m3", "e5m2")},
}
"""By the kinds of keys and values, where `Launch()` is not the best measured on an H100 (`eval/bench_kernels.py --tune`)."""
WIDE = Launch(registers=None)
"""For head_dim beyond 128, where larger tiles would not fit in registers."""
MANY_ROWS = Launch(64, 3, None, 8, 2, 32), Launch(64, 3, None, 4, 4, 64)
"""For up to 32 query rows, and for more: each code is unpacked once for as many rows as the registers of a program hold."""
LEAST_SPLIT, MOST_SPLITS = 128, 100
"""Tokens under which a split is not worth its partial sums, and splits of a sequence beyond which joining them costs too much."""


def launched(key: PackedLayout, value: PackedLayout, head_dim: int, rows: int = 1, wide: bool = True) -> Launch:
    """For `rows` query rows of a KV head. `wide`: more than 16 rows may share a program."""
    if rows > 16 and wide and head_dim <= 128:
        return MANY_ROWS[0] if rows <= 32 else MANY_ROWS[1]
    launch = LAUNCHES.get((key.kind, value.kind), Launch()) if head_dim <= 128 else WIDE
    return launch if rows <= 8 else replace(launch, rows=16)


EXACT_TILE = 32
"""Exact tokens of a tile. One program reads them all, and with few other tokens the rest waits for it."""
SUM_TOKENS = 1024
"""Of a program that sums attention."""

calls = 0
"""How often the fused kernel ran."""


def supports(attention_inputs: AttentionInputs, query: Tensor) -> bool:
    """Whether the fused kernel can read this attention_inputs."""
    if attention_inputs.region is not None and not all(map(layout_of, (attention_inputs.region.key, attention_inputs.region.value))):
        return False
    widths = (attention_inputs.key.shape[3], attention_inputs.value.shape[3])
    return query.dtype == attention_inputs.key.dtype and all(dim % 16 == 0 and dim <= 256 for dim in widths)


@functools.lru_cache(maxsize=8)
def architecture(device: torch.device) -> tuple[int, int]:
    """`(compute capability, multiprocessors)`; capability 0 where there is no NVIDIA assembly."""
    if device.type != "cuda":
        return 0, 4
    properties = torch.cuda.get_device_properties(device)
    return (0 if torch.version.hip else properties.major * 10 + properties.minor), properties.multi_processor_count


def split(tokens: int, groups: int, tile: int, warps: int) -> tuple[int, int]:
    """`(splits, tokens of each)` for a body of `tokens` that `groups` programs would read."""
    if not tokens:
        return 0, tile
    wanted = min(max(warps // groups - 1, 1), MOST_SPLITS)  # one is for the exact tokens
    each = max(-(-tokens // wanted), LEAST_SPLIT)
    each = -(-each // tile) * tile
    return -(-tokens // each), each


P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(launches: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """Triton launches on the current device, wherever the tensors are: where a model is spread over several GPUs, on the wrong one."""

    @functools.wraps(launches)
    def on_device(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(first):
            return launches(first, *args, **kwargs)

    return on_device


class AttendLaunch(NamedTuple):
    """What the launches take of the attention inputs, whatever the query."""

    use: Tables
    empty: Tensor
    """For an argument that is not there."""
    tensors: tuple[Tensor, ...]
    centers: list[Tensor]
    """The means of keys and of values."""
    strides: tuple[int, ...]
    constants: dict[str, object]


def launch_for(attention_inputs: AttentionInputs) -> AttendLaunch:
    """Of storage that stays where it is, found out once."""
    buffers = attention_inputs.buffers
    if buffers is not None and buffers.launch is not None:
        return buffers.launch
    region, exact = attention_inputs.region, attention_inputs.exact
    dim, value_dim, device = attention_inputs.key.shape[3], attention_inputs.value.shape[3], exact[0].device
    use = tables((region.key, region.value) if region else None, dim, value_dim, device)
    empty = torch.empty(0, dtype=exact[0].dtype, device=device)
    k_codes, k_high, k_scales, v_codes, v_high, v_scales = region.planes if region else [empty] * 6
    table = region.table if region else empty.long()
    tensors = use.rotation, use.signs, table, k_codes, k_high, use.k_shifts, k_scales, v_codes, v_high, use.v_shifts, v_scales, *exact
    constants: dict[str, object] = {"K": use.key, "V": use.value, "D": dim, "DV": value_dim, "TX": EXACT_TILE}
    for i, side in enumerate("KV"):
        constants[f"{side}_SHARED"], constants[f"{side}_ONCE"] = (region.shared[i], int(region.statistics[i])) if region else (False, 0)
    constants["COUNTED"] = 0 if buffers is None else LEAST_SPLIT
    centers = [codes["center"].contiguous() if "center" in codes else empty for codes in (region.chunks[0] if region else ({}, {}))]
    args = AttendLaunch(use, empty, tensors, centers, tuple(n for x in exact for n in x.stride()[:3]), constants)
    if buffers is not None:
        buffers.launch = args
    return args


@on_its_device
def fused_attend(
    query: Tensor,
    attention_inputs: AttentionInputs,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    launch: Launch | None = None,
    observed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attend_observed`, with the log of the normaliser between: output, `[B, Hq, Q]`, accumulated attention; in one pass over the
    codes.

    Args:
        window: a query sees the last `window` tokens up to itself.
        launch: for measuring; chosen by format otherwise.
        observed: without it, the accumulated attention is `[B, H, 0]`, and costs nothing.

    Raises ValueError for causal queries that are not all among the exact recent tokens, and for `observed` where the device counts tokens.
    """
    if causal and query.shape[2] > attention_inputs.exact[2].shape[2]:
        raise ValueError(
            f"causal with {query.shape[2]} queries: their own tokens must be among the exact recent ones, of which there are "
            f"{attention_inputs.exact[2].shape[2]}"
        )
    if observed is not None and attention_inputs.buffers is not None:
        raise ValueError("`observed` cannot be combined with storage that counts on the device")
    global calls
    calls += 1
    batch, query_heads, queries, dim = query.shape
    heads, value_dim = attention_inputs.key.shape[1], attention_inputs.value.shape[3]
    groups = query_heads // heads
    device = query.device
    arch, processors = architecture(device)
    rows = groups * queries
    query = query if query.stride(-1) == 1 else query.contiguous()

    region, args = attention_inputs.region, launch_for(attention_inputs)
    use, empty = args.use, args.empty
    n_first, n_recent = attention_inputs.exact[0].shape[2], attention_inputs.exact[2].shape[2]
    exact = n_first + n_recent > 0
    n_body = 0 if region is None else region.tokens
    nvidia = bool(arch) or device.type == "cpu"
    wide = nvidia and observed is None  # weights that are kept take the registers
    launch = launch or launched(use.key, use.value, max(dim, value_dim), rows, wide)
    t, r = launch.tile, launch.rows if nvidia else 16
    blocks = -(-rows // r)
    body_splits, each = split(n_body, batch * heads * blocks, t, processors * launch.programs)
    total_splits = body_splits + exact

    body_query, factor = query, use.factor
    if use.whole is not None:
        query = query.contiguous()
        body_query = torch.empty_like(query, dtype=torch.float32)
        count = batch * query_heads * queries
        rotate_kernel[(-(-count // 16),)](query, use.whole, body_query, count, D=dim, DP=triton.next_power_of_2(dim), R=16, TURN=factor)
        factor = 1.0

    part = torch.empty(batch * heads * blocks * total_splits * r * value_dim, dtype=torch.float32, device=device)
    maxima = torch.empty(batch * heads * blocks * total_splits * r, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    slots = grains = width = 0
    weights = tops = empty
    if observed is not None:
        width = max(triton.next_power_of_2(min(rows, r)), 2)  # two columns are what a thread holds
        body_grains, *exact_grains = (
            -(-n // grain.value) for n, grain in ((n_body, BODY_GRAIN), (n_first, EXACT_GRAIN), (n_recent, EXACT_GRAIN))
        )
        slots, grains = body_grains * BODY_GRAIN.value + sum(exact_grains) * EXACT_GRAIN.value, body_grains + sum(exact_grains)
        panels = batch * heads * blocks * width
        kept_as = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
        weights = torch.empty(panels * slots + SUM_TOKENS * width, dtype=kept_as, device=device)  # programs read beyond the end
        tops = torch.empty(panels * grains + SUM_TOKENS * width, dtype=torch.float32, device=device)
    mask_kind, mask_strides = "none", [0] * 4
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask.expand(batch, query_heads, queries, attention_inputs.key.shape[2] if mask.shape[3] == 1 else -1)
        mask_kind, mask_strides = ("bool" if mask.dtype == torch.bool else "float"), list(mask.stride())
        if mask_kind == "bool" and queries == 1 and not mask_strides[1]:
            mask_kind = "row"
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask

    attend_kernel[(total_splits, blocks, batch * heads)](
        query, body_query, *args.tensors, empty if mask is None else mask, args.centers[0], part, maxima, sums, weights, tops,
        empty if attention_inputs.buffers is None else attention_inputs.buffers.state, *query.stride()[:3], *args.strides, *mask_strides,
        dim**-0.5 if scaling is None else scaling, softcap or 1.0, window or 0, len(region.chunks) if region else 0,
        n_first, n_body, n_recent, each, heads, queries, slots, grains,
        G=groups, R=r, T=t, SOFTCAP=softcap is not None, MASK=mask_kind, WINDOW=window is not None, CAUSAL=causal and queries > 1,
        ARCH=arch, EXACT=exact, TURN=factor, ATTENTION_SUMS=width, num_warps=launch.warps, num_stages=launch.stages, **args.constants,
        **({"maxnreg": launch.registers} if launch.registers and arch else {}),
    )  # fmt: skip
    out = torch.empty(batch, query_heads, queries, value_dim, dtype=query.dtype, device=device)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=device)
    columns = triton.next_power_of_2(value_dim) if use.value.rotated else 32
    reduce_kernel[(rows, batch * heads, -(-value_dim // columns))](
        part, maxima, sums, sinks if sinks is not None else empty, use.v_signs, args.centers[1], out, lse, *out.stride()[:3],
        total_splits, blocks, heads, queries, heads * value_dim, value_dim,
        V=use.value, DV=value_dim, C=columns, G=groups, R=r, S=32, SINKS=sinks is not None, EXACT=exact, TURN=use.v_block**-0.5,
        STAGES=use.v_block.bit_length() - 1, RAGGED=False, num_warps=4 if use.value.rotated else 1,
    )  # fmt: skip
    attention_sums = torch.empty(batch, heads, n_first + n_body + n_recent if width else 0, dtype=torch.float32, device=device)
    if observed is not None:
        hidden = 0 if window is None else n_first + n_body + n_recent - queries - window + 1
        sum_splits_kernel[(sum(-(-n // SUM_TOKENS) for n in (n_body, n_first, n_recent)), batch * heads)](
            weights, tops, lse, observed.contiguous(), attention_sums, empty, empty, 0, 0, 0,
            slots, grains, n_first, n_body, n_recent, hidden, blocks, heads, queries,
            G=groups, R=r, WIDTH=width, N=SUM_TOKENS, ARCH=arch, RAGGED=False, num_warps=4,
        )  # fmt: skip
    return out, lse, attention_sums


class PagesLaunch(NamedTuple):
    """What launches over pages take of the inputs, whatever the query."""

    use: Tables
    empty: Tensor
    planes: tuple[tuple[Tensor, ...], ...]
    """Of keys and of values: codes, high bits, scales, mean, shifts."""
    strides: tuple[tuple[int, ...], ...]
    """Of keys and of values: over pages and heads of codes, high bits and scales, over rows and heads of the mean."""
    exact: tuple[Tensor, ...]
    exact_strides: tuple[int, ...]
    table_strides: tuple[int, ...]
    constants: dict[str, object]


def launch_over(inputs: PagedInputs) -> PagesLaunch:
    """Found out once for these inputs."""
    if inputs.launch is not None:
        return inputs.launch
    pages, exact = inputs.pages, (*inputs.sinks, *inputs.ring)
    dims, device = (exact[2].shape[3], exact[3].shape[3]), exact[0].device
    use = tables(pages.codecs, *dims, device)
    empty = torch.empty(0, dtype=exact[0].dtype, device=device)
    constants: dict[str, object] = {"K": use.key, "V": use.value, "D": dims[0], "DV": dims[1], "TX": EXACT_TILE, "PAGE": pages.page_size}
    planes, strides = [], []
    sides = zip("KV", pages.codecs, pages.planes, pages.statistics, (use.k_shifts, use.v_shifts), strict=True)
    for name, codec, each, once, shifts in sides:
        *found, mean = *planes_of(codec, each | once), once.get("center", empty)
        planes.append((*found, mean, shifts))
        strides.append(tuple(n for x in (*found, mean) for n in _outer_strides(x)))
        constants[f"{name}_ONCE"] = int(any(key != "center" for key in once))
        constants["WIDE"] = bool(constants.get("WIDE")) or any(x.stride(0) * x.shape[0] >= 2**31 for x in found[:2] if x.numel())
    table, lengths = pages.table, pages.lengths
    table_strides = (*table.stride()[:-1], *(() if pages.per_head else (0,)), *lengths.stride(), *(() if lengths.dim() > 1 else (0,)))
    exact_strides = tuple(n for x in exact for n in x.stride()[:3])
    inputs.launch = PagesLaunch(use, empty, tuple(planes), tuple(strides), exact, exact_strides, table_strides, constants)
    return inputs.launch


def _outer_strides(x: Tensor) -> tuple[int, int]:
    """Over the first two dimensions, 0 where there is one entry for all."""
    return (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0) if x.dim() == 4 else (0, 0)


def supports_pages(query: Tensor, inputs: PagedInputs) -> bool:
    """Whether the fused kernel can read these inputs."""
    widths = (inputs.ring[0].shape[3], inputs.ring[1].shape[3])
    return (
        all(map(layout_of, inputs.pages.codecs))
        and query.dtype == inputs.ring[0].dtype
        and all(dim % 16 == 0 and dim <= 256 for dim in widths)
    )


@on_its_device
def attend_pages(
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    observed: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pages.attend_pages` in two launches, of codes in one pass. `launch`: for measuring; chosen by format otherwise."""
    global calls
    calls += 1
    batch, query_heads, queries, dim = query.shape
    heads, value_dim = inputs.ring[1].shape[1], inputs.ring[1].shape[3]
    groups, device = query_heads // heads, query.device
    arch, processors = architecture(device)
    rows = groups * queries
    query = query if query.stride(-1) == 1 else query.contiguous()
    args = launch_over(inputs)
    use, empty = args.use, args.empty
    sink_slots, most, ring_slots = inputs.slots
    exact = sink_slots + ring_slots > 0
    nvidia = bool(arch) or device.type == "cpu"
    launch = launch or launched(use.key, use.value, max(dim, value_dim), rows, nvidia and observed is None)
    t, r = launch.tile, launch.rows if nvidia else 16
    blocks = -(-rows // r)
    # Rows of different lengths: as many tokens to a split as if all were one row, of the longest rows as many splits as it takes.
    programs = processors * launch.programs
    least = LEAST_SPLIT if inputs.tokens is None else -(-max(inputs.tokens * heads * blocks // programs, LEAST_SPLIT) // t) * t
    splits = split(most, batch * heads * blocks, t, programs)[0] if inputs.tokens is None else min(-(-most // least), MOST_SPLITS)
    total_splits = max(splits, 1) + exact

    region_query, factor = query, use.factor
    if use.whole is not None:
        query = query.contiguous()
        region_query = torch.empty_like(query, dtype=torch.float32)
        count = batch * query_heads * queries
        rotate_kernel[(-(-count // 16),)](query, use.whole, region_query, count, D=dim, DP=triton.next_power_of_2(dim), R=16, TURN=factor)
        factor = 1.0
    entries = batch * heads * blocks * total_splits * r
    part = torch.empty(entries * value_dim, dtype=torch.float32, device=device)
    maxima, sums = (torch.empty(entries, dtype=torch.float32, device=device) for _ in range(2))
    weights = tops = empty
    width = slots = grains = 0
    if observed is not None:
        width = max(triton.next_power_of_2(min(rows, r)), 2)  # two columns are what a thread holds
        region_grains = -(-most // BODY_GRAIN.value)
        exact_grains = -(-sink_slots // EXACT_GRAIN.value) - (-ring_slots // EXACT_GRAIN.value)
        slots, grains = region_grains * BODY_GRAIN.value + exact_grains * EXACT_GRAIN.value, region_grains + exact_grains
        panels = batch * heads * blocks * width
        kept_as = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
        weights = torch.empty(panels * slots + SUM_TOKENS * width, dtype=kept_as, device=device)  # programs read beyond the end
        tops = torch.empty(panels * grains + SUM_TOKENS * width, dtype=torch.float32, device=device)
    kind, mask_strides = "none", [0] * 4
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, query_heads, queries, -1)
        kind, mask_strides = ("bool" if mask.dtype == torch.bool else "float"), list(mask.stride())
        kind = "row" if kind == "bool" and queries == 1 and not mask_strides[1] else kind
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    attend_pages_kernel[(total_splits, blocks, batch * heads)](
        query, region_query, use.rotation, use.signs, inputs.pages.table, inputs.pages.lengths, inputs.rows, *args.planes, args.exact,
        empty if mask is None else mask, part, maxima, sums, weights, tops, *query.stride()[:3], *args.table_strides, *args.strides,
        args.exact_strides, *mask_strides, dim**-0.5 if scaling is None else scaling, softcap or 1.0, window or 0,
        sink_slots, ring_slots, most, least, heads, queries,
        G=groups, R=r, T=t, SOFTCAP=softcap is not None, MASK=kind, WINDOW=window is not None, CAUSAL=causal and queries > 1,
        ARCH=arch, EXACT=exact, TURN=factor, ATTENTION_SUMS=width, num_warps=launch.warps, num_stages=launch.stages, **args.constants,
        **({"maxnreg": launch.registers} if launch.registers and arch else {}),
    )  # fmt: skip
    out = torch.empty(batch, query_heads, queries, value_dim, dtype=query.dtype, device=device)
    lse = torch.empty(batch, query_heads, queries, dtype=torch.float32, device=device)
    columns = triton.next_power_of_2(value_dim) if use.value.rotated else 32
    reduce_kernel[(rows, batch * heads, -(-value_dim // columns))](
        part, maxima, sums, sinks if sinks is not None else empty, use.v_signs, args.planes[1][3], out, lse, *out.stride()[:3],
        total_splits, blocks, heads, queries, *args.strides[1][6:],
        V=use.value, DV=value_dim, C=columns, G=groups, R=r, S=32, SINKS=sinks is not None, EXACT=exact, TURN=use.v_block**-0.5,
        STAGES=use.v_block.bit_length() - 1, RAGGED=True, num_warps=4 if use.value.rotated else 1,
    )  # fmt: skip
    attention_sums = torch.empty(batch, heads, sum(inputs.slots) if width else 0, dtype=torch.float32, device=device)
    if observed is not None:
        sum_splits_kernel[(sum(-(-n // SUM_TOKENS) for n in inputs.slots), batch * heads)](
            weights, tops, lse, observed.contiguous(), attention_sums, inputs.rows, inputs.pages.lengths, *args.table_strides[2:],
            window or 0, slots, grains, sink_slots, most, ring_slots, 0, blocks, heads, queries,
            G=groups, R=r, WIDTH=width, N=SUM_TOKENS, ARCH=arch, RAGGED=True, num_warps=4,
        )  # fmt: skip
    return out, lse, attention_sums
