"""`Statistics`: the buffers that a format keeps once for all requests of a model (means, a frozen scale).

Requests share blocks, so that codes must have the same meaning for all of them. The statistics come from the tokens of
the first batch of prompts, or from a file that `save` wrote; processes that share a folder take the first one's statistics.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..files import as_bytes, opened, save
from ..formats import Codes, Format
from ..formats.outlying import FAR, Int8Keys, outlying
from ..kernels import Pair


class Statistics:
    """The statistics of every layer of a model in one format; empty until the first prompts are read."""

    def __init__(self, format: Format):
        self.format = format
        self.layers: dict[int, tuple[Codes, Codes]] = {}
        """The tensors of each layer, `[1, H or 1, 1, width]` for keys and for values, at fixed addresses."""
        self.pending: set[int] = set()
        """Layers that have no statistics yet."""
        self.stored: dict[str, Tensor] = {}
        """Tensors from a file, until their layer is created."""
        self.shared: Path | None = None
        """The file of processes that share statistics: the first prompts of one of them write it."""
        self._lock: int | None = None
        self._examines = Int8Keys.instead_of(format) is not None
        """Whether keys with outlying channels are still to be warned of."""

    @staticmethod
    def load(path: str | Path, format: Format) -> Statistics:
        """Reads statistics that `save` wrote.

        Raises ValueError for other files, damaged ones, and statistics of another format; OSError for a file that cannot be read.
        """
        statistics = Statistics(format)
        try:
            with opened(Path(path)) as file:
                header = file.metadata() or {}
                statistics.stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"statistics={str(path)!r} are damaged: {error}") from error
        if (name := header.get("format")) != format.name:
            raise ValueError(
                f"statistics={str(path)!r} are of format {name!r}, not of {format.name!r}: pass format={name!r}, or another file"
            )
        if header.get("digest", digest := statistics.digest().hex()) != digest:  # earlier releases wrote none
            raise ValueError(f"statistics={str(path)!r} are damaged: their contents were changed")
        return statistics

    def save(self, path: str | Path) -> None:
        """Writes the statistics of all layers, for `continuous_batching(statistics=path)`.

        Raises ValueError before the first prompts were read.
        """
        if self.pending or not self.layers:
            raise ValueError("there are no statistics yet: they come from the first prompts")
        save(Path(path), self._tensors(), {"format": self.format.name, "digest": self.digest().hex()})

    def known(self) -> bool:
        """Whether all layers have statistics: their own, or those that another process has written by now."""
        if not self.stored and (self.pending or not self.layers) and self.shared is not None:
            self._take(self.shared)
        return bool(self.stored) or not self.pending

    def _take(self, shared: Path) -> None:
        """Takes over a shared file. A damaged one is removed, as a page is, and computed again. One that cannot be read stays, and this
        process has statistics of its own."""
        try:
            self.stored = Statistics.load(shared, self.format).stored
        except FileNotFoundError:
            pass
        except ValueError as error:
            warnings.warn(f"{shared} is removed: {error}", stacklevel=4)
            with suppress(OSError):
                shared.unlink(missing_ok=True)
        except OSError as error:
            self._alone(error)

    def _alone(self, error: OSError) -> None:
        warnings.warn(f"{self.shared} stays, and cannot be used: {error}; pages of other processes are not found", stacklevel=5)
        self.shared = None

    def digest(self) -> bytes:
        """A digest of the statistics of all layers."""
        digest = hashlib.blake2b(digest_size=16)
        for name, x in sorted((self.stored or self._tensors()).items()):
            digest.update(name.encode() + as_bytes(x.cpu()).tobytes())
        return digest.digest()

    def of_layer(self, layer: int, like: Tensor, rank: int = 0) -> tuple[Codes, Codes]:
        """The statistics of a layer with keys and values like `like` `[1, H, T, D]`, for the heads of the tensor-parallel `rank`.

        Raises ValueError if the file has no statistics for this layer, or statistics of other shapes.
        """
        if layer not in self.layers:
            with torch.inference_mode(False):
                self.layers[layer] = self.format.key.allocate_statistics(like), self.format.value.allocate_statistics(like)
            if self.stored:
                self._fill(layer, self.stored, rank)
            elif any(self.layers[layer]):
                self.pending.add(layer)
        return self.layers[layer]

    def calibrate(self, layer: int, x: Pair) -> None:
        """Computes the statistics of a layer from keys and values `[1, H, T, D]`, unless it has them. A process that
        shares its statistics waits for another one that computes them."""
        if layer not in self.pending:
            return
        if self.shared is not None and self._lock is None:
            import fcntl  # not on Windows

            try:
                self._lock = os.open(self.shared.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
                self.known()
            except OSError as error:
                self._alone(error)
        if self._examines and (ratio := outlying(x[0])) > FAR:
            self._examines = False
            warnings.warn(
                f"format={self.format.name!r}: a channel of the keys of layer {layer} is {ratio:.1f} times their root mean "
                "square after centring, which few bits break (as in Qwen2.5-Coder-0.5B), and pages of all layers have one "
                "format: pass format='int8'",
                stacklevel=2,
            )
        if not self.stored:
            self._fill(layer, _named(layer, (self.format.key.calibrate(x[0]), self.format.value.calibrate(x[1]))))
        else:
            self._fill(layer, self.stored)
        self.pending.discard(layer)
        if self._lock is not None and not self.pending:
            try:
                if not self.stored and self.shared is not None:
                    self.save(self.shared)
            except OSError as error:
                self._alone(error)
            os.close(self._lock)
            self._lock = None

    def _fill(self, layer: int, found: Codes, rank: int = 0) -> None:
        for name, out in _named(layer, self.layers[layer]).items():
            x, heads = found.get(name), out.shape[1]
            if x is not None and x.shape[1] > heads:
                x = x[:, rank * heads : (rank + 1) * heads]
            if x is None or x.shape != out.shape:
                raise ValueError(f"the statistics have no {name} of shape {list(out.shape)}: they were saved for another model")
            out.copy_(x)

    def _tensors(self) -> Codes:
        return {name: x.contiguous() for layer, sides in self.layers.items() for name, x in _named(layer, sides).items()}


def _named(layer: int, sides: tuple[Codes, Codes]) -> Codes:
    """The statistics of keys and values of a layer, by the names that files have."""
    return {f"{layer}.{side}.{name}": x for side, codes in zip(("key", "value"), sides, strict=True) for name, x in codes.items()}
