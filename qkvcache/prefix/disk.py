"""Entries as safetensors files in a directory that any number of processes share.

A file name consists of the name of the model, the name of the cache template and a digest of the tokens, so that the
directory is the index. A file is renamed into place, so that it is complete when it appears. Its header has a digest of
itself and, for every layer, a digest of each `CHUNK` tokens, so that a fetch reads and checks only the tokens that it
matched. Digests detect damage and mistakes; they are not a signature.

A file is used by setting its time of modification. A file that stays whatever its age and the room has an empty file beside it,
of its name and `PINNED`.

A page of continuous batching (`pages.py`) is a file of the same directory, with a name of the same form and one tensor.
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
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy
import torch
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
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{32})\.safetensors")


class Damaged(Exception):
    """Raised for a file that must not be loaded, with the reason."""


@dataclass(frozen=True)
class File:
    """The header of an entry's file. `text` describes the template, `model` the model; `cuts` are those of the entry; `checkpoints`
    describes them by tokens and layer; `digest` covers the header and the token ids."""

    path: Path
    key: bytes
    template: bytes
    text: str
    model: str
    cuts: match.Cuts
    layers: list[dict]
    checkpoints: dict[int, dict[int, dict]]
    digest: str

    @property
    def tokens(self) -> int:
        return match.length(self.key)


def file_name(key: bytes, template: bytes) -> str:
    """The file name of an entry: the model's name, the template's name and a digest of the tokens, in hex."""
    tokens = hashlib.blake2b(key, digest_size=16).hexdigest()
    return f"{key[: match.NAME].hex()}-{template.hex()}-{tokens}{SUFFIX}"


def write(directory: Path, entry: Entry, model: str) -> File:
    """Writes the entry into a folder of this process and moves the file into `directory`. Raises OSError if that fails,
    and leaves no part of a file."""
    parts = {str(i): layer for i, layer in enumerate(entry.layers)}
    parts |= {f"{i}@{at}": x for at, layers in entry.checkpoints.items() for i, x in enumerate(layers) if x is not None}
    tensors = {f"{part}.{name}": x for part, layer in parts.items() for name, x in layer.tensors.items()}
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(_sums, parts.values())
        described = {p: {"kind": x.kind, "numbers": x.numbers, "sums": y} for (p, x), y in zip(parts.items(), sums, strict=True)}
    header = {
        "template": entry.template.name.hex(),
        "text": entry.template.text,
        "model": model,
        "identity": entry.key[: match.NAME].hex(),
        "cuts": entry.cuts,
        "layers": [described.pop(str(i)) for i in range(len(entry.layers))],
        "checkpoints": described,
    }
    text, ids = json.dumps(header), match.decode(entry.key).int()
    digest = _digest(text.encode(), ids)
    metadata = {"qkvcache_prefix": str(VERSION), "header": text, "digest": digest}
    final = save(directory / file_name(entry.key, entry.template.name), tensors | {"ids": ids}, metadata)
    return _file(final, header, ids, digest)


def save(final: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Writes a file, which survives a crash of the system once this returns. Raises OSError if that fails, and leaves
    no part of it."""
    folder = final.parent / f"{uuid4().hex}{WRITING}"  # safetensors makes temporary files of its own
    try:
        folder.mkdir(parents=True)
        save_file(tensors, folder / final.name, metadata)
        _sync(folder / final.name)
        os.replace(folder / final.name, final)
        _sync(final.parent)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return final


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file(path: Path, header: dict, ids: Tensor, digest: str) -> File:
    """The `File` of a header. Raises ValueError, LookupError or TypeError unless all parts are present and have their
    types."""
    layers, cuts, checkpoints = header["layers"], header["cuts"], dict[int, dict[int, dict]]()
    described = [*layers, *header["checkpoints"].values()]
    if not all(isinstance(x["kind"], str) and isinstance(x["numbers"], dict) and isinstance(x["sums"], list) for x in described):
        raise ValueError("its layers have no kinds, counts or digests")
    for part, layer in header["checkpoints"].items():
        i, at = map(int, part.split("@"))
        checkpoints.setdefault(at, {})[i] = layer
    if cuts is not None and not {*cuts} <= {*checkpoints, len(ids)}:
        raise ValueError(f"cuts at {cuts} with checkpoints at {sorted(checkpoints)}")
    if ids.dtype is not torch.int32 or ids.ndim != 1 or not all(isinstance(header[name], str) for name in ("text", "model")):
        raise ValueError("no token ids, no text or no model")
    key = match.encode(bytes.fromhex(header["identity"]), ids)
    template, text, model = bytes.fromhex(header["template"]), header["text"], header["model"]
    return File(path, key, template, text, model, cuts, layers, checkpoints, digest)


