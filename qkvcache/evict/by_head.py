"""`StorageByHead`: an `EvictingStorage` whose heads hold different numbers of tokens.

Each head has pages of its own (`head_pages.py`), in which the metadata of the tokens lies, too. Heads share their budget
(`Policy.alpha_safeguard`), or have parts of it (`Budget.heads`, or the weights that `compress` found)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import AttentionInputs, PagedInputs, Pair, Prepared, TokenInputs, Work
from ..kernels.paged_inputs import COLUMNS, RING_ROW, RING_START, RING_TOKENS, SINK_ROW, SINKS
from ..storage.storage import sides_of
from .eviction import append_and_share
from .head_pages import HeadPages
from .metadata import no_tokens
from .policies.budget import ONE, share_of, times
from .storage import EvictingStorage
from .tail import TokenFields


class StorageByHead(EvictingStorage):
    """Storage for the tokens that the heads of a layer retain, each its own number of them."""

    tokens: HeadPages  # type: ignore[assignment]

    @property
    def pages_of_heads(self) -> HeadPages:
        return self.tokens

    def _new_pages(self, like: Pair) -> HeadPages:
        return HeadPages(self.codecs, like, no_tokens(self.policy, like[0]))

    def token_inputs(self, sinks: Pair | None = None) -> AttentionInputs:
        tail, first = self.tail, self.sinks if sinks is None else sinks
        inputs, counts = self._paged_inputs(1), (first[0].shape[2], self.tokens.length, tail.count)
        if inputs is not None and sinks is not None:
            inputs = inputs.anew(sinks=sinks)
        return TokenInputs(partial(sides_of, first, self.tokens, tail.sides, counts, tail.start), inputs, sum(counts))

    def attention_inputs(self, sinks: Pair | None = None) -> AttentionInputs:
        sides = sides_of(self.sinks if sinks is None else sinks, self.tokens, self.tail.tokens())
        return AttentionInputs(*sides, self._paged_inputs(0))

    def _paged_inputs(self, running: int) -> PagedInputs | None:
        """The inputs of attention over pages; None while columns are the same in all heads. They include all tokens of the
        step, padding too; in each row, the other valid tokens of the tail come right before them.

        Args:
            running: tokens of the step whose fields are not 0 yet.
        """
        metadata, tail, batch, pages = self.metadata, self.tail, len(self.sinks[0]), self.tokens
        if not (pages.length and metadata.ragged):
            return None
        if self.rows is None:
            known = tail.count - metadata.waiting - running
            empty = known - (tail.of(tail.fields["positions"], 0, known)[:, 0] >= 0).sum(-1)
            row = torch.arange(batch, device=self.device)
            with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
                self.rows = torch.zeros(batch, len(COLUMNS), dtype=torch.int32, device=self.device)
            self.rows[:, SINK_ROW], self.rows[:, RING_ROW], self.rows[:, SINKS] = row, row, metadata.sinks.sum(-1)
            self.rows[:, RING_START], self.rows[:, RING_TOKENS] = (tail.start + empty) % max(tail.slots, 1), tail.count - empty
        tokens = batch * min(metadata.columns, self.policy.size(self.budget, metadata.columns))
        work, prepared = Work(tokens), Prepared(pages.launches)
        return PagedInputs(pages.pages, self.sinks, tail.sides, self.rows, pages.columns, work, prepared=prepared)

    def _move(self, leaving: Pair, fields: TokenFields, limit: int, row_limits: Tensor | None) -> None:
        metadata, least, most = self.metadata, None, None
        seen = metadata.columns if row_limits is None else metadata.lengths()
        if metadata.head_weights is not None:
            least, guaranteed = 0, self._of_head(seen, metadata.head_weights)
            most = guaranteed.sum(1).amax()  # may exceed the layer's budget
        elif self.budget.heads:
            of_heads = self._of_heads(seen)
            if row_limits is None:
                counts = torch.tensor(of_heads, dtype=torch.int64, device="cpu")
                least, guaranteed = min(of_heads), counts.to(self.device, non_blocking=True)[None, :, None]
            else:
                least, guaranteed = 0, torch.cat(of_heads, dim=1)
        else:
            guaranteed = self._guaranteed(limit if row_limits is None else row_limits)
        self.in_order = append_and_share(
            self.tokens, metadata, leaving, fields, max(limit, 0), row_limits, guaranteed, self.in_order, least, most
        )
        if metadata.padding is not None:  # some of the tokens that leave the tail were empty
            self.rows = None

    def _of_heads(self, seq_length: Any) -> list[Any]:
        """The results of `_of_head` for each head's part of the budget."""
        parts = self.budget.heads
        return [self._of_head(seq_length, round(part * len(parts) / sum(parts) * ONE)) for part in parts]

    def _of_head(self, seq_length: Any, weight: Any) -> Any:
        """Quantized tokens that a head may hold after `seq_length` tokens, an int or `[B, 1, 1]`: the protected tokens, and
        the rest of the budget times `weight / ONE`. `weight`: an int or int64 `[B, H, 1]`."""
        protected, rest = self.policy.protected_and_rest(self.budget, seq_length)
        found = protected - self.num_sink_tokens - self.residual_length + times(rest, weight)
        return found * (found > 0)

    def _guaranteed(self, limit: Any) -> Any:
        """The part of `limit` quantized tokens that each head is guaranteed: its share less its exact tokens."""
        exact = self.num_sink_tokens + self.residual_length
        count = share_of(self.policy.alpha_safeguard or 0.0, limit + exact) - exact
        return max(count, 0) if isinstance(count, int) else count.clamp_min(0)

    def _simulate_pages(self, first: int, groups: int) -> None:
        exact, heads = self.num_sink_tokens + self.residual_length, self.sinks[0].shape[1]

        def lengths(k: int) -> list[int]:
            left = first + k * self.interval
            return [min(left, own) for own in self._of_heads(exact + left)] if self.budget.heads else [left] * heads

        def most(k: int) -> int:
            return heads * max(self._region_limit(exact + first + k * self.interval), 0)

        self.tokens.simulate(lengths, most, groups, others=self.policy.shares_layers)
        self.rows = self.sinks[0].new_empty(len(self.sinks[0]), len(COLUMNS), dtype=torch.int32) if self.tokens.length else None

    def _check_lengths(self, tensors: dict[str, Tensor], stored: int, seen: int) -> None:
        self.tokens.check(tensors, seen)

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        super().restore(tensors, numbers)
        self.metadata.ragged = self.tokens.length > 0 and not self.in_order
