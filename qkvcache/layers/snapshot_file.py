"""Snapshots as safetensors files: the entries and pages of a prefix store, and saved caches.

A file is renamed into place, so that it is complete when it appears. It holds parts, which are snapshots. Its header has digests of every
`CHUNK` tokens of each part, so that a reader checks only the tokens that it uses; one more digest covers the header. Digests detect
damage and mistakes; they are not a signature.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from .snapshot import Snapshot

VERSION = 6
CHUNK = 4096
"""Tokens that share a digest."""
THREADS = min(os.cpu_count() or 1, 16)
WRITING = ".writing"
"""The end of the name of a folder in which a process writes a file."""


class Damaged(Exception):
    """Raised for a file that was read and must not be loaded, with the reason. A file that cannot be read raises OSError."""


@dataclass(frozen=True)
class Parts:
    """A file whose header was checked. `parts`: kind, numbers and digests of each part by name."""

    path: Path
    parts: dict[str, dict]

    def snapshots(self, only: Collection[str] | None = None) -> dict[str, Snapshot]:
        """The parts, or `only` some of them, unchecked; their tensors are views of the file."""
        with opened(self.path) as handle:
            return self._of(handle, only)

    def _of(self, handle: Any, only: Collection[str] | None = None) -> dict[str, Snapshot]:
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in self.parts if only is None or name in only}
        for name in handle.keys():  # noqa: SIM118  (it is no dictionary)
            part, _, own = name.partition(".")
            if only is None or part in only:
                tensors[part][own] = handle.get_tensor(name)
        return {name: Snapshot(self.parts[name]["kind"], own, self.parts[name]["numbers"]) for name, own in tensors.items()}

    def verify(self, name: str, part: Snapshot, chunks: int | None = None) -> None:
        """Raises Damaged if the first `chunks` chunks of a part are not what was written; None: all."""
        if _sums(part, chunks) != self.parts[name]["sums"][:chunks]:
            raise Damaged(f"the contents of {f'layer {name}' if name[:1].isdigit() else name} were changed")

    def checked(self, only: Collection[str] | None = None) -> dict[str, Snapshot]:
        """All parts, or `only` some. Raises Damaged if one is not what was written, OSError if the file cannot be read, FileNotFoundError
        if it was removed."""
        with reading(self.path), opened(self.path) as handle:
            return self._checked(handle, only)

    def _checked(self, handle: Any, only: Collection[str] | None = None) -> dict[str, Snapshot]:
        parts = self._of(handle, only)
        for name, part in parts.items():
            self.verify(name, part)
        return parts


def write(
    path: Path,
    what: str,
    parts: Mapping[str, Snapshot],
    header: dict[str, Any],
    bound: str = "",
    room: Callable[[int], None] | None = None,
) -> None:
    """Writes a file of `parts`, as `save` does. Their tensors are contiguous, in host memory.

    Args:
        what: the kind of file, for `read_header`.
        bound: a name that the reader must give too.
        header: what `read_header` returns, beside the parts.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(_sums, parts.values())
        described = {name: {"kind": x.kind, "numbers": x.numbers, "sums": y} for (name, x), y in zip(parts.items(), sums, strict=True)}
    text = json.dumps(header | {"parts": described})
    metadata = {what: str(VERSION), "header": text, "digest": _digest(bound, text)}
    save(path, {f"{name}.{own}": x for name, part in parts.items() for own, x in part.tensors.items()}, metadata, room)


def read_header(path: Path, what: str, words: str, bound: str = "") -> dict[str, Any]:
    """Reads and checks the header of a file, with the description of its `parts`. `what` and `bound`: as they were written; `words`: the
    kind of file in words. Raises Damaged for a file that is foreign, incomplete or bound to another name, OSError for one that cannot be
    read, FileNotFoundError if there is none."""
    with reading(path), opened(path) as handle:
        return _header(handle.metadata(), what, words, bound)


def read_whole(path: Path, what: str, words: str, bound: str = "") -> dict[str, Snapshot]:
    """All parts of a file, checked, in memory of their own; arguments and errors: see `read_header`. An error of the device is an
    OSError here; a mapped file would end the process."""
    with reading(path), _opened(path) as descriptor:
        data = bytearray(os.fstat(descriptor).st_size)
        with open(descriptor, "rb", closefd=False) as file:
            size = file.readinto(data)
        found = _InMemory(bytes(data[:size]))
        return Parts(path, _header(found.metadata(), what, words, bound)["parts"])._checked(found)