def read_header(path: Path) -> File:
    """Reads and checks the header. Raises Damaged for a file that is not an entry, is incomplete or does not match its
    name; FileNotFoundError if the file was removed."""
    with _opened(path) as handle:
        metadata = handle.metadata() or {}
        version = metadata.get("qkvcache_prefix")
        if version is None:
            raise Damaged("it is no prefix entry")
        if version != str(VERSION):
            raise Damaged(f"it has version {version[:20]}, this release reads version {VERSION}: upgrade qkvcache, or remove the file")
        ids, text = handle.get_tensor("ids").clone(), metadata["header"]
        if metadata.get("digest") != _digest(text.encode(), ids):
            raise Damaged("its header was changed")
        found = _file(path, json.loads(text), ids, metadata["digest"])
    if path.name != file_name(found.key, found.template):
        raise Damaged("its name belongs to another entry")
    return found


@dataclass(frozen=True)
class PageFile:
    """The header of a page's file. `text` describes the page, `model` the model, `digest` covers the file's name and the
    bytes of the page."""

    path: Path
    text: str
    model: str
    tokens: int
    digest: str
    cuts: match.Cuts = None


def write_page(path: Path, page: Tensor, text: str, model: str, tokens: int) -> None:
    """Writes the bytes of a page. Raises OSError if that fails, and leaves no part of a file."""
    header = {"text": text, "model": model, "tokens": tokens, "digest": _page_digest(path, page)}
    save(path, {"page": page}, {"qkvcache_page": json.dumps(header)})


def page_header(path: Path) -> PageFile | None:
    """The header of a page's file, None for another file. Raises Damaged and FileNotFoundError as `read_header` does."""
    with _opened(path) as handle:
        header = (handle.metadata() or {}).get("qkvcache_page")
        return header and PageFile(path, **json.loads(header))


def read_page(path: Path) -> Tensor:
    """The bytes of a page, a view of the file, checked. Raises Damaged for a file that is no page, is incomplete or belongs
    to another name; FileNotFoundError if there is none."""
    with _opened(path) as handle:
        header, page = json.loads((handle.metadata() or {})["qkvcache_page"]), handle.get_tensor("page")
        if header["digest"] != _page_digest(path, page):
            raise Damaged("its contents were changed")
    return page


