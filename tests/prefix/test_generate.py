"""`generate` with the store gives what it gives without, on every kind of model and cache."""

import copy

import pytest
import torch
from families_models import build
from transformers import DynamicCache

from qkvcache import CompressedCache, PrefixStore, policies
from qkvcache.evict.layer import EvictingLayer
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.prefix.snapshot import _copies_to
from qkvcache.releases import passing
from tests.evict.matrix import POLICIES, SHARED
from tests.matrix import MODELS, UNSUPPORTED, covering, model, slowly
from tests.prefix.made import held
from tests.reference import assert_close
from tests.seeds import SEED
from tests.tolerance import of_model

ZONES = {"num_sink_tokens": 2, "residual_length": 4}
WINDOWS = ["gemma3", "gemma2", "mistral", "gpt_oss", "gemma3n", "gemma4"]


def prompt(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 100, (1, count), generator=torch.Generator().manual_seed(SEED + seed))


def attention(name: str) -> str:
    return "eager" if (name, "sdpa") in UNSUPPORTED else "sdpa"


def store(name="llama", **options) -> PrefixStore:
    return PrefixStore(model(name, attention(name)), max_bytes=2**26, **{"format": "identity"} | ZONES | options)


def generate(of, ids, past=None, **options):
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return of.generate(ids, attention_mask=torch.ones_like(ids), **passing(past), **greedy | options)


@pytest.mark.filterwarnings("ignore:no layer of this model has full attention", "ignore:attention code calls")
@pytest.mark.parametrize(("name", "dense"), covering(slowly(MODELS, ["llama", "gemma3", "qwen3_next"]), [False, True], strength=1))
def test_generate_gives_the_same(name, dense):
    kept = store(name, dense=dense)
    turns = prompt(40), prompt(40), torch.cat([prompt(40), prompt(7, 1)], 1), torch.cat([prompt(25), prompt(30, 2)], 1), prompt(20)
    lengths = []
    for ids in turns:
        with kept.reuse(ids) as past:
            lengths.append(past.get_seq_length())
            got = generate(kept.model, ids, past)
        assert torch.equal(got, generate(kept.model, ids))
        assert past.get_seq_length() in (0, None) and not any(x is not None and x.numel() for x in dense_tensors(past))
    cut = not any(kind in name for kind in ("gemma", "gpt_oss", "mistral", "qwen3_next"))
    assert lengths == ([0, 39, 40, 25, 19] if cut else [39, 39, 46, 54, 19])  # what cannot be cut is computed before the block
    hits = kept.stats.hits
    assert sum(hits.values()) == (4 if cut else 2), hits
    assert not kept.stats.refused


def dense_tensors(cache):
    return [x for layer in cache.layers for x in (None if isinstance(layer, CompressedLayer) else getattr(layer, "keys", None),)]


@pytest.mark.sums
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
@pytest.mark.parametrize("tokens", [20, 40, 47, 48])
def test_a_fetched_prefix_has_the_logits_of_the_stored_cache(format, tokens):
    of = model("llama")
    kept = store(format=format)
    ids = prompt(48)
    cache = CompressedCache(of.config, format=format, **ZONES)
    with torch.no_grad():
        of(ids, **passing(cache))
    kept.store(ids, cache)
    following = prompt(5, 3)
    found = kept.fetch(torch.cat([ids[:, :tokens], following], 1))
    assert found.length == tokens
    cache.crop(tokens - 48)
    for step in following.split(2, dim=1):
        with torch.no_grad():
            assert_close(of(step, **passing(found.cache)).logits, of(step, **passing(cache)).logits, of_model(of))


def test_the_answer_can_be_stored_too():
    kept = store()
    ids = prompt(30)
    with kept.reuse(ids) as past:
        answer = generate(kept.model, ids, past)
        assert kept.store(answer, past)
    turn = torch.cat([answer, prompt(5, 4)], 1)
    assert kept.fetch(turn).length == answer.shape[1] - 1
    assert kept.stats.covered == 1 and len(kept) == 1  # the prompt, on exit


@pytest.mark.parametrize("name", ["codegen", "bamba"])
def test_configs_and_positions_of_models_may_be_incomplete(name):
    """CodeGen's config has no padding token; Bamba counts positions from 0 unless it is told them."""
    of = build(name)
    kept = PrefixStore(of, max_bytes=2**24, format="identity", **ZONES)
    ids = prompt(30)
    for text in (ids, torch.cat([ids, prompt(6, 1)], 1)):
        with kept.reuse(text) as past:
            assert torch.equal(generate(of, text, past), generate(of, text))
    assert kept.stats.tokens_reused >= 29


