"""`attach`: a fresh cache for every later `generate` of a model, for pipelines and libraries that do not let a cache through."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

_METHOD = "_prepare_cache_for_generation"


class Attachment:
    """What `attach` returns: `detach()` undoes it, and so does leaving it as a context manager.

    It stands in the model in place of the method that prepares caches. A copy of the model, pickled or deep-copied, has an attachment of
    its own with the same factory; `detach(copy)` undoes that one.
    """

    def __init__(self, model: PreTrainedModel, factory: Callable[..., Cache]):
        self.model, self.factory = model, factory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `_prepare_cache_for_generation`, with a cache of the factory where the caller asks for none."""
        stock = getattr(type(self.model), _METHOD).__get__(self.model)
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        model_kwargs, generation = given["model_kwargs"], given["generation_config"]
        if model_kwargs.get("past_key_values") is None and generation.use_cache is not False and generation.cache_implementation is None:
            model_kwargs["past_key_values"] = cache = self._made()
            if generation.is_assistant:  # its steps are taken back; transformers says so to the caches that it makes itself
                cache.activate_past_recording()
        return stock(*args, **kwargs)

    def _made(self) -> Cache:
        config = self.model.config
        cache = self.factory(config)
        if not isinstance(cache, Cache):
            raise TypeError(f"the factory given to attach returned {type(cache).__name__}, expected a transformers Cache")
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
        """Gives the model its own caches back. Idempotent, and no danger to a later attachment."""
        if self.model.__dict__.get(_METHOD) is self:
            del self.model.__dict__[_METHOD]

    def __enter__(self) -> PreTrainedModel:
        return self.model

    def __exit__(self, *exc: Any) -> None:
        self.detach()


def attach(model: PreTrainedModel, factory: Callable[..., Cache]) -> Attachment:
    """Every later `model.generate` that is given no cache of its own gets `factory(model.config)`.

    Encoder-decoder models get it for self-attention, beside an ordinary cache for the encoder's states.

    Raises:
        TypeError: `factory` is not callable (a cache instance cannot serve two calls), or returns something other than a Cache.
        ValueError: the model has a cache attached already, or keeps its state in something other than a Cache.
    """
    if not callable(factory):
        raise TypeError(f"attach needs a factory such as `lambda config: TurboQuantCache(config)`, got {type(factory).__name__}")
    if _METHOD in model.__dict__:
        raise ValueError("the model has a cache attached already: detach it first")
    if not model._supports_default_dynamic_cache():  # type: ignore[operator]
        raise ValueError(f"{type(model).__name__} does not keep its state in a transformers Cache: there is nothing to attach to")
    attachment = Attachment(model, factory)
    model.__dict__[_METHOD] = attachment
    return attachment


def detach(model: PreTrainedModel) -> None:
    """Undoes `attach` on `model`, if there is one."""
    model.__dict__.pop(_METHOD, None)
