"""Who shares pages with whom, and which pages go first: salts and sessions of requests."""

from __future__ import annotations

import hashlib
import os

import pytest

from qkvcache import PrefixStore, continuous_batching, demo
from qkvcache.batching.branches import Branches

from .clients import COMPLETIONS, key_of, send, served
from .requests import ZONES, collect, prompts, serving, tiniest, until
from .test_blocks import assert_nothing_is_left

FORMAT = "int8"


def cached(manager, ids: list[int], **options) -> int:
    """Runs a request; how many tokens of it were in pages."""
    name = manager.add_request(ids, **options)
    output = collect(manager, [name])[name]
    assert output.error is None
    return output.cached_tokens


@pytest.mark.parametrize("stored", [False, True], ids=["pool", "store"])
def test_pages_are_shared_with_those_of_the_same_salt_alone(tmp_path, stored):
    """In the pool, and in another process by the folder."""
    network, (ids,) = tiniest(), prompts(200)
    kept = [PrefixStore(network, max_bytes=2**24, directory=tmp_path) if stored else None for _ in range(2)]
    with continuous_batching(network, FORMAT, store=kept[0], **ZONES) as batching, serving(network) as manager:
        assert [cached(manager, ids, salt=salt) for salt in (b"", b"a", b"b", b"a", b"", b"c")] == [0, 0, 0, 192, 192, 0]
        assert until(lambda: not stored or batching.metrics().pages_written == 4 * 3)
        assert_nothing_is_left(manager)
        assert not manager.cache.allocators[0].salts
    if stored:
        with continuous_batching(network, FORMAT, store=kept[1], **ZONES), serving(network) as manager:
            assert [cached(manager, ids, salt=salt) for salt in (b"other", b"a", b"")] == [0, 192, 192]
        assert hashlib.blake2b(b"a").hexdigest() not in "".join(os.listdir(tmp_path))


def test_forks_and_preempted_requests_keep_their_salt():
    """A pool of few pages, in which requests take those of each other."""
    network, ids = tiniest(), prompts(*[70] * 6)
    few = {"blocks": 8, "max_requests_per_batch": 6, "safety_margin": 0.0}
    with continuous_batching(network, FORMAT, **ZONES) as batching, serving(network, new=130, **few) as manager:
        names = [manager.add_request(one, salt=bytes([i % 2])) for i, one in enumerate(ids)]
        found = collect(manager, names)
        assert batching.metrics().preemptions and not any(output.error for output in found.values())
        last = ids[5] + found[names[5]].generated_tokens
        assert cached(manager, last, salt=b"\0", max_new_tokens=1) == 0 < cached(manager, last, salt=b"\1", max_new_tokens=1)


def test_names_of_blocks_have_128_bits():
    """64 bits let a client find two prompts of one name."""
    with continuous_batching(tiniest(), FORMAT, **ZONES), serving(tiniest()) as manager:
        cached(manager, prompts(200)[0])
        assert {len(name) for name in manager.cache.allocators[0].ledger.hash_to_block} == {16}


@pytest.mark.parametrize("options", [{"salt": "text"}, {"session": 3}])
def test_other_salts_and_sessions_are_refused(options):
    with continuous_batching(tiniest(), FORMAT, **ZONES), serving(tiniest()) as manager, pytest.raises(TypeError, match="expected bytes"):
        manager.add_request([1, 2, 3], **options)


def test_the_dead_branch_of_a_session_goes_first():
    """The second turn leaves the first one after a page: its other pages go before those of a prompt that was read earlier."""
    network = tiniest()
    other, first = prompts(200, 200)
    second = first[:64] + prompts(136, seed=5)[0]
    with continuous_batching(network, FORMAT, **ZONES), serving(network, blocks=10, safety_margin=0.0) as manager:
        assert [cached(manager, ids, **options) for ids, options in ((other, {}), (first, {"session": "s"}))] == [0, 0]
        assert cached(manager, second, session="s") == 64
        cached(manager, prompts(230, seed=9)[0])  # takes two pages of others: 3 + 3 + 2 of 10 are cached
        assert cached(manager, other) == 192
        assert cached(manager, first) == 64


