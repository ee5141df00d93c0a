"""Decoding speed with a cache, and the bytes of the cache, measured with `generate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..releases import passing
from .quality import held_bytes
from .spec import CacheSpec


class Clock(StoppingCriteria):
    """A stopping criterion that records the time of each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_) -> Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def measure(model: PreTrainedModel, ids: Tensor, specs: Sequence[CacheSpec], new_tokens: int = 32, rounds: int = 2) -> Iterator[dict]:
    """A row for each cache in turn: `prompt_ms` to the first token, `decode_ms` of a later step, `bytes_per_token` of one request of `ids`
    `[B, T]`, and on a GPU `peak_bytes`, the most that was allocated beside the weights.

    Times are the minimum over `rounds` runs of `new_tokens` tokens. The time of a step is the median of the second half
    of a run, since the first steps compile. A spec's `max_length` is taken as given. Raises ValueError for fewer than 8
    new tokens, and the errors of the specs' caches.
    """
    if new_tokens < 8 or rounds < 1:
        raise ValueError(f"new_tokens={new_tokens}, rounds={rounds}: at least 8 tokens and one round make a median")
    for spec in specs:
        cache = spec.make(model.config)
        prompt_ms, decode_ms = [], []
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats(ids.device)
            before = torch.cuda.memory_allocated(ids.device)
        for _ in range(rounds):
            cache.reset()
            clock = Clock()
            options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            begin = time.perf_counter()
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                **passing(cache),
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
            prompt_ms.append((clock.times[0] - begin) * 1e3)
            steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
            decode_ms.append(statistics.median(steps[len(steps) // 2 :]) * 1e3)
        rows, seen = ids.shape[0], int(cache.get_seq_length())
        row = {
            "cache": spec.name,
            "prompt_ms": min(prompt_ms),
            "decode_ms": min(decode_ms),
            "tokens_per_second": rows * 1e3 / min(decode_ms),
        }
        row |= {"bytes_per_token": held_bytes(cache) / rows / seen, "tokens": ids.shape[1], "batch": rows}
        if ids.is_cuda:
            row["peak_bytes"] = torch.cuda.max_memory_allocated(ids.device) - before
        yield row
        del cache
