"""NVFP4: E2M1 codes with an E4M3 scale for 16 channels, the numbers of Blackwell's tensor cores in software (vLLM #44389).

code   bit 3 the sign, bits 0 to 2 one of 0, .5, 1, 1.5, 2, 3, 4, 6; four in a word, order below                    D / 2 bytes a side
scale  E4M3 of absmax / 6 of 16 consecutive channels, from 2^-9 (less would be zero) to 448                         D / 16 bytes
       x / scale is rounded to nearest, and to the even code where two are as near

Two of NVIDIA's conventions are left out: a global fp32 scale, which only matters below 0.003 and beyond 2,688
(there blocks turn to zero or saturate), and the swizzled layout of the values' scales, which serves the
tensor cores of one GPU. A block that holds inf or nan gets the scale nan.

Word j (16 bits, little-endian) holds channels j, j + D/4, j + D/2 and j + 3D/4: their magnitudes at bits 9,
6, 3 and 0, their signs at bits 15, 12, 14 and 13. A magnitude at bit 9 and a sign at bit 15 are 2^-14 of the
number in fp16: a shift and a mask, no table.

How the scale is chosen changes neither bytes nor readers. Mean squared error on N(0, 1):
amax            .0091   absmax lands on 6
four_over_six   .0076   on 6 or on 4, whichever errs less (vLLM #45187): between 4 and 6 the grid has no level
mse             .0067   the E4M3 scale that errs least, of the eight below absmax / 4
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues, check_option
from .centered import Centered
from .fp8 import VALUES as FLOAT8
from .packing import as_rows, code_buffers, constants, from_planes, gather, rank, to_planes
from .rotation import exact_dtype

BLOCK = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAGNITUDE_BITS, SIGN_BITS = (9, 6, 3, 0), (15, 12, 14, 13)
LEAST_SCALE, GREATEST_SCALE, NAN_SCALE = 1, 126, 127  # bytes of E4M3: 2^-9, 448, nan


@dataclass(frozen=True)
class BlockFP4(Codec):
    """E2M1 codes under E4M3 scales of 16 channels; `search`: how a scale is chosen."""

    search: Literal["amax", "four_over_six", "mse"] = "amax"

    @property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout("e2m1", "block", BLOCK, search=("amax", "four_over_six", "mse").index(self.search))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(4, head_dim), Buffer("scale", torch.uint8, head_dim // BLOCK, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        magnitudes = blocks.abs()
        absmax = magnitudes.amax(-1, keepdim=True)
        scale = self._choose_scale(magnitudes, absmax).masked_fill(~absmax.isfinite(), NAN_SCALE)
        codes = rank(_rounded(magnitudes / _e4m3(scale)), MAGNITUDES[1:]) | blocks.signbit().to(torch.uint8) << 3
        return {"codes": _pack(to_planes(codes.flatten(-2))), "scale": scale.squeeze(-1)}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        packed = codes["codes"]
        return QuantizedValues(from_planes(gather(packed.view(torch.uint16), _words(packed.device))), _e4m3(codes["scale"]))

    def refuses(self, head_dim: int) -> str | None:
        return None if head_dim % BLOCK == 0 else f"scales span {BLOCK} channels, and it is no multiple of that; use 'int4_vllm' or 'int8'"

    def _choose_scale(self, magnitudes: Tensor, absmax: Tensor) -> Tensor:
        """Bytes of E4M3, one for each block."""
        on_six, on_four = ((absmax / top).clamp(2**-9, 448).to(torch.float8_e4m3fn).view(torch.uint8) for top in (6, 4))
        if self.search == "amax":
            return on_six
        if self.search == "four_over_six":
            return _least_error(magnitudes, [on_six, on_four])
        # Bytes of E4M3 are in the order of what they stand for, and eight of them make a factor of two: `on_six` is among these.
        nearby = (on_four.int() - below for below in range(8))
        return _least_error(magnitudes, [scale.clamp(LEAST_SCALE, GREATEST_SCALE).to(torch.uint8) for scale in nearby])


def _pack(codes: Tensor) -> Tensor:
    """Codes in the order of `to_planes`, four to a word: uint8 `[..., D]` to bytes `[..., D / 2]`."""
    codes = codes.to(torch.int32).unflatten(-1, (-1, 4))
    words = sum((code & 7) << low | code >> 3 << sign for code, low, sign in zip(codes.unbind(-1), MAGNITUDE_BITS, SIGN_BITS, strict=True))
    return (words & 0xFFFF).to(torch.uint16).view(torch.uint8)  # type: ignore[union-attr]


@functools.lru_cache(maxsize=8)
def _words(device: torch.device) -> Tensor:
    """The four numbers that each word stands for."""
    words = torch.arange(2**16, device=device)
    magnitudes = constants(MAGNITUDES, device)
    places = zip(MAGNITUDE_BITS, SIGN_BITS, strict=True)
    return as_rows(torch.stack([magnitudes[words >> low & 7] * (1 - 2 * (words >> sign & 1)) for low, sign in places], dim=-1))


def _e4m3(scale: Tensor) -> Tensor:
    return constants(FLOAT8["e4m3"], scale.device).index_select(0, scale.flatten().int()).view(scale.shape)


def _rounded(x: Tensor) -> Tensor:
    """Magnitudes, already divided by their scale, to the nearest of MAGNITUDES.

    E2M1 has steps of half the power of two below x, and of .5 under 1. Added to 2^22 times that power, x loses all bits below the step, and
    the processor rounds to nearest even; what is taken away again is exact.
    """
    x = x.clamp(max=MAGNITUDES[-1])
    power = (x.view(torch.int32) & 0x7F800000).clamp_(min=0x3F800000)
    anchor = (power + (22 << 23)).view(torch.float32)
    return x.add_(anchor).sub_(anchor)


def _least_error(magnitudes: Tensor, candidates: list[Tensor]) -> Tensor:
    """Return the candidate scale with the least squared error for each block of `magnitudes` `[..., 16]`, as bytes of E4M3 `[..., 1]`."""

    def error_of(candidate: Tensor) -> Tensor:
        scale = _e4m3(candidate)
        error = _rounded(magnitudes / scale).mul_(scale).sub_(magnitudes).square_()
        return error.sum(-1, keepdim=True, dtype=exact_dtype(scale.device))

    best, *others = candidates
    least = error_of(best)
    for candidate in others:
        error = error_of(candidate)
        best, least = torch.where(error < least, candidate, best), torch.minimum(error, least)
    return best


@dataclass(frozen=True)
class NVFP4(Format):
    """NVFP4, with the search for a block's scale that `scale_search` names: more work when storing, the same
    when reading. Keys are quantized around their mean unless `center=False`. The authors' form, without a
    search, has the plain name `nvfp4`."""

    scale_search: Literal["amax", "four_over_six", "mse"] = "mse"
    center: bool = True

    def __post_init__(self) -> None:
        check_option("scale_search", self.scale_search, ("amax", "four_over_six", "mse"))

    @property
    def name(self) -> str:
        return "nvfp4" + ("" if self.scale_search == "amax" else f"_{self.scale_search}") + ("" if self.center else "_uncentered")

    def codecs(self) -> tuple[Codec, Codec]:
        codec = BlockFP4(self.scale_search)
        return Centered.of(codec) if self.center else codec, codec
