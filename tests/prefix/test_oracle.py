"""Thousands of random stores, fetches, trims and restarts against a dictionary."""

import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from prefix.made import fill, held, model, same
from transformers import DynamicCache

from qkvcache import CompressedCache, PrefixStore
from qkvcache.prefix.match import decode

ZONES = {"exact_first": 2, "exact_recent": 6}
LEAST, QUANTIZED = 3, 12
IDS = st.lists(st.sampled_from([(3,), (4, 5, 6, 7, 8), tuple(range(10, 40))]), min_size=1, max_size=4).map(lambda parts: sum(parts, ()))
"""Prompts of few words of several lengths, so that they begin alike."""


def shared(a: tuple, b: tuple) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Oracle(RuleBasedStateMachine):
    """`stored` is the dictionary: tokens to what a cache of them holds. On disk, nothing is ever forgotten here; in memory, what was used
    longest ago is, in the order of `memory`."""

    @initialize(format=st.sampled_from(["int8", "turboquant_3bit_nc", "fp8_tensor_frozen"]), on_disk=st.booleans(), dense=st.booleans())
    def begin(self, format, on_disk, dense):
        self.format, self.dense = format, dense
        self.folder = tempfile.TemporaryDirectory() if on_disk else None
        self.stored: dict[tuple, list] = {}
        self.memory: dict[tuple, int] = {}
        self.most = 600_000
        self.restart()

    def restart(self):
        directory = self.folder and Path(self.folder.name)
        self.store = PrefixStore(
            model(), max_bytes=self.most, format=self.format, dense=self.dense, directory=directory,
            min_match_tokens=LEAST, min_quantize_tokens=QUANTIZED, **ZONES,
        )  # fmt: skip
        self.memory.clear()
        if directory is None:
            self.stored.clear()

    def used(self, ids):
        self.memory[ids] = self.memory.pop(ids)

    def shrink(self, most):
        while sum(self.memory.values()) > most:
            del self.memory[next(iter(self.memory))]

    @rule(ids=IDS, compressed=st.booleans(), answer=st.integers(0, 9))
    def put(self, ids, compressed, answer):
        row = torch.tensor(ids)
        config = model().config
        cache = CompressedCache(config, format=self.format, **ZONES) if compressed else DynamicCache(config=config)
        fill(cache, torch.cat([row, row[:answer]]))
        before = self.store.stats
        covering = [other for other in self.memory if other[: len(ids)] == ids]
        assert self.store.store(row, cache) == (len(ids) >= LEAST)
        if len(ids) < LEAST:
            return
        if covering:
            assert self.store.stats.covered == before.covered + 1
            self.used(covering[0] if ids not in self.memory else ids)
            return
        if not compressed and len(ids) < QUANTIZED:  # exact there, and in a compressed cache as that one makes it
            content = held(cache) if self.dense else held(fill(CompressedCache(config, format=self.format, **ZONES), row))
        elif compressed:
            content = held(cache)
        else:
            content = held(fill(CompressedCache(config, format=self.format, **ZONES), row))
        self.stored[ids] = content
        for other in [other for other in self.memory if other == ids[: len(other)]]:
            del self.memory[other]
        self.memory[ids] = 0
        self.memory[ids] = self.store._memory.entries[-1].nbytes
        self.shrink(self.most)
        assert self.store.stats.nbytes == sum(self.memory.values()) <= self.most

    @rule(ids=IDS)
    def get(self, ids):
        known = self.stored if self.folder else self.memory
        most = max((min(shared(ids, other), len(ids) - 1) for other in known), default=0)
        found = self.store.fetch(list(ids))
        assert found.length == (most if most >= LEAST else 0)
        if found.cache is None:
            assert found.kind == "miss"
            return
        assert type(found.cache) is (DynamicCache if self.dense else CompressedCache)
        assert any(same(found.cache, content, most) for other, content in self.stored.items() if other[:most] == ids[:most])
        if found.source == "memory":
            self.used(tokens_of(self.store._memory.entries[-1]))
        fill(found.cache, torch.tensor(ids + ids))  # generation goes on in it, and changes nothing here

    @rule(share=st.floats(0, 1.5))
    def trim(self, share):
        most = int(share * self.store.stats.nbytes)
        self.store.trim(most)
        self.shrink(most)
        assert self.store.stats.nbytes == sum(self.memory.values()) <= most
        assert len(self.store) == len(self.memory)

    @rule(rarely=st.integers(0, 3), load=st.booleans())
    def again(self, rarely, load):
        if rarely:  # a restart is slow, and little happens between two that are close
            return
        self.restart()
        if self.folder and load:
            self.store.load()
            self.memory = {tokens_of(entry): entry.nbytes for entry in self.store._memory.entries}
            assert sum(self.memory.values()) <= self.most

    def teardown(self):
        if getattr(self, "folder", None):
            self.folder.cleanup()


def tokens_of(entry) -> tuple:
    return tuple(decode(entry.key).tolist())


TestOracle = Oracle.TestCase
TestOracle.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)
