"""Finds loops, and writes to registers that a product still reads, in a listing of `nvdisasm`, for `compile_kernels.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (\w+)")
"""A wait for all groups of products but so many."""
_FROM_REGISTERS = re.compile(r"HGMMA\S+ R\d+, R(\d+), gdesc")
"""A product whose left operand is in registers: four of each thread."""


def loops(code: str) -> Iterator[list[str]]:
    """Instructions, without predicates, from a label to a branch back to it, where no other loop lies between."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    last = -1
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+.*?)\s*;", line):
            instructions.append(found[1])
            if (to := re.match(r"BRA.*\((\.L_\w+)\)", found[1])) and to[1] in labels:
                if labels[to[1]] > last:
                    yield instructions[labels[to[1]] :]
                last = max(last, labels[to[1]])


def overwritten(innermost: Iterable[list[str]]) -> list[str] | None:
    """Instructions of loops that write to registers which a product still reads. Only loops count in which a product reads registers and a
    product runs on after a wait. None: there is no such loop. Code after a loop is not looked at."""
    counted = [loop for loop in innermost if any(map(_FROM_REGISTERS.match, loop)) and any(map(_runs_on, loop))]
    return [instruction for loop in counted for instruction in dict.fromkeys(_overwritten(loop))] if counted else None


def _runs_on(instruction: str) -> bool:
    wait = _WAIT.match(instruction)
    return wait is not None and int(wait[1], 16) > 0


def _overwritten(loop: list[str]) -> Iterator[str]:
    groups: list[set[int]] = [set()]  # registers that products read; the last group has not ended
    for instruction in loop * 2:  # a product of one pass may run on in the next
        if set().union(*groups).intersection(_written(instruction)):
            yield instruction
        if wait := _WAIT.match(instruction):
            groups = groups[max(len(groups) - 1 - int(wait[1], 16), 0) :]
        elif instruction.startswith("HGMMA"):
            if product := _FROM_REGISTERS.match(instruction):
                groups[-1].update(range(int(product[1]), int(product[1]) + 4))
            if instruction.endswith("gsb0"):
                groups.append(set())


def _written(instruction: str) -> range:
    """The registers to which an instruction writes."""
    to = re.match(r"(\S+) (?:P[\dT], )?R(\d+)", instruction)
    if not to or to[1].startswith(("BAR.", "WARPSYNC", "NANOSLEEP", "BRX", "RET")):  # they read their first register
        return range(0)
    if product := re.match(r"HGMMA\.64x(\d+)", to[1]):
        count = int(product[1]) // 2
    else:
        count = 4 if re.search(r"\.128|88\.4|^[HI]MMA\.", to[1]) else 2 if re.search(r"\.64|88\.2|WIDE|CS2R$", to[1]) else 1
    return range(int(to[2]), int(to[2]) + count)
