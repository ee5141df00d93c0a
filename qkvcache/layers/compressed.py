"""`CompressedLayer`: the cache of one model layer that keeps all tokens, quantized (`storage/`).

The tokens of a step attend to each other exactly. The token of a step of one is read from the residual. In a
step of several tokens, attention reads the tokens stored before the step and then the new tensors themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.compressed_kv import NO_COLUMNS, CompressedKV, warn_once
from ..attention.masks import kernel_options, once
from ..attention.padding import PlainAttention, await_attention, await_compiled_attention
from ..attention.uncompiled import uncompiled
from ..autocast import without_autocast
from ..formats.base import Codec, Format
from ..formats.outlying import LEAST
from ..kernels import (
    AttentionInputs,
    PagedInputs,
    Pair,
    calibrate,
    compile_step,
    compiles_step,
    dense,
    prepare,
    read,
    step,
    unfold,
)
from ..kernels.inputs import RunningStep
from ..kernels.paged_inputs import TOKENS
from ..kernels.segments import both, differ
from ..storage import RowPages, Storage, attention_inputs_of, check_room

KeysAndValues = tuple[Tensor | CompressedKV, Tensor | CompressedKV]
"""The result of `update`."""


def check_alike(stored: Pair, given: Pair, seq_length: Callable[[], int]) -> None:
    """Raises ValueError if keys or values `given` `[B, H, T, D]` differ from those `stored` in anything but
    `T`. `seq_length()`: tokens seen, for the message."""
    for held, new, what in zip(stored, given, ("keys", "values"), strict=True):
        if differ(held, new):
            raise ValueError(_difference(held, new, seq_length(), what))


def _difference(stored: Tensor, given: Tensor, seq_length: int, what: str) -> str:
    if stored.dtype != given.dtype:
        fix = "cast the model or the inputs (autocast changes what a layer computes in), or call reset() first"
    elif stored.shape[1::2] != given.shape[1::2]:
        fix = "the cache is in use by another model: make a new one from this model's config, or call reset() first"
    else:
        fix = "call batch_repeat_interleave(n) first for beams and samples, or reset() for another batch"
    return (
        f"the cache has seen {what} [B, H, T, D] = {[*stored.shape[:2], seq_length, stored.shape[3]]} in {stored.dtype}, got "
        f"{list(given.shape)} in {given.dtype}: {fix}"
    )


POSITIONS = "position_ids"
"""The positions of all tokens, among the tensors of an indexer."""


def rows_of(indices: Tensor | Sequence[int] | slice, count: int) -> list[int]:
    """The rows among `count` that `DynamicCache.batch_select_indices` selects by these `indices`. Raises
    TypeError for a single index, ValueError for none, IndexError for rows that do not exist."""
    if not isinstance(indices, slice):
        indices = torch.as_tensor(indices, device="cpu")
        if indices.dim() != 1:
            raise TypeError(f"batch_select_indices({indices!r}): pass the rows to keep as a list, a slice, or a tensor of one dimension")
        if not indices.numel():
            raise ValueError(f"batch_select_indices({indices!r}): pass one row or more, or call reset() to remove all tokens")
    return torch.arange(count, device="cpu")[indices].tolist()


class CompressedLayer(CacheLayerMixin):
    """A layer that quantizes its tokens in `format`, except the first `num_sink_tokens` and the last `residual_length`.

    `update` of an empty layer returns plain tensors, so that a prefill runs the model's own kernel on exact
    keys and values; later it returns `CompressedKV`. Shapes come from the tensors: a tensor-parallel rank
    stores its own heads.

    Args:
        max_length: the most tokens that may be seen; storage for them is allocated at once. None: storage grows.
        compile: whether steps of a growing layer can be compiled; with `max_length` they always can. Pages are then added outside of
            compiled code, when masks are made (`reserve`). If masks are made in compiled code too, tokens
            without room are dropped, and the next call outside of it raises ValueError.
        new_pages: makes the pages of its storage, with the arguments of `RowPages`.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    snapshot_kind = "compressed"
    """The kind of its snapshots (`prefix/snapshot.py`)."""
    examines_keys = True
    """Whether `instead` may choose the format by the first keys."""
    compiles_ahead = True
    """Whether the kernels of a step are those that `compile_step` compiles while a prompt is read."""
    is_restorable = True
    """Whether a step that ended between two layers can be taken back."""
    rule = ""
    """What chooses the tokens that stay, by its attention; empty: all stay."""

    def __init__(
        self,
        format: Format,
        num_sink_tokens: int = 4,
        residual_length: int = 64,
        max_length: int | None = None,
        compile: bool = False,
        new_pages: Callable[..., RowPages] = RowPages,
    ):
        if max_length is not None:  # the residual must have room for a token
            num_sink_tokens = min(num_sink_tokens, max_length - 1)
            residual_length = min(residual_length, max_length - 1 - num_sink_tokens)
        self.format, self.num_sink_tokens, self.residual_length, self.max_length = format, num_sink_tokens, residual_length, max_length
        self.new_pages, self.running = new_pages, RunningStep()
        """`running`: the plan of the running step, which the layers of a cache share."""
        self.made_with, self.chosen = format, False
        """The format before the keys of a text were seen, and whether they chose `format`."""
        self.instead: Callable[[Tensor, Tensor | None], Format | None] | None = None
        """Chooses the format by the first `LEAST` or more keys `[B, H, T, D]` and their validity `[B, T]`,
        before one of them is quantized: its result takes the place of `format`, unless it is None. None: the
        format stays."""
        self.is_compileable = self.supports_early_init = compile or max_length is not None
        self.storage = None
        self.pending: Pair | None = None
        """The tokens of a step that are not stored yet, because rows have no statistics and attention must
        first report the padding (`attention/padding.py`). If attention does not go through transformers'
        interface, `commit` stores them as if there were no padding."""
        self.detached_from = 2**62
        """The first stored token that had a gradient, if it is still stored."""
        self.offload_pending = False
        """Whether the layer is offloaded as soon as its pending prompt is stored."""
        self.empty = True
        """Whether the layer has no tokens."""
        self.is_initialized = False
        self.mask_by_column: bool | None = True
        """Whether masks have `storage.columns` columns; masks of flash attention do not. None: not known."""
        self.prompt_columns = 0
        """Columns to which a prompt is padded for models that need more columns than the prompt has tokens;
        0: no padding."""

    @property
    def storage(self) -> Storage | None:
        """The stored tokens; None before there is storage. The current stream waits for tokens that are still
        being copied from host memory."""
        if self.arrival is not None:
            arrival, self.arrival = self.arrival, None
            arrival.wait(torch.cuda.current_stream(self.device))
        return self._storage

    @storage.setter
    def storage(self, storage: Storage | None) -> None:
        self._storage, self.arrival = storage, None

    arrival: torch.cuda.Event | None = None
    """The event after which the storage holds the tokens copied from host memory (`snapshot.restore`); None
    if nothing is being copied."""

    def __getstate__(self) -> dict:
        _ = self.storage  # events cannot be copied
        return self.__dict__

    # Tensors that a CUDA graph allocates belong to it, and are overwritten when it is replayed.
    @uncompiled("storage is made outside of compiled code: call cache.early_initialization(...) before")
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dims = key_states.shape[3], value_states.shape[3]
        codecs = self.codecs(dims)
        self.format.check(dims[0], dims[1] if codecs[1] == self.format.value else None)
        self.dtype, self.device = key_states.dtype, key_states.device
        like = key_states, value_states
        if self.storage is None or any(map(differ, self.storage.residual, like)):
            self.storage = self.make_storage(like)
            if self.is_compileable:
                self.prepare(dims)
        self.is_initialized = True

    def codecs(self, dims: tuple[int, int]) -> tuple[Codec, Codec]:
        """The codecs for keys and values with these head dims."""
        return self.format.key, self.format.value

    def prepare(self, dims: tuple[int, int]) -> None:
        """Allocates what kernels for keys and values of so many channels keep, at fixed addresses."""
        prepare(self.codecs(dims), dims, self.dtype, self.device)

    def make_storage(self, like: Pair) -> Storage:
        """Empty storage for keys and values of the shape, dtype and device of `like`, `[B, H, T, D]` each."""
        codecs = self.codecs((like[0].shape[3], like[1].shape[3]))
        zones = self.num_sink_tokens, self.residual_length
        return Storage(codecs, like, *zones, self.max_length, self.is_compileable, self.new_pages)

    def simulated(self, like: Pair, prompt: int, seq_length: int, query_heads: int) -> Storage:
        """Storage of the size that it has after `seq_length` tokens, of which `prompt` came at once, for planning."""
        storage = self.make_storage(like)
        storage.simulate(prompt, seq_length, query_heads)
        return storage

    @without_autocast("key_states", "value_states")
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> KeysAndValues:  # type: ignore[override]
        """Stores keys and values `[B, H, T, D]`; returns the keys and values of all tokens seen, for attention.

        Raises ValueError, and stores nothing, if the batch, head count, head_dim or dtype differ from the
        stored tokens, or if `max_length` is exceeded.
        """
        if torch.compiler.is_compiling():
            if self.is_compileable:
                return self._update_compiled(key_states, value_states)
            if torch.compiler.is_exporting():  # nothing is left out of an exported program
                raise NotImplementedError(
                    "torch.export with a cache that grows: its tensors change between steps; make the cache with max_length"
                )
            return self._update_uncompiled(key_states, value_states)
        storage, has_grad = self._storage, key_states.requires_grad or value_states.requires_grad
        given = key_states.shape, value_states.shape, key_states.dtype, value_states.dtype
        if not has_grad and storage is not None and storage.seq_length < storage.ready and given == storage.token:
            return self._compressed(storage.add_token((key_states, value_states)))
        self._check(key_states, value_states)
        self.commit()
        differentiates = has_grad and torch.is_grad_enabled()
        if differentiates:
            self._warn_of_detached()
        if self.empty:
            return self._prefill(key_states, value_states)
        new = key_states, value_states
        self._choose_format_late(new)
        if differentiates:
            inputs, tokens = self._add(both(Tensor.detach, new)), key_states.shape[2]
            held = both(lambda side: dense(side)[:, :, :-tokens], (inputs.key, inputs.value))
            key, value = (torch.cat(sides, dim=2) for sides in zip(held, new, strict=True))  # only the new tokens carry a gradient
            self._await(key)
            return key, value
        inputs = self._add(new)
        self._await(inputs)
        return self._compressed(inputs)

    def _warn_of_detached(self) -> None:
        """Warns once if tokens with a gradient attend to stored ones that had one, too."""
        seq_length = self.get_seq_length()
        if self.detached_from < seq_length:
            warn_once(
                "gradients do not reach the tokens in the cache, and some of them were stored in a step with gradients: those of this step "
                "are not the whole ones. Read the text in one step to train on it, or under torch.no_grad() up to here if it is fixed"
            )
        else:
            self.detached_from = seq_length

    def _add(self, new: Pair) -> AttentionInputs:
        """The inputs of attention over the stored tokens and `new`, which are stored, or pending if rows have no statistics yet."""
        storage: Storage = self.storage  # type: ignore[assignment]
        if storage.tokens.calibrated:
            return storage.add(new)
        storage.sync_counts()
        storage.reserve(new[0].shape[2])
        self.pending = new
        return storage.inputs_with(new)

    def _await(self, keys: Tensor | AttentionInputs) -> None:
        """Lets attention over `keys` store pending tokens."""
        if self.pending is not None:
            await_attention(keys, self.store_pending)

    def _compressed(self, inputs: AttentionInputs) -> tuple[CompressedKV, CompressedKV]:
        """The keys and values that `update` returns for attention over `inputs`, with the columns of the model's mask."""
        columns: int | None = inputs.tokens
        inputs.running = self.running
        if self.is_compileable and (self.mask_by_column is not False or torch.compiler.is_compiling()) and not self._differentiates():
            columns = self.storage.columns if self.mask_by_column else None  # type: ignore[union-attr]
        return CompressedKV(inputs, True, columns), CompressedKV(inputs, False, columns)

    def _differentiates(self) -> bool:
        """Whether `update` may have to return dense tensors, which have columns for the tokens seen only."""
        return torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _prefill(self, key_states: Tensor, value_states: Tensor) -> KeysAndValues:
        """`update` of an empty layer."""
        if self.max_length is not None:
            check_room(0, key_states.shape[2], self.max_length)
        self.lazy_initialization(key_states, value_states)
        self.pending, self.empty = (key_states.detach(), value_states.detach()), False
        storage: Storage = self.storage  # type: ignore[assignment]
        if storage.tokens.calibrated and not (self.compiles_ahead and compiles_step(storage.inputs)):
            self.commit()
        if self.prompt_columns:
            key_states, value_states = (F.pad(x, (0, 0, 0, self.prompt_columns - x.shape[2])) for x in (key_states, value_states))
        self._await(key_states)
        return key_states, value_states

    def commit(self, is_valid: Tensor | None = None) -> None:
        """Stores pending tokens. `is_valid`: the tokens that are not padding, bool `[B, T]`; None: all."""
        if self.pending is not None:
            self.store_pending(None, is_valid)

    def end_prompt(self, is_valid: Tensor | None) -> None:
        """Stores a prompt that no attention saw. `is_valid`: as in `commit`."""
        self.commit(is_valid)

    @uncompiled("a layer with a pending prompt grows: nothing of it is compiled but attention")
    @torch.no_grad()
    @without_autocast()
    def store_pending(self, attention: PlainAttention | None, is_valid: Tensor | None = None) -> None:
        """Stores pending tokens. Statistics come from the tokens that are not padding: in `attention`, or
        without it in `is_valid`, bool `[B, T]`; None: from all tokens."""
        seq_length = self.get_seq_length()
        storage, (new, self.pending) = self.storage, (self.pending, None)
        if new is not None and storage is not None:
            is_valid = is_valid if attention is None else attention.is_valid(seq_length)
            if not storage.seq_length and self.choose_format(new[0], is_valid):
                storage = self._renewed(new)
            storage.reserve(new[0].shape[2])
            if attention is not None and self.compiles_ahead and compiles_step(storage.inputs):
                self._compile_step(storage.inputs, attention)
            storage.append(new, is_valid=is_valid)
            if is_valid is not None and not storage.tokens.calibrated:  # the rows are those of all layers
                begun, module = storage.tokens.begun, attention and attention.module
                storage.tokens.calibrated = once("rows", is_valid, (), module, lambda: bool(begun.all()))
            if self.offload_pending:
                self.offload()

    def choose_format(self, keys: Tensor, is_valid: Tensor | None = None) -> bool:
        """Lets `instead` choose the format by keys `[B, H, T, D]`, of which none is quantized yet. Returns
        whether the format changed, so that the storage has another one. `is_valid`: bool `[B, T]`, False for
        padding; None: no padding."""
        if self.instead is None or self.chosen or keys.shape[2] < LEAST:
            return False
        before, self.chosen = self.format, True
        self.format = self.instead(keys, is_valid) or before
        return self.format != before

    def _renewed(self, like: Pair) -> Storage:
        """New storage in the present format, for keys and values like `like`."""
        self.storage = None
        self.lazy_initialization(*like)
        return self.storage  # type: ignore[return-value]

    @torch.no_grad()
    def _choose_format_late(self, new: Pair | None = None) -> None:
        """`choose_format` after a prompt that was too short, by its tokens and later ones, `new` included."""
        if self.instead is None or self.chosen or self.empty or (storage := self.storage) is None:
            return
        if storage.seq_length + storage.uncounted + (0 if new is None else new[0].shape[2]) < LEAST:
            return
        storage.sync_counts()
        if storage.tokens.length:  # some are quantized already
            self.chosen = True
            return
        sinks, residual = storage.zones()
        key, value = (torch.cat(zones, dim=2) for zones in zip(sinks, residual, strict=True))
        if self.choose_format(key if new is None else torch.cat([key, new[0].detach()], dim=2)):
            before, storage = storage.tokens, self._renewed((key, value))
            storage.reserve(key.shape[2])
            storage.tokens.take_means(before)
            storage.append((key, value))

    def _compile_step(self, inputs: PagedInputs, attention: PlainAttention) -> None:
        """Begins to compile the kernels of the next step, which is taken to be of one token with attention like the prompt's."""
        query, mask = attention.query[:, :, -1:], attention.mask
        mask = mask[:, :, -1:].clone() if isinstance(mask, Tensor) and mask.dim() == 4 else None  # aligned, as a step's mask
        compile_step(inputs, query, mask, **kernel_options(attention.implementation, query, attention.keywords))

    @uncompiled("codes in storage that grows")
    def _update_uncompiled(self, key_states: Tensor, value_states: Tensor) -> KeysAndValues:
        """`update` of a layer whose steps cannot be compiled, called from compiled code. The attention inputs
        hold the residual in token order."""
        result = self.update(key_states, value_states)
        if key_states.shape[2] > 1 or self.pending is not None or isinstance(result[0], Tensor):
            return result
        sinks, residual = self.storage.zones()  # type: ignore[union-attr]
        inputs = attention_inputs_of(sinks, self.storage.tokens, residual)  # type: ignore[union-attr]
        return self._compressed(inputs)

    @uncompiled("storage is made outside of compiled code: call cache.early_initialization(...) before")
    @torch.no_grad()
    def _begin_compiled(self, new: Pair) -> None:
        """Makes storage for a prompt in compiled code, whose padding is not known."""
        self.choose_format(new[0])
        self.lazy_initialization(*new)

    def _update_compiled(self, key_states: Tensor, value_states: Tensor) -> KeysAndValues:
        """`update` in compiled code, which reads no count from the host."""
        if self.storage is None:
            if torch.compiler.is_exporting():  # storage would be made of fake tensors
                raise NotImplementedError(
                    "torch.export with a cache that has no storage yet: call cache.early_initialization(batch_size, num_heads, head_dim, "
                    "dtype, device) before, to read a prompt, or run the prompt before, to go on from it"
                )
            self._begin_compiled((key_states, value_states))
        storage: Storage = self.storage  # type: ignore[assignment]
        new, tokens = (key_states, value_states), key_states.shape[2]
        self._store_compiled(None)
        if tokens == 1 and not self.empty:
            storage.record_compiled_step(tokens)
            step(storage.inputs, new)
            return self._compressed(storage.compiled_inputs(new))
        result: KeysAndValues = new
        if not self.empty:
            if not self.mask_by_column:
                raise NotImplementedError(NO_COLUMNS)
            result = unfold(storage.inputs, storage.columns, new)
        self.pending, self.empty = new, False
        if storage.tokens.has_statistics:
            await_compiled_attention(result[0], self._store_compiled)  # type: ignore[arg-type]
        else:
            self._store_compiled(None)
        return result

    def _store_compiled(self, attention: PlainAttention | None) -> None:
        """`store_pending` in compiled code."""
        new, self.pending = self.pending, None
        if new is not None:
            storage: Storage = self.storage  # type: ignore[assignment]
            if storage.tokens.has_statistics:
                is_valid = attention and attention.is_valid_at(read(storage.rows)[0, TOKENS].long())
                calibrate(storage.inputs, storage.tokens.begun, new, is_valid)
            storage.record_compiled_step(new[0].shape[2])
            step(storage.inputs, new)

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} differ in batch, heads or tokens")
        if stored := self._stored_like():
            check_alike(stored, (key, value), self.get_seq_length)

    def _stored_like(self) -> Pair | tuple[()]:
        """Stored keys and values `[B, H, T, D]`, whose shape, except T, and dtype new ones must have; none if the layer is empty."""
        return () if self.empty or self.storage is None else self.storage.residual

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while the layer is empty."""
        return len(stored[0]) if (stored := self._stored_like()) else 0

    # The interface of `generate`.

    def get_seq_length(self):
        """The number of tokens seen: an int; a 0-d tensor in compiled code of a layer whose steps can be compiled."""
        storage = self._storage  # counts do not wait for tokens that are still being copied
        if storage is None:
            return 0
        if torch.compiler.is_compiling() and self.is_compileable:
            return storage.device_length()
        storage.sync_counts()
        return storage.seq_length + (0 if self.pending is None else self.pending[0].shape[2])

    @property
    def tokens_on_host(self) -> int:
        """The number of tokens seen, as far as the host knows."""
        storage, pending = self._storage, self.pending
        return 0 if storage is None else storage.seq_length + storage.uncounted + (0 if pending is None else pending[0].shape[2])

    def query_offset(self) -> int | Tensor:
        """The number of tokens seen, without waiting for the device."""
        return self.get_seq_length() if self.storage is None or self.pending is not None else self.storage.query_offset()

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more, outside of compiled code. Raises ValueError if `max_length` does not allow them."""
        self.commit()
        if self.storage is not None:
            self._choose_format_late()
            self.storage.reserve(tokens)
        elif self.max_length is not None:
            check_room(0, tokens, self.max_length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of columns of a mask, and the position of the first: 0. If steps can be compiled, there
        are more columns than stored tokens. Raises ValueError if `max_length` tokens are not enough for the
        queries."""
        if not self.is_compileable:
            return self.get_seq_length() + query_length, 0
        if not torch.compiler.is_compiling():
            self.reserve(query_length)
            if self._differentiates():
                return self.get_seq_length() + query_length, 0
        if self.empty or self.storage is None:
            return self.prompt_columns or query_length, 0
        return self.storage.columns, 0

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.14, still abstract in some releases

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 changes nothing."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end")
        seq_length = self.get_seq_length()
        if tokens_to_remove and seq_length:
            self.commit()
            seq_length = max(seq_length + tokens_to_remove, 0)
            self.storage.truncate(seq_length)  # type: ignore[union-attr]
            self.empty = not seq_length

    def reset(self) -> None:
        """Removes all tokens; a layer whose steps can be compiled keeps its storage."""
        self.pending, self.empty, self.offload_pending = None, True, False
        if not self.is_compileable:
            self.storage, self.is_initialized = None, False
        elif self.storage is not None:
            self.storage.clear()
        if self.storage is None:
            self.format, self.chosen = self.made_with, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor | Sequence[int] | slice) -> None:
        self._select(rows_of(indices, self.rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(self.rows) for _ in range(repeats)])

    def _select(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices; a row that occurs several times is repeated, and shared until it is written."""
        self.commit()
        if self.storage is not None and rows:
            self.storage.sync_counts()
            self.storage.select(rows)

    def fork(self) -> CompressedLayer:
        """Returns a copy that shares the stored tokens until one of the two writes."""
        self.commit()
        storage, self.storage = self.storage, None
        twin = copy.deepcopy(self)
        self.storage = storage
        if storage is not None:
            storage.sync_counts()
            twin.storage = storage.fork()
        return twin

    def offload(self) -> None:
        """Moves the layer to host memory. `Cache.update` calls this before attention; a prompt whose padding
        is not known yet is stored and moved after it."""
        self.offload_pending = self.pending is not None
        if not self.offload_pending:
            self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Moves the layer back to its device. A layer with a pending prompt has not left it."""
        self.offload_pending = False
        if self.is_initialized and self.pending is None:
            if self.device.type == "cuda":  # the copy to the host must be complete: older transformers do not wait for it
                torch.cuda.current_stream(self.device).wait_stream(torch.cuda.default_stream(self.device))
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.commit()
        if self.storage is not None:
            self.storage.sync_counts()
            self.storage.move(device, lambda x: x.to(device, non_blocking=True))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises NotImplementedError if `crop` would, before any layer is cropped."""

    # The interface of users.

    def stored_length(self) -> int:
        """Stored tokens, in the head that stores most."""
        return self.get_seq_length()

    def positions(self) -> Tensor:
        """Positions of the tokens that stay. Raises ValueError for a layer in which all do."""
        raise ValueError("the layer retains all tokens")

    def identity(self) -> str:
        """What is the same for layers that store the same tokens alike, as text."""
        format = self.made_with
        return f"{format.name} ({type(format).__module__}.{format!r}), exact {self.num_sink_tokens} + {self.residual_length}"

    def why_not_taken(self) -> str | None:
        """The reason why the contents cannot be taken out (`prefix/snapshot.py`); None: they can."""
        return None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every live tensor with its role: `codes`, `scales`, `exact` or `bookkeeping`."""
        self.commit()
        if self.storage is not None:
            yield from self.storage.tensors()

    @property
    def host_bytes(self) -> int:
        """Bytes of the pages in host memory."""
        self.commit()
        return 0 if self.storage is None else self.storage.tokens.pool.host_nbytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tokens seen in the model's dtype."""
        return self.get_seq_length() * sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in self._stored_like())

    @without_autocast()
    def dense(self) -> Pair:
        """All stored tokens in the model's dtype, keys and values `[B, H, T, D]`. Allocates the dense layer.
        Raises ValueError if the layer is empty."""
        if not self.get_seq_length():
            raise ValueError("the layer is empty")
        self.commit()
        return self.storage.dense()  # type: ignore[union-attr]

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        raise NotImplementedError(_NO_DENSE)


_NO_DENSE = (
    "a compressed layer holds no dense keys and values. Encoder (cross) attention reads them at every step and is not "
    "compressed: pass EncoderDecoderCache(<compressed cache>, DynamicCache()) to an encoder-decoder model. Other models that "
    "read them (Mllama, XLNet) are not supported. To look at them, call layer.dense() of a layer in cache.layers."
)
