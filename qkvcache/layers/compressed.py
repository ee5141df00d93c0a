"""One model layer's compressed cache: three zones in token order.

    first    the first `exact_first` tokens, in the model's dtype (attention sinks live there)
    body     everything between, as the format stores it
    recent   at least the last `exact_recent` tokens, in the model's dtype

Tokens leave `recent` for `body` in groups, so that encoding is off most steps; a token is encoded once. The tokens of the running step see
each other exactly, whatever the zones: `update` hands attention the state before the step plus the new tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.handle import KVHandle
from ..formats.base import Codec, Format
from ..kernels import Body, Exact, Packed, Payload, Segment, Side, dense, on_triton, slab_table
from .fitting import Fitting
from .slots import PAGE, Slots, append_both

BLOCK = 2**20
"""Elements that are encoded, or decoded by the torch reference, at a time: the bound on temporaries (4 MiB in fp32). Fewer cost a CPU more
in calls than they save in cache."""
GROUP = 32
"""Tokens that leave the recent zone together, if it is at least that long."""


class Zones:
    """The three zones of one side. Exact tensors are `[B, H, T, D]`, empty (`T` = 0) where there is nothing.

    A step is `extend`, `side`, `leave`, `keep`: new tokens join the recent zone, attention reads, the oldest of them leave, the rest stay.
    """

    def __init__(self, codec: Codec, like: Tensor, exact_first: int, exact_recent: int):
        self.exact_first, self.exact_recent = exact_first, exact_recent
        self.first = self.recent = like[:, :, :0].detach().clone()
        self.body = Slots(codec, like.shape[3])

    @property
    def length(self) -> int:
        return self.first.shape[2] + self.body.length + self.recent.shape[2]

    @property
    def block(self) -> int:
        """Tokens in a block, a whole number of pages."""
        batch, heads, _, dim = self.first.shape
        return max(BLOCK // (batch * heads * dim) // PAGE, 1) * PAGE

    def extend(self, new: Tensor) -> None:
        self.borrowed = not self.recent.shape[2]
        self.recent = new if self.borrowed else torch.cat([self.recent, new], dim=2)

    def side(self) -> Side:
        """What attention over everything stored reads."""
        batch, heads, _, dim = self.first.shape
        first, recent, codec, blocks = self.first, self.recent, self.body.codec, self.body.blocks(self.block)

        def build() -> tuple[Segment, ...]:
            packed = (Packed(codec, codes, count, dim) for codes, count in blocks)
            row: tuple[Segment, ...] = (Exact(first), *packed, Exact(recent))
            return tuple(segment for segment in row if segment.tokens)

        return Side(build, (batch, heads, self.length, dim), first.dtype, first.device)

    def leave(self) -> Tensor | None:
        """Fills the first zone; returns the oldest recent tokens, for the body, if enough of them are there."""
        recent = self.recent.detach()
        missing = self.exact_first - self.first.shape[2]
        if missing > 0:  # the body is empty then
            self.first = torch.cat([self.first, recent[:, :, :missing]], dim=2)
            recent = recent[:, :, missing:]
        self.recent = recent
        leaving = recent.shape[2] - self.exact_recent
        if leaving <= min(GROUP, self.exact_recent):
            return None
        self.recent = recent[:, :, leaving:]
        return recent[:, :, :leaving]

    def keep(self) -> None:
        """Makes the recent zone a copy of its own: what came in is the caller's, and what is left may be a view of something larger."""
        own = not self.borrowed and self.recent.untyped_storage().nbytes() == self.recent.numel() * self.recent.itemsize
        if not own:
            self.recent = self.recent.clone()

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        length = min(max(length, 0), self.length)
        body = length - self.first.shape[2]
        recent = body - self.body.length
        self.recent = self.recent[:, :, : max(recent, 0)]
        self.body.truncate(max(body, 0))
        self.first = self.first[:, :, :length]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.first, self.recent = fn(self.first), fn(self.recent)
        self.body.map(fn)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("exact", self.first), ("exact", self.recent))
        yield from self.body.tensors()


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
        if empty and not torch.compiler.is_compiling() and any(zone.body.codec.keeps(zone.body.head_dim) for zone in (key, value)):
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
            zone.body.fit(zone.recent.detach(), real)
        keys, values = key.leave(), value.leave()
        if keys is not None and values is not None:
            append_both((key.body, value.body), (keys, values), min(key.block, value.block))
        key.keep()
        value.keep()

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in batch, heads or tokens")
        if not self.zones:
            return
        for zone, x, what in zip(self.zones, (key, value), ("keys", "values"), strict=True):
            held, given = zone.first, x
            if (held.shape[:2], held.shape[3], held.dtype) != (given.shape[:2], given.shape[3], given.dtype):
                raise ValueError(
                    f"the cache holds {what} [B, H, T, D] = {[*held.shape[:2], zone.length, held.shape[3]]} in {held.dtype}, got "
                    f"{list(given.shape)} in {given.dtype}: call reset(), or make a new cache for another batch"
                )

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

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.zones:
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
        return sum(z.first.shape[0] * z.first.shape[1] * z.first.shape[3] * z.first.itemsize for z in self.zones or ())

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
