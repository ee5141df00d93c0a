"""`StaticSlidingLayer`: transformers' sliding window at fixed addresses, with the batch operations and checks
of this library's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import StaticSlidingWindowLayer

from ..kernels import Pair, differ
from ..storage import check_room
from .compressed import check_alike, rows_of


class StaticSlidingLayer(StaticSlidingWindowLayer):
    """The last `sliding_window` of up to `max_length` tokens, in the model's dtype.

    transformers' layer does not count tokens beyond the window, keeps the storage of its first batch, and has no batch operations.
    """

    def __init__(self, max_length: int, sliding_window: int):
        super().__init__(max_cache_len=max_length, sliding_window=sliding_window)
        self.max_length = max_length

    @property
    def stored(self) -> Pair | tuple[()]:
        """Keys and values; empty before storage is allocated."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.stored or any(map(differ, self.stored, (key_states, value_states))):
            super().lazy_initialization(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Stores keys and values as transformers' layer does. Raises ValueError, and stores nothing, if the
        shapes or dtype differ from stored ones or `max_length` is exceeded."""
        if not torch.compiler.is_compiling():
            self.reserve(key_states.shape[2])
            if not self.cumulative_length_int:
                self.lazy_initialization(key_states, value_states)
            elif stored := self.stored:
                check_alike(stored, (key_states, value_states), lambda: self.cumulative_length_int)
        return super().update(key_states, value_states, *args, **kwargs)

    def reserve(self, tokens: int) -> None:
        """Raises ValueError if there is no room for `tokens` more."""
        check_room(self.cumulative_length_int, tokens, self.max_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if not torch.compiler.is_compiling():
            self.reserve(query_length)
        return super().get_mask_sizes(query_length)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError if a crop would need tokens that have left the window."""
        if tokens_to_remove and self.cumulative_length_int > self.max_cache_len:
            raise NotImplementedError(
                f"crop({tokens_to_remove}) after {self.cumulative_length_int} tokens, of which a sliding window at a fixed address keeps "
                f"the last {self.max_cache_len}: leave out max_length"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; all tokens seen must still be in the window."""
        self.check_crop(tokens_to_remove)
        if tokens_to_remove:
            self.cumulative_length_int = max(self.cumulative_length_int + tokens_to_remove, 0)
            self.cumulative_length.fill_(self.cumulative_length_int)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cumulative_length_int:
            for x in self.stored:
                x.copy_(x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        self._map(lambda x: x[rows_of(indices, len(x))])

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        if not self.stored:
            return
        with torch.inference_mode(False):
            self.keys, self.values = map(fn, self.stored)
        self.batch_size = self.stored[0].shape[0]
        for x in self.stored:
            torch._dynamo.mark_static_address(x)
