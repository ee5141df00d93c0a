"""Beginnings of prompts that are computed once: `PrefixStore` keeps them compressed, in memory and on disk."""

from .stats import Match, Stats
from .store import PrefixStore

__all__ = ["Match", "PrefixStore", "Stats"]
