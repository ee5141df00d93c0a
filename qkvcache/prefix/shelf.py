"""A directory of entries as one process sees it: which files it may use, which are damaged, and how many bytes all of them may take."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from ..layers.snapshot import Snapshot
from . import disk
from .entry import Entry
from .match import NAME, Index


class Shelf:
    """The entries in `directory`, made if there is none, that together take at most `max_bytes`; `model` is written into their headers.

    Raises ValueError if the directory cannot be made or written.
    """

    def __init__(self, directory: Path, max_bytes: int, model: str):
        self.directory, self.max_bytes, self.model = directory, max_bytes, model
        self.index = Index()
        self.skipped: Counter[str] = Counter()
        self.evicted = 0
        self._files: dict[bytes, disk.File] = {}
        self._known: dict[str, bytes | None] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(f"no permission to write into {directory}")
        except OSError as error:
            raise ValueError(f"directory={str(directory)!r} cannot be used: {error}") from error

    def scan(self, identity: bytes, moulds: Collection[bytes]) -> None:
        """Takes note of what other processes have written and removed since. Others' models and kinds of cache are passed over."""
        names = {entry.name for entry in disk.files(self.directory)}
        for name in self._known.keys() - names:
            self._forget(name)
        for name in sorted(names - self._known.keys()):
            parts = disk.parts(name)
            if parts is None:
                self._skip(name, "it is no prefix entry")
            elif parts[0] == identity and parts[1] in moulds:
                self._open(name)

    def _open(self, name: str) -> None:
        try:
            file = disk.read_header(self.directory / name)
        except FileNotFoundError:
            return
        except disk.Damaged as error:
            self._skip(name, str(error))
            return
        self._known[name] = file.key
        self._files[file.key] = file
        self.index.add(file.key, file.whole)

    def _skip(self, name: str, reason: str) -> None:
        """Warns once; the file stays where it is."""
        self._forget(name)
        self._known[name] = None
        self.skipped[reason] += 1
        warnings.warn(f"{self.directory / name} is skipped: {reason}", stacklevel=5)

    def _forget(self, name: str) -> None:
        key = self._known.pop(name, None)
        if key is not None and key in self._files and self._files[key].path.name == name:
            del self._files[key]
            self.index.remove(key)
            for other in [other for other, same in self._known.items() if same == key]:  # of another kind of cache: looked at again
                del self._known[other]

    def get(self, key: bytes) -> disk.File:
        return self._files[key]

    def read(self, key: bytes, tokens: int) -> Iterator[Snapshot]:
        """The first `tokens` tokens, a layer as soon as it is checked, as views of the file. Raises disk.Damaged if the file is damaged or
        gone, which is then known."""
        file = self._files[key]
        try:
            if disk.read_header(file.path) != file:
                raise disk.Damaged("it was replaced by something else")
            yield from disk.read(file, tokens)
            os.utime(file.path)  # it was used
        except FileNotFoundError as error:
            self._forget(file.path.name)
            raise disk.Damaged("it is gone") from error
        except disk.Damaged as error:
            self._skip(file.path.name, str(error))
            raise

    def write(self, entry: Entry) -> str | None:
        """Writes an entry and removes those that it covers; returns why not, or None."""
        if entry.nbytes > self.max_bytes:
            return "larger than the whole budget on disk"
        self.trim(self.max_bytes - entry.nbytes)
        try:
            name = disk.write(self.directory, entry, self.model).name
        except OSError as error:
            return f"writing failed: {error.strerror or error}"
        self._forget(name)
        self._open(name)
        if not entry.whole:
            for key in self.index.beginnings(entry.key):
                self.remove(key, entry.mould.name)
        self.trim(self.max_bytes)
        return None

    def remove(self, key: bytes, mould: bytes) -> None:
        """Removes the file of an entry of this kind of cache."""
        file = self._files[key]
        if file.mould == mould:
            file.path.unlink(missing_ok=True)
            self._forget(file.path.name)

    def trim(self, max_bytes: int) -> int:
        """Removes what was used longest ago until at most `max_bytes` are taken; returns how many entries went."""
        removed = disk.trim(self.directory, max_bytes)
        self.evicted += removed
        if removed:
            names = {entry.name for entry in disk.files(self.directory)}
            for name in self._known.keys() - names:
                self._forget(name)
        return removed

    def covering(self, key: bytes, mould: bytes) -> bytes | None:
        """The key of an entry for this kind of cache that begins with all tokens of `key`."""
        found = key if key in self._files else self.index.covering(key)
        return found if found is not None and self._files[found].mould == mould else None

    def size(self) -> tuple[int, int]:
        """Entries in the directory, of all models and processes, and their bytes."""
        return disk.size(self.directory)

    def newest(self, identity: bytes) -> list[bytes]:
        """Keys of this model, those used last first."""
        times = {}
        for key, file in self._files.items():
            try:
                times[key] = file.path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
        return sorted((key for key in times if key[:NAME] == identity), key=times.__getitem__, reverse=True)
