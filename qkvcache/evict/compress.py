"""A second reading of a context, for policies that score tokens by their use in repeating the context
(`evict/policies/kvzip.py`): `read_twice` reads it, and `fill` moves it into a cache.

A reading repeats one chunk of the context. Its queries attend to the row's sinks, the chunk and the reading itself, and
their softmax covers only these, so that its cost does not depend on the length of the context.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..attention.masks import kernel_options
from ..attention.padding import PlainAttention, await_attention
from ..attention.route import NAME, install
from ..autocast import without_autocast
from ..kernels import Pair
from ..kernels.attend.chunked import ChunkedKV, attend_chunked, supports_queries
from ..progress import reading
from ..releases import passing
from .layer import EvictingLayer
from .observe import sum_attention
from .policies import KVzip
from .policies.budget import share_of
from .policies.kvzip import weigh_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST = "\n\nRepeat the previous context exactly.\n\n"
LATER = "\n\nRepeat the part of the previous context that starts as follows.\n\n"
HINT = 8
"""Tokens before a chunk that end its instruction; the first chunk has none."""
NORM = 3
"""The exponent of the norm, over queries, of the weights that a token receives. The authors take the largest weight,
which does not tell a token that several queries attend to from a token that one query attends to
(`eval/results/policies.jsonl`, `past.jsonl`)."""


@dataclass(frozen=True)
class Reading:
    """The tokens that a reading attends to: columns of the context, and its own tokens.

    columns: the columns of the row's sinks and of the repeated tokens, int64 `[B, S + C]`.
    is_valid: the columns, and then the reading's own tokens, that are not padding, bool `[B, S + C + R]`.
    padded: whether there is padding among them.
    """

    columns: Tensor
    is_valid: Tensor
    padded: bool
    _masks: dict[tuple[torch.device, int], Any] = field(default_factory=dict)

    def mask(self, implementation: str, query: Tensor) -> Any:
        """The mask that `implementation` takes for the last queries `[B, Hq, Q, D]` of the reading, made once for all
        layers."""
        at = query.device, query.shape[2]
        if at not in self._masks:
            from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # loaded with the model

            tokens, queries = self.is_valid.shape[1], query.shape[2]
            self._masks[at] = ALL_MASK_ATTENTION_FUNCTIONS[implementation](
                batch_size=len(query), q_length=queries, kv_length=tokens, q_offset=tokens - queries,
                attention_mask=self.is_valid.to(query.device) if self.padded else None, dtype=query.dtype, device=query.device,
            )  # fmt: skip
        return self._masks[at]


class ReadingLayer(DynamicLayer):
    """A dense layer that observes second readings and does not store their tokens. `scores` fp32 `[B, H, T]`: the
    `NORM`-norm over the readings' queries of the attention that each context token receives, in the query head that
    gives it most.

    Args:
        sinks: number of first tokens of a row that are in each softmax and get no score.
    """

    local: Pair | None = None
    """Keys and values that the reading attends to, `[B, H, S + C + R, D]`."""

    def __init__(self, sinks: int):
        super().__init__()
        self.sinks = sinks
        self.scores: Tensor | None = None
        self.reading: Reading | None = None
        """None while the context is read the first time."""
        self.module: nn.Module | None = None
        """The attention module of this layer; others may share its keys."""

    @without_autocast("key_states", "value_states")
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.reading is None:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
        else:
            at = self.reading.columns.to(key_states.device)[:, None, :, None].expand(-1, key_states.shape[1], -1, -1)
            stored: Pair = self.keys, self.values  # type: ignore[assignment]
            keys, values = self.local = tuple(  # type: ignore[assignment]
                torch.cat([x.gather(2, at.expand(-1, -1, -1, x.shape[3])), own], dim=2)
                for x, own in zip(stored, (key_states, value_states), strict=True)
            )
        await_attention(keys, self.receive_attention)
        return keys, values

    def get_seq_length(self) -> int:
        """The number of tokens that the next tokens attend to."""
        return super().get_seq_length() if self.reading is None else self.reading.columns.shape[1]

    @torch.no_grad()
    @without_autocast()
    def receive_attention(self, attention: PlainAttention) -> PlainAttention | None:
        """Scores the context by the queries of a reading, and attends, or replaces the model's mask, which covers the
        whole context."""
        if self.module is None:
            self.module = attention.module
        reading = self.reading
        pair: Pair = self.local or (self.keys, self.values)  # type: ignore[assignment]
        attention, lse = self._attend(attention, pair, reading is not None and reading.padded)
        if reading is not None:
            if attention.module is self.module:
                self._score(attention, reading, lse)
            if attention.output is None:
                attention = attention._replace(mask=reading.mask(attention.implementation, attention.query))
        return attention

    def _attend(self, attention: PlainAttention, pair: Pair, padded: bool) -> tuple[PlainAttention, Tensor | None]:
        """Flash attention without a mask, for which transformers would make one of queries by tokens, and the log of its
        normaliser; where it does not know both, the given attention."""
        query, options = attention.query, kernel_options(attention.implementation, attention.query, attention.keywords)
        plain = attention.implementation in ("sdpa", NAME) and options["sinks"] is None and not attention.keywords.get("dropout")
        whole = query.shape[2] == pair[0].shape[2]  # which the model's own function attends to faster
        if padded or whole or not plain or not query.is_cuda or not supports_queries(query, pair[1].shape[3]):
            return attention, None
        out, lse = attend_chunked(query, ChunkedKV(pair, 0, lambda _: iter(())), **options)
        return attention._replace(output=out.transpose(1, 2).contiguous()), lse

    def _score(self, attention: PlainAttention, reading: Reading, lse: Tensor | None) -> None:
        query, keys = attention.query, self.local[0]  # type: ignore[index]
        columns, is_valid = reading.columns.to(keys.device), reading.is_valid.to(keys.device)
        heads, count = keys.shape[1], columns.shape[1]
        options = kernel_options(attention.implementation, query, attention.keywords)
        by_query_head = keys.repeat_interleave(query.shape[1] // heads, dim=1)
        known = {"scaling": options["scaling"], "softcap": options["softcap"], "power": NORM, "columns": count, "lse": lse}
        observed, visible = is_valid[:, count:].float(), is_valid if reading.padded else None
        norms = sum_attention(query, by_query_head, observed, visible, **known).pow_(1 / NORM)
        best = norms.unflatten(1, (heads, -1)).amax(2)
        if self.scores is None:
            self.scores = torch.zeros(self.keys.shape[:3], dtype=torch.float32, device=keys.device)  # type: ignore[union-attr]
        repeated = is_valid[:, :count].clone()
        repeated[:, : self.sinks] = False
        best = best.masked_fill(~repeated[:, None], 0)
        self.scores.scatter_reduce_(2, columns[:, None].expand(-1, heads, -1), best, "amax")


@torch.no_grad()
def fill(layers: list[Any], policy: KVzip, model: PreTrainedModel, mask: Tensor, dense: DynamicCache, others: dict[int, Any]) -> None:
    """Moves the context and its scores from the result of `read_twice` to the `layers` of an empty cache. `mask` `[B, T]`: that of
    `read_twice`."""
    weights = _weights(layers, policy, mask.bool(), dense) if policy.shares_layers else {}
    padding = None if bool(mask.all()) else mask.bool()
    for i, read in enumerate(dense.layers):
        if not isinstance(read, ReadingLayer):
            layers[i] = others[i]
            continue
        layer: EvictingLayer = layers[i]
        keys, values, scores = read.keys, read.values, read.scores
        if keys is None or values is None or read.module is None:
            raise NotImplementedError(
                f"compress on {model.config.model_type}: its attention does not go through transformers' AttentionInterface"
            )
        layer.read_twice = True
        layer.update(keys, values)
        layer.begin_attention(padding)
        if i in weights and layer.storage is not None:
            layer.storage.metadata.head_weights = weights[i].to(keys.device)
        if not layer.policy.second_reading:  # a layer that evicts nothing
            scores = None
        elif scores is None:  # no token but sinks
            scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        layer.end_attention(scores)
        dense.layers[i] = DynamicLayer()  # its memory is free from here on


def _weights(layers: list[Any], policy: KVzip, is_valid: Tensor, dense: DynamicCache) -> dict[int, Tensor]:
    """The result of `weigh_heads` for the layers that evict. `is_valid` `[B, T]`: the tokens that are not padding."""
    seen, positions = is_valid.sum(-1)[:, None, None], is_valid.cumsum(-1)[:, None] - 1
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for i, read in enumerate(dense.layers):
        if isinstance(read, ReadingLayer) and layers[i].policy.second_reading and read.scores is not None:
            protected, rest = policy.protected_and_rest(layers[i].budget, seen)
            recent = (protected - policy.num_sink_tokens).clamp_min(0)
            own = (share_of(policy.alpha_safeguard or 0.0, protected + rest) - protected).clamp_min(0)
            competes = is_valid[:, None] & (positions >= policy.num_sink_tokens) & (positions < seen - recent) & (rest > 0)
            found[i] = read.scores.to(seen.device).masked_fill(~competes, -torch.inf), rest, own
    return dict(zip(found, weigh_heads(*map(list, zip(*found.values(), strict=True))), strict=True)) if found else {}


@torch.no_grad()
def read_twice(
    model: PreTrainedModel, policy: KVzip, ids: Tensor, mask: Tensor, tokenizer: Any, progress: bool, chunk_size: int | None = None
) -> tuple[DynamicCache, dict[int, Any]]:
    """A dense cache of `ids` `[B, T]`. Its full-attention layers (`ReadingLayer`) have the scores of `policy`; its
    other layers are as after the first reading, which reads `chunk_size` tokens at a time, by default all. `mask` `[B, T]` is 0 for
    padding."""
    install()  # so that attention reports to the layers
    dense = DynamicCache(config=model.config)
    for i, layer in enumerate(dense.layers):
        if type(layer) is DynamicLayer:
            dense.layers[i] = ReadingLayer(policy.num_sink_tokens)
    order = (mask == 0).int().argsort(dim=-1, stable=True)  # columns of each row's tokens, then padding
    lengths = mask.sum(-1)
    (shortest, longest), sinks = torch.stack(lengths.aminmax()).tolist(), policy.num_sink_tokens
    padded = shortest < ids.shape[1]
    step = chunk_size or ids.shape[1]
    first, second = range(0, ids.shape[1], step), range(min(sinks, longest), longest, policy.chunk_size)
    instructions = [_instruction(tokenizer, later, ids.device) for later in (False, True)]
    readers = [layer for layer in dense.layers if isinstance(layer, ReadingLayer)]
    with reading(model, "reading the context twice", len(first) + len(second), progress):
        for begin in first:
            end = min(begin + step, ids.shape[1])
            _forward(model, dense, ids[:, :end], mask[:, :end], end - begin, padded)
        others = {i: copy.deepcopy(x) for i, x in enumerate(dense.layers) if not isinstance(x, ReadingLayer)}
        for begin in second:
            end = min(begin + policy.chunk_size, longest)
            local, tokens, is_valid = _reading(ids, order, lengths, begin, end, shortest < end, sinks, instructions[begin > sinks])
            for layer in readers:
                layer.reading = local
            whole = torch.cat([ids, tokens], dim=1), torch.cat([mask, is_valid.to(mask.dtype)], dim=1)
            _forward(model, dense, *whole, tokens.shape[1], padded)
            for i, layer in others.items():
                dense.layers[i] = copy.deepcopy(layer)
    for layer in readers:
        layer.reading = layer.local = None
    return dense, others


def _forward(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor, count: int, padded: bool) -> None:
    """Runs the last `count` tokens of `ids` `[B, T]`; `mask` `[B, T]` is 0 for padding, if there is any."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -count:]
    given = mask if padded else None  # transformers would read it, and so wait for the device
    model(ids[:, -count:], attention_mask=given, position_ids=positions, **passing(cache), use_cache=True, logits_to_keep=1)


