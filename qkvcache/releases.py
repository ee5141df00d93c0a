"""The newest release of transformers that this library was tested with."""

from __future__ import annotations

import functools
import warnings

import transformers
from packaging.version import Version

LAST_TESTED = "5.24"


@functools.cache
def warn_if_newer() -> None:
    """Warns once if transformers is newer than `LAST_TESTED`."""
    tested = Version(LAST_TESTED).release
    if Version(transformers.__version__).release[: len(tested)] > tested:
        warnings.warn(
            f"transformers {transformers.__version__} is newer than {LAST_TESTED}, the last release that qkvcache was tested with",
            stacklevel=3,
        )
