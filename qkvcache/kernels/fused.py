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
from .attend import Options
from .launch import Held, Launcher
from .pages import BLOCK, LEAST_SPLIT, MOST_SPLITS, PagedInputs, Splits
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
    **{("lut4", kind): Launch(stages=3) for kind in ("int4", "lut4")},
    ("int2", "int2"): Launch(stages=3),
    ("int8", "int4"): Launch(64, 3, None, 24),
    **{(kind, kind): Launch(64, 3, None) for kind in ("half", "int8", "uint8", "e4m3", "e5m2")},
    ("int8_halves", "int8"): Launch(64, 3, None),
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


def tiled(query: Tensor, inputs: PagedInputs, mask: Tensor | None, options: Options) -> Launch | None:
    """The launch of the kernel for many query rows; None where it does not serve these inputs, or is slower than the decode kernel.

    It serves causal attention under no mask but one that hides columns, of quantized keys and values of 64 or 128 channels in fp16 or bf16,
    on Hopper: on other GPUs nobody measured it."""
    if inputs.pages.per_head or inputs.splits or options.get("observed") is not None or not options.get("causal"):
        return None
    return _in_tiles(query, inputs, mask)


def _in_tiles(query: Tensor, inputs: PagedInputs, mask: Tensor | None) -> Launch | None:
    """`tiled` by the shapes and types of its arguments."""
    rows = query.shape[1] // inputs.ring[0].shape[1] * query.shape[2]
    if not inputs.max_length or rows < FEWEST_TILE_ROWS or not (architecture(query.device)[0] // 10 == 9 or query.device.type == "cpu"):
        return None
    if mask is not None and (mask.dtype != torch.bool or any(n > 1 for n in (1, 1, 1, *mask.shape)[-3:-1])):
        return None
    sides = [(layout_of(codec), x.shape[3]) for codec, x in zip(inputs.pages.codecs, inputs.ring, strict=True)]
    if query.dtype not in (torch.float16, torch.bfloat16) or not all(layout and _fits_tiles(layout, dim) for layout, dim in sides):
        return None
    return TILES[rows > TILES[0].rows]


def _fits_tiles(layout: PackedLayout, head_dim: int) -> bool:
    """Whether the kernel for many rows reads this layout: a plane of words must lie in one group or in two."""
    words = head_dim // layout.per
    return head_dim in (64, 128) and layout.kind != "half" and (layout.group % words == 0 or words == 2 * layout.group)


OF_SHARED = Launch(64, 3, None, 4, 2, 16)
"""The launch over tokens that rows share, for up to 32 query rows, the best measured on an H100. More rows of a program take more registers
than they spare loads."""
LEAST_SPARED = 5 * 2**16
"""Tokens times KV heads that are not read again, from which on that launch pays: beside it, there is one over the tokens of each row."""
EXACT_TILE = 32
"""Exact tokens of a tile. One program reads all of them, and with few other tokens all others wait for it."""
SUM_TOKENS = 1024
"""Tokens of a program that sums attention."""
OF_INPUTS = "rows", "lengths", "exact", "rows_b", "lengths_b", "lengths_h", "exact_strides", "n_sinks", "n_residual"
"""Arguments of kernels that are the same in all calls over the same inputs."""
OF_CALL = (
    "query", "mask", "part", "maxima", "sums", "table", "query_b", "query_h", "query_q", "table_b", "mask_b", "mask_t", "scaling",
    "softcap", "n_quantized", "least", "blocks", "read", "table_h", "room", "before", "splits", "branches",
)  # fmt: skip
"""Arguments of a call that both attention kernels have."""
OF_ATTEND = "region_query", "items", "firsts", "weights", "tops", "mask_h", "mask_q", "skip"
"""Those that `attend_kernel` has besides."""
OF_REDUCE = "part", "maxima", "sums", "firsts", "sinks", "out", "lse", "splits"
OF_SUM = "weights", "tops", "lse", "observed", "attention_sums", "slots", "grains", "n_quantized"


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
    plans: dict[tuple, Any]
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
            found = [
                (*planes_of(layout_of(codec), side), side.get("center", empty)) for codec, side in zip(pages.codecs, sides, strict=True)
            ]
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


def held(inputs: PagedInputs, empty: Tensor) -> Held:
    """The arguments `OF_INPUTS`."""
    if "attention" not in inputs.held:
        rows, exact, (sinks, _, ring) = inputs.rows, (*inputs.sinks, *inputs.ring), inputs.slots
        lengths = None if rows is None else inputs.pages.lengths
        inputs.held["attention"] = Held(
            rows=empty if rows is None else rows, lengths=empty if lengths is None else lengths, exact=exact,
            rows_b=0 if rows is None else rows.stride(0), lengths_b=inputs.pages.strides[2], lengths_h=inputs.pages.strides[3],
            exact_strides=tuple(n for x in exact for n in x.stride()[:3]), n_sinks=sinks, n_residual=ring,
        )  # fmt: skip
    return inputs.held["attention"]


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
        items: columns of the items of `Splits` that divide the rows among programs; 0: nothing does.
        selected: whether a `Selection` says what is read.
        panel: query rows in blocks of the launch whose rows of the batch this one's rows are read for; 0: its own.
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
        items: int,
        selected: bool,
        panel: int,
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
        self.tile = min(launch.tile, BLOCK) if selected and not launch.many else launch.tile
        self.rows, self.exact = launch.rows if nvidia else 16, exact
        self.blocks, self.programs, self.many = -(-rows // self.rows), processors * launch.programs, launch.many
        self.panels = (1 if items else self.batch) * self.heads * self.blocks  # each is read by as many programs as there are splits
        # Columns of the scratch of accumulated attention: at least the two that a thread holds.
        self.width = max(triton.next_power_of_2(min(rows, self.rows)), 2) if observed else 0
        columns = triton.next_power_of_2(self.value_dim) if use.value.rotated else 32
        self.out_shape = self.batch, query_heads, self.queries, self.value_dim
        # The heads of a query are next to each other, as transformers asks for.
        self.out_strides = query_heads * self.queries * self.value_dim, self.value_dim, query_heads * self.value_dim, 1
        self.no_sums = torch.empty(self.batch, self.heads, 0, dtype=torch.float32, device=device)
        fixed = {
            **args.constants, "G": self.groups, "R": self.rows, "T": self.tile, "SOFTCAP": softcap, "MASK": mask, "ARCH": arch,
            "CAUSAL": causal and self.queries > 1, "EXACT": exact, "TURN": use.factor if use.whole is None else 1.0,
            "ATTENTION_SUMS": self.width, "WIDTH": self.width, "ITEMS": items, "BLOCK": BLOCK if selected else 0,
            "N": SUM_TOKENS, "PANEL": panel, "heads": self.heads, "queries": self.queries, "signs": use.signs, "rotation": use.rotation,
            "k_planes": args.planes[0], "v_planes": args.planes[1], "mean_strides": args.means[0],
        }  # fmt: skip
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        if launch.registers and arch:
            options["maxnreg"] = launch.registers
        if launch.many:
            tiles = {"rotation": use.matrix, "MASK": mask != "none"}
            self.attend = Launcher(attend_tiles_kernel, device, OF_CALL, OF_INPUTS, **fixed | options | tiles)
        else:
            self.attend = Launcher(attend_kernel, device, OF_CALL + OF_ATTEND, OF_INPUTS, **fixed | options)
        self.fixed = fixed
        """Arguments that launches of other kernels may share."""
        self.score: Launcher | None = None
        """Launches of the kernel that scores blocks, if there were any."""
        self.sum = Launcher(sum_splits_kernel, device, OF_SUM, OF_INPUTS, **fixed, blocks=self.blocks, num_warps=4) if observed else None
        strides = dict(zip(("out_stride_b", "out_stride_h", "out_stride_q"), self.out_strides, strict=False))
        reduce = {
            "blocks": self.blocks, "C": columns, "S": 32, "SINKS": sinks, "TURN": use.v_block**-0.5, "STAGES": use.v_block.bit_length() - 1,
            "signs": use.v_signs, "center": args.planes[1][3], "center_b": args.means[1][0], "center_h": args.means[1][1],
            "num_warps": 8 if columns > 256 else 4 if use.value.rotated else 1, **strides,
        }  # fmt: skip
        self.reduce = Launcher(reduce_kernel, device, OF_REDUCE, **fixed | reduce)
        self.reduce_grid = rows, self.batch * self.heads, -(-self.value_dim // columns)


class Call:
    """One call of attention: the values that its launches share.

    `zones` are the quantized tokens, the sinks and the tokens of the residual, or the slots for them, which bound the columns of a mask.

    Args:
        skip: tokens at the beginning of pages that another launch reads.
        panel: as of `LaunchPlan`.
    """

    def __init__(
        self,
        query: Tensor,
        mask: Tensor | None,
        inputs: PagedInputs,
        options: Options,
        launch: Launch | None = None,
        items: Splits | None = None,
        skip: int = 0,
        panel: int = 0,
    ) -> None:
        self.inputs, self.args, self.items, self.skip, shape = inputs, Arguments.of(inputs), items, skip, query.shape
        args, (sinks, region, ring) = self.args, inputs.slots
        self.held, self.strides = held(inputs, args.empty), inputs.pages.strides
        self.zones = zones = region, sinks, ring
        scaling, softcap = options.get("scaling"), options.get("softcap")
        self.sinks, self.observed = options.get("sinks"), options.get("observed")
        self.weights, self.tops, self.slots, self.grains = args.empty, args.empty, 0, 0
        self.query = self.region_query = query if query.stride(-1) == 1 else query.contiguous()
        if args.use.whole is not None:
            self.query = query.contiguous()
            self.region_query = _rotate(self.query, args.use.whole, args.use.factor)
        self.mask, shown = args.empty, "none"
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask.expand(*shape[:3], sum(zones) if mask.shape[3] == 1 else -1)
            shown, self.mask_strides = "float", mask.stride()
            if mask.dtype == torch.bool:
                same = not self.mask_strides[1] and (shape[2] == 1 or not self.mask_strides[2])
                shown, mask = "row" if same else "bool", mask.view(torch.uint8)
            self.mask = mask
        self.scaling, self.softcap = float(shape[3] ** -0.5 if scaling is None else scaling), float(softcap or 1.0)
        key = (
            shape, inputs.ring[0].shape[1], shown, inputs.exact and sinks + ring > 0, options.get("causal", False), softcap is not None,
            self.sinks is not None, self.observed is not None, 0 if items is None else items.items.shape[1],
            inputs.selection is not None, panel, launch,
        )  # fmt: skip
        if key not in args.plans:
            args.plans[key] = LaunchPlan(args, *key)
        self.plan = args.plans[key]

    def allocate(self, splits: int) -> None:
        """Tensors for the partial results of `splits` programs for each block of rows: outputs, maxima and normalisers;
        weights and their maxima."""
        plan = self.plan
        self.splits, entries = splits, plan.panels * splits * plan.rows
        part = self._empty(entries * (plan.value_dim + 2))
        maxima = part[entries * plan.value_dim :]
        self.outputs = part, maxima, maxima[entries:]
        if plan.width:
            region, *exact = (-(-n // grain.value) for n, grain in zip(self.zones, (REGION_GRAIN, EXACT_GRAIN, EXACT_GRAIN), strict=True))
            self.slots, self.grains = region * REGION_GRAIN.value + sum(exact) * EXACT_GRAIN.value, region + sum(exact)
            beyond = SUM_TOKENS * plan.width  # programs read beyond the end
            dtype = torch.float32 if self.query.dtype == torch.float32 else torch.bfloat16
            self.weights = self._empty(plan.panels * self.slots * plan.width + beyond, dtype=dtype)
            self.tops = self._empty(plan.panels * self.grains * plan.width + beyond)

    def _empty(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.query.device)

    def attend(self, others: Call | None = None) -> None:
        """A launch of `attend_kernel`, or of `attend_tiles_kernel`; and another of the tokens that are read beside these."""
        splits, least = self._splits()
        if others is None:
            self.allocate(splits if self.items is None else self.items.count)
        else:
            more, others_least = others._splits()
            self.allocate(splits + more)
            others.splits, others.outputs = self.splits, self.outputs
            others._attend(more, others_least, splits)
        self._attend(splits, least)

    def _splits(self) -> tuple[int, int]:
        """Splits of a launch, and the fewest tokens of each."""
        plan, n_quantized, tokens, least = self.plan, max(self.zones[0] - self.skip, 0), self.inputs.tokens, LEAST_SPLIT
        if self.items is not None:
            return len(self.items.items), least
        programs = plan.programs
        if plan.many:  # beside few long splits, the programs of the exact tokens are brief
            programs += plan.panels * (programs <= 8 * plan.panels)
        if tokens is None or plan.many:
            splits = split(n_quantized, plan.panels, plan.tile, programs)
        else:  # rows of different lengths: as many tokens to a split as if all were one row
            least = -(-max(tokens * plan.heads * plan.blocks // programs, LEAST_SPLIT) // plan.tile) * plan.tile
            splits = min(-(-n_quantized // least), MOST_SPLITS)
        return max(splits, 1 - plan.exact) + plan.exact, least

    def _attend(self, splits: int, least: int, before: int = 0) -> None:
        """A launch of so many splits, `before` which are those of another."""
        plan = self.plan
        selection, empty, table, (table_b, table_h, _, _) = self.inputs.selection, self.args.empty, self.inputs.pages.table, self.strides
        blocks, read = empty, empty
        if selection is not None:
            blocks, read, table, (table_b, table_h, _) = (
                selection.blocks, selection.lengths, selection.entries, selection.entries.stride()
            )  # fmt: skip
        mask_b, mask_h, mask_q, mask_t = self.mask_strides
        call = (
            self.query, self.mask, *self.outputs, table, *self.query.stride()[:3], table_b, mask_b, mask_t, self.scaling, self.softcap,
            self.inputs.max_length, least, blocks, read, table_h, blocks.shape[-1], before, self.splits, self.inputs.branches,
        )  # fmt: skip
        if not plan.many:
            items, firsts = (empty, empty) if self.items is None else (self.items.items, self.items.firsts)
            call += self.region_query, items, firsts, self.weights, self.tops, mask_h, mask_q, self.skip
        plan.attend((splits, plan.blocks, plan.panels // plan.blocks), *call, held=self.held)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Joins the splits: the output `[B, Hq, Q, Dv]`, the log of the normaliser, fp32 `[B, Hq, Q]`, and the accumulated attention, fp32
        `[B, H, sum(zones)]`, or `[B, H, 0]` if it is not observed."""
        plan, empty = self.plan, self.args.empty
        out = self.query.new_empty_strided(plan.out_shape, plan.out_strides)
        lse = self._empty(plan.out_shape[:3])
        firsts, sinks = empty if self.items is None else self.items.firsts, empty if self.sinks is None else self.sinks
        plan.reduce(plan.reduce_grid, *self.outputs, firsts, sinks, out, lse, self.splits)
        if self.observed is None or plan.sum is None:
            return out, lse, plan.no_sums
        attention_sums = self._empty((plan.batch, plan.heads, sum(self.zones)))
        grid = sum(-(-n // SUM_TOKENS) for n in self.zones), plan.batch * plan.heads, 1
        observed, sizes = self.observed.contiguous(), (self.slots, self.grains, self.zones[0])
        plan.sum(grid, self.weights, self.tops, lse, observed, attention_sums, *sizes, held=self.held)
        return out, lse, attention_sums


def _rotate(query: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """Contiguous queries `[..., D]` times `matrix` `[D, D]` and `factor`, in fp32."""
    out, dim = torch.empty_like(query, dtype=torch.float32), query.shape[-1]
    rows = query.numel() // dim
    _rotation(query.device, dim, factor)((-(-rows // 16), 1, 1), query, matrix, out, rows)
    return out


@functools.lru_cache(maxsize=32)
def _rotation(device: torch.device, dim: int, factor: float) -> Launcher:
    constants = {"D": dim, "DP": triton.next_power_of_2(dim), "R": 16, "TURN": factor}
    return Launcher(rotate_kernel, device, ("x", "matrix", "out", "rows"), **constants)


def attend_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, launch: Launch | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attend.attend_pages` in one pass over the codes. `launch`: for measuring; chosen by format otherwise.

    Raises ValueError for causal queries that are not all among the exact last tokens."""
    if options.get("causal") and query.shape[2] > inputs.slots[2]:
        raise ValueError(
            f"causal with {query.shape[2]} queries: their own tokens must be among the exact recent ones, of which there are "
            f"{inputs.slots[2]}"
        )
    one = query.shape[2] == 1 and options.get("observed") is None and inputs.selection is None
    launch = launch or tiled(query, inputs, mask, options)
    if cascades(query, inputs, launch, options):
        call = Call(query, mask, inputs, options, skip=inputs.shared)
        call.attend(_shared(query, mask, inputs, options, call.plan.rows))
        return call.finish()
    items = inputs.splits if one else None
    call = Call(query, mask, inputs, options, launch, items)
    call.attend()
    if items is not None and items.shared is not None:
        shared = Splits(items.shared, items.firsts)
        others = Call(query, None, inputs.twin(exact=False), options, OF_SHARED, shared, panel=call.plan.rows)
        others.splits, others.outputs = call.splits, call.outputs
        others._attend(len(items.shared), LEAST_SPLIT)
    return call.finish()


def cascades(query: Tensor, inputs: PagedInputs, launch: Launch | None, options: Options) -> bool:
    """Whether the tokens that rows share are read once for all of them, in a launch of their own."""
    if inputs.branches == 1 or launch or inputs.selection or inputs.splits or options.get("observed") is not None:
        return False
    batch = query.shape[0]
    return (batch - batch // inputs.branches) * inputs.shared * inputs.ring[0].shape[1] >= LEAST_SPARED


def _shared(query: Tensor, mask: Tensor | None, inputs: PagedInputs, options: Options, panel: int) -> Call:
    """The call over the tokens that `inputs.branches` rows share, with the queries of these rows as those of one; their results are among
    those of a call with `panel` query rows in a block."""
    shared = inputs.first_shared()
    query = _of_branches(query, inputs.branches)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = _of_branches(mask.expand(len(inputs.pages.table), -1, query.shape[2] // inputs.branches, -1), inputs.branches)
    launch = _in_tiles(query, shared, mask) or (OF_SHARED if max(x.shape[3] for x in shared.ring) <= 128 else None)
    return Call(query, mask, shared, {**options, "causal": False}, launch, panel=panel)


def _of_branches(x: Tensor, branches: int) -> Tensor:
    """`x` `[B, H, Q, D]` as `[B / branches, H, branches * Q, D]`."""
    return x.unflatten(0, (-1, branches)).transpose(1, 2).flatten(2, 3)
