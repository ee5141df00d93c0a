"""How far the channels of tokens spread within the range of the tokens after them, for LagKV, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LEAST_RANGE = 1e-6
"""The spread of a channel that is the same in all tokens of a window."""


def lag_spread(x: Tensor, count: int, lag: int) -> Tensor:
    """The standard deviation over the channels, each scaled to its range over the `lag` tokens after the token, fp32 `[B, H, count]`, of
    the first `count` tokens of `[B, H, count + lag or more, D]`."""
    after = x[:, :, 1 : count + lag]
    high, low = _sliding(torch.maximum, after, lag), _sliding(torch.minimum, after, lag)
    return (x[:, :, :count] - low).float().div_((high - low).clamp_min_(LEAST_RANGE)).std(-1)


def _sliding(extreme: Callable[[Tensor, Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """`[B, H, T, D]` -> `[B, H, T - width + 1, D]`: of windows of twice the width it is that of two windows, the last of which overlap."""
    reach = 1
    while reach < width:
        step = min(reach, width - reach)
        x = extreme(x[:, :, :-step], x[:, :, step:])
        reach += step
    return x
