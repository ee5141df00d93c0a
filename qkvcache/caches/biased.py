"""Keys that few bits break: the warning about biased keys in caches with `center=False`, and in others int8
for keys with outlying channels."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..attention.padding import PlainAttention, await_attention
from ..formats import Format
from ..formats.centered import mean_energy
from ..formats.outlying import FAR as OUTLYING
from ..formats.outlying import MOST, Int8Keys, outlying

LEAST = 16
"""The fewest tokens whose means are meaningful."""
FAR = 16.0
"""The ratio of the means' energy to the spreads' energy above which keys count as biased. No head of the
embedded model or of SmolLM2-135M exceeds 7; keys with biases of 20 to 100 times the spread in a few channels
have 90 to 500."""


class BiasedKeys:
    """Examines the first keys of layers, and warns once if their means are far above their spread."""

    def __init__(self) -> None:
        self.examined: set[int] | None = set()
        """Layers whose keys were examined; None after the warning."""
        self.waiting: tuple[Tensor, int, Any] | None = None
        """Keys `[B, H, T, D]`, the index of their layer and the layer, until attention reports the padding among them."""

    def await_padding(self, keys: Tensor, index: int, layer: Any, returned: Any) -> None:
        """Examines new keys when attention over the keys that `update` has `returned` tells which tokens are padding."""
        if keys.shape[2] < LEAST or getattr(getattr(layer, "format", None), "center", True):
            return
        self._report(None)  # keys of attention that does not report
        if self.examined is not None and index not in self.examined:
            self.waiting = keys.detach(), index, layer
            await_attention(getattr(returned, "attention_inputs", returned), self._report)

    def _report(self, attention: PlainAttention | None) -> None:
        if self.waiting is not None:
            (keys, index, layer), self.waiting = self.waiting, None
            self.examine(keys, index, layer, attention and attention.is_valid(layer.get_seq_length()))

    @torch.no_grad()
    def examine(self, keys: Tensor, index: int, layer: Any, is_valid: Tensor | None = None) -> None:
        """Examines new keys `[B, H, T, D]` of the `layer` of this `index`, if its format has `center=False`.
        `is_valid`: the tokens that are not padding, bool `[B, T]`; None: all. Waits for the device."""
        format: Any = getattr(layer, "format", None)
        if keys.shape[2] < LEAST or getattr(format, "center", True) or self.examined is None or index in self.examined:
            return
        keys, is_valid = keys[:, :, -MOST:], None if is_valid is None else is_valid[:, -MOST:]
        energy = mean_energy(keys, is_valid)
        if is_valid is not None:
            enough = is_valid.sum(-1) >= LEAST
            if not bool(enough.any()):
                return
            energy = energy.where(enough[:, None], 0)
        self.examined.add(index)
        if energy.amax().item() > FAR:
            self.examined = None
            warnings.warn(
                f"format={format.name!r}: the means of key channels are far above their spread (layer {index}), as in models with a bias "
                "on keys (Qwen2 and its family), so that most of each scale serves a constant: pass center=True",
                stacklevel=3,
            )


class OutlyingKeys:
    """Chooses int8 for the keys of layers in which channels are outlying, and says so once for a cache."""

    def __init__(self) -> None:
        self.said = False

    def choose(self, instead: Int8Keys, index: int, keys: Tensor, is_valid: Tensor | None) -> Format | None:
        """Returns `instead` if the first keys `[B, H, T, D]` of layer `index` have an outlying channel, else
        None. `is_valid`: bool `[B, T]`, False for padding; None: no padding. Waits for the device."""
        if (ratio := outlying(keys, is_valid)) <= OUTLYING:
            return None
        if not self.said:
            self.said = True
            warnings.warn(
                f"format={instead.format.name!r}: a channel of the keys of layer {index} is {ratio:.1f} times their root "
                "mean square after centring, which few bits break (as in Qwen2.5-Coder-0.5B). The keys of this layer, and of "
                "any other such layer, are stored in int8; a sequence of formats, one for each layer, stays as it is",
                stacklevel=3,
            )
        return instead
