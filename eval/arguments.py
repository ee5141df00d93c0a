"""What options of the studies may be: types for argparse, which puts the option's name before what they say."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"{value}: must be {least} or more")
        return value

    return whole_number


def fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise ArgumentTypeError(f"{text}: must be a share above 0, at most 1")
    return value
