"""One model layer's compressed cache: three zones in token order.

    first    the first `exact_first` tokens, in the model's dtype (attention sinks live there)
    body     everything between, as the format stores it
    recent   at least the last `exact_recent` tokens, in the model's dtype

Tokens leave `recent` for `body` in groups, so that encoding is off most steps; a token is encoded once. The tokens of the running step see
each other exactly, whatever the zones: `update` hands attention the state before the step plus the new tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.handle import KVHandle
from ..formats.base import Format
from ..kernels import Body, Payload, dense, on_triton, slab_table
from .fitting import Fitting
from .slots import append_both
from .zones import Zones


def differ(held: Tensor, given: Tensor) -> bool:
    """Whether two `[B, H, T, D]` differ in more than tokens."""
    return (held.shape[:2], held.shape[3], held.dtype) != (given.shape[:2], given.shape[3], given.dtype)


def check_alike(held: Tensor, given: Tensor, seen: int, what: str = "keys") -> None:
    """Raises ValueError if `given` `[B, H, T, D]` cannot follow `held`, of whatever `T`, after `seen` tokens."""
    if not differ(held, given):
        return
    if held.dtype != given.dtype:
        fix = "cast the model or the inputs (autocast changes what a layer computes in), or call reset() first"
    elif held.shape[1::2] != given.shape[1::2]:
        fix = "the cache is in use by another model: make a new one from this model's config, or call reset() first"
    else:
        fix = "call batch_repeat_interleave(n) first for beams and samples, or reset() for another batch"
    raise ValueError(
        f"the cache has seen {what} [B, H, T, D] = {[*held.shape[:2], seen, held.shape[3]]} in {held.dtype}, got {list(given.shape)} in "
        f"{given.dtype}: {fix}"
    )


def selected(indices: Tensor | Sequence[int] | slice) -> Callable[[Tensor], Tensor]:
    """What takes rows out of a tensor: `indices` as DynamicCache takes them. Raises TypeError for one index, which is no batch."""
    if isinstance(indices, slice):
        return lambda x: x[indices]
    rows = torch.as_tensor(indices)
    if rows.dim() != 1:
        raise TypeError(f"batch_select_indices({indices!r}): pass the rows to keep as a list, a slice, or a tensor of one dimension")
    return lambda x: x[rows.to(x.device)]


class CompressedLayer(Fitting, CacheLayerMixin):
    """A layer that keeps its tokens in `format`, with `exact_first` and `exact_recent` of them in the model's dtype.

    `update` returns plain tensors while the layer is empty, so that a prefill runs the model's own kernel on exact keys and values, and
    handles (`attention/handle.py`) afterwards. Shapes come from the tensors, so that a tensor-parallel rank holds its own heads.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, format: Format, exact_first: int = 4, exact_recent: int = 64):
        self.format, self.exact_first, self.exact_recent = format, exact_first, exact_recent
        self.zones: tuple[Zones, Zones] | None = None
        self._table: tuple[tuple[int, int], Tensor] | None = None
        self.is_initialized = False

    def __getstate__(self) -> dict:
        """Of copies, whose slabs lie elsewhere than the table says."""
        return self.__dict__ | {"_table": None}

    def __repr__(self) -> str:
        return f"CompressedLayer({self.format.name}, tokens={self.get_seq_length()})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.format.check(key_states.shape[-1], value_states.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.zones = (
            Zones(self.format.key, key_states, self.exact_first, self.exact_recent),
            Zones(self.format.value, value_states, self.exact_first, self.exact_recent),
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Stores `[B, H, T, D]` keys and values; returns what attention over all tokens seen takes for them.

        Raises ValueError for a batch, head count, head_dim or dtype other than what is stored; nothing is stored then.
        """
        self._check(key_states, value_states)
        self.settle()
        if self.zones is None:
            self.lazy_initialization(key_states, value_states)
        key, value = self.zones  # type: ignore[misc]
        empty = not key.length
        key.extend(key_states)
        value.extend(value_states)
        result: tuple[Tensor | KVHandle, Tensor | KVHandle]
        if empty:
            result = key_states, value_states
        elif torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            # Codes carry no gradient: hand autograd ordinary tensors in which the new tokens do.
            result = dense(key.side()), dense(value.side())
        else:
            payload = self._payload()
            result = KVHandle(payload, payload.key), KVHandle(payload, payload.value)
        if empty and not torch.compiler.is_compiling() and (key.body.keeps or value.body.keeps):
            self.wait(key_states)
        else:
            self.take_in()
        return result

    def _payload(self) -> Payload:
        key, value = self.zones  # type: ignore[misc]
        if not on_triton(key.first.device):
            return Payload(key.side(), value.side())
        body = None
        if key.body.length:
            slabs = tuple((k | key.body.once, v | value.body.once) for k, v in zip(key.body.slabs, value.body.slabs, strict=True))
            version = key.body.version, value.body.version
            if self._table is None or self._table[0] != version:
                self._table = version, slab_table(slabs)
            body = Body(key.body.codec, value.body.codec, slabs, key.body.length, self._table[1])
        return Payload(key.side(), value.side(), body, (key.first, value.first, key.recent, value.recent))

    @torch.no_grad()
    def take_in(self, real: Tensor | None = None) -> None:
        """After a step: tokens move to the zones where they belong."""
        key, value = self.zones  # type: ignore[misc]
        for zone in (key, value):
            zone.body.fit(zone.recent, real)
        keys, values = key.leave(), value.leave()
        if keys is not None and values is not None:
            append_both((key.body, value.body), (keys, values), min(key.block, value.block))
        key.keep()
        value.keep()

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in batch, heads or tokens")
        for held, given, what in zip(self._held(), (key, value), ("keys", "values"), strict=False):
            check_alike(held, given, self.get_seq_length(), what)

    def _held(self) -> tuple[Tensor, ...]:
        """Keys and values `[B, H, T, D]` for any T, to which new ones must be alike; none if the layer is empty."""
        return tuple(zone.first for zone in self.zones or ())

    # What generate asks.

    def get_seq_length(self) -> int:
        return self.zones[0].length if self.zones else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.14, still abstract in some releases

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 changes nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end")
        if tokens_to_remove and self.zones:
            self.settle()
            for zone in self.zones:
                zone.truncate(zone.length + tokens_to_remove)

    def reset(self) -> None:
        self.zones = self._table = None
        self.waiting = False
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        self._map(selected(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.zones:
            if self.device.type == "cuda":  # what goes to the host must have arrived there: older transformers do not wait for it
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.default_stream(self.device))
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        self._table = None  # it says where tensors were
        for zone in self.zones or ():
            zone.map(fn)

    # What users ask.

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales`, `exact` or `bookkeeping`."""
        self.settle()
        for zone in self.zones or ():
            yield from zone.tensors()
        if self._table is not None:
            yield "bookkeeping", self._table[1]

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes that a token of all rows takes in the model's dtype."""
        return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in self._held())

    def dense(self) -> tuple[Tensor, Tensor]:
        """All stored tokens decoded into the model's dtype, `[B, H, T, D]` each. Allocates the dense layer."""
        if not self.zones:
            raise ValueError("the layer is empty")
        self.settle()
        key, value = self.zones
        return dense(key.side()), dense(value.side())

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)


_NO_DENSE = (
    "a compressed layer holds no dense keys and values. Encoder (cross) attention reads them at every step and is not compressed: pass "
    "EncoderDecoderCache(<compressed cache>, DynamicCache()). To look at them, call layer.dense()."
)
