"""Compiles the kernels for GPUs that are not there, and looks at the machine code: no registers spilt in a loop, no deep stacks.

    python eval/compile_kernels.py --quick      what CI runs: on two cores, some three minutes
    python eval/compile_kernels.py --all        every format for every GPU

A line for each kernel: registers, stack and spilt bytes, shared memory; of its longest innermost loop instructions, conversions of
integers, stores of 16-bit data to shared memory, spills. Exit status 1 if a kernel for an NVIDIA GPU spills in that loop, has a stack of
more than 128 bytes, or writes to registers that an unfinished product reads (`machine_code.py`); and if products of `gluon_tiles.py` or
`gluon_dense.py` are computed one after another or waited for without a barrier.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports triton

import triton  # noqa: E402
from machine_code import loops, overwritten  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402

from qkvcache.batching import triton_gather
from qkvcache.evict import triton_replace, triton_rotate, triton_sum_attention
from qkvcache.evict import triton_static as triton_evict
from qkvcache.evict.triton_sum_keys import LAUNCH as SUMS
from qkvcache.evict.triton_sum_keys import sum_keys_kernel
from qkvcache.formats import FP8, REGISTRY, HadaQuant, Int4, Int8, TurboQuant  # noqa: E402
from qkvcache.formats.base import PackedLayout  # noqa: E402
from qkvcache.formats.rotation import rotation_block  # noqa: E402
from qkvcache.kernels.attend import gluon_dense, gluon_tiles, triton_merge, triton_tiles
from qkvcache.kernels.attend.launches import GLUON_TILES, OF_SHARED, Launch, launched, launched_in_tiles, of_blocks
from qkvcache.kernels.attend.triton_attend import attend_kernel
from qkvcache.kernels.attend.triton_join import joining, reduce_kernel, rotate_kernel
from qkvcache.kernels.host.tables import Side
from qkvcache.kernels.pages import BLOCK  # noqa: E402
from qkvcache.kernels.store import triton_dequantize, triton_store
from qkvcache.kernels.store.reference import GATHER_TILE  # noqa: E402
from qkvcache.kernels.work import TOGETHER  # noqa: E402
from qkvcache.latents import gluon_attend, launches, triton_attend
from qkvcache.latents.layer import LatentLayer
from qkvcache.select import triton_fetch_blocks, triton_select_blocks
from qkvcache.storage.paged import PAGE  # noqa: E402
from qkvcache.storage.pool import ALIGNMENT, ANCHOR  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
GREATEST_STACK = 128
IN_TURNS = gluon_tiles.attend_tiles_kernel, gluon_dense.attend_dense_kernel
"""Kernels with `attend_in_turns`."""
RECORD_TYPES = dict.fromkeys(("row_lengths", "columns", "order", "where"), "*i64") | dict.fromkeys(("column_mask", "is_valid"), "*i1")
RECORD_TYPES |= {"records": ("*i32", "*fp32", "*fp32", "*fp32")}
OPTIONS = (
    Int8("token"), Int8(symmetric=False), Int8(halves=True), FP8(scale="token"), FP8("e5m2"), FP8("e5m2", scale="tensor"),
    Int4("group"), TurboQuant("3bit_nc", center=False), HadaQuant(4, 4),
)  # fmt: skip
"""Formats with kinds of codes, scales and spans that no registered format has."""
FORMATS = REGISTRY | {format.name: format for format in OPTIONS}
QUICK = ("identity", "int8", "fp8", "int4", "int4_vllm", "nvfp4", "turboquant_4bit_nc", "hadaquant_k4v4", "hadaquant_k2v2")
QUICK += ("turboquant_3bit_nc",)
VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "bool": {"MASK": "bool"},
    "float": {"MASK": "float", "SOFTCAP": 30.0, "CAUSAL": True},
    "store": {"MASK": "row"},
    "items": {"ITEMS": 3, "PAGES": (PAGE, 0)},
    "shared items": {"ITEMS": 3 + TOGETHER, "PAGES": (PAGE, 0), "EXACT": False},
    "blocks": {},
}
COUNTED = "store", "items", "shared items", "blocks"
"""Variants whose rows differ."""


Types = tuple["str | Types", ...]


@dataclass(frozen=True)
class Job:
    name: str
    kernel: triton.JITFunction
    types: dict[str, str | Types]
    constants: dict[str, object]
    target: str
    options: dict[str, object] = field(default_factory=dict)
    may_spill: bool = False
    """Whether a few spilled registers are worth what they buy: with many query rows the kernel was measured to be faster with them."""

    def __post_init__(self) -> None:
        wanted = {param.name for param in self.kernel.params if param.is_constexpr}
        if wanted != {name for name, x in self.constants.items() if x is not None or name in wanted}:
            raise ValueError(f"{self.name}: the kernel and this file differ in {sorted(wanted ^ self.constants.keys())}")


def strides_aligned(name: str) -> bool:
    ends = ("stride_b", "stride_h", "stride_t", "q_stride_q", "strides", "query_b", "query_h", "query_q")
    return (
        name in ("new", "stored", "planes", "out", "sides", "key", "value", "exact")
        or name.endswith(ends)
        and not name.startswith(("mask", "out"))
    )


def attention(format: str, head_dim: int, target: str, variant: str = "", dtype: str = "bf16", rows: int = 1) -> Job:
    key, value = (codec.packed_layout for codec in FORMATS[format].codecs())
    assert key and value, format
    nvidia = TARGETS[target].backend == "cuda"
    launch = OF_SHARED if variant == "shared items" else launched(key, value, head_dim, rows, nvidia)
    launch = of_blocks(launch) if variant == "blocks" else launch
    scales = {"none": dtype, "fp32": "fp32", "fp16": "fp16", "pair": "fp16", "hidden": "fp32", "group": "fp16", "block": "u8"}
    types: dict[str, str | Types] = {"query": f"*{dtype}", "region_query": f"*{dtype}", "exact": (f"*{dtype}",) * 4 + ("i32",) * 12}
    if key.rotated and key.group and head_dim & (head_dim - 1):
        types["region_query"] = "*fp32"  # rotated beforehand
    absent = "constexpr"
    types |= {
        "rotation": ("*fp16", "*fp32"),
        "table": "*i32" if "items" in variant else "*i64",
        "mask": "*fp32" if variant == "float" else "*u8",
        "chosen": ("*i32", "*i32") if variant == "blocks" else absent,
        "query_strides": ("i32",) * 3,
        "mean_strides": ("i32",) * 2,
    }
    types |= dict.fromkeys(("part", "tops"), "*fp32") | {"scaling": "fp32", "items": "*i32"}
    types |= dict.fromkeys(("rows", "lengths"), "*i32" if variant in COUNTED else absent)
    for side, how in (("k", key), ("v", value)):
        codes = f"*{dtype}" if how.kind == "half" else "*i16"
        types[f"{side}_planes"] = (codes, "*i16", f"*{scales[how.scale]}", "*fp32", "*i16")
    turn = rotation_block(head_dim) ** -0.5 if key.rotated else 1.0
    keys = _not_rotated(key) if types["region_query"] == "*fp32" else key
    constants: dict[str, object] = {name: None for name, kind in types.items() if kind == absent}
    constants |= {
        "KEYS": Side(keys, head_dim, False, _strides_of(key, head_dim, dtype), turn),
        "VALUES": Side(value, head_dim, False, _strides_of(value, head_dim, dtype)), "PAGES": (PAGE, ANCHOR), "G": 4,
        "R": launch.rows if nvidia else 16, "T": launch.tile, "SOFTCAP": None, "MASK": "none", "CAUSAL": False,
        "ARCH": TARGETS[target].arch if nvidia else 0, "EXACT": True, "ITEMS": 0,
    }  # fmt: skip
    options: dict[str, object] = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers and nvidia:
        options["maxnreg"] = launch.registers
    name = " ".join(filter(None, [f"attend {format} {head_dim}", variant, f"{rows} rows" * (rows > 1)]))
    return Job(name, attend_kernel, types, constants | VARIANTS[variant], target, options, rows > 1)


def attention_in_tiles(format: str, head_dim: int, target: str, rows: int, variant: str = "") -> Job:
    layouts: Any = [codec.packed_layout for codec in FORMATS[format].codecs()]
    arch = TARGETS[target].arch if TARGETS[target].backend == "cuda" else 0
    launch = launched_in_tiles(arch, rows, [(layout, head_dim) for layout in layouts])
    kernel = (gluon_tiles if launch in GLUON_TILES else triton_tiles).attend_tiles_kernel
    job = attention(format, head_dim, target, variant)
    names = {param.name for param in kernel.params}
    types = {name: kind for name, kind in job.types.items() if name in names} | {"rotation": "*fp16"}
    constants = {name: x for name, x in job.constants.items() if name in names}
    constants |= {"R": launch.rows, "T": launch.tile, "MASK": job.constants["MASK"] != "none"}
    options: dict[str, object] = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers and constants["ARCH"]:
        options["maxnreg"] = launch.registers
    name = " ".join(filter(None, [f"tiles {format} {head_dim}", variant, f"{rows} rows"]))
    return Job(name, kernel, types, constants, target, options, may_spill=True)


def attention_to_dense(head_dim: int, target: str, causal: bool) -> Job:
    layout = NVMMASharedLayout(128, 16, rank=4)
    tiles = f"tensordesc<bf16[1, 1, {gluon_dense.TILE}, {head_dim}],{layout!r}>"
    types: dict[str, str | Types] = {"query": "*bf16", "keys": tiles, "values": tiles, "out": "*bf16", "lse": "*fp32"}
    types |= {"query_strides": ("i32",) * 3, "scaling": "fp32"}
    constants = {"CAUSAL": causal, "D": head_dim, "R": gluon_dense.ROWS, "T": gluon_dense.TILE, "ARCH": TARGETS[target].arch}
    name = f"dense {head_dim}{' causal' * causal}"
    return Job(name, gluon_dense.attend_dense_kernel, types, constants, target, {"num_warps": gluon_dense.WARPS})


def merging(target: str) -> Job:
    """Three parts and one that nobody reads, folded and not."""
    types: dict[str, str | Types] = {"outs": ("*bf16",) * 4, "lses": ("*fp32",) * 4, "strides": (("i32",) * 6,) * 4}
    types |= {"sinks": "*bf16", "out": "*bf16", "totals": "*fp32"}
    constants = {"G": 4, "D": 128, "P": 128, "R": triton_merge.ROWS, "FOLDED": (1, 1, 0, 1), "SINKS": True}
    return Job("merge 4 parts 128", triton_merge._merge_kernel, types, constants, target, {"num_warps": 4})


def attention_to_latents(format: str, target: str, rows: int = 128, variant: str = "", launch: Launch | None = None) -> Job:
    arch = TARGETS[target].arch if TARGETS[target].backend == "cuda" else 0
    layouts: Any = tuple(codec.packed_layout for codec in LatentLayer(FORMATS[format], latents=(512, 64)).codecs((512, 64)))
    hopper, rope = launches.on_hopper(arch, layouts, (512, 64)), layouts[1]
    launch = launch or launches.launched(arch, rows, layouts, (512, 64))
    job, chosen = attention(format, 512, target, variant.replace("chosen", "")), variant == "chosen"
    kernel = gluon_attend.attend_latents_kernel if hopper else triton_attend.attend_latents_kernel
    names = {param.name for param in kernel.params}
    types = {name: kind for name, kind in job.types.items() if name in names}
    types |= dict.fromkeys(("q_latent", "q_rope"), "*bf16" if rope.kind == "half" else "*fp16") | {"factors": "*fp32"}
    types |= {"v_planes": ("*bf16" if rope.kind == "half" else "*i16", "*i16", "*fp32", "*fp32", "*i16")}
    types |= {"chosen": "*i32", "counts": "*i32"}
    constants = {name: x for name, x in job.constants.items() if name in names and name != "chosen"}
    constants |= {"VALUES": Side(rope, 64, False, _strides_of(rope, 64, "bf16")), "G": rows, "R": launch.rows, "T": launch.tile}
    constants |= {"TX": launch.tile // 2, "MASK": chosen or job.constants["MASK"] != "none", "ARCH": arch, "STAGES": launch.stages}
    constants = {name: x for name, x in (constants | {"CHOSEN": int(chosen)}).items() if name in names}
    name = " ".join(filter(None, [f"latents {format}", variant, f"{rows} rows"]))
    options: dict[str, object] = {"num_warps": launch.warps, "num_stages": 1}
    return Job(name, kernel, types, constants, target, options, may_spill=True)


def scoring(format: str, head_dim: int, target: str) -> Job:
    job, kernel = attention(format, head_dim, target, "store"), triton_select_blocks.score_blocks_kernel
    names = {param.name for param in kernel.params}
    types = {name: kind for name, kind in job.types.items() if name in names} | {"scores": "*fp32"}
    constants = {name: x for name, x in job.constants.items() if name in names}
    whole = FORMATS[format].key.packed_layout
    assert whole
    key = whole.upper or whole
    constants |= {"KEYS": replace(constants["KEYS"], layout=key, strides=_strides_of(key, head_dim, "bf16"))}  # type: ignore[type-var]
    constants |= {"R": 8 if constants["ARCH"] else 16, "T": triton_select_blocks.TILE, "MASK": "none"}
    options: dict[str, object] = {"num_warps": 1, "num_stages": triton_select_blocks.stages_of(key)}
    return Job(f"score blocks {format} {head_dim}", kernel, types, constants, target, options)


def choosing(blocks: int, target: str) -> Job:
    types = {"scores": "*fp32", "table": "*i64", "entries": "*i64"} | dict.fromkeys(("rows", "lengths", "blocks", "read"), "*i32")
    constants = {"N": blocks, "PAGE": PAGE, "COUNTED": True, "BITS": triton_select_blocks.BITS, "BLOCK": BLOCK}
    constants["ARCH"] = TARGETS[target].arch if TARGETS[target].backend == "cuda" else 0
    return Job(f"choose blocks {blocks}", triton_select_blocks.choose_blocks_kernel, types, constants, target, {"num_warps": 16})


def choosing_tokens(target: str) -> Job:
    types = {"mask": "*u8", "table": "*i64", "entries": "*i64"} | dict.fromkeys(("rows", "lengths", "index", "counts"), "*i32")
    constants = {"PAGE": PAGE, "COUNTED": True, "N": launches.CHOSEN_FROM}
    return Job("choose tokens", triton_attend.choose_kernel, types, constants, target, {"num_warps": 16})


def fetching(target: str) -> Iterator[Job]:
    """The slots of chosen blocks, and copies of blocks in 4 bits of 128 channels."""
    sizes = {"PAGE": PAGE, "BASE": ANCHOR, "BLOCK": BLOCK}
    types: dict[str, str | Types] = {"entries": "*i64", "pages": "*i64", "table": "*i64", "index": "*i64"}
    types |= dict.fromkeys(("blocks", "read", "kept", "hands", "lengths", "missing", "counts"), "*i32")
    widths = 32, 32, 2, 32, 32, 4
    planes = dict.fromkeys(("WORDS",), tuple(BLOCK * n // 8 for n in widths))
    planes["STRIDES"] = tuple((8, PAGE * n // 8, 160, 0) for n in widths)
    kernels = triton_fetch_blocks
    placed = {"N": 128, "S": 256, "STEPS": 8, "COUNTED": True, "BLOCK": BLOCK}
    yield Job("place blocks", kernels.place_blocks_kernel, types, placed, target, {"num_warps": 4})
    types["planes"] = ("*u8", "*u8", "*u8", "*u8", "*fp16", "*fp16") * 2
    yield Job("copy blocks", kernels.copy_blocks_kernel, types, sizes | planes | {"NEAR": 2}, target, {"num_warps": 2})
    index = {name: x[1:3] for name, x in planes.items()}
    types["planes"] = "*u8", "*u8", "*fp16", "*fp16"
    yield Job("copy index", kernels.copy_index_kernel, types, sizes | index | {"COUNTED": True}, target, {"num_warps": 1})


def queries_of_latents(target: str) -> Job:
    types = {"latent": "*bf16", "query": "*bf16", "order": "*i64", "rope_order": "*i64", "scaling": "fp32"}
    types |= dict.fromkeys(("q_latent", "q_rope"), "*fp16") | dict.fromkeys(("weights", "mean", "factors"), "*fp32")
    constants = {"D": 512, "P": 64, "CENTERED": True}
    return Job("queries of latents", triton_attend.query_kernel, types, constants, target, {"num_warps": 1})


def _strides_of(how: PackedLayout, head_dim: int, dtype: str) -> tuple[int, ...]:
    """The strides of codes, high bits and scales over entries and heads, where entries count in units of ALIGNMENT."""
    words, size = head_dim // how.per, {"bf16": 2, "fp32": 4}[dtype] if how.kind == "half" else 2
    scale = {"none": size, "fp32": 4, "hidden": 4, "block": 1}.get(how.scale, 2)
    scales = 0 if how.scale == "none" else PAGE * triton_dequantize.scales_of.fn(how, head_dim)
    return ALIGNMENT // size, PAGE * words, ALIGNMENT // 2, PAGE * (head_dim * how.high // 16), ALIGNMENT // scale, scales


def _not_rotated(how: PackedLayout) -> PackedLayout:
    return dataclasses.replace(how, rotation=0)


def joins(format: str, head_dim: int, target: str, rows: int) -> Job:
    value = FORMATS[format].value.packed_layout
    assert value
    types: dict[str, str | Types] = dict.fromkeys(("part", "tops", "signs", "center", "lse"), "*fp32")  # type: ignore[assignment]
    types |= {"sinks": "*bf16", "out": "*bf16", "firsts": "*i32", "shares": "*i32", "out_strides": ("i32",) * 3}
    block = rotation_block(head_dim) if value.rotated else 1
    constants = {
        "V": value, "DV": head_dim, "G": 4, "R": 8 if TARGETS[target].backend == "cuda" else 16, "SINKS": True, "EXACT": True,
        "TURN": block**-0.5, "STAGES": block.bit_length() - 1, "ITEMS": 3, "SHARED": OF_SHARED.rows,
    } | joining(rows, triton.next_power_of_2(head_dim), value.rotated)  # fmt: skip
    warps = constants.pop("num_warps")
    return Job(f"reduce {format} {head_dim}, {rows} rows", reduce_kernel, types, constants, target, {"num_warps": warps})


def rotating(head_dim: int, target: str) -> Job:
    constants = {"D": head_dim, "DP": triton.next_power_of_2(head_dim), "R": 16, "TURN": rotation_block(head_dim) ** -0.5}
    return Job(f"rotate {head_dim}", rotate_kernel, {"x": "*bf16", "matrix": "*fp16", "out": "*fp32"}, constants, target)


def summing(format: str, head_dim: int, target: str, variant: str = "") -> Job:
    job = attention(format, head_dim, target, variant)
    names = {param.name for param in sum_keys_kernel.params}
    types = {name: kind for name, kind in job.types.items() if name in names} | dict.fromkeys(("lse", "observed", "sums"), "*fp32")
    constants = {name: x for name, x in job.constants.items() if name in names}
    constants |= {"R": 8 if constants["ARCH"] else 16, "T": SUMS.tile}
    return Job(f"sum keys {format} {head_dim} {variant}".rstrip(), sum_keys_kernel, types, constants, target, {"num_warps": 1})


def columns(head_dim: int, target: str, dtype: str = "bf16", options: bool = False) -> Iterator[Job]:
    arch = TARGETS[target].arch if TARGETS[target].backend == "cuda" else 0
    types = {"query": f"*{dtype}", "key": f"*{dtype}", "visible": "*u8", "sinks": "*bf16"}
    types |= dict.fromkeys(("counts", "lse", "attention_sums"), "*fp32") | {"scale": "fp32"}
    constants = {
        "D": head_dim,
        "DP": triton.next_power_of_2(head_dim),
        "G": 4,
        "SOFTCAP": 30.0 if options else None,
        "VISIBLE": options,
        "ARCH": arch,
    }
    kernels = (
        ("lse", triton_sum_attention.lse_kernel, {"SINKS": options}),
        ("column", triton_sum_attention.column_kernel, {"POWER": 3 if options else 1}),
    )
    for (name, kernel, more), tile in zip(kernels, triton_sum_attention.tiles(head_dim, arch), strict=True):
        launch = {option: x for option, x in tile.items() if option.startswith("num")}
        sizes = {option: x for option, x in tile.items() if option not in launch}
        yield Job(f"{name} {head_dim}{' options' if options else ''}", kernel, types, constants | more | sizes, target, launch)


def _strided(pointer: str, strides: int) -> Types:
    """Of a tensor with its strides."""
    return (pointer, *["i32"] * strides)


def _planes_of(codec, dim: int, table: str) -> Types:
    """Of `triton_dequantize.plane_arguments`."""
    names = {"float32": "fp32", "float16": "fp16", "uint8": "u8", "int8": "i8", "float8_e4m3fn": "u8", "float8_e5m2": "u8"}
    layout = codec.packed_layout
    held = {buffer.name: names[str(buffer.dtype)[6:]] if buffer.dtype else "bf16" for buffer in codec.buffers(dim)}
    types: Types = (table if layout.rotated else "*bf16",)
    for name in layout.planes:
        types += _strided(f"*{held.get(name, 'bf16')}", 2)
    return types + _strided("*fp32" if layout.centered else "*bf16", 2)


def storing(format: str, head_dim: int, tokens: int, target: str, heads: int = 8) -> Job:
    """Quantizing into slots, and copying into sinks and a ring; from a table where many tokens come."""
    codecs = FORMATS[format].codecs()
    layouts = tuple(triton_dequantize.known(codec, _Like(head_dim)) for codec in codecs)
    across, along, warps = triton_dequantize.tile(layouts, heads, tokens, triton_dequantize.padded(head_dim))
    vectors = _strided("*bf16", 3)
    types: dict[str, str | Types] = {"key": "*bf16", "value": "*bf16", "new_strides": (vectors[1:],) * 2, "slots": "*i64", "table": "*i64"}
    types["zones"] = ((*_strided("*i64", 3), vectors, vectors),) * 2
    types["planes"] = tuple(_planes_of(codec, head_dim, "*bf16") for codec in codecs)
    constants = {"L": layouts, "D": (head_dim,) * 2, "ACROSS": across, "ALONG": along, "PAGE": PAGE, "BASE": ANCHOR}
    constants |= {"ZONES": 0 if tokens > 1 else 2, "BY_TABLE": tokens > 1}
    name = f"quantize {format} {head_dim} {'block' if tokens > 1 else 'token'}"
    return Job(name, triton_store._quantize_kernel, types, constants, target, {"num_warps": warps})


def stepping(format: str, head_dim: int, target: str) -> Iterator[Job]:
    """A step of one token, a prompt, and a token that leaves the ring of a layer that evicts."""
    zones, vectors = _strided("*bf16", 2) * 2, _strided("*bf16", 3)
    planes = [_planes_of(codec, head_dim, "*bf16") for codec in FORMATS[format].codecs()]
    step: dict[str, str | Types] = {"control": "*i32", "rows": "*i32", "table": "*i64", "key": "*bf16", "value": "*bf16"}
    step["new_strides"], step["stored"] = (vectors[1:],) * 2, tuple((*zones, side) for side in planes)
    for tokens, name in ((1, ""), (512, " block")):
        stored = storing(format, head_dim, tokens, target)
        constants = {name: x for name, x in stored.constants.items() if name not in ("ZONES", "BY_TABLE")}
        yield Job(f"step {format} {head_dim}{name}", triton_store._step_kernel, step, constants, target, stored.options)
    evict = RECORD_TYPES | {"table": "*i64", "stored": tuple(("*bf16", "*bf16", side) for side in planes)}
    stored = storing(format, head_dim, 1, target, heads=1)
    constants = {name: x for name, x in stored.constants.items() if name not in ("ZONES", "BY_TABLE")} | {"N": triton_evict.ORDERED}
    yield Job(f"evict_token {format} {head_dim}", triton_evict._evict_kernel, evict, constants, target, stored.options)


def arriving(head_dim: int, heads: int, target: str) -> Job:
    types = RECORD_TYPES | {"sides": (("*bf16", *_strided("*bf16", 2)),) * 2}
    types["fields"] = tuple(_strided(record, 2) for record in RECORD_TYPES["records"])
    constants = {"D": (head_dim,) * 2, "GIVEN": (False, False, True, True), "REAL": True, "ACROSS": heads}
    return Job(f"arrive {head_dim} {heads} heads", triton_evict._append_kernel, types, constants, target)


def replacing(columns: int, few: int, target: str) -> Job:
    """The lowest of `columns` slots and new tokens, of which there are at most `few`."""
    fields = ("*i32", "*fp32", "*fp32", "*fp32")
    types: dict[str, str | Types] = {"priority": "*fp32", "recent": "*i64", "into": "*i64", "steps": ("i32",) * 4}
    types |= dict(zip((*triton_replace.UNION, *triton_replace.REGION), fields * 2, strict=True))
    block = min(columns, triton_replace.LARGEST)
    constants = {"FIELDS": len(fields), "BY_ROW": True, "BLOCK": block, "MOST": few}
    return Job(f"replace {columns}", triton_replace._replace_kernel, types, constants, target, {"num_warps": min(block // 256, 8)})


def decoding(format: str, head_dim: int, target: str) -> Iterator[Job]:
    """Dequantizing planes and pages."""
    codecs = FORMATS[format].codecs()
    for codec in dict.fromkeys(codecs):
        layout = triton_dequantize.known(codec, _Like(head_dim))
        wide = triton_dequantize.padded(head_dim)
        types = {"out": _strided("*bf16", 3), "planes": _planes_of(codec, head_dim, "*bf16")}
        across, along, warps = triton_dequantize.tile((dataclasses.replace(layout, span="each"),), 8, 512, wide)
        constants = {"L": layout, "D": head_dim, "ACROSS": across, "ALONG": along}
        name = f"dequantize {layout.kind} {layout.scale} {head_dim}"
        yield Job(name, triton_dequantize._dequantize_kernel, types, constants, target, {"num_warps": warps})
    types = {"table": "*i64", "lengths": "*i32"}
    types["sides"] = tuple((*_strided("*bf16", 3), _planes_of(codec, head_dim, "*bf16")) for codec in codecs)
    constants = {"N": triton_dequantize.REGION_TILE, "PAGE": PAGE, "BASE": ANCHOR, "COUNTED": False, "D": (head_dim,) * 2}
    constants["L"] = tuple(_not_rotated(triton_dequantize.known(codec, _Like(head_dim))) for codec in codecs)
    yield Job(
        f"dequantize pages {format} {head_dim}", triton_dequantize._dequantize_pages_kernel, types, constants, target, {"num_warps": 4}
    )


def gathering(format: str, head_dim: int, target: str) -> Job:
    codecs = FORMATS[format].codecs()
    layouts = [triton_dequantize.known(codec, _Like(head_dim)) for codec in codecs]
    across, along, warps = triton_dequantize.tile_of_pages(tuple(layouts), 8, GATHER_TILE, triton_dequantize.padded(head_dim))
    types: dict[str, str | Types] = dict.fromkeys(("tiles", "new_starts", "out_starts", "rows", "lengths", "table"), "*i32")
    zones = _strided("*bf16", 2) * 2 + _strided("*bf16", 3) * 2
    types |= {name: (*zones, _planes_of(codec, head_dim, "*bf16")) for name, codec in zip(("key", "value"), codecs, strict=True)}
    constants: dict[str, object] = {"K": layouts[0], "D": head_dim, "V": layouts[1], "DV": head_dim, "ACROSS": across, "ALONG": along}
    constants |= {"TILE": GATHER_TILE, "PAGE": 256, "BASE": 0}
    return Job(f"gather {format} {head_dim}", triton_gather._gather_rows_kernel, types, constants, target, {"num_warps": warps})


def rotary(head_dim: int, target: str, interleaved: bool = False) -> Job:
    types = {"x": _strided("*bf16", 3), "out": _strided("*bf16", 3), "by": "*i64", "inv_freq": "*fp64"}
    half = head_dim // 2
    constants = {"D": head_dim, "HALF": half, "STEP": 1 + interleaved, "APART": 1 if interleaved else half}
    constants |= {"N": triton_rotate.TOKENS, "H": triton_rotate.HEADS}
    name = f"rotary {head_dim}{' interleaved' if interleaved else ''}"
    return Job(name, triton_rotate._rotate_kernel, types, constants, target, {"num_warps": 4})


@dataclass(frozen=True)
class _Like:
    """As much of a tensor as `known` asks for."""

    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 8, 512, self.head_dim)

    def stride(self, dim: int) -> int:
        return 1


def jobs(everything: bool) -> Iterator[Job]:
    formats = list(FORMATS) if everything else QUICK
    for target in TARGETS:
        few = not everything and target != "sm_90"
        for format in QUICK[-1:] if few else formats:
            yield attention(format, 128, target)
            if not (everything or format in ("int8", "turboquant_4bit_nc", QUICK[-1])):
                continue
            yield from (attention(format, 128, target, variant) for variant in ("items", "shared items", "blocks"))
            yield scoring(format, 128, target)
            if (halves := FORMATS[format].in_halves()).name in FORMATS.keys() - {*formats}:
                yield attention(halves.name, 128, target)
            if format != "identity":
                yield attention_in_tiles(format, 128, target, 128)
                yield attention_in_tiles(format, 128, target, 128, "blocks")
        if target == "sm_90":
            yield from (attention_to_dense(head_dim, target, causal) for head_dim, causal in ((128, False), (128, True), (64, True)))
        yield merging(target)
        yield queries_of_latents(target)
        yield choosing(4096, target)
        yield from fetching(target)
        for format in ("turboquant_4bit_nc",) if few else ("int8", "turboquant_4bit_nc"):
            yield storing(format, 512, 1, target, heads=1)
            yield storing(format, 512, 512, target, heads=1)
            yield attention_to_latents(format, target, variant="" if few else "store")
            yield attention_to_latents(format, target, variant="chosen")
        yield attention_to_latents("identity", target)
        yield choosing_tokens(target)
        yield from columns(128, target)
        yield arriving(128, 8, target)
        yield replacing(2048, 8, target)
        yield rotary(128, target)
        if not few:
            sizes = [("int8", 256), ("int8", 512), ("int4", 96)]
            if everything:
                sizes = [(format, d) for format in ("int8", "int4", "turboquant_3bit_nc") for d in (64, 96, 256)]
                sizes += [(format, 512) for format in formats if not any(codec.packed_layout.group for codec in FORMATS[format].codecs())]
            yield from (attention(format, d, target) for format, d in sizes)
            for variant in [name for name in VARIANTS if name not in ("", "items")] if everything else ["float"]:
                yield attention("turboquant_4bit_nc", 128, target, variant)
            many = [(format, rows) for format in formats for rows in (32, 64)] if everything else [("int8", 64), ("turboquant_4bit_nc", 64)]
            yield from (attention(format, 128, target, rows=rows) for format, rows in many)
            yield from (attention_in_tiles(format, 128, target, 64) for format, rows in many if rows > 32)
            yield attention_in_tiles("int8", 128, target, 128, "store")
            for format in ("turboquant_4bit_nc", "hadaquant_k2v2"):  # of eight words a token
                yield attention(format, 64, target)
                yield from (attention_in_tiles(format, 64, target, rows) for rows in (64, 128))
            yield from (attention(format, 128, target, "store") for format in ("int8", "turboquant_4bit_nc"))
            yield from (summing(format, 128, target, "store") for format in ("identity", "int8", "turboquant_4bit_nc"))
            for rows in (32, 256, 1024):
                yield from (joins(format, dim, target, rows) for format in ("int8", "hadaquant_k2v2") for dim in (128, 512))
            yield rotating(96, target)
            yield from (arriving(*sizes, target) for sizes in ((80, 32), (256, 16)))
            yield rotary(128, target, interleaved=True)
            yield replacing(8192, 64, target)
            yield from columns(128, target, options=True)
            yield from columns(256, target)
        for format in formats:
            if not everything and (few or format not in ("int4", "hadaquant_k2v2", "turboquant_3bit_nc")):
                continue
            if all(triton_dequantize.supports(codec, 128) for codec in FORMATS[format].codecs()):
                yield from (storing(format, 128, tokens, target) for tokens in ((1, 512) if everything else (512,)))
                yield from stepping(format, 128, target)
                yield from decoding(format, 128, target)
                yield gathering(format, 128, target)


def _leaves(types: str | Types, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The types of an argument, with where they are in it."""
    if isinstance(types, str):
        yield path, types
    else:
        for i, inner in enumerate(types):
            yield from _leaves(inner, (*path, i))


