"""PrefixStore: what goes in comes out, cut to the match, and nothing else does."""

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from qkvcache import CompressedCache, PrefixStore, TurboQuantCache, policies
from qkvcache.formats import resolve
from qkvcache.prefix import Match, match, memory
from qkvcache.prefix.snapshot import Snapshot
from qkvcache.releases import passing
from tests.matrix import COVER, FORMATS, by_layer
from tests.prefix.made import WORDS, ZONES, compressed, fill, held, keys_and_values, model, random_ids, same


def store(format="int8", **options) -> PrefixStore:
    return PrefixStore(model(), max_bytes=2**26, format=format, **{"min_match_tokens": 4, "min_quantize_tokens": 16} | ZONES | options)


def dense(ids) -> DynamicCache:
    return fill(DynamicCache(config=model().config), ids)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("format", [*COVER, "by_layer"])
def test_codes_go_in_and_come_out_bit_for_bit(format, on_disk, tmp_path):
    ids, format = random_ids(150), by_layer(model().config) if format == "by_layer" else FORMATS[format]
    cache = compressed(ids, format)
    expected = held(cache)
    first = store(format, directory=tmp_path) if on_disk else store(format)
    assert first.store(ids, cache)
    again = store(format, directory=tmp_path) if on_disk else first
    for tokens in (1, 2, 3, 60, 66, 130, 141, 143, 149, 150):  # in the first zone, the body and the recent zone, and on their borders
        found = again.fetch(torch.cat([ids[:tokens], torch.tensor([2])]))
        assert found.length == (tokens if tokens >= 4 else 0)
        if found.length:
            assert found.source == ("disk" if on_disk else "memory")
            assert type(found.cache) is CompressedCache and found.cache.format == resolve(format)
            assert same(found.cache, expected, tokens)
            for layer, source in zip(found.cache.layers, cache.layers, strict=True):
                assert layer.storage.tokens.length == min(max(tokens - 2, 0), source.storage.tokens.length)  # stored as codes, still codes


@pytest.mark.parametrize("format", COVER)
def test_a_dynamic_cache_comes_out_as_its_codec_makes_it(format):
    ids, format = random_ids(100), FORMATS[format]
    expected = held(compressed(ids, format))
    for options in ({}, {"dense": True}):
        kept = store(format, **options)
        assert kept.store(ids, dense(ids))
        found = kept.fetch(torch.cat([ids, ids[:1]]))
        assert found.length == 100 and type(found.cache) is (DynamicCache if options else CompressedCache)
        assert same(found.cache, expected, 100)


@pytest.mark.parametrize(
    ("stored", "asked", "length", "kind"),
    [
        (50, 50, 49, "exact"),
        (50, 51, 50, "shorter"),
        (50, 80, 50, "shorter"),
        (50, 30, 29, "longer"),
        (50, -40, 40, "common"),
        (50, -3, 0, "miss"),
        (50, 4, 0, "miss"),
        (50, 5, 4, "longer"),
    ],
)
def test_matches(stored, asked, length, kind):
    """`asked` below 0: so many tokens in common, then others."""
    ids = random_ids(100)
    kept = store()
    kept.store(ids[:stored], compressed(ids[:stored]))
    prompt = ids[:asked] if asked > 0 else torch.cat([ids[:-asked], torch.full((20,), 2)])
    found = kept.fetch(prompt)
    assert (found.length, found.kind) == (length, kind)
    assert found == Match() if kind == "miss" else same(found.cache, held(compressed(ids[:stored])), length)
    stats = kept.stats
    assert (stats.misses, stats.tokens_reused, sum(stats.hits.values())) == (int(kind == "miss"), length, int(kind != "miss"))


