"""What a format keeps once comes from the first step, less its padding, of which only attention knows.

A layer whose format keeps something takes in the tokens of that step when their attention reports (`attention/padding.py`). Where attention
goes past transformers' interface nobody does: whoever asks the layer next ends the step, and padding counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.padding import announce


class Fitting:
    """A mixin of layers."""

    waiting = False
    """Whether the first step has not been taken in."""

    def take_in(self, real: Tensor | None = None) -> None:
        """Moves the tokens of the step where they belong; those that are no padding, bool `[B, Q]`, say what is kept once (None: all)."""
        raise NotImplementedError

    def wait(self, keys: Tensor) -> None:
        """Puts the end of the step off until attention on `keys` says which of them are padding."""
        self.waiting = True
        announce(keys, self)

    def settle(self) -> None:
        """Ends a step that waits."""
        if self.waiting:
            self.padding(None)

    @torch.no_grad()
    def padding(self, real: Tensor | None) -> None:
        if self.waiting:
            self.waiting = False
            self.take_in(real)
