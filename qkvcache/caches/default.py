"""`default`: the caches that transformers makes by itself are compressed within a context."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Unpack

from transformers import DynamicCache, EncoderDecoderCache

from .. import formats, policies
from ..formats import FormatLike
from ..formats.base import hint
from .base import CompressedCache
from .named import FormatOptions

_options: ContextVar[dict[str, Any] | None] = ContextVar("qkvcache.default", default=None)
_stock, _stock_pair = DynamicCache.__init__, EncoderDecoderCache.__init__
_lock, _contexts = threading.Lock(), 0


@contextmanager
def default(*, format: FormatLike | None = None, **options: Unpack[FormatOptions]) -> Iterator[None]:
    """Makes each `DynamicCache` that transformers creates within the context a `CompressedCache` with these options: in `generate`,
    pipelines, and libraries that call them without a cache.

        with default(format="int8"):
            model.generate(**inputs)

    Contexts may be nested; the innermost counts. A context belongs to its thread or asyncio task: in a thread that is started within
    it, transformers makes its own caches, unless that thread enters a context too. Caches that other code makes, and those of an
    encoder's states, stay as they are.

    Raises:
        TypeError: neither `format` nor `policy`, an unknown option.
        ValueError: an unknown format or policy.

    Errors that depend on the model are raised where its cache is made.
    """
    global _contexts
    known = inspect.signature(CompressedCache).parameters
    for name in options.keys() - known.keys() | options.keys() & {"config"}:
        raise TypeError(f"default has no option {name}={options[name]!r}: {hint(name, known)}")  # type: ignore[literal-required]
    chosen: dict[str, Any] = {"format": format, "policy": None, **options}
    if format is None and chosen["policy"] is None:
        raise TypeError("pass a format such as format='turboquant_4bit_nc', a policy such as policy='keydiff', or both")
    chosen["format"] = None if format is None else formats.resolve(format)
    chosen["policy"] = None if chosen["policy"] is None else policies.resolve(chosen["policy"])
    with _lock:
        _contexts += 1
        DynamicCache.__init__, EncoderDecoderCache.__init__ = _compressed, _paired  # type: ignore[method-assign]
    token = _options.set(chosen)
    try:
        yield
    finally:
        _options.reset(token)
        with _lock:
            _contexts -= 1
            if not _contexts:
                DynamicCache.__init__, EncoderDecoderCache.__init__ = _stock, _stock_pair  # type: ignore[method-assign]


def _chosen() -> dict[str, Any] | None:
    """The options of the context in which transformers calls the caller; None if there is none, or other code does."""
    by_transformers = sys._getframe(2).f_globals.get("__name__", "").startswith("transformers.")
    return _options.get() if by_transformers else None


@functools.wraps(_stock)
def _compressed(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
    """`DynamicCache.__init__` while there are contexts."""
    options = _chosen() if type(self) is DynamicCache else None
    given = inspect.signature(_stock).bind(self, *args, **kwargs).arguments
    if options is None or given.get("config") is None or given.get("ddp_cache_data") is not None:
        return _stock(self, *args, **kwargs)
    self.__class__ = CompressedCache
    offloading = {"offloading": True} if given.get("offloading") else {}
    CompressedCache.__init__(self, given["config"], **options | offloading)  # type: ignore[arg-type]


@functools.wraps(_stock_pair)
def _paired(self: EncoderDecoderCache, *caches: Any) -> None:
    """`EncoderDecoderCache.__init__` while there are contexts: the second cache is of an encoder's states, which are not compressed."""
    if _chosen() is not None and len(caches) == 2 and type(caches[1]) is CompressedCache:
        caches = caches[0], DynamicCache()
    _stock_pair(self, *caches)
