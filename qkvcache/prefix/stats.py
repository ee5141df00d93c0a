"""What a `PrefixStore` returns beside caches: `Match`, the result of a fetch, and `Stats`, its counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Match:
    """The result of `fetch`: a cache that holds the first `length` tokens, or None.

    `kind`: "exact" (the stored tokens are the prompt), "shorter" (the prompt continues after them), "longer" (they
    continue after the prompt), "common" (both continue, differently), or "miss". `source`: "memory", "disk" or None.
    """

    cache: Cache | None = None
    length: int = 0
    kind: str = "miss"
    source: str | None = None


@dataclass
class Stats:
    """Counts since the store was made, and its current size.

    Attributes:
        hits: fetches that found something, by kind of match.
        misses: fetches that found nothing.
        tokens_reused: tokens that were fetched and need not be computed.
        stored: entries stored.
        covered: entries not stored, because another, in memory or on disk, already held all of their tokens.
        rejected: entries larger than the whole budget.
        refused: entries whose reuse would not be exact, and failed writes, by reason.
        evicted, evicted_files: entries removed from memory, and from disk, to make room or because of their age.
        skipped: files that were not loaded, by reason.
        entries, nbytes: entries in memory, and the bytes of their live tensors and of pages.
        files, disk_bytes: entries and pages on disk, of all processes, and their bytes.
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
