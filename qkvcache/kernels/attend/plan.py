"""A plan of attention over pages: everything that the layers of a step have in common, made once by the first of them.

A plan chooses kernels, splits and grids, and holds the arguments that are the same for all layers. A layer adds the addresses of its own
tensors (`layer_of`), so that its host work is three launches. Layers of one `Kind` are launched alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import torch
import triton
from torch import Tensor

from ...formats.base import Codec
from ..host.launch import Held, Launcher
from ..host.tables import Side, Tables, tables
from ..paged_inputs import PagedInputs
from ..segments import layout_of, planes_of
from ..work import MOST_SPLITS, TOGETHER
from . import launches as fused
from .launches import Launch, architecture, in_one_wave, in_tiles, in_waves, launched, of_blocks, split, tiled
from .reference import Options
from .triton_attend import attend_kernel
from .triton_join import join, rotate_kernel
from .triton_tiles import attend_tiles_kernel

OF_LAYER = "k_planes", "v_planes", "mean_strides", "center", "center_b", "center_h"
"""Arguments of kernels that are the same in all steps of a layer."""
OF_INPUTS = (
    "exact", "n_sinks", "n_residual", "rows", "rows_b", "lengths", "lengths_b", "lengths_h", "table", "table_b", "table_h", "chosen",
)  # fmt: skip
"""Arguments that are the same in all calls over the same inputs."""
OF_CALL = (
    "mask", "mask_b", "mask_h", "mask_q", "mask_t", "query_strides", "scaling", "n_quantized", "least", "skip", "items", "firsts", "shares",
    "splits", "before", "branches", "shared_splits", "shared_blocks",
)  # fmt: skip
"""Arguments that are the same in all layers of a step."""


Arguments = tuple[tuple[Tensor, ...], tuple[Held, ...]]
"""Queries as kernels read them, and rotated as quantized keys are unless the kernel for many rows does that;
and the arguments `OF_LAYER`, `OF_INPUTS` and `OF_CALL`."""


@functools.cache
def gluon_kernel() -> Any:
    """Gluon is imported where it runs: Triton's interpreter has none."""
    from .gluon_tiles import attend_tiles_kernel

    return attend_tiles_kernel


class Kind:
    """Sizes, strides and codecs that the launches of a layer depend on. Layers that are alike share one."""

    def __init__(self, use: Tables, constants: dict[str, Any]) -> None:
        self.use, self.empty, self.constants = use, use.empty, constants
        self.launches: dict[tuple, Any] = {}
        """`Launches` by the shape of queries and by options."""


class Layer(NamedTuple):
    """The kind and the arguments that all launches over one layer share."""

    kind: Kind
    held: Held
    """The arguments `OF_LAYER`."""


def layer_of(inputs: PagedInputs) -> Layer:
    """The layer of these inputs, which storage keeps until its pages move."""
    counted = inputs.rows is not None
    found = inputs.prepared.of_layer.get(counted)
    if found is None:
        found = inputs.prepared.of_layer[counted] = _layer(inputs, counted)
    return found


def _layer(inputs: PagedInputs, counted: bool) -> Layer:
    pages, (key, value) = inputs.pages, inputs.ring
    dims = key.shape[3], value.shape[3]
    use = tables(pages.codecs, *dims, key.device)
    sides = [each | once for each, once in zip(pages.planes, pages.statistics, strict=True)]
    found = [(*planes_of(layout_of(codec), side), side.get("center", use.empty)) for codec, side in zip(pages.codecs, sides, strict=True)]
    once = tuple(any(name != "center" for name in side) for side in pages.statistics)
    strides = [plane_strides(side, is_once) for side, is_once in zip(found, once, strict=True)]
    held = Held(
        k_planes=(*found[0], use.k_shifts), v_planes=(*found[1], use.v_shifts), mean_strides=strides[0][6:], center=found[1][3],
        center_b=strides[1][6], center_h=strides[1][7],
    )  # fmt: skip
    kind = _kind(pages.codecs, dims, key.device, pages.page_size, pages.firsts[0], counted, once, strides[0][:6], strides[1][:6])
    return Layer(kind, held)