@pytest.mark.parametrize("format", ["int8", "turboquant_3bit_nc", "fp8_tensor"])
@pytest.mark.parametrize("tokens", [4, 30, 63, 64, 65, 117, 119, 120])
def test_what_was_fetched_goes_on_working_and_shares_nothing(format, tokens):
    ids, format = random_ids(120), FORMATS[format]
    kept = store(format)
    kept.store(ids, compressed(ids, format))
    prompt = torch.cat([ids[:tokens], torch.tensor([2])])
    cache = kept.fetch(prompt).cache
    before = [x.clone() for x in held(cache)]
    other = torch.cat([ids[:tokens], random_ids(70, 5)])
    fill(cache, other, step=3)
    grown = held(cache)
    assert cache.get_seq_length() == len(other) and all(x.shape[2] == len(other) for x in grown)
    first = min(2, tokens)
    assert all(torch.equal(a[:, :, :first], b[:, :, :first]) for a, b in zip(grown, before, strict=True))
    exact = keys_and_values(other).flatten(0, 1)
    for a, b in zip(grown, exact, strict=True):
        assert torch.equal(a[0, :, -8:], b[:, -8:])  # the recent zone
        assert (a[0] - b).square().mean().sqrt() / b.square().mean().sqrt() < 0.4
    twin = copy.deepcopy(cache)
    cache.crop(-(len(other) - tokens + 2))
    fill(cache, other[: tokens + 20], step=1)  # into slots that were in use
    cache.batch_repeat_interleave(3)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor([1]))
    assert all(x.shape[2] == tokens + 20 for x in held(cache))
    assert all(torch.equal(a, b) for a, b in zip(held(twin), grown, strict=True))
    assert same(kept.fetch(prompt).cache, before, tokens)


def test_what_was_stored_shares_nothing_with_the_cache():
    ids = random_ids(60)
    cache = compressed(ids)
    expected = [x.clone() for x in held(cache)]
    kept = store()
    kept.store(ids, cache)
    cache.crop(-30)
    fill(cache, torch.cat([ids[:30], random_ids(40, 3)]), step=1)
    assert same(kept.fetch(torch.cat([ids, ids])).cache, expected, 60)


def test_short_dynamic_caches_stay_exact():
    ids = random_ids(60)
    for options, cache_type in (({}, CompressedCache), ({"dense": True}, DynamicCache)):
        kept = store("turboquant_3bit_nc", min_quantize_tokens=61, **options)
        kept.store(ids, dense(ids))
        found = kept.fetch(torch.cat([ids, ids]))
        assert type(found.cache) is cache_type
        assert same(found.cache, held(compressed(ids, "turboquant_3bit_nc")) if cache_type is CompressedCache else held(dense(ids)), 60)


def test_the_class_of_a_cache_is_kept():
    ids = random_ids(40)
    kept = store("int8")
    cache = fill(TurboQuantCache(model().config, preset="k8v4", skip_layers=[0], residual_length=5), ids)
    kept.store(ids, cache)
    found = kept.fetch(torch.cat([ids, ids])).cache
    assert type(found) is TurboQuantCache and found.format == cache.format
    assert [type(layer) for layer in found.layers] == [type(layer) for layer in cache.layers]
    assert same(found, held(cache), 40)


@pytest.mark.parametrize("made", [dense, compressed])
def test_more_or_fewer_ids_than_the_cache_holds(made):
    ids = random_ids(60)
    kept = store()
    assert kept.store(ids[:40], made(ids))  # the answer is cut off
    assert kept.fetch(ids).length == 40
    assert kept.store(torch.cat([ids, ids]), made(ids))  # as generate leaves it: the last token was never computed
    assert kept.fetch(torch.cat([ids, ids])).length == 60


# Rows.


def test_rows_of_a_batch_are_entries_of_their_own():
    ids = torch.stack([random_ids(40), random_ids(40, 1), random_ids(40, 2)])
    cache = compressed(ids[0])
    cache.batch_repeat_interleave(3)
    made = torch.stack([keys_and_values(row) for row in ids], 2)
    cache.reset()
    for i, (keys, values) in enumerate(made):
        cache.update(keys, values, i)
    kept = store()
    assert kept.store(ids, cache) and len(kept) == 3
    for row in ids:
        assert same(kept.fetch(torch.cat([row, row])).cache, held(compressed(row)), 40)


def test_equal_rows_fork_from_one_entry_and_come_back_as_one():
    ids = random_ids(40)
    kept = store()
    kept.store(ids, compressed(ids))
    found = kept.fetch(ids.expand(4, -1))
    assert found.length == 39 and all(x.shape[0] == 4 for x in held(found.cache))
    assert all(torch.equal(x, x[:1].expand_as(x)) for x in held(found.cache))
    kept = store()
    assert kept.store(ids[:39], found.cache) and kept.fetch(ids).length == 39


