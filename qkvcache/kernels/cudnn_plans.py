"""When a plan of cuDNN pays off.

cuDNN attends about twice as fast as flash attention, but prepares a plan for each shape and layout of its tensors when it first meets them,
which takes 45 to 800 ms on an H200: longer than a turn. A chat meets most shapes once, chunked prefill and evaluation meet a few often, and
the number of calls is not known in advance. So flash attention serves a shape until it has cost as much more than cuDNN as a plan costs
(the ski rental rule): both together cost at most twice what the better one would have cost if the number of calls had been known.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

PLAN_FLOPS = 0.2 / (1 / 340e12 - 1 / 620e12)
"""Floating-point operations of attention that take flash attention as much longer than cuDNN as a plan takes: .2 s for a plan
(`eval/results/turns.jsonl`: `first_ms` less `ms` of 512 to 2,048 new tokens, five or six plans each), and an estimate of the speeds of both
on an H100, 340 and 620 TFLOP/s."""
SHAPES = 4096
"""Shapes that are remembered, those that came last."""


class Plans(threading.local):
    """What flash attention has computed of each shape. One for each thread, as torch's plans are."""

    def __init__(self) -> None:
        self._flops: OrderedDict[Hashable, float] = OrderedDict()

    def pay(self, shape: Hashable) -> bool:
        """Whether cuDNN is to attend to tensors of this shape: it has a plan, or one pays."""
        if self._flops.get(shape, 0.0) < PLAN_FLOPS:
            return False
        self._flops.move_to_end(shape)
        return True

    def count(self, shape: Hashable, flops: float) -> None:
        """Flash attention computes so much that cuDNN could have computed."""
        self._flops[shape] = self._flops.pop(shape, 0.0) + flops
        if len(self._flops) > SHAPES:
            self._flops.popitem(last=False)


PLANS = Plans()