def test_nothing_is_stored_after_an_exception():
    kept = store()
    with pytest.raises(ZeroDivisionError), kept.reuse(prompt(30)) as past:
        generate(kept.model, prompt(30), past)
        1 / 0  # noqa: B018
    assert len(kept) == 0 and past.get_seq_length() == 0


@pytest.mark.parametrize("format", ["identity", "int8"])
def test_beams_and_samples_fork_from_one_entry(format):
    kept = store(format=format, residual_length=64)
    ids = prompt(30)
    for options in ({"num_beams": 3}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}):
        with kept.reuse(ids) as past:
            past.batch_repeat_interleave(3)
            torch.manual_seed(SEED)
            got = generate(kept.model, ids, past, **options)
        torch.manual_seed(SEED)
        assert torch.equal(got, generate(kept.model, ids, **options))
    assert len(kept) == 1 and kept.stats.hits["exact"] == 2
    assert kept.fetch(ids).cache.layers[0].rows == 1


def state(cache) -> list[torch.Tensor]:
    return [x for layer in cache.layers for _, x in layer.tensors()]


@pytest.mark.parametrize(
    ("name", "on_disk"),
    covering([*slowly(POLICIES, ["sink_window", "h2o", "snapkv", "keydiff", "custom"]), "shared_budget"], [False, True], strength=1),
)
def test_evicting_caches_come_back_whole(name, on_disk, tmp_path):
    policy = SHARED["snapkv"](24) if name == "shared_budget" else POLICIES[name](24)
    options = {"format": "int8", "policy": policy, "directory": tmp_path if on_disk else None}
    kept = store(**options)
    ids, following = prompt(40), prompt(6, 5)
    cache = CompressedCache(kept.model.config, format="int8", policy=policy, **ZONES)
    with torch.no_grad():
        kept.model(ids, **passing(cache))
    assert kept.store(ids, cache)
    again = store(**options) if on_disk and name != "custom" else kept  # a function has another address after a restart
    longer = torch.cat([ids, following], 1)
    found = again.fetch(longer)
    assert found.length == 40 and found.source == ("disk" if again is not kept else "memory")
    assert all(isinstance(layer, EvictingLayer) for layer in found.cache.layers)
    twin = copy.deepcopy(found.cache)
    for a, b in zip(held(found.cache), held(cache), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found.cache.kept_positions(1), cache.kept_positions(1))
    with torch.no_grad():
        for step in following.split(1, dim=1):
            expected = kept.model(step, **passing(cache)).logits
            assert_close(kept.model(step, **passing(found.cache)).logits, expected, of_model(kept.model))
            assert_close(kept.model(step, **passing(twin)).logits, expected, of_model(kept.model))
    assert torch.equal(found.cache.kept_positions(1), cache.kept_positions(1))
    for other in (ids, ids[:, :30], torch.cat([ids[:, :39], following], 1)):
        assert again.fetch(other).kind == "miss"  # never cut
    assert not kept.store(ids[:, :39], cache)
    assert any("chose its tokens" in reason for reason in kept.stats.refused)


def test_reuse_of_a_cache_that_evicts():
    kept = store(policy=policies.SinkWindow(window_length=20), num_sink_tokens=0, residual_length=0)
    ids = prompt(40)
    first = []
    for turn in (ids, ids, torch.cat([ids, prompt(9, 6)], 1)):
        with kept.reuse(turn) as past:
            first.append(past.get_seq_length())
            got = generate(kept.model, turn, past)
        cache = CompressedCache(kept.model.config, policy=policies.SinkWindow(window_length=20), num_sink_tokens=0, residual_length=0)
        with torch.no_grad():  # the same steps: what a chunk sees depends on what was evicted before it
            for chunk in turn[:, :39], turn[:, 39:-1]:
                if chunk.numel():
                    kept.model(chunk, **passing(cache))
        assert torch.equal(got, generate(kept.model, turn, cache))
    assert first == [39, 39, 48] and kept.stats.hits["shorter"] == 2