def test_a_padded_row_is_refused():
    ids = torch.stack([random_ids(40), torch.cat([torch.zeros(5, dtype=torch.int64), random_ids(35)])])
    cache = compressed(ids[0])
    cache.batch_repeat_interleave(2)
    kept = store()
    assert not kept.store(ids, cache)
    assert len(kept) == 1 and [reason for reason in kept.stats.refused if "padded" in reason]


@pytest.mark.parametrize("options", [{}, {"policy": policies.H2O(budget=16)}], ids=["codes", "evicting"])
def test_a_prompt_padded_to_the_left_is_left_alone(options):
    """Its mask is not among the ids, so that nothing may be computed, kept or found for it."""
    ids = torch.cat([torch.zeros(5, dtype=torch.int64), random_ids(35)])
    kept = store(**options)
    for _ in range(2):
        with kept.reuse(ids) as past:
            assert past.get_seq_length() == 0
            if not options:
                fill(past, ids)
    assert len(kept) == 0 and kept.stats.misses == 2 and (options or [reason for reason in kept.stats.refused if "padded" in reason])


def test_padding_to_the_right_is_cut_off():
    ids = random_ids(40)
    padded = torch.cat([ids, torch.zeros(6, dtype=torch.int64)])
    kept = store()
    assert kept.store(padded, compressed(padded)) and kept.fetch(padded).length == 40


# Bounds.


