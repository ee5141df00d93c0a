"""INT4, two channels a byte: the scheme of PR #5, the rule that vLLM merged, and plain groups.

hadamard   PR #5: keys under a Hadamard rotation, values as they are; symmetric groups of 32 channels
           scale = absmax / 7, fp16;  code = int(x / scale + 8.5), 1 to 15;  x = (code - 8) * scale      D / 2 + D / 16 bytes a side
group      the same without rotation (the KV compression article)
vllm       `int4_per_token_head`: keys and values under a randomized Hadamard rotation; asymmetric, one scale a token-head
           scale = (max - min) / 15, fp32, its low four mantissa bits replaced by zero = int(-min / scale + .5)
           code = int(x / scale + zero + .5);  x = (code - zero) * scale                                 D / 2 + 4 bytes

Of the 16 levels of a symmetric group the lowest stays unused, so that x and -x get mirrored codes.

Two steps away from vLLM, whose codes these are otherwise. There the rotation is sqrt(D) larger and so is the
scale: codes are the same. And there the range is of the vector alone: if it leaves out zero, the zero point
clips and with it every channel. That happens when the first channel outweighs the rest, since a rotation
turns it into a constant. Here the range always holds zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .base import TINY, Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues, check_option
from .centered import Centered
from .packing import code_buffers, from_planes, lookup, pack, to_planes
from .rotation import Hadamard, number_of

GROUP_SIZE = 32


@dataclass(frozen=True)
class GroupInt4(Codec):
    """Symmetric, an fp16 scale for each `group_size` channels."""

    group_size: int = GROUP_SIZE
    rotation: Hadamard | None = None

    @property
    def packed_layout(self) -> PackedLayout:
        writable = self.group_size.bit_count() == 1
        return PackedLayout("int4", "group", self.group_size, rotation=number_of(self.rotation), writable=writable)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(4, head_dim), Buffer("scale", torch.float16, head_dim // self.group_size, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        groups = self.rotate(x).float().unflatten(-1, (-1, self.group_size))
        scale = (groups.abs().amax(-1, keepdim=True) / 7).half()  # codes are chosen for the scale that is really stored
        codes = (groups / scale.float().clamp_min(TINY) + 8.5).clamp(1, 15).to(torch.uint8)
        return pack(to_planes(codes.flatten(-2)), 4) | {"scale": scale.squeeze(-1)}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(from_planes(lookup(codes, 4, tuple(range(-8, 8)))), codes["scale"].float())

    def refuses(self, head_dim: int) -> str | None:
        reason = super().refuses(head_dim)
        if reason is None and head_dim % self.group_size:
            fix = f"group_size={math.gcd(head_dim, self.group_size)} does, or rule='vllm', which needs no groups"
            return f"group_size={self.group_size} does not divide it; {fix}"
        return reason


@dataclass(frozen=True)
class HiddenZeroInt4(Codec):
    """Asymmetric, one fp32 scale a token-head with the zero point in its low bits."""

    rotation: Hadamard | None = Hadamard(randomized=True)

    @property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout("int4", "hidden", rotation=number_of(self.rotation))

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return (*code_buffers(4, head_dim), Buffer("scale", torch.float32, 1, "scales"))

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        x = self.rotate(x).float()
        low, high = x.aminmax(dim=-1, keepdim=True)
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = (high - low) / 15
        zero = (-low / scale.clamp_min(TINY) + 0.5).clamp(0, 15).int()
        hidden = (scale.view(torch.int32) & ~15 | zero).view(torch.float32)
        scale, zero = self._reveal(hidden)
        codes = (x / scale.clamp_min(TINY) + zero + 0.5).clamp(0, 15).to(torch.uint8)
        return pack(codes, 4) | {"scale": hidden}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        scale, zero = self._reveal(codes["scale"])
        return QuantizedValues(lookup(codes, 4, tuple(range(16))), scale, -zero * scale)

    @staticmethod
    def _reveal(hidden: Tensor) -> tuple[Tensor, Tensor]:
        bits = hidden.view(torch.int32)
        return (bits & ~15).view(torch.float32), (bits & 15).float()


@dataclass(frozen=True)
class Int4(Format):
    """INT4 by the rule of PR #5 ("hadamard"), of vLLM's int4_per_token_head ("vllm"), or in plain groups
    ("group"). Keys are quantized around their mean unless `center=False`, the authors' form."""

    rule: Literal["hadamard", "vllm", "group"] = "hadamard"
    group_size: int = GROUP_SIZE
    center: bool = True

    def __post_init__(self) -> None:
        check_option("rule", self.rule, ("hadamard", "vllm", "group"))
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(f"group_size={self.group_size!r}: must be a number of channels that divides head_dim, such as 32")
        if self.rule == "vllm" and self.group_size != GROUP_SIZE:
            raise ValueError(f"group_size={self.group_size} with rule='vllm': its scale spans the whole vector; use rule='hadamard'")

    @property
    def name(self) -> str:
        rule = "" if self.rule == "hadamard" else f"_{self.rule}"
        return f"int4{rule}" + ("" if self.group_size == GROUP_SIZE else f"_g{self.group_size}") + ("" if self.center else "_uncentered")

    def codecs(self) -> tuple[Codec, Codec]:
        key: Codec = GroupInt4(self.group_size, Hadamard() if self.rule == "hadamard" else None)
        value: Codec = GroupInt4(self.group_size)
        if self.rule == "vllm":
            key = value = HiddenZeroInt4()
        return Centered.of(key) if self.center else key, value
