"""Entries as files: one safetensors file each, in a directory that any number of processes share.

A file's name says who may use it: model, kind of cache, tokens. So the directory is the index, there is nothing to keep in step, and what
appears was whole when it was renamed. The header holds a digest of itself and digests of every layer, for each `CHUNK` tokens apart, so
that a fetch reads and checks only what it matched. They find damage and mistakes; they are no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..layers.snapshot import Snapshot
from . import match
from .entry import Entry
from .place import raw

VERSION = 1
CHUNK = 4096
"""Tokens that are checked together."""
READERS = min(os.cpu_count() or 1, 16)
SUFFIX, WRITING = ".safetensors", ".writing"
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{32})\.safetensors")


class Damaged(Exception):
    """A file that must not be loaded; says why."""


@dataclass(frozen=True)
class File:
    """What the header of an entry's file says. `text` describes the cache that it was stored from, `model` the model."""

    path: Path
    key: bytes
    mould: bytes
    text: str
    model: str
    whole: bool
    errors: tuple[float, ...]
    layers: list[dict]

    @property
    def tokens(self) -> int:
        return match.length(self.key)

    @property
    def nbytes(self) -> int:
        return self.path.stat().st_size


def file_name(key: bytes, mould: bytes) -> str:
    tokens = hashlib.blake2b(key, digest_size=16).hexdigest()
    return f"{key[: match.NAME].hex()}-{mould.hex()}-{tokens}{SUFFIX}"


def write(directory: Path, entry: Entry, model: str) -> Path:
    """Writes the entry into a folder of this process, then moves it out. Raises OSError if it cannot; no half of a file is left then."""
    tensors = {f"{i}.{name}": x for i, layer in enumerate(entry.layers) for name, x in layer.tensors.items()}
    with ThreadPoolExecutor(READERS) as pool:
        sums = list(pool.map(_sums, entry.layers))
    header = {
        "mould": entry.mould.name.hex(),
        "text": entry.mould.text,
        "model": model,
        "identity": entry.key[: match.NAME].hex(),
        "whole": entry.whole,
        "errors": entry.errors,
        "layers": [{"kind": x.kind, "numbers": x.numbers, "sums": y} for x, y in zip(entry.layers, sums, strict=True)],
    }
    text = json.dumps(header)
    ids = match.decode(entry.key).int()
    metadata = {"qkvcache_prefix": str(VERSION), "header": text, "digest": _digest(text.encode(), ids)}
    final = directory / file_name(entry.key, entry.mould.name)
    own = directory / f"{platform.node()}.{os.getpid()}.{uuid4().hex}{WRITING}"  # a folder: safetensors makes temporary files of its own
    try:
        own.mkdir(parents=True)
        save_file(tensors | {"ids": ids}, own / final.name, metadata)
        os.replace(own / final.name, final)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return final


