"""Safetensors files that are complete when they appear, and read without trust in what they hold."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

THREADS = min(os.cpu_count() or 1, 16)
WRITING = ".writing"
"""The end of the name of a folder in which a process writes a file."""


class Damaged(Exception):
    """Raised for a file that was read and must not be loaded, with the reason. A file that cannot be read raises OSError."""


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
    with descriptor_of(path):
        try:
            handle = safe_open(path, framework="pt")
        except (OSError, RuntimeError) as error:  # of torch, which opens the file once more
            raise OSError(f"it cannot be opened again: {error}") from error
    with handle:
        yield handle


@contextmanager
def descriptor_of(path: Path) -> Iterator[int]:
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


def as_bytes(x: Tensor) -> numpy.ndarray:
    """The bytes of a tensor in host memory as a numpy array, a view if its last dimension is contiguous. numpy copies
    in the calling thread; torch would start a team of threads and wait for busy ones."""
    x = x.detach() if x.ndim else x.detach()[None]
    return (x if x.stride(-1) == 1 else x.contiguous()).view(torch.uint8).numpy()