@functools.lru_cache(maxsize=256)
def _kind(
    codecs: tuple[Codec, Codec],
    dims: tuple[int, int],
    device: torch.device,
    page_size: int,
    base: int,
    counted: bool,
    once: tuple[bool, bool],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
) -> Kind:
    use = tables(codecs, *dims, device)
    turn = use.queries.factor if use.queries.whole is None else 1.0
    constants = {
        "KEYS": Side(use.key, dims[0], once[0], k_strides, turn), "VALUES": Side(use.value, dims[1], once[1], v_strides),
        "PAGES": (page_size, base), "COUNTED": counted,
    }  # fmt: skip
    return Kind(use, constants)


def plane_strides(planes: Sequence[Tensor], once: bool) -> tuple[int, ...]:
    """Strides of codes, high bits, scales and the mean over the first two dimensions: 0 over heads, or over rows, that share an entry."""
    found = []
    for i, x in enumerate(planes):
        by_row = i == 3 or (i == 2 and once)
        first = x.stride(0) if x.dim() == 4 and (x.shape[0] > 1 or not by_row) else 0
        found += [first, x.stride(1) if x.dim() == 4 and x.shape[1] > 1 else 0]
    return tuple(found)


def held_of(inputs: PagedInputs, empty: Tensor) -> Held:
    """The arguments `OF_INPUTS`."""
    prepared = inputs.prepared.of_inputs
    if "attention" in prepared:
        return prepared["attention"]
    rows, pages, exact, (sinks, _, ring) = inputs.rows, inputs.pages, (*inputs.sinks, *inputs.ring), inputs.slots
    table_b, table_h, lengths_b, lengths_h = pages.strides
    held = prepared["attention"] = Held(
        exact=(*exact, *(n for x in exact for n in x.stride()[:3])), n_sinks=sinks, n_residual=ring,
        rows=rows, rows_b=0 if rows is None else rows.stride(0),
        lengths=None if rows is None else pages.lengths, lengths_b=lengths_b, lengths_h=lengths_h, table=pages.table,
        table_b=table_b, table_h=table_h, chosen=pages.chosen,
    )  # fmt: skip
    return held


class Form(NamedTuple):
    """The shapes and options that the launches of an attention call depend on, beside the `Kind` of its layers.

    shape: of the queries, `[B, Hq, Q, D]`.
    heads: KV heads.
    mask: the kind of mask: "none", "row", "bool" or "float".
    exact: whether there are exact tokens, or slots for them.
    softcap: the cap of scores; None: none.
    items: columns of the items of `Splits` that divide the rows among programs; 0: nothing does.
    chosen: whether chosen blocks are read.
    """

    shape: torch.Size
    heads: int
    mask: str
    exact: bool
    causal: bool
    softcap: float | None
    sinks: bool
    items: int
    chosen: bool
    launch: Launch | None


