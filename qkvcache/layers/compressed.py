"""One model layer's cache that keeps all tokens, quantized (`storage/`).

The tokens of a step see each other exactly, whatever the zones: of a step of one token, it is in the residual already; of several,
attention reads what was stored before them, and the tensors themselves. A layer grows, or takes room for `max_length` tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.handle import KVHandle
from ..attention.padding import announce
from ..formats.base import Format
from ..kernels import Pair, Payload, dense, prepare, step, unfold, whole
from ..storage import Storage, check_room, differ, payload_of

Given = tuple[Tensor | KVHandle, Tensor | KVHandle]
"""What attention is given for keys and values."""


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


class CompressedLayer(CacheLayerMixin):
    """A layer that keeps its tokens in `format`, with `num_sink_tokens` and `residual_length` of them in the model's dtype.

    `update` returns plain tensors while the layer is empty, so that a prefill runs the model's own kernel on exact keys and values, and
    handles (`attention/handle.py`) afterwards. Shapes come from the tensors, so that a tensor-parallel rank holds its own heads.

    Args:
        max_length: how many tokens may come; None: any number.
        compile: whether steps of a layer that grows can be compiled; with `max_length` they always can. Chunks then join outside of
            compiled code, where masks are made (`expect`). Where even masks are made in compiled code, tokens for which there is no room
            are dropped, and the next call outside of it raises.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, format: Format, num_sink_tokens: int = 4, residual_length: int = 64, max_length: int | None = None, compile: bool = False
    ):
        if max_length is not None:  # the ring has room for a token
            num_sink_tokens = min(num_sink_tokens, max_length - 1)
            residual_length = min(residual_length, max_length - 1 - num_sink_tokens)
        self.format, self.num_sink_tokens, self.residual_length, self.max_length = format, num_sink_tokens, residual_length, max_length
        self.is_compileable = self.supports_early_init = compile or max_length is not None
        self.storage: Storage | None = None
        self.pending: Pair | None = None
        """The prompt, where the format keeps something of it once, until its attention says what of it is padding
        (`attention/padding.py`). Where attention goes past transformers' interface, whoever asks next ends the wait, and padding counts."""
        self.fresh = True
        """Whether there are no tokens."""
        self.is_initialized = False

    def __repr__(self) -> str:
        limit = "" if self.max_length is None else f" of {self.max_length}"
        return f"CompressedLayer({self.format.name}, tokens={self.get_seq_length()}{limit})"

    # What a CUDA graph makes is its own, and overwritten when it is replayed.
    @torch.compiler.disable(reason="storage is made outside of compiled code: call cache.early_initialization(...) before")
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.format.check(key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        like = key_states, value_states
        if self.storage is None or any(map(differ, self.storage.residual, like)):
            codecs = self.format.key, self.format.value
            self.storage = Storage(codecs, like, self.num_sink_tokens, self.residual_length, self.max_length, self.is_compileable)
            if self.is_compileable:
                prepare(codecs, (key_states.shape[3], value_states.shape[3]), self.dtype, self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Given:  # type: ignore[override]
        """Stores `[B, H, T, D]` keys and values; returns what attention over all tokens seen takes for them.

        Raises ValueError for a batch, head count, head_dim or dtype other than what is stored, and if `max_length` tokens are not enough;
        nothing is stored then.
        """
        if torch.compiler.is_compiling():
            return self._update_compiled(key_states, value_states) if self.is_compileable else self._update_apart(key_states, value_states)
        self._check(key_states, value_states)
        self.settle()
        if self.fresh:
            return self._begin(key_states, value_states)
        storage: Storage = self.storage  # type: ignore[assignment]
        tokens, new = key_states.shape[2], (key_states, value_states)
        storage.count()
        storage.expect(tokens)
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            payload = storage.payload_with(new)
            result = dense(payload.key), dense(payload.value)  # codes carry no gradient, the new tokens do
            storage.append((key_states.detach(), value_states.detach()))
            return result
        if tokens == 1:
            storage.step(new)
            payload = storage.payload()
        else:
            payload = storage.payload_with(new)
            storage.append(new)
        return _handles(payload)

    def _begin(self, key_states: Tensor, value_states: Tensor) -> Given:
        """`update` of an empty layer."""
        if self.max_length is not None:
            check_room(0, key_states.shape[2], self.max_length)
        self.lazy_initialization(key_states, value_states)
        self.pending, self.fresh = (key_states.detach(), value_states.detach()), False
        if self.storage.chunks.keeps:  # type: ignore[union-attr]
            announce(key_states, self)
        else:
            self.settle()
        return key_states, value_states

    def settle(self) -> None:
        """Ends the wait for what of a prompt is padding."""
        if self.pending is not None:
            self.padding(None)

    @torch.no_grad()
    def padding(self, real: Tensor | None) -> None:
        """Stores a prompt that waits; its tokens that are no padding, bool `[B, Q]`, say what is kept once (None: all)."""
        storage, (new, self.pending) = self.storage, (self.pending, None)
        if new is not None and storage is not None:
            storage.expect(new[0].shape[2])
            storage.chunks.fit(new, real)
            storage.append(new)

    @torch.compiler.disable
    def _update_apart(self, key_states: Tensor, value_states: Tensor) -> Given:
        """`update` of a layer that cannot be compiled, for attention that is compiled all the same: tokens in their order."""
        result = self.update(key_states, value_states)
        if key_states.shape[2] > 1 or isinstance(result[0], Tensor):
            return result
        return _handles(payload_of(*self.storage.zones()))  # type: ignore[union-attr]

    def _update_compiled(self, key_states: Tensor, value_states: Tensor) -> Given:
        """`update` without a number that changes: it may only write what it notes for the host."""
        if self.storage is None:
            if torch.compiler.is_exporting():  # storage would be made of fake tensors
                raise NotImplementedError(
                    "torch.export with a cache that has no storage yet: call cache.early_initialization(batch_size, num_heads, head_dim, "
                    "dtype, device) before, to read a prompt, or run the prompt before, to go on from it"
                )
            self.lazy_initialization(key_states, value_states)
        storage: Storage = self.storage  # type: ignore[assignment]
        if any(map(differ, storage.residual, (key_states, value_states))):
            raise ValueError(
                f"storage is for keys and values like {list(storage.residual[0].shape)} in {storage.residual[0].dtype}, got "
                f"{list(key_states.shape)} in {key_states.dtype}: call cache.reset() and cache.early_initialization(...) before"
            )
        tokens = key_states.shape[2]
        storage.note(tokens)
        result: Given = key_states, value_states
        if self.fresh:
            storage.chunks.fit((key_states, value_states))
        elif tokens > 1:
            result = unfold(storage.buffers, (key_states, value_states))
        step(storage.buffers, (key_states, value_states))
        if tokens == 1 and not self.fresh:
            result = _handles(whole(storage.buffers))
        self.fresh = False
        return result

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in batch, heads or tokens")
        for held, given, what in zip(self._held(), (key, value), ("keys", "values"), strict=False):
            check_alike(held, given, self.get_seq_length(), what)

    def _held(self) -> tuple[Tensor, ...]:
        """Keys and values `[B, H, T, D]` for any T, to which new ones must be alike; none if the layer is empty."""
        return () if self.fresh or self.storage is None else self.storage.residual

    @property
    def rows(self) -> int:
        """Sequences of which there are tokens."""
        held = self._held()
        return held[0].shape[0] if held else 0

    # What generate asks.

    def get_seq_length(self):
        """Tokens seen: in compiled code of layers that can be compiled a tensor on the device."""
        if self.storage is None:
            return 0
        if torch.compiler.is_compiling() and self.is_compileable:
            return self.storage.on_device()
        if self.pending is not None:
            return self.pending[0].shape[2]
        self.storage.count()
        return self.storage.seen

    def query_offset(self) -> int | Tensor:
        """Tokens seen, without waiting for the device."""
        return self.get_seq_length() if self.storage is None or self.pending is not None else self.storage.query_offset()

    def expect(self, tokens: int) -> None:
        """Makes room for so many tokens more, outside of compiled code. Raises ValueError if `max_length` does not allow them."""
        self.settle()
        if self.storage is not None:
            self.storage.expect(tokens)
        elif self.max_length is not None:
            check_room(0, tokens, self.max_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, of which the first is column 0: of layers that can be compiled, for more tokens than there are. Raises
        ValueError if `max_length` tokens are not enough for the queries."""
        if not self.is_compileable:
            return self.get_seq_length() + query_length, 0
        if not torch.compiler.is_compiling():
            self.expect(query_length)
            if torch.is_grad_enabled():  # where `update` may have to return tensors of just the tokens seen
                return self.get_seq_length() + query_length, 0
        return (query_length if self.fresh or self.storage is None else self.storage.columns), 0

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.14, still abstract in some releases

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 changes nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end")
        seen = self.get_seq_length()
        if tokens_to_remove and seen:
            self.settle()
            seen = max(seen + tokens_to_remove, 0)
            self.storage.truncate(seen)  # type: ignore[union-attr]
            self.fresh = not seen

    def reset(self) -> None:
        """Forgets all tokens; what can be compiled keeps its storage."""
        self.pending, self.fresh = None, True
        if not self.is_compileable:
            self.storage, self.is_initialized = None, False
        elif self.storage is not None:
            self.storage.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)), self.is_compileable)

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        self._map(selected(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            if self.device.type == "cuda":  # what goes to the host must have arrived there: older transformers do not wait for it
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.default_stream(self.device))
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def _map(self, fn: Callable[[Tensor], Tensor], in_place: bool = False) -> None:
        self.settle()
        if self.storage is not None:
            self.storage.count()
            self.storage.map(fn, in_place)

    # What users ask.

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales`, `exact` or `bookkeeping`."""
        self.settle()
        if self.storage is not None:
            yield from self.storage.tensors()

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes that a token of all rows takes in the model's dtype."""
        return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in self._held())

    def dense(self) -> Pair:
        """All stored tokens decoded into the model's dtype, `[B, H, T, D]` each. Allocates the dense layer."""
        if not self.get_seq_length():
            raise ValueError("the layer is empty")
        self.settle()
        return self.storage.dense()  # type: ignore[union-attr]

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)


def _handles(payload: Payload) -> tuple[KVHandle, KVHandle]:
    return KVHandle(payload, payload.key), KVHandle(payload, payload.value)


_NO_DENSE = (
    "a compressed layer holds no dense keys and values. Encoder (cross) attention reads them at every step and is not compressed: pass "
    "EncoderDecoderCache(<compressed cache>, DynamicCache()). To look at them, call layer.dense()."
)