def test_release_and_prefetch_of_a_session(tmp_path):
    network = tiniest()
    first, second = prompts(200, 200)
    store = PrefixStore(network, max_bytes=2**24, directory=tmp_path)
    with continuous_batching(network, FORMAT, store=store, **ZONES) as batching, serving(network) as manager:
        for name, ids in (("a", first), ("b", second)):
            assert cached(manager, ids, session=name) == 0
        assert until(lambda: batching.metrics().pages_written == 6)
        assert manager.prefetch("b") == manager.prefetch("a") == 3 and manager.prefetch("unknown") == 0
        manager.cache.sessions._prefetcher.submit(bool).result()
        store.trim(0)
        assert store.stats.nbytes == 0
        manager.prefetch("a")
        manager.cache.sessions._prefetcher.submit(bool).result()
        assert store.stats.nbytes == sum(page.nbytes for page, _ in store._memory._items.values()) > 0 and len(store._memory._items) == 3
        assert manager.release("a") == 3 and manager.release("unknown") == 0
        cached(manager, [5])
        manager.cache.sessions._copier.submit(bool).result()
        oldest = sorted(tmp_path.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)[:3]
        store.trim(0, sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) - 1)
        assert not all(path.exists() for path in oldest) and manager.prefetch("a") == 0
        assert [path.stat().st_mtime_ns for path in oldest if path.exists()] == [0, 0]


def test_branches_know_what_a_turn_leaves():
    held = Branches()
    assert held.turn("s", [b"1", b"2"], lambda _: False) == []
    held.add("s", [b"3", b"4"])
    assert held.turn("t", [b"1", b"3"], lambda _: False) == []
    assert held.turn("s", [b"1", b"5"], lambda link: link == b"4") == [b"2"]  # another session has 3, a request reads 4
    assert held.pages("s") == [b"1", b"4", b"5"] and held.turn("s", [b"1"], lambda _: False) == [b"4", b"5"]
    assert held.release("s") == [] and held.release("t") == [b"1", b"3"] and not held.pages("t")


def test_branches_are_bounded():
    """Whatever names clients invent, and where their prompts fill no page."""
    for pages in (4, 0):
        held = Branches(most=10)
        for i in range(1000):
            held.turn(f"{i}", [bytes([i % 250, j]) for j in range(pages)], lambda _: False)
            assert len(held._sessions) + len(held._uses) <= 10


# Over HTTP.


KEYS = "a", "b"


def call(server, path: str, body=None, method: str = "POST", **headers: str) -> dict:
    status, answer, _ = send(server, path, body, method, **headers)
    assert status == 200, answer
    return answer


def hit(server, prompt: str, key: str | None = None, **fields) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0} | fields
    answer = call(server, COMPLETIONS, body, **{} if key is None else key_of(key))
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"] // 256


def test_what_a_client_has_sent_is_not_visible_to_another():
    """Without keys, or with `all`, prompts share pages with all, and a salt asks for others."""
    prompt = demo.text()[:1000]
    with served(api_keys=KEYS) as server:
        assert [hit(server, prompt, key) for key in KEYS * 2] == [0, 0, 1, 1]
        assert [hit(server, prompt, "a", cache_salt=salt) for salt in ("x", "y", "x")] == [0, 0, 1]
        assert hit(server, prompt, "b", cache_salt="x") == 0
    with served(share_prefixes="all", api_keys=KEYS) as server:
        assert [hit(server, prompt, key) for key in KEYS] == [0, 1]
        assert [hit(server, prompt, key, cache_salt="x") for key in KEYS] == [0, 1]
    with served() as server:
        assert [hit(server, prompt, cache_salt=salt) for salt in (None, None, "x", "x")] == [0, 1, 0, 1]
    with served(share_prefixes="none") as server:
        assert [hit(server, prompt) for _ in range(2)] == [0, 0]


def test_sessions_are_released_and_prefetched_by_one_call(tmp_path):
    """By header or field; each tenant has sessions of its own."""
    prompt = demo.text()[:1000]
    first, second = map(key_of, KEYS)
    with served(store=tmp_path, api_keys=KEYS) as server:
        body = {"prompt": prompt, "max_tokens": 1}
        call(server, COMPLETIONS, body, **{"X-Session-Id": "one"} | first)
        call(server, COMPLETIONS, body | {"prompt_cache_key": "two"}, **second)
        assert call(server, "/v1/sessions/one", **second) == {"session": "one", "pages": 0}
        assert call(server, "/v1/sessions/one", **first) == call(server, "/v1/sessions/one", None, "DELETE", **first)
        assert call(server, "/v1/sessions/two", **second)["pages"] == 1


def test_reproducible_answers_over_http():
    """The pages hold 3 bits, with which a prompt whose beginning is stored has another answer by default."""
    body = {"prompt": demo.text()[:1500], "max_tokens": 4, "temperature": 0}
    with served(cache={"format": "turboquant_3bit_nc", "reproducible": True}) as server:
        cold, warm = (call(server, COMPLETIONS, body) for _ in range(2))
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)] == [0, 512]
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"]


def test_other_ways_to_share_are_refused(tmp_path):
    pytest.importorskip("uvicorn")
    from qkvcache.batching.server import Server

    for options, says in (({"share_prefixes": "some"}, "expected one of all, key, none"), ({"store": tmp_path}, "with a store")):
        with pytest.raises(ValueError, match=says):
            Server("demo", {}, **{"share_prefixes": "none"} | options)
