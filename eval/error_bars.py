"""Numbers with their errors, without the digits that the error does not bear."""

from __future__ import annotations

import math

from torch import Tensor


def standard_error(values: Tensor) -> float:
    """The standard error of the mean of independent `values` `[B]`; nan for a single one."""
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else float("nan")


def share_error(right: float, count: int) -> float:
    """The standard error of a share `right` of `count`, above zero even for 0 and 1 (Jeffreys' prior)."""
    expected = (right + 0.5) / (count + 1)
    return (expected * (1 - expected) / (count + 1)) ** 0.5


def decimals(error: float, most: int = 5) -> int:
    """Of a number whose error is `error`: that of the error's first digit, or of its second where the first is 1."""
    if not math.isfinite(error):
        return 3
    if not error:
        return most
    first = math.floor(math.log10(error))
    return min(max(-first + (error / 10**first < 1.95), 0), most)


def short(value: float, places: int) -> str:
    """Without the zero before the point."""
    text = f"{value:.{places}f}"
    return text.replace("0.", ".", 1) if places and abs(value) < 1 else text


def with_error(value: float, error: float) -> str:
    """`.0085 ± .0004`. A single sample has no error, and is given with three digits behind the point; an error that is too small to
    be shown is left out."""
    places = decimals(error)
    if not math.isfinite(error):
        return short(value, places)
    if error < 0.5 * 10**-places:
        return short(value, places) if abs(value) >= 0.5 * 10**-places else "0"
    return f"{short(value, places)} ± {short(error, places)}"


def number(value: float) -> str:
    """.0038, .017, 1.2: two digits."""
    return f"{value:.2g}" if value >= 1 else f"{value:.{5 if value < 0.0001 else 4 if value < 0.01 else 3}f}".lstrip("0") or "0"


def percent(value: float, error: float | None = None) -> str:
    if error is None or not math.isfinite(error):
        return f"{100 * value:.0f} %"
    places = decimals(100 * error, 1)
    return f"{100 * value:.{places}f} ± {100 * error:.{places}f} %"


def recalled(right: int, count: int) -> str:
    return percent(right / count, share_error(right, count))


def paired(values: list[float], others: list[float]) -> tuple[float, float]:
    """Mean of the differences of what was measured on the same passages, and its standard error."""
    differences = [x - y for x, y in zip(values, others, strict=True)]
    mean = sum(differences) / len(differences)
    if len(differences) == 1:
        return mean, math.nan
    variance = sum((x - mean) ** 2 for x in differences) / (len(differences) - 1)
    return mean, math.sqrt(variance / len(differences))
