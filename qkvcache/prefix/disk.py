"""Entries, and pages of continuous batching, as files (`snapshot_file.py`) in a directory that any number of processes share.

A file name consists of the names of the model and of the cache template, and a digest of the tokens, so that the directory is the index.
The parts of a file are layers, checkpoints and token ids, or a page; its header is bound to its name.

A file is used by setting its time of modification. A file that stays whatever its age and the room has an empty file beside it,
of its name and `PINNED`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

from torch import Tensor

from ..files import THREADS, WRITING, Damaged, reading, sync
from . import match, snapshot_file
from .checkpoints import Checkpoints
from .entry import Entry
from .host_memory import Blocks
from .snapshot import Snapshot
from .snapshot_file import Parts, read_whole, tokens_of
from .template import CacheTemplate

AHEAD = min(THREADS, 5)
"""Layers that are read into `Blocks` at a time; one more block holds the layer in use. New blocks are locked one after
another, and locking one takes about as long as a thread needs for a layer: more blocks come too late to help, and with
fewer the bus waits."""
SUFFIX, PINNED = ".safetensors", ".pinned"
LONGEST_WRITE = 3600
"""Seconds after which a folder that a process writes into counts as left by a killed process."""
WHAT = "qkvcache_prefix"
"""The kind of file."""
IDS, PAGE = "ids", "page"
"""The names of the parts that are no layers."""
Copy = Callable[[Snapshot], Snapshot]
_NAME = re.compile(r"([0-9a-f]{32}-){2}[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class File(Parts):
    """A file whose header was checked. `key` of an entry; `text` describes the cache or the page, `model` the model; `whole`: whether the
    entry is cut at checkpoints alone. The names of `parts` are layers, or layer and tokens of a checkpoint."""

    text: str
    model: str
    tokens: int
    whole: bool
    key: bytes = b""

    @cached_property
    def cuts(self) -> match.Cuts:
        """The numbers of tokens to which it can be cut, of its checkpoints and of all; None: any."""
        return (*sorted({int(name.partition("@")[2]) for name in self.parts if "@" in name}), self.tokens) if self.whole else None

    def layers(self, template: CacheTemplate | None) -> tuple[list[Snapshot], Checkpoints]:
        """The layers and the checkpoints of an entry, of which names, shapes and counts are checked if `template` is given."""
        parts = self.snapshots()
        layers = [parts[str(i)] for i in range(sum(map(str.isdigit, parts)))]
        checkpoints = {at: [parts.get(f"{i}@{at}") for i in range(len(layers))] for at in (self.cuts or ())[:-1]}
        if template is not None:
            template.check(layers, self.tokens, checkpoints)
        return layers, checkpoints


def file_name(key: bytes) -> str:
    """The file name of an entry: the model's name, the template's name and a digest of the tokens, in hex."""
    half = match.NAME // 2
    return f"{key[:half].hex()}-{key[half : match.NAME].hex()}-{hashlib.blake2b(key, digest_size=16).hexdigest()}{SUFFIX}"


def read_header(path: Path) -> File:
    """Reads and checks the header, and the token ids of an entry. Raises Damaged for a file that is foreign, incomplete or of another name;
    FileNotFoundError if the file was removed."""
    header = snapshot_file.read_header(path, WHAT, "prefix entry", path.name)
    with reading(path):
        file = File(path, **header)
        if IDS not in file.parts:
            return file
        ids = file.checked((IDS,))[IDS].tensors[IDS]
        file = replace(file, key=match.encode(bytes.fromhex(path.name[:65].replace("-", "")), ids))
        if path.name != file_name(file.key) or file.tokens != match.length(file.key) or max(file.cuts or [0]) > file.tokens:
            raise Damaged(f"it has other token ids than its name says, or cuts at {file.cuts}")
        return file


def read(file: File, tokens: int | None = None, copy: Copy | None = None, template: CacheTemplate | None = None) -> Iterator[Snapshot]:
    """Yields the layers of an entry in order, cut to the first `tokens` tokens and checked. Their tensors are views of
    the file, of which only the used part is read, or the result of `copy`, which runs in the thread that checked the
    layer. Raises Damaged if the contents were changed, or if the layers do not fit `template`.

    With `Blocks`, drop all references to a layer before asking for the second layer after it; otherwise its block is
    not reused."""
    with reading(file.path):
        layers, checkpoints = file.layers(template)
    states = checkpoints.get(tokens or 0, [None] * len(layers))

    def checked(i: int) -> Snapshot:
        part, own = layers[i], states[i]
        with reading(file.path):
            if own is not None:
                file.verify(f"{i}@{tokens}", own)
            if tokens not in (None, file.tokens):
                part = part.cut(tokens, own)
            if part is not own:
                file.verify(str(i), layers[i], None if part is layers[i] else -(-tokens_of(part) // snapshot_file.CHUNK) or 1)
        return copy(part) if copy else part

    readers = AHEAD if isinstance(copy, Blocks) else THREADS
    with ThreadPoolExecutor(readers) as pool:
        running: deque[Future[Snapshot]] = deque()
        for i in range(len(layers)):
            if len(running) == readers:  # the most copies at a time
                yield running.popleft().result()
            running.append(pool.submit(checked, i))
        while running:
            yield running.popleft().result()


def read_checkpoints(file: File, most: int, copy: Copy | None = None) -> Checkpoints:
    """The checkpoints of an entry at up to `most` tokens, as `read` gives layers. Raises Damaged as it does."""
    with reading(file.path):
        found = {at: layers for at, layers in file.layers(None)[1].items() if at <= most}
        for at, layers in found.items():
            for i, own in enumerate(layers):
                if own is not None:
                    file.verify(f"{i}@{at}", own)
        return {at: [copy(x) if x and copy else x for x in layers] for at, layers in found.items()}


def files(directory: Path) -> list[os.DirEntry]:
    """The files that may be entries; none if the directory was removed or cannot be read."""
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []
    except OSError as error:
        _warn(directory, error)
        return []


def _warn(path: Path, error: OSError) -> None:
    """Says that a file cannot be read now. Its tokens are computed, and it stays where it is."""
    warnings.warn(f"{path} stays, and cannot be read: {error}", stacklevel=3)


def _entries(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The entries in a directory that no other process removes meanwhile."""
    for entry in files(directory):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(entry.name) and S_ISREG(entry.stat().st_mode):
                yield Path(entry.path), entry.stat()


