"""The named caches of eviction: thin subclasses that choose a policy."""

from __future__ import annotations

from typing import Literal, Unpack

from transformers import PreTrainedConfig

from ..caches.base import CompressedCache
from ..caches.named import Options, makes
from ..formats import FormatLike
from .policies import H2O, Budget, SinkWindow, SlidingWindow, check_count


class SinkCache(CompressedCache):
    """Attention sinks and a window (StreamingLLM, arXiv 2309.17453), for streams of any length in constant memory.

    Args:
        window_length: newest tokens that are retained.
        num_sink_tokens: first tokens that are retained, in the model's dtype.
        positions: "cache" reads sinks at the positions right before the window, so that streams may be longer than the model was trained
            for; "original" reads them at their own positions, which `max_length` and models without RoPE need.
        format: how the tokens are stored; None keeps the model's dtype.
        **options: the options of CompressedCache.
    """

    @makes("policy")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        window_length: int = 1020,
        num_sink_tokens: int = 4,
        positions: Literal["original", "cache"] = "cache",
        format: FormatLike | None = None,
        **options: Unpack[Options],
    ):
        policy = SinkWindow(window_length=window_length, num_sink_tokens=num_sink_tokens, positions=positions)
        super().__init__(config, format=format, num_sink_tokens=num_sink_tokens, policy=policy, **options)


class SlidingWindowCache(CompressedCache):
    """The newest `window_length` tokens, for models that were trained with such a window; others need SinkCache.

    Args:
        window_length: newest tokens that are retained.
        format: how the tokens are stored; None keeps the model's dtype.
        **options: the options of CompressedCache.
    """

    @makes("policy")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        window_length: int = 4096,
        format: FormatLike | None = None,
        **options: Unpack[Options],
    ):
        super().__init__(config, format=format, policy=SlidingWindow(window_length=window_length), **options)


class H2OCache(CompressedCache):
    """Heavy hitters and recent tokens (arXiv 2306.14048).

    Args:
        budget: tokens (int), or share of the tokens seen (float).
        recent: newest tokens that are retained: share of the budget (float), or tokens (int). The rest of the budget is
            for the tokens with the most attention.
        num_sink_tokens: first tokens that are retained whatever their score, in the model's dtype.
        format: how the tokens are stored; None keeps the model's dtype.
        **options: the options of CompressedCache.
    """

    @makes("policy")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        budget: int | float = 1024,
        recent: int | float = 0.5,
        num_sink_tokens: int = 0,
        format: FormatLike | None = None,
        **options: Unpack[Options],
    ):
        policy = H2O(budget=budget, recent=recent, num_sink_tokens=num_sink_tokens)
        super().__init__(config, format=format, num_sink_tokens=num_sink_tokens, policy=policy, **options)


class CombinedCache(CompressedCache):
    """Sinks in the model's dtype, heavy hitters and a recent window in `format`.

    Args:
        num_sink_tokens: first tokens that are retained, in the model's dtype.
        recent: newest tokens that are retained; the last `residual_length` of them stay exact too.
        heavy: heavy hitters that are retained besides: share of the tokens seen (float), or tokens (int).
        format: how all but the exact tokens are stored.
        **options: the options of CompressedCache.
    """

    @makes("policy")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        num_sink_tokens: int = 4,
        recent: int = 512,
        heavy: int | float = 0.2,
        format: FormatLike = "fp8",
        **options: Unpack[Options],
    ):
        check_count("num_sink_tokens", num_sink_tokens)
        check_count("recent", recent)
        if isinstance(heavy, bool) or not isinstance(heavy, int | float):
            raise TypeError(f"heavy must be a number of tokens (int) or a share of the tokens seen (float), got {heavy!r}")
        protected = num_sink_tokens + recent
        budget = protected + heavy if isinstance(heavy, int) else Budget(tokens=protected, share=heavy)
        policy = H2O(budget=budget, recent=recent, num_sink_tokens=num_sink_tokens)
        super().__init__(config, format=format, num_sink_tokens=num_sink_tokens, policy=policy, **options)
