"""How the fused attention kernels over latents are launched: for Hopper's tensor cores in Gluon, elsewhere in Triton."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from ..formats.base import Codec, PackedLayout
from ..formats.rotation import rotation_block
from ..kernels.attend.launches import GLUON, Launch, architecture, in_one_wave, knows_gluon
from ..kernels.attend.plan import OF_INPUTS, OF_LAYER, Kind, Layer, held_of, layer_of
from ..kernels.attend.triton_attend import LOG2E
from ..kernels.attend.triton_join import join
from ..kernels.device.unpack import plane_offset
from ..kernels.host.launch import Held, Launcher
from ..kernels.paged_inputs import PagedInputs
from ..kernels.segments import layout_of
from ..kernels.work import LEAST_SPLIT
from .reference import LEAST_SAVED
from .triton_attend import attend_latents_kernel, choose_kernel, query_kernel, words_of_piece

CHOSEN_FROM = 4096
"""Tokens of which a program lists those that a query sees."""
MOST_PARTIAL = 2**28
"""Bytes of partial outputs of queries that read tokens of their own; more queries are divided among launches."""
MOST_RANK, MOST_CHANNELS = 512, 576
"""The most channels of a latent, since the outputs of a program are in registers, and of a latent and its rotated key,
since queries and tiles are in shared memory."""


def on_hopper(arch: int, layouts: tuple[PackedLayout, PackedLayout], dims: tuple[int, int]) -> bool:
    """Whether `gluon_attend.py` serves latents and rotated keys of these layouts and channels on GPUs of compute capability `arch`. Scales
    of groups of channels would be in too many registers, and a plane of high bits has half of the rows of a product."""
    latent, rope = layouts
    serves = arch // 10 == 9 and dims == (MOST_RANK, MOST_CHANNELS - MOST_RANK) and not latent.group and latent.high != 1
    return serves and (rope.kind, rope.scale) in (("half", "none"), ("int8", "fp32")) and knows_gluon(*GLUON)


def launched(arch: int, rows: int, layouts: tuple[PackedLayout, PackedLayout], dims: tuple[int, int]) -> Launch:
    """The launch for `rows` query rows, on NVIDIA GPUs of compute capability `arch`; 0: on others, and in the interpreter."""
    if on_hopper(arch, layouts, dims):
        if rows <= 16:  # uncompressed latents fill the shared memory of a multiprocessor
            return Launch(64, 2, None, 1 if layouts[0].kind == "half" else 2, 4, 16)
        # Shared memory does not hold two large tiles of uncompressed latents, and registers do not hold the sums for zeros of a pair.
        large = layouts[0].kind != "half" and layouts[0].scale != "pair"
        return Launch(128 if large else 64, 2, None, 1, 8, 64)
    if arch // 10 in (9, 10):
        return Launch(64, 1, None, 1, 8, 64) if rows > 16 else Launch(64, 1, None, 1, 4, 16)
    return Launch(32, 1, None, 1, 4, 16)


@functools.cache
def gluon_kernel() -> Any:
    """Gluon is imported where it runs: Triton's interpreter has none."""
    from .gluon_attend import attend_latents_kernel

    return attend_latents_kernel


def supports(inputs: PagedInputs, query: Tensor, mask: Tensor | None, causal: bool, chosen: int | None = None) -> bool:
    """Whether the kernel serves these inputs: codes in pages, in fp16 or bf16, under no mask but one that hides columns or, with `chosen`,
    shows at most so many tokens to each query."""
    known = inputs.prepared.of_layer.get("latents")
    if known is None:
        rank, rope = (x.shape[3] for x in inputs.ring)
        layouts = [layout_of(codec) for codec in inputs.pages.codecs]
        known = inputs.pages.by_page and not inputs.pages.per_head and all(layouts)
        known = known and rank <= MOST_RANK and rank + rope <= MOST_CHANNELS
        known = known and all(map(_in_tiles, layouts, (rank, rope)))
        known = inputs.prepared.of_layer["latents"] = known and not layouts[1].rotated and not layouts[1].centered  # type: ignore[union-attr]
    if not known or query.dtype != inputs.ring[0].dtype or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if causal and query.shape[2] > inputs.slots[2]:
        return False
    return (
        mask is None or (mask.dtype == torch.bool and all(n == 1 for n in (1, 1, 1, *mask.shape)[-3:-1])) or _gathers(inputs, mask, chosen)
    )


