"""Runs the few instructions of PTX that `triton_unpack.py` assembles, on numbers: what a machine without a GPU can check of them."""

from __future__ import annotations

import re

import torch
from torch import Tensor

BITS = 2**32 - 1


def _prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both, out = a | b << 32, torch.zeros_like(a | b | selector)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        out = out | torch.where(nibble > 7, (byte >> 7) * 255, byte) << 8 * i
    return out


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    out = torch.zeros_like(a | b | c)
    for n in range(8):
        if int(table) >> n & 1:
            out = out | (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return out & BITS


def _sub_halves(a: Tensor, b: Tensor) -> Tensor:
    first, second = (x.expand_as(a | b).contiguous()[..., None].view(torch.float16) for x in (a, b))  # of four halves, the upper are 0
    return (first - second)[..., :4].contiguous().view(torch.int64)[..., 0]


OPERATIONS = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n & BITS,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b & BITS,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.rn.f16x2": _sub_halves,
}


def run(code: str, outputs: int, inputs: list[Tensor]) -> list[Tensor]:
    """`inputs` int64, each a register: the operands after those of the `outputs`, which come back. Fails on what it does not know."""
    values = {f"${outputs + i}": x for i, x in enumerate(inputs)} | {"%lanemask_lt": torch.tensor(BITS >> 1)}  # of the last lane
    for line in re.sub(r"[{}]|\.reg[^;]*;", "", code).split(";"):
        if line := line.strip():
            name, operands = line.split(None, 1)
            to, *sources = (x.strip() for x in operands.split(","))
            values[to] = OPERATIONS[name](*(values[x] if x in values else torch.tensor(int(x, 0)) for x in sources))
    return [values[f"${i}"].expand_as(inputs[0]) for i in range(outputs)]
