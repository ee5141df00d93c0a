"""Entries, and pages of continuous batching, as safetensors files in a directory that any number of processes share.

A file name consists of the names of the model and of the cache template, and a digest of the tokens, so that the directory is the index.
A file is renamed into place, so that it is complete when it appears. It holds parts, which are snapshots: layers, checkpoints and token
ids, or a page. Its header has digests of every `CHUNK` tokens of each part, so that a fetch reads and checks only the tokens that it
matched; one more digest covers the header and the file name. Digests detect damage and mistakes; they are not a signature.

A file is used by setting its time of modification. A file that stays whatever its age and the room has an empty file beside it,
of its name and `PINNED`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..layers.snapshot import Snapshot
from . import match
from .entry import CacheTemplate, Checkpoints, Entry
from .host_memory import THREADS, Blocks, as_bytes

VERSION = 6
CHUNK = 4096
"""Tokens that share a digest."""
AHEAD = min(THREADS, 5)
"""Layers that are read into `Blocks` at a time; one more block holds the layer in use. New blocks are locked one after
another, and locking one takes about as long as a thread needs for a layer: more blocks come too late to help, and with
fewer the bus waits."""
SUFFIX, WRITING, PINNED = ".safetensors", ".writing", ".pinned"
LONGEST_WRITE = 3600
"""Seconds after which a folder that a process writes into counts as left by a killed process."""
IDS, PAGE = "ids", "page"
"""The names of the parts that are no layers."""
Copy = Callable[[Snapshot], Snapshot]
_NAME = re.compile(r"([0-9a-f]{32}-){2}[0-9a-f]{32}\.safetensors")


class Damaged(Exception):
    """Raised for a file that must not be loaded, with the reason."""


@dataclass(frozen=True)
class File:
    """A file whose header was checked. `key` of an entry; `text` describes the cache or the page, `model` the model; `whole`: whether the
    entry is cut at checkpoints alone; `parts`: kind, numbers and digests of each part, by layer, or layer and tokens of a checkpoint."""

    path: Path
    key: bytes
    text: str
    model: str
    tokens: int
    whole: bool
    parts: dict[str, dict]

    @cached_property
    def cuts(self) -> match.Cuts:
        """The numbers of tokens to which it can be cut, of its checkpoints and of all; None: any."""
        return (*sorted({int(name.partition("@")[2]) for name in self.parts if "@" in name}), self.tokens) if self.whole else None

    def snapshots(self) -> dict[str, Snapshot]:
        """The parts, unchecked, whose tensors are views of the file."""
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.parts}
        with safe_open(self.path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (it is no dictionary)
                part, _, own = name.partition(".")
                tensors[part][own] = handle.get_tensor(name)
        return {name: Snapshot(x["kind"], tensors[name], x["numbers"]) for name, x in self.parts.items()}

    def layers(self, template: CacheTemplate | None) -> tuple[list[Snapshot], Checkpoints]:
        """The layers and the checkpoints of an entry, of which names, shapes and counts are checked if `template` is given."""
        parts = self.snapshots()
        layers = [parts[str(i)] for i in range(sum(map(str.isdigit, parts)))]
        checkpoints = {at: [parts.get(f"{i}@{at}") for i in range(len(layers))] for at in (self.cuts or ())[:-1]}
        if template is not None:
            template.check(layers, self.tokens, checkpoints)
        return layers, checkpoints

    def verify(self, name: str, part: Snapshot, chunks: int | None = None) -> None:
        """Raises Damaged if the first `chunks` chunks of a part are not what was written; None: all."""
        if _sums(part, chunks) != self.parts[name]["sums"][:chunks]:
            raise Damaged(f"the contents of {name if name in (IDS, PAGE) else f'layer {name}'} were changed")

    def checked(self) -> dict[str, Snapshot]:
        """All parts. Raises Damaged if one is not what was written, FileNotFoundError if the file was removed."""
        with _reading(self.path):
            parts = self.snapshots()
            for name, part in parts.items():
                self.verify(name, part)
        return parts


def file_name(key: bytes) -> str:
    """The file name of an entry: the model's name, the template's name and a digest of the tokens, in hex."""
    half = match.NAME // 2
    return f"{key[:half].hex()}-{key[half : match.NAME].hex()}-{hashlib.blake2b(key, digest_size=16).hexdigest()}{SUFFIX}"


def save(final: Path, tensors: dict[str, Tensor], metadata: dict[str, str], room: Callable[[int], None] | None = None) -> None:
    """Writes a safetensors file into a folder of this process and renames it; it survives a crash of the system once this returns. Raises
    OSError if that fails, and leaves no part of it. `room` is called with its size before the renaming."""
    folder = final.parent / f"{uuid4().hex}{WRITING}"  # safetensors makes temporary files of its own
    try:
        folder.mkdir(parents=True)
        save_file(tensors, folder / final.name, metadata)
        _sync(folder / final.name)
        if room is not None:
            room((folder / final.name).stat().st_size)
        os.replace(folder / final.name, final)
        _sync(final.parent)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which errors become FileNotFoundError if the file was removed, else Damaged."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        if not path.exists():  # another process removed it before it was opened or mapped
            raise FileNotFoundError(path) from error
        raise Damaged(f"it is truncated or damaged ({error})") from error


def read_header(path: Path) -> File:
    """Reads and checks the header, and the token ids of an entry. Raises Damaged for a file that is foreign, incomplete or of another name;
    FileNotFoundError if the file was removed."""
    with _reading(path), safe_open(path, framework="pt") as handle:
        metadata = handle.metadata() or {}
        version = metadata.get("qkvcache_prefix")
        if version is None:
            raise Damaged("it is no prefix entry")
        if version != str(VERSION):
            raise Damaged(f"it has version {version[:20]}, this release reads version {VERSION}: upgrade qkvcache, or remove the file")
        if metadata.get("digest") != _digest(path, metadata["header"]):
            raise Damaged("its header was changed, or its name belongs to another file")
        file = File(path, b"", **json.loads(metadata["header"]))
        if IDS not in file.parts:
            return file
        ids = handle.get_tensor(f"{IDS}.{IDS}")
        file.verify(IDS, Snapshot(IDS, {IDS: ids}))
        file = replace(file, key=match.encode(bytes.fromhex(path.name[:65].replace("-", "")), ids))
        if path.name != file_name(file.key) or file.tokens != match.length(file.key) or max(file.cuts or [0]) > file.tokens:
            raise Damaged(f"it has other token ids than its name says, or cuts at {file.cuts}")
        return file


def read(file: File, tokens: int | None = None, copy: Copy | None = None, template: CacheTemplate | None = None) -> Iterator[Snapshot]:
    """Yields the layers of an entry in order, cut to the first `tokens` tokens and checked. Their tensors are views of
    the file, of which only the used part is read, or the result of `copy`, which runs in the thread that checked the
    layer. Raises Damaged if the contents were changed, or if the layers cannot be those of `template`.

    With `Blocks`, drop all references to a layer before asking for the second layer after it; otherwise its block is
    not reused."""
    with _reading(file.path):
        layers, checkpoints = file.layers(template)
    states = checkpoints.get(tokens or 0, [None] * len(layers))

    def checked(i: int) -> Snapshot:
        part, own = layers[i], states[i]
        with _reading(file.path):
            if own is not None:
                file.verify(f"{i}@{tokens}", own)
            if tokens not in (None, file.tokens):
                part = part.cut(tokens, own)
            if part is not own:
                file.verify(str(i), layers[i], None if part is layers[i] else -(-_tokens(part) // CHUNK) or 1)
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
    with _reading(file.path):
        found = {at: layers for at, layers in file.layers(None)[1].items() if at <= most}
        for at, layers in found.items():
            for i, own in enumerate(layers):
                if own is not None:
                    file.verify(f"{i}@{at}", own)
        return {at: [copy(x) if x and copy else x for x in layers] for at, layers in found.items()}


def files(directory: Path) -> list[os.DirEntry]:
    """The files that may be entries; none if the directory was removed."""
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []


def _entries(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The entries in a directory that no other process removes meanwhile."""
    for entry in files(directory):
        with suppress(FileNotFoundError):
            if _NAME.fullmatch(entry.name):
                yield Path(entry.path), entry.stat()


