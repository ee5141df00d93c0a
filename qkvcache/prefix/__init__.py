"""`PrefixStore` keeps the keys and values of prompts' first tokens, compressed, in memory and on disk, so that they are
computed once."""

from .media import remaining
from .store import Match, PrefixStore, Stats

__all__ = ["Match", "PrefixStore", "Stats", "remaining"]
