"""Releases of transformers, and the name that a cache has in them."""

from packaging.version import Version
from transformers import __version__

LAST_TESTED = "5.24"
CACHE_ARGUMENT = "cache" if Version(__version__) >= Version("5.24") else "past_key_values"
