"""`TokenMetadata`: the position, score and norms that an evicting layer keeps of each token besides its key and value.

Columns are in the order in which attention reads them: sinks, slots of the quantized region, residual with the tokens
of the running step. A token's position is its rank among the tokens of its row, padding left out; -1 marks an empty
column. The empty columns are the same in all heads, unless heads share a budget (`ragged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Pair
from ..policies import Arrivals, Budget, Policy, Rotation, Tokens, given
from ..policies.ranking import total_order
from .head_pages import HeadPages

TokenFields = dict[str, Tensor]
"""`positions` int32, and `score`, `key_norm`, `value_norm` fp32 if the policy needs them: `[B, H, T]` each."""


def no_tokens(policy: Policy, like: Tensor) -> TokenFields:
    """Empty fields, `[B, H, 0]` each, that `policy` needs for keys like `like` `[B, H, T, D]`."""
    fields = {"positions": torch.empty(*like.shape[:2], 0, dtype=torch.int32, device=like.device)}
    wanted = {
        "score": policy.has_scores,
        "key_norm": policy.needs_norms,
        "value_norm": policy.needs_norms,
    }
    none = torch.empty(*like.shape[:2], 0, dtype=torch.float32, device=like.device)
    return fields | {name: none.clone() for name, kept in wanted.items() if kept}


class TokenMetadata:
    """The metadata of one layer with keys `[B, H, T, D]`. If heads share a budget, the metadata of the quantized region
    lies in its pages (`head_pages.py`)."""

    def __init__(self, policy: Policy, budget: Budget, keys: Tensor, rope: Rotation | None = None, pages: HeadPages | None = None):
        self.policy, self.budget, self.rope, self.pages = policy, budget, rope, pages
        batch = keys.shape[0]
        self.columns = 0
        """Tokens seen by a row, padding included."""
        self.row_lengths: Tensor | None = None
        """Tokens seen by each row without padding, int64 `[B]`; None while there was no padding."""
        self.head_weights: Tensor | None = None
        """Each head's weight in the budget, int64 `[B, H, 1]`; `ONE` is the mean over all heads of the model. None:
        `Budget` and `Policy.alpha_safeguard` decide."""
        self.sinks = torch.empty(batch, 0, dtype=torch.bool, device=keys.device)
        """The columns of the sinks that hold a token, bool `[B, S]`."""
        self._residual: TokenFields = no_tokens(policy, keys)
        self._waiting: list[Arrivals] = []
        """The last tokens of decode steps whose metadata is not computed yet."""
        self._region: TokenFields = no_tokens(policy, keys) if pages is None else {}
        self.ragged = False
        """Whether a column of the region may be empty in some heads only."""
        self.has_gaps = False
        """Whether empty columns of the residual may come after others."""
        self.static = False
        """Whether tensors must keep their addresses."""
        self.statistics: dict[str, Tensor] = {}
        """The policy's statistics of all tokens seen, `[B, ...]` each."""

    @property
    def region(self) -> TokenFields:
        """The fields of the quantized region's slots; a copy if they lie in pages."""
        if self.pages is None:
            return self._region
        return {name: self.pages.read(name)[..., : self.pages.length] for name in self.pages.fields}

    @region.setter
    def region(self, fields: TokenFields) -> None:
        self._region = fields

    @property
    def residual(self) -> TokenFields:
        """The fields of the residual, those of the running step's tokens included."""
        if self._waiting:
            self._describe_waiting()
        return self._residual

    @residual.setter
    def residual(self, fields: TokenFields) -> None:
        self._residual, self._waiting = fields, []

    def append(self, tokens: Arrivals) -> None:
        """Adds the tokens of a step to the residual's metadata. Does not read `positions` and `seen` of `tokens`."""
        keys, is_valid = tokens.keys, tokens.is_valid
        batch, _, count, _ = keys.shape
        observed = self.policy.observation_window > 0
        if count == 1 and is_valid is None and not (observed and self.policy.scores_arrivals):
            self._waiting.append(tokens)
            if "score" in self._residual and observed:
                self._residual["score"] = F.pad(self._residual["score"], (0, 1))
            self.columns += 1
            self.row_lengths = None if self.row_lengths is None else self.row_lengths + 1
            return
        residual = self.residual
        if is_valid is not None and self.row_lengths is None:
            self.row_lengths = torch.full((batch,), self.columns, dtype=torch.int64, device=keys.device)
        if self.row_lengths is None:
            positions = torch.arange(self.columns, self.columns + count, dtype=torch.int32, device=keys.device).expand(batch, -1)
        else:
            is_valid = torch.ones(batch, count, dtype=torch.bool, device=keys.device) if is_valid is None else is_valid
            ranks = self.row_lengths[:, None] + is_valid.cumsum(-1) - 1
            positions = torch.where(is_valid, ranks, -1).int()
            self.row_lengths = self.row_lengths + is_valid.sum(-1)
        self.has_gaps |= tokens.is_valid is not None
        begin = self.columns if self.row_lengths is None else None
        self.columns += count
        self._describe(residual, replace(tokens, positions=positions, begin=begin, seen=self.lengths()))

    def _describe_waiting(self) -> None:
        """Computes the fields of the tokens of several decode steps together: one by one, each would cost many small
        kernels."""
        steps, self._waiting = self._waiting, []
        count, newest = len(steps), self.lengths()[:, :, 0]  # [B, 1]
        positions = newest - count + torch.arange(count, device=newest.device)
        keys, values = (torch.cat(x, dim=2) for x in zip(*((step.keys, step.values) for step in steps), strict=True))
        queries = None if steps[0].queries is None else torch.cat([given(step.queries, "queries") for step in steps], dim=2)
        tokens = replace(steps[-1], keys=keys, values=values, queries=queries, single=True)
        begin = self.columns - count if self.row_lengths is None else None
        self._describe(self._residual, replace(tokens, positions=positions.int(), begin=begin, seen=positions[:, None] + 1))

    def _describe(self, residual: TokenFields, tokens: Arrivals) -> None:
        """Adds the fields of new tokens to `residual`."""
        heads, positions = tokens.keys.shape[1], given(tokens.positions, "positions")
        fields = self.new_fields(tokens)
        columns = residual["positions"].shape[-1] + positions.shape[-1]
        for name, x in residual.items():
            new = positions[:, None].expand(-1, heads, -1) if name == "positions" else fields.get(name)
            residual[name] = F.pad(x, (0, columns - x.shape[-1])) if new is None else torch.cat([x, new], dim=-1)

    def simulate(self, like: Pair, query_heads: int, sinks: int = 0, region: int = 0, residual: int = 0) -> None:
        """Allocates, on the meta device, the statistics of tokens like `like` `[B, H, T, D]` with `query_heads` query
        heads, and columns of each zone; those of the region only where they do not lie in pages."""
        self.sinks = F.pad(self.sinks, (0, sinks))
        for zone, tokens in ((self._region, region), (self.residual, residual)):
            for name, x in zone.items():
                zone[name] = F.pad(x, (0, tokens))
        keys, values = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in like)
        queries = keys.new_zeros(keys.shape[0], query_heads, 1, keys.shape[3])
        position = torch.zeros(keys.shape[0], 1, dtype=torch.int32, device=keys.device)
        step = Arrivals(keys, values, None, position, None, self.lengths(), queries=queries, scaling=1.0, rope=self.rope)
        self.statistics, _ = self.policy.arrive({}, step)
        if self.policy.shares_layers:
            self.head_weights = torch.zeros(*keys.shape[:2], 1, dtype=torch.int64, device=keys.device)

    def new_fields(self, tokens: Arrivals) -> dict[str, Tensor | None]:
        """The fields of new tokens except their positions; None stands for zeros. A field depends only on the tokens
        seen so far, not on the time at which a token is quantized."""
        statistics, score = self.policy.arrive(self.statistics, tokens)
        if self.static:  # at fixed addresses
            for name, x in self.statistics.items():
                x.copy_(statistics[name])
        else:
            self.statistics = statistics
        new: dict[str, Tensor | None] = {}
        if "score" in self._residual:
            new["score"] = None if score is None else score.float()
        for name, x in (("key_norm", tokens.keys), ("value_norm", tokens.values)):
            if name in self._residual:
                new[name] = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return new

    def is_valid(self) -> Tensor | None:
        """The columns that hold a token, bool `[B, T]`, or `[B, H, T]` if `ragged` tokens are in pages; None: all."""
        if self.ragged and self.pages is not None and self.pages.length:
            region = self.pages.read("positions")[..., : self.pages.length]
            return torch.cat([self.sinks[:, None].expand(-1, region.shape[1], -1), region >= 0, self._residual_is_valid()], dim=-1)
        if self.row_lengths is None:
            return None
        return torch.cat([self.sinks, self.region["positions"][:, 0] >= 0, self._residual_is_valid()[:, 0]], dim=-1)

    def _residual_is_valid(self) -> Tensor:
        """The columns of the residual that hold a token, bool `[B, H, R]`."""
        return F.pad(self._residual["positions"] >= 0, (0, len(self._waiting)), value=True)

    def observe(self, attention_sums: Tensor, queries: Tensor | int) -> None:
        """Updates scores with the attention `[B, H, T]` that `queries` queries gave to each column, or to each slot of pages."""
        fields = self._residual if self.policy.observation_window else self.residual  # it scores waiting tokens
        sinks, residual = self.sinks.shape[1], fields["score"].shape[-1]
        parts = attention_sums[..., sinks : attention_sums.shape[-1] - residual], attention_sums[..., attention_sums.shape[-1] - residual :]
        for zone, part in zip((self._region, fields), parts, strict=True):
            if zone:
                zone["score"] = self.policy.observe(zone["score"], part, queries)
        if self.pages is not None and self.pages.length:
            missing = self.pages.columns - parts[0].shape[-1]
            part = F.pad(parts[0], (0, missing)) if missing else parts[0]
            self.pages.write("score", self.policy.observe(self.pages.read("score"), part, queries))

    def lengths(self) -> Tensor:
        """Tokens seen by each row without padding, int64 `[B, 1, 1]`."""
        if self.row_lengths is not None:
            return self.row_lengths[:, None, None]
        return torch.full((self.sinks.shape[0], 1, 1), self.columns, dtype=torch.int64, device=self.sinks.device)

    def order(self, fields: TokenFields) -> Tensor:
        """The order of retention, int64 `[B, H, T]`, without ties: by the policy's priority; at equal priority newer
        tokens are higher."""
        positions = fields["positions"]
        optional = {name: x for name, x in fields.items() if name != "positions"}
        tokens = Tokens(positions, positions >= 0, self.lengths(), **optional)
        return total_order(self.policy.rank(tokens, self.budget), positions)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor by `fn(tensor)`, which may change the rows."""
        zones = self._region, self.residual
        self.sinks = fn(self.sinks)
        self.row_lengths = None if self.row_lengths is None else fn(self.row_lengths)
        self.head_weights = None if self.head_weights is None else fn(self.head_weights)
        self.statistics = {name: fn(x) for name, x in self.statistics.items()}
        for zone in zones:
            for name in zone:
                zone[name] = fn(zone[name])

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name in a snapshot."""
        named = {"sinks": self.sinks, "row_lengths": self.row_lengths, "head_weights": self.head_weights}
        yield from ((f"metadata.{name}", x) for name, x in named.items() if x is not None)
        residual = self.residual  # first: computing it may change the statistics
        for zone, fields in (("region", self._region), ("residual", residual), ("statistics", self.statistics)):
            yield from ((f"metadata.{zone}.{name}", x) for name, x in fields.items())

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes the `named_tensors` of another layer from `tensors`."""
        self.sinks = tensors["metadata.sinks"]
        self.row_lengths, self.head_weights = tensors.get("metadata.row_lengths"), tensors.get("metadata.head_weights")
        for zone, fields in (("region", self._region), ("residual", self._residual)):
            fields |= {name: tensors[f"metadata.{zone}.{name}"] for name in fields}
        prefix = "metadata.statistics."
        self.statistics = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
