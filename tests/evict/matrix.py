"""Every policy once, with each of its options."""

from dataclasses import dataclass

import torch

from qkvcache import policies


@dataclass(frozen=True, kw_only=True)
class KeyNorm(policies.Policy):
    """A policy of a user's own: it keeps keys of small norm."""

    def score(self, tokens: policies.Arrivals) -> torch.Tensor:
        return -torch.linalg.vector_norm(tokens.keys, dim=-1, dtype=torch.float32)


POLICIES = {
    "sink_window": lambda budget: policies.SinkWindow(window_length=budget - 4),
    "sliding_window": lambda budget: policies.SlidingWindow(window_length=budget),
    "h2o": lambda budget: policies.H2O(budget=budget),
    "h2o_sum": lambda budget: policies.H2O(budget=budget, reduce="sum", num_sink_tokens=1, recent=3),
    "h2o_decay": lambda budget: policies.H2O(budget=budget, decay=0.9, recent=2),
    "tova": lambda budget: policies.TOVA(budget=budget, num_sink_tokens=2, recent=3),
    "tova_paper": lambda budget: policies.TOVA(budget=budget, num_sink_tokens=0, recent=0),
    "snapkv": lambda budget: policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3),
    "keydiff": lambda budget: policies.KeyDiff(budget=budget, recent=3),
    "key_norm": lambda budget: KeyNorm(budget=budget, recent=3),
    "random": lambda budget: policies.Random(budget=budget, recent=2),
    "expected_attention": lambda budget: policies.ExpectedAttention(budget=budget, recent=3, n_future_positions=16),
    "expected_attention_epsilon": lambda budget: policies.ExpectedAttention(budget=budget, recent=2, n_future_positions=9, epsilon=0.1),
    "custom": lambda budget: policies.Custom(function=lambda tokens: tokens.score * tokens.value_norm, budget=budget, recent=2),
}
"""Policies with every option, of an interval of 1: `POLICIES[name](budget)`, of 12 tokens at least."""

SHARED = {
    "snapkv": lambda budget: policies.AdaKV(policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3)),
    "snapkv_interval": lambda budget: policies.AdaKV(policies.SnapKV(budget=budget, interval=3, window_size=4, recent=2), 0.3),
    "h2o": lambda budget: policies.AdaKV(policies.H2O(budget=budget, recent=2), 0.5),
    "tova": lambda budget: policies.AdaKV(policies.TOVA(budget=budget, num_sink_tokens=0, recent=0), 0.0),
    "expected_attention": lambda budget: policies.AdaKV(policies.ExpectedAttention(budget=budget, recent=3, n_future_positions=16), 0.1),
    "custom": lambda budget: policies.AdaKV(policies.Custom(function=lambda t: t.score * t.value_norm, budget=budget, recent=2)),
}
"""Policies whose heads share the budget: `SHARED[name](budget)`."""

BY_HEAD = [POLICIES["snapkv"](policies.Budget(15, heads=(3.0, 1.0))), POLICIES["snapkv"](policies.Budget(share=0.5, heads=(0.3, 0.6)))]
"""Budgets in tokens and in a share whose parts differ by head."""

NAMED = POLICIES | {f"{name}_shared": make for name, make in SHARED.items()}
EACH_KIND = ["sink_window", "h2o", "tova", "snapkv", "keydiff", "key_norm", "expected_attention", "h2o_shared", "snapkv_shared"]
"""One of each kind of score, and budgets of heads."""

CUT_FREE = ["sink_window", "sliding_window", "key_norm", "random"]
"""Those whose tokens do not depend on how a text is cut into steps."""
