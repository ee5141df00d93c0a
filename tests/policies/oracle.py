"""What policies keep, token by token in plain Python: each row and each head for itself, scores by the papers' formulas in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from seeds import SEED
from torch import Tensor

from qkvcache.formats import resolve
from qkvcache.layers.evicting import EvictingLayer
from qkvcache.policies import Policy, Tokens

HEADS, DIM = 2, 32


@dataclass
class Text:
    """Keys and values `[B, H, T, D]` with left padding, cut into steps; `mass[step]` `[B, H, T]` by position."""

    pads: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED + sum(self.sizes))
        shape = len(self.pads), HEADS, sum(self.sizes)
        self.keys, self.values = (torch.randn(*shape, DIM, generator=generator) for _ in range(2))
        self.mass = torch.rand(len(self.sizes), *shape, generator=generator) ** 4
        self.mask = torch.arange(shape[2]) >= torch.tensor(self.pads)[:, None]


def columns(layer: EvictingLayer) -> Tensor:
    """Positions in the order in which attention sees tokens, -1 where there is none."""
    ledger = layer.storage.ledger
    body, recent = ledger.body["positions"], ledger.recent["positions"]
    first = torch.arange(ledger.first.shape[1], dtype=torch.int32).where(ledger.first, -1)
    return torch.cat([first[:, None].expand(-1, HEADS, -1), body, recent], dim=-1)


def drive(policy: Policy, text: Text, format: str = "identity", **zones) -> Iterator[EvictingLayer]:
    """A layer after each step, with the attention of `text`."""
    layer = EvictingLayer(resolve(format), policy, policy.budgets[0], **zones)
    begin = 0
    for number, size in enumerate(text.sizes):
        step = slice(begin, begin + size)
        layer.update(text.keys[:, :, step], text.values[:, :, step])
        real = text.mask[:, step]
        layer.enter(real)
        mass = None
        if policy.observes:
            positions = columns(layer).long()
            mass = text.mass[number].gather(-1, positions.clamp_min(0)).masked_fill((positions < 0) | ~real.any(-1)[:, None, None], 0)
        layer.observe(mass)
        begin += size
        yield layer


def kept(policy: Policy, text: Text) -> Iterator[list[list[list[int]]]]:
    """Positions held after each step, of each row and head, ascending."""
    rows = [[Head(policy, text, row, head) for head in range(HEADS)] for row in range(len(text.pads))]
    begin = 0
    for number, size in enumerate(text.sizes):
        for row in rows:
            for head in row:
                head.step(number, begin, begin + size)
        yield [[sorted(head.held) for head in row] for row in rows]
        begin += size


class Head:
    def __init__(self, policy: Policy, text: Text, row: int, head: int):
        self.policy, self.row, self.head, self.pad = policy, row, head, text.pads[row]
        self.keys, self.values = (x[row, head, self.pad :].double() for x in (text.keys, text.values))
        self.mass = text.mass[:, row, head].double()
        self.held: list[int] = []
        self.score: dict[int, float] = {}
        self.waiting = self.seen = 0

    def step(self, number: int, begin: int, end: int) -> None:
        queries = max(end - self.pad, 0) - self.seen
        new = range(self.seen, self.seen + queries)
        self.seen += queries
        self.held += new
        self.score |= dict.fromkeys(new, 0.0)
        if queries and self.policy.observes:
            for p in self.held:
                self.score[p] = self.observed(self.score[p], float(self.mass[number, p]), queries)
        elif self.policy.name in ("Knorm", "KeyDiff"):
            self.score |= {p: self.of_key(p) for p in new}
        elif self.policy.name == "LagKV":
            lag = self.policy.lag
            self.score |= {p: self.spread(self.keys, p, lag) + self.spread(self.values, p, lag) for p in range(self.seen - lag)}
        self.waiting += end - begin
        interval = self.policy.interval or 1
        if self.waiting >= interval:
            self.waiting = 0
            limit = self.policy.budgets[0].tokens - interval + 1
            rank = self.ranks()
            self.held = sorted(self.held, key=lambda p: (rank[p], p))[-limit:]

    def observed(self, score: float, mass: float, queries: int) -> float:
        name = self.policy.name
        if name == "TOVA":
            return mass
        if name == "SnapKV":
            return score * (1 - 1 / self.policy.window_size) ** queries + mass
        return score * getattr(self.policy, "decay", 1.0) ** queries + mass

    def of_key(self, p: int) -> float:
        if self.policy.name == "Knorm":
            return -float(self.keys[p].norm())
        units = self.keys[: self.seen] / self.keys[: self.seen].norm(dim=-1, keepdim=True)
        mean = units.mean(0)
        return -float(units[p] @ mean / mean.norm())

    @staticmethod
    def spread(x: Tensor, p: int, lag: int) -> float:
        after = x[p + 1 : p + 1 + lag]
        low, high = after.min(0).values, after.max(0).values
        return float(((x[p] - low) / (high - low)).std())

    def ranks(self) -> dict[int, float]:
        policy = self.policy
        budget = policy.budgets[0].tokens
        held = sorted(self.held)
        rank = {p: self.priority(i, held) for i, p in enumerate(held)}
        norm = {p: float(self.values[p].norm()) for p in held}
        if policy.value_norm:
            rank = {p: rank[p] * norm[p] for p in held}
        recent = policy.recent if isinstance(policy.recent, int) else int(policy.recent * budget)
        free = [p for p in held if policy.num_sink_tokens <= p < self.seen - recent]
        large = int(policy.protect_values * budget)
        for p in sorted(free, key=norm.get)[max(len(free) - large, 0) :] if large else []:
            rank[p] = 1e30
        return {p: rank[p] if p in free else float("inf") for p in held}

    def priority(self, i: int, held: list[int]) -> float:
        p, policy = held[i], self.policy
        if policy.name in ("SinkWindow", "SlidingWindow"):
            return p
        if policy.name == "H2O" and policy.reduce == "mean":
            return self.score[p] / sum(policy.decay**n for n in range(self.seen - p))
        if policy.name == "SnapKV":
            side = policy.kernel_size // 2
            near = [self.score[q] for q in held[max(i - side, 0) : i + side + 1]]
            return sum(near) / len(near)
        if policy.name == "Random":
            return float(policy.priority(Tokens(*(torch.full((1, HEADS, 1), p, dtype=torch.int32),) * 3))[0, self.head, 0])
        if policy.name == "Custom":
            return self.score[p] * float(self.values[p].norm())
        return self.score[p]