def read_header(path: Path) -> File:
    """Raises Damaged for what is no entry, not a whole one, or not the one that its name says; FileNotFoundError if it is gone."""
    with _opened(path) as file:
        metadata = file.metadata() or {}
        version = metadata.get("qkvcache_prefix")
        if version is None:
            raise Damaged("it is no prefix entry")
        if version != str(VERSION):
            raise Damaged(f"it has version {version[:20]}, this release reads version {VERSION}: upgrade qkvcache, or remove the file")
        ids = file.get_tensor("ids").clone()
        if metadata.get("digest") != _digest(metadata["header"].encode(), ids):
            raise Damaged("its header was changed")
        header = json.loads(metadata["header"])
        key = match.encode(bytes.fromhex(header["identity"]), ids)
        layers, errors = header["layers"], tuple(header["errors"])
        found = File(path, key, bytes.fromhex(header["mould"]), header["text"], header["model"], header["whole"], errors, layers)
    if path.name != file_name(found.key, found.mould):
        raise Damaged("its name belongs to another entry")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """The file, opened; what goes wrong with it meanwhile raises FileNotFoundError if it is gone, else Damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        if not path.exists():  # another process removed it: before it was opened, or before torch mapped it
            raise FileNotFoundError(path) from error
        raise Damaged(f"it is truncated or damaged ({error})") from error


def read(file: File, tokens: int | None = None) -> Iterator[Snapshot]:
    """The layers of a file in order, each cut to the first `tokens` tokens and checked. Their tensors are views of the file, of which only
    what is used is read. Raises Damaged where a digest does not fit."""
    with _opened(file.path) as handle:
        names: list[list[str]] = [[] for _ in file.layers]
        for name in handle.keys():  # noqa: SIM118  (it is no dictionary)
            if name != "ids":
                names[int(name.split(".")[0])].append(name)
        held = [
            Snapshot(layer["kind"], {name.partition(".")[2]: handle.get_tensor(name) for name in own}, layer["numbers"])
            for layer, own in zip(file.layers, names, strict=True)
        ]
        cut = held if tokens in (None, file.tokens) else [layer.cut(tokens) for layer in held]  # type: ignore[arg-type]
    with ThreadPoolExecutor(READERS) as pool:
        checks = pool.map(_fits, held, cut, [layer["sums"] for layer in file.layers])
        for i, (fits, layer) in enumerate(zip(checks, cut, strict=True)):
            if not fits:
                raise Damaged(f"the contents of layer {i} were changed")
            yield layer


def files(directory: Path) -> list[os.DirEntry]:
    """Every file that could be an entry; none if the directory is gone."""
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []


def parts(name: str) -> tuple[bytes, bytes] | None:
    """Whose entry a file is by its name, and of which kind of cache; None if the name is not of an entry."""
    fits = _NAME.fullmatch(name)
    return (bytes.fromhex(fits[1]), bytes.fromhex(fits[2])) if fits else None


def label(name: str) -> str:
    """What tells the entry of this file name from others: the digest of its tokens."""
    return name.removesuffix(SUFFIX).rpartition("-")[2]


def trim(directory: Path, max_bytes: int) -> int:
    """Removes what killed processes left, then the entries that were used longest ago, until the rest fits; returns how many entries."""
    for path in directory.glob(f"*{WRITING}"):
        if _stale(path):
            shutil.rmtree(path, ignore_errors=True)
    found = sorted(
        ((s.st_mtime_ns, s.st_size, entry.path) for entry in files(directory) if parts(entry.name) and (s := _stat(entry))), reverse=True
    )
    total = removed = 0
    for _, size, path in found:
        total += size
        if total > max_bytes:
            Path(path).unlink(missing_ok=True)
            total -= size
            removed += 1
    return removed


def size(directory: Path) -> tuple[int, int]:
    """Entries in the directory, and their bytes."""
    sizes = [s.st_size for entry in files(directory) if parts(entry.name) and (s := _stat(entry))]
    return len(sizes), sum(sizes)


def _stat(entry: os.DirEntry) -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:  # another process removed it
        return None


def _stale(path: Path) -> bool:
    """Whether nobody writes into this folder any more."""
    try:
        host, pid, _, _ = path.name.rsplit(".", 3)
        if host == platform.node():
            os.kill(int(pid), 0)
        return time.time() - path.stat().st_mtime > 86_400
    except PermissionError:  # of another user, and alive
        return False
    except (ProcessLookupError, ValueError):
        return True
    except FileNotFoundError:
        return False


def _digest(text: bytes, ids: Tensor) -> str:
    return hashlib.blake2b(text + ids.numpy().tobytes(), digest_size=16).hexdigest()


def _sums(layer: Snapshot, chunks: int | None = None) -> list[str]:
    """Digests of the first chunks, or of all. The first one covers what has no tokens, and that there is nothing else."""
    tensors = sorted(layer.tensors.items())
    arrays = [raw(x) for _, x in tensors if x.numel()]
    text = "".join(f"{name} {x.dtype} {list(x.shape)} " for name, x in tensors)
    sums = []
    for begin in range(0, _tokens(layer) or 1, CHUNK)[:chunks]:
        digest = xxhash.xxh3_128(b"" if begin else text.encode())  # as fast as the files come
        for x in arrays:
            part = x[:, :, begin : begin + CHUNK] if x.ndim == 4 else x[: 0 if begin else None]
            if part.size:
                digest.update(numpy.ascontiguousarray(part).data)
        sums.append(digest.hexdigest())
    return sums


def _tokens(layer: Snapshot) -> int:
    return max((x.shape[2] for x in layer.tensors.values() if x.ndim == 4), default=0)


def _fits(layer: Snapshot, cut: Snapshot, sums: list[str]) -> bool:
    """Whether the chunks of `layer` that `cut` takes tokens from are as they were written."""
    chunks = None if layer is cut else -(-_tokens(cut) // CHUNK) or 1
    return _sums(layer, chunks) == sums[:chunks]
