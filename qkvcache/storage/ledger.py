"""What an evicting layer remembers of its tokens beside their keys and values: positions, scores, norms.

Columns stand as attention sees them: the exact first zone, the slots of the body, the recent zone with the running step. A token's position
is its rank among the real tokens of its row; -1 marks a column or slot that holds none. Which columns are empty is the same in all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..policies import Arrivals, Budget, Policy, Tokens

Records = dict[str, Tensor]
"""`positions` int32, and of what the policy asks for `score`, `key_norm`, `value_norm` fp32: `[B, H, T]` each."""


class Ledger:
    """The records of one layer. `seen` counts the real tokens of each row, int64 `[B]`; None while no padding has been met."""

    def __init__(self, policy: Policy, budget: Budget, keys: Tensor):
        self.policy, self.budget = policy, budget
        batch, heads, _, dim = keys.shape
        self.columns = 0
        self.seen: Tensor | None = None
        self.first = torch.empty(batch, 0, dtype=torch.bool, device=keys.device)
        """Which columns of the first zone hold a token, `[B, E]`."""
        self.body: Records = self._empty(keys)
        self.recent: Records = self._empty(keys)
        self.in_place = False
        """Whether tensors must stay where they are."""
        self.key_sum: Tensor | None = None
        if policy.mean_key:
            self.key_sum = torch.zeros(batch, heads, dim, device=keys.device)

    def _empty(self, like: Tensor) -> Records:
        records = {"positions": torch.empty(*like.shape[:2], 0, dtype=torch.int32, device=like.device)}
        wanted = {"score": self.policy.scores, "key_norm": self.policy.norms, "value_norm": self.policy.keeps_values}
        return records | {name: torch.empty(*like.shape[:2], 0, device=like.device) for name, kept in wanted.items() if kept}

    def enter(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Notes the step's tokens, keys and values `[B, H, Q, D]`, of which `real` `[B, Q]` are real (None: all), and what is known from
        themselves: at once, so that it does not depend on how long they stay exact."""
        batch, heads, count, _ = keys.shape
        if real is not None and self.seen is None:
            self.seen = torch.full((batch,), self.columns, dtype=torch.int64, device=keys.device)
        if self.seen is None:
            positions = torch.arange(self.columns, self.columns + count, dtype=torch.int32, device=keys.device).expand(batch, heads, -1)
        else:
            real = torch.ones(batch, count, dtype=torch.bool, device=keys.device) if real is None else real
            ranks = self.seen[:, None] + real.cumsum(-1) - 1
            positions = torch.where(real, ranks, -1).int()[:, None].expand(-1, heads, -1)
            self.seen = self.seen + real.sum(-1)
        self.columns += count
        new = {"positions": positions, **self.arrived(keys, values, real, self.rows_seen())}
        for name in self.recent:
            x = new.get(name)
            x = torch.zeros_like(positions, dtype=torch.float32) if x is None else x
            self.recent[name] = torch.cat([self.recent[name], x], dim=-1)

    def arrived(self, keys: Tensor, values: Tensor, real: Tensor | None, seen: Tensor) -> dict[str, Tensor | None]:
        """Records of tokens, but for their positions; None where all are zero. `seen` `[B, 1, 1]` counts these tokens too."""
        if self.key_sum is not None:
            units = torch.nn.functional.normalize(keys.float(), dim=-1)
            total = self.key_sum + (units if real is None else units * real[:, None, :, None]).sum(2)
            self.key_sum = self.key_sum.copy_(total) if self.in_place else total
        new: dict[str, Tensor | None] = {}
        if "score" in self.recent:
            score = None if self.policy.tail else self.policy.score(Arrivals(keys, values, keys, values, self.mean_key(seen)))
            new["score"] = None if score is None else score.float()
        for name, x in (("key_norm", keys), ("value_norm", values)):
            if name in self.recent:
                new[name] = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        return new

    def valid(self) -> Tensor | None:
        """Which columns hold a token, bool `[B, T]`; None if all do."""
        if self.seen is None:
            return None
        return torch.cat([self.first, *(zone["positions"][:, 0] >= 0 for zone in (self.body, self.recent))], dim=-1)

    def observe(self, mass: Tensor, queries: Tensor | int) -> None:
        """`mass` `[B, H, T]` of all columns, of `queries` real queries."""
        first, body = self.first.shape[1], self.body["positions"].shape[-1]
        parts = mass[..., first : first + body], mass[..., first + body :]
        for zone, part in zip((self.body, self.recent), parts, strict=True):
            zone["score"] = self.policy.observe(zone["score"], part, queries)

    def rows_seen(self) -> Tensor:
        """Real tokens of each row, `[B, 1, 1]`."""
        if self.seen is not None:
            return self.seen[:, None, None]
        return torch.full((self.first.shape[0], 1, 1), self.columns, dtype=torch.int64, device=self.first.device)

    def mean_key(self, seen: Tensor) -> Tensor | None:
        return None if self.key_sum is None else self.key_sum / seen.clamp_min(1)

    def order(self, records: Records) -> Tensor:
        """int64 `[B, H, T]`, all different where tokens are: by the policy's priority, and of equal ones the newer higher."""
        positions = records["positions"]
        tokens = Tokens(positions, positions >= 0, self.rows_seen(), *(records.get(name) for name in ("score", "key_norm", "value_norm")))
        bits = self.policy.rank(tokens, self.budget).contiguous().view(torch.int32)
        return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32) + positions  # floats compare as these integers do

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.first = fn(self.first)
        self.seen = None if self.seen is None else fn(self.seen)
        self.key_sum = None if self.key_sum is None else fn(self.key_sum)
        for zone in (self.body, self.recent):
            for name in zone:
                zone[name] = fn(zone[name])

    def tensors(self) -> Iterator[Tensor]:
        yield self.first
        yield from (x for x in (self.seen, self.key_sum) if x is not None)
        for zone in (self.body, self.recent):
            yield from zone.values()
