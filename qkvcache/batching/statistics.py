"""`Statistics`: the buffers that a format keeps once for all requests of a model (means, a frozen scale).

Requests share blocks, so that codes must have the same meaning for all of them. The statistics come from the tokens of
the first batch of prompts, or from a file that `save` wrote.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..formats import Codes, Format
from ..kernels import Pair
from ..prefix.disk import save
from ..prefix.host_memory import as_bytes

SIDES = "key", "value"


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

    @staticmethod
    def load(path: str | Path, format: Format) -> Statistics:
        """Reads statistics that `save` wrote.

        Raises ValueError for other files, and for statistics of another format.
        """
        statistics = Statistics(format)
        try:
            with safe_open(path, framework="pt") as file:
                name = (file.metadata() or {}).get("format")
                statistics.stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"statistics={str(path)!r} cannot be read: {error}") from error
        if name != format.name:
            raise ValueError(
                f"statistics={str(path)!r} are of format {name!r}, not of {format.name!r}: pass format={name!r}, or another file"
            )
        return statistics

    def save(self, path: str | Path) -> None:
        """Writes the statistics of all layers, for `continuous_batching(statistics=path)`.

        Raises ValueError before the first prompts were read.
        """
        if self.pending or not self.layers:
            raise ValueError("there are no statistics yet: they come from the first prompts")
        save(Path(path), self._tensors(), {"format": self.format.name})

    def digest(self) -> bytes:
        """A digest of the statistics of all layers."""
        digest = hashlib.blake2b(digest_size=16)
        for name, x in self._tensors().items():
            digest.update(name.encode() + as_bytes(x.cpu()).tobytes())
        return digest.digest()

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{layer}.{side}.{name}": x.contiguous()
            for layer, sides in self.layers.items()
            for side, codes in zip(SIDES, sides, strict=True)
            for name, x in codes.items()
        }

    def of_layer(self, layer: int, like: Tensor, rank: int = 0) -> tuple[Codes, Codes]:
        """The statistics of a layer with keys and values like `like` `[1, H, T, D]`, for the heads of the
        tensor-parallel `rank`.

        Raises ValueError if the file has no statistics for this layer, or statistics of other shapes.
        """
        if layer not in self.layers:
            sides: list[Codes] = []
            with torch.inference_mode(False):
                for side, codec in zip(SIDES, (self.format.key, self.format.value), strict=True):
                    once = codec.allocate_statistics(like)
                    for name, x in once.items():
                        self._take(f"{layer}.{side}.{name}", x, rank)
                    sides.append(once)
            self.layers[layer] = sides[0], sides[1]
            if not self.stored and any(sides):
                self.pending.add(layer)
        return self.layers[layer]

    def _take(self, key: str, out: Tensor, rank: int) -> None:
        if not self.stored:
            return
        found = self.stored.get(key)
        if found is not None and found.shape[1] > out.shape[1]:
            found = found[:, rank * out.shape[1] : (rank + 1) * out.shape[1]]
        if found is None or found.shape != out.shape:
            raise ValueError(f"the statistics have no {key} of shape {list(out.shape)}: they were saved for another model")
        out.copy_(found)

    def calibrate(self, layer: int, x: Pair) -> None:
        """Computes the statistics of a layer from keys and values `[1, H, T, D]`, unless it has them."""
        if layer not in self.pending:
            return
        for codec, codes, side in zip((self.format.key, self.format.value), self.layers[layer], x, strict=True):
            for name, found in codec.calibrate(side).items():
                codes[name].copy_(found)
        self.pending.discard(layer)
