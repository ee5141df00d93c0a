"""How kernels read codes: tiles of 16-bit words to tiles of fp16 numbers, one for each channel of a word (a plane), without conversions.

A code becomes a number by putting its bits where fp16 keeps them: an integer n of four bits on top of the mantissa of 16 reads 16 + n.
Nothing is converted, and whoever uses the numbers takes `offset_of` away and multiplies by `unit_of` where that is cheap: on the scores, or
once on the output. Levels that no shift yields come from a table of bytes, of which PRMT reads four entries at a time.

The `PackedLayout` of a codec is a constant of a kernel; a new kind of codes is a branch of `unpack`, with its
unit and its offset. On NVIDIA GPUs (`ARCH` > 0) the bit operations act on two words at once, as they lie in a
register of a matrix operand; elsewhere, in the interpreter among others, plain Triton does the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.base import PackedLayout
from ...formats.codebooks import GRID, grid_levels

_TINY = 2.0**-24
"""The fp16 number whose lowest bit alone is 1: bytes of tables are read as subnormal numbers, which adds no offset."""

_HALF = {3: 128, 4: 64}
"""Steps by which levels are moved to be positive."""


def _table(bits: int, levels: tuple[float, ...]) -> tuple[int, ...]:
    """`levels` in steps of the grid of `bits`, moved to be positive: bytes, four to a word, the first one lowest."""
    entries = bytes(round(level / GRID[bits][0] - 0.5) + _HALF[bits] for level in levels)
    return tuple(int.from_bytes(entries[at : at + 4], "little") for at in range(0, len(entries), 4))


_GRIDS = {"lut3": 3, "lut4": 4}
"""The grid that Lloyd-Max levels lie on, by kind, as its bits."""


@triton.constexpr_function
def unit_of(layout: PackedLayout) -> float:
    """The step between numbers, in units of the scale: `value = (number - offset_of) * unit_of`."""
    if layout.kind == "e2m1":
        return 2.0**8  # times 2^6, which scales are kept small by
    if layout.kind == "int4" and layout.scale in ("fp16", "fp32"):
        return 16.0  # the upper half of a code of eight bits
    if layout.kind == "int2":
        return GRID[2][0]
    return GRID[_GRIDS[layout.kind]][0] / _TINY if layout.kind in _GRIDS else 1.0


@triton.constexpr_function
def offset_of(layout: PackedLayout) -> float:
    """The number that stands for zero, in units of `plane_offset`; for scales with a zero of their own, the one that stands for code 0."""
    if layout.kind == "int4":
        return 16.0 + {"group": 8, "fp16": 7.53125, "fp32": 7.53125}.get(layout.scale, 0)
    if layout.kind in ("int3", "int2"):
        return 8.0 if layout.kind == "int3" else 1.0
    return (_HALF[_GRIDS[layout.kind]] - 0.5) * _TINY if layout.kind in _GRIDS else 0.0


@triton.constexpr_function
def plane_offset(layout: PackedLayout, plane: int) -> float:
    """The number in a plane that stands for `offset_of`: 1.0 where all planes have the same."""
    if layout.kind != "int2":
        return 1.0
    return 2.0 ** (10 - _PLACES2.value[plane]) + 1.5


_LUT3, _LUT4 = (_table(bits, grid_levels(bits)) for bits in (3, 4))
_LUT4_EXCHANGED = _table(4, tuple(grid_levels(4)[(code & 3) << 2 | code >> 2] for code in range(16)))
"""The table for codes with halves exchanged."""
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

_ASM = {}
"""Functions that unpack two words, by kind; the words come after the planes. Two more operands are high bits and whether to shift them."""

_ASM["e5m2"] = "shl.b32 $0, $2, 8; and.b32 $0, $0, 0xff00ff00; and.b32 $1, $2, 0xff00ff00;"

_ASM["e4m3"] = """{
.reg .b16 a, b;
.reg .b32 x;
prmt.b32 x, $2, 0, 0x3120;
mov.b32 {a, b}, x;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}"""

# e4m3 in the bits of fp16 is 2^-8 of its value. Its nan reads 480; where nan is stored, the scale is nan too, unless it was kept once.
_ASM["e4m3 before 89"] = """{
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
}"""

# A byte of 1024 + n, less 1024 (+ 128 where the sign was flipped to make it positive).
_BYTES = "{{ .reg .b32 x, c; {flip} {spread} mov.b32 c, {centre}; sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }}"
_ASM["uint8"] = _BYTES.format(flip="mov.b32 x, $2;", spread=_spread("$0", "$1", _OF_1024), centre="0x64006400")
_ASM["int8"] = _BYTES.format(flip="xor.b32 x, $2, 0x80808080;", spread=_spread("$0", "$1", _OF_1024), centre="0x64806480")

# Upper halves of codes ($5) and lower ones ($4) to bytes: of even channels, then of odd ones.
_ASM["int8_halves"] = (
    "{ .reg .b32 x, c; mov.b32 c, 0x64806480;"
    + "".join(
        f" {shift} lop3.b32 x, {high}, 0xf0f0f0f0, {low}, 0xe2; {_spread(*planes, _OF_1024)}"
        + "".join(f" sub.rn.f16x2 {plane}, {plane}, c;" for plane in planes)
        for shift, high, low, planes in (("shl.b32 x, $5, 4;", "x", "$4", ("$0", "$2")), ("shr.u32 x, $4, 4;", "$5", "x", ("$1", "$3")))
    )
    + " }"
)

_ASM["int4"] = """{
.reg .b32 a, b, c, d;
shl.b32 a, $4, 6;
shl.b32 b, $4, 2;
shr.u32 c, $4, 2;
shr.u32 d, $4, 6;
lop3.b32 $0, a, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $1, b, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $2, c, 0x03c003c0, 0x4c004c00, 0xea;
lop3.b32 $3, d, 0x03c003c0, 0x4c004c00, 0xea;
}"""

_ASM["e2m1"] = """{
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
}"""


def _in_register(word: int, to: str) -> str:
    """A constant for the operand of PRMT that must be a register. No bit 31 is before any lane's, which the assembler does not know: it
    would put a constant there anew, by one instruction for almost each that uses it."""
    return f".reg .b32 {to}; mov.u32 {to}, %lanemask_lt; shr.u32 {to}, {to}, 31; or.b32 {to}, {to}, {word:#x}; "


# The low bits ($8) of even channels and their high bits ($9, to be shifted where $10 says so) to nibbles (e); of odd channels to (o).
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
_ASM["int3"] = (
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


_ASM["lut3"] = (
    "{"
    + _in_register(_LUT3[0], "t")
    + ".reg .b32 h, e, o, x;"
    + _NIBBLES3
    + _read_both(_read("and.b32 {0}, {0}, 0x77777777; prmt.b32 {0}, {0}, 0, 0x3120", "t", _LUT3[1]))
    + "}"
)
_PLACES2 = tl.constexpr((6, 8, 4, 6, 8, 4, 6, 8))
"""The bit of the mantissa at which the two bits of each channel are read, those of the first two and of the
last three after a shift by six. A number `n` from bit `p` on reads 2^(10 - p) + n, under the exponent 25 - p:
up to 67, since sums lose bits to larger ones."""


def _read2(words: str, places: tuple[int, ...]) -> str:
    """Planes whose codes are at `places` of `words`, each a letter."""
    return "".join(
        f" lop3.b32 ${i}, {x}, {0x30003 << p:#x}, {(25 - p << 10) * 0x10001:#x}, 0xea;"
        for i, (x, p) in enumerate(zip(words, places, strict=True))
    )


_ASM["int2"] = "{ .reg .b32 x, l, r; mov.b32 x, $8; shl.b32 l, x, 6; shr.u32 r, x, 6;" + _read2("llxxxrrr", _PLACES2.value) + " }"


def _bytes_of(table: tuple[int, ...], to: str, nibbles: str) -> str:
    """The entries of a table of four words that the low four nibbles select; its words 0 and 2 are in registers (`_paired`).

    PRMT has eight entries, and gives 0 for a selector with bit 3 set where entries are below 128: two reads make sixteen.
    They are added, since additions, unlike an or, may run beside the shifts and reads, where FMA does."""
    read = f"prmt.b32 {to}, {nibbles}0, {table[1]:#x}, {nibbles}; xor.b32 n, {nibbles}, 0x8888;"
    return f"{read} prmt.b32 n, {nibbles}2, {table[3]:#x}, n; add.u32 {to}, {to}, n;"


def _paired(nibbles: str, planes: tuple[str, ...], table: tuple[int, ...]) -> str:
    """Look up the entries of four nibbles of each of two words, as the low bytes of fp16 numbers. The high
    bytes, signs of entries, are 0."""
    held = _in_register(table[0], f"{nibbles}0") + _in_register(table[2], f"{nibbles}2")
    read = f"{held} {_bytes_of(table, 'x', nibbles)} shr.u32 {nibbles}, {nibbles}, 16; {_bytes_of(table, 'h', nibbles)}"
    return read + "".join(f" prmt.b32 {to}, x, h, {0xC480 + 0x1111 * i:#x};" for i, to in enumerate(planes))


# Upper halves of codes ($9) and lower ones ($8), those of two channels swapped, to nibbles of odd channels (o) and of even ones (e).
_ASM["lut4"] = (
    "{ .reg .b32 e, o, x, h, n; lop3.b32 o, $9, 0xcccccccc, $8, 0xe2; lop3.b32 e, $9, 0x33333333, $8, 0xe2;"
    + _paired("e", ("$0", "$2", "$4", "$6"), _LUT4_EXCHANGED) + _paired("o", ("$1", "$3", "$5", "$7"), _LUT4) + "}"
)  # fmt: skip

HALF_PLANES = {
    "lut4": "{ .reg .b32 s, l, e, x, h, n; and.b32 s, $6, 31; shr.u32 l, $4, s; shl.b32 h, $5, s;"
    " lop3.b32 e, h, 0xcccccccc, l, 0xe2;" + _paired("e", ("$0", "$1", "$2", "$3"), _LUT4) + "}",
    "int2": "{ .reg .b32 s, x, l, r; and.b32 s, $6, 31; shr.u32 x, $4, s; shl.b32 l, x, 6; shr.u32 r, x, 6;"
    + _read2("lxxr", _PLACES2.value[::2]) + "}",
    "int2 odd": "{ .reg .b32 x, l, r; mov.b32 x, $4; shl.b32 l, x, 6; shr.u32 r, x, 6;" + _read2("lxrr", _PLACES2.value[1::2]) + "}",
}  # fmt: skip
"""Functions that unpack four of the eight planes of two words, by kind: of even channels, or of odd ones. The words ($4), their high bits
($5) and a shift ($6) come after the planes: 2 for even channels of lut4 and odd ones of int2, 0 for the others. The odd planes of int2 have
the places of even ones, but those of `int2 odd`, which has no shift."""

_ASSEMBLY = tl.constexpr(_ASM)


@triton.constexpr_function
def _text_of(assembly: dict[str, str], kind: str, arch: int) -> str:
    return assembly["e4m3 before 89" if kind == "e4m3" and arch < 89 else kind]


@triton.constexpr_function
def _planes_of(kind: str) -> int:
    return PackedLayout(kind).per


@triton.jit
def _bits(x):
    """int32 of any shape, below 2^16, as the fp16 of these bits."""
    return x.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _entry(low: tl.constexpr, high: tl.constexpr, index):
    """Byte `index` (int32 of any shape, 0 to 7) of a table of two words: int32."""
    word = tl.where(index < 4, tl.full(index.shape, low, tl.int64), tl.full(index.shape, high, tl.int64))
    return ((word >> ((index & 3) * 8)) & 255).to(tl.int32)


@triton.jit
def unpack(KIND: tl.constexpr, w, h, shift, ARCH: tl.constexpr):
    """Unpacks words `w` and words `h` of high bits, int16 of one shape, into a tuple of planes of that shape, one for each channel of a
    word: fp16, or the dtype of `w` for `half`. `shift`: -1 shifts `h` by two bits, 0 does not.

    half    the numbers        e4m3, e5m2, int8, int8_halves, uint8   their values       e2m1   2^-14 of the value
    int4    16 + n     int3   8 + n
    int2    2^(10 - p) + n, `_PLACES2`
    lut4, lut3   2^-24 of the level in steps, moved to be positive
    """
    if KIND == "half":
        return (w,)
    elif ARCH > 0:
        ASM: tl.constexpr = _text_of(_ASSEMBLY, KIND, ARCH)
        PER: tl.constexpr = _planes_of(KIND)
        return tl.inline_asm_elementwise(ASM, "=&r," * PER + "r,r,r", [w, h, shift], dtype=(tl.float16,) * PER, is_pure=True, pack=2)
    else:
        return _plain(KIND, w, h, shift)


@triton.jit
def _plain(KIND: tl.constexpr, w, h, shift):
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
    elif KIND == "int8_halves":
        high = h.to(tl.int32) & 0xFFFF
        for i in tl.static_range(4):
            p = p + (((x >> (4 * i) & 15 | (high >> (4 * i) & 15) << 4) - 128).to(tl.float16),)
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
        high = h.to(tl.int32) & 0xFFFF
        for i in tl.static_range(8):
            n = (x >> (2 * (i ^ 1)) & 3) | (high >> (2 * i) & 3) << 2
            p = p + (_bits(tl.where(n < 8, _entry(_LUT4_0, _LUT4_1, n & 7), _entry(_LUT4_2, _LUT4_3, n & 7))),)
    elif KIND == "int2":
        for i in tl.static_range(8):
            p = p + (((x >> (2 * i) & 3) + (1 << (10 - _PLACES2[i]))).to(tl.float16),)
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
