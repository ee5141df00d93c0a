"""A mark of torch.compile on functions. The decorator of `torch.compiler` does the same and imports
torch._dynamo, which takes a second, where it decorates."""

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