def test_a_dynamic_cache_cannot_become_one_that_evicts():
    kept = store(policy="sink_window", format="int8")
    cache = DynamicCache(config=kept.model.config)
    with torch.no_grad():
        kept.model(prompt(40), **passing(cache))
    assert not kept.store(prompt(40), cache)
    assert any("depends on its attention" in reason for reason in kept.stats.refused)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.filterwarnings("ignore:no layer of this model has full attention")
def test_full_windows_are_not_cut(name):
    kept = store(name)
    cache = DynamicCache(config=kept.model.config)
    ids = prompt(40)
    with torch.no_grad():
        kept.model(ids, **passing(cache))
    assert not kept.store(ids[:, :30], cache) and any("window is full" in reason for reason in kept.stats.refused)
    assert kept.store(ids, cache)
    assert kept.fetch(ids).kind == kept.fetch(ids[:, :30]).kind == "miss"
    assert kept.fetch(torch.cat([ids, ids], 1)).length == 40


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "turboquant_3bit_nc"])
def test_on_a_gpu(format, tmp_path):
    of = copy.deepcopy(model("llama")).cuda()
    kept = PrefixStore(of, max_bytes=2**26, format=format, directory=tmp_path, **ZONES)
    ids = prompt(200).cuda()
    cache = CompressedCache(of.config, format=format, **ZONES)
    with torch.no_grad():
        of(ids, **passing(cache))
    kept.store(ids, cache)
    for source in ("memory", "disk"):
        found = kept.fetch(torch.cat([ids, ids], 1))
        assert found.source == source and all(x.is_cuda for x in state(found.cache))
        assert all(torch.equal(a, b) for a, b in zip(held(found.cache), held(cache), strict=True))
        kept.trim(0)
    longer = torch.cat([ids, ids[:, :9]], 1)
    with kept.reuse(longer) as past:
        assert torch.equal(generate(of, longer, past), generate(of, longer, copy.deepcopy(cache)))
    assert kept.fetch(torch.cat([ids, ids], 1)).length == 209


@pytest.mark.gpu
def test_entries_of_a_gpu_are_locked_until_copies_have_ended(tmp_path):
    of = copy.deepcopy(model("llama")).cuda()
    kept = PrefixStore(of, max_bytes=2**28, format="int8", directory=tmp_path, **ZONES)
    ids = prompt(2000).cuda()
    cache = CompressedCache(of.config, format="int8", **ZONES)
    with torch.no_grad():
        of(ids, **passing(cache))
    kept.store(ids, cache)
    later = torch.cat([ids, ids[:, :1]], 1).cpu()  # the host would wait for ids of a GPU
    kept.fetch(later)  # the host may wait when CUDA loads a kernel
    for _ in range(2):
        assert all(x.is_pinned() for layer in kept._memory.entries[0].layers for x in layer.tensors.values())
        torch.cuda._sleep(1_000_000_000)
        found = kept.fetch(later).cache
        assert not torch.cuda.current_stream().query()  # the host did not wait
        kept.trim(0)  # waits before it gives the pages back
        assert all(torch.equal(a, b) for a, b in zip(held(found), held(cache), strict=True))
        assert kept.load() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [None, policies.KeyDiff(budget=500)], ids=["", "evicts"])
@torch.no_grad()
def test_a_model_computes_while_tokens_arrive(policy):
    """The current stream does not wait for copies before a layer is read, and reads what they bring."""
    of = copy.deepcopy(model("llama")).cuda()
    kept = PrefixStore(of, max_bytes=2**28, format="int8", policy=policy, **ZONES)
    ids = prompt(2000).cuda()
    cache = CompressedCache(of.config, format="int8", policy=policy, **ZONES)
    of(ids, **passing(cache))
    kept.store(ids, cache)
    new, copies = prompt(20, 1).cuda(), _copies_to(cache.layers[0].device)
    expected = of(new, **passing(copy.deepcopy(cache))).logits
    kept.fetch(torch.cat([ids, new], 1))  # CUDA loads kernels, which takes a while
    for _ in range(3):  # from the second on, in memory that tokens lay in before
        with torch.cuda.stream(copies):
            torch.cuda._sleep(1_000_000_000)
        found = kept.fetch(torch.cat([ids, new], 1)).cache
        torch.cuda.current_stream().synchronize()
        assert not copies.query() and all(layer.arrival is not None for layer in found.layers)
        torch.testing.assert_close(of(new, **passing(found)).logits, expected, rtol=0, atol=1e-3)
        assert copies.query() and not any(layer.arrival is not None for layer in found.layers)
        del found
