"""What words on the command line mean, the same in every command. Each refuses what it does not know, by the name of its option."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch


def model_of(name: str, option: str = "MODEL") -> str:
    """What transformers loads for `name`: `models.folder`."""
    from .models import folder

    try:
        return folder(name)
    except (OSError, ImportError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def dtype_of(name: str) -> torch.dtype:
    import torch

    allowed = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in allowed:
        raise typer.BadParameter(f"{name!r}: expected one of {', '.join(allowed)}", param_hint="--dtype")
    return allowed[name]


def device_of(name: str | None) -> torch.device:
    """None: a GPU if there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"{name!r} is no device of this machine: {reason}", param_hint="--device") from error
    return device


def budget_of(value: float | None) -> int | float | None:
    """A whole number is tokens, what lies between 0 and 1 a share."""
    if value is None or 0 < value < 1:
        return value
    if not value.is_integer():
        raise typer.BadParameter(f"{value:g}: expected a whole number of tokens, or a share between 0 and 1", param_hint="--budget")
    return int(value)


def counts_of(text: str, option: str) -> list[int]:
    """Whole numbers with commas."""
    try:
        return [int(count) for count in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected whole numbers with commas between them", param_hint=option) from error
