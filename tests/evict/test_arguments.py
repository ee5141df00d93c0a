"""Wrong options are refused where they are given, in words that name the value."""

import copy
import dataclasses
import math
import pickle
from functools import partial

import pytest
import torch

from qkvcache import CombinedCache, CompressedCache, H2OCache, SinkCache, SlidingWindowCache
from qkvcache.evict.policies import base
from qkvcache.evict.policies.budget import LEAST_OF_SHARE
from qkvcache.policies import (
    H2O,
    REGISTRY,
    TOVA,
    AdaKV,
    Arrivals,
    Budget,
    Custom,
    ExpectedAttention,
    KeyDiff,
    KVzip,
    Policy,
    Random,
    SinkWindow,
    SlidingWindow,
    SnapKV,
    Tokens,
    named,
    resolve,
)
from tests.matrix import model

WRONG = [
    *[(kind, {"budget": 0}, ValueError, "budget=0") for kind in (H2O, TOVA, SnapKV, KeyDiff, Random)],
    *[
        (H2O, {"budget": x}, ValueError, f"budget={x}: must be 1 or more tokens (int), or a share above 0 and below 1 (float)")
        for x in (0, -3, 0.0, 1.5)
    ],
    (H2O, {"budget": math.nan}, ValueError, "budget=nan"),
    (H2O, {"budget": True}, TypeError, "True"),
    (H2O, {"budget": "0.3"}, TypeError, "budget must be a number of tokens (int) or a share (float), got '0.3'"),
    (H2O, {"budget": None}, TypeError, "None"),
    (H2O, {"budget": [64, 0]}, ValueError, "budget=0"),
    (H2O, {"budget": []}, ValueError, "budget"),
    (H2O, {"budget": Budget(tokens=-1)}, ValueError, "Budget.tokens=-1"),
    (H2O, {"budget": Budget()}, ValueError, "share=0"),
    (H2O, {"budget": Budget(share=1.5)}, ValueError, "share=1.5"),
    (H2O, {"num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
    (H2O, {"num_sink_tokens": 0.5}, TypeError, "0.5"),
    (H2O, {"recent": -1}, ValueError, "recent=-1"),
    (H2O, {"recent": 1.01}, ValueError, "recent=1.01: must be 0 or more tokens (int), or a share from 0 to 1 (float)"),
    (H2O, {"recent": math.nan}, ValueError, "recent=nan"),
    (H2O, {"recent": True}, TypeError, "True"),
    (H2O, {"interval": 0}, ValueError, "interval=0"),
    (H2O, {"interval": 1.0}, TypeError, "1.0"),
    (ExpectedAttention, {"n_future_positions": 0}, ValueError, "n_future_positions=0: must be 1 or more positions"),
    (ExpectedAttention, {"epsilon": -1.0}, ValueError, "epsilon=-1.0"),
    (H2O, {"budget": 10, "num_sink_tokens": 4, "recent": 7}, ValueError, "budget=10: num_sink_tokens=4, recent=7"),
    (H2O, {"budget": 10, "num_sink_tokens": 4, "recent": 5, "interval": 3}, ValueError, "interval=3"),
    (H2O, {"budget": [64, 10], "num_sink_tokens": 6, "recent": 5}, ValueError, "budget=10"),
    (TOVA, {"budget": 3}, ValueError, "budget=3: num_sink_tokens=4"),
    (H2O, {"budget": 1.0}, ValueError, "budget=1.0: a share of 1 evicts nothing"),
    (H2O, {"compression_ratio": 1.0}, ValueError, "compression_ratio=1.0: must be the share of tokens to evict"),
    (H2O, {"compression_ratio": 0.5, "budget": 64}, ValueError, "budget=64 with compression_ratio=0.5"),
    (H2O, {"reduce": "max"}, ValueError, "reduce='max'"),
    (H2O, {"decay": 0.0}, ValueError, "decay=0.0"),
    (H2O, {"decay": 1.1}, ValueError, "decay=1.1"),
    (SnapKV, {"window_size": 0}, ValueError, "window_size=0"),
    (SnapKV, {"window_size": 2.0}, TypeError, "2.0"),
    (SnapKV, {"kernel_size": 4}, ValueError, "kernel_size=4"),
    (SnapKV, {"kernel_size": 0}, ValueError, "kernel_size=0"),
    (SinkWindow, {"window_length": 0}, ValueError, "window_length=0"),
    (SinkWindow, {"window_length": 8, "interval": 9}, ValueError, "interval=9"),
    (SinkWindow, {"positions": "none"}, ValueError, "positions='none'"),
    (SinkWindow, {"num_sink_tokens": -1}, ValueError, "num_sink_tokens=-1"),
    (SinkWindow, {"budget": 100}, TypeError, "budget"),
    (SlidingWindow, {"window_length": 1.5}, TypeError, "1.5"),
    (KVzip, {"alpha_safeguard": 1.5}, ValueError, "alpha_safeguard=1.5"),
    (KVzip, {"budget": Budget(64, heads=(1.0,))}, ValueError, "alpha_safeguard=0.2 with Budget.heads"),
    (Custom, {"function": 3}, TypeError, "3"),
    (Custom, {}, TypeError, "function"),
]  # fmt: skip


def config(name):
    return model(name).config


OF_HEADS = H2O(budget=Budget(64, heads=(1.0, 2.0)))
CALLS = [
    (lambda: AdaKV(0.2), TypeError, "AdaKV wraps a policy such as SnapKV(budget=1024), got 0.2"),
    (lambda: AdaKV(SinkWindow()), ValueError, "alpha_safeguard=0.2: the scores of SinkWindow are not attention weights"),
    (lambda: AdaKV(KeyDiff()), ValueError, "whose scores are: Custom, ExpectedAttention, H2O, KVzip, SnapKV, TOVA"),
    (lambda: AdaKV(H2O(), alpha_safeguard=1.5), ValueError, "alpha_safeguard=1.5: must be a share of the budget, from 0 to 1"),
    (lambda: AdaKV(H2O(), alpha_safeguard=math.nan), ValueError, "alpha_safeguard=nan"),
    (lambda: AdaKV(H2O(), alpha_safeguard=True), TypeError, "alpha_safeguard must be a share of the budget (float), got True"),
    (lambda: AdaKV(OF_HEADS), ValueError, "alpha_safeguard=0.2 with Budget.heads"),
    (lambda: AdaKV(KVzip()), ValueError, "AdaKV(KVzip): its heads share"),
    (lambda: AdaKV(AdaKV(H2O())), ValueError, "AdaKV(H2O): its heads share"),
    (lambda: resolve("adakv_keydiff"), ValueError, "the scores of KeyDiff"),
    (lambda: resolve("adakv_lru"), ValueError, "policy='lru' is unknown"),
    (lambda: CompressedCache(config("llama"), policy="h20"), ValueError, "policy='h20' is unknown: did you mean 'h2o'?"),
    (lambda: CompressedCache(config("llama"), policy="KeyDiff"), ValueError, "did you mean 'keydiff'?"),
    (lambda: CompressedCache(config("llama"), policy="lru"), ValueError, "known are sink_window, sliding_window, h2o"),
    (lambda: CompressedCache(config("llama"), policy=1024), TypeError, "1024"),
    (lambda: CompressedCache(config("llama"), policy=H2O), TypeError, "H2O"),
    (lambda: CompressedCache(config("llama")), TypeError, "policy"),
    (lambda: CompressedCache(config("llama"), policy=H2O(budget=[9, 9])), ValueError, "2 budgets for 3"),
    (lambda: CompressedCache(config("gpt2"), policy=SinkWindow(positions="cache")), NotImplementedError, "gpt2"),
    (lambda: SinkCache(config("llama"), window_length=0), ValueError, "window_length=0"),
    (lambda: SinkCache(config("llama"), positions="new"), ValueError, "'new'"),
    (lambda: SinkCache(config("llama"), format="int9"), ValueError, "int9"),
    (lambda: SlidingWindowCache(config("llama"), window_length=-1), ValueError, "window_length=-1"),
    (lambda: H2OCache(config("llama"), budget=0), ValueError, "budget=0"),
    (lambda: H2OCache(config("llama"), policy="tova"), TypeError, "pass budget= or recent= in place of policy='tova'"),
    (lambda: SinkCache(config("llama"), policy="tova"), TypeError, "pass window_length= or positions="),
    (lambda: SlidingWindowCache(config("llama"), policy="tova"), TypeError, "pass window_length="),
    (lambda: CombinedCache(config("llama"), policy="tova"), TypeError, "pass recent= or heavy="),
    (lambda: CompressedCache(config("llama"), policy="h2o", budget=99), TypeError, "policy=policies.H2O(budget=99)"),
    (lambda: H2OCache(config("llama"), decay=0.9), TypeError, "policy=policies.H2O(decay=0.9)"),
    (lambda: CombinedCache(config("llama"), heavy=1.5), ValueError, "1.5"),
    (lambda: CombinedCache(config("llama"), heavy=-4, recent=2, num_sink_tokens=1), ValueError, "-1"),
    (lambda: CombinedCache(config("llama"), heavy="many"), (TypeError, ValueError), "many"),
    (lambda: CombinedCache(config("llama"), heavy=True), TypeError, "True"),
    (lambda: CombinedCache(config("llama"), recent=0.5), TypeError, "recent must be a number of tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), [*((partial(kind, **options), *rest) for kind, options, *rest in WRONG), *CALLS])
def test_policies_and_caches_refuse(make, error, says):
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)


def test_adakv_keeps_the_options_of_its_policy():
    policy = AdaKV(SnapKV(budget=64, recent=9))
    assert policy == SnapKV(budget=64, recent=9, alpha_safeguard=0.2) != SnapKV(budget=64, recent=9)
    assert copy.deepcopy(policy) == policy == pickle.loads(pickle.dumps(policy)) and hash(copy.copy(policy)) == hash(policy)
    assert resolve("adakv_snapkv") == AdaKV(SnapKV())
    assert named("adakv_snapkv", budget=0.5, recent=9) == AdaKV(SnapKV(budget=0.5, recent=9))


def test_compression_ratio_is_one_minus_budget():
    policy = SnapKV(compression_ratio=0.75)
    assert policy == SnapKV(budget=0.25)
    assert dataclasses.replace(policy, window_size=8) == SnapKV(budget=0.25, window_size=8)


def tokens(**options):
    shape = 1, 2, 3
    given = {"positions": torch.arange(3, dtype=torch.int32).expand(shape), "valid": torch.ones(shape, dtype=torch.bool)}
    return Tokens(**given | {"seen": torch.full((1, 1, 1), 9)} | options)


@pytest.mark.parametrize(
    "function", [lambda t: t.positions[0], lambda t: 3.0, lambda t: None, lambda t: t.score.sum(-1)], ids=["rank", "number", "None", "sum"]
)
def test_custom_priorities_of_another_shape_are_refused(function):
    with pytest.raises(ValueError, match=r"expected priorities of shape \(1, 2, 3\)"):
        Custom(function=function).priority(tokens(score=torch.ones(1, 2, 3)))


def test_what_a_policy_lacks_is_said():
    with pytest.raises(NotImplementedError, match="neither scores nor a priority"):
        Policy().priority(tokens())
    with pytest.raises(NotImplementedError):
        Policy().observe(torch.ones(1), torch.ones(1), 1)
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="not given queries"):
        ExpectedAttention().arrive({}, Arrivals(x, x, x, x))


def test_policies_are_frozen_and_named():
    for name, kind in REGISTRY.items():
        policy = resolve(name)
        assert type(policy) is kind and resolve(policy) is policy
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.num_sink_tokens = 7
        assert dataclasses.replace(KeyDiff(budget=64), budget=32).budget == 32


@pytest.mark.parametrize(("seen", "size"), [(0, 4), (1, 4), (9, 4), (10, 5), (29, 6), (30, 7), (610, 65), (1000, 104)])
def test_budgets_grow_by_whole_tokens(seen, size, monkeypatch):
    budget = Budget(4, 0.1)
    assert budget.size(seen) == int(budget.size(torch.tensor([[seen]]))) == size
    policy = H2O(budget=budget, recent=3, num_sink_tokens=6, interval=1)
    for least in (8, LEAST_OF_SHARE):
        monkeypatch.setattr(base, "LEAST_OF_SHARE", least)
        assert policy.size(budget, seen) == int(policy.size(budget, torch.tensor([seen]))) == max(size, least, 10)


@pytest.mark.parametrize(("budget", "interval"), [(64, 1), (128, 1), (256, 2), (1024, 8), (4096, 32), (8192, 64), (10**5, 64)])
def test_intervals_by_themselves(budget, interval):
    assert H2O(budget=budget).interval_of(Budget(budget)) == interval
    assert H2O(budget=budget, interval=3).interval_of(Budget(budget)) == 3
    assert H2O(budget=budget, num_sink_tokens=0, recent=budget).interval_of(Budget(budget)) == 1  # as many as are free
    assert H2O().interval_of(Budget(budget, 0.1)) == max(interval, 8)  # a share has no tokens to divide


def test_recent_tokens_of_the_smallest_share_stay_exact(monkeypatch):
    for least, exact in ((8, 1), (LEAST_OF_SHARE, 32), (1024, 64)):
        monkeypatch.setattr(base, "LEAST_OF_SHARE", least)
        cache = CompressedCache(model("llama").config, format="int8", policy=SnapKV(budget=0.5))
        assert {layer.residual_length for layer in cache.layers} == {exact}


def test_random_draws_are_uniform_and_fixed():
    """The same for a position wherever it lies; another in each head and for each seed."""
    positions = torch.arange(20_000, dtype=torch.int32).expand(1, 2, -1)
    draw = Random(seed=3).priority(tokens(positions=positions))
    assert torch.equal(draw.flip(-1), Random(seed=3).priority(tokens(positions=positions.flip(-1))))
    assert torch.equal(draw[..., 5:], Random(seed=3).priority(tokens(positions=positions[..., 5:])))
    unit = draw / 2**24
    assert (unit >= 0).all() and (unit < 1).all() and (unit.mean(-1) - 0.5).abs().max() < 0.01
    other = torch.stack([draw[0, 0], draw[0, 1], Random(seed=4).priority(tokens(positions=positions))[0, 0]])
    assert (torch.corrcoef(torch.cat([other, other[:1].roll(1, -1)])) - torch.eye(4)).abs().max() < 0.03
