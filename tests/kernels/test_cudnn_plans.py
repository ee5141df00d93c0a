"""Shapes pay for a plan by what other kernels have computed of them, in each thread for itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from qkvcache.kernels import cudnn_plans
from qkvcache.kernels.cudnn_plans import PLAN_FLOPS, Plans


def test_a_shape_pays_when_other_kernels_have_cost_as_much():
    plans = Plans()
    calls = 0
    while not plans.pay("a"):
        plans.count("a", PLAN_FLOPS / 3)
        calls += 1
    assert calls == 3 and plans.pay("a") and not plans.pay("b")


def test_few_large_calls_pay_and_a_chat_does_not():
    """Heads of 128: 8 x 512 new tokens of 32 layers over 16,384 tokens pay in eight turns, 1 x 1,024 not in ten."""
    turns = {(8, 512): 0, (1, 1024): 0}
    for rows, new in turns:
        plans, flops = Plans(), 4 * rows * 32 * new * 16384 * 128
        while not plans.pay("past") and turns[rows, new] < 10:
            turns[rows, new] += 1
            for _ in range(32):
                plans.count("past", flops)
    assert turns == {(8, 512): 8, (1, 1024): 10}


def test_shapes_that_came_last_are_remembered(monkeypatch):
    monkeypatch.setattr(cudnn_plans, "SHAPES", 3)
    plans = Plans()
    for shape in "ab":
        plans.count(shape, PLAN_FLOPS)
    assert plans.pay("a")
    plans.count("c", 1)
    plans.count("d", 1)
    assert plans.pay("a") and not plans.pay("b")


def test_threads_have_plans_of_their_own():
    plans = Plans()
    plans.count("a", PLAN_FLOPS)
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(plans.pay, "a").result()
    assert plans.pay("a")
