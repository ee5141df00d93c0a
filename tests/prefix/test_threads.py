"""One store in several threads."""

import random
import sys
import threading
from contextlib import suppress

import pytest
import torch

from qkvcache import CompressedCache, PrefixStore, attach
from qkvcache.releases import passing
from tests.prefix.made import ZONES, compressed, fill, held, model, random_ids, same
from tests.seeds import SEED

THREADS = 6


@pytest.fixture
def switching():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_share_a_store(switching, tmp_path):
    """They get what they would get alone, while others store, evict, pin and write."""
    prompts = [random_ids(120, seed) for seed in range(4)]
    wanted = [held(fill(CompressedCache(model().config, format="identity"), ids)) for ids in prompts]
    kept = PrefixStore(model(), max_bytes=2**17, format="identity", directory=tmp_path, max_disk_bytes=2**19)
    errors, gate = [], threading.Barrier(THREADS)

    def work(me: int) -> None:
        chance = random.Random(SEED + me)
        try:
            gate.wait()
            for _ in range(12):
                number, tokens = chance.randrange(4), chance.randrange(40, 120)
                ids = prompts[number][:tokens]
                with kept.reuse(ids) as past:
                    assert same(fill(past, ids), wanted[number], tokens)
                assert kept.fetch(ids).kind in ("exact", "shorter", "longer", "common", "miss")
                with suppress(ValueError):  # nothing of them is there any more
                    chance.choice([kept.pin, kept.unpin])(ids)
                chance.choice([lambda: kept.trim(2**15), kept.save, kept.load, lambda: kept.stats])()
                kept.unpin(ids)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    counts = kept.stats
    assert sum(counts.hits.values()) + counts.misses == 2 * 12 * THREADS and not counts.skipped


def test_a_cache_of_other_tokens_is_not_stored():
    """Where a fetch, `generate` with an attached cache or the store itself has told which tokens the cache has seen."""
    network, ids, other = model(), random_ids(60), random_ids(80, 1)
    kept = PrefixStore(network, max_bytes=2**26, format="int8", **ZONES)
    assert kept.store(ids, compressed(ids))
    found = kept.fetch(torch.cat([ids, other])).cache
    with attach(network, lambda config: CompressedCache(config, format="int8", **ZONES)):
        with pytest.raises(ValueError, match="token 0 of the prompt differs from the 60 tokens"):
            network.generate(other[None], **passing(found), max_new_tokens=2)
        text = network.generate(torch.cat([ids, other])[None], **passing(found), max_new_tokens=4, eos_token_id=None, do_sample=False)
    with pytest.raises(ValueError, match="token 0 of the prompt differs"):
        kept.store(other, found)
    assert kept.store(text, found)
