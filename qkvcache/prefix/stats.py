"""What a store has done, and what a fetch found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Match:
    """What `fetch` found: a cache that holds the first `length` tokens and goes on from there, or None.

    `kind`: "exact" (the stored tokens are the prompt), "shorter" (the prompt goes on after them), "longer" (they go on after the prompt),
    "common" (both go on, differently), or "miss". `source`: "memory", "disk" or None. `error`: how far the worst layer's decoded tokens
    were from those that were given when they were stored; 0 where codes or exact tokens were given.
    """

    cache: Cache | None = None
    length: int = 0
    kind: str = "miss"
    source: str | None = None
    error: float = 0.0


@dataclass
class Stats:
    """Counts since the store was made, and what it holds now.

    Attributes:
        hits: fetches that found something, by kind of match.
        misses: fetches that found nothing.
        tokens_reused: tokens that were fetched, and need not be computed.
        stored: entries taken in.
        covered: entries not taken in since another, in memory or on disk, held all of their tokens already.
        rejected: entries larger than the whole budget.
        refused: entries that would not have been exact to reuse, by reason; and failed writes.
        evicted, evicted_files: entries that made room in memory, and on disk.
        skipped: files that were not loaded, by reason.
        entries, nbytes: in memory, the bytes measured from live tensors.
        files, disk_bytes: on disk, of all processes.
    """

    hits: Counter[str] = field(default_factory=Counter)
    misses: int = 0
    tokens_reused: int = 0
    stored: int = 0
    covered: int = 0
    rejected: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    evicted_files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    entries: int = 0
    nbytes: int = 0
    files: int = 0
    disk_bytes: int = 0
