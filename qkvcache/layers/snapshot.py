"""What a layer holds as named tensors in host memory, and back into an empty layer: codes as they are, nothing decoded.

A snapshot has one row and is trimmed to the tokens in use. Compressed and dense layers can be cut to any number of first tokens: what is
stored as codes stays codes, what is exact stays exact. What evicts, slides or recurs has forgotten how it was earlier, and stays whole.

Names: `key.first`, `key.body.<buffer>`, `key.once.<buffer>`, `key.recent` and the same of `value` in compressed layers, with
`ledger.<name>` where tokens are evicted; `keys` and `values` elsewhere; states of linear attention under the names of their attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from ..kernels import Pair
from ..storage import Chunks, EvictingStorage
from .compressed import CompressedLayer
from .evicting import EvictingLayer

Layer = Any
"""A layer of a transformers cache: their classes have no base in common."""
SIDES = ("key", "value")
PLACEHOLDER = getattr(cache_utils, "DummyLayer", None)
"""What stands for layers that read another one's keys and values, in newer releases of transformers."""
Copy = Callable[[Tensor, Tensor], object]
"""Fills its first argument with its second, between host memory and any device."""


@dataclass(frozen=True)
class Snapshot:
    """One row of one layer. `kind` says what kind of layer it came from; `numbers` is what the layer counts and no shape tells."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Tokens seen; None where no count is kept: in layers that are empty, or hold states in place of tokens."""
        if self.kind == "compressed":
            return sum(self._zone(zone) for zone in ("first", "body", "recent"))
        if self.kind == "dense":
            return self.tensors["keys"].shape[2]
        return self.numbers.get("seen")

    @property
    def whole(self) -> bool:
        """Whether it cannot be cut."""
        if self.kind == "sliding":
            return self.numbers["seen"] > self.tensors["keys"].shape[2]
        return self.kind in ("evicting", "linear")

    @property
    def nbytes(self) -> int:
        """Bytes that its tensors keep alive."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors.values()}
        return sum(storages.values())

    def cut(self, tokens: int) -> Snapshot:
        """Views of the first `tokens` tokens. Raises ValueError for more than there are, or fewer of what must stay whole."""
        held = self.tokens
        if held is None and not self.whole or held == tokens:
            return self
        if self.whole or held is None or not 0 < tokens < held:
            raise ValueError(f"{tokens} tokens of a {self.kind} layer that has seen {held}: what cannot be cut must be taken whole")
        numbers = self.numbers | ({"seen": tokens} if "seen" in self.numbers else {})
        if self.kind != "compressed":
            return replace(self, tensors={name: x[:, :, :tokens] for name, x in self.tensors.items()}, numbers=numbers)
        first, body = self._zone("first"), self._zone("body")
        begins = {"first": 0, "body": first, "recent": first + body}
        kept = {}
        for name, x in self.tensors.items():
            zone = name.split(".")[1]
            kept[name] = x if zone == "once" else x[:, :, : max(tokens - begins[zone], 0)]
        return replace(self, tensors=kept)

    def _zone(self, zone: str) -> int:
        """Tokens in a zone, the same in keys and values."""
        return next((x.shape[2] for name, x in self.tensors.items() if name.startswith(f"key.{zone}")), 0)


def snapshot(layer: Layer, tokens: int | None = None, row: int = 0, copy: Copy = Tensor.copy_) -> Snapshot:
    """Row `row` of what `layer` holds, copied; only the first `tokens` of it, where given.

    Raises NotImplementedError, with the reason, for layers whose contents cannot be taken out or not cut like this.
    """
    reason = refusal(layer, tokens)
    if reason:
        raise NotImplementedError(reason)
    rows = slice(row, row + 1)
    tensors: dict[str, Tensor] = {}
    host = partial(_copied, device="cpu", copy=copy)
    if type(layer) is PLACEHOLDER:
        return Snapshot("empty")
    if isinstance(layer, CompressedLayer):
        layer.settle()
        if not layer.get_seq_length():
            return Snapshot("empty")
        first, body, recent = layer.storage.zones()  # type: ignore[union-attr]
        if not isinstance(layer, EvictingLayer):
            return Snapshot("compressed", _zones(first, body, recent, tokens, rows, copy))
        tensors = _zones(first, body, recent, None, rows, copy)
        return Snapshot("evicting", tensors | {f"ledger.{name}": host(x[rows]) for name, x in _ledger(layer)}, _evicting_numbers(layer))
    if isinstance(layer, LinearAttentionLayer):
        states = dict(_states(layer))
        tensors = {name: host(x[rows]) for name, x in states.items() if isinstance(x, Tensor)}
        return Snapshot("linear", tensors, {name: int(x) for name, x in states.items() if isinstance(x, bool | int)})
    if not layer.is_initialized:
        return Snapshot("empty")
    tensors = {name: host(getattr(layer, name)[rows, :, :tokens]) for name in ("keys", "values")}
    if isinstance(layer, DynamicSlidingWindowLayer):
        seen = layer.get_seq_length() if tokens is None else tokens
        return Snapshot("sliding", tensors, {"seen": seen})
    return Snapshot("dense", tensors)


def refusal(layer: Layer, tokens: int | None = None) -> str | None:
    """Why `layer`, or its first `tokens` tokens, cannot be taken out, or None."""
    kind = type(layer)
    if kind not in (CompressedLayer, EvictingLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, PLACEHOLDER):
        return f"the contents of a {kind.__name__} cannot be taken out"
    if kind in (LinearAttentionLayer, PLACEHOLDER):  # which do not know how many tokens were seen: the cache's other layers do
        return None
    seen = layer.get_seq_length()
    if kind in (CompressedLayer, EvictingLayer) and layer.is_compileable:
        return "the contents of a preallocated layer cannot be taken out"
    if isinstance(layer, EvictingLayer):
        layer.settle()
        if layer.step is not None:
            return "a step of an evicting layer is running"
        if layer.storage is not None and layer.storage.ledger.seen is not None:
            return "an evicting layer whose rows were padded"
        if tokens not in (None, seen):
            return "a layer that evicts tokens cannot be cut to fewer than it has seen"
    if kind is DynamicSlidingWindowLayer and tokens not in (None, seen) and seen > layer.keys.shape[2]:
        return "a sliding-window layer whose window is full cannot be cut to fewer tokens than it has seen"
    return None


def restore(layer: Layer, held: Snapshot, device: torch.device | str, copy: Copy = Tensor.copy_) -> None:
    """Puts a copy of `held` into `layer`, which is empty and of the kind that it came from, on `device`.

    Nothing is shared with the snapshot: the layer writes into free slots in place. Raises ValueError for another kind of layer.
    """

    placed = partial(_copied, device=device, copy=copy)
    fits = {"compressed": CompressedLayer, "evicting": EvictingLayer, "dense": DynamicLayer, "sliding": DynamicSlidingWindowLayer}
    fits["linear"] = LinearAttentionLayer
    if held.kind == "empty":
        return
    if type(layer) is not fits[held.kind]:
        raise ValueError(f"a {held.kind} snapshot cannot be put into a {type(layer).__name__}")
    if isinstance(layer, CompressedLayer):
        _fill(layer, held, placed, copy)
    elif isinstance(layer, LinearAttentionLayer):
        for name, x in held.numbers.items():
            _set_state(layer, name, bool(x) if isinstance(_state(layer, name), bool) else x)
        for name, x in held.tensors.items():
            _set_state(layer, name, placed(x))
            layer.dtype, layer.device = x.dtype, torch.device(device)
    else:
        keys, values = placed(held.tensors["keys"]), placed(held.tensors["values"])
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = held.numbers["seen"]


def _zones(first: Pair, body: Chunks, recent: Pair, tokens: int | None, rows: slice, copy: Copy) -> dict[str, Tensor]:
    """The first `tokens` tokens of a layer, all by default."""
    host = partial(_copied, device="cpu", copy=copy)
    before = first[0].shape[2]
    tokens = before + body.length + recent[0].shape[2] if tokens is None else tokens
    count = min(body.length, max(tokens - before, 0))
    tensors: dict[str, Tensor] = {}
    for number, side in enumerate(SIDES):
        tensors[f"{side}.first"] = host(first[number][rows, :, :tokens])
        left = count
        for packed in body.packed(number, max(body.length, 1)):
            used = min(packed.tokens, left)
            for name, x in packed.codes.items():
                if used and name not in body.once[number]:
                    plane = tensors.setdefault(f"{side}.body.{name}", torch.empty(1, x.shape[1], count, x.shape[3], dtype=x.dtype))
                    copy(plane[:, :, count - left : count - left + used], x[rows, :, :used])
            left -= used
        if body.fitted:
            tensors |= {f"{side}.once.{name}": host(x[rows]) for name, x in body.once[number].items()}
        tensors[f"{side}.recent"] = host(recent[number][rows, :, : max(tokens - before - body.length, 0)])
    return tensors


def _fill(layer: CompressedLayer, held: Snapshot, placed: Callable[[Tensor], Tensor], copy: Copy) -> None:
    def of(side: str, zone: str) -> dict[str, Tensor]:
        return {name.split(".")[2]: x for name, x in held.tensors.items() if name.startswith(f"{side}.{zone}.")}

    first, recent = ((placed(held.tensors[f"key.{zone}"]), placed(held.tensors[f"value.{zone}"])) for zone in ("first", "recent"))
    codes, once = ((of("key", zone), of("value", zone)) for zone in ("body", "once"))
    layer.lazy_initialization(*first)
    layer.storage.load(first, codes, once, recent, copy)  # type: ignore[union-attr]
    layer.fresh = False
    if not isinstance(layer, EvictingLayer):
        return
    storage: EvictingStorage = layer.storage  # type: ignore[assignment]
    storage.in_order, storage.sinks_taken = bool(held.numbers["in_order"]), bool(held.numbers["sinks_taken"])
    ledger, storage.seen = storage.ledger, held.numbers["seen"]
    ledger.columns = storage.seen
    for name in ("first", "key_sum"):
        if f"ledger.{name}" in held.tensors:
            setattr(ledger, name, placed(held.tensors[f"ledger.{name}"]))
    for part, records in (("body", ledger.body), ("recent", ledger.recent)):
        for name in records:
            records[name] = placed(held.tensors[f"ledger.{part}.{name}"])


def _ledger(layer: EvictingLayer) -> Iterator[tuple[str, Tensor]]:
    ledger = layer.storage.ledger  # type: ignore[union-attr]
    yield "first", ledger.first
    if ledger.key_sum is not None:
        yield "key_sum", ledger.key_sum
    for part, records in (("body", ledger.body), ("recent", ledger.recent)):
        yield from ((f"{part}.{name}", x) for name, x in records.items())


def _evicting_numbers(layer: EvictingLayer) -> dict[str, int]:
    storage: EvictingStorage = layer.storage  # type: ignore[assignment]
    return {"seen": storage.seen, "in_order": int(storage.in_order), "sinks_taken": int(storage.sinks_taken)}


def _states(layer: LinearAttentionLayer) -> Iterator[tuple[str, object]]:
    """Attributes, those that are dictionaries of numbered states one by one."""
    for name, x in vars(layer).items():
        yield from ((f"{name}.{i}", state) for i, state in x.items()) if isinstance(x, dict) else ((name, x),)


def _state(layer: LinearAttentionLayer, name: str) -> object:
    return dict(_states(layer)).get(name)


def _set_state(layer: LinearAttentionLayer, name: str, value: object) -> None:
    name, _, number = name.partition(".")
    if number:
        getattr(layer, name)[int(number)] = value
    else:
        setattr(layer, name, value)


def _copied(x: Tensor, device: torch.device | str, copy: Copy) -> Tensor:
    """A copy that holds on to nothing else."""
    new = torch.empty(x.shape, dtype=x.dtype, device=device)
    copy(new, x.detach())
    return new


def storages(snapshots: list[Snapshot]) -> int:
    """Bytes that the tensors of all snapshots keep alive, shared ones counted once."""
    tensors = chain.from_iterable(held.tensors.values() for held in snapshots)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
