"""Beginnings of prompts that are computed once: `PrefixStore` keeps them compressed, in memory and on disk."""

from .store import Match, PrefixStore, Stats

__all__ = ["Match", "PrefixStore", "Stats"]
