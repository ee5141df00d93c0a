"""Hundreds of random stores, fetches, trims and restarts against a dictionary."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from transformers import DynamicCache

from qkvcache import CompressedCache, PrefixStore
from qkvcache.prefix.match import decode
from tests.matrix import FORMATS
from tests.prefix.made import fill, held, model, same

ZONES = {"num_sink_tokens": 2, "residual_length": 6}
LEAST, QUANTIZED = 3, 12
IDS = st.lists(st.sampled_from([(3,), (4, 5, 6, 7, 8), tuple(range(10, 40))]), min_size=1, max_size=4).map(lambda parts: sum(parts, ()))
"""Prompts of few words of several lengths, so that they begin alike."""


def shared(a: tuple, b: tuple) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Oracle(RuleBasedStateMachine):
    """`stored` is the dictionary: tokens to what a cache of them holds. On disk, nothing is ever forgotten here; in memory, what was used
    longest ago is, in the order of `memory`."""

    @initialize(format=st.sampled_from(["int8", "turboquant_3bit_nc", "fp8_tensor"]), on_disk=st.booleans(), dense=st.booleans())
    def begin(self, format, on_disk, dense):
        self.format, self.dense = FORMATS[format], dense
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
        if covering:  # of several, which one counts as used is the store's choice
            assert self.store.stats.covered == before.covered + 1
            chosen = tokens_of(self.store._memory.entries[-1])
            assert chosen == ids if ids in self.memory else chosen in covering
            self.used(chosen)
            return
        on_disk = self.folder is not None and any(other[: len(ids)] == ids for other in self.stored)
        assert self.store.stats.covered == before.covered + on_disk
        if not on_disk:  # what is there stays as it is
            self.stored[ids] = self.content(ids, cache, compressed)
        for other in [other for other in self.memory if other == ids[: len(other)]]:
            del self.memory[other]
        self.memory[ids] = self.store._memory.entries[-1].nbytes
        self.shrink(self.most)
        assert self.store.stats.nbytes == sum(self.memory.values()) <= self.most

    def content(self, ids, cache, compressed):
        """The decoded tokens of `ids`; None where tokens are stored exact, since a cache then quantizes those that it fetches."""
        if len(ids) < QUANTIZED and not compressed:
            return held(cache) if self.dense else None
        return held(cache) if compressed else self.made(ids)

    def made(self, ids):
        return held(fill(CompressedCache(model().config, format=self.format, **ZONES), torch.tensor(ids)))

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
        contents = [content or self.made(ids[:most]) for other, content in self.stored.items() if other[:most] == ids[:most]]
        assert any(same(found.cache, content, most) for content in contents)
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


WORD, LONG = (4, 5, 6, 7, 8), tuple(range(10, 40))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_one_of_several_entries_that_hold_the_tokens_is_used(on_disk, order):
    """Found at random: the dictionary took it to be the one used longest ago."""
    oracle = Oracle()
    oracle.begin(format="int8", on_disk=on_disk, dense=False)
    for ids in [WORD + WORD + LONG, WORD + LONG][::order]:
        oracle.put(answer=0, compressed=False, ids=ids)
    oracle.put(answer=9, compressed=True, ids=WORD)
    oracle.trim(share=0.7)
    oracle.teardown()


@pytest.mark.parametrize("again", [WORD + LONG, WORD + LONG[:20]], ids=["the same tokens", "fewer"])
@pytest.mark.parametrize("release", [False, True], ids=["store", "reuse"])
def test_what_is_on_disk_stays_and_is_what_memory_holds(tmp_path, again, release):
    """Found at random: stored again, from a cache that rounds other tokens, memory held the new contents and the file the old ones."""
    config, ids, again = model().config, torch.tensor(WORD + LONG), torch.tensor(again)
    kept = PrefixStore(model(), max_bytes=2**20, directory=tmp_path, min_match_tokens=LEAST, min_quantize_tokens=QUANTIZED, **ZONES)
    first = fill(CompressedCache(config, format="int8", **ZONES), torch.cat([ids, ids[:1]]))  # one token more was quantized
    assert kept.store(ids, first)
    (path,) = tmp_path.iterdir()
    kept.trim(0)
    os.utime(path, (0, 0))
    if release:
        with kept.reuse(again) as past:
            fill(past, again)
        assert past.get_seq_length() == 0
    else:
        assert kept.store(again, fill(DynamicCache(config=config), again))
    assert kept.stats.stored == kept.stats.covered == kept.stats.entries == kept.stats.files == 1
    assert path.stat().st_mtime > 0  # it was used
    expected = held(first)
    for source in ("memory", "disk"):
        found = kept.fetch(again)
        assert found.source == source and same(found.cache, expected, len(again) - 1)
        kept.trim(0)


def tokens_of(entry) -> tuple:
    return tuple(decode(entry.key).tolist())


TestOracle = Oracle.TestCase
TestOracle.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)  # not shrunk, which takes minutes
