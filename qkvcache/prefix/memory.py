"""`MemoryStore`: what a store has in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from . import match
from .entry import Entry


class MemoryStore:
    """Entries, and pages of continuous batching, in the order of their last use; together at most `max_bytes`. Those that nobody used for
    `time_to_live` seconds are removed, too, unless it is None. Pinned ones stay. Threads may use it at the same time."""

    def __init__(self, max_bytes: int, time_to_live: float | None = None):
        self.max_bytes, self.time_to_live = max_bytes, time_to_live
        self.nbytes = self.removed = 0
        self.pinned: set[bytes] = set()
        self._items: dict[bytes, tuple[Any, float]] = {}
        """Items with the times of their last use."""
        self._lock = threading.RLock()

    @property
    def entries(self) -> list[Entry]:
        with self._lock:
            return [item for item, _ in self._items.values() if isinstance(item, Entry)]

    @property
    def cuts(self) -> match.Entries:
        return {entry.key: entry.cuts for entry in self.entries}

    def use(self, key: bytes) -> Any:
        """The item of `key`, which becomes the most recently used; None if there is none."""
        with self._lock:
            item, _ = self._items.pop(key, (None, 0.0))
            if item is not None:
                self._items[key] = item, time.monotonic()
            return item

    def put(self, key: bytes, item: Any) -> None:
        """Adds an item in place of another of this key, and makes room. An entry takes the place of those whose tokens it begins with, too,
        unless they are pinned."""
        with self._lock:
            replaced = match.replaced(self.cuts, key, item.cuts) if isinstance(item, Entry) else []
            for other in (key, *(other for other in replaced if other not in self.pinned)):
                self._remove(other)
            self._items[key] = item, time.monotonic()
            self.nbytes += item.nbytes
            self.trim()

    def pin(self, key: bytes, pinned: bool = True) -> None:
        """Keeps an item whatever its age and the room, or no longer."""
        with self._lock:
            (self.pinned.add if pinned else self.pinned.discard)(key)

    def demote(self, keys: Sequence[bytes]) -> None:
        """Makes items the first to go, the last of `keys` before the others."""
        with self._lock:
            first = {key: (self._items[key][0], 0.0) for key in reversed(keys) if key in self._items}
            self._items = first | {key: item for key, item in self._items.items() if key not in first}

    def trim(self, max_bytes: int | None = None) -> None:
        """Removes items that are too old, and the least recently used until at most `max_bytes` are left; None: the store's."""
        most = self.max_bytes if max_bytes is None else max_bytes
        with self._lock:
            while (key := next((key for key in self._items if key not in self.pinned), None)) is not None:
                old = self.time_to_live is not None and self._items[key][1] < time.monotonic() - self.time_to_live
                if not old and self.nbytes <= most:
                    return
                self._remove(key)
                self.removed += 1

    def _remove(self, key: bytes) -> None:
        if key in self._items:
            self.nbytes -= self._items.pop(key)[0].nbytes
