"""`LatentLayer`: a layer whose keys are latents, and whose values are the rotated part of keys (MLA)."""

from __future__ import annotations

from typing import Any

from ..formats import Identity
from ..formats.base import Codec
from ..formats.int8 import SymmetricInt8
from ..kernels import on_triton
from ..kernels.host.dispatch import module
from ..layers.compressed import CompressedLayer
from .dispatch import KERNELS


class LatentLayer(CompressedLayer):
    """A `CompressedLayer` of latents. Their rotated part is INT8 in every format but an exact one: it adds 13 % to the error of INT8
    latents, which FP8 would double (`eval/bench_latents.py`).

    Args:
        latents: channels of latents and of the rotated part; None: the layer holds keys and values.
        **options: options of the layer without latents.
    """

    def __init__(self, *args: Any, latents: tuple[int, int] | None = None, **options: Any):
        super().__init__(*args, **options)
        self.latents = latents
        self.examines_keys = self.compiles_ahead = latents is None

    def codecs(self, dims: tuple[int, int]) -> tuple[Codec, Codec]:
        key, value = super().codecs(dims)
        if not dims[1]:  # latents without a rotated part
            return key, Identity().value
        if dims == self.latents and sum(x.nbytes() for x in value.buffers(dims[1]) if x.role == "codes") < 2 * dims[1]:
            return key, SymmetricInt8()
        return key, value

    def prepare(self, dims: tuple[int, int]) -> None:
        super().prepare(dims)
        if dims == self.latents and on_triton(self.device):
            module(KERNELS).prepare(self.codecs(dims), dims, self.dtype, self.device)
