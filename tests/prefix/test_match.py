"""The index against looking at every key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkvcache.prefix.match import NAME, Index, common, decode, encode, kind, length

IDS = st.lists(st.sampled_from([0, 1, 255, 256, 2**31 - 1]), min_size=1, max_size=6)
TEMPLATES = st.sampled_from([b"c", b"d"])
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
        assert (one < other) == (a < b)
        assert kind(one, other) == {(True, True): "exact", (True, False): "shorter", (False, True): "longer"}.get(
            (a == b[: len(a)], b == a[: len(b)]), "common"
        )


@given(
    st.lists(st.tuples(NAMES, IDS, TEMPLATES, st.booleans()), max_size=30), st.lists(st.integers(0, 29), max_size=10), NAMES, IDS,
    TEMPLATES, st.integers(0, 7),
)  # fmt: skip
def test_the_index_finds_what_a_search_finds(added, removed, name, ids, template, limit):
    index, kept = Index(), {}
    for owner, tokens, of, whole in added:
        index.add(key(owner, tokens), of, whole)
        kept[owner, tuple(tokens)] = of, whole
    for number in removed:
        if number < len(added):
            owner, tokens, *_ = added[number]
            index.remove(key(owner, tokens))
            kept.pop((owner, tuple(tokens)), None)
    assert all(index.covering(key(owner, tokens), of) == key(owner, tokens) for (owner, tokens), (of, _) in kept.items())

    own = {tokens: whole for (owner, tokens), (_, whole) in kept.items() if owner == name}
    fits = [min(shared(tokens, ids), limit) for tokens, whole in own.items() if not whole]
    fits += [len(tokens) for tokens, whole in own.items() if whole and len(tokens) <= limit and list(tokens) == ids[: len(tokens)]]
    found, tokens = index.best(key(name, ids), limit)
    assert tokens == max(fits, default=0) and (found is None) == (tokens == 0)
    if found is not None:
        assert decode(found)[:tokens].tolist() == ids[:tokens]

    cut = [tokens for tokens, whole in own.items() if not whole and kept[name, tokens][0] == template]
    expected = sorted((t for t in cut if len(t) < len(ids) and list(t) == ids[: len(t)]), key=len, reverse=True)
    assert [tuple(decode(found).tolist()) for found in index.beginnings(key(name, ids), template)] == expected
    cover = index.covering(key(name, ids), template)
    longer = sorted(tokens for tokens, whole in own.items() if not whole and list(tokens[: len(ids)]) == ids)  # the first is looked at
    of = kept.get((name, tuple(ids)), kept[name, longer[0]] if longer else (None,))[0]
    assert (cover is not None) == (of == template)
    assert cover is None or decode(cover)[: len(ids)].tolist() == ids
