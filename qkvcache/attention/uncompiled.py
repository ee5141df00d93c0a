"""Marks of torch.compile on functions. The decorators of `torch.compiler` do the same and import torch._dynamo, which
takes a second, where they decorate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def uncompiled(reason: str) -> Callable[[Callable], Any]:
    """Decorates a function as `torch.compiler.disable(reason=reason)` does."""

    def decorate(function: Callable) -> Any:
        disabled: Any = torch._disable_dynamo(function)
        disabled._torchdynamo_disable, disabled._torchdynamo_disable_msg = True, reason
        return disabled

    return decorate


def run_while_compiling(function: Callable) -> Any:
    """Decorates a function as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
