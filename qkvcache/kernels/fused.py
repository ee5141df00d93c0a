"""The host side of the fused kernel: the codecs that it reads, the splits of the work, and the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import torch
import triton
from torch import Tensor

from ..formats.base import PackedLayout
from .pages import BLOCK, LEAST_SPLIT, MOST_SPLITS, PagedInputs, PageOptions, Splits
from .segments import layout_of, planes_of
from .tables import Tables, tables
from .triton_attend import attend_kernel
from .triton_attend_tiles import attend_tiles_kernel
from .triton_join import reduce_kernel, rotate_kernel
from .triton_sum_splits import EXACT_GRAIN, REGION_GRAIN, sum_splits_kernel


@dataclass(frozen=True)
class Launch:
    """How the attention kernel is launched: tokens in a tile, tiles in flight, registers of a thread (None: the compiler chooses), programs
    of a multiprocessor, warps of a program, query rows of a program; and whether it is the kernel for many rows, `attend_tiles_kernel`."""

    tile: int = 32
    stages: int = 2
    registers: int | None = 168
    programs: int = 12
    warps: int = 1
    rows: int = 8
    many: bool = False


LAUNCHES = {
    ("lut4", "int4_halves"): Launch(stages=3),
    ("int8", "int4_halves"): Launch(64, 3, None, 24),
    **{(kind, kind): Launch(64, 3, None) for kind in ("half", "int8", "uint8", "e4m3", "e5m2")},
}
"""Launches by the kinds of keys and values, where `Launch()` is not the best measured on an H100 (`eval/bench_kernels.py --tune`)."""
WIDE = Launch(registers=None)
"""The launch for head_dim above 128, where larger tiles do not fit in registers."""
WIDEST = Launch(registers=None, programs=2, warps=4)
"""The launch for head_dim 512, where more rows or fewer warps would spill registers (`eval/compile_kernels.py`). Nobody measured it."""
MANY_ROWS = Launch(64, 3, None, 8, 2, 32), Launch(64, 3, None, 4, 4, 64)
"""Launches for up to 32 query rows and for more: each code is unpacked once for as many rows as the registers of a program hold."""
TILES = Launch(128, 1, None, 2, 4, 64, many=True), Launch(64, 1, 128, 2, 8, 128, many=True)
"""Launches of the kernel for many rows: up to 64 rows, and more. They are the best measured on an H200."""
FEWEST_TILE_ROWS = 33
"""Query rows of a KV head from which on that kernel is faster than the decode kernel on an H200."""


def launched(key: PackedLayout, value: PackedLayout, head_dim: int, rows: int = 1, wide: bool = True) -> Launch:
    """The launch for `rows` query rows of a KV head; `wide`: more than 16 rows may share a program."""
    if rows > 16 and wide and head_dim <= 128:
        return MANY_ROWS[0] if rows <= 32 else MANY_ROWS[1]
    if head_dim > 256:
        return WIDEST
    launch = LAUNCHES.get((key.kind, value.kind), Launch()) if head_dim <= 128 else WIDE
    return launch if rows <= 8 else replace(launch, rows=16)


def tiled(query: Tensor, inputs: PagedInputs, mask: Tensor | None, options: PageOptions) -> Launch | None:
    """The launch of the kernel for many query rows; None where it does not serve these inputs, or is slower than the decode kernel.

    It serves causal attention under no mask but one that hides columns, of quantized keys and values of 64 or 128 channels in fp16 or bf16,
    on Hopper: on other GPUs nobody measured it."""
    rows = query.shape[1] // inputs.ring[0].shape[1] * query.shape[2]
    if not inputs.max_length or inputs.pages.per_head or inputs.splits or inputs.selection or rows < FEWEST_TILE_ROWS:
        return None
    if not (architecture(query.device)[0] // 10 == 9 or query.device.type == "cpu"):
        return None
    if options.get("observed") is not None or not options.get("causal"):
        return None
    if mask is not None and (mask.dtype != torch.bool or any(n > 1 for n in (1, 1, 1, *mask.shape)[-3:-1])):
        return None
    sides = [(layout_of(codec), x.shape[3]) for codec, x in zip(inputs.pages.codecs, inputs.ring, strict=True)]
    if query.dtype not in (torch.float16, torch.bfloat16) or not all(layout and _in_tiles(layout, dim) for layout, dim in sides):
        return None
    return TILES[rows > TILES[0].rows]


def _in_tiles(layout: PackedLayout, head_dim: int) -> bool:
    """Whether the kernel for many rows reads this layout: a plane of words must lie in one group or in two."""
    words = head_dim // layout.per
    return head_dim in (64, 128) and layout.kind != "half" and (layout.group % words == 0 or words == 2 * layout.group)


EXACT_TILE = 32
"""Exact tokens of a tile. One program reads all of them, and with few other tokens all others wait for it."""
TILE_CONSTANTS = {*attend_tiles_kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
"""The constants of a call that `attend_tiles_kernel` takes."""
SUM_TOKENS = 1024
"""Tokens of a program that sums attention."""


def supports(inputs: PagedInputs, query: Tensor) -> bool:
    """Whether the fused kernel can read these inputs, exact tokens among them."""
    known, recent = inputs.launches.get("supported"), inputs.ring
    if known is None:
        layouts = [layout_of(codec) for codec in inputs.pages.codecs]
        fits = all(layout and _fits(layout, x) for layout, x in zip(layouts, recent, strict=True))
        known = inputs.launches["supported"] = fits and inputs.pages.by_page
    return known and query.dtype == recent[0].dtype


def _fits(layout: PackedLayout, like: Tensor) -> bool:
    """Whether the kernel holds vectors like `like` in registers and shared memory. Of 512 channels, scales by group take too many."""
    dim = like.shape[3]
    return dim % 16 == 0 and (dim <= 256 or (dim == 512 and not layout.group and like.element_size() == 2))


@functools.lru_cache(maxsize=8)
def architecture(device: torch.device) -> tuple[int, int]:
    """`(compute capability, multiprocessors)`; capability 0 where there is no NVIDIA assembly."""
    if device.type != "cuda":
        return 0, 4
    properties = torch.cuda.get_device_properties(device)
    return (0 if torch.version.hip else properties.major * 10 + properties.minor), properties.multi_processor_count


def programs_of(device: torch.device) -> int:
    """Programs of the attention kernel that the GPU runs at a time, where it is launched as for most formats."""
    return architecture(device)[1] * Launch.programs


def split(tokens: int, groups: int, tile: int, warps: int) -> int:
    """The number of splits of `tokens` quantized tokens, which `groups` programs would read without splits.

    `tile`: tokens of a tile, which divides those of a split. `warps`: programs that the GPU runs at a time.
    """
    wanted = min(max(warps // groups - 1, 1), MOST_SPLITS)  # one is for the exact tokens
    each = max(-(-tokens // wanted), LEAST_SPLIT)
    return -(-tokens // (-(-each // tile) * tile))


class Arguments(NamedTuple):
    """Arguments that all launches over the same storage share. Absent arguments are empty tensors."""

    use: Tables
    empty: Tensor
    planes: tuple[tuple[Tensor, ...], ...]
    """Planes of keys and of values: codes, high bits, scales, mean, shifts."""
    means: tuple[tuple[int, ...], ...]
    """Strides of the means of keys and of values, over rows and heads."""
    constants: dict[str, Any]
    plans: dict[tuple, LaunchPlan]
    """Launch plans of the calls over these inputs, by the shape of their queries and their options."""

    @classmethod
    def of(cls, inputs: PagedInputs) -> Arguments:
        """The arguments of these inputs; what does not depend on their rows is computed once."""
        counted = inputs.rows is not None
        if counted not in inputs.launches:
            pages, (key, value), device = inputs.pages, inputs.ring, inputs.ring[0].device
            use = tables(pages.codecs, key.shape[3], value.shape[3], device)
            empty = torch.empty(0, dtype=key.dtype, device=device)
            sides = [each | once for each, once in zip(pages.planes, pages.statistics, strict=True)]
            found = [(*planes_of(codec, side), side.get("center", empty)) for codec, side in zip(pages.codecs, sides, strict=True)]
            once = [any(name != "center" for name in side) for side in pages.statistics]
            strides = [_strides(side, is_once) for side, is_once in zip(found, once, strict=True)]
            constants = {
                "K": use.key, "V": use.value, "D": key.shape[3], "DV": value.shape[3], "TX": EXACT_TILE, "PAGE": pages.page_size,
                "BASE": pages.firsts[0], "COUNTED": counted, "K_ONCE": int(once[0]), "V_ONCE": int(once[1]),
                "k_strides": strides[0][:6], "v_strides": strides[1][:6],
            }  # fmt: skip
            inputs.launches[counted] = cls(
                use, empty, tuple((*side, shifts) for side, shifts in zip(found, (use.k_shifts, use.v_shifts), strict=True)),
                tuple(side[6:] for side in strides), constants, {},
            )  # fmt: skip
        return inputs.launches[counted]


def _strides(planes: Sequence[Tensor], once: bool) -> tuple[int, ...]:
    """Strides of codes, high bits, scales and the mean over the first two dimensions: 0 over heads, or over rows, that share an entry."""
    found = []
    for i, x in enumerate(planes):
        by_row = i == 3 or (i == 2 and once)
        first = x.stride(0) if x.dim() == 4 and (x.shape[0] > 1 or not by_row) else 0
        found += [first, x.stride(1) if x.dim() == 4 and x.shape[1] > 1 else 0]
    return tuple(found)


class LaunchPlan:
    """The launch of attention calls of one shape: everything that depends neither on the step nor on tensors.

    Args:
        shape: the shape of the queries, `[B, Hq, Q, D]`.
        heads: KV heads.
        mask: the kind of mask: "none", "row", "bool" or "float".
        exact: whether there are exact tokens, or slots for them.
        items: whether `Splits` divide the rows among programs.
        selected: whether a `Selection` says what is read.
    """

    def __init__(
        self,
        args: Arguments,
        shape: torch.Size,
        heads: int,
        mask: str,
        exact: bool,
        causal: bool,
        softcap: bool,
        sinks: bool,
        observed: bool,
        items: bool,
        selected: bool,
        launch: Launch | None,
    ) -> None:
        use, device = args.use, args.empty.device
        self.batch, query_heads, self.queries, dim = shape
        self.heads, self.value_dim = heads, args.constants["DV"]
        self.groups = query_heads // self.heads
        arch, processors = architecture(device)
        rows, nvidia = self.groups * self.queries, bool(arch) or device.type == "cpu"
        # Weights that are stored need the registers that more rows would.
        launch = launch or launched(use.key, use.value, max(dim, self.value_dim), rows, nvidia and not observed)
        self.tile, self.rows, self.exact = min(launch.tile, BLOCK) if selected else launch.tile, launch.rows if nvidia else 16, exact
        self.blocks, self.programs = -(-rows // self.rows), processors * launch.programs
        self.panels = (1 if items else self.batch) * self.heads * self.blocks  # each is read by as many programs as there are splits
        # Columns of the scratch of accumulated attention: at least the two that a thread holds.
        self.width = max(triton.next_power_of_2(min(rows, self.rows)), 2) if observed else 0
        columns = triton.next_power_of_2(self.value_dim) if use.value.rotated else 32
        self.out_shape = self.batch, query_heads, self.queries, self.value_dim
        # The heads of a query are next to each other, as transformers asks for.
        self.out_strides = query_heads * self.queries * self.value_dim, self.value_dim, query_heads * self.value_dim, 1
        self.no_sums = torch.empty(self.batch, self.heads, 0, device=device)
        shared = {"G": self.groups, "R": self.rows}
        self.attend: dict[str, Any] = {
            **shared, "T": self.tile, "SOFTCAP": softcap, "MASK": mask, "CAUSAL": causal and self.queries > 1, "ARCH": arch,
            "EXACT": exact, "TURN": use.factor if use.whole is None else 1.0, "ATTENTION_SUMS": self.width, "ITEMS": items,
            "BLOCK": BLOCK if selected else 0, "num_warps": launch.warps, "num_stages": launch.stages, **args.constants,
        }  # fmt: skip
        if launch.registers and arch:
            self.attend["maxnreg"] = launch.registers
        self.attend_in_tiles = {name: x for name, x in self.attend.items() if name in TILE_CONSTANTS} | {"MASK": mask != "none"}
        self.sum = {**shared, "COUNTED": args.constants["COUNTED"], "WIDTH": self.width, "N": SUM_TOKENS, "ARCH": arch, "num_warps": 4}
        self.reduce = {
            **shared, "V": use.value, "DV": self.value_dim, "C": columns, "S": 32, "SINKS": sinks, "EXACT": exact,
            "TURN": use.v_block**-0.5, "STAGES": use.v_block.bit_length() - 1, "ITEMS": items,
            "num_warps": 8 if columns > 256 else 4 if use.value.rotated else 1,
        }  # fmt: skip
        self.reduce_grid = rows, self.batch * self.heads, -(-self.value_dim // columns)


class Call:
    """One call of attention: the values that its launches share.

    `zones` are the quantized tokens, the sinks and the tokens of the residual, or the slots for them, which bound the columns of a mask.
    """

    def __init__(
        self, query: Tensor, mask: Tensor | None, inputs: PagedInputs, options: PageOptions, launch: Launch | None, items: Splits | None
    ) -> None:
        self.inputs, self.args, self.items, shape = inputs, Arguments.of(inputs), items, query.shape
        args, (sinks, region, ring) = self.args, inputs.slots
        self.zones = zones = region, sinks, ring
        scaling, softcap = options.get("scaling"), options.get("softcap")
        self.sinks, self.observed = options.get("sinks"), options.get("observed")
        self.query = self.region_query = query if query.stride(-1) == 1 else query.contiguous()
        if args.use.whole is not None:
            self.query = query.contiguous()
            self.region_query = _rotate(self.query, args.use.whole, args.use.factor)
        self.mask, kind = args.empty, "none"
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask.expand(*shape[:3], sum(zones) if mask.shape[3] == 1 else -1)
            kind, self.mask_strides = "float", mask.stride()
            if mask.dtype == torch.bool:
                kind, mask = "row" if shape[2] == 1 and not self.mask_strides[1] else "bool", mask.view(torch.uint8)
            self.mask = mask
        self.exact = *inputs.sinks, *inputs.ring
        pages, rows = inputs.pages, inputs.rows
        lengths = pages.lengths if rows is not None else None
        self.rows, self.rows_stride = (args.empty, 0) if rows is None else (rows, rows.stride(0))
        self.lengths = args.empty if lengths is None else lengths
        self.strides = pages.strides
        self.scalars = {"scaling": shape[3] ** -0.5 if scaling is None else scaling, "softcap": softcap or 1.0}
        key = (
            shape, inputs.ring[0].shape[1], kind, sinks + ring > 0, options.get("causal", False), softcap is not None,
            self.sinks is not None, self.observed is not None, items is not None, inputs.selection is not None, launch,
        )  # fmt: skip
        if key not in args.plans:
            args.plans[key] = LaunchPlan(args, *key)
        self.plan = args.plans[key]

    def allocate(self, splits: int) -> None:
        """Tensors for the partial results of `splits` programs for each block of rows: outputs, maxima and normalisers;
        weights and their maxima."""
        plan, empty = self.plan, self.args.empty
        self.splits, entries = splits, plan.panels * splits * plan.rows
        part = self._empty(entries * (plan.value_dim + 2))
        maxima = part[entries * plan.value_dim :]
        self.outputs = part, maxima, maxima[entries:]
        self.weights, self.tops, self.slots, self.grains = empty, empty, 0, 0
        if plan.width:
            region, *exact = (-(-n // grain.value) for n, grain in zip(self.zones, (REGION_GRAIN, EXACT_GRAIN, EXACT_GRAIN), strict=True))
            self.slots, self.grains = region * REGION_GRAIN.value + sum(exact) * EXACT_GRAIN.value, region + sum(exact)
            beyond = SUM_TOKENS * plan.width  # programs read beyond the end
            dtype = torch.float32 if self.query.dtype == torch.float32 else torch.bfloat16
            self.weights = self._empty(plan.panels * self.slots * plan.width + beyond, dtype=dtype)
            self.tops = self._empty(plan.panels * self.grains * plan.width + beyond)

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.query.device)

    def _shared(self) -> dict[str, Any]:
        """The arguments that both attention kernels have."""
        (_, n_sinks, n_residual), (query_b, query_h, query_q, _) = self.zones, self.query.stride()
        part, maxima, sums = self.outputs
        k_planes, v_planes = self.args.planes
        exact_strides = tuple(n for x in self.exact for n in x.stride()[:3])
        return {
            "query": self.query, "table": self.inputs.pages.table, "rows": self.rows, "lengths": self.lengths, "k_planes": k_planes,
            "v_planes": v_planes, "exact": self.exact, "mask": self.mask, "part": part, "maxima": maxima, "sums": sums,
            "query_b": query_b, "query_h": query_h, "query_q": query_q, "table_b": self.strides[0], "rows_b": self.rows_stride,
            "lengths_b": self.strides[2], "exact_strides": exact_strides,
            "mean_strides": self.args.means[0],
            "mask_b": self.mask_strides[0], "mask_t": self.mask_strides[3], "n_sinks": n_sinks, "n_quantized": self.inputs.max_length,
            "n_residual": n_residual, "heads": self.plan.heads, "queries": self.plan.queries, **self.scalars,
        }  # fmt: skip

    def attend(self) -> None:
        """A launch of `attend_kernel`."""
        plan, args, n_quantized, tokens = self.plan, self.args, self.zones[0], self.inputs.tokens
        least, items = LEAST_SPLIT, args.empty
        if self.items is not None:
            items = self.items.items
            self.allocate(len(items))
        else:
            if tokens is None:
                splits = split(n_quantized, plan.panels, plan.tile, plan.programs)
            else:  # rows of different lengths: as many tokens to a split as if all were one row
                least = -(-max(tokens * plan.heads * plan.blocks // plan.programs, LEAST_SPLIT) // plan.tile) * plan.tile
                splits = min(-(-n_quantized // least), MOST_SPLITS)
            self.allocate(max(splits, 1 - plan.exact) + plan.exact)
        selection, shared = self.inputs.selection, self._shared()
        blocks, read, table_h = args.empty, args.empty, self.strides[1]
        if selection is not None:
            blocks, read, (table_b, table_h, _) = selection.blocks, selection.lengths, selection.entries.stride()
            shared |= {"table": selection.entries, "table_b": table_b}
        with torch.cuda.device_of(self.query):
            attend_kernel[(self.splits, plan.blocks, plan.panels // plan.blocks)](
                **shared, region_query=self.region_query, rotation=args.use.rotation, signs=args.use.signs, items=items, blocks=blocks,
                read=read, room=blocks.shape[-1], weights=self.weights, tops=self.tops, table_h=table_h, lengths_h=self.strides[3],
                mask_h=self.mask_strides[1], mask_q=self.mask_strides[2], least=least, **plan.attend,
            )  # fmt: skip

    def attend_in_tiles(self) -> None:
        """A launch of `attend_tiles_kernel`."""
        plan, n_quantized = self.plan, self.zones[0]
        # Beside few long splits, the programs of the exact tokens are brief.
        programs = plan.programs + plan.panels * (plan.programs <= 8 * plan.panels)
        self.allocate(split(n_quantized, plan.panels, plan.tile, programs) + plan.exact)
        with torch.cuda.device_of(self.query):
            attend_tiles_kernel[(self.splits, plan.blocks, plan.batch * plan.heads)](
                **self._shared(), rotation=self.args.use.matrix, least=LEAST_SPLIT, **plan.attend_in_tiles
            )

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Joins the splits: the output `[B, Hq, Q, Dv]`, the log of the normaliser, fp32 `[B, Hq, Q]`, and the accumulated attention, fp32
        `[B, H, sum(zones)]`, or `[B, H, 0]` if it is not observed."""
        plan, args, empty = self.plan, self.args, self.args.empty
        out = self.query.new_empty_strided(plan.out_shape, plan.out_strides)
        lse = self._empty(plan.out_shape[:3])
        with torch.cuda.device_of(out):
            reduce_kernel[plan.reduce_grid](
                *self.outputs, empty if self.items is None else self.items.firsts, empty if self.sinks is None else self.sinks,
                args.use.v_signs, args.planes[1][3], out, lse, *plan.out_strides[:3], self.splits, plan.blocks, plan.heads, plan.queries,
                *args.means[1], **plan.reduce,
            )  # fmt: skip
        if self.observed is None:
            return out, lse, plan.no_sums
        attention_sums, (n_quantized, n_sinks, n_residual) = self._empty((plan.batch, plan.heads, sum(self.zones))), self.zones
        with torch.cuda.device_of(out):
            sum_splits_kernel[(sum(-(-n // SUM_TOKENS) for n in self.zones), plan.batch * plan.heads)](
                self.weights, self.tops, lse, self.observed.contiguous(), attention_sums, self.rows, self.rows_stride, self.lengths,
                *self.strides[2:], self.slots, self.grains, n_sinks, n_quantized, n_residual, plan.blocks, plan.heads, plan.queries,
                **plan.sum,
            )  # fmt: skip
        return out, lse, attention_sums


def _rotate(query: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """Contiguous queries `[..., D]` times `matrix` `[D, D]` and `factor`, in fp32."""
    out, dim = torch.empty_like(query, dtype=torch.float32), query.shape[-1]
    rows = query.numel() // dim
    with torch.cuda.device_of(out):  # Triton launches on the current device, wherever the tensors are
        rotate_kernel[(-(-rows // 16),)](query, matrix, out, rows, D=dim, DP=triton.next_power_of_2(dim), R=16, TURN=factor)
    return out


def attend_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, launch: Launch | None = None, **options: Unpack[PageOptions]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `pages.attend_pages` in one pass over the codes. `launch`: for measuring; chosen by format otherwise.

    Raises ValueError for causal queries that are not all among the exact last tokens."""
    if options.get("causal") and query.shape[2] > inputs.slots[2]:
        raise ValueError(
            f"causal with {query.shape[2]} queries: their own tokens must be among the exact recent ones, of which there are "
            f"{inputs.slots[2]}"
        )
    one = query.shape[2] == 1 and options.get("observed") is None and inputs.selection is None
    launch = launch or tiled(query, inputs, mask, options)
    call = Call(query, mask, inputs, options, launch, inputs.splits if one else None)
    if launch is not None and launch.many:
        call.attend_in_tiles()
    else:
        call.attend()
    return call.finish()