class _InMemory:
    """The contents of a safetensors file, with the methods of an open one."""

    def __init__(self, data: bytes):
        self._tensors = load(data)
        self.keys, self.get_tensor = self._tensors.keys, self._tensors.__getitem__
        size = int.from_bytes(data[:8], "little")
        self._metadata = json.loads(data[8 : 8 + size]).get("__metadata__")

    def metadata(self) -> dict[str, str] | None:
        return self._metadata


def _header(metadata: Mapping[str, str] | None, what: str, words: str, bound: str) -> dict[str, Any]:
    metadata = metadata or {}
    version = metadata.get(what)
    if version is None:
        raise Damaged(f"it is no {words}")
    if version != str(VERSION):
        raise Damaged(f"it has version {version[:20]}, this release reads version {VERSION}: upgrade qkvcache, or remove the file")
    if metadata.get("digest") != _digest(bound, metadata["header"]):
        raise Damaged("its header was changed" + (", or its name belongs to another file" if bound else ""))
    return json.loads(metadata["header"])


def save(final: Path, tensors: dict[str, Tensor], metadata: dict[str, str], room: Callable[[int], None] | None = None) -> None:
    """Writes a safetensors file into a folder of this process and renames it; it survives a crash of the system once this returns. Raises
    OSError if that fails, and leaves no part of it. `room` is called with its size before the renaming."""
    folder = final.parent / f"{uuid4().hex}{WRITING}"  # safetensors makes temporary files of its own
    try:
        folder.mkdir(parents=True)
        save_file(tensors, folder / final.name, metadata)
        sync(folder / final.name)
        if room is not None:
            room((folder / final.name).stat().st_size)
        os.replace(folder / final.name, final)
        sync(final.parent)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open and mapped. Raises OSError if the file cannot be opened, and for what is no regular file."""
    with _opened(path):
        try:
            handle = safe_open(path, framework="pt")
        except (OSError, RuntimeError) as error:  # of torch, which opens the file once more
            raise OSError(f"it cannot be opened again: {error}") from error
    with handle:
        yield handle


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a regular file. Raises OSError for another one: a FIFO would wait for a writer, for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A context in which errors of a file's contents become Damaged, or FileNotFoundError if the file was removed. An OSError says that
    the file cannot be read, and nothing of its contents."""
    try:
        yield
    except (SafetensorError, OSError, MemoryError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        if not path.exists():  # another process removed it before it was opened or mapped
            raise FileNotFoundError(path) from error
        if isinstance(error, OSError):
            raise
        if isinstance(error, MemoryError):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
        raise Damaged(f"it is truncated or damaged ({error})") from error


def tokens_of(part: Snapshot) -> int:
    """The number of columns of the longest tensor of a part."""
    return max((x.shape[2] for x in part.tensors.values() if x.ndim == 4 and x.numel()), default=0)


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory as a numpy array, a view if its last dimension is contiguous. numpy copies
    in the calling thread; torch would start a team of threads and wait for busy ones."""
    x = x.detach() if x.ndim else x.detach()[None]
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()


def _digest(bound: str, header: str) -> str:
    return xxhash.xxh3_128((bound + header).encode()).hexdigest()


def _sums(part: Snapshot, chunks: int | None = None) -> list[str]:
    """Digests of the first `chunks` chunks; None: of all. The first digest also covers names, shapes and tensors
    without a token dimension."""
    tensors = sorted(part.tensors.items())
    arrays = [as_bytes(x) for _, x in tensors if x.numel()]
    text = "".join(f"{name} {x.dtype} {list(x.shape)} " for name, x in tensors)
    sums = []
    for begin in range(0, tokens_of(part) or 1, CHUNK)[:chunks]:
        digest = xxhash.xxh3_128(b"" if begin else text.encode())  # as fast as files are read
        for x in arrays:
            piece = x[:, :, begin : begin + CHUNK] if x.ndim == 4 else x[: 0 if begin else None]
            if piece.size:
                digest.update(numpy.ascontiguousarray(piece).data)
        sums.append(digest.hexdigest())
    return sums
