"""Texts that a model reads anew: Phi-3, PhiMoE and Phi-4-multimodal rotate all keys by other frequencies once
a text passes `original_max_position_embeddings`. Their `prepare_inputs_for_generation` then leaves the cache
out of the step if its length is at most that, and the model goes on with a cache of its own. The cache that
is asked for its length empties itself instead, and stays in use."""

from __future__ import annotations

import math
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

CALLER = "prepare_inputs_for_generation"
MODEL_TYPES = ("phi3", "phi4_multimodal", "phimoe")
MODULES = frozenset(f"transformers.models.{name}.modeling_{name}" for name in MODEL_TYPES)


def limit_of(config: PreTrainedConfig) -> float:
    """The tokens after which a model with this config reads a text anew; infinity for all other models."""
    return config.original_max_position_embeddings if config.model_type in MODEL_TYPES else math.inf


def length_for(cache: Cache, length: int, caller: FrameType) -> int:
    """The number of tokens that a `CALLER` is told `cache` has seen: `length`, or, if the text must be read
    anew, the length of the text; the cache is empty after it, and the step brings all tokens. Raises
    ValueError if the step lacks some of them."""
    if caller.f_globals.get("__name__") not in MODULES:
        return length
    step = caller.f_locals
    text, limit, others = step["input_ids"].shape[1], step["self"].config.original_max_position_embeddings, step["kwargs"]
    if not length <= limit < text:
        return length
    if length and others.get("next_sequence_length") is None:  # `generate` cuts no tokens that were read off: it has the new ones alone
        raise ValueError(
            f"{text} new tokens after {length}: the model rotates all keys of a text of more than {limit} tokens by other frequencies, "
            "so that the text must be read anew; pass all of it"
        )
    if length:
        cache.reset()
    others["next_sequence_length"] = None
    return text
