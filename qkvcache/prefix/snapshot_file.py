"""Snapshots as safetensors files: the entries and pages of a prefix store, and saved caches.

A file is renamed into place, so that it is complete when it appears. It holds parts, which are snapshots. Its header has digests of every
`CHUNK` tokens of each part, so that a reader checks only the tokens that it uses; one more digest covers the header. Digests detect
damage and mistakes; they are not a signature.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import xxhash
from safetensors.torch import load
from torch import Tensor

from ..files import THREADS, Damaged, as_bytes, descriptor_of, opened, reading, save
from .snapshot import Snapshot

VERSION = 6
CHUNK = 4096
"""Tokens that share a digest."""


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
    with reading(path), descriptor_of(path) as descriptor:
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


def tokens_of(part: Snapshot) -> int:
    """The number of columns of the longest tensor of a part."""
    return max((x.shape[2] for x in part.tensors.values() if x.ndim == 4 and x.numel()), default=0)


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
