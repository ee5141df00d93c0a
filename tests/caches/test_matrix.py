"""Models x attention implementations x ways to feed a prompt x stores: the exact format equals DynamicCache, every other one its codes
decoded."""

import pytest
from transformers import DynamicCache

from qkvcache import CompressedCache
from tests.matrix import ATTENTION, COVER, FORMATS, MODELS, UNSUPPORTED, covering, model, slowly
from tests.reference import MODES, ZONES, assert_close, assert_steps_alike, count_decoded_layers, decoded, forward
from tests.tolerance import of_model

ALL_OF_IT = "chunked_padded"  # the feed that asks for everything; the others tell what is wrong, should it fail
LEGAL = [(name, attention) for name in MODELS for attention in ATTENTION if (name, attention) not in UNSUPPORTED]
STORES = {"growing": {}, "preallocated": {"max_length": 37}}
FIXED = [
    (name, attention)
    for name in ("llama", "qwen3", "gemma3", "gemma2", "gpt_oss", "phi3")
    for attention in ("sdpa", "eager")
    if (name, attention) in LEGAL
]
"""With preallocated storage."""
FEEDS = [*((mode, "zones") for mode in MODES), (ALL_OF_IT, "bare")]
FUSED = 16  # queries that attend on codes; more decode their layer
FOUR_BIT = "turboquant_4bit_nc"

pytestmark = pytest.mark.filterwarnings("ignore:no layer of this model", "ignore:attention code calls")


def check_against_dynamic(model, mode, **options):
    ours = CompressedCache(model.config, format="identity", **options)
    assert_steps_alike(model, ours, DynamicCache(config=model.config), mode, of_model(model))


def check_against_decoded(model, mode, cache):
    """Each step is compared from the same codes, so that no rounding flips between the two."""
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        span = begin, begin + size
        expected = forward(model, decoded(cache), ids, mask, *span)
        with count_decoded_layers() as dense:
            got = forward(model, cache, ids, mask, *span)
        assert_close(got, expected, of_model(model))
        eager = model.config._attn_implementation == "eager"
        if begin and (size <= FUSED or eager):
            assert not dense
        begin += size


def marked(cases: list[tuple[str, ...]]) -> list:
    """The cases of two architectures run on other releases of transformers, too."""
    names = {"llama", "gemma3"}
    return [pytest.param(case, marks=[pytest.mark.contract] * bool(names & {*case})) for case in cases]


def in_turn(pairs: list) -> list:
    """Every model with one implementation, in turn."""
    by_model = [[pair for pair in pairs if pair[0] == name] for name in MODELS]
    return [pairs[i % len(pairs)] for i, pairs in enumerate(filter(None, by_model))]


def some(pairs: list, feeds: list) -> list:
    """Each of `pairs` with one of `feeds` at least; with `ALL`, with each."""
    return [(*pair, *feed) for pair, feed in covering(pairs, feeds, strength=1)]


def cases(growing: list, fixed: list, feeds: list) -> list:
    return [
        *((*case, "growing") for case in some(growing, feeds)),
        *((*case, "preallocated") for case in some(fixed, feeds)),
    ]


MAIN = [(name, attention, mode, "zones", "growing") for name in ("llama", "gemma3") for attention in ATTENTION for mode in MODES]


@pytest.mark.parametrize("case", marked([*dict.fromkeys([*MAIN, *cases(slowly(LEGAL, in_turn(LEGAL)), FIXED, FEEDS)])]), ids="-".join)
def test_exact_format_equals_dynamic_cache(case):
    name, attention, mode, zones, store = case
    check_against_dynamic(model(name, attention), MODES[mode], **ZONES[zones], **STORES[store])


@pytest.mark.parametrize(
    "case", marked(cases(slowly(LEGAL, in_turn(LEGAL)), slowly(FIXED, in_turn(FIXED)), [(mode,) for mode in MODES])), ids="-".join
)
def test_four_bits_equal_their_codes_decoded(case):
    name, attention, mode, store = case
    network = model(name, attention)
    cache = CompressedCache(network.config, format=FOUR_BIT, **ZONES["zones"], **STORES[store])
    check_against_decoded(network, MODES[mode], cache)


@pytest.mark.contract
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("format", "feed"),
    covering(COVER, [("sdpa", ALL_OF_IT, "bare"), *(("sdpa", *feed) for feed in FEEDS[:-1]), ("eager", ALL_OF_IT, "zones")], strength=1),
)
def test_every_format_equals_its_codes_decoded(format, feed, store):
    attention, mode, zones = feed
    network = model("llama", attention)
    cache = CompressedCache(network.config, format=FORMATS[format], **ZONES[zones], **STORES[store])
    check_against_decoded(network, MODES[mode], cache)


@pytest.mark.parametrize(
    ("attention", "mode", "store"),
    [*((*case, "growing") for case in covering(ATTENTION, MODES, strength=1)), ("sdpa", ALL_OF_IT, "preallocated")],
)
def test_without_a_config_sliding_layers_are_compressed_too(attention, mode, store):
    network = model("mistral", attention)
    options = ZONES["zones"] | STORES[store]
    assert_steps_alike(network, CompressedCache(format="identity", **options), DynamicCache(), MODES[mode], of_model(network))
    if store == "growing":  # the other one tells its columns by the config
        check_against_decoded(network, MODES[mode], CompressedCache(format=FOUR_BIT, **options))