def _digest(path: Path, header: str) -> str:
    return xxhash.xxh3_128((path.name + header).encode()).hexdigest()


def _sums(layer: Snapshot, chunks: int | None = None) -> list[str]:
    """Digests of the first `chunks` chunks; None: of all. The first digest also covers names, shapes and tensors
    without a token dimension."""
    tensors = sorted(layer.tensors.items())
    arrays = [as_bytes(x) for _, x in tensors if x.numel()]
    text = "".join(f"{name} {x.dtype} {list(x.shape)} " for name, x in tensors)
    sums = []
    for begin in range(0, _tokens(layer) or 1, CHUNK)[:chunks]:
        digest = xxhash.xxh3_128(b"" if begin else text.encode())  # as fast as files are read
        for x in arrays:
            part = x[:, :, begin : begin + CHUNK] if x.ndim == 4 else x[: 0 if begin else None]
            if part.size:
                digest.update(numpy.ascontiguousarray(part).data)
        sums.append(digest.hexdigest())
    return sums


def _tokens(layer: Snapshot) -> int:
    return max((x.shape[2] for x in layer.tensors.values() if x.ndim == 4 and x.numel()), default=0)


class DiskStore:
    """The entries and pages in `directory` that one process may use; all files in it together take at most `max_bytes`. Files that nobody
    used for `time_to_live` seconds are removed, too, unless it is None. The directory is created if missing. Headers have the type of the
    `model`.

    Raises ValueError if the directory cannot be created or written.
    """

    def __init__(self, directory: Path, max_bytes: int, model: str, time_to_live: float | None = None):
        self.directory, self.max_bytes, self.model, self.time_to_live = directory, max_bytes, model, time_to_live
        self.skipped: Counter[str] = Counter()
        self.evicted = 0
        self._files: dict[str, File | None] = {}
        """Files of entries by name; None for skipped ones."""
        self._lock, self._room = threading.Lock(), 0
        """`_room`: the bytes of pages that are written before the directory is listed again."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
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
        _sync(self.directory)

    def is_pinned(self, name: str) -> bool:
        return (self.directory / f"{name}{PINNED}").exists()

    def touch(self, name: str, time_ns: int) -> bool:
        """Marks a file as used at a time. Returns whether there is one; removes one that is too old."""
        path = self.directory / name
        try:
            if self._too_old(path.stat().st_mtime) and not self.is_pinned(name):
                path.unlink()
                self.evicted += 1
                return False
            os.utime(path, ns=(time_ns, time_ns))
        except FileNotFoundError:
            return False
        except PermissionError:  # the file of another user, who marks it
            pass
        return True

    def _too_old(self, used: float) -> bool:
        return self.time_to_live is not None and used < time.time() - self.time_to_live

    def read_page(self, name: str) -> Tensor | None:
        """A page, or None if there is none. A damaged file is removed: its page is computed and written again."""
        path = self.directory / name
        try:
            return read_header(path).checked()[PAGE].tensors[PAGE]
        except FileNotFoundError:
            return None
        except Damaged as error:
            warnings.warn(f"{path} is removed: {error}", stacklevel=2)
            path.unlink(missing_ok=True)
            return None

    def write_page(self, name: str, page: Snapshot, text: str, tokens: int) -> str | None:
        """Writes a page. Returns None, or the reason why it was not written.

        To make room, a 32nd of the budget is freed at once, so that the directory is not listed for each page.
        """
        return self._write(name, {PAGE: page}, self.max_bytes // 32, text=text, tokens=tokens, whole=False)

    def read(self, key: bytes, tokens: int, copy: Copy | None, template: CacheTemplate) -> Iterator[Snapshot]:
        """The first `tokens` tokens of an entry of `template`, layer by layer, as `read` returns them. Raises Damaged
        if the file is damaged or was removed; the entry is then not used again."""
        name = file_name(key)
        file: File = self._files[name]  # type: ignore[assignment]
        try:
            yield from read(file, tokens, copy, template)
            os.utime(file.path)  # marks it as used
        except FileNotFoundError as error:
            self._files.pop(name, None)
            raise Damaged("it is gone") from error
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
        with ThreadPoolExecutor(THREADS) as pool:
            sums = pool.map(_sums, parts.values())
            described = {part: {"kind": x.kind, "numbers": x.numbers, "sums": y} for (part, x), y in zip(parts.items(), sums, strict=True)}
        text, path = json.dumps(header | {"model": self.model, "parts": described}), self.directory / name
        metadata = {"qkvcache_prefix": str(VERSION), "header": text, "digest": _digest(path, text)}
        tensors = {f"{part}.{own}": x for part, layer in parts.items() for own, x in layer.tensors.items()}
        try:
            save(path, tensors, metadata, partial(self._make_room, spare))
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
        for folder in self.directory.glob(f"*{WRITING}"):
            with suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime > LONGEST_WRITE:
                    shutil.rmtree(folder, ignore_errors=True)
        pinned = {path.stem for path in self.directory.glob(f"*{PINNED}")}
        entries = [(path.name in pinned, stat.st_mtime_ns, path, stat) for path, stat in _entries(self.directory)]
        total = 0
        for stays, _, path, stat in sorted(entries, reverse=True):
            total += stat.st_size
            if not stays and (total > max_bytes or self._too_old(stat.st_mtime)):
                path.unlink(missing_ok=True)
                total -= stat.st_size
                self.evicted += 1
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
