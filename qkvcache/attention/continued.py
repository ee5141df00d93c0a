"""Comparing the token ids of a prompt with those that its cache has seen, where a call has both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..releases import CACHE_ARGUMENT


def check_continues(cache: Any, ids: Any) -> None:
    """Raises ValueError if `ids` `[B, T]` do not begin with the tokens that `cache` is known to have seen (`CompressedCache.seen_ids`)."""
    known = getattr(cache, "seen_ids", None)
    if known is None or not isinstance(ids, Tensor) or ids.dim() != 2 or len(known) != len(ids):
        return
    tokens = min(known.shape[1], ids.shape[1], seen := int(cache.get_seq_length()))
    differ = (known[:, :tokens] != ids[:, :tokens].to(known)).any(0)
    if differ.any():
        raise ValueError(
            f"token {int(differ.int().argmax())} of the prompt differs from the {seen} tokens that the cache has seen: for another prompt "
            "call cache.reset() or pass a new cache; to go on, pass the whole text"
        )


def remember(cache: Any, ids: Any) -> None:
    """Notes that the tokens in `cache` are the first of `ids` `[B, T]`."""
    if hasattr(cache, "seen_ids") and isinstance(ids, Tensor) and ids.dim() == 2:
        cache.seen_ids = ids[:, : int(cache.get_seq_length())].clone()


def generate(stock: Callable[..., Any], config: Any, *args: Any, **options: Any) -> Any:
    """`stock(*args, **options)`, the `generate` of a model with the generation `config`. Raises ValueError if
    the cache among the options has seen other tokens than the prompt begins with."""
    ids = next((x for x in (*args[:1], options.get("inputs"), options.get("input_ids")) if x is not None), None)
    cache = next((x for name in ("cache", "past_key_values") if (x := options.get(name)) is not None), None)
    check_continues(cache, ids)
    result = stock(*args, **options)
    if cache is None:
        cache = getattr(result, CACHE_ARGUMENT, None)
    beams = options.get("num_beams") or getattr(options.get("generation_config"), "num_beams", None) or config.num_beams or 1
    if ids is not None:
        remember(cache, ids if beams > 1 else getattr(result, "sequences", result))
    return result
