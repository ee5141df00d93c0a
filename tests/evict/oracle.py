"""What policies keep, token by token in plain Python: each row and each head for itself, scores by the papers' formulas in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.rope import Rope
from qkvcache.policies import Policy, Tokens
from tests.matrix import FORMATS
from tests.seeds import SEED

HEADS, GROUPS, DIM = 2, 2, 32
ROPE = Rope(1000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), interleaved=False)


@dataclass
class Text:
    """Keys and values `[B, H, T, D]` with left padding, cut into steps; `attention_sums[step]` `[B, H, T]` by position."""

    pads: tuple[int, ...]
    sizes: tuple[int, ...]
    skew: float = 1.0
    """How much more attention the second head's tokens get."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED + sum(self.sizes))
        shape = len(self.pads), HEADS, sum(self.sizes)
        self.keys, self.values = (torch.randn(*shape, DIM, generator=generator) for _ in range(2))
        self.queries = torch.randn(len(self.pads), HEADS * GROUPS, sum(self.sizes), DIM, generator=generator) + 0.5
        self.attention_sums = torch.rand(len(self.sizes), *shape, generator=generator) ** 4
        self.attention_sums[:, :, 1] *= self.skew
        self.mask = torch.arange(shape[2]) >= torch.tensor(self.pads)[:, None]


def columns(layer: EvictingLayer) -> Tensor:
    """Positions in the order in which attention sees tokens, -1 where there is none."""
    metadata = layer.storage.metadata
    metadata.describe()
    region, recent = metadata.region["positions"], metadata.residual["positions"]
    first = torch.arange(metadata.sinks.shape[1], dtype=torch.int32).where(metadata.sinks, -1)
    return torch.cat([first[:, None].expand(-1, HEADS, -1), region, recent], dim=-1)


def drive(policy: Policy, text: Text, format: str = "identity", **zones) -> Iterator[EvictingLayer]:
    """A layer after each step, with the attention of `text`."""
    layer = EvictingLayer(FORMATS[format], policy, policy.budgets[0], rope=ROPE, **zones)
    begin = 0
    for number, size in enumerate(text.sizes):
        step = slice(begin, begin + size)
        layer.update(text.keys[:, :, step], text.values[:, :, step])
        is_valid = text.mask[:, step]
        layer.begin_attention(is_valid if any(text.pads) else None, text.queries[:, :, step], DIM**-0.5)
        attention_sums = None
        if policy.observation_window:
            positions = columns(layer).long()
            attention_sums = (
                text.attention_sums[number]
                .gather(-1, positions.clamp_min(0))
                .masked_fill((positions < 0) | ~is_valid.any(-1)[:, None, None], 0)
            )
        layer.end_attention(attention_sums)
        begin += size
        yield layer


def kept(policy: Policy, text: Text, guaranteed: Sequence[int] = ()) -> Iterator[list[list[list[int]]]]:
    """Positions held after each step, of each row and head, ascending. `guaranteed`: as `evict` takes it."""
    rows = [[Head(policy, text, row, head) for head in range(HEADS)] for row in range(len(text.pads))]
    begin = 0
    for number, size in enumerate(text.sizes):
        for row in rows:
            limits = [head.step(number, begin, begin + size) for head in row]
            if limits[0] is not None and (heads := policy.budgets[0].heads):
                protected = min(policy.num_sink_tokens + policy.recent, limits[0])
                own = [protected + math.floor(len(row) * part / sum(heads) * (limits[0] - protected) + 1e-6) for part in heads]
                for head, limit in zip(row, own, strict=True):
                    evict([head], limit)
            elif limits[0] is not None:
                evict(row, limits[0], guaranteed)
        yield [[sorted(head.held) for head in row] for row in rows]
        begin += size


def evict(row: list[Head], limit: int, guaranteed: Sequence[int] = ()) -> None:
    """Each head keeps the `limit` tokens of highest rank; with `AdaKV` its guaranteed share of them, or as many as it is `guaranteed`, and
    the rest of what the heads may hold together is of the highest rank in all of them."""
    alpha = row[0].policy.alpha_safeguard
    own = guaranteed or [limit if alpha is None else math.floor(alpha * limit + 1e-6)] * len(row)
    left, room = [], len(row) * limit
    for number, (head, sure) in enumerate(zip(row, own, strict=True)):
        rank = head.ranks()
        best = sorted(head.held, key=lambda p: (rank[p], p), reverse=True)
        head.held = best[:sure]
        left += [(rank[p], p, -number) for p in best[sure:]]
        room -= len(head.held)
    for _, p, number in sorted(left, reverse=True)[:room]:
        row[-number].held.append(p)
    for head in row:
        head.held.sort()


def turned(x: Tensor, by: int) -> Tensor:
    """Vectors `[..., D]` rotated by `by` positions."""
    return ROPE.rotate(x.reshape(1, 1, -1, DIM), by).view(x.shape)