def _page_digest(path: Path, page: Tensor) -> str:
    digest = xxhash.xxh3_128(path.name.encode())
    digest.update(as_bytes(page).data)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """A context with the open file. Errors inside become FileNotFoundError if the file was removed, else Damaged."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        if not path.exists():  # another process removed it before it was opened or mapped
            raise FileNotFoundError(path) from error
        raise Damaged(f"it is truncated or damaged ({error})") from error


def read(
    file: File,
    tokens: int | None = None,
    copy: Callable[[Snapshot], Snapshot] | None = None,
    template: CacheTemplate | None = None,
) -> Iterator[Snapshot]:
    """Yields the layers of a file in order, cut to the first `tokens` tokens and checked. Their tensors are views of
    the file, of which only the used part is read, or the result of `copy`, which runs in the thread that checked the
    layer. Raises Damaged if a digest does not match, if another file has replaced the one of this header, or if its
    layers cannot be those of `template`.

    With `Blocks`, drop all references to a layer before asking for the second layer after it; otherwise its block is
    not reused."""
    with _opened(file.path) as handle:
        whole, checkpoints = _contents(handle, file, template)
        earlier = checkpoints.get(tokens or 0, [None] * len(whole))
        cut = whole if tokens in (None, file.tokens) else [layer.cut(tokens, x) for layer, x in zip(whole, earlier, strict=True)]

    def checked(i: int) -> Snapshot:
        chunks = None if cut[i] is whole[i] else -(-_tokens(cut[i]) // CHUNK) or 1
        if (own := earlier[i]) is not None:
            _check_sums(own, file.checkpoints[tokens or 0][i], f"layer {i} at {tokens} tokens")
        if cut[i] is not own:
            _check_sums(whole[i], file.layers[i], f"layer {i}", chunks)
        return copy(cut[i]) if copy else cut[i]

    readers = AHEAD if isinstance(copy, Blocks) else THREADS
    with ThreadPoolExecutor(readers) as pool:
        running: deque[Future[Snapshot]] = deque()
        for i in range(len(cut)):
            if len(running) == readers:  # the most copies at a time
                yield running.popleft().result()
            running.append(pool.submit(checked, i))
        while running:
            yield running.popleft().result()


def read_checkpoints(
    file: File, most: int, copy: Callable[[Snapshot], Snapshot] | None = None, template: CacheTemplate | None = None
) -> Checkpoints:
    """The checkpoints of a file at up to `most` tokens, as `read` gives layers. Raises Damaged as it does."""
    found: Checkpoints = {}
    with _opened(file.path) as handle:
        for at, layers in _contents(handle, file, template)[1].items():
            if at <= most:
                for i, own in enumerate(layers):
                    if own is not None:
                        _check_sums(own, file.checkpoints[at][i], f"layer {i} at {at} tokens")
                found[at] = [copy(x) if x and copy else x for x in layers]
    return found


def _contents(handle: safe_open, file: File, template: CacheTemplate | None) -> tuple[list[Snapshot], Checkpoints]:
    """The layers and the checkpoints, whose tensors are views of the file, and which can be those of `template`."""
    if (handle.metadata() or {}).get("digest") != file.digest:
        raise Damaged("it was replaced by something else")
    names = ["ids", *map(str, range(len(file.layers))), *(f"{i}@{at}" for at, layers in file.checkpoints.items() for i in layers)]
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for name in handle.keys():  # noqa: SIM118  (it is no dictionary)
        part, _, own = name.partition(".")
        tensors[part][own] = handle.get_tensor(name)
    whole = [Snapshot(x["kind"], tensors[str(i)], x["numbers"]) for i, x in enumerate(file.layers)]
    checkpoints: Checkpoints = {at: [None] * len(whole) for at in sorted(file.checkpoints)}
    for at, layers in file.checkpoints.items():
        for i, x in layers.items():
            checkpoints[at][i] = Snapshot(x["kind"], tensors[f"{i}@{at}"], x["numbers"])
    if template is not None:
        template.check(whole, file.tokens, checkpoints)
    return whole, checkpoints


def _check_sums(layer: Snapshot, described: dict, what: str, chunks: int | None = None) -> None:
    if _sums(layer, chunks) != described["sums"][:chunks]:
        raise Damaged(f"the contents of {what} were changed")


def files(directory: Path) -> list[os.DirEntry]:
    """The files that may be entries; none if the directory was removed."""
    try:
        with os.scandir(directory) as found:
            return [entry for entry in found if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []


def parts(name: str) -> tuple[bytes, bytes] | None:
    """The names of the model and of the template in a file name; None if it is not the name of an entry."""
    fits = _NAME.fullmatch(name)
    return (bytes.fromhex(fits[1]), bytes.fromhex(fits[2])) if fits else None


def _entries(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The entries in a directory that no other process removes meanwhile."""
    for entry in files(directory):
        with suppress(FileNotFoundError):
            if parts(entry.name):
                yield Path(entry.path), entry.stat()


