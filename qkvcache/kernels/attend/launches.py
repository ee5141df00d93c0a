"""How the fused kernels are launched: the codecs that they read, tiles, warps and splits, as measured."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from ...formats.base import Codec, PackedLayout
from ..paged_inputs import PagedInputs
from ..pages import BLOCK
from ..segments import layout_of
from ..work import LEAST_SPLIT, MOST_SPLITS
from .reference import Options


@dataclass(frozen=True)
class Launch:
    """How the attention kernel is launched: tokens in a tile, tiles in flight, registers of a thread (None:
    the compiler chooses), programs of a multiprocessor, warps of a program, query rows of a program; and
    whether it is the kernel for many rows, `attend_tiles_kernel`."""

    tile: int = 32
    stages: int = 3
    registers: int | None = 168
    programs: int = 12
    warps: int = 1
    rows: int = 8
    many: bool = False


LAUNCHES = {
    **{("lut4", kind): Launch(64, 3, None, 8) for kind in ("int4", "lut4", "lut3")},
    **{kinds: Launch(64, 3, None, 8) for kinds in (("int2", "int2"), ("int8", "int4"))},
    **{(kind, kind): Launch(64, 3, None, 6) for kind in ("int8", "uint8", "e4m3", "e5m2")},
    ("int8_halves", "int8"): Launch(64, 3, None, 6),
    ("half", "half"): Launch(64, 3, None),
}
"""Launches by the kinds of keys and values, where `Launch()` is not the best measured on an H200 over all shapes."""
NARROW = {
    **{kinds: Launch(64) for kinds in (("lut4", "int4"), ("int2", "int2"), ("e2m1", "e2m1"))},
    ("lut3", "int3"): Launch(stages=2),
}
"""These of head_dim up to 64, where they differ."""
WIDE = Launch(stages=2, registers=None)
"""The launch for head_dim above 128, where larger tiles do not fit in registers."""
WIDEST = Launch(stages=2, registers=None, programs=2, warps=4)
"""The launch for head_dim 512, where more rows or fewer warps would spill registers (`eval/compile_kernels.py`). Nobody measured it."""
MANY_ROWS = Launch(64, 3, None, 8, 2, 32), Launch(64, 3, None, 4, 4, 64)
"""Launches for up to 32 query rows and for more: each code is unpacked once for as many rows as the registers of a program hold."""
SCHEDULERS = 4
"""Schedulers of a multiprocessor, for NVIDIA GPUs."""
TILES = Launch(128, 1, None, 2, 4, 64, many=True), Launch(64, 1, 128, 2, 8, 128, many=True)
"""Launches of the kernel for many rows in Triton: up to 64 rows, and more. They are the best measured on an H200."""
GLUON_TILES = Launch(128, 1, None, 1, 4, 64, many=True), Launch(128, 1, None, 1, 8, 128, many=True)
"""The launches of that kernel for Hopper, in Gluon."""
GLUON = (3, 6), (3, 10)
"""The first release of Triton whose Gluon compiles the kernels, and the first one that nobody tried: Gluon renames functions."""
GLUON_OF_TILES = (3, 6), (3, 9)
"""These releases for the kernel for many rows, and for `gluon_dense.py`: 3.9 does not compile the former for every format."""
FEWEST_TILE_ROWS = 33
"""Query rows of a KV head from which on that kernel is faster than the decode kernel on an H200."""


def launched(key: PackedLayout, value: PackedLayout, head_dim: int, rows: int = 1, wide: bool = True) -> Launch:
    """The launch for `rows` query rows of a KV head; `wide`: more than 16 rows may share a program."""
    if rows > 16 and wide and head_dim <= 128:
        return MANY_ROWS[0] if rows <= 32 else MANY_ROWS[1]
    if head_dim > 256:
        return WIDEST
    launches = LAUNCHES | NARROW if head_dim <= 64 and rows <= 8 else LAUNCHES
    launch = launches.get((key.kind, value.kind), Launch()) if head_dim <= 128 else WIDE
    return launch if rows <= 8 else replace(launch, rows=16)


def of_blocks(launch: Launch) -> Launch:
    """The launch over chosen blocks, one of which holds a whole tile."""
    if launch.many or launch.tile <= BLOCK:
        return launch
    return Launch(rows=launch.rows) if launch.warps == 1 else replace(launch, tile=BLOCK)


def tiled(query: Tensor, inputs: PagedInputs, mask: Tensor | None, options: Options) -> Launch | None:
    """The launch of the kernel for many query rows; None where it does not serve these inputs, or is slower than the decode kernel.

    It serves causal attention under no mask but one that hides columns, of quantized keys and values of 64 or
    128 channels in fp16 or bf16, on Hopper: on other GPUs nobody measured it."""
    if inputs.pages.per_head or inputs.work.splits or not options.get("causal"):
        return None
    return in_tiles(query, inputs, mask)


def in_tiles(query: Tensor, inputs: PagedInputs, mask: Tensor | None) -> Launch | None:
    """`tiled` by the shapes and types of its arguments."""
    rows = query.shape[1] // inputs.ring[0].shape[1] * query.shape[2]
    if not inputs.max_length or rows < FEWEST_TILE_ROWS or not (architecture(query.device)[0] // 10 == 9 or query.device.type == "cpu"):
        return None
    if mask is not None and (mask.dtype != torch.bool or any(n > 1 for n in (1, 1, 1, *mask.shape)[-3:-1])):
        return None
    sides = [(layout_of(codec), x.shape[3]) for codec, x in zip(inputs.pages.codecs, inputs.ring, strict=True)]
    if query.dtype not in (torch.float16, torch.bfloat16) or not all(layout and _fits_tiles(layout, dim) for layout, dim in sides):
        return None
    return launched_in_tiles(architecture(query.device)[0], rows, [(layout, dim) for layout, dim in sides if layout])


def _fits_tiles(layout: PackedLayout, head_dim: int) -> bool:
    """Whether the kernel for many rows reads this layout: a plane of words must lie in one group or in two."""
    words = head_dim // layout.per
    return head_dim in (64, 128) and layout.kind != "half" and (layout.group % words == 0 or words == 2 * layout.group)


def launched_in_tiles(arch: int, rows: int, sides: Sequence[tuple[PackedLayout, int]]) -> Launch:
    """The launch of the kernel for many rows, for `rows` query rows of a KV head, on GPUs of compute capability `arch`. `sides`: layout
    and head_dim of keys and values. In Gluon, a plane of one high bit must have eight words."""
    gluon = arch // 10 == 9 and all(layout.high != 1 or dim == 128 for layout, dim in sides)
    return (GLUON_TILES if gluon and knows_gluon(*GLUON_OF_TILES) else TILES)[rows > TILES[0].rows]


@functools.cache
def knows_gluon(first: tuple[int, int], beyond: tuple[int, int]) -> bool:
    """Whether this release of Triton is `first` or a later one before `beyond`, whose Gluon compiles a kernel; if not, warns once."""
    known = first <= tuple(map(int, triton.__version__.split(".")[:2])) < beyond
    if not known:
        warnings.warn(
            f"attention of new tokens and to latents takes up to three times as long with Triton {triton.__version__} as with Triton "
            f"{first[0]}.{first[1]} or a later one before {beyond[0]}.{beyond[1]}",
            stacklevel=2,
        )
    return known


OF_SHARED = Launch(64, 3, None, 4, 2, 16)
"""The launch over tokens that rows share, for up to 32 query rows, the best measured on an H100. More rows of
a program take more registers than they spare loads."""
LEAST_SPARED = 5 * 2**16
"""Tokens times KV heads that are not read again, from which on that launch pays: beside it, there is one over the tokens of each row."""


def supports(inputs: PagedInputs, query: Tensor) -> bool:
    """Whether the fused kernel can read these inputs, exact tokens among them."""
    known, recent = inputs.prepared.of_layer.get("supported"), inputs.ring
    if known is None:
        layouts = [layout_of(codec) for codec in inputs.pages.codecs]
        fits = all(layout and _fits(layout, x) for layout, x in zip(layouts, recent, strict=True))
        known = inputs.prepared.of_layer["supported"] = fits and inputs.pages.by_page
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


@functools.lru_cache(maxsize=32)
def programs_of(codecs: tuple[Codec, Codec], head_dim: int, device: torch.device) -> int:
    """Programs of the attention kernel that the GPU runs at a time, for one query of up to 16 heads of a KV head."""
    key, value = map(layout_of, codecs)
    return architecture(device)[1] * (launched(key, value, head_dim) if key and value else Launch()).programs


def in_one_wave(tokens: int, groups: int, tile: int, programs: int) -> int:
    """The number of splits of `tokens` quantized tokens, which `groups` programs would read without splits,
    such that all programs run at a time, the programs of exact tokens among them.

    `tile`: tokens of a tile, which divides the tokens of a split. `programs`: that the GPU runs at a time."""
    return _splits(tokens, min(programs // groups - 1, MOST_SPLITS), tile)


def split(tokens: int, groups: int, tile: int, programs: int, schedulers: int) -> int:
    """The better of as many splits as run at a time, with the programs of exact tokens after them
    (`triton_attend.place_of_program`), and of more, whose programs follow one another, so that no places of
    the GPU are empty. Arguments as in `in_one_wave`; `schedulers` of the GPU share its programs.

    What runs at a time takes as long as the tokens of a split, and the exact tokens after them. Programs of `n` splits
    in turn take as long as to read `tokens / n + SPLIT_COST` tokens. Many of them take `groups / programs` times as long as
    one, and half of one more, for which the last ones wait: the best `n` is where the derivative is 0.
    Splits of few groups would be brief, and costly to join: each scheduler runs one program less."""
    wave = programs // groups
    if wave > MOST_SPLITS_OF_FEW // 2:
        fewer = min(schedulers * max(programs // schedulers - 1, 1), programs)
        return _splits(tokens, min(fewer // groups - 1, MOST_SPLITS_OF_FEW), tile)
    many = min(max(round((tokens * programs / (2 * SPLIT_COST * groups)) ** 0.5), 1), MOST_SPLITS)
    in_turn = groups / programs * (tokens + (many + EXACT_COST) * SPLIT_COST) + tokens / many / 2
    return _splits(tokens, wave if wave and tokens / wave + EXACT_COST * SPLIT_COST < in_turn else many, tile)


def in_waves(tokens: int, groups: int, tile: int, programs: int) -> int:
    """The number of splits for programs that fill a multiprocessor each: what leaves the fewest of them without work while the last ones
    run. Arguments as in `in_one_wave`."""
    times = [-(-groups * n // programs) * (tokens / n + TILES_COST) for n in range(1, MOST_SPLITS + 1)]
    return _splits(tokens, 1 + times.index(min(times)), tile)


def _splits(tokens: int, wanted: int, tile: int) -> int:
    """About as many splits of `tokens` as `wanted`, of whole tiles."""
    each = max(-(-tokens // max(wanted, 1)), LEAST_SPLIT)
    return -(-tokens // (-(-each // tile) * tile))


MOST_SPLITS_OF_FEW = 132
"""The most splits of a row where few rows are all that the GPU reads."""
TILES_COST = 500
"""About the time in which a program of tiles in Gluon rotates its queries and finds the largest scales, in tokens. A program of
`gluon_dense.py` counts as much for its begin and end."""
SPLIT_COST, EXACT_COST = 150, 5 / 3
"""SPLIT_COST: the time of a split beside the time of its tokens, in tokens. EXACT_COST: the time of a program of exact
tokens, in splits without tokens. Both fit the times of 7 shapes, 5 formats and 1 to 8 splits on an H200."""