class Head:
    def __init__(self, policy: Policy, text: Text, row: int, head: int):
        self.policy, self.row, self.head, self.pad = policy, row, head, text.pads[row]
        self.kind = getattr(policy, "policy", policy).name
        self.keys, self.values = (x[row, head, self.pad :].double() for x in (text.keys, text.values))
        self.queries = text.queries[row, head * GROUPS : (head + 1) * GROUPS, self.pad :].double()
        self.attention_sums = text.attention_sums[:, row, head].double()
        self.statistics: dict = {}
        self.held: list[int] = []
        self.score: dict[int, float] = {}
        self.waiting = self.seen = 0

    def step(self, number: int, begin: int, end: int) -> int | None:
        """Takes the tokens of a step; returns how many may be held if some must go now."""
        queries = max(end - self.pad, 0) - self.seen
        new = range(self.seen, self.seen + queries)
        self.seen += queries
        self.held += new
        self.score |= dict.fromkeys(new, 0.0)
        if queries and self.policy.observation_window:
            for p in self.held:
                self.score[p] = self.observed(self.score[p], float(self.attention_sums[number, p]), queries)
        elif self.kind in ("KeyNorm", "KeyDiff"):
            self.score |= {p: self.of_key(p) for p in new}
        elif self.kind == "ExpectedAttention":
            self.score |= self.expected(new)
        self.waiting += end - begin
        interval = self.policy.interval or 1
        if self.waiting < interval:
            return None
        self.waiting = 0
        return self.policy.budgets[0].tokens - interval + 1

    def observed(self, score: float, attention_sums: float, queries: int) -> float:
        name = self.kind
        if name == "TOVA":
            return attention_sums
        if name == "SnapKV":
            return score * (1 - 1 / self.policy.window_size) ** queries + attention_sums
        return score * getattr(self.policy, "decay", 1.0) ** queries + attention_sums

    def of_key(self, p: int) -> float:
        if self.kind == "KeyNorm":
            return -float(self.keys[p].norm())
        units = self.keys[: self.seen] / self.keys[: self.seen].norm(dim=-1, keepdim=True)
        mean = units.mean(0)
        return -float(units[p] @ mean / mean.norm())

    def expected(self, new: range) -> dict[int, float]:
        """`(softmax + epsilon) |v|` times the tokens of the softmax."""
        policy, after, known = self.policy, range(self.seen, self.seen + self.policy.n_future_positions), self.statistics
        own = [p for p in new if p >= policy.num_sink_tokens]
        if len(own) > 1:
            before_rope = torch.stack([turned(self.queries[:, p], -p) for p in own], dim=1)  # [G, T, D]
            known["mean"] = before_rope.mean(1)
            known["covariance"] = [torch.cov(x.T, correction=0) for x in before_rope]
        score = dict.fromkeys(new, 0.0)
        for group in range(GROUPS):
            logits = {}
            if "mean" in known:
                mean = torch.stack([turned(known["mean"][group], t) for t in after]).mean(0)
                average = torch.stack([turned(torch.eye(DIM).double(), t) for t in after]).mean(0)
                for p in new:
                    key = self.keys[p]
                    quadratic = float(key @ average.T @ known["covariance"][group] @ average @ key) / DIM / 2 if len(own) > 1 else 0.0
                    logits[p] = float(key @ mean) / DIM**0.5, quadratic
            if len(own) > 1:
                weights = {p: math.exp(sum(logits[p])) for p in own}
                known["sum", group], known["count"] = sum(weights.values()), len(own)
                known["offset", group] = sum(logits[p][1] for p in own) / len(own)
            for p in new:
                weight, count = 1.0, known.get("count", 1)
                if "mean" in known:
                    linear, quadratic = logits[p]
                    quadratic = quadratic if len(own) > 1 else known["offset", group]
                    weight = math.exp(linear + quadratic) / known["sum", group] * count
                score[p] += (weight + policy.epsilon * count) * float(self.values[p].norm()) / GROUPS
        return score

    def ranks(self) -> dict[int, float]:
        policy = self.policy
        budget = policy.budgets[0].tokens
        held = sorted(self.held)
        rank = {p: self.priority(i, held) for i, p in enumerate(held)}
        recent = policy.recent if isinstance(policy.recent, int) else int(policy.recent * budget)
        free = [p for p in held if policy.num_sink_tokens <= p < self.seen - recent]
        return {p: rank[p] if p in free else float("inf") for p in held}

    def priority(self, i: int, held: list[int]) -> float:
        p, policy = held[i], self.policy
        if self.kind in ("SinkWindow", "SlidingWindow"):
            return p
        if self.kind == "H2O" and policy.reduce == "mean":
            return self.score[p] / sum(policy.decay**n for n in range(self.seen - p))
        if self.kind == "SnapKV":
            side = policy.kernel_size // 2
            near = [self.score[q] for q in held[max(i - side, 0) : i + side + 1]]
            return sum(near) / len(near)
        if self.kind == "Random":
            return float(policy.priority(Tokens(*(torch.full((1, HEADS, 1), p, dtype=torch.int32),) * 3))[0, self.head, 0])
        if self.kind == "Custom":
            return self.score[p] * float(self.values[p].norm())
        return self.score[p]
