"""`StoredPages`: pages of continuous batching in the host memory and the directory of a `PrefixStore`.

A page is named after its tokens, all tokens before them and a salt (its link), the model and the layout of its bytes, so that it is stored
once and a wrong page is not found. The directory needs no index: a page is looked for by its name. Threads may use it at the same time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from ..links import links
from .disk import PAGE, SUFFIX, DiskStore
from .host_memory import Blocks, on_host
from .memory import MemoryStore
from .snapshot import Snapshot

VERSION = 2
"""The version of the bytes of a page, which is a part of its name."""
LATER_NS = 1000
"""Nanoseconds by which each page of a prompt counts as used earlier than the page before it: later pages are of no use without the first
ones, which are the newest."""


class StoredPages:
    """Pages of `size` tokens in a format.

    Args:
        layout: all that the bytes of a page depend on, beside the model and its tokens.
        identity: the name of the model, 16 bytes.
        lock: whether pages in host memory are locked, for copies to and from a GPU.
    """

    def __init__(self, memory: MemoryStore, disk: DiskStore | None, identity: bytes, format: str, layout: str, size: int, lock: bool):
        self.memory, self.format, self.size = memory, format, size
        self._disk, self._lock, self._blocks = disk, lock, Blocks()
        self._identity, self._layout, self._template = identity, hashlib.blake2b(f"{VERSION} {layout}".encode(), digest_size=16), b""
        self.directory = None if disk is None else disk.directory
        self.statistics = (self.directory or Path()) / f"{identity.hex()}-{self._layout.hexdigest()}.statistics"
        """The file of the statistics that pages in the directory depend on."""

    def begin(self, statistics: bytes) -> None:
        """Sets the digest of the statistics that codes depend on. Before, no page has a name."""
        self._layout.update(statistics)
        self._template = self._layout.digest()

    @property
    def begun(self) -> bool:
        return bool(self._template)

    def now(self) -> int:
        """The time of the directory's file system, else of the system, in nanoseconds."""
        return time.time_ns() if self._disk is None else self._disk.now_ns()

    def touch(self, link: bytes, now: int, index: int) -> bool:
        """Marks page number `index` of a prompt as used at `now` in nanoseconds. Returns whether it is stored."""
        self.memory.trim()
        on_disk = self._disk is not None and self._disk.touch(self._file(link), now, now - LATER_NS * index)
        return self.memory.use(self._key(link)) is not None or on_disk

    def demote(self, dead: Sequence[bytes]) -> None:
        """Makes pages the first to go, in memory and for all processes on disk, unless they are pinned."""
        self.memory.demote([self._key(link) for link in dead])
        if self._disk is not None:
            for link in dead:
                self._disk.demote(self._file(link))

    def pin(self, tokens: Sequence[int], pinned: bool = True) -> int:
        """Keeps the stored full pages without a salt that `tokens` begin with, or no longer. Returns the number of their tokens."""
        found = list(takewhile(self._stored, links(tokens, self.size) if self.begun else ()))
        for link in found:
            self.memory.pin(self._key(link), pinned)
            if self._disk is not None:
                self._disk.pin(self._file(link), pinned)
        return len(found) * self.size

    def _stored(self, link: bytes) -> bool:
        in_memory = self.memory.use(self._key(link)) is not None
        return in_memory or (self._disk is not None and (self._disk.directory / self._file(link)).exists())

    def find(self, link: bytes) -> Snapshot | None:
        """A page in host memory, read from disk if need be; None if it is not stored, damaged or cannot be read."""
        found = self.memory.use(self._key(link))
        if found is None and self._disk is not None and (page := self._disk.read_page(self._file(link))) is not None:
            if self._lock:
                return self.keep(link, page)
            found = Snapshot(PAGE, {PAGE: page})
            self.memory.put(self._key(link), found)
        return found

    def keep(self, link: bytes, page: Tensor) -> Snapshot:
        """Copies the bytes of a page, uint8 `[bytes]` on any device, to host memory."""
        found = on_host(Snapshot(PAGE, {PAGE: page}), self._lock, self._blocks)
        if found.memory is not None:
            found.memory.wait()
        self.memory.put(self._key(link), found)
        return found

    def write(self, link: bytes, page: Snapshot, now: int, index: int) -> str | None:
        """Writes a page that was used at `now` as page number `index` of a prompt. Returns None, or the reason why it
        is not on disk."""
        if self._disk is None:
            return "the store has no directory"
        reason = self._disk.write_page(self._file(link), page, f"page {index} in {self.format}", self.size)
        self._disk.touch(self._file(link), now, now - LATER_NS * index)
        return reason

    def _key(self, link: bytes) -> bytes:
        """The key of a page in host memory."""
        return self._identity + self._template + link

    def _file(self, link: bytes) -> str:
        return f"{self._identity.hex()}-{self._template.hex()}-{link.hex()}{SUFFIX}"
