"""`MemoryStore`: entries in host memory."""

from __future__ import annotations

from collections import OrderedDict

from .entry import Entry
from .match import Index


class MemoryStore:
    """Entries in the order of their last use, the most recently used last; together at most `max_bytes`, measured."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.index = Index()
        self.evicted = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def use(self, key: bytes) -> Entry:
        """Returns the entry of `key` and marks it as the most recently used."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, entry: Entry) -> None:
        """Adds an entry, removes entries of its template whose tokens it begins with, and makes room."""
        self._remove(entry.key)
        if not entry.whole:
            for key in self.index.beginnings(entry.key, entry.template.name):
                self._remove(key)
        self._entries[entry.key] = entry
        self.index.add(entry.key, entry.template.name, entry.whole)
        self.trim(self.max_bytes)

    def trim(self, max_bytes: int) -> None:
        """Evicts the least recently used entries until at most `max_bytes` are left."""
        while self._entries and self.nbytes > max_bytes:
            self._remove(next(iter(self._entries)))
            self.evicted += 1

    def _remove(self, key: bytes) -> None:
        if self._entries.pop(key, None) is not None:
            self.index.remove(key)
