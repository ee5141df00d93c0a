"""How the attention kernel reads scales: one a token, or one for each group of channels."""

from __future__ import annotations

import triton
import triton.language as tl

from .unpack import offset_of


@triton.jit
def _half(word):
    """The fp16 in the low half of `word`, int32 of any shape, as fp32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def token_scale(X: tl.constexpr, ONCE: tl.constexpr, scales, slot):
    """Scale and zero of the tokens `slot`, int [T], as fp32 [T] each, from the plane `scales` of their head.
    With ONCE, one entry serves all tokens. The zero of the scale kind `hidden` counts steps of the code; the
    zero of `pair` is a value."""
    if X.scale == "fp32":
        scale = tl.load(scales + slot * (1 - ONCE))
        zero = (slot * 0).to(tl.float32)  # not of the scale, which is loaded: it would be waited for here
    elif X.scale == "fp16":  # two tokens to a word, since cp.async copies no less
        word = tl.load(scales.to(tl.pointer_type(tl.int32)) + slot // 2)
        scale = _half(word >> ((slot & 1) * 16))
        zero = (slot * 0).to(tl.float32)
    else:
        scale, zero = scale_of_word(X, tl.load(scales.to(tl.pointer_type(tl.int32)) + slot))
    return scale, zero


@triton.jit
def scale_of_word(X: tl.constexpr, word):
    """Scale and zero in `word`, int32 of any shape, where they have a word of their own: fp32."""
    if X.scale == "pair":
        return _half(word), _half(word >> 16)
    elif X.scale == "hidden":
        return (word & -16).to(tl.float32, bitcast=True), (word & 15).to(tl.float32)
    else:
        return word.to(tl.float32, bitcast=True), word.to(tl.float32) * 0


# Four scales in E4M3 to fp16, times 2^6. Four numbers of 16 bits come out of one register.
_ASM_SCALES = tl.constexpr("""{
.reg .b16 a, b;
.reg .b32 x, y, m;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 m, 0x54005400;
mul.rn.f16x2 x, x, m;
mul.rn.f16x2 y, y, m;
mov.b32 {$0, $1}, x;
mov.b32 {$2, $3}, y;
}""")


@triton.jit
def _e4m3(byte):
    """A scale in E4M3, the low byte of `byte` (int32 of any shape), as fp16, times 2^6."""
    number = (byte << 7).to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    return tl.where(byte == 127, float("nan"), number).to(tl.float16)


@triton.jit
def group_scales_of_word(X: tl.constexpr, word, ARCH: tl.constexpr):
    """The scales of four groups, or of two in fp16, in `word`, int32 of any shape, as a tuple of fp16."""
    if X.scale == "block":
        if ARCH >= 89:
            return tl.inline_asm_elementwise(
                _ASM_SCALES, "=h,=h,=h,=h,r", [word], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1
            )
        else:
            return _e4m3(word & 127), _e4m3(word >> 8 & 127), _e4m3(word >> 16 & 127), _e4m3(word >> 24 & 127)
    else:
        return word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def group_scales(X: tl.constexpr, WORDS: tl.constexpr, scales, slot, ARCH: tl.constexpr):
    """All scales of the tokens `slot`, int [T], as a tuple of fp16 [T], one for each group, from the plane `scales` [slots, groups] of
    their head; an empty tuple where 16 words of a plane do not lie in one group."""
    GROUPS: tl.constexpr = WORDS * X.per // X.group
    by_group = ()
    if WORDS % 16 == 0:
        PER_WORD: tl.constexpr = 4 if X.scale == "block" else 2
        if GROUPS % PER_WORD == 0:
            for i in tl.static_range(GROUPS // PER_WORD):
                word = tl.load(scales.to(tl.pointer_type(tl.int32)) + slot * (GROUPS // PER_WORD) + i)
                by_group = by_group + group_scales_of_word(X, word, ARCH)
        else:
            for i in tl.static_range(GROUPS):
                by_group = by_group + (tl.load(scales + slot * GROUPS + i),)
    return by_group


@triton.jit
def scale_of_plane(
    X: tl.constexpr, WORDS: tl.constexpr, by_group, scales, slot, first: tl.constexpr, i: tl.constexpr, TOKENS_AXIS: tl.constexpr
):
    """Scales of the channels that plane `i` holds of 16 words from word `first` on: channel `i * WORDS +
    word` (`triton_attend._channel`). Words beyond WORDS, whose codes are loaded as 0, get the scale of the
    last group. fp16, [T, 1] or [T, 16] with TOKENS_AXIS 0, [1, T] or [16, T] with 1. `by_group` comes from
    `group_scales`; `scales` and `slot` as there."""
    GROUP: tl.constexpr = X.group
    GROUPS: tl.constexpr = WORDS * X.per // GROUP
    if WORDS % 16 == 0:
        return tl.expand_dims(by_group[(i * WORDS + first) // GROUP], 1 - TOKENS_AXIS)
    else:
        group = tl.minimum((i * WORDS + first + tl.arange(0, 16)) // GROUP, GROUPS - 1)
        scale = tl.load(scales + tl.expand_dims(slot, 1 - TOKENS_AXIS) * GROUPS + tl.expand_dims(group, TOKENS_AXIS))
        if X.scale == "block":
            scale = _e4m3(scale.to(tl.int32))
        return scale


@triton.jit
def scaled(X: tl.constexpr, numbers, scale):
    """`(numbers - offset) * scale` in fp16, with the scale of each group. Two roundings: of `scale * offset`,
    to 2^-12 of itself, and of the result."""
    if offset_of(X) != 0:
        return tl.fma(numbers, tl.broadcast_to(scale, numbers.shape), tl.broadcast_to(scale * -offset_of(X), numbers.shape))
    else:
        return (numbers * scale).to(tl.float16)
