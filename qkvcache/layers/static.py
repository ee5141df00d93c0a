"""One model layer's compressed cache at addresses that never change, for torch.compile and CUDA graphs.

Storage for `max_length` tokens is taken at once (`kernels/store.py`), and the device counts how much of it is used (`counted.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..attention.handle import KVHandle
from ..formats.base import Format
from ..kernels import Body, Payload, Store, append, dense, on_triton, prepare, step, unfold
from ..kernels.store import BODY, DROPPED, SEEN
from .compressed import CompressedLayer, differ
from .counted import Counted
from .slots import PAGE
from .zones import block_of


class StaticLayer(Counted, CompressedLayer):
    """A layer for up to `max_length` tokens: the first `exact_first` and the last `exact_recent` of them stay in the model's dtype.

    From then on one token leaves the recent zone for each that comes. Where even masks are made in compiled code, tokens beyond
    `max_length` are dropped, and the next call outside of it raises.
    """

    is_compileable = True
    supports_early_init = True

    def __init__(self, format: Format, max_length: int, exact_first: int = 4, exact_recent: int = 64):
        exact_first = min(exact_first, max_length - 1)  # the ring has room for a token
        super().__init__(format, exact_first, min(exact_recent, max_length - 1 - exact_first))
        self.max_length, self.codecs = max_length, (format.key, format.value)
        self.store: Store | None = None
        self._forget()

    def _forget(self) -> None:
        self.pending: tuple[Tensor, Tensor] | None = None
        self.waiting = False
        self.fresh = True
        self.body = 0
        self.start_counting()

    def __repr__(self) -> str:
        return f"StaticLayer({self.format.name}, tokens={self.get_seq_length()} of {self.max_length})"

    # What a CUDA graph makes is its own, and overwritten when it is replayed.
    @torch.compiler.disable(reason="storage is made outside of compiled code: call cache.early_initialization(...) before")
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.format.check(key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        like = key_states, value_states
        if self.store is None or any(map(differ, self.store.ring, like)):
            with torch.inference_mode(False):  # what is made in inference mode may be written in no other
                self._hold(Store.make(self.codecs, like, self.exact_first, self.exact_recent + 1, self.max_length, PAGE))
            prepare(self.codecs, (key_states.shape[3], value_states.shape[3]), self.dtype, self.device)
        self.is_initialized = True

    def _hold(self, store: Store) -> None:
        self.store = store
        for tensor in store.arguments[0]:
            torch._dynamo.mark_static_address(tensor)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Stores `[B, H, T, D]` keys and values; returns what attention over all tokens seen takes for them.

        Raises ValueError for a batch, head count, head_dim or dtype other than what is stored, and if `max_length` tokens are not enough;
        nothing is stored then.
        """
        if torch.compiler.is_compiling():
            return self._update_compiled(key_states, value_states)
        self._check(key_states, value_states)
        tokens = key_states.shape[2]
        in_place = tokens == 1 and not self.fresh
        self.count()
        self.expect(tokens)
        if self.store is None or self.fresh:
            self.lazy_initialization(key_states, value_states)
        store: Store = self.store  # type: ignore[assignment]
        new = key_states.detach(), value_states.detach()
        with_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        result: tuple[Tensor | KVHandle, Tensor | KVHandle] = key_states, value_states
        if self.fresh and any(store.once):
            self.pending, self.fresh = new, False
            self.wait(key_states)
            self.advance(tokens)
            return result
        if with_gradient and not self.fresh:
            payload = self._payload_of_chunk((key_states, value_states))
            result = dense(payload.key), dense(payload.value)  # codes carry no gradient, the new tokens do
        elif tokens > 1 and not self.fresh:
            result = _handles(self._payload_of_chunk(new))
        with torch.no_grad():
            if in_place:
                step(store, new)
            else:
                append(store, new, self.seen, self.body, self.block)
        self.advance(tokens)
        if in_place and not with_gradient:
            result = _handles(store.payload(store.sides(self.seen, self.body, self.block)))
        self.fresh = False
        return result

    def take_in(self, real: Tensor | None = None) -> None:
        """Stores the prompt, of which attention has said now what is padding."""
        store, (new, self.pending) = self.store, (self.pending, None)
        store.fit(new, real)  # type: ignore[union-attr, arg-type]
        append(store, new, 0, 0, self.block)  # type: ignore[arg-type]

    def count(self) -> None:
        self.settle()
        super().count()

    def _update_compiled(self, key_states: Tensor, value_states: Tensor):
        """`update` without a number that changes: it may only write what it notes for the host."""
        if self.store is None:
            if torch.compiler.is_exporting():  # storage would be made of fake tensors
                raise NotImplementedError(
                    "torch.export with a preallocated cache that has no storage yet: call cache.early_initialization(batch_size, "
                    "num_heads, head_dim, dtype, device) before, to read a prompt, or run the prompt before, to go on from it"
                )
            self.lazy_initialization(key_states, value_states)
        store: Store = self.store  # type: ignore[assignment]
        if any(map(differ, store.ring, (key_states, value_states))):
            raise ValueError(
                f"storage is for keys and values like {list(store.ring[0].shape)} in {store.ring[0].dtype}, got "
                f"{list(key_states.shape)} in {key_states.dtype}: call cache.reset() and cache.early_initialization(...) before"
            )
        tokens = key_states.shape[2]
        self.note(tokens)
        result: tuple[Tensor | KVHandle, Tensor | KVHandle] = key_states, value_states
        if self.fresh:
            store.fit((key_states, value_states))
        elif tokens > 1:
            result = unfold(store, (key_states, value_states))
        step(store, (key_states, value_states))
        if tokens == 1 and not self.fresh:
            result = _handles(store.payload(store.slotted()))
        self.fresh = False
        return result

    def _payload_of_chunk(self, new: tuple[Tensor, Tensor]) -> Payload:
        """What attention reads of the tokens before this step, and its own."""
        store: Store = self.store  # type: ignore[assignment]
        first = min(self.seen, self.exact_first)
        held = self.seen - first - self.body
        recent = torch.cat([store.recent(0, held, self.body), new[0]], dim=2), torch.cat([store.recent(1, held, self.body), new[1]], dim=2)
        key, value = store.sides(self.seen, self.body, self.block, recent)
        if not on_triton(self.device):
            return Payload(key, value)
        body = Body(*store.codecs, store.body.slabs, self.body, store.table) if self.body else None
        return Payload(key, value, body, (*(x[:, :, :first] for x in store.first), *recent))

    @property
    def block(self) -> int:
        return block_of(self.store.ring[0])  # type: ignore[union-attr]

    def on_device(self) -> int | Tensor:
        return 0 if self.store is None else self.store.state[SEEN]

    def read_counts(self) -> None:
        self.seen, self.body, _, dropped = self.store.state.tolist()  # type: ignore[union-attr]
        if dropped:
            raise ValueError(f"{dropped} tokens came when the cache was full: max_length={self.max_length} is too small; call reset()")

    def advance(self, tokens: int) -> None:
        self.seen, self.body = self.store.counts(self.seen, self.body, tokens)  # type: ignore[union-attr]

    def _held(self) -> tuple[Tensor, ...]:
        return () if self.store is None or self.fresh else self.store.ring

    # What generate asks.

    def get_seq_length(self):
        """Tokens seen: in compiled code a tensor on the device."""
        if torch.compiler.is_compiling():
            return self.on_device()
        return super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of a mask, of which the first is column 0. Raises ValueError if `max_length` tokens are not enough for the queries."""
        if not torch.compiler.is_compiling():
            self.expect(query_length)
            if torch.is_grad_enabled():  # where `update` may have to return tensors of just the tokens seen
                self.count()
                return self.seen + query_length, 0
        return (query_length if self.fresh else self.max_length), 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 changes nothing."""
        if tokens_to_remove > 0:
            super().crop(tokens_to_remove)
        self.count()
        if not tokens_to_remove or self.fresh:
            return
        seen = max(self.seen + tokens_to_remove, 0)
        self._set(seen, min(self.body, max(seen - self.exact_first, 0)))

    def _set(self, seen: int, body: int) -> None:
        self.seen, self.body, self.fresh = seen, body, not seen
        for place, count in ((SEEN, seen), (BODY, body), (DROPPED, 0)):
            self.store.state[place].fill_(count)  # type: ignore[union-attr]

    def reset(self) -> None:
        """Forgets all tokens and keeps the storage."""
        self._forget()
        if self.store is not None:
            for tensor in self.store.rows(self.store.slots):  # a nan that is hidden would show itself as nan times a weight of 0
                tensor.zero_()
            self._set(0, 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.count()
        if self.store is None:
            return
        for tensor in self.store.rows(self.body):
            tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        if self.store is not None:
            with torch.inference_mode(False):
                self._hold(self.store.map(fn))

    # What users ask.

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self.store is not None:
            yield from self.store.roles()

    def dense(self) -> tuple[Tensor, Tensor]:
        self.count()
        if self.store is None:
            raise ValueError("the layer is empty")
        key, value = self.store.sides(self.seen, self.body, self.block)
        return dense(key), dense(value)


def _handles(payload: Payload) -> tuple[KVHandle, KVHandle]:
    return KVHandle(payload, payload.key), KVHandle(payload, payload.value)