def _digest(text: bytes, ids: Tensor) -> str:
    return hashlib.blake2b(text + ids.numpy().tobytes(), digest_size=16).hexdigest()


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
    """The entries in `directory` that one process may use; all entries in it together take at most `max_bytes`. Files that nobody used for
    `time_to_live` seconds are removed, too, unless it is None. The directory is created if missing. `model` is written into headers.

    Raises ValueError if the directory cannot be created or written.
    """

    def __init__(self, directory: Path, max_bytes: int, model: str, time_to_live: float | None = None):
        self.directory, self.max_bytes, self.model, self.time_to_live = directory, max_bytes, model, time_to_live
        self.index = match.Index()
        self.skipped: Counter[str] = Counter()
        self.evicted = 0
        self.headers: dict[bytes, File] = {}
        self._known: dict[str, bytes | None] = {}
        """Keys of the checked files, by file name; None for skipped files."""
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
        for file in list(self.headers.values()):
            self._expire(file.path.name)
        names = {entry.name for entry in files(self.directory)}
        for name in self._known.keys() - names:
            self._forget(name)
        for name in sorted(names - self._known.keys()):
            found = parts(name)
            if found is None:
                self._skip(name, "it is no prefix entry")
            elif found[0] == identity and found[1] in templates and not self._expire(name):
                try:
                    self._add(read_header(self.directory / name))
                except FileNotFoundError:
                    continue
                except Damaged as error:
                    self._skip(name, str(error))

    def _add(self, file: File) -> None:
        self._known[file.path.name] = file.key
        self.headers[file.key] = file
        self.index.add(file.key, file.template, file.cuts)

    def _skip(self, name: str, reason: str) -> None:
        """Warns once; leaves the file in place."""
        self._forget(name)
        self._known[name] = None
        self.skipped[reason] += 1
        warnings.warn(f"{self.directory / name} is skipped: {reason}", stacklevel=5)

    def _forget(self, name: str) -> None:
        key = self._known.pop(name, None)
        if key is not None and key in self.headers and self.headers[key].path.name == name:
            del self.headers[key]
            self.index.remove(key)
            for other in [other for other, same in self._known.items() if same == key]:  # of another template: checked again next time
                del self._known[other]

    def _expire(self, name: str) -> bool:
        """Removes a file that is too old. Returns whether it was."""
        path = self.directory / name
        with suppress(FileNotFoundError):
            if self._too_old(path.stat().st_mtime) and not self.is_pinned(name):
                path.unlink(missing_ok=True)
                self.evicted += 1
                return True
        return False

    def _too_old(self, used: float) -> bool:
        return self.time_to_live is not None and used < time.time() - self.time_to_live

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keeps a file whatever its age and the room, for all processes, or no longer; a crash of the system changes nothing of it once
        this returns."""
        marker = self._marker(name)
        marker.touch() if pinned else marker.unlink(missing_ok=True)
        _sync(self.directory)

    def is_pinned(self, name: str) -> bool:
        return self._marker(name).exists()

    def _marker(self, name: str) -> Path:
        return self.directory / f"{name}{PINNED}"

    def read_page(self, name: str) -> Tensor | None:
        """A page, or None if there is none. A damaged file is removed: its page is computed and written again."""
        try:
            return read_page(self.directory / name)
        except FileNotFoundError:
            return None
        except Damaged as error:
            warnings.warn(f"{self.directory / name} is removed: {error}", stacklevel=2)
            (self.directory / name).unlink(missing_ok=True)
            return None

    def touch(self, name: str, time_ns: int) -> bool:
        """Marks a file as used at a time. Returns whether there is one that is not too old."""
        if self._expire(name):
            return False
        try:
            os.utime(self.directory / name, ns=(time_ns, time_ns))
        except FileNotFoundError:
            return False
        except PermissionError:  # the file of another user, who marks it
            pass
        return True

    def write_page(self, name: str, page: Tensor, text: str, tokens: int) -> str | None:
        """Writes a page. Returns None, or the reason why it was not written.

        To make room, a 32nd of the budget is freed at once, so that the directory is not listed for each page.
        """
        with self._lock:
            self._room -= page.nbytes
            if self._room < 0:
                step = self.max_bytes // 32
                most = self.max_bytes - step - page.nbytes
                if most < 0:
                    return "larger than the whole budget on disk"
                self._room = min(step, most + step - self.trim(most))
        try:
            write_page(self.directory / name, page, text, self.model, tokens)
        except OSError as error:
            return f"writing failed: {error.strerror or error}"
        return None

    def read(self, key: bytes, tokens: int, copy: Callable[[Snapshot], Snapshot] | None, template: CacheTemplate) -> Iterator[Snapshot]:
        """The first `tokens` tokens of an entry of `template`, layer by layer, as `read` returns them. Raises Damaged
        if the file is damaged or was removed; the entry is then not used again."""
        file = self.headers[key]
        try:
            yield from read(file, tokens, copy, template)
            os.utime(file.path)  # marks it as used
        except FileNotFoundError as error:
            self._forget(file.path.name)
            raise Damaged("it is gone") from error
        except Damaged as error:
            self._skip(file.path.name, str(error))
            raise

    def write(self, entry: Entry) -> str | None:
        """Writes an entry and removes entries of its template whose tokens it begins with unless they are pinned. Returns
        None, or the reason why the entry was not written."""
        if entry.nbytes > self.max_bytes:
            return "larger than the whole budget on disk"
        self.trim(self.max_bytes - entry.nbytes)
        try:
            file = write(self.directory, entry, self.model)
        except OSError as error:
            return f"writing failed: {error.strerror or error}"
        self._forget(file.path.name)
        self._add(file)
        for key in self.index.replaced(entry.key, entry.template.name, entry.cuts):
            shorter = self.headers[key].path
            if not self.is_pinned(shorter.name):
                shorter.unlink(missing_ok=True)
                self._forget(shorter.name)
        self.trim(self.max_bytes)
        return None

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
        """The number of entries in the directory, of all models and processes, and their bytes."""
        sizes = [stat.st_size for _, stat in _entries(self.directory)]
        return len(sizes), sum(sizes)

    def newest(self, identity: bytes) -> list[bytes]:
        """Keys of this model, the most recently used first."""
        times = {path: stat.st_mtime_ns for path, stat in _entries(self.directory)}
        used = {key: times[file.path] for key, file in self.headers.items() if file.path in times}
        return sorted((key for key in used if key[: match.NAME] == identity), key=used.__getitem__, reverse=True)
