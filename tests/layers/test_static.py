"""A preallocated layer: what is stored, where, that nothing moves, and its compiled steps. `test_compressed.py` has what it does as a
layer that grows does."""

import copy

import pytest
import torch

from qkvcache.kernels import attend, attend_pages
from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, TOKENS
from qkvcache.kernels.store import reference
from qkvcache.layers.compressed import CompressedLayer
from tests.allocations import storages
from tests.layers.test_compressed import addresses, same, state
from tests.layers.test_compressed import filled as filled_layer
from tests.matrix import COVER, FORMATS
from tests.reference import assert_close
from tests.tolerance import rounding, same_decoded
from tests.updates import DIM, ROWS, compiled_steps, new, one_step

FIRST, RECENT, LIMIT = 2, 6, 90
KINDS = ["identity", "int8_asymmetric", "fp8_tensor", "int4_group", "nvfp4", "turboquant_3bit_nc"]


def empty() -> CompressedLayer:
    return CompressedLayer(FORMATS["turboquant_4bit_nc"], FIRST, RECENT, LIMIT)


def filled(*sizes: int, format: str = "turboquant_4bit_nc", limit: int = LIMIT) -> CompressedLayer:
    return filled_layer(*sizes, format=format, first=FIRST, recent=RECENT, limit=limit)


@pytest.fixture
def compiled():
    yield from compiled_steps()


@pytest.mark.parametrize("format", COVER)
def test_memory_is_constant_from_the_first_token_on(format):
    layer = filled(1, format=format)
    held, kept = sum(x.nbytes for _, x in layer.tensors()), addresses(layer)
    for size in (40, 1, 7, 41):
        layer.update(*new(size))
    assert layer.get_seq_length() == LIMIT and addresses(layer) == kept
    listed = [x for _, x in layer.tensors()]
    assert sum(storages(listed).values()) == held == sum(x.nbytes for x in listed)
    assert layer.storage.tokens.capacity == 128


def test_storage_of_early_initialization_is_used():
    layer = empty()
    layer.lazy_initialization(*new(0))
    kept = addresses(layer)
    assert layer.is_initialized and layer.get_seq_length() == 0 and len(kept) == 14  # a mean, its rows and two planes of codes among them
    x = new(40)
    assert layer.update(*x)[0] is x[0]
    assert addresses(layer) == kept


# Refusals


def test_more_than_max_length_is_refused_and_changes_nothing():
    layer = filled()
    before = state(layer)
    with pytest.raises(ValueError, match="52 tokens and 39 more do not fit in max_length=90"):
        layer.update(*new(39))
    assert state(layer) == before
    layer.update(*new(38))
    with pytest.raises(ValueError, match="90 tokens and 1 more"):
        layer.update(*new(1))


def test_a_prompt_that_does_not_fit_takes_no_storage():
    layer = empty()
    with pytest.raises(ValueError, match="0 tokens and 91 more do not fit in max_length=90"):
        layer.update(*new(91))
    assert not layer.is_initialized and list(layer.tensors()) == []
    with pytest.raises(ValueError, match="max_length=90"):
        layer.get_mask_sizes(91)
    layer.update(*new(90))


# Compiled


@pytest.mark.parametrize("format", KINDS)
def test_compiled_steps_equal_eager_ones(format, compiled):
    step, graphs = compiled
    query = torch.randn(ROWS, 4, 1, DIM)
    layer = filled(20, 1, format=format)
    plain = copy.deepcopy(layer)
    for _ in range(25):
        x = new(1)
        assert_close(step(layer, x, query), one_step(plain, x, query), rounding(DIM, LIMIT))
    assert len(graphs) == 1
    assert layer.storage.counts_stale and layer.query_offset().item() == 46
    assert layer.get_seq_length() == 46 and not layer.storage.counts_stale
    assert same(layer.dense(), plain.dense())
    x = new(3)  # and on, outside of compiled code
    layer.update(*x), plain.update(*x)
    x = new(1)
    assert_close(step(layer, x, query), one_step(plain, x, query), rounding(DIM, LIMIT))
    assert len(graphs) == 1
    layer.crop(-1), plain.crop(-1)
    assert same(layer.dense(), plain.dense())


def test_tokens_beyond_max_length_are_dropped_and_then_said(compiled):
    step, graphs = compiled
    layer = filled(20, 1, limit=24)
    outs = [step(layer, new(1), torch.ones(ROWS, 4, 1, DIM)) for _ in range(5)]
    assert len(graphs) == 1 and all(out.isfinite().all() for out in outs)
    assert layer.storage.rows[:, [TOKENS, LENGTH]].tolist() == [[24, 15]] * ROWS and layer.storage.control[DROPPED] == 2
    for call in (lambda: layer.update(*new(1)), layer.get_seq_length, layer.dense, lambda: layer.crop(-1)):
        with pytest.raises(ValueError, match=r"2 tokens came when the cache was full: max_length=24 is too small; call reset\(\)"):
            call()
    layer.reset()
    layer.update(*new(24))
    assert layer.get_seq_length() == 24


# What attention reads of the store


@pytest.mark.sums
@pytest.mark.parametrize("format", KINDS)
def test_unfold_is_dense_at_its_columns(format):
    layer = filled(30, 1, 1, format=format)
    x = new(3)
    got = reference.unfold(layer.storage.inputs, LIMIT, x)
    for side, known, fresh, codec in zip(got, layer.dense(), x, layer.format.codecs(), strict=True):
        assert side.shape[2] == LIMIT
        assert same_decoded(side[:, :, :32], known, codec) and torch.equal(side[:, :, 32:35], fresh) and not side[:, :, 35:].any()


def test_what_lies_in_unused_slots_counts_for_nothing():
    """Codes that were cropped, which may be of anything finite."""
    layer = filled(60, 1, 1, format="int8")
    layer.crop(-45)
    layer.storage.tokens.pages.planes[0]["codes"][:, :, layer.storage.tokens.length :] = 127
    query = torch.randn(ROWS, 4, 1, DIM)
    expected = attend(query, layer.storage.attention_inputs())
    assert_close(attend_pages(query, layer.storage.inputs)[0], expected, rounding(DIM, LIMIT))
