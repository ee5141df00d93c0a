"""One workload for many caches: texts to read on and facts to recall, which the model has read once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .quality import CacheFactory, Passages, RecallSet, divergence, recall


@dataclass(frozen=True)
class Workload:
    """`passages` to read on, and facts whose question is not known when the context is cut down, or is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    passages: Passages
    unseen: RecallSet
    seen: RecallSet
    dense_bytes: float
    """Of a token in a DynamicCache, measured."""

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
        observes: tuple[int, ...] = (),
        seed: int = 0,
    ) -> Workload:
        """`passages` stretches of `text_ids` of `context + read_on` tokens, evenly apart, and `cases` of `context` tokens each.

        Raises ValueError for a text that is shorter than all passages.
        """
        length, apart = context + read_on, len(text_ids) // passages
        if length > apart:
            raise ValueError(f"{passages} passages of {length:,} tokens need a longer text than {len(text_ids):,} tokens")
        windows = torch.tensor([text_ids[i * apart : i * apart + length] for i in range(passages)], device=model.device)
        read = Passages.read(model, windows, context, observes)
        unseen, seen = (
            RecallSet.make(model, tokenizer, text_ids, context, cases, seed=seed, seen=seen, observes=observes) for seen in (False, True)
        )
        dense = divergence(model, read, lambda: DynamicCache(config=model.config)).bytes_per_token
        return cls(model, tokenizer, read, unseen, seen, dense)

    def measure(self, factory: CacheFactory) -> dict:
        """What a cache costs and keeps: `bytes_per_token` and `ratio` to a dense cache, `kl` in nats, perplexities, shares recalled."""
        quality = divergence(self.model, self.passages, factory)
        right = {name: recall(self.model, self.tokenizer, getattr(self, name), factory) for name in ("unseen", "seen")}
        size, (passages, context) = quality.bytes_per_token, self.passages.context.shape
        return {
            "bytes_per_token": size, "ratio": self.dense_bytes / size, "kl": quality.kl, "perplexity": quality.perplexity,
            "dense_perplexity": self.passages.perplexity, "recall_unseen": right["unseen"], "recall_seen": right["seen"],
            "context": context, "read_on": [passages, self.passages.continuation.shape[1]], "cases": len(self.seen.cases),
            "dtype": str(self.model.dtype),
        }  # fmt: skip