def _gathers(inputs: PagedInputs, mask: Tensor | None, chosen: int | None) -> bool:
    """Whether each query reads tokens of its own: at most half of all, or others than the other queries."""
    if mask is None or chosen is None or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    return mask.shape[2] > 1 or LEAST_SAVED * chosen <= inputs.max_length


def _in_tiles(layout: PackedLayout | None, dim: int) -> bool:
    """Whether tiles can be made of this layout: words of powers of two, in whole groups."""
    if layout is None or dim & (dim - 1) or dim < 16 or dim // layout.per < 8:
        return False
    words = dim // layout.per
    return not layout.group or layout.group % words == 0 or words % layout.group == 0


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _order_of_pieces(layout: PackedLayout, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The channel at each place of queries for `gluon_attend.py`, int64 `[D]`, and its weight in their sum, fp32 `[D]`."""
    words = dim // layout.per
    piece = words_of_piece.fn(layout, dim)
    place = torch.arange(dim, device=device)
    word, plane = place // (piece * layout.per) * piece + place % piece, place // piece % layout.per
    channel = plane * words + word if layout.group else word * layout.per + plane
    offsets = [float(plane_offset.fn(layout, i)) for i in range(layout.per)]
    weights = torch.tensor(offsets, dtype=torch.float32, device=device)
    return channel, weights[plane]


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _order(layout: PackedLayout, dim: int, device: torch.device) -> Tensor:
    """The channel at each place of a tile (`triton_tiles._reordered`), int64 `[D]`."""
    eighths = dim // layout.per // 8
    channel = torch.arange(dim, device=device)
    if layout.kind == "half":
        return channel
    if layout.group:
        return channel.view(layout.per, eighths, 2, 2, 2).permute(2, 1, 3, 0, 4).flatten()
    return channel.view(eighths, 2, 2, 2, layout.per).permute(1, 0, 2, 4, 3).flatten()


def _turned(codec: Codec, x: Tensor) -> Tensor:
    """Queries `[N, D]`, rotated as keys are stored."""
    if codec.rotation is None:
        return x
    matrix = codec.rotation.matrix(x.shape[1], x.device, x.dtype)
    return torch.addmm(matrix[0], x, matrix, beta=0, alpha=rotation_block(x.shape[1]) ** -0.5)


def prepare(codecs: tuple[Codec, Codec], dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Allocates the tensors that are cached for these codecs (`tables.py` says why)."""
    for codec, dim in zip(codecs, dims, strict=True):
        if (layout := layout_of(codec)) and _in_tiles(layout, dim):
            layout = dataclasses.replace(layout, search=0)
            _order(layout, dim, device)
            _order_of_pieces(layout, dim, device)
    if codecs[0].rotation is not None:
        codecs[0].rotation.matrix(dims[0], device, dtype)


def attend_latent_pages(
    query: Tensor,
    inputs: PagedInputs,
    mask: Tensor | None = None,
    *,
    scaling: float,
    causal: bool = False,
    chosen: int | None = None,
) -> Tensor:
    """Run `reference.attend_latent_pages` in one pass over the codes; with `chosen`, the most tokens that a query sees under the mask,
    over those that it sees."""
    layer, (batch, heads, queries, _), device = layer_of(inputs), query.shape, query.device
    kind, (sinks, region, ring) = layer.kind, inputs.slots
    rank, rope, empty = kind.constants["KEYS"].dim, kind.constants["VALUES"].dim, kind.empty
    arch, processors = architecture(device)
    rows, base2, exact, gathers = heads * queries, float(scaling * LOG2E.value), int(sinks + ring > 0), _gathers(inputs, mask, chosen)
    launch = launched(arch, heads if gathers else rows, (kind.use.key, kind.use.value), (rank, rope))
    most = max(MOST_PARTIAL // (4 * batch * -(-heads // launch.rows) * launch.rows * rank * (exact + 1)), 1)
    if gathers and queries > most:
        parts = zip(query.split(most, 2), mask.split(most, 2), strict=True)  # type: ignore[union-attr]
        return torch.cat([attend_latent_pages(x, inputs, y, scaling=scaling, chosen=chosen) for x, y in parts], dim=2)
    query = query if query.stride(-1) == 1 else query.contiguous()
    flat = query.reshape(batch * rows, rank + rope)
    turned = _turned(inputs.pages.codecs[0], flat[:, :rank])
    key = "latents", query.shape, mask is None, causal, exact, gathers, launch
    if key not in kind.launches:
        kind.launches[key] = LatentLaunches(kind, *key[1:])
    launches: LatentLaunches = kind.launches[key]
    means = _means(layer, inputs, queries if gathers else 1)
    dtype = query.dtype if kind.use.key.kind == "half" else torch.float16
    latent, rotated = (torch.empty(batch * rows, dim, dtype=dtype, device=device) for dim in (rank, rope))
    factors = torch.empty(batch * rows, 4, dtype=torch.float32, device=device)
    strides = Held(latent_stride=turned.stride(0), query_stride=flat.stride(0), scaling=base2)
    launches.queries((batch * rows, 1, 1), turned, flat, latent, rotated, factors, held=(strides, means))

    (table_b, *_), table, index, counts = inputs.pages.strides, inputs.pages.table, empty, empty
    if gathers:
        index, table, counts = chosen_tokens(inputs, mask, queries, chosen)  # type: ignore[arg-type]
        table_b = index.shape[1]
    blocks, groups = (-(-heads // launch.rows), batch * queries) if gathers else (-(-rows // launch.rows), batch)
    panels = groups * blocks
    programs = processors * launch.programs + panels  # the programs of the exact tokens are brief
    of_region = in_one_wave(min(region, table_b) if gathers else region, panels, launch.tile, programs) if region else 0
    splits = max(of_region, 1 - exact) + exact
    entries = panels * splits * launch.rows
    part, tops = (torch.empty(entries * n, dtype=torch.float32, device=device) for n in (rank, 2))
    shown, mask_strides = empty, (0, 0, 0)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(batch, 1, -1, sum(inputs.slots) if mask.shape[-1] == 1 else -1)
        shown, mask_strides = mask.view(torch.uint8), (mask.stride(0), mask.stride(2), mask.stride(3))
    call = Held(
        query_strides=tuple(query.stride()[:3]), table_b=table_b, mask_b=mask_strides[0],
        mask_q=mask_strides[1], mask_t=mask_strides[2], scaling=base2, n_quantized=region,
    )  # fmt: skip
    held = call, layer.held, held_of(inputs, empty)
    launches.attend((groups, blocks, splits), query, latent, rotated, factors, table, index, counts, shown, part, tops, held=held)
    out = query.new_empty_strided((batch, heads, queries, rank), launches.out_strides)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
    launches.reduce(part, tops, empty, out, lse, held=(Held(splits=splits), means))
    return out


def _means(layer: Layer, inputs: PagedInputs, queries: int) -> Held:
    """The mean of latents; where each of several queries is a row of its own, with the mean of its row."""
    key = "means", queries
    if key not in inputs.prepared.of_layer:
        mean, (mean_b, mean_h) = layer.held.values["k_planes"][3], layer.held.values["mean_strides"]
        center = mean.repeat_interleave(queries, 0) if mean_b and queries > 1 else mean
        inputs.prepared.of_layer[key] = Held(mean=mean, mean_b=mean_b, center=center, center_b=mean_b, center_h=mean_h)
    return inputs.prepared.of_layer[key]


def chosen_tokens(inputs: PagedInputs, mask: Tensor, queries: int, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """The indices in pages of the quantized tokens that each query sees under `mask` `[B, 1, Q, T]`, int32
    `[B * Q, N]`, the entries of their pages, and how many there are, int32 `[B * Q]`. What follows the last one is
    not written."""
    (sinks, region, _), pages, rows = inputs.slots, inputs.pages, inputs.rows
    shown = mask.expand(len(pages.table), 1, queries, -1).view(torch.uint8)
    index = shown.new_empty(len(pages.table) * queries, min(chosen, region), dtype=torch.int32)
    entries, counts = torch.empty_like(index, dtype=pages.table.dtype), index.new_empty(len(index))
    call = Held(
        mask_b=shown.stride(0), mask_q=shown.stride(2), mask_t=shown.stride(3), table_b=pages.table.stride(0),
        n_sinks=sinks, n_quantized=region, queries=queries, room=index.shape[1],
        rows_b=0 if rows is None else rows.stride(0), lengths_b=pages.strides[2],
    )  # fmt: skip
    counted: Any = (index, index) if rows is None else (rows, pages.lengths)  # nothing reads the former
    launch = _choosing(index.device, pages.page_size, rows is not None, CHOSEN_FROM)
    launch((-(-region // CHOSEN_FROM), len(index), 1), shown, pages.table, *counted, index, entries, counts, held=(call,))
    return index, entries, counts


@functools.lru_cache(maxsize=8)
def _choosing(device: torch.device, page_size: int, counted: bool, tokens: int) -> Launcher:
    given = "mask", "table", "rows", "lengths", "index", "entries", "counts"
    held = "mask_b", "mask_q", "mask_t", "table_b", "n_sinks", "n_quantized", "queries", "room", "rows_b", "lengths_b"
    return Launcher(choose_kernel, device, given, held, PAGE=page_size, COUNTED=counted, N=tokens, num_warps=16)


OF_MEANS = "mean", "mean_b", "center", "center_b", "center_h"
OF_LATENTS = "query_strides", "table_b", "mask_b", "mask_q", "mask_t", "scaling", "n_quantized"


class LatentLaunches:
    """The kernels of attention calls of one shape, `[B, Hq, Q, R + P]`, with all constants."""

    def __init__(self, kind: Kind, shape: torch.Size, unmasked: bool, causal: bool, exact: int, gathers: bool, launch: Launch) -> None:
        (batch, heads, queries, _), device, use = shape, kind.empty.device, kind.use
        rank, rope, rows = kind.constants["KEYS"].dim, kind.constants["VALUES"].dim, heads * queries
        hopper = on_hopper(architecture(device)[0], (use.key, use.value), (rank, rope))
        order, weights = _order_of_pieces(use.key, rank, device)
        rope_order, _ = _order_of_pieces(use.value, rope, device)
        kernel = gluon_kernel() if hopper else attend_latents_kernel
        if not hopper:
            order, rope_order = _order(use.key, rank, device), _order(use.value, rope, device)
        self.queries = Launcher(
            query_kernel, device, ("latent", "query", "q_latent", "q_rope", "factors"),
            ("latent_stride", "query_stride", "scaling", *OF_MEANS), order=order, weights=weights,
            rope_order=rope_order, rows=rows, D=rank, P=rope,
            CENTERED=use.key.centered, num_warps=1,
        )  # fmt: skip
        shared = kind.constants | {"G": heads, "R": launch.rows, "EXACT": bool(exact), "queries": queries}
        given = "query", "q_latent", "q_rope", "factors", "table", "chosen", "counts", "mask", "part", "tops"
        self.attend = Launcher(
            kernel, device, given, (*OF_LATENTS, *OF_LAYER, *OF_INPUTS), **shared | {"TX": launch.tile // 2},
            least=LEAST_SPLIT, T=launch.tile, MASK=not unmasked, CAUSAL=causal and queries > 1, ARCH=architecture(device)[0],
            CHOSEN=int(gathers), STAGES=launch.stages, num_warps=launch.warps, num_stages=1,
        )  # fmt: skip
        block = rotation_block(rank) if use.key.rotated else 1
        self.out_strides = heads * queries * rank, rank, heads * rank, 1
        out_strides = self.out_strides[:3]
        if gathers:  # each query is a row of its own
            batch, queries, rows, out_strides = batch * queries, 1, heads, (heads * rank, *out_strides[1:])
        joining = shared | {
            "V": use.key, "DV": rank, "queries": queries, "SINKS": False, "ITEMS": False, "SHARED": 0, "TURN": block**-0.5,
            "STAGES": block.bit_length() - 1, "signs": use.queries.signs, "blocks": -(-rows // launch.rows), "heads": 1, "firsts": None,
            "shares": None, "before": 0, "branches": 1, "shared_splits": 0, "shared_blocks": 0, "out_strides": out_strides,
        }  # fmt: skip
        self.reduce = join(device, rows, batch, ("splits", *OF_MEANS), joining)
