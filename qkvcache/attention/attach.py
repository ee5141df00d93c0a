"""`attach`: a fresh cache for every later `generate` of a model, for pipelines and libraries that do not let a cache through."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel

_METHOD = "_prepare_cache_for_generation"


class Attachment:
    """What `attach` returns: `detach()` undoes it, and so does leaving it as a context manager."""

    def __init__(self, model: PreTrainedModel, method: Callable):
        self.model, self.method = model, method

    def detach(self) -> None:
        """Gives the model its own caches back. Idempotent, and no danger to a later attachment."""
        if self.model.__dict__.get(_METHOD) is self.method:
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
    stock = getattr(model, _METHOD)
    signature = inspect.signature(stock)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model_kwargs, generation = given["model_kwargs"], given["generation_config"]
        if model_kwargs.get("past_key_values") is None and generation.use_cache is not False and generation.cache_implementation is None:
            cache = factory(model.config)
            if not isinstance(cache, Cache):
                raise TypeError(f"the factory given to attach returned {type(cache).__name__}, expected a transformers Cache")
            if model.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
                cache = EncoderDecoderCache(cache, DynamicCache())
            model_kwargs["past_key_values"] = cache
        return stock(*args, **kwargs)  # type: ignore[operator]

    model.__dict__[_METHOD] = prepare
    return Attachment(model, prepare)


def detach(model: PreTrainedModel) -> None:
    """Undoes `attach` on `model`, if there is one."""
    model.__dict__.pop(_METHOD, None)
