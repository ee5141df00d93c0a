"""The warning of caches with `center=False` that see biased keys."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..formats.centered import mean_energy

LEAST = 16
"""Tokens of a block that says something about means."""
MOST = 1024
"""Tokens of it that are looked at."""
FAR = 16.0
"""Energy of means over that of spreads from which on keys count as biased. Of the embedded model and SmolLM2-135M no head of any layer
exceeds 7; keys with biases of 20 to 100 times the spread of a few channels have 90 to 500."""


class BiasedKeys:
    """Looks at the first block of each layer, and warns once of keys whose means are far above their spread."""

    def __init__(self, format: str):
        self.format = format
        self.seen: set[int] | None = set()
        """Layers that were looked at; None once it has warned."""

    @torch.no_grad()
    def look(self, keys: Tensor, layer: int) -> None:
        """`keys` `[B, H, T, D]`, new ones of `layer`. Waits for the device, but never in a decode step or in compiled code."""
        if torch.compiler.is_compiling() or keys.shape[2] < LEAST or self.seen is None or layer in self.seen:
            return
        self.seen.add(layer)
        if mean_energy(keys[:, :, :MOST]).amax().item() > FAR:
            self.seen = None
            warnings.warn(
                f"format={self.format!r}: the means of key channels are far above their spread (layer {layer}), as in models with a bias "
                "on keys (Qwen2 and its family), so that most of each scale serves a constant: pass center=True",
                stacklevel=3,
            )
