"""The rule that decides when a plan of cuDNN pays off.

cuDNN attends about twice as fast as flash attention, and with dequantizing before it 1.2 to 1.7 times as fast as the kernel that reads the
codes for many rows. But it prepares a plan for each shape and layout of its tensors when it first meets them, which takes 45 to 800 ms on
an H200: longer than a turn. A chat meets most shapes once, chunked prefill and evaluation meet a few often, and the number of calls is not
known in advance. So the other kernels serve a shape until they have cost as much more than cuDNN as a plan costs (the ski rental rule):
together they cost at most twice as much as the better choice for the actual number of calls.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

PLAN_FLOPS = 0.2 / (1 / 390e12 - 1 / 565e12)
"""The floating-point operations of attention after which the time lost by the kernel for many rows, against
dequantizing and cuDNN, equals the time of a plan: .2 s a plan (`eval/bench_turns.py`: the first of several turns, with
five or six plans, less the others, on an H200), and the speeds of both at 8 x 512 new tokens on an H100, in FLOP/s
(`eval/results/past.jsonl`, "attention by kernel")."""
SHAPES = 4096
"""The number of latest shapes that are remembered."""


class Plans(threading.local):
    """The work that other kernels have done for each shape. Each thread has its own, as it has its own cuDNN plans."""

    def __init__(self) -> None:
        self._flops: OrderedDict[Hashable, float] = OrderedDict()

    def pay(self, shape: Hashable) -> bool:
        """Whether cuDNN should attend to tensors of this shape: it has a plan for it, or making one pays off."""
        if self._flops.get(shape, 0.0) < PLAN_FLOPS:
            return False
        self._flops.move_to_end(shape)
        return True

    def count(self, shape: Hashable, flops: float) -> None:
        """Counts `flops` that another kernel computes in place of cuDNN."""
        self._flops[shape] = self._flops.pop(shape, 0.0) + flops
        if len(self._flops) > SHAPES:
            self._flops.popitem(last=False)


PLANS = Plans()
