"""`Workload`: passages to continue and facts to recall, read by the model once for all caches that evict nothing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from error_bars import share_error, standard_error
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from qkvcache.evaluation.calibrate import windows_of
from qkvcache.evaluation.quality import Passages, Prefilled, RecallSet, divergence, held_bytes, prefill, recall
from qkvcache.evaluation.recall import CODE_WORD, Form

CacheMaker = Callable[[int], Cache]
"""Makes a new cache for a context of the given tokens, of which a policy's budget may be a share."""


@dataclass(frozen=True)
class Workload:
    """`passages` to continue, and facts whose question is `unseen` or `seen` when the context is compressed, by tokens of context."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    passages: Passages
    unseen: dict[int, RecallSet]
    seen: dict[int, RecallSet]
    half: PreTrainedModel
    """The model in 16 bits, with which bytes are measured whatever dtype the model computes in."""
    row: Prefilled
    """The first passage's context, read by `half`."""

    @classmethod
    def make(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text_ids: list[int],
        *,
        context: int,
        passages: int = 4,
        read_on: int = 48,
        cases: int = 20,
        facts_in: Sequence[int] = (),
        form: Form = CODE_WORD,
        seed: int = 0,
    ) -> Workload:
        """`passages` pieces of `text_ids` of `context + read_on` tokens each, evenly spaced, and `cases` in contexts of each of `facts_in`
        tokens (default: of `context`).

        Raises ValueError for a text that is shorter than all passages.
        """
        windows = windows_of(text_ids, passages, context + read_on).to(model.device)
        unseen, seen = (
            {
                tokens: RecallSet.make(model, tokenizer, text_ids, tokens, cases, seed=seed, seen=seen, form=form)
                for tokens in facts_in or (context,)
            }
            for seen in (False, True)
        )
        half = copy.deepcopy(model).to(torch.bfloat16) if model.dtype == torch.float32 else model
        return cls(model, tokenizer, Passages.read(model, windows, context), unseen, seen, half, prefill(half, windows[:1, :context])[0])

    def bytes_per_token(self, cache: Cache) -> float:
        """Measured bytes of the empty `cache` after the first passage's context."""
        self.row.fill(cache, self.half, self.passages.context[:1], self.tokenizer)
        return held_bytes(cache) / self.passages.context.shape[1]

    def measure(self, make: CacheMaker) -> dict:
        """Bytes and quality of a cache: `kl` (nats), `same_top` and `perplexity_ratio` with standard errors over the passages, and values
        of each passage; `recall`: facts recalled with the question unseen and seen, by tokens of context."""
        passages, context = self.passages.context.shape
        result = divergence(self.model, self.passages, functools.partial(make, context), self.tokenizer)
        size, dense = (self.bytes_per_token(cache) for cache in (make(context), DynamicCache(config=self.model.config)))
        change = result.loss_changes.mean().exp().item()
        right = {str(tokens): [self._right(sets[tokens], make, tokens) for sets in (self.unseen, self.seen)] for tokens in self.unseen}
        counted = passages * (self.passages.continuation.shape[1] - 1)
        same_top_error = max(standard_error(result.same_tops), share_error(result.same_top * counted, counted))
        last = right[str(max(self.unseen))]
        return {
            "bytes_per_token": size, "ratio": dense / size, "kl": result.kl, "kl_error": standard_error(result.kls),
            "same_top": result.same_top, "same_top_error": same_top_error,
            "perplexity": result.perplexity, "dense_perplexity": self.passages.perplexity,
            "perplexity_ratio": change, "perplexity_ratio_error": change * standard_error(result.loss_changes),
            "recall": right, "recall_unseen": last[0] / self.cases, "recall_seen": last[1] / self.cases, "cases": self.cases,
            "context": context, "read_on": [passages, self.passages.continuation.shape[1]], "dtype": str(self.model.dtype),
            "kls": rounded(result.kls), "loss_changes": rounded(result.loss_changes),
        }  # fmt: skip

    def _right(self, cases: RecallSet, make: CacheMaker, tokens: int) -> int:
        return round(recall(self.model, self.tokenizer, cases, functools.partial(make, tokens)) * self.cases)

    @property
    def cases(self) -> int:
        return len(next(iter(self.unseen.values())).cases)


def rounded(values: Tensor) -> list[float]:
    return [float(f"{x:.5g}") for x in values.tolist()]
