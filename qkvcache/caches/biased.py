"""The warning about biased keys in caches with `center=False`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..formats.centered import mean_energy

LEAST = 16
"""The fewest tokens whose means are meaningful."""
MOST = 1024
"""The most tokens that are examined."""
FAR = 16.0
"""The ratio of the means' energy to the spreads' energy above which keys count as biased. No head of the embedded model
or of SmolLM2-135M exceeds 7; keys with biases of 20 to 100 times the spread in a few channels have 90 to 500."""


class BiasedKeys:
    """Examines the first keys of layers, and warns once if their means are far above their spread."""

    def __init__(self) -> None:
        self.examined: set[int] | None = set()
        """Layers whose keys were examined; None after the warning."""

    @torch.no_grad()
    def examine(self, keys: Tensor, index: int, layer: Any) -> None:
        """Examines new keys `[B, H, T, D]` of the `layer` of this `index`, if its format has `center=False`. Waits for the device."""
        format: Any = getattr(layer, "format", None)
        if keys.shape[2] < LEAST or getattr(format, "center", True) or self.examined is None or index in self.examined:
            return
        self.examined.add(index)
        if mean_energy(keys[:, :, :MOST]).amax().item() > FAR:
            self.examined = None
            warnings.warn(
                f"format={format.name!r}: the means of key channels are far above their spread (layer {index}), as in models with a bias "
                "on keys (Qwen2 and its family), so that most of each scale serves a constant: pass center=True",
                stacklevel=3,
            )