class DiskStore:
    """The entries and pages in `directory` that one process may use; all files in it together take at most `max_bytes`. Files that nobody
    used for `time_to_live` seconds are removed, too, unless it is None. The directory is created if missing, for this user alone. Headers
    have the type of the `model`.

    Beside these, a file is removed only if it was read and is damaged. One that cannot be read stays.

    Raises ValueError if the directory cannot be created or written.
    """

    def __init__(self, directory: Path, max_bytes: int, model: str, time_to_live: float | None = None):
        self.directory, self.max_bytes, self.model, self.time_to_live = directory, max_bytes, model, time_to_live
        self.skipped: Counter[str] = Counter()
        self.removed = 0
        self._files: dict[str, File | None] = {}
        """Files of entries by name; None for skipped ones."""
        self._lock, self._room = threading.Lock(), 0
        """`_room`: the bytes of pages that are written before the directory is listed again."""
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)  # names and times tell others what was sent
            if not os.access(directory, os.W_OK):
                raise PermissionError(f"no permission to write into {directory}")
        except OSError as error:
            raise ValueError(f"directory={str(directory)!r} cannot be used: {error}") from error
        if time_to_live is not None:
            self.trim(max_bytes)

    def scan(self, identity: bytes, templates: Collection[bytes]) -> None:
        """Finds the files that other processes have written or removed. Ignores files of other models and templates."""
        if self.time_to_live is not None:
            self.trim(self.max_bytes)
        there = {entry.name for entry in files(self.directory)}
        for name in self._files.keys() - there:
            del self._files[name]
        ours = tuple(f"{identity.hex()}-{template.hex()}-" for template in templates)
        for name in sorted(there - self._files.keys()):
            if not _NAME.fullmatch(name):
                self._skip(name, "it is no prefix entry")
            elif name.startswith(ours):
                try:
                    self._files[name] = read_header(self.directory / name)
                except FileNotFoundError:
                    continue
                except OSError as error:  # tried again by the next scan
                    _warn(self.directory / name, error)
                except Damaged as error:
                    self._skip(name, str(error))

    def file(self, key: bytes) -> File | None:
        """The file of an entry, if there is one."""
        return self._files.get(file_name(key))

    @property
    def cuts(self) -> match.Entries:
        return {file.key: file.cuts for file in self._files.values() if file is not None}

    def _skip(self, name: str, reason: str) -> None:
        """Warns once; leaves the file in place."""
        self._files[name] = None
        self.skipped[reason] += 1
        warnings.warn(f"{self.directory / name} is skipped: {reason}", stacklevel=5)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keeps a file whatever its age and the room, for all processes, or no longer; a crash of the system changes nothing of it once
        this returns."""
        marker = self.directory / f"{name}{PINNED}"
        marker.touch() if pinned else marker.unlink(missing_ok=True)
        sync(self.directory)

    def is_pinned(self, name: str) -> bool:
        return (self.directory / f"{name}{PINNED}").exists()

    def now_ns(self) -> int:
        """The time of the file system in nanoseconds: hosts that share the directory may have other clocks."""
        try:
            os.utime(self.directory)
            return self.directory.stat().st_mtime_ns
        except OSError:
            return time.time_ns()

    def touch(self, name: str, now_ns: int, used_ns: int | None = None) -> bool:
        """Marks a file as used at `used_ns`, by default `now_ns`. Returns whether there is one; removes one that is too old."""
        path, used_ns = self.directory / name, now_ns if used_ns is None else used_ns
        try:
            old = self._too_old(path.stat(), now_ns) and not self.is_pinned(name)
        except OSError:
            return False
        if old:
            path.unlink(missing_ok=True)
            self.removed += 1
            return False
        with suppress(OSError):  # it was removed, or another user marks it
            os.utime(path, ns=(used_ns, used_ns))
        return True

    def demote(self, name: str) -> None:
        """Makes a file the first to go, unless it is pinned."""
        with suppress(OSError):
            os.utime(self.directory / name, (0, 0))

    def _too_old(self, stat: os.stat_result, now_ns: int) -> bool:
        return self.time_to_live is not None and stat.st_mtime_ns < now_ns - self.time_to_live * 10**9

    def read_page(self, name: str) -> Tensor | None:
        """A page, or None if there is none or it cannot be read. A file that was read and is damaged is removed: its page is computed and
        written again."""
        path = self.directory / name
        try:
            return read_whole(path, WHAT, "prefix entry", name)[PAGE].tensors[PAGE]
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(path, error)
        except (Damaged, LookupError) as error:
            warnings.warn(f"{path} is removed: {error}", stacklevel=2)
            with suppress(OSError):  # nobody may write there any more
                path.unlink(missing_ok=True)
        return None

    def write_page(self, name: str, page: Snapshot, text: str, tokens: int) -> str | None:
        """Writes a page. Returns None, or the reason why it was not written.

        To make room, a 32nd of the budget is freed at once, so that the directory is not listed for each page.
        """
        return self._write(name, {PAGE: page}, self.max_bytes // 32, text=text, tokens=tokens, whole=False)

    def read(self, key: bytes, tokens: int, copy: Copy | None, template: CacheTemplate) -> Iterator[Snapshot]:
        """The first `tokens` tokens of an entry of `template`, layer by layer, as `read` returns them. Raises Damaged if the file is
        damaged, was removed or cannot be read; the entry is then not used again, in the last case until the next `scan`."""
        name = file_name(key)
        file: File = self._files[name]  # type: ignore[assignment]
        try:
            yield from read(file, tokens, copy, template)
            os.utime(file.path)  # marks it as used
        except OSError as error:
            self._files.pop(name, None)
            if not isinstance(error, FileNotFoundError):
                _warn(file.path, error)
            raise Damaged("it is gone or cannot be read") from error
        except Damaged as error:
            self._skip(name, str(error))
            raise

    def write(self, entry: Entry) -> str | None:
        """Writes an entry and removes entries whose tokens it begins with unless they are pinned. Returns None, or the reason why the entry
        was not written."""
        parts = {IDS: Snapshot(IDS, {IDS: match.decode(entry.key).int()})} | {str(i): layer for i, layer in enumerate(entry.layers)}
        parts |= {f"{i}@{at}": x for at, layers in entry.checkpoints.items() for i, x in enumerate(layers) if x is not None}
        header = {"text": entry.template.text, "tokens": match.length(entry.key), "whole": entry.cuts is not None}
        if reason := self._write(file_name(entry.key), parts, 0, **header):
            return reason
        with suppress(FileNotFoundError):  # another process has made room
            self._files[file_name(entry.key)] = read_header(self.directory / file_name(entry.key))
        for key in match.replaced(self.cuts, entry.key, entry.cuts):
            if not self.is_pinned(name := file_name(key)):
                (self.directory / name).unlink(missing_ok=True)
                self._files.pop(name)
        return None

    def _write(self, name: str, parts: dict[str, Snapshot], spare: int, **header: Any) -> str | None:
        """Writes a file of `parts`. Returns None, or the reason why it was not written."""
        if sum(part.nbytes for part in parts.values()) > self.max_bytes:
            return "larger than the whole budget on disk"
        try:
            header["model"] = self.model
            snapshot_file.write(self.directory / name, WHAT, parts, header, name, partial(self._make_room, spare))
        except OSError as error:
            return f"writing failed: {error.strerror or error}"
        return None

    def _make_room(self, spare: int, nbytes: int) -> None:
        """Makes room for a file, and for `spare` bytes of the next ones, for which the directory is not listed."""
        with self._lock:
            self._room -= nbytes
            if self._room < 0 or not spare:
                rest = self.trim(max(self.max_bytes - spare - nbytes, 0))
                self._room = min(spare, self.max_bytes - nbytes - rest)

    def trim(self, max_bytes: int) -> int:
        """Removes what killed processes left, files that are too old, and then the least recently used ones until the rest
        fits in `max_bytes`; pinned ones stay. Returns the bytes of the rest. `scan` notices what was removed."""
        now = self.now_ns()
        for folder in self.directory.glob(f"*{WRITING}"):
            with suppress(FileNotFoundError):
                if now - folder.stat().st_mtime_ns > LONGEST_WRITE * 10**9:
                    shutil.rmtree(folder, ignore_errors=True)
        pinned = {path.stem for path in self.directory.glob(f"*{PINNED}")}
        entries = [(path.name in pinned, stat.st_mtime_ns, path, stat) for path, stat in _entries(self.directory)]
        total = 0
        for stays, _, path, stat in sorted(entries, reverse=True):
            total += stat.st_size
            if not stays and (total > max_bytes or self._too_old(stat, now)):
                path.unlink(missing_ok=True)
                total -= stat.st_size
                self.removed += 1
        return total

    def size(self) -> tuple[int, int]:
        """The number of files in the directory, of all models and processes, and their bytes."""
        sizes = [stat.st_size for _, stat in _entries(self.directory)]
        return len(sizes), sum(sizes)

    def newest(self, identity: bytes) -> list[bytes]:
        """Keys of this model, the most recently used first."""
        listed = sorted(_entries(self.directory), key=lambda entry: entry[1].st_mtime_ns, reverse=True)
        found = [self._files.get(path.name) for path, _ in listed]
        return [file.key for file in found if file is not None and file.key.startswith(identity)]
