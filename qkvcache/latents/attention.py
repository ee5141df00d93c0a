"""Attention of models that cache latents (MLA: DeepSeek, Kimi, GLM-4.7-Flash, Mistral 4 and others), on their codes.

Such a model caches for each token a latent `c` `[B, 1, T, R]` and a rotated key `r` `[B, 1, T, P]` that all heads
share. Its attention expands them (`expand_kv`) to the keys `[W_k c | r]` and the values `W_v c` of all heads. The
projections can be absorbed instead:

    q . [W_k c | r] = [q W_k | q_rope] . [c | r]          sum p W_v c = W_v (sum p c)

`absorb` wraps `expand_kv` in the model's attention classes, so that it returns `ExpandedKV` for compressed latents. A
class without `expand_kv` is left alone: its attention dequantizes the layer, with a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention.compressed_kv import AS_RETURNED, CompressedKV, Form, of_one_update
from ..attention.model_code import code_of, has_latents
from ..attention.route import restorers
from ..autocast import with_autocast
from ..kernels import AttentionInputs, KeysOrValues, pv, qk
from ..kernels.attend.chunked import (
    ChunkedKV,
    causal_attention,
    hidden_bias,
    library_attention,
    merge,
    most_tokens,
    rotate_back,
    supports_queries,
)
from ..kernels.attend.reference import Options
from .dispatch import attend_latents

ABSORBED_QUERIES = 128
"""The most queries whose attention is absorbed. For more, expanding the latents, block by block, takes fewer operations:
in DeepSeek-V3, for a token and head, 262 kFLOP once and .6 kFLOP for each query, against 2.2 kFLOP absorbed."""

_stock: dict[type, Callable] = {}
"""The method `expand_kv` of each class that is wrapped."""


def absorb(config: PreTrainedConfig) -> bool:
    """Wraps `expand_kv` of the attention classes of this model, and returns whether it caches latents and has such a method. Idempotent."""
    config = config.get_text_config(decoder=True)
    if not has_latents(config):
        return False
    code = code_of(config)
    modules = [x for x in vars(code).values() if isinstance(x, type) and issubclass(x, nn.Module)] if code else []
    kinds: list[Any] = [kind for kind in modules if callable(getattr(kind, "expand_kv", None))]
    for kind in kinds:
        if "expand_kv" in vars(kind) and kind not in _stock:
            _stock[kind] = kind.expand_kv
            kind.expand_kv = _wrapped(kind.expand_kv)
    return bool(kinds)


@restorers.append
def restore() -> None:
    """Gives every class its own `expand_kv` back."""
    while _stock:
        kind, stock = _stock.popitem()
        kind.expand_kv = stock  # type: ignore[attr-defined]


def _wrapped(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def expand_kv(self: nn.Module, latents: Any, rope: Any) -> tuple[Any, Any]:
        if not of_one_update(latents, rope):
            return stock(self, latents, rope)
        expansion = Expansion(self, stock, latents.attention_inputs)
        return ExpandedKV(expansion, True, latents.columns), ExpandedKV(expansion, False, latents.columns)

    return expand_kv


class Expansion:
    """The latents of one layer for one step, and the attention `module` whose method `stock` expands them."""

    def __init__(self, module: Any, stock: Callable, inputs: AttentionInputs):
        self.module, self.stock, self.inputs = module, with_autocast(stock), inputs
        self.nope, self.rope, self.value_dim = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
        rank = inputs.key.shape[3]
        weight = transposed_weight(module.kv_b_proj, rank, inputs.key.device).mT
        self.weight = weight.unflatten(0, (-1, self.nope + self.value_dim))
        """Up-projections of keys and values, `[Hq, nope + value, R]`."""
        indexed = getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)  # or by an earlier layer's indexer
        self.chosen = module.config.index_topk if indexed else None
        """The most tokens that a query sees, where an indexer chooses them."""

    @property
    def heads(self) -> int:
        return self.weight.shape[0]

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries `[B, Hq, Q, nope + P]` for latents and their rotated keys: `[B, Hq, Q, R + P]`."""
        nope, rope = query.split([self.nope, self.rope], dim=-1)
        return torch.cat([torch.einsum("bhqn,hnr->bhqr", nope, self.weight[:, : self.nope].to(nope.dtype)), rope], dim=-1)

    def projected(self, out: Tensor) -> Tensor:
        """Sums of latents `[B, Hq, Q, R]` as sums of values `[B, Hq, Q, value]`."""
        return torch.einsum("bhqr,hvr->bhqv", out, self.weight[:, self.nope :].to(out.dtype))

    def in_blocks(self, query: Tensor) -> bool:
        """Whether `attend_blocks` serves these queries, and takes fewer operations than absorbed attention."""
        differentiates = torch.is_grad_enabled() and query.requires_grad
        few = query.shape[2] <= ABSORBED_QUERIES or torch.compiler.is_compiling() or differentiates
        return not few and self.value_dim <= query.shape[3] and supports_queries(query, query.shape[3])

    def attend_blocks(self, query: Tensor, hidden: Tensor | None, *, scaling: float) -> Tensor:
        """Causal attention `[B, Hq, Q, value]` of the last `Q` tokens, over latents that are expanded block by block.
        `hidden`: columns that no query sees, bool `[B or 1, T]`; None: there are none."""
        tokens, (batch, heads, queries, _) = ChunkedKV.of(self.inputs), query.shape
        parts, column = [], tokens.before
        for count, codecs, fill in tokens.pieces(most_tokens(query, heads)):
            latents, rope = (query.new_empty(batch, 1, count, side.shape[3]) for side in (self.inputs.key, self.inputs.value))
            fill((latents, rope))
            keys, values = self._expanded(rotate_back(latents, codecs[0]), rotate_back(rope, codecs[1]))
            bias = None if hidden is None else hidden_bias(hidden[:, None, None, column : column + count], query.dtype)
            parts.append(library_attention(query, keys, values, bias, scaling, None))
            column += count
            if len(parts) > 1:
                parts = [merge(parts, heads, queries, heads, None)]
        own = None if hidden is None else torch.cat([hidden[:, : tokens.before], hidden[:, column:]], dim=1)
        parts += causal_attention(query, query, *self._expanded(*tokens.exact), own, scaling, None)
        return merge(parts, heads, queries, heads, None)[0][..., : self.value_dim]

    def _expanded(self, latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads. Values have as many channels as keys, which kernels ask for; those they lack are zeros."""
        keys, values = self.stock(self.module, latents, rope)
        return keys, F.pad(values, (0, keys.shape[3] - values.shape[3]))


class ExpandedKV(CompressedKV):
    """The keys or values of all heads, `[B, Hq, T, D]`, of latents that are not expanded yet. Both matmuls of eager attention run on the
    codes of the latents, too; every other operation expands all of them."""

    __slots__ = ("expansion",)

    def __init__(self, expansion: Expansion, is_keys: bool, columns: int | None, form: Form = AS_RETURNED):
        super().__init__(expansion.inputs, is_keys, columns, form=form)
        self.expansion = expansion

    @property
    def side(self) -> KeysOrValues:
        """The latents."""
        return self.attention_inputs.key

    def like(self, columns: int | None, form: Form) -> ExpandedKV:
        return ExpandedKV(self.expansion, self.is_keys, columns, form)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        batch, _, tokens, _ = self.side.shape
        of = self.expansion
        return batch, of.heads, tokens, of.nope + of.rope if self.is_keys else of.value_dim

    def whole(self) -> Tensor:
        latents, rope = (CompressedKV(self.attention_inputs, is_keys, self.columns) for is_keys in (True, False))
        return self.expansion.stock(self.expansion.module, latents.dense(), rope.dense())[not self.is_keys]

    def attend(self, query: Tensor, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
        of, scaling = self.expansion, options.get("scaling")
        scaling, causal = query.shape[3] ** -0.5 if scaling is None else scaling, options.get("causal", False)
        return of.projected(attend_latents(of.absorbed(query), of.inputs, mask, scaling=scaling, causal=causal, chosen=of.chosen))

    def path(self, options: dict[str, Any]) -> str | None:
        return "codes" if options["softcap"] is None and options["sinks"] is None else "dense"

    def attend_many(self, query: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> Tensor | None:
        of = self.expansion
        return of.attend_blocks(query, hidden, scaling=options["scaling"]) if of.in_blocks(query) else None

    def scores(self, query: Tensor) -> Tensor:
        absorbed = self.expansion.absorbed(query).float().flatten(1, 2)[:, None]
        latent, rope = absorbed.split([self.side.shape[3], self.expansion.rope], dim=-1)
        return (qk(latent, self.side) + qk(rope, self.attention_inputs.value)).view(*query.shape[:3], -1)

    def weighted(self, weights: Tensor) -> Tensor:
        out = pv(weights.float().flatten(1, 2)[:, None], self.side)
        return self.expansion.projected(out.view(*weights.shape[:3], -1))


def transposed_weight(projection: nn.Module, channels: int, device: torch.device | None = None) -> Tensor:
    """The transposed weight `[channels, outputs]` of a projection of `channels`. That of a layer other than a plain
    `Linear`, which may be quantized, adapted, offloaded or divided among devices, is computed: its outputs for unit
    vectors, on `device` or where it has tensors."""
    weight: Any = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta:
        return weight.mT
    like = next((x for x in (*projection.parameters(), *projection.buffers()) if x.is_floating_point()), None)
    dtype = torch.float32 if like is None else like.dtype
    units = torch.eye(channels, dtype=dtype, device=device or (None if like is None else like.device))
    return projection(units) - projection(torch.zeros_like(units[:1]))
