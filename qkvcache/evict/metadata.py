"""`TokenMetadata`: the position, score and norms that an evicting layer keeps of each token besides its key and value.

Columns are in the order in which attention reads them: sinks, slots of the quantized region, residual with the tokens
of the running step. A token's position is its rank among the tokens of its row, padding left out; -1 marks an empty
column. The empty columns are the same in all heads, unless heads share a budget (`ragged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Pair, both
from ..storage.ring import put
from .head_pages import HeadPages
from .policies import Arrivals, Budget, Policy, Rotation, Tokens, given
from .replace import ranked, total_order
from .tail import Tail, TokenFields


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
    """The metadata of one layer. The metadata of the last tokens lies in `tail`; if heads share a budget, the metadata of the quantized
    region lies in its pages (`head_pages.py`)."""

    def __init__(self, policy: Policy, budget: Budget, tail: Tail, rope: Rotation | None = None, pages: HeadPages | None = None):
        self.policy, self.budget, self.tail, self.rope, self.pages = policy, budget, tail, rope, pages
        keys = tail.sides[0]
        batch = keys.shape[0]
        self.columns = 0
        """Tokens seen by a row, padding included."""
        self.padding: Tensor | None = None
        """Padding seen by each row, int64 `[B]`; None while there was none."""
        self.counted: Tensor | None = None
        """`row_lengths` where the device counts them; None: elsewhere."""
        self.head_weights: Tensor | None = None
        """Each head's weight in the budget, int64 `[B, H, 1]`; `ONE` is the mean over all heads of the model. None:
        `Budget` and `Policy.alpha_safeguard` decide."""
        self.sinks = torch.empty(batch, 0, dtype=torch.bool, device=keys.device)
        """The columns of the sinks that hold a token, bool `[B, S]`."""
        self.observes = policy.observation_window > 0
        self.scores = policy.scores_arrivals or not {"key_norm", "value_norm"}.isdisjoint(tail.fields)
        """Whether tokens have a score or norms from their arrival on."""
        self.defers = not (self.observes and policy.scores_arrivals)
        """Whether the metadata of decode steps' tokens is computed before an eviction, for all of them together."""
        self.counts = self.defers and not policy.needs_queries
        """Whether such tokens are only counted until then."""
        self.waiting = 0
        """The last tokens, of decode steps, whose metadata is not computed yet."""
        self._queries: list[Tensor] = []
        """The queries of the waiting tokens, if the policy needs them."""
        self._scaling: float | None = None
        self._region: TokenFields = no_tokens(policy, keys) if pages is None else {}
        self.ragged = False
        """Whether a column of the region may be empty in some heads only."""
        self.has_gaps = False
        """Whether empty columns of the residual may come after others."""
        self.has_holes = False
        """Whether there may be an empty column."""
        self._shortest: int | None = None
        """The most padding of a row when `has_holes` was found last; None: not known."""
        self.static = False
        """Whether tensors must keep their addresses."""
        self.recent = None if budget.share else policy.recent_of(policy.size(budget, 0))
        """The number of tokens that are protected as recent, if it is always the same."""
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
        """The fields of the last tokens, in order; a waiting token has only what attention has added to its score."""
        return {name: self.tail.of(x) for name, x in self.tail.fields.items()}

    @property
    def row_lengths(self) -> Tensor | None:
        """Tokens seen by each row without padding, int64 `[B]`; None while there was no padding."""
        if self.counted is not None:
            return self.counted
        return None if self.padding is None else self.columns - self.padding

    def wait(self) -> None:
        """Counts a decode step's token, which is the last of the tail and no padding in any row."""
        self.waiting += 1
        self.columns += 1

    def append(self, tokens: Arrivals) -> None:
        """Adds the metadata of a step's tokens, which are the last of the tail. Does not read `positions` and `seen` of
        `tokens`."""
        keys, is_valid = tokens.keys, tokens.is_valid
        batch, _, count, _ = keys.shape
        if count == 1 and is_valid is None and self.defers:
            if tokens.queries is not None:
                self._queries.append(tokens.queries)
            self._scaling = tokens.scaling
            self.wait()
            return
        self.describe(count)
        if is_valid is not None:
            self.has_gaps = self.has_holes = True
            if self.padding is None:
                self.padding = torch.zeros(batch, dtype=torch.int64, device=keys.device)
        lengths = self.row_lengths
        begin = self.columns if lengths is None else None
        if lengths is None:
            positions = torch.arange(self.columns, self.columns + count, dtype=torch.int32, device=keys.device).expand(batch, -1)
        elif is_valid is None:
            positions = (lengths[:, None] + torch.arange(count, device=keys.device)).int()
        else:
            positions = torch.where(is_valid, lengths[:, None] + is_valid.cumsum(-1) - 1, -1).int()
            self._shortest = None
            self.padding = self.padding + (count - is_valid.sum(-1))  # type: ignore[operator]
        self.columns += count
        self._write(replace(tokens, positions=positions, begin=begin, seen=self.lengths()), count)

    def describe(self, later: int = 0) -> None:
        """Computes the metadata of the tokens that wait, together: one by one, each would cost many small kernels. `later`: tokens of the
        tail after them."""
        count, self.waiting = self.waiting, 0
        if not count:
            return
        tail, newest = self.tail, self.columns
        begin, device = tail.count - later - count, tail.sides[0].device
        positions = torch.arange(newest - count, newest, dtype=torch.int32, device=device)
        positions = positions[None] if self.padding is None else positions - self.padding[:, None].int()
        if not self.scores:
            put(tail.fields["positions"], tail.start + begin, positions[:, None])
            return
        positions = positions.expand(len(tail.sides[0]), -1)
        (keys, values), _ = tail.part(begin, count)
        queries, self._queries = torch.cat(self._queries, dim=2) if self._queries else None, []
        tokens = Arrivals(
            keys, values, None, positions, newest - count if self.padding is None else None, positions[:, None].long() + 1,
            queries, self._scaling, self.rope if self.policy.needs_rope else None, single=True,
        )  # fmt: skip
        self._write(tokens, count + later)

    def _write(self, tokens: Arrivals, last: int) -> None:
        """Writes the metadata of `tokens`, which are the first of the `last` ones of the tail."""
        fields, tail = self.new_fields(tokens), self.tail
        fields["positions"] = given(tokens.positions, "positions")[:, None]
        for name, new in fields.items():
            if new is not None:
                tail.write(tail.fields[name], tail.count - last, new)

    def simulate(self, like: Pair, query_heads: int, sinks: int = 0, region: int = 0, residual: int = 0) -> None:
        """Allocates, on the meta device, the statistics of tokens like `like` `[B, H, T, D]` with `query_heads` query
        heads, and columns of each zone; of the region only where its fields do not lie in pages."""
        self.sinks = F.pad(self.sinks, (0, sinks))
        for name, x in self._region.items():
            self._region[name] = F.pad(x, (0, region))
        fields = {name: F.pad(x, (0, residual)) for name, x in self.tail.fields.items()}
        self.tail.set(both(lambda x: F.pad(x, (0, 0, 0, residual)), self.tail.sides), fields)
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
        if "score" in self.tail.fields:
            new["score"] = None if score is None else score.float()
        for name, x in (("key_norm", tokens.keys), ("value_norm", tokens.values)):
            if name in self.tail.fields:
                new[name] = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return new

    def is_valid(self, running: int = 0) -> Tensor | None:
        """The columns that hold a token, bool `[B, T]`, or `[B, H, T]` if `ragged` tokens are in pages; None: all. Without the last
        `running` tokens."""
        if self.ragged and self.pages is not None and self.pages.length:
            region = self.pages.read("positions")[..., : self.pages.length]
            return torch.cat([self.sinks[:, None].expand(-1, region.shape[1], -1), region >= 0, self._residual_is_valid(running)], dim=-1)
        if not self.has_holes:
            return None
        return torch.cat([self.sinks, self.region["positions"][:, 0] >= 0, self._residual_is_valid(running)[:, 0]], dim=-1)

    def _residual_is_valid(self, running: int = 0) -> Tensor:
        """The columns of the residual that hold a token, bool `[B, H, R]`."""
        known = self.tail.of(self.tail.fields["positions"], 0, self.tail.count - self.waiting - running)
        return F.pad(known >= 0, (0, self.waiting), value=True)

    def find_holes(self, columns: int) -> None:
        """Sets `has_holes`, if each row may have seen as many tokens as there are `columns`. The host waits for the device."""
        if self._shortest is not None and self.columns - self._shortest < columns:
            return
        zones = self.sinks, self.region["positions"][:, 0] >= 0, self._residual_is_valid()[:, 0]
        most = given(self.padding, "the padding of rows").amax()
        *full, self._shortest = torch.stack([*(zone.all().long() for zone in zones), most]).tolist()
        self.has_holes = not all(full)

    def observe(self, attention_sums: Tensor, queries: Tensor | int) -> None:
        """Updates scores with the attention `[B, H, T]` that `queries` queries gave to each column, or to each slot of pages,
        and to each slot of the tail."""
        if not self.observes:
            self.describe()  # scores of tokens come first
        fields, sums = self.tail.fields, attention_sums[..., self.sinks.shape[1] :]
        stored = sums.shape[-1] - self.tail.slots
        part, last = sums[..., :stored], sums[..., stored:]
        fields["score"] = self.policy.observe(fields["score"], last, queries)
        if self._region:
            self._region["score"] = self.policy.observe(self._region["score"], part, queries)
        if self.pages is not None and self.pages.length:
            missing = self.pages.columns - part.shape[-1]
            part = F.pad(part, (0, missing)) if missing else part
            self.pages.write("score", self.policy.observe(self.pages.read("score"), part, queries))

    def lengths(self) -> Tensor:
        """Tokens seen by each row without padding, int64 `[B, 1, 1]`."""
        if self.padding is self.counted is None:
            return torch.full((self.sinks.shape[0], 1, 1), self.columns, dtype=torch.int64, device=self.sinks.device)
        return given(self.row_lengths, "the lengths of rows")[:, None, None]

    def ranking(self, fields: TokenFields) -> tuple[Tensor, int, int | Tensor]:
        """The policy's priority of tokens with these fields, `[B, H, T]`, the number of sinks, and the first position that is protected as
        recent: an int, or int64 `[B, 1, 1]` if rows differ."""
        positions, get, seen = fields["positions"], fields.get, self.lengths()
        priority = self.policy.priority(Tokens(positions, positions >= 0, seen, get("score"), get("key_norm"), get("value_norm")))
        end: Any = self.columns if self.padding is self.counted is None else seen
        recent = self.policy.recent_of(self.policy.size(self.budget, end)) if self.recent is None else self.recent
        return priority, self.policy.num_sink_tokens, end - recent

    def order(self, fields: TokenFields) -> Tensor:
        """The order of retention, int64 `[B, H, T]`, without ties: first by protection, then by the policy's priority; at
        equal priority newer tokens are higher."""
        priority, num_sinks, first_recent = self.ranking(fields)
        return total_order(ranked(priority, fields["positions"], num_sinks, first_recent), fields["positions"])

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor, except the tensors of the tail, by `fn(tensor)`, which may change the rows."""
        self.describe()
        self.sinks = fn(self.sinks)
        self.padding = None if self.padding is None else fn(self.padding)
        self.head_weights = None if self.head_weights is None else fn(self.head_weights)
        self.statistics = {name: fn(x) for name, x in self.statistics.items()}
        self._region = {name: fn(x) for name, x in self._region.items()}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name in a snapshot. No token may wait (`describe`)."""
        named = {"sinks": self.sinks, "row_lengths": self.row_lengths, "head_weights": self.head_weights}
        yield from ((f"metadata.{name}", x) for name, x in named.items() if x is not None)
        for zone, fields in (("region", self._region), ("residual", self.residual), ("statistics", self.statistics)):
            yield from ((f"metadata.{zone}.{name}", x) for name, x in fields.items())

    def load(self, tensors: dict[str, Tensor], seen: int) -> TokenFields:
        """Takes the `named_tensors` of another layer, which has seen `seen` tokens, and returns the fields of its tail."""
        self.columns, self.sinks, self.head_weights = seen, tensors["metadata.sinks"], tensors.get("metadata.head_weights")
        lengths = tensors.get("metadata.row_lengths")
        self.padding, self.has_holes = None if lengths is None else seen - lengths, lengths is not None
        self._region |= {name: tensors[f"metadata.region.{name}"] for name in self._region}
        prefix = "metadata.statistics."
        self.statistics = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        return {name: tensors[f"metadata.residual.{name}"] for name in self.tail.fields}