def compiled(job: Job):
    """Integers are 32 bits wide, and what the launch would find to be multiples of 16 is said to be."""
    signature, attributes = {}, {}
    for i, name in enumerate(job.kernel.arg_names):
        signature[name] = "constexpr" if name in job.constants else job.types.get(name, "i32")
        for path, kind in _leaves(signature[name], (i,)):
            if kind.startswith("*") or strides_aligned(name) or name == "least":
                attributes[path] = [["tt.divisibility", 16]]
    kind = GluonASTSource if job.kernel.is_gluon() else ASTSource
    source = kind(fn=job.kernel, signature=signature, constexprs=job.constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[job.target], options=job.options)


@dataclass(frozen=True)
class Look:
    registers: int
    stack: int
    local: int
    loop: list[str]
    after_waits: list[str]
    """The instructions that follow waits for all products but the last."""
    overwritten: list[str] | None
    """What `machine_code.overwritten` returns."""

    def count(self, *starts: str) -> int:
        return sum(instruction.startswith(starts) for instruction in self.loop)


def look(cubin: bytes) -> Look:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    after_waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1 ;\s*/\*\w+\*/\s+(\S+)", code)
    innermost = list(loops(code))
    return Look(*map(int, found.groups()), max(innermost, key=len, default=[]), after_waits, overwritten(innermost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the default")
    size.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", help="kernels whose line would begin like this, e.g. 'sm_90  attend'")
    args = parser.parse_args()
    failures = 0
    for job in jobs(args.all):
        line = f"{job.target:7s} {job.name:36s}"
        if args.only and args.only not in line:
            continue
        try:
            kernel = compiled(job)
        except Exception as error:
            failures += 1
            print(line, "does not compile:", (str(error) or repr(error)).strip().splitlines()[-1][:200], flush=True)
            continue
        if TARGETS[job.target].backend != "cuda":
            print(line, f"shared {kernel.metadata.shared:6d}", flush=True)
            continue
        seen = look(kernel.asm["cubin"])
        bad = not job.may_spill and (seen.stack > GREATEST_STACK or (seen.loop and (seen.local > 0 or seen.count("STL") > 0)))
        bad = bad or bool(seen.overwritten)
        if job.kernel in IN_TURNS:
            bad = bad or seen.overwritten is None or {op[:8] for op in seen.after_waits} != {"BAR.SYNC"}
        failures += bool(bad)
        print(
            line,
            f"registers {seen.registers:3d}  stack {seen.stack:3d}  local {seen.local:3d}  shared {kernel.metadata.shared:6d}  "
            f"loop {len(seen.loop):4d}  I2F {seen.count('I2F'):2d}  STS16 {seen.count('STS.U16'):2d}  STL {seen.count('STL'):2d}",
            "  FAILED" if bad else "",
            *(f"\n    overwrites what a product reads: {instruction}" for instruction in seen.overwritten or ()),
            flush=True,
        )
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
