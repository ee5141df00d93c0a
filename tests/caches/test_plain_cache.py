"""Any sequence of operations on compressed caches, beside a plain cache that loses nothing (`tests/plain_cache.py`)."""

import copy
import importlib.util
import pkgutil

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from qkvcache import CompressedCache
from qkvcache.formats import REGISTRY
from tests.plain_cache import PlainLayer
from tests.seeds import SEED

HEADS, DIM, LAYERS, LIMIT, ROWS = 2, 32, 2, 200, 4
FORMATS = ("identity", "int8", "turboquant_3bit_nc", "nvfp4")
PREFIXES = importlib.util.find_spec("qkvcache.prefix") is not None  # a room


class Caches(RuleBasedStateMachine):
    """Caches of one format, each beside a plain layer for each of its layers; forks are further caches."""

    max_length: int | None = None

    @initialize(
        format=st.sampled_from(FORMATS),
        zones=st.tuples(st.integers(0, 5), st.integers(0, 40)),
        rows=st.integers(1, 3),
        seed=st.integers(0, 99),
    )
    def start(self, format, zones, rows, seed):
        self.format, (self.sinks, self.residual), self.rows = REGISTRY[format], zones, [rows]
        self.generator = torch.Generator().manual_seed(SEED + seed)
        self.caches, self.plain = [self.empty()], [self.plain_layers()]

    def empty(self) -> CompressedCache:
        options = {"num_sink_tokens": self.sinks, "residual_length": self.residual, "max_length": self.max_length}
        return CompressedCache(format=self.format, **options)

    def plain_layers(self) -> list[PlainLayer]:
        return [PlainLayer(self.format, self.sinks, self.residual) for _ in range(LAYERS)]

    def chosen(self, which: int) -> int:
        return which % len(self.caches)

    @rule(which=st.integers(0, 9), tokens=st.one_of(st.just(1), st.integers(2, 50)))
    def append(self, which, tokens):
        at = self.chosen(which)
        if self.plain[at][0].seen + tokens > LIMIT:
            return
        for i, plain in enumerate(self.plain[at]):
            new = tuple(torch.randn(self.rows[at], HEADS, tokens, DIM, generator=self.generator) for _ in range(2))
            read = plain.update(new)
            found = self.caches[at].update(*new, i)
            for x, wanted in zip(found, read, strict=True):
                assert x.shape == wanted.shape
                torch.testing.assert_close(x if isinstance(x, torch.Tensor) else x.dense(), wanted, rtol=1e-5, atol=1e-5)

    @rule(which=st.integers(0, 9), tokens=st.integers(0, 60))
    def crop(self, which, tokens):
        at = self.chosen(which)
        if tokens < self.plain[at][0].seen:
            self.caches[at].crop(-tokens)
            for plain in self.plain[at]:
                plain.crop(tokens)

    @precondition(lambda self: len(self.caches) < 3)
    @rule(which=st.integers(0, 9), copied=st.booleans())
    def fork(self, which, copied):
        at = self.chosen(which)
        self.caches.append(copy.deepcopy(self.caches[at]) if copied else self.caches[at].fork(1)[0])
        self.plain.append([plain.fork() for plain in self.plain[at]])
        self.rows.append(self.rows[at])

    @precondition(lambda self: len(self.caches) < 3)
    @rule(which=st.integers(0, 9), tokens=st.tuples(*[st.integers(42, 60)] * 3), parent_first=st.booleans())
    def append_to_both_branches(self, which, tokens, parent_first):
        """Both write tokens of their own, which leave the residual, into the last page, which they share."""
        at = self.chosen(which)
        self.append(at, tokens[2])
        self.fork(at, copied=False)
        branches = at, len(self.caches) - 1
        for branch, count in zip(branches if parent_first else branches[::-1], tokens[:2], strict=True):
            self.append(branch, count)

    @rule(which=st.integers(0, 9), order=st.lists(st.integers(0, 9), min_size=ROWS, max_size=ROWS))
    def reorder(self, which, order):
        at = self.chosen(which)
        if self.plain[at][0].seen:
            self.select(at, [n % self.rows[at] for n in order[: self.rows[at]]], "reorder_cache")

    @rule(which=st.integers(0, 9), chosen=st.lists(st.integers(0, 9), min_size=1, max_size=ROWS))
    def batch_select(self, which, chosen):
        at = self.chosen(which)
        if self.plain[at][0].seen:
            self.select(at, [n % self.rows[at] for n in chosen], "batch_select_indices")

    @rule(which=st.integers(0, 9))
    def repeat(self, which):
        at = self.chosen(which)
        if self.plain[at][0].seen and 2 * self.rows[at] <= ROWS:
            self.caches[at].batch_repeat_interleave(2)
            self.select(at, [n // 2 for n in range(2 * self.rows[at])])

    def select(self, at: int, rows: list[int], method: str | None = None) -> None:
        index = torch.tensor(rows)
        if method is not None:
            getattr(self.caches[at], method)(index)
        for plain in self.plain[at]:
            plain.select(index)
        self.rows[at] = len(rows)

    @rule(which=st.integers(0, 9), row=st.integers(0, 9), share=st.floats(0.1, 1))
    def store_and_fetch(self, which, row, share):
        """A row becomes a cache of its own through a snapshot, cut to its first tokens, as a prefix store does."""
        at = self.chosen(which)
        seen, row = self.plain[at][0].seen, row % self.rows[at]
        if self.max_length is not None or not seen or not PREFIXES:
            return
        snapshots = pkgutil.resolve_name("qkvcache.prefix.snapshot")
        tokens = max(int(share * seen), 1)
        fetched, plain = self.empty(), [layer.fork() for layer in self.plain[at]]
        like = torch.zeros(1, HEADS, 1, DIM)
        for i, layer in enumerate(self.caches[at].layers):
            stored = snapshots.snapshot(layer, tokens, row)
            fetched.update(like, like, i)  # makes the layer
            fetched.layers[i].reset()
            snapshots.restore(fetched.layers[i], stored, "cpu")
        for layer in plain:
            layer.select(torch.tensor([row]))
            layer.crop(seen - tokens)
        self.caches[at], self.plain[at], self.rows[at] = fetched, plain, 1

    @rule(which=st.integers(0, 9))
    def reset(self, which):
        at = self.chosen(which)
        self.caches[at].reset()
        self.plain[at] = self.plain_layers()

    @invariant()
    def every_cache_holds_what_its_plain_one_holds(self):
        for cache, layers in zip(getattr(self, "caches", ()), getattr(self, "plain", ()), strict=True):
            for i, plain in enumerate(layers):
                assert cache.get_seq_length(i) == plain.seen
                if plain.seen:
                    for x, wanted in zip(cache.layers[i].dense(), plain.dense(), strict=True):
                        torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_length", [None, LIMIT], ids=["growing", "preallocated"])
def test_caches_hold_what_a_plain_cache_holds(max_length):
    kind = type("Caches", (Caches,), {"max_length": max_length})
    run_state_machine_as_test(kind, settings=settings(max_examples=15, stateful_step_count=12, deadline=None))
