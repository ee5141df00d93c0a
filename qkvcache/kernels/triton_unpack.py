"""How kernels read codes: tiles of 16-bit words to tiles of fp16 numbers, one for each channel of a word (a plane), without conversions.

A code becomes a number by putting its bits where fp16 keeps them: an integer n of four bits on top of the mantissa of 16 reads 16 + n.
Nothing is converted, and whoever uses the numbers takes `offset` away and multiplies by `unit` where that is cheap: on the scores, or once
on the output. Levels that no shift makes come from a table of bytes, of which PRMT reads four entries at a time.

`Words` says all this of a codec for the kernels, which take it as a constant. On NVIDIA GPUs (`ASM`) the bit operations act on two words at
once, as they lie in a register of a matrix operand; elsewhere (`ASM` = 0), in the interpreter among others, plain Triton does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from ..formats.base import Codec
from ..formats.centered import Centered
from ..formats.codebooks import GRID, TRELLIS, grid_levels, trellis_levels
from ..formats.fp8 import ScaledFloat8
from ..formats.identity import AsIs
from ..formats.int4 import GroupInt4, HiddenZeroInt4
from ..formats.int8 import SymmetricInt8
from ..formats.nvfp4 import BLOCK, BlockFP4
from ..formats.rotated import LloydMax, Rotated
from ..formats.trellis import Trellis
from ..formats.uniform import Uniform


@dataclass(frozen=True)
class Words:
    """How a codec keeps its codes, for kernels. A channel is `level * scale + zero`, and `level = (number - offset) * unit`;
    `centered`: and a mean that all tokens share.

    kind     of codes: half, int8, uint8, e4m3, e5m2, int4, lut4, int3, lut3, lut2, e2m1, trellis2, trellis3, trellis4
    per      channels in a word
    scale    none; fp32 or fp16 for each token; pair: fp16 scale and zero; hidden: fp32 with the zero point in its low four bits;
             group: fp16 for each `group` channels; block: E4M3, likewise
    """

    kind: str
    per: int
    scale: str
    unit: float = 1.0
    offset: float = 0.0
    group: int = 0
    rotated: bool = False
    centered: bool = False

    @property
    def high(self) -> bool:
        """Whether high bits have a plane of their own."""
        return self.kind in ("int3", "lut3", "trellis2", "trellis3", "trellis4")

    @property
    def halved(self) -> bool:
        """Whether two words share one of the main plane too, as they share one of high bits."""
        return self.kind == "trellis2"

    @property
    def signed(self) -> bool:
        """Whether as many words of signs lie behind those of high bits."""
        return self.kind == "trellis4"


@cache
def words(codec: Codec) -> Words | None:
    """What kernels know of `codec`, or None if they cannot read it."""
    rotated = codec.rotation is not None
    match codec:
        case Centered():
            inner = words(codec.codec)
            return inner and replace(inner, rotated=rotated, centered=True)
        case AsIs():
            return Words("half", 1, "none")
        case SymmetricInt8():
            return Words("int8", 2, "fp16" if codec.scale_dtype == torch.float16 else "fp32")
        case ScaledFloat8():
            return Words(codec.dtype, 2, "fp32")
        case Uniform():
            kind, per, offset = {8: ("uint8", 2, 0.0), 4: ("int4", 4, 16.0), 3: ("int3", 8, 8.0)}[codec.bits]
            return Words(kind, per, "pair", offset=offset)
        case HiddenZeroInt4():
            return Words("int4", 4, "hidden", offset=16.0, rotated=rotated)
        case GroupInt4():
            return Words("int4", 4, "group", offset=16.0 + 8, group=codec.group_size, rotated=rotated)
        case BlockFP4():
            return Words("e2m1", 4, "block", unit=2.0**8, group=BLOCK)
        case Rotated(quantizer=LloydMax(bits=bits)):
            unit, offset = GRID[bits][0] / _TINY, (_HALF[bits] - 0.5) * _TINY
            return Words(f"lut{bits}", 4 if bits == 4 else 8, "fp16", unit=unit, offset=offset, rotated=rotated)
        case Rotated(quantizer=Trellis(bits=bits)):
            unit, offset = TRELLIS[bits][0] / _TINY, (_TRELLIS_HALF - 0.5) * _TINY
            return Words(f"trellis{bits}", 8, "fp16", unit=unit, offset=offset, rotated=rotated)
    return None


_TINY = 2.0**-24
"""What a one reads in the lowest bit of fp16: bytes of tables read as subnormal numbers, so that they bring no offset but their own."""

_HALF = {2: 128, 3: 128, 4: 64}
"""Steps by which levels are moved to be positive."""


def _table(bits: int) -> tuple[int, ...]:
    """Of each code its level in steps, moved to be positive: bytes, four to a word, the first one lowest."""
    entries = bytes(round(level / GRID[bits][0] - 0.5) + _HALF[bits] for level in grid_levels(bits))
    return tuple(int.from_bytes(entries[at : at + 4], "little") for at in range(0, len(entries), 4))


_TRELLIS_HALF = 64


def _trellis_table(bits: int) -> tuple[int, ...]:
    """Likewise, by index and the two bits of the subset, the lower one before the higher; of 4 bits for levels above zero alone: below it,
    the bits of the subset are flipped, and then the seven bits of the entry."""
    step, levels = TRELLIS[bits][0], trellis_levels(bits)[-16:]
    steps = [round(levels[n & ~3 | n >> 1 & 1 | (n & 1) << 1] / step - 0.5) + _TRELLIS_HALF for n in range(len(levels))]
    return tuple(int.from_bytes(bytes(steps[at : at + 4]), "little") for at in range(0, len(steps), 4))


_TRELLIS2, _TRELLIS3, _TRELLIS4 = map(_trellis_table, (2, 3, 4))
_TRELLIS2_0, _TRELLIS2_1 = map(tl.constexpr, _TRELLIS2)
_TRELLIS3_0, _TRELLIS3_1, _TRELLIS3_2, _TRELLIS3_3 = map(tl.constexpr, _TRELLIS3)
_TRELLIS4_0, _TRELLIS4_1, _TRELLIS4_2, _TRELLIS4_3 = map(tl.constexpr, _TRELLIS4)

_LUT2 = _table(2)
_LUT3 = _table(3)
_LUT4 = _table(4)
_LUT2_0 = tl.constexpr(_LUT2[0])
_LUT3_0, _LUT3_1 = map(tl.constexpr, _LUT3)
_LUT4_0, _LUT4_1, _LUT4_2, _LUT4_3 = map(tl.constexpr, _LUT4)

# Two bytes, of words v and w, to the low bytes of two fp16 numbers whose high byte is `high`.
_SPREAD = """
prmt.b32 {0}, x, {high}, 0x4240;
prmt.b32 {1}, x, {high}, 0x4341;
"""


def _spread(first: str, second: str, high: str = "0") -> str:
    return _SPREAD.format(first, second, high=high)


_OF_1024 = "0x64646464"

_ASM_E5M2 = tl.constexpr("shl.b32 $0, $2, 8; and.b32 $0, $0, 0xff00ff00; and.b32 $1, $2, 0xff00ff00;")

_ASM_E4M3 = tl.constexpr("""{
.reg .b16 a, b;
.reg .b32 x;
prmt.b32 x, $2, 0, 0x3120;
mov.b32 {a, b}, x;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")

# e4m3 in the bits of fp16 is 2^-8 of its value. Its nan reads 480; where nan is stored, the scale is nan too, unless it was kept once.
_ASM_E4M3_BEFORE_89 = tl.constexpr("""{
.reg .b32 a, b, c, m;
shl.b32 a, $2, 8;
shl.b32 b, $2, 7;
shr.u32 c, $2, 1;
and.b32 b, b, 0x3f803f80;
and.b32 c, c, 0x3f803f80;
lop3.b32 a, a, 0x80008000, b, 0xea;
lop3.b32 c, $2, 0x80008000, c, 0xea;
mov.b32 m, 0x5c005c00;
mul.rn.f16x2 $0, a, m;
mul.rn.f16x2 $1, c, m;
}""")

# A byte of 1024 + n, less 1024 (+ 128 where the sign was flipped to make it positive).
_BYTES = "{{ .reg .b32 x, c; {flip} {spread} mov.b32 c, {centre}; sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }}"
_ASM_UINT8 = tl.constexpr(_BYTES.format(flip="mov.b32 x, $2;", spread=_spread("$0", "$1", _OF_1024), centre="0x64006400"))
_ASM_INT8 = tl.constexpr(_BYTES.format(flip="xor.b32 x, $2, 0x80808080;", spread=_spread("$0", "$1", _OF_1024), centre="0x64806480"))

_ASM_INT4 = tl.constexpr("""{
.reg .b32 a, b, c, d;
shl.b32 a, $4, 6;
shl.b32 b, $4, 2;
shr.u32 c, $4, 2;
shr.u32 d, $4, 6;
lop3.b32 $0, a, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $1, b, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $2, c, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $3, d, 0x03c003c0, 0x4c004c00, 0xea;
}""")

_ASM_E2M1 = tl.constexpr("""{
.reg .b32 a, b, c, d, e;
shl.b32 a, $4, 3;
shl.b32 b, $4, 6;
shl.b32 c, $4, 1;
shl.b32 d, $4, 9;
shl.b32 e, $4, 2;
and.b32 $0, $4, 0x8e008e00;
and.b32 $1, a, 0x8e008e00;
and.b32 b, b, 0x0e000e00;
and.b32 d, d, 0x0e000e00;
lop3.b32 $2, c, 0x80008000, b, 0xea;
lop3.b32 $3, e, 0x80008000, d, 0xea;
}""")


def _held(word: int, to: str) -> str:
    """A constant for the operand of PRMT that must be a register. No bit 31 is before any lane's, which the assembler does not know: it
    would put a constant there anew, by one instruction for almost each that uses it."""
    return f".reg .b32 {to}; mov.u32 {to}, %lanemask_lt; shr.u32 {to}, {to}, 31; or.b32 {to}, {to}, {word:#x}; "


# The low bits ($8) of even channels and their high bits ($9, to be shifted where $10 says so) to nibbles (e), those of odd ones (o).
_NIBBLES3 = """
shl.b32 h, $9, 2;
lop3.b32 h, h, $10, $9, 0xe2;
shr.u32 o, $8, 2;
lop3.b32 e, h, 0x44444444, $8, 0xe2;
shr.u32 h, h, 1;
lop3.b32 o, h, 0x44444444, o, 0xe2;
"""
_INT3 = """
shl.b32 t, {0}, 7;
lop3.b32 {1}, t, 0x03800380, 0x48004800, 0xea;
shl.b32 t, {0}, 3;
lop3.b32 {2}, t, 0x03800380, 0x48004800, 0xea;
shr.u32 t, {0}, 1;
lop3.b32 {3}, t, 0x03800380, 0x48004800, 0xea;
shr.u32 t, {0}, 5;
lop3.b32 {4}, t, 0x03800380, 0x48004800, 0xea;
"""
_ASM_INT3 = tl.constexpr(
    "{ .reg .b32 h, e, o, t;" + _NIBBLES3 + _INT3.format("e", "$0", "$2", "$4", "$6") + _INT3.format("o", "$1", "$3", "$5", "$7") + "}"
)


def _read(clean: str, low: str, high: int) -> str:
    """Nibbles of two words, which `clean` makes selectors, to the bytes of a table of two words, the first one in a register."""
    return f"""
{clean};
prmt.b32 x, {low}, {high:#x}, {{0}};
{_spread("{1}", "{2}")}
shr.u32 {{0}}, {{0}}, 16;
prmt.b32 x, {low}, {high:#x}, {{0}};
{_spread("{3}", "{4}")}
"""


def _read_both(read: str) -> str:
    return read.format("e", "$0", "$2", "$4", "$6") + read.format("o", "$1", "$3", "$5", "$7")


_ASM_LUT3 = tl.constexpr(
    "{"
    + _held(_LUT3[0], "t")
    + ".reg .b32 h, e, o, x;"
    + _NIBBLES3
    + _read_both(_read("and.b32 {0}, {0}, 0x77777777; prmt.b32 {0}, {0}, 0, 0x3120", "t", _LUT3[1]))
    + "}"
)
_ASM_LUT2 = tl.constexpr(
    "{ .reg .b32 e, o, x; prmt.b32 e, $8, 0, 0x3120; shr.u32 o, e, 2;"
    + _read_both(_read("lop3.b32 {0}, {0}, 0x33333333, 0x44444444, 0xea", "0", _LUT2[0]))
    + "}"
)

# The path ($9), turned by two for the second of the words that share it; then of each nibble, of even channels in e and of odd ones in o,
# the bits of the subset: neighbours but one under an exclusive or, and the one between.
_SUBSETS = """
shr.u32 e, $9, 2;
shl.b32 o, $9, 14;
lop3.b32 e, e, 0x3fff3fff, o, 0xe2;
lop3.b32 h, e, $10, $9, 0xe2;
shr.u32 x, h, 2;
lop3.b32 e, h, x, 0x11111111, 0x78;
lop3.b32 o, h, x, 0x22222222, 0x78;
"""
_INDEX2 = """
shl.b32 h, $8, 2;
lop3.b32 h, h, $10, $8, 0xe2;
and.b32 x, h, 0x44444444;
lop3.b32 e, e, 0x33333333, x, 0xea;
and.b32 x, h, 0x88888888;
lop3.b32 o, o, 0x66666666, x, 0xea;
shr.u32 o, o, 1;
"""
_INDEX3 = """
shl.b32 x, $8, 2;
lop3.b32 e, e, 0x33333333, x, 0xe2;
shr.u32 o, o, 1;
lop3.b32 o, o, 0x33333333, $8, 0xe2;
"""
# The signs ($11), turned likewise, flip both bits of the subset, and go to bit 2 of nibbles: of even channels in v, of odd ones in w.
_INDEX4 = (
    """
shr.u32 y, $11, 2;
lop3.b32 y, y, $10, $11, 0xe2;
shl.b32 w, y, 1;
lop3.b32 v, w, 0x22222222, y, 0xe2;
xor.b32 e, e, v;
lop3.b32 v, w, 0x44444444, y, 0xe2;
xor.b32 o, o, v;
shl.b32 v, y, 2;
and.b32 v, v, 0x44444444;
and.b32 w, w, 0x44444444;
"""
    + _INDEX3
)


def _bytes_of(table: tuple[int, ...], to: str, nibbles: str, signs: str) -> str:
    """The entries of `table` that the low four nibbles select, the seven bits of those with a bit of `signs` flipped; the words 0 and 2 of
    the table are held in t and u.

    PRMT has eight entries, and gives 0 for a selector with bit 3 set where entries are below 128: two reads and an or make sixteen."""
    read = f"prmt.b32 {to}, t, {table[1]:#x}, {nibbles};"
    if len(table) == 2:
        return read
    read += f" xor.b32 n, {nibbles}, 0x8888; prmt.b32 n, u, {table[3]:#x}, n;"
    if not signs:
        return f"{read} or.b32 {to}, {to}, n;"
    return f"{read} prmt.b32 y, 0, 0x7f, {signs}; lop3.b32 {to}, {to}, n, y, 0x56;"


def _paired(nibbles: str, planes: tuple[str, ...], table: tuple[int, ...], signs: str = "") -> str:
    """Of four nibbles of each of two words the entries, as the low bytes of fp16 numbers: the high bytes are signs of entries, all 0."""
    others = "".join(f" shr.u32 {x}, {x}, 16; " for x in (nibbles, signs) if x)
    first = _bytes_of(table, "x", nibbles, signs) + others + _bytes_of(table, "h", nibbles, signs)
    return first + "".join(f" prmt.b32 {to}, x, h, {0xC480 + 0x1111 * i:#x};" for i, to in enumerate(planes))


_ASM_LUT4 = tl.constexpr(
    "{" + _held(_LUT4[0], "t") + _held(_LUT4[2], "u") + ".reg .b32 p, x, h, n; mov.b32 p, $4;"
    + _paired("p", ("$0", "$1", "$2", "$3"), _LUT4) + "}"
)  # fmt: skip


def _trellis(index: str, table: tuple[int, ...], signs: tuple[str, str] = ("", "")) -> str:
    read = _paired("e", ("$0", "$2", "$4", "$6"), table, signs[0]) + _paired("o", ("$1", "$3", "$5", "$7"), table, signs[1])
    held = _held(table[0], "t") + (_held(table[2], "u") if len(table) > 2 else "")
    return "{" + held + ".reg .b32 h, e, o, x, n, v, w, y;" + _SUBSETS + index + read + "}"


_ASM_TRELLIS2, _ASM_TRELLIS3 = tl.constexpr(_trellis(_INDEX2, _TRELLIS2)), tl.constexpr(_trellis(_INDEX3, _TRELLIS3))
_ASM_TRELLIS4 = tl.constexpr(_trellis(_INDEX4, _TRELLIS4, ("v", "w")))


@triton.jit
def _asm2(ASM: tl.constexpr, w):
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def _asm4(ASM: tl.constexpr, w):
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def _asm8(ASM: tl.constexpr, w, h, shift, signs):
    return tl.inline_asm_elementwise(
        ASM,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [w, h, shift, signs],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bits(x):
    return x.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _entry(low: tl.constexpr, high: tl.constexpr, index):
    """Byte `index` (0 to 7) of a table of two words."""
    word = tl.where(index < 4, tl.full(index.shape, low, tl.int64), tl.full(index.shape, high, tl.int64))
    return ((word >> ((index & 3) * 8)) & 255).to(tl.int32)


@triton.jit
def unpack(KIND: tl.constexpr, w, h, shift, signs, ARCH: tl.constexpr):
    """Words `w`, and the words `h` of high bits or of paths, whether (-1) or not (0) to shift those by two, and the words `signs` of signs,
    to be shifted likewise, to a tuple of planes.

    half    the numbers        e4m3, e5m2, int8, uint8   their values       e2m1   2^-14 of the value
    int4    16 + n             int3   8 + n
    lut4, lut3, lut2, trellis2, trellis3, trellis4   2^-24 of the level in steps, moved to be positive
    """
    if KIND == "half":
        return (w,)
    elif ARCH > 0:
        if KIND == "e5m2":
            return _asm2(_ASM_E5M2, w)
        elif KIND == "e4m3":
            if ARCH >= 89:
                return _asm2(_ASM_E4M3, w)
            else:
                return _asm2(_ASM_E4M3_BEFORE_89, w)
        elif KIND == "int8":
            return _asm2(_ASM_INT8, w)
        elif KIND == "uint8":
            return _asm2(_ASM_UINT8, w)
        elif KIND == "int4":
            return _asm4(_ASM_INT4, w)
        elif KIND == "e2m1":
            return _asm4(_ASM_E2M1, w)
        elif KIND == "lut4":
            return _asm4(_ASM_LUT4, w)
        elif KIND == "int3":
            return _asm8(_ASM_INT3, w, h, shift, signs)
        elif KIND == "lut2":
            return _asm8(_ASM_LUT2, w, w, w, w)
        elif KIND == "trellis2":
            return _asm8(_ASM_TRELLIS2, w, h, shift, signs)
        elif KIND == "trellis3":
            return _asm8(_ASM_TRELLIS3, w, h, shift, signs)
        elif KIND == "trellis4":
            return _asm8(_ASM_TRELLIS4, w, h, shift, signs)
        else:
            return _asm8(_ASM_LUT3, w, h, shift, signs)
    else:
        return _plain(KIND, w, h, shift, signs)


@triton.jit
def _plain(KIND: tl.constexpr, w, h, shift, signs):
    """`unpack` without assembly."""
    x = w.to(tl.int32) & 0xFFFF
    p = ()
    if KIND == "e5m2":
        p = (_bits(x << 8 & 0xFF00), _bits(x & 0xFF00))
    elif KIND == "e4m3":
        for i in tl.static_range(2):
            b = x >> (8 * i) & 255
            value = _bits((b & 128) << 8 | (b & 127) << 7) * 256.0
            p = p + (tl.where((b & 127) == 127, float("nan"), value).to(tl.float16),)
    elif KIND == "int8":
        p = (x.to(tl.int8).to(tl.float16), (x >> 8).to(tl.int8).to(tl.float16))
    elif KIND == "uint8":
        p = ((x & 255).to(tl.float16), (x >> 8).to(tl.float16))
    elif KIND == "int4":
        for i in tl.static_range(4):
            p = p + (_bits((x >> (4 * i) & 15) << 6 | 0x4C00),)
    elif KIND == "e2m1":
        p = (
            _bits(x & 0x8E00),
            _bits(x << 3 & 0x8E00),
            _bits((x << 6 & 0x0E00) | (x << 1 & 0x8000)),
            _bits((x << 9 & 0x0E00) | (x << 2 & 0x8000)),
        )
    elif KIND == "lut4":
        for i in tl.static_range(4):
            n = x >> (4 * i) & 15
            p = p + (_bits(tl.where(n < 8, _entry(_LUT4_0, _LUT4_1, n & 7), _entry(_LUT4_2, _LUT4_3, n & 7))),)
    elif KIND == "lut2":
        for i in tl.static_range(8):
            p = p + (_bits(_entry(_LUT2_0, _LUT2_0, x >> (2 * i) & 3)),)
    elif KIND == "trellis2" or KIND == "trellis3" or KIND == "trellis4":
        path = h.to(tl.int32) & 0xFFFF
        path = tl.where(shift != 0, path >> 2 | path << 14, path)
        index = tl.where(shift != 0, x << 2, x)
        signs = tl.where(shift != 0, signs.to(tl.int32) >> 2, signs.to(tl.int32))
        for i in tl.static_range(8):
            at = i // 2 * 4 + i % 2
            n = (path >> at ^ path >> at + 2) & 1 | path >> at & 2
            if KIND == "trellis2":
                p = p + (_bits(_entry(_TRELLIS2_0, _TRELLIS2_1, n | index >> at & 4)),)
            elif KIND == "trellis4":
                negative = signs >> at & 1
                n = n ^ 3 * negative | (x >> (2 * i) & 3) << 2
                entry = tl.where(n < 8, _entry(_TRELLIS4_0, _TRELLIS4_1, n & 7), _entry(_TRELLIS4_2, _TRELLIS4_3, n & 7))
                p = p + (_bits(entry ^ 127 * negative),)
            else:
                n |= (x >> (2 * i) & 3) << 2
                p = p + (_bits(tl.where(n < 8, _entry(_TRELLIS3_0, _TRELLIS3_1, n & 7), _entry(_TRELLIS3_2, _TRELLIS3_3, n & 7))),)
    else:
        high = h.to(tl.int32) & 0xFFFF
        high = tl.where(shift != 0, high << 2, high)
        for i in tl.static_range(8):
            n = (x >> (2 * i) & 3) | (high >> (4 * (i // 2) + i % 2) & 4)
            if KIND == "int3":
                p = p + (_bits(n << 7 | 0x4800),)
            else:
                p = p + (_bits(_entry(_LUT3_0, _LUT3_1, n)),)
    return p
