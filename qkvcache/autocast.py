"""The library's operations outside of `torch.autocast`, which would round scores, rotations and scales, and fails on codes.

Keys, values and queries enter in the dtype that autocast gives to the inputs of
`scaled_dot_product_attention`. Autocast is off for what follows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ACCELERATOR: str = getattr(torch.accelerator.current_accelerator(), "type", "cpu")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on `device`; None where it is off."""
    on = torch._C._is_any_autocast_enabled() and torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


def autocasted(x: Any) -> Any:
    """A tensor in the dtype in which autocast passes it to attention. Other objects, and tensors that autocast leaves alone, unchanged."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def without_autocast(*names: str) -> Callable[[Callable], Any]:
    """Decorates a function that runs with autocast off; its arguments `names` are `autocasted` before."""

    def decorate(function: Callable) -> Any:
        places = [list(inspect.signature(function).parameters).index(name) for name in names]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch._C._is_any_autocast_enabled():
                return function(*args, **kwargs)
            args = tuple(autocasted(x) if place in places else x for place, x in enumerate(args))
            kwargs = {name: autocasted(x) if name in names else x for name, x in kwargs.items()}
            with torch.autocast("cpu", enabled=False), torch.autocast(ACCELERATOR, enabled=False):
                return function(*args, **kwargs)

        return run

    return decorate


def with_autocast(function: Callable) -> Callable:
    """Returns a model's `function`, to be called with autocast off, so that it runs under autocast as it is now."""
    if not torch._C._is_any_autocast_enabled():
        return function
    modes = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", ACCELERATOR)]

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*modes[0]), torch.autocast(*modes[1]):
            return function(*args, **kwargs)

    return run
