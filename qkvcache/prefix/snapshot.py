"""`snapshot` copies rows of a layer to named tensors; `restore` copies them into an empty layer. Codes are copied
bit for bit.

Tokens of compressed and dense layers can be cut to any number of first tokens. Full sliding windows, recurrent states and chosen
tokens cannot: they return to the tokens at which a checkpoint of them was taken (`Snapshot.checkpoint`).

Names of tensors: see `LayerStorage.snapshot` for layers of this library; `keys` and `values` for dense layers; the names of attributes
after `STATE` for the states of linear attention, in layers that have attention beside it too; the tensors of a layer's `indexer`
after `INDEXER`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..formats import Identity
from ..formats.base import Codec, Codes
from ..formats.outlying import Int8Keys
from ..layers.compressed import POSITIONS, CompressedLayer

Layer = Any
"""A layer of a transformers cache. Their classes have no base in common."""
PLACEHOLDER = getattr(cache_utils, "DummyLayer", type(None))
"""The class, in newer releases of transformers, of layers that read another layer's keys and values."""
STOCK = {
    DynamicLayer: "dense", DynamicSlidingWindowLayer: "sliding", LinearAttentionLayer: "linear", PLACEHOLDER: "empty",
    LinearAttentionAndFullAttentionLayer: "dense", LinearAttentionAndSlidingWindowAttentionLayer: "sliding", DynamicIndexedLayer: "dense",
}  # fmt: skip
"""The kinds of snapshots of transformers' layers."""
KINDS = frozenset(("compressed", *STOCK.values()))
"""Kinds of layers in which all tokens stay, or the last ones."""
STATE = "state."
"""The beginning of the names of states."""
INDEXER = "indexer."
"""The beginning of the names of its tensors, `[B, N, T, width]`."""
INT8_KEYS = "int8_keys"
"""The number, 1, that says that a layer chose int8 for its keys (`CompressedLayer.instead`)."""
STATES = vars(LinearAttentionLayer()).keys() - {"device", "dtype"}
"""Attributes of linear attention that a snapshot holds."""
Forms = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of tensors by name."""


@dataclass(frozen=True)
class Snapshot:
    """Rows of one layer, usually one. `kind`: the kind of layer, or "empty"; `numbers`: counts of the layer that do not follow from
    shapes; `memory`: the locked host memory in which the tensors are, if they are (`prefix/host_memory.py`)."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    memory: Any = None

    @property
    def tokens(self) -> int | None:
        """The number of tokens seen; None for empty layers and linear attention, which do not count them."""
        if self.kind == "compressed":
            return sum(self._zone(zone) for zone in ("sinks", "region", "residual"))
        if self.kind == "dense":
            return self.tensors["keys"].shape[2]
        return self.numbers.get("seen")

    @property
    def whole(self) -> bool:
        """Whether it cannot be cut without a checkpoint."""
        slid = self.kind == "sliding" and self.numbers["seen"] > self.tensors["keys"].shape[2]
        return slid or self.kind not in KINDS or bool(self.states.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that its tensors keep alive."""
        return sum({x.data_ptr(): x.nbytes() for x in map(Tensor.untyped_storage, self.tensors.values())}.values())

    def to(self, device: torch.device | str, copy: bool) -> Snapshot:
        """A snapshot whose tensors are on `device`, copied in the order of its current stream. Tensors that are there
        already are copied only with `copy`."""
        device = torch.device(device)
        tensors = {name: _copied(x, device) if copy or x.device != device else x for name, x in self.tensors.items()}
        if self.memory is not None:
            self.memory.record(device)
        return Snapshot(self.kind, tensors, self.numbers)

    @property
    def checkpoint(self) -> Snapshot | None:
        """The part that cannot be cut, with which a later snapshot of the layer is cut to these tokens; None if there is none."""
        if self.kind in ("sliding", "linear"):
            return self
        return replace(self.states, kind="linear") if self.states.tensors else None

    @cached_property
    def states(self) -> Snapshot:
        """The states alone."""
        return self._part(True)

    @cached_property
    def attention(self) -> Snapshot:
        """The tokens alone."""
        return self._part(False)

    def _part(self, states: bool) -> Snapshot:
        tensors = {name: x for name, x in self.tensors.items() if name.startswith(STATE) == states}
        return replace(self, tensors=tensors, numbers={name: x for name, x in self.numbers.items() if name.startswith(STATE) == states})

    def joined(self, states: Snapshot) -> Snapshot:
        """The tokens of this snapshot with the `states` of another."""
        return replace(self, tensors=self.tensors | states.tensors, numbers=self.numbers | states.numbers)

    def cut(self, tokens: int, checkpoint: Snapshot | None = None) -> Snapshot:
        """Views of the first `tokens` tokens. `checkpoint`: the checkpoint of an earlier snapshot of the layer, of as many tokens. Raises
        ValueError if there are fewer tokens, and for a snapshot that cannot be cut."""
        if checkpoint is not None:
            return checkpoint if self.kind in ("sliding", "linear") else self.attention.cut(tokens).joined(checkpoint)
        count = self.tokens
        if count is None and not self.whole or count == tokens:
            return self
        if self.whole or count is None or not 0 < tokens < count:
            raise ValueError(f"{tokens} tokens of a {self.kind} layer that has seen {count}: take all of them, or fewer if it can be cut")
        numbers = self.numbers | ({"seen": tokens} if "seen" in self.numbers else {})
        sinks = self._zone("sinks")
        begins = {"region": sinks, "residual": sinks + self._zone("region")}
        kept = {}
        for name, x in self.tensors.items():
            zone = name.split(".")[1] if name.startswith(("key.", "value.")) else ""
            kept[name] = x if zone == "statistics" else x[:, :, : max(tokens - begins.get(zone, 0), 0)]
        return replace(self, tensors=kept, numbers=numbers)

    def _zone(self, zone: str) -> int:
        """The number of tokens in a zone, the same for keys and values."""
        return next((x.shape[2] for name, x in self.tensors.items() if name.startswith(f"key.{zone}")), 0)


def kind_of(layer: Layer) -> str | None:
    """The kind of the snapshots of `layer`; None: its contents cannot be taken out."""
    return layer.snapshot_kind if isinstance(layer, CompressedLayer) else STOCK.get(type(layer))


def snapshot(layer: Layer, tokens: int | None = None, row: int | None = 0) -> Snapshot:
    """Row `row` of `layer`, or all rows (None), as views of its tensors where possible; with `tokens`, only the first `tokens` tokens.

    Raises NotImplementedError, with the reason, for layers that cannot be copied or cut.
    """
    kind = kind_of(layer)
    if kind is None:
        raise NotImplementedError(f"the contents of a {type(layer).__name__} cannot be taken out")
    if kind == "empty":
        return Snapshot("empty")
    rows = slice(None) if row is None else slice(row, row + 1)
    state = _state(layer, rows)
    if kind == "linear":  # it does not count tokens; other layers of the cache do
        return state
    if isinstance(layer, CompressedLayer):
        layer.commit()
        if reason := layer.why_not_taken():
            raise NotImplementedError(reason)
    seen = layer.get_seq_length()
    if not layer.is_initialized or not seen:
        return Snapshot("empty")
    if isinstance(layer, CompressedLayer):
        tensors, numbers = layer.storage.snapshot(rows)  # type: ignore[union-attr]
        numbers |= {INT8_KEYS: 1} if isinstance(layer.format, Int8Keys) else {}
    else:
        tensors = {name: getattr(layer, name)[rows] for name in ("keys", "values")}
        numbers = {"seen": seen} if kind == "sliding" else {}
    tensors |= {INDEXER + name: x[rows] for name, x in _indexer(layer).items()}
    found = Snapshot(kind, tensors, numbers).joined(state)
    if tokens in (None, seen):
        return found
    if found.whole:
        raise NotImplementedError(
            "a layer that chose its tokens, whose window is full or with a recurrent state cannot be cut to fewer tokens than it has seen"
        )
    return found.cut(tokens)


def checkpoint(layer: Layer) -> Snapshot | None:
    """Like `snapshot(layer).checkpoint`, as views, but takes only the state that cannot be cropped."""
    if kind_of(layer) == "sliding":
        return snapshot(layer)
    return _state(layer, slice(1)) if isinstance(layer, LinearAttentionLayer) else None


def has_indexer(layer: Layer) -> bool:
    """Whether the layer stores the keys of an indexer."""
    return hasattr(layer, "update_indexer")


def _indexer(layer: Layer) -> Codes:
    """The tensors of the layer's indexer; empty for layers without an indexer."""
    if isinstance(layer, CompressedLayer):
        return getattr(layer, "indexer", {})
    keys, ids = (getattr(layer, f"indexer_{name}", None) for name in ("keys", POSITIONS))
    found = {"codes": keys if keys is None else keys[:, None], POSITIONS: ids if ids is None else ids.transpose(0, 1)[..., None]}
    return {name: x for name, x in found.items() if x is not None}


def _state(layer: Layer, rows: slice) -> Snapshot:
    """The states of some rows of `layer`, as views."""
    states = dict(_states(layer))
    tensors = {name: x[rows] for name, x in states.items() if isinstance(x, Tensor)}
    return Snapshot("linear", tensors, {name: int(x) for name, x in states.items() if isinstance(x, bool | int)})


def copy_tokens(into: Layer, layer: Layer, tokens: int | None = None, row: int | None = 0) -> None:
    """Gives `into`, which is empty, the first `tokens` tokens of a row of `layer`, or of all rows (None): at most one of the two is
    compressed."""
    rows = slice(None) if row is None else slice(row, row + 1)
    into.update(*(x[rows, :, :tokens] for x in (layer.dense() if isinstance(layer, CompressedLayer) else (layer.keys, layer.values))))
    if not has_indexer(into):
        return
    keys = layer.dense_indexer() if hasattr(layer, "dense_indexer") else layer.indexer_keys
    if keys is not None:
        into.update_indexer(keys[rows, :tokens])
    if (ids := getattr(layer, "indexer_position_ids", None)) is not None:  # older releases have none
        into.indexer_position_ids = ids[:, rows, :tokens]


def copy_states(into: Layer, layer: Layer) -> None:
    """Gives `into` the states of all rows of `layer`."""
    states = _state(layer, slice(None))
    _restore_states(into, states, next((x.device for x in states.tensors.values()), torch.device("cpu")))


def restore(layer: Layer, stored: Snapshot, device: torch.device | str, own: Layer | None = None) -> None:
    """Copies `stored` to `device` into `layer`, which is empty. A dense snapshot is quantized for a compressed layer. A compressed one is
    dequantized for a dense layer by `own`, an empty layer of its kind. Raises ValueError for a layer of another kind.

    Layers of this library are copied to a GPU on a separate stream and waited for when they are read
    (`CompressedLayer.arrival`): a model computes its first layers meanwhile, and the host does not wait for copies when
    it reads results."""
    kind, device = kind_of(layer), torch.device(device)
    if stored.kind == "empty":
        return
    if kind != stored.kind:
        between = DynamicIndexedLayer() if (stored.kind, kind) == ("dense", "compressed") else own
        if between is None or kind_of(between) != stored.kind:
            raise ValueError(f"a {stored.kind} snapshot cannot be put into a {type(layer).__name__}")
        restore(between, stored.attention, device)
        copy_tokens(layer, between)
    elif isinstance(layer, CompressedLayer) and device.type == "cuda":
        stream = _copies_to(device)
        stream.wait_stream(torch.cuda.current_stream(device))  # which may still read memory that is reused here
        with torch.cuda.stream(stream):
            _restore_tokens(layer, stored, device)
        layer.arrival = stream.record_event()
    elif kind != "linear":
        _restore_tokens(layer, stored, device)
    _restore_states(layer, stored.states, device)


@functools.cache
def _copies_to(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to a GPU: one for all layers, so that they arrive in the order in which models read them."""
    return torch.cuda.Stream(device)


def _restore_tokens(layer: Layer, stored: Snapshot, device: torch.device) -> None:
    tensors, numbers = stored.attention.to(device, copy=stored.kind != "compressed").tensors, stored.attention.numbers
    indexer = _take_indexer(tensors)
    if isinstance(layer, CompressedLayer):
        numbers = _take_format(layer, numbers)
        region, tokens = stored._zone("region"), stored.tokens or 0
        if region:  # the storage for them has no spare page
            tokens = layer.num_sink_tokens + region + layer.residual_length + 1
        shapes = ((x, (*x.shape[:2], tokens, x.shape[3])) for x in (tensors["key.sinks"], tensors["value.sinks"]))
        layer.lazy_initialization(*(torch.empty((), dtype=x.dtype, device=device).expand(shape) for x, shape in shapes))
        layer.storage.restore(tensors, numbers)  # type: ignore[union-attr]
        layer.empty = False
        if has_indexer(layer):
            layer.restore_indexer(indexer)  # type: ignore[attr-defined]
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = numbers["seen"]
    if "codes" in indexer:
        layer.update_indexer(indexer["codes"][:, 0])
    if POSITIONS in indexer:
        layer.indexer_position_ids = indexer[POSITIONS][..., 0].transpose(0, 1)


def _take_format(layer: CompressedLayer, numbers: dict[str, int]) -> dict[str, int]:
    """Gives `layer`, which is empty, the format of a snapshot with these `numbers`; returns the other ones.
    Raises ValueError for a format that layers do not change."""
    if numbers.get(INT8_KEYS) and not isinstance(layer.format, Int8Keys):
        chosen = Int8Keys.instead_of(layer.format)
        if chosen is None:
            raise ValueError(f"{INT8_KEYS} in format {layer.format.name!r}, whose keys do not change")
        layer.format, layer.chosen = chosen, True
    return {name: x for name, x in numbers.items() if name != INT8_KEYS}


def _take_indexer(tensors: dict[str, Tensor]) -> Codes:
    """The tensors of an indexer, which are removed from `tensors`."""
    return {name.removeprefix(INDEXER): tensors.pop(name) for name in list(tensors) if name.startswith(INDEXER)}


def _copied(x: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy of `x` on `device`. The heads of a cut tensor are copied one by one, since torch would first
    join them on the host."""
    new = torch.empty(x.shape, dtype=x.dtype, device=device)
    several = x.device != device and not x.is_contiguous()
    heads = [(out[i], part[i]) for out, part in zip(new, x, strict=True) for i in range(len(out))] if several else [(new, x)]
    for out, part in heads:
        out.copy_(part.detach(), non_blocking=True)
    return new


def _states(layer: Layer) -> Iterator[tuple[str, object]]:
    """Attributes of linear attention with their names; dictionaries of numbered states are flattened. None for other layers."""
    for name in sorted(STATES) if isinstance(layer, LinearAttentionLayer) else ():
        x = getattr(layer, name)
        yield from ((f"{STATE}{name}.{i}", state) for i, state in x.items()) if isinstance(x, dict) else ((STATE + name, x),)


def _restore_states(layer: Layer, stored: Snapshot, device: torch.device) -> None:
    """Copies states to `device` into `layer`, on the current stream, since models read them as they are."""
    before = dict(_states(layer))
    flags = {name: bool(x) if isinstance(before.get(name), bool) else x for name, x in stored.numbers.items()}
    for name, x in {**flags, **stored.to(device, copy=True).tensors}.items():
        attribute, _, number = name.removeprefix(STATE).partition(".")
        if number:
            getattr(layer, attribute)[int(number)] = x
        else:
            setattr(layer, attribute, x)
        if isinstance(x, Tensor):
            layer.dtype, layer.device = x.dtype, device


# Snapshots from files, which could name any attribute and any size.


def check(layer: Layer, stored: Snapshot, seen: int, rows: int = 1) -> None:
    """Raises ValueError, LookupError or RuntimeError unless `restore` can put `stored` into `layer`, which is empty, as the first `seen`
    tokens of `rows` rows: names, dtypes, shapes and counts must be as in a snapshot of this layer."""
    kind, own = stored.kind, kind_of(layer)
    if kind not in ("empty", own) and (kind, own) != ("dense", "compressed"):
        raise ValueError(f"a snapshot of kind {kind!r} for a {type(layer).__name__}")
    if not isinstance(stored.numbers, dict) or any(type(x) is not int or not 0 <= x < 2**31 for x in stored.numbers.values()):
        raise ValueError(f"counts {stored.numbers!r}")
    if kind != "empty":
        _check_states(layer, stored.states, rows)
        stored = stored.attention
    tensors, numbers = stored.tensors.copy(), stored.numbers
    forms: Forms = {}
    counts: dict[str, int] = {}
    if kind != "empty" and has_indexer(layer):
        codec = layer.indexer_codec if kind == "compressed" else Identity().key
        _check_forms(indexer := _take_indexer(tensors), _indexer_forms(codec, indexer, seen, rows))
    if kind == own and isinstance(layer, CompressedLayer):
        numbers = _take_format(layer, numbers)
        key, value = (_of_rows(tensors[f"{side}.sinks"], rows)[:, :, :0].to("meta") for side in ("key", "value"))
        layer.format.check(key.shape[3], value.shape[3])
        layer.make_storage((key, value)).check(tensors, numbers, seen)
        return
    if kind in ("dense", "sliding"):
        keys, values = tensors["keys"], _of_rows(tensors["values"], rows)
        held = min(seen, layer.sliding_window - 1) if kind == "sliding" and layer.sliding_window > 1 else seen
        forms = {name: (values.dtype, (rows, keys.shape[1], held, x.shape[3])) for name, x in (("keys", keys), ("values", values))}
        counts = {"seen": seen} if kind == "sliding" else {}
    _check_forms(tensors, forms)
    if numbers != counts:
        raise ValueError(f"counts {numbers} after {seen} tokens")


def check_checkpoint(layer: Layer, stored: Snapshot, end: Snapshot, seen: int) -> None:
    """Raises ValueError unless `stored` can be the checkpoint of `layer` after `seen` tokens. `end`: a later snapshot, checked before."""
    like = end.checkpoint
    if like is None or (stored.kind, stored.numbers.keys(), stored.states.numbers) != (like.kind, like.numbers.keys(), like.states.numbers):
        raise ValueError(f"counts {stored.numbers} as a checkpoint of a {type(layer).__name__}")
    tokens = slice(0 if stored.kind == "sliding" else None)
    forms = {name: (x.dtype, x[:, :, tokens].shape) for name, x in like.tensors.items()}
    _check_forms({name: x[:, :, tokens] for name, x in stored.tensors.items()}, forms)
    if stored.kind == "sliding":
        check(layer, stored, seen)


def _check_states(layer: Layer, stored: Snapshot, rows: int) -> None:
    """Raises ValueError unless these can be the states of `layer`: those that its flags say are there."""
    tensors, counts, empty = stored.tensors, stored.numbers, dict(_states(layer))
    named = {name: name.replace(STATE, f"{STATE}is_").replace("_states.", "_states_initialized.") for name in empty}
    flags = {name: flag for name, flag in named.items() if flag in empty}
    there = {name for name, flag in flags.items() if counts.get(flag)}
    fixed = {name: x for name, x in empty.items() if type(x) is int}
    if tensors.keys() != there or not counts.keys() <= empty.keys() - flags.keys() or fixed.items() - counts.items():
        raise ValueError(f"{sorted(tensors)} and {counts} for a {type(layer).__name__}")
    if any(_of_rows(x, rows).ndim < 3 for x in tensors.values()):
        raise ValueError(f"states {sorted(tensors)} of fewer than three dimensions")


def _indexer_forms(codec: Codec, tensors: Codes, seen: int, rows: int) -> Forms:
    """The forms of the tensors of an indexer after `seen` tokens, with as many channels and positions as these have."""
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if "codes" in tensors:
        codes = tensors["codes"]
        forms = {x.name: (x.dtype or _of_rows(codes, rows).dtype, (rows, 1, seen, x.width)) for x in codec.buffers(codes.shape[-1])}
    if POSITIONS in tensors:
        forms[POSITIONS] = torch.int64, (rows, *tensors[POSITIONS].shape[1:2], seen, 1)
    return forms


def _of_rows(x: Tensor, rows: int) -> Tensor:
    """The tensor. Raises ValueError unless it has `rows` rows of floating-point numbers."""
    if len(x) != rows or not x.dtype.is_floating_point:
        raise ValueError(f"{list(x.shape)} in {x.dtype} where {rows} rows of vectors are stored")
    return x


def _check_forms(tensors: dict[str, Tensor], forms: Forms) -> None:
    for name in sorted(forms.keys() | tensors.keys()):
        found = (tensors[name].dtype, tuple(tensors[name].shape)) if name in tensors else "missing"
        if found != forms.get(name):
            raise ValueError(f"{name!r} is {found}, expected {forms.get(name, 'nothing')}")