def _instruction(tokenizer: Any, later: bool, device: torch.device) -> Tensor:
    """Token ids that ask for the repetition; none without a tokenizer."""
    found = [] if tokenizer is None else tokenizer(LATER if later else FIRST, add_special_tokens=False)["input_ids"]
    return torch.tensor(found, dtype=torch.long, device=device)


def _reading(
    ids: Tensor, order: Tensor, lengths: Tensor, begin: int, end: int, padded: bool, sinks: int, instruction: Tensor
) -> tuple[Reading, Tensor, Tensor]:
    """The reading that repeats the tokens `begin` to `end` of each row, its token ids `[B, R]`, and which of them are not padding."""
    hint = min(HINT, begin - sinks) if len(instruction) else 0
    place = torch.arange(begin - hint, end, device=ids.device)
    at = order[:, begin - hint : end]
    real = place < lengths[:, None]
    real &= (begin < lengths)[:, None]  # a row that has ended repeats nothing, not even the hint
    asked = instruction.expand(len(ids), -1)
    tokens = torch.cat([asked, ids.gather(1, at)], dim=1)
    is_valid = torch.cat([(begin < lengths)[:, None].expand_as(asked), real], dim=1)
    left = is_valid.int().argsort(dim=-1, stable=True)  # padding to the left
    tokens, is_valid = tokens.gather(1, left), is_valid.gather(1, left)
    first = torch.arange(sinks, device=ids.device)
    columns = torch.cat([order[:, :sinks], order[:, begin:end]], dim=1)
    attended = torch.cat([first < lengths[:, None], place[hint:] < lengths[:, None], is_valid], dim=1)
    return Reading(columns, attended, padded), tokens, is_valid