class Launches:
    """The kernels of calls of one form, with all constants."""

    def __init__(self, kind: Kind, form: Form) -> None:
        use, device, keys, values = kind.use, kind.empty.device, kind.constants["KEYS"], kind.constants["VALUES"]
        self.batch, query_heads, self.queries, _ = form.shape
        self.heads, self.value_dim, self.exact = form.heads, values.dim, form.exact
        self.groups = query_heads // self.heads
        arch, processors = architecture(device)
        rows, nvidia = self.groups * self.queries, bool(arch) or device.type == "cpu"
        launch = form.launch or launched(use.key, use.value, max(keys.dim, values.dim), rows, nvidia)
        launch = of_blocks(launch) if form.chosen else launch
        self.tile = launch.tile
        self.rows, self.many, self.gluon = launch.rows if nvidia else 16, launch.many, launch in fused.GLUON_TILES
        self.blocks, self.programs, self.schedulers = -(-rows // self.rows), processors * launch.programs, processors * fused.SCHEDULERS
        self.panels = (1 if form.items else self.batch) * self.heads * self.blocks  # each is read by as many programs as there are splits
        self.out_shape = self.batch, query_heads, self.queries, self.value_dim
        # The heads of a query are next to each other, as transformers asks for.
        self.out_strides = query_heads * self.queries * self.value_dim, self.value_dim, query_heads * self.value_dim, 1
        self.fixed = {
            **kind.constants, "G": self.groups, "R": self.rows, "T": self.tile, "SOFTCAP": form.softcap, "MASK": form.mask, "ARCH": arch,
            "CAUSAL": form.causal and self.queries > 1, "EXACT": self.exact, "ITEMS": form.items, "heads": self.heads,
            "queries": self.queries, "rotation": (use.queries.words, use.queries.signs),
        }  # fmt: skip
        """Arguments that launches of other kernels may share."""
        self.others: dict[str, Callable[..., None]] = {}
        """Launches of other kernels in the same calls, by what they do."""
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        if launch.registers and arch:
            options["maxnreg"] = launch.registers
        held = (*OF_LAYER, *OF_INPUTS, *OF_CALL)
        if launch.many:
            tiles = {"rotation": use.queries.matrix, "MASK": form.mask != "none"}
            kernel = gluon_kernel() if self.gluon else attend_tiles_kernel
            self.attend = Launcher(kernel, device, ("query", "part", "tops"), held, **self.fixed | options | tiles)
        else:
            given = "query", "region_query", "part", "tops"
            self.attend = Launcher(attend_kernel, device, given, held, **self.fixed | options)
        self.joining = {
            "V": use.value, "DV": self.value_dim, "blocks": self.blocks, "SINKS": form.sinks, "TURN": use.v_block**-0.5,
            "STAGES": use.v_block.bit_length() - 1, "signs": use.v_signs, "out_strides": self.out_strides[:3],
        }  # fmt: skip

    def reduce(self, shared: int) -> Callable[..., None]:
        """The launch that joins splits with the splits of a second launch, which has so many query rows in a block; 0: there is none."""
        key = f"joins {shared} rows"
        if key not in self.others:
            sizes, held = (self.groups * self.queries, self.batch * self.heads), (*OF_LAYER, *OF_CALL)
            self.others[key] = join(self.attend.device, *sizes, held, self.fixed | self.joining | {"SHARED": shared})
        return self.others[key]


class Plan:
    """One call of attention over pages, for `inputs` and the inputs of any layer that is like theirs.

    Args:
        query: `[B, Hq, Q, D]`; queries of other layers have the same shape, strides and dtype.
        mask, options: as in `attend.attend_pages`; `sinks` belong to one layer: `run` takes them.
        launch: for measuring; chosen by format otherwise.
        items: divide the rows among programs.
        skip: tokens at the beginning of pages that another plan reads.
        exact: whether it reads sinks and ring.
    """

    def __init__(
        self,
        query: Tensor,
        inputs: PagedInputs,
        mask: Tensor | None,
        options: Options,
        launch: Launch | None = None,
        items: Tensor | None = None,
        skip: int = 0,
        exact: bool = True,
    ) -> None:
        self.kind = kind = layer_of(inputs).kind
        self.empty, self.items, self.tokens, self.splits_of_rows = kind.empty, items, inputs.work.tokens, inputs.work.splits
        sinks, region, ring = inputs.slots
        self.zones = zones = region, sinks, ring
        self.skip, self.max_length, shape = skip, inputs.max_length, query.shape
        scaling, softcap = options.get("scaling"), options.get("softcap")
        self.mask, shown = kind.empty, "none"
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask.expand(*shape[:3], sum(zones) if mask.shape[3] == 1 else -1)
            shown, self.mask_strides = "float", mask.stride()
            if mask.dtype == torch.bool:
                same = not self.mask_strides[1] and (shape[2] == 1 or not self.mask_strides[2])
                shown, mask = "row" if same else "bool", mask.view(torch.uint8)
            self.mask = mask
        self.query_strides = self.laid_out(query).stride()
        self.scaling = float(shape[3] ** -0.5 if scaling is None else scaling)
        form = Form(
            shape, inputs.ring[0].shape[1], shown, exact and sinks + ring > 0, options.get("causal", False),
            None if softcap is None else float(softcap), options.get("sinks") is not None, 0 if items is None else items.shape[1],
            inputs.pages.chosen is not None, launch,
        )  # fmt: skip
        if form not in kind.launches:
            kind.launches[form] = Launches(kind, form)
        self.launches: Launches = kind.launches[form]
        self.has_sinks = form.sinks
        self.like = query.shape, query.stride(), query.dtype, *_sizes(inputs)
        self.splits, self.least = self._splits()
        self.grid = self.launches.panels // self.launches.blocks, self.launches.blocks, self.splits
        self.entries = self.launches.panels * self.splits * self.launches.rows
        """Query rows of the partial outputs."""
        self.beside: Plan | None = None
        """The plan of tokens that several rows share."""
        self.prepared: dict[str, Any] = {}
        """What rooms make once for this plan, by what it does."""
        self.held = self._hold()
        self.reduce = self.launches.reduce(0)

    def laid_out(self, query: Tensor) -> Tensor:
        """The queries as kernels read them."""
        whole = self.kind.use.queries.whole is not None
        return query.contiguous() if whole or query.stride(-1) != 1 else query

    def rotated(self, query: Tensor) -> Tensor:
        """The queries for quantized keys, which the kernel itself rotates in most formats."""
        whole, *_, factor = self.kind.use.queries
        return query if whole is None else _rotate(query, whole, factor)

    def _splits(self) -> tuple[int, int]:
        """Splits of the launch, and the fewest tokens of each."""
        launches, n_quantized, least = self.launches, max(self.zones[0] - self.skip, 0), fused.LEAST_SPLIT
        if self.items is not None:
            return len(self.items), least
        programs = launches.programs
        if launches.many and not launches.gluon:  # beside few long splits, the programs of the exact tokens are brief
            programs += launches.panels * (programs <= 8 * launches.panels)
        if self.tokens is None or launches.many:
            beside = launches.many or self.kind.use.key.kind == "half"  # the exact tokens, which run last otherwise
            choose = in_waves if launches.gluon else in_one_wave if beside else functools.partial(split, schedulers=launches.schedulers)
            splits = choose(n_quantized, launches.panels, launches.tile, programs)
        else:  # rows of different lengths: as many tokens to a split as if all were one row
            least = max(self.tokens * launches.heads * launches.blocks // programs, least)
            least = -(-least // launches.tile) * launches.tile
            splits = min(-(-n_quantized // least), MOST_SPLITS)
        return max(splits, 1 - launches.exact) + launches.exact, least

    def _hold(self, branches: int = 1) -> Held:
        """The arguments `OF_CALL`, with the arguments of the plan `beside`, over tokens that so many rows share."""
        empty, of_rows, beside = self.empty, self.splits_of_rows, self.beside
        return Held(
            **dict(zip(("mask", "mask_b", "mask_h", "mask_q", "mask_t"), (self.mask, *self.mask_strides), strict=True)),
            query_strides=tuple(self.query_strides[:3]), scaling=self.scaling, n_quantized=self.max_length, least=self.least,
            skip=self.skip, items=empty if self.items is None else self.items, firsts=empty if of_rows is None else of_rows.firsts,
            shares=empty if of_rows is None or of_rows.shares is None else of_rows.shares, splits=self.splits, before=self.entries,
            branches=branches, shared_splits=0 if beside is None else beside.splits,
            shared_blocks=0 if beside is None else beside.launches.blocks,
        )  # fmt: skip

    def join(self, beside: Plan, branches: int) -> Plan:
        """This plan with the results of another `beside` it, over tokens that `branches` rows share."""
        self.beside = beside
        self.held = self._hold(branches)
        self.reduce = self.launches.reduce(beside.launches.rows)
        return self

    def fits(self, query: Tensor, inputs: PagedInputs) -> bool:
        """Whether another layer is launched by this plan."""
        return (query.shape, query.stride(), query.dtype, *_sizes(inputs)) == self.like and layer_of(inputs).kind is self.kind

    def launch(self, query: Tensor, of_layer: Held, of_inputs: Held, part: Tensor, tops: Tensor) -> Arguments:
        """Writes partial outputs to `part`, and their maxima and normalisers to `tops`."""
        held = of_layer, of_inputs, self.held
        queries = (query,) if self.launches.many else (query, self.rotated(query))
        self.launches.attend(self.grid, *queries, part, tops, held=held)
        return queries, held

    def run(self, query: Tensor, inputs: PagedInputs, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Arguments]:
        """The output `[B, Hq, Q, Dv]`, the log of the normaliser, fp32 `[B, Hq, Q]`, and the arguments for a launch after it."""
        launches, beside, device = self.launches, self.beside, query.device
        query, of_layer, of_inputs = self.laid_out(query), layer_of(inputs).held, held_of(inputs, self.empty)
        entries = self.entries if beside is None else self.entries + beside.entries
        part = torch.empty(entries * launches.value_dim, dtype=torch.float32, device=device)
        tops = torch.empty(entries * 2, dtype=torch.float32, device=device)
        arguments = self.launch(query, of_layer, of_inputs, part, tops)
        if beside is not None:
            first, shared = _of_first(query, inputs, beside)
            behind = part[self.entries * launches.value_dim :], tops[self.entries * 2 :]
            beside.launch(first, layer_of(shared).held, held_of(shared, self.empty), *behind)
        out = query.new_empty_strided(launches.out_shape, launches.out_strides)
        lse = torch.empty(launches.out_shape[:3], dtype=torch.float32, device=device)
        sinks = self.empty if sinks is None else sinks
        self.reduce(part, tops, sinks, out, lse, held=(of_layer, self.held))
        return out, lse, arguments


def _sizes(inputs: PagedInputs) -> tuple:
    """The sizes that a plan depends on, beside the kind of a layer."""
    sinks, ring = inputs.sinks[0].shape[2], inputs.ring[0].shape
    return inputs.max_length, sinks, ring[1], ring[2], inputs.work


def _rotate(query: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """Contiguous queries `[..., D]` times `matrix` `[D, D]` and `factor`, in fp32."""
    out, dim = torch.empty_like(query, dtype=torch.float32), query.shape[-1]
    rows = query.numel() // dim
    _rotation(query.device, dim, factor)((-(-rows // 16), 1, 1), query, matrix, out, held=(Held(rows=rows),))
    return out


@functools.lru_cache(maxsize=32)
def _rotation(device: torch.device, dim: int, factor: float) -> Launcher:
    constants = {"D": dim, "DP": triton.next_power_of_2(dim), "R": 16, "TURN": factor}
    return Launcher(rotate_kernel, device, ("x", "matrix", "out"), ("rows",), **constants)


def plan_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, launch: Launch | None = None, **options: Unpack[Options]
) -> Plan:
    """The plan of `attend.attend_pages`. `launch`: for measuring; chosen by format otherwise.

    Raises ValueError for causal queries that are not all among the exact last tokens."""
    if options.get("causal") and query.shape[2] > inputs.slots[2]:
        raise ValueError(
            f"causal with {query.shape[2]} queries: their own tokens must be among the exact recent ones, of which there are "
            f"{inputs.slots[2]}"
        )
    work = inputs.work
    splits = work.splits if query.shape[2] == 1 and inputs.pages.chosen is None else None
    launch = launch or tiled(query, inputs, mask, options)
    if cascades(query, inputs, launch):
        plan = Plan(query, inputs, mask, options, skip=work.shared)
        return plan.join(_shared(query, mask, inputs, options), work.branches)
    if splits is None:
        return Plan(query, inputs, mask, options, launch)
    plan = Plan(query, inputs, mask, options, launch, splits.items)
    if splits.shared is None:
        return plan
    return plan.join(Plan(query, inputs, None, options, fused.OF_SHARED, splits.shared, exact=False), TOGETHER)


def attend_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, launch: Launch | None = None, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    """Run `attend.attend_pages` in one pass over the codes. `launch`: for measuring; chosen by format otherwise.

    Raises ValueError for causal queries that are not all among the exact last tokens."""
    return plan_pages(query, inputs, mask, launch=launch, **options).run(query, inputs, options.get("sinks"))[:2]


def cascades(query: Tensor, inputs: PagedInputs, launch: Launch | None) -> bool:
    """Whether the tokens that rows share are read once for all of them, in a launch of their own."""
    _, splits, branches, shared = inputs.work
    if branches == 1 or launch or inputs.pages.chosen or splits:
        return False
    batch = query.shape[0]
    return (batch - batch // branches) * shared * inputs.ring[0].shape[1] >= fused.LEAST_SPARED


def _shared(query: Tensor, mask: Tensor | None, inputs: PagedInputs, options: Options) -> Plan:
    """The plan over the tokens that `work.branches` rows share, with the queries of these rows as the queries of one row."""
    shared, branches = inputs.first_shared(), inputs.work.branches
    query = _of_branches(query, branches)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = _of_branches(mask.expand(len(inputs.pages.table), -1, query.shape[2] // branches, -1), branches)
    launch = in_tiles(query, shared, mask) or (fused.OF_SHARED if max(x.shape[3] for x in shared.ring) <= 128 else None)
    return Plan(query, shared, mask, {**options, "causal": False}, launch, exact=False)


def _of_first(query: Tensor, inputs: PagedInputs, beside: Plan) -> tuple[Tensor, PagedInputs]:
    """The queries and the inputs of the plan of shared tokens `beside` another over `inputs`."""
    if beside.items is not None:
        return query, inputs
    return beside.laid_out(_of_branches(query, inputs.work.branches)), inputs.first_shared()


def _of_branches(x: Tensor, branches: int) -> Tensor:
    """`x` `[B, H, Q, D]` as `[B / branches, H, branches * Q, D]`."""
    return x.unflatten(0, (-1, branches)).transpose(1, 2).flatten(2, 3)
