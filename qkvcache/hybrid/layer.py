"""Layers that hold attention's tokens, compressed, and the states of a convolution and a recurrence (Falcon-H1, Zamba, ZAYA, Inkling)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from ..layers.compressed import CompressedLayer


class HybridLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A `CompressedLayer` with the states of transformers' `LinearAttentionLayer`, in the model's dtype. Offloading leaves them on the
    device, as it does the states of layers without attention.

    Args:
        number_of_states: pairs of states, of a convolution and of a recurrence.
        **options: options of the layer without states.
    """

    def __init__(self, *args: Any, number_of_states: int = 1, **options: Any):
        super().__init__(*args, **options)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **states: Any) -> None:
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)
        else:
            super().lazy_initialization(*args)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return super().is_croppable and LinearAttentionLayer.is_croppable.fget(self)  # type: ignore[attr-defined]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Removes tokens and states; a layer whose steps can be compiled keeps their memory."""
        if self.is_compileable and self.storage is not None:
            LinearAttentionLayer.reset(self)
        else:
            LinearAttentionLayer.__init__(self, self.number_of_states)
        super().reset()

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        if rows:
            LinearAttentionLayer.reorder_cache(self, torch.tensor(rows, dtype=torch.int64, device="cpu"))  # type: ignore[arg-type]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        yield from (("exact", x) for x in self.states())

    def states(self) -> Iterator[Tensor]:
        """The states that there are."""
        yield from (x for states in (self.conv_states, self.recurrent_states) for x in states.values() if x is not None)

    @property
    def dense_bytes(self) -> int:
        return super().dense_bytes + sum(x.nbytes for x in self.states())
