"""`attach`: a fresh cache for every later `generate` of a model, for pipelines and libraries that do not let a cache through."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import Cache, DynamicCache, EncoderDecoderCache

from .. import formats
from ..attention import continued
from ..attention.compressed_kv import warn_once
from ..formats import FormatLike
from ..releases import CACHE_ARGUMENT, INSTALLED, LAST_TESTED
from .base import CompressedCache

if TYPE_CHECKING:
    from transformers import Pipeline, PreTrainedModel  # these import every kind of input, and all that models need

_PREPARE, _UPDATE = _METHODS = "_prepare_cache_for_generation", "_update_model_kwargs_for_generation"


class Attachment:
    """The result of `attach`. `detach()`, or leaving it as a context manager, undoes it. `last` describes the
    cache that the last `generate` made, as it was at the end; None before.

    It replaces the model's method that prepares caches, and the one that `generate` gives the outputs of each step. A copy of the model,
    pickled or deep-copied, has its own attachment with the same factory; `detach(copy)` undoes that one.
    """

    def __init__(self, model: PreTrainedModel, factory: Callable[..., Cache]):
        self.model, self.factory = model, factory
        self.last: str | None = None
        self._made: Cache | None = None
        """The cache of the running `generate`."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `_prepare_cache_for_generation`, with a cache of the factory if the caller passes none."""
        stock = getattr(type(self.model), _PREPARE).__get__(self.model)
        bound = inspect.signature(stock).bind(*args, **kwargs).arguments
        model_kwargs, generation = bound["model_kwargs"], bound["generation_config"]
        if model_kwargs.get(CACHE_ARGUMENT) is None and generation.use_cache is not False:
            if generation.cache_implementation not in (None, self.model.generation_config.cache_implementation):
                raise ValueError(
                    f"cache_implementation={generation.cache_implementation!r} for a model that has a cache attached: leave it out, or "
                    "call detach(model) before"
                )
            generation.cache_implementation = None  # of this call's config: the model's own asks for a cache in place of the attached one
            model_kwargs[CACHE_ARGUMENT] = cache = self._new_cache()
            if generation.is_assistant:  # transformers does so for the caches that it makes: steps of an assistant are cropped
                cache.activate_past_recording()
        return stock(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`. Raises ValueError for a cache that has seen other tokens than the prompt begins with."""
        stock = type(self.model).generate.__get__(self.model)  # type: ignore[attr-defined]
        try:
            out = continued.generate(stock, self.model.generation_config, *args, **kwargs)
            self.last = self.last if self._made is None else repr(self._made)
            return out
        finally:
            self._made = None  # the caller's alone

    def update(self, outputs: Any, model_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        """The model's `_update_model_kwargs_for_generation`. Warns once if the step that gave `outputs` left out the caller's cache."""
        used, given = next((value for value in outputs.values() if isinstance(value, Cache)), None), model_kwargs.get(CACHE_ARGUMENT)
        # some models fill a cache and return none
        if not _is_given(used) if used is not None else given is not None and not given.get_seq_length():
            warn_once(
                f"a step of {type(self.model).__name__} used {'no cache' if used is None else f'a {type(used).__name__}'} in place of the "
                f"attached one: nothing is compressed (transformers {INSTALLED}; the last that was tested is {LAST_TESTED})"
            )
        return getattr(type(self.model), _UPDATE)(self.model, outputs, model_kwargs, *args, **kwargs)

    def _new_cache(self) -> Cache:
        config = self.model.config
        cache = self.factory(config)
        if not isinstance(cache, Cache):
            raise TypeError(f"the factory given to attach returned {type(cache).__name__}, expected a transformers Cache")
        self._made = cache
        if config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
            return EncoderDecoderCache(cache, DynamicCache())
        return cache

    def __deepcopy__(self, memo: dict) -> Attachment:
        return Attachment(copy.deepcopy(self.model, memo), self.factory)

    def __getstate__(self) -> dict:
        try:
            pickle.dumps(self.factory)
        except Exception as reason:
            raise pickle.PicklingError(
                f"a model is pickled with the cache attached to it, and its factory cannot be ({reason}): attach a cache class, a "
                "functools.partial of one or a function of a module, or detach(model) before"
            ) from None
        return self.__dict__

    def detach(self) -> None:
        """Restores the model's own caches. Idempotent; leaves a later attachment in place."""
        if getattr(self.model.__dict__.get(_PREPARE), "__self__", None) is self:
            detach(self.model)

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *exc: Any) -> None:
        self.detach()


def attach(model: PreTrainedModel | Pipeline, cache: FormatLike | Callable[..., Cache]) -> Attachment:
    """Gives every later `model.generate` that is called without a cache a fresh one, which takes precedence
    over the `cache_implementation` of the model's generation config. `generate(cache_implementation=...)`
    raises ValueError.

        attach(model, "turboquant_4bit_nc") attach(pipe, TurboQuantCache) attach(model, lambda config:
        TurboQuantCache(config, residual_length=128))

    A cache that the caller passes to `generate` must have seen the first tokens of the prompt: if one of them
    is known to differ, from an earlier call, `generate` raises ValueError.

    In encoder-decoder models it serves self-attention, beside an ordinary cache for the encoder's states.
    Where a step of `generate` uses another cache, as under PEFT's prefix tuning, a warning says so once.

    Args:
        model: any model with `generate`, or a pipeline of one.
        cache: a format, as CompressedCache takes it; a cache class; or a function that makes a new cache from the model's config.

    Returns an Attachment, which undoes it on `detach()` or as a context manager, and whose `last` shows the cache that was used.

    Raises:
        TypeError: `model` has no `generate`; `cache` is a cache (which cannot serve two calls), or neither a format nor callable, or
            returns something other than a Cache.
        ValueError: an unknown format; the model has a cache attached already, or keeps its state in something other than a Cache.
    """
    if isinstance(cache, Cache):
        raise TypeError(
            f"attach needs what makes a new cache for each call, such as {type(cache).__name__} or 'turboquant_4bit_nc': one "
            f"{type(cache).__name__} cannot serve two calls"
        )
    factory = cache if callable(cache) else partial(CompressedCache, format=formats.resolve(cache))
    model = _generating(model, "attach")
    if _PREPARE in model.__dict__:
        raise ValueError("the model has a cache attached already: detach it first")
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        raise ValueError(f"{type(model).__name__} does not keep its state in a transformers Cache: there is nothing to attach to")
    attachment = Attachment(model, factory)
    model.__dict__ |= {_PREPARE: attachment.prepare, _UPDATE: attachment.update, "generate": attachment.generate}
    return attachment


def detach(model: PreTrainedModel | Pipeline) -> None:
    """Undoes `attach` on `model`, if there is one."""
    model = _generating(model, "detach")
    for name in (*_METHODS, "generate"):
        model.__dict__.pop(name, None)


def _is_given(cache: Any) -> bool:
    """Whether the caller of `generate` gave the cache, or its cache for self-attention: transformers marks what it did not make itself."""
    return any(getattr(part, "_is_user_defined", False) for part in (cache, getattr(cache, "self_attention_cache", None)))


def _generating(model: Any, call: str) -> PreTrainedModel:
    """`model`, or the model of a pipeline. Raises TypeError if neither has `generate`."""
    from transformers import PreTrainedModel  # a second, unless a model is loaded

    found = model if hasattr(type(model), _PREPARE) else getattr(model, "model", None)
    if isinstance(found, PreTrainedModel) and hasattr(found, _PREPARE):
        return found
    raise TypeError(f"{call} needs a transformers model that has `generate`, or a pipeline of one; got {type(model).__name__}")
