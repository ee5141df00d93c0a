"""The installed release of transformers, which this folder extends by private names: is it one of those that it knows?"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import transformers
from packaging.version import Version

from ...releases import LAST_TESTED, warn_if_newer

FIRST = "5.24"
"""The first release of transformers in which models pass their keys and values to a paged cache themselves."""


def unsupported(reason: object) -> NotImplementedError:
    return NotImplementedError(
        f"continuous batching on compressed pages needs transformers from {FIRST} on, and was tested up to {LAST_TESTED}; "
        f"{transformers.__version__} differs ({reason}): pip install 'transformers[serving]=={LAST_TESTED}.*'"
    )


def check_version() -> None:
    """Raises NotImplementedError for releases before `FIRST`; warns of those after the last tested one."""
    if Version(transformers.__version__).release < Version(FIRST).release:
        raise unsupported("it is older")
    warn_if_newer()


def overridden(*kinds: type) -> dict[Callable, list[str]]:
    """The parameters of the methods of these subclasses that override methods of transformers, by the overridden method."""
    found: dict[Callable, list[str]] = {}
    for kind in kinds:
        for name, method in vars(kind).items():
            stock = getattr(kind.__mro__[1], name, None)
            if inspect.isfunction(method) and inspect.isfunction(stock) and name not in ("__init__", "add_request", "add_requests"):
                found[stock] = list(inspect.signature(method).parameters)
    return found


def check_parameters(methods: dict[Callable, list[str]]) -> None:
    """Raises NotImplementedError if one of these methods of transformers has other parameters."""
    for method, expected in methods.items():
        if (found := list(inspect.signature(method).parameters)) != expected:
            raise unsupported(f"{method.__qualname__} takes {found}, not {expected}")
