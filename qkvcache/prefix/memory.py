"""Entries in host memory, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from .entry import Entry
from .match import Index


class Memory:
    """Entries, those used longest ago first; together they take at most `max_bytes`, measured."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.index = Index()
        self.evicted = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def use(self, key: bytes) -> Entry:
        """The entry, which is then the one used last."""
        self._entries.move_to_end(key)
        return self._entries[key]

    def covering(self, key: bytes, mould: bytes) -> bytes | None:
        """The key of an entry for this kind of cache that begins with all tokens of `key`."""
        found = key if key in self._entries else self.index.covering(key)
        return found if found is not None and self._entries[found].mould.name == mould else None

    def put(self, entry: Entry) -> None:
        """Takes an entry in, in the place of those whose tokens it begins with, and makes room."""
        self._drop(entry.key)
        if not entry.whole:
            for key in self.index.beginnings(entry.key):
                if self._entries[key].mould.name == entry.mould.name:
                    self._drop(key)
        self._entries[entry.key] = entry
        self.index.add(entry.key, entry.whole)
        self.trim(self.max_bytes)

    def add_oldest(self, entry: Entry) -> bool:
        """Takes an entry in if there is room, as the one used longest ago; says whether."""
        if self.nbytes + entry.nbytes > self.max_bytes:
            return False
        self._entries[entry.key] = entry
        self._entries.move_to_end(entry.key, last=False)
        self.index.add(entry.key, entry.whole)
        return True

    def trim(self, max_bytes: int) -> None:
        """Drops what was used longest ago until at most `max_bytes` are taken."""
        while self._entries and self.nbytes > max_bytes:
            self._drop(next(iter(self._entries)))
            self.evicted += 1

    def _drop(self, key: bytes) -> None:
        if self._entries.pop(key, None) is not None:
            self.index.remove(key)
