"""Keys of entries against lists of their tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkvcache.prefix.match import NAME, best, common, covering, decode, encode, kind, length, replaced

IDS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), min_size=1, max_size=6)
NAMES = st.sampled_from([b"a" * NAME, b"b" * NAME])


def key(name, ids):
    return encode(name, torch.tensor(ids))


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(IDS, IDS, NAMES, NAMES)
def test_keys_compare_as_tokens(a, b, first, second):
    one, other = key(first, a), key(second, b)
    assert common(one, other) == (shared(a, b) if first == second else 0)
    assert decode(one).tolist() == a and length(one) == len(a)
    if first == second:
        assert kind(one, other) == {(True, True): "exact", (True, False): "shorter", (False, True): "longer"}.get(
            (a == b[: len(a)], b == a[: len(b)]), "common"
        )


@given(st.lists(st.tuples(NAMES, IDS, st.none() | st.sets(st.integers(1, 5))), max_size=30), NAMES, IDS, st.integers(0, 7))
def test_entries_are_found_as_by_their_tokens(added, name, ids, limit):
    kept = {}
    for owner, tokens, at in added:
        kept[owner, tuple(tokens)] = None if at is None else sorted({cut for cut in at if cut < len(tokens)} | {len(tokens)})
    entries = {key(owner, tokens): cuts for (owner, tokens), cuts in kept.items()}
    assert all(covering(entries, one) == one for one in entries)

    own = {tokens: cuts for (owner, tokens), cuts in kept.items() if owner == name}
    most = {tokens: min(shared(tokens, ids), limit) for tokens in own}
    fits = [max((cut for cut in range(most[tokens] + 1) if cuts is None or cut in cuts), default=0) for tokens, cuts in own.items()]
    found, tokens = best(entries, key(name, ids), limit)
    assert tokens == max(fits, default=0) and (not found) == (tokens == 0)
    assert not found or decode(found)[:tokens].tolist() == ids[:tokens]

    for new in (None, [2, len(ids)]):
        served = [t for t, cuts in own.items() if new is None or cuts is not None and set(cuts) <= set(new)]
        expected = {t for t in served if len(t) < len(ids) and list(t) == ids[: len(t)]}
        assert {tuple(decode(found).tolist()) for found in replaced(entries, key(name, ids), new)} == expected
    cover = covering(entries, key(name, ids))
    longer = [t for t, cuts in own.items() if list(t[: len(ids)]) == ids and (cuts is None or len(ids) in cuts)]
    assert (cover is not None) == bool(longer)
    assert cover is None or tuple(decode(cover).tolist()) in longer


def test_entries_are_cut_within_what_is_in_common():
    stored = [5, 6, 7, 8, 9, 10]
    entries = {key(b"a" * NAME, stored): (3, 6), key(b"a" * NAME, [5, 6, 1]): (3,)}
    for shared, tokens in ((2, 0), (3, 3), (5, 3), (6, 6)):
        assert best(entries, key(b"a" * NAME, stored[:shared] + [11]), 9) == (key(b"a" * NAME, stored) if tokens else b"", tokens)
        assert best(entries, key(b"a" * NAME, stored), shared)[1] == tokens
