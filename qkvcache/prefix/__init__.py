"""`PrefixStore` keeps the keys and values of prompts' first tokens, compressed, in memory and on disk, so that they are
computed once."""

from .media import remaining
from .stats import Match, Stats
from .store import PrefixStore

__all__ = ["Match", "PrefixStore", "Stats", "remaining"]