def test_memory_is_bounded_and_what_was_used_longest_ago_goes():
    prompts = [random_ids(100, seed) for seed in range(4)]
    one = store()
    one.store(prompts[0], compressed(prompts[0]))
    size = one.stats.nbytes
    tensors = [x for layer in one._memory.entries[0].layers for x in layer.tensors.values()]
    assert size == sum({x.data_ptr(): x.nbytes() for x in map(torch.Tensor.untyped_storage, tensors)}.values()) + 32 + 400
    assert size == sum(-(-x.nbytes // 8) * 8 for x in tensors) + 32 + 400
    kept = PrefixStore(model(), max_bytes=3 * size, **ZONES)
    for prompt in prompts[:3]:
        kept.store(prompt, compressed(prompt))
    kept.fetch(prompts[0])
    kept.store(prompts[3], compressed(prompts[3]))
    assert [kept.fetch(prompt).kind for prompt in prompts] == ["exact", "miss", "exact", "exact"]
    assert kept.stats.nbytes <= 3 * size and kept.stats.evicted == 1
    long = random_ids(400, 9)
    assert not kept.store(long, compressed(long))
    assert kept.stats.rejected == 1 and len(kept) == 3
    kept.trim(size)
    assert len(kept) == 1 and kept.stats.nbytes <= size
    kept.trim(0)
    assert len(kept) == 0 and kept.stats.nbytes == 0


def test_entries_that_nobody_uses_for_their_time_to_live_go(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    prompts = [random_ids(100, seed) for seed in range(3)]
    kept = store(time_to_live=60)
    for prompt in prompts[:2]:
        kept.store(prompt, compressed(prompt))
    now[0] += 50
    assert kept.fetch(prompts[0]).kind == "exact"
    now[0] += 50
    assert [kept.fetch(prompt).kind for prompt in prompts[:2]] == ["exact", "miss"] and len(kept) == 1
    now[0] += 61
    kept.store(prompts[2], compressed(prompts[2]))
    assert len(kept) == 1 and kept.stats.evicted == 2
    assert kept.stats.nbytes == kept._memory.entries[0].nbytes


def test_a_pinned_entry_outlives_room_age_and_longer_entries(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    system, chat = random_ids(60), torch.cat([random_ids(60), random_ids(200, 1)])
    kept = store(time_to_live=60)
    assert kept.store(chat, compressed(chat))
    assert kept.pin(system) == 60  # cut from the longer one
    assert sorted(match.length(one.key) for one in kept._memory.entries) == [60, 260]
    now[0] += 61
    assert kept.fetch(chat).length == 60
    longer = torch.cat([system, random_ids(20, 2)])
    kept.store(longer, compressed(longer))
    kept.trim(0)
    found = kept.fetch(longer)
    assert len(kept) == 1 and found.length == 60 and kept.stats.nbytes == kept._memory.entries[0].nbytes
    assert same(found.cache, held(compressed(chat)), 60)
    kept.unpin(system)
    assert kept.fetch(longer).length == 60
    now[0] += 61
    assert kept.fetch(longer).kind == "miss" and kept.stats.nbytes == 0


def test_what_is_not_stored_cannot_be_pinned():
    kept = store()
    prompt = random_ids(60)
    kept.store(prompt, compressed(prompt))
    with pytest.raises(ValueError, match="these 61 tokens"):
        kept.pin(torch.cat([prompt, prompt[:1]]))
    with pytest.raises(ValueError, match="2 rows"):
        kept.pin(prompt.expand(2, -1))
    kept.unpin(random_ids(60, 1))
    kept.trim(0)
    assert len(kept) == 0


@pytest.mark.parametrize(("format", "ratio"), [("int8", 1.9), ("turboquant_4bit_nc", 3.5), ("int4", 3.5), ("nvfp4", 3.5)])
def test_memory_against_the_models_dtype(format, ratio):
    tokens, layers = 16_384, 4  # of fewer layers, the token ids would be a larger part than they are
    kept = PrefixStore(model(head_dim=128, num_hidden_layers=layers), max_bytes=2**30, format=format)
    cache = DynamicCache(config=kept.model.config)
    for i in range(layers):
        cache.update(*torch.randn(2, 1, 2, tokens, 128).bfloat16(), i)
    given = sum(x.untyped_storage().nbytes() for x in held(cache))
    assert kept.store(random_ids(tokens), cache)
    assert given / kept.stats.nbytes > ratio
    fetched = kept.fetch(random_ids(tokens)).cache
    assert given / fetched.nbytes > ratio


def test_a_fetch_makes_and_copies_each_tensor_once():
    """On a GPU each operator costs the host more time than the copies of a short prompt take."""
    ids = random_ids(300)
    kept = store("int4")
    kept.store(ids, compressed(ids, "int4"))
    operators: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            operators[operator.overloadpacket.__name__] += 1
            return operator(*args, **kwargs or {})

    for tokens in (301, 150):
        operators.clear()
        with Counting():
            cache = kept.fetch(torch.cat([ids, ids])[:tokens]).cache
        parts = sum(x.numel() > 0 for layer in kept._memory.entries[0].cut(tokens - 1) for x in layer.tensors.values())
        more = operators["copy_"] + operators["index_put_"] - parts
        assert 2 * len(cache.layers) <= more <= 6 * len(cache.layers)  # the table and counts; rings whose ends both hold tokens
        tensors = [x for layer in cache.layers for _, x in layer.tensors()]
        made = sum(operators[name] for name in ("zeros", "new_zeros", "full", "constant_pad_nd"))
        assert made == len({x.untyped_storage()._cdata for x in tensors})


def test_a_fetch_copies_the_match_and_not_the_entry(monkeypatch):
    ids = random_ids(4096)
    kept = store("int4")
    kept.store(ids, compressed(ids, "int4"))
    copied, to = [], Snapshot.to
    monkeypatch.setattr(
        Snapshot, "to", lambda self, *args, **kw: copied.append(sum(x.nbytes for x in self.tensors.values())) or to(self, *args, **kw)
    )
    sums = []
    for prompt in (ids, ids[:2049]):
        copied.clear()
        kept.fetch(prompt)
        sums.append(sum(copied))
    assert sums[1] < 0.6 * sums[0]


# What is refused.


@pytest.mark.parametrize(
    ("ids", "error", "says"),
    [
        ("hello", TypeError, "list of integers"),
        (None, TypeError, "NoneType"),
        ([], ValueError, "at least one"),
        (torch.rand(5), TypeError, "integers"),
        ([3, -1], ValueError, "-1"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), ValueError, r"\[1, 2, 3\]"),
    ],
)
def test_bad_ids(ids, error, says):
    kept = store()
    for call in (kept.fetch, lambda ids: kept.store(ids, DynamicCache()), lambda ids: kept.reuse(ids).__enter__()):
        with pytest.raises(error, match=says):
            call(ids)
    assert kept.stats == store().stats


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_bytes": -1}, ValueError, "max_bytes"),
        ({"max_bytes": "1 GB"}, (TypeError, ValueError), "max_bytes"),
        ({"min_match_tokens": -2}, ValueError, "min_match_tokens"),
        ({"format": "int9"}, ValueError, "int9"),
        ({"format": 8}, TypeError, "8"),
        ({"residual_length": -1}, ValueError, "residual_length"),
        ({"directory": "/dev/null/prefixes"}, ValueError, "/dev/null"),
        ({"directory": 3}, TypeError, "directory"),
        ({"max_disk_bytes": 1e9}, TypeError, "max_disk_bytes must be a number of bytes"),
        ({"time_to_live": "1h"}, TypeError, "time_to_live"),
        ({"time_to_live": 0}, ValueError, "time_to_live=0"),
        ({"dense": "no"}, TypeError, "dense"),
        ({"identity": 3}, TypeError, "identity"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer"),
        ({"max_length": 600}, ValueError, "max_length=600"),
        ({"dense": True, "policy": policies.H2O(budget=16)}, ValueError, "dense=True with a policy"),
    ],
)
def test_bad_options(options, error, says):
    with pytest.raises(error, match=says):
        PrefixStore(model(), **{"max_bytes": 2**20} | options)


def test_bad_arguments():
    kept = store()
    with pytest.raises(TypeError, match="PreTrainedModel|transformers model"):
        PrefixStore("llama", max_bytes=1)
    with pytest.raises(TypeError, match="EncoderDecoderCache"):
        kept.store(random_ids(20), EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(TypeError, match="list"):
        kept.store(random_ids(20), [1])
    with pytest.raises(ValueError, match="2 rows that differ"):
        kept.fetch(torch.stack([random_ids(20), random_ids(20, 1)]))
    with pytest.raises(ValueError, match="2 rows of ids for a cache of 1 rows"):
        kept.store(random_ids(20).expand(2, -1), dense(random_ids(20)))
    for call in (kept.save, kept.load, lambda: kept.trim(0, 0)):
        with pytest.raises(ValueError, match="directory"):
            call()


def test_caches_that_cannot_be_stored_are_refused_by_name():
    ids = random_ids(40)
    static = StaticCache(config=model().config, max_cache_len=64)
    kept = store()
    with pytest.warns(UserWarning, match="does not store this cache: a StaticLayer where") as told:
        assert not kept.store(ids, fill(static, ids)) and not kept.store(ids, static)
    assert len(told) == 1
    assert not kept.store(ids[:3], dense(ids))
    assert not kept.store(ids, fill(DynamicCache(config=model(num_hidden_layers=3).config), ids))
    assert len(kept.stats.refused) == 3 and any("StaticLayer" in reason for reason in kept.stats.refused)
    assert len(kept) == 0


def test_media_in_the_prompt_end_it():
    ids = random_ids(40)
    ids[20] = 98
    other = model(seed=3)
    other.config.image_token_id = 98
    kept = PrefixStore(other, max_bytes=2**26, **ZONES)
    assert not kept.store(ids, compressed(ids)) and any("images" in reason for reason in kept.stats.refused)
    assert kept.store(ids[:20], compressed(ids))
    assert kept.fetch(ids).length == 20
    assert WORDS > 98


@pytest.mark.parametrize("policy", [None, "sink_window"])
def test_reuse_stores_and_computes_what_comes_before_media(policy):
    ids = random_ids(40)
    ids[20] = 98
    other = model(seed=3)
    other.config.image_token_id = 98
    kept = PrefixStore(other, max_bytes=2**26, policy=policy)
    with kept.reuse(ids) as past:
        assert past.get_seq_length() == (20 if policy else 0)  # what evicts is computed before the block
        with torch.no_grad():
            other(ids[None, past.get_seq_length() :], **passing(past))
    assert kept.fetch(ids).length == 20 and not kept.stats.refused


def test_repr_says_what_it_holds():
    kept = store()
    ids = random_ids(40)
    kept.store(ids, compressed(ids))
    assert "entries=1" in repr(kept) and "int8" in repr(kept) and f"{kept.stats.nbytes:,}" in repr(kept)
