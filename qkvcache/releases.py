"""The release of transformers that is installed: the name of its argument for a cache, and whether it is newer than the last tested one."""

import functools
import re
import warnings
from typing import Any

from transformers import __version__ as INSTALLED

LAST_TESTED = "5.24"
"""The newest release of transformers that the tests have run on."""


def _numbers(version: str) -> tuple[int, ...]:
    """The major and the minor number of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


CACHE_ARGUMENT = "cache" if _numbers(INSTALLED) >= (5, 24) else "past_key_values"
"""The name of the cache among the arguments of `generate` and `forward`, and in their outputs."""


def passing(cache: object) -> dict[str, Any]:
    """The keyword argument that passes `cache` to a model: `model.generate(ids, **passing(cache))`."""
    return {CACHE_ARGUMENT: cache}


@functools.cache
def warn_if_newer() -> None:
    """Warns once if transformers is newer than the last release that was tested."""
    if _numbers(INSTALLED) > _numbers(LAST_TESTED):
        warnings.warn(
            f"transformers {INSTALLED} is newer than {LAST_TESTED}, the last release that qkvcache was tested with: look for a newer "
            f"qkvcache, or install 'transformers<{LAST_TESTED.split('.')[0]}.{int(LAST_TESTED.split('.')[1]) + 1}'",
            stacklevel=4,
        )
