"""`PagedInputs`: what attention over pages reads and steps write: quantized tokens between exact ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .host.handles import give_handle
from .pages import BLOCK, Pages
from .segments import Exact, KeysOrValues, Packed, Pair, Segment, block_of
from .work import Work

COLUMNS = BEGIN, SINK_ROW, RING_ROW, SINKS, RING_START, RING_TOKENS, LENGTH, TOKENS = range(8)
"""Columns of `PagedInputs.rows`."""
CONTROL = TICKET, DROPPED, ROOM = range(3)
"""Entries of `PagedInputs.control`."""


class Select(Protocol):
    """What chooses, for each query, the blocks of pages that attention reads. A room brings it."""

    @property
    def key(self) -> Hashable:
        """What launches depend on beside `tensors`."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def reads_all(self, tokens: int) -> bool:
        """Whether it never leaves out one of so many quantized tokens."""

    def chooses(self, query: Tensor, inputs: PagedInputs) -> bool:
        """Whether attention of `query` `[B, Hq, Q, D]` reads chosen blocks, and not all."""

    def attend(
        self,
        attend: Callable[..., tuple[Tensor, Tensor]],
        by_kernel: bool,
        query: Tensor,
        inputs: PagedInputs,
        mask: Tensor | None,
        keys: list[Packed] | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """`attend`, by kernels or not, over the blocks that `query` chooses. `keys`: the quantized keys of
        all rows, in order, if the caller has them."""


@dataclass(eq=False)
class Prepared:
    """What launches over inputs reuse from step to step.

    of_layer   arguments of planes and statistics, which do not move or change. Inputs over the same storage may share them; rows, tables,
               lengths, sinks and rings may differ
    of_inputs  arguments in calls over these inputs, and their twins
    handle     the tensor that stands for these inputs in compiled code (`host/handles.py`)
    """

    of_layer: dict[Any, Any] = field(default_factory=dict)
    of_inputs: dict[str, Any] = field(default_factory=dict)
    handle: Tensor | None = None


@dataclass(eq=False)
class PagedInputs:
    """The inputs of attention over pages. A row has, in this order, sinks, quantized tokens and the tokens of a ring.

    sinks       keys and values `[E, H, S, D]` in the model's dtype, `S` may be 0
    ring        keys and values `[F, H, R, D]` in the model's dtype, `R` may be 0
    rows        int32 `[B, 8]`, contiguous in the last dimension, for each row:
                BEGIN        the first token of its pages that is read
                SINK_ROW     its row of the `E` in `sinks`, and RING_ROW, its row of the `F` in `ring`
                SINKS        how many of its sinks are read
                RING_START   the slot of the oldest token of its ring, and RING_TOKENS, how many there are, in slots `(RING_START + i) % R`
                LENGTH       tokens in its pages, for `step`; attention reads `pages.lengths`
                TOKENS       tokens of the row, for `step`
                None: row `b` has all sinks and the whole ring of row `b`, in order, and the first `max_length` tokens of its pages
    max_length  bound on `pages.lengths`, which sizes launches and results; without `rows`, quantized tokens
    work        how programs divide the tokens of rows
    control     int32 `[3]`, for `step`: TICKET, programs of the launch that have finished; DROPPED, tokens that came when there was no
                room; ROOM, the most tokens of a row. None: no step stores tokens
    select      chooses what queries read; None: they read all tokens
    """

    pages: Pages
    sinks: Pair
    ring: Pair
    rows: Tensor | None
    max_length: int
    work: Work = Work()
    control: Tensor | None = None
    select: Select | None = None
    prepared: Prepared = field(default_factory=Prepared)

    @property
    def handle(self) -> Tensor | None:
        return self.prepared.handle

    @property
    def identity(self) -> tuple:
        """Everything on which launches over these inputs depend: addresses, shapes and dtypes of tensors, and numbers. Later slabs do not
        count where slabs are added between compiled steps: kernels find their pages by the table."""
        pages, (tokens, splits, branches, shared), select = self.pages, self.work, self.select
        tensors = [*pages.compiled.tensors, *self.sinks, *self.ring, self.rows, self.control, pages.lengths]
        tensors += [] if select is None else select.tensors
        tensors += [] if splits is None else [splits.items, splits.firsts, splits.shared, splits.shares]
        places = ((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in tensors if x is not None)
        numbers = pages.firsts[0], pages.page_size, pages.by_page, pages.grows, pages.on_host, self.max_length, tokens, branches, shared
        return *pages.codecs, *numbers, None if select is None else select.key, *places

    def __setstate__(self, state: dict) -> None:
        """Makes a copy, which has a handle of its own."""
        self.__dict__ |= state
        if self.handle is not None:
            give_handle(self)

    def twin(self, **changes: Any) -> PagedInputs:
        """The same inputs, but for some fields; `dataclasses.replace` takes five times as long, at every step."""
        twin = object.__new__(PagedInputs)
        twin.__dict__ |= self.__dict__ | changes
        return twin

    def anew(self, **changes: Any) -> PagedInputs:
        """The same inputs, but for some tensors, on which arguments depend that are prepared."""
        return self.twin(prepared=Prepared(self.prepared.of_layer), **changes)

    @property
    def compiled(self) -> PagedInputs:
        """These inputs as compiled code reads them. Nothing is cached in them: a CUDA graph may be recorded, whose memory is its own."""
        return self.twin(pages=self.pages.compiled, prepared=Prepared())

    def ended(self, later: int) -> PagedInputs:
        """The same inputs without the last `later` tokens, which are in the ring."""
        if not later:
            return self
        if self.rows is None:
            key, value = (x[:, :, : x.shape[2] - later] for x in self.ring)
            return self.anew(ring=(key, value))
        rows = self.rows.clone()
        rows[:, RING_TOKENS] -= later
        return self.anew(rows=rows)

    def first_shared(self) -> PagedInputs:
        """The tokens that rows share, of the first row of each group of `work.branches`, for a plan without exact tokens."""
        branches, shared, prepared = self.work.branches, self.work.shared, self.prepared
        key = f"the first {shared} tokens of {branches} rows"
        if key not in prepared.of_inputs:
            pages, every = self.pages, slice(None, None, branches)
            once = [{name: x[every] if len(x) > 1 else x for name, x in side.items()} for side in pages.statistics]
            first = replace(pages, table=pages.table[every], statistics=(once[0], once[1]), lengths=None)
            own = Prepared(prepared.of_layer.setdefault(("shared", branches), {}))
            prepared.of_inputs[key] = self.twin(pages=first, rows=None, max_length=shared, prepared=own)
        return prepared.of_inputs[key]

    @property
    def slots(self) -> tuple[int, int, int]:
        """Slots of sinks, of the quantized tokens that are read, and of the ring."""
        chosen = self.pages.chosen
        read = self.max_length if chosen is None else chosen[0].shape[2] * BLOCK
        return self.sinks[0].shape[2], read, self.ring[0].shape[2]

    def columns(self, places: Tensor) -> Tensor:
        """The index of each slot's token in its row, int64 `[B, 1 or H, S + T + R]`, -1 for a slot without a
        token. `places`: as of `Pages.read`."""
        first, ring = (torch.arange(side[0].shape[2], device=places.device).view(1, 1, -1) for side in (self.sinks, self.ring))
        if self.rows is None:  # each slot has a token, except those beyond chosen blocks
            zones = first, self.quantized_columns(places), ring + first.numel() + self.max_length
        else:
            begin, _, _, sinks, start, count = self.rows[:, None, : RING_TOKENS + 1, None].long().unbind(2)
            lengths: Tensor = self.pages.lengths  # type: ignore[assignment]
            quantized = (lengths.view(len(self.rows), -1, 1).clamp_max(self.max_length) - begin).clamp_min(0)
            age = (ring - start) % max(ring.numel(), 1)
            sinks_of, ring_of = torch.where(first < sinks, first, -1), torch.where(age < count, sinks + quantized + age, -1)
            zones = sinks_of, self.quantized_columns(places), ring_of
        return torch.cat([zone.expand(*places.shape[:2], -1) for zone in zones], dim=-1)

    def quantized_columns(self, places: Tensor) -> Tensor:
        """The part of `columns` of quantized tokens, int64 `[B, 1 or H, T]`."""
        if self.rows is None:
            return torch.where(places >= 0, places + self.sinks[0].shape[2], -1)
        begin, sinks = (self.rows[:, column, None, None].long() for column in (BEGIN, SINKS))
        return torch.where(places >= begin, places - begin + sinks, -1)


def paged_side(inputs: PagedInputs, side: int) -> tuple[KeysOrValues, Tensor]:
    """Keys (0) or values (1) in all slots, zeros where there is no token, and `places` as in `Pages.read`."""
    pages, first, ring = inputs.pages, inputs.sinks[side], inputs.ring[side]
    codes, places = pages.read(side, inputs.max_length)
    packed = _blocks(pages.codecs[side], codes, inputs.slots[1], ring)
    if inputs.rows is not None:
        rows = inputs.rows.long()
        first, ring = first[rows[:, SINK_ROW]], ring[rows[:, RING_ROW]]
        column = inputs.columns(places)[:, :1, :, None]
        first = first.masked_fill(column[:, :, : first.shape[2]] < 0, 0)
        ring = ring.masked_fill(column[:, :, column.shape[2] - ring.shape[2] :] < 0, 0)
    segments: list[Segment] = [Exact(first), *packed, Exact(ring)]
    return KeysOrValues.of(segments, (*ring.shape[:2], sum(inputs.slots), ring.shape[3]), ring.dtype, ring.device), places


def _blocks(codec: Codec, codes: Codes, tokens: int, like: Tensor) -> Iterator[Packed]:
    """`tokens` quantized tokens, keys or values like `like`, in blocks that are dequantized one at a time."""
    limit = block_of(like)
    for begin in range(0, tokens, limit):
        count = min(limit, tokens - begin)
        part = {name: x if x.shape[2] != tokens else x.narrow(2, begin, count) for name, x in codes.items()}
        yield Packed(codec, part, count, like.shape[3])
