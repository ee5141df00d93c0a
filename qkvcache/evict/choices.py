"""The caches that `recommend` may choose where few tokens stay (`planning/recommend.py`)."""

from __future__ import annotations

from typing import Any

from .policies import KVzip, SinkWindow, SnapKV

FOUR_BITS = "turboquant_4bit_nc"


def stream(context: int, model: str) -> dict[str, Any]:
    return {
        "call": "SinkCache(config, window_length=1020, num_sink_tokens=4)",
        "why": "sinks and a window take constant memory, and perplexity stays flat over 200,000 tokens when sinks are read at positions of "
        "the cache; what left the window is gone",
        "policy": SinkWindow(window_length=1020, num_sink_tokens=4, positions="cache"),
    }


def repeated(context: int, model: str) -> dict[str, Any]:
    """The tokens stay that the model needs to repeat the context: with equal budgets of all heads, no policy that reads the context once
    retains facts."""
    return {
        "call": f'CompressedCache(config, format="{FOUR_BITS}", policy=policies.KVzip(budget=0.25))',
        "why": f"in 4 bits a quarter of the tokens recall 92 % of what all tokens uncompressed recall (on {model}); `cache.compress(model, "
        "ids, tokenizer=tokenizer)` reads the context twice and holds it uncompressed until then, so fill one cache after another",
        "format": FOUR_BITS,
        "policy": KVzip(budget=0.25),
    }


def half(context: int, model: str) -> dict[str, Any]:
    """A budget in tokens, so that `max_length` can be added to the call."""
    budget = max(context // 2, 16)
    return {
        "call": f'CompressedCache(config, format="{FOUR_BITS}", policy=policies.SnapKV(budget={budget:_}))',
        "why": f"to go on with a text, 4 bits and half of the tokens stay close (KL .008 on {model}); of the facts that all tokens "
        "uncompressed recall, less than half are left if they are asked for later, and seven of ten if the prompt ends with the question",
        "format": FOUR_BITS,
        "policy": SnapKV(budget=budget),
    }


CHOICES = (("stream", stream), ("facts", repeated), ("question", half), ("continue", half))
"""By workload; given the tokens of the context, and the model on which the quoted numbers were measured."""
