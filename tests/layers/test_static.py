"""A preallocated layer: what is stored, where, that nothing moves, and its compiled steps. `test_compressed.py` has what it does as a
layer that grows does."""

import copy

import pytest
import torch
from torch import Tensor

from qkvcache.kernels import attend, attend_on_codes, attend_pages
from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, TOKENS
from qkvcache.kernels.store import reference
from qkvcache.layers.compressed import CompressedLayer
from tests.codes import codes_of
from tests.matrix import COVER
from tests.matrix import FORMATS as REGISTRY
from tests.reference import assert_close
from tests.tolerance import rounding, same_decoded
from tests.updates import DIM, HEADS, ROWS, VALUE_DIM, Pair, new

FIRST, RECENT, LIMIT = 2, 6, 90
KINDS = ["identity", "int8_asymmetric", "fp8_tensor", "int4_group", "nvfp4", "turboquant_3bit_nc"]


def empty(format: str = "turboquant_4bit_nc", zones=(FIRST, RECENT), limit: int = LIMIT) -> CompressedLayer:
    return CompressedLayer(REGISTRY[format], *zones, max_length=limit)


def filled(*sizes: int, **options) -> CompressedLayer:
    layer = empty(**options)
    for size in sizes or (50, 1, 1):
        layer.update(*new(size))
    return layer


def same(a, b) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def addresses(layer: CompressedLayer) -> list[int]:
    return [x.data_ptr() for _, x in layer.tensors()]


def snapshot(layer: CompressedLayer) -> list:
    held = [x.flatten().view(torch.uint8).clone() for _, x in layer.tensors()]
    return [layer.get_seq_length(), layer.storage.tokens.length, layer.empty, addresses(layer), [x.tolist() for x in held]]


@pytest.mark.parametrize("format", COVER)
def test_codes_are_those_of_a_growing_layer(format):
    """The body in token order; and dense layers that are equal, where nothing is lost."""
    static, growing = empty(format, (FIRST, 0)), CompressedLayer(REGISTRY[format], FIRST, 0)
    for size in (30, 1, 1, 5, 1):
        x = new(size)
        static.update(*x), growing.update(*x)
    assert static.storage.tokens.length == growing.storage.tokens.length == 35
    assert same(codes_of(static.storage.tokens), codes_of(growing.storage.tokens))
    if format == "identity":
        assert same(static.dense(), growing.dense())


def test_reset_keeps_the_storage_and_serves_another_batch():
    layer = filled()
    kept = addresses(layer)
    layer.reset()
    assert layer.is_initialized and layer.get_seq_length() == 0 and addresses(layer) == kept
    x = new(4)
    assert layer.update(*x)[0] is x[0] and addresses(layer) == kept
    layer.reset()
    x = new(4, rows=1, dims=(128, 128), dtype=torch.bfloat16)
    assert layer.update(*x)[0] is x[0] and layer.dense()[0].dtype == torch.bfloat16


# Modes of autograd, memory


@pytest.mark.parametrize("format", COVER)
def test_memory_is_constant_from_the_first_token_on(format):
    layer = filled(1, format=format)
    held, kept = sum(x.nbytes for _, x in layer.tensors()), addresses(layer)
    for size in (40, 1, 7, 41):
        layer.update(*new(size))
    assert layer.get_seq_length() == LIMIT and addresses(layer) == kept
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for _, x in layer.tensors() if x.numel()}
    assert sum(storages.values()) == held == sum(x.nbytes for _, x in layer.tensors())
    per_token = REGISTRY[format].bytes_per_token(DIM, HEADS, VALUE_DIM)
    if format != "identity":  # those bytes are counted for bf16
        codes = sum(x.nbytes for role, x in layer.tensors() if role in ("codes", "scales"))
        statistics = sum(x.nbytes for side in layer.storage.tokens.statistics for x in side.values())
        assert codes == ROWS * per_token * layer.storage.tokens.capacity + statistics
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
    before = snapshot(layer)
    with pytest.raises(ValueError, match="52 tokens and 39 more do not fit in max_length=90"):
        layer.update(*new(39))
    assert snapshot(layer) == before
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


def one_step(layer: CompressedLayer, x: Pair, query: Tensor) -> Tensor:
    key, _ = layer.update(*x)
    return attend_on_codes(query, key.attention_inputs)


@pytest.fixture
def compiled():
    """`one_step` compiled into one graph, and how many graphs there are."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.compiler.set_stance("default"), torch.no_grad():
        yield torch.compile(one_step, fullgraph=True, backend=backend), graphs
    torch.compiler.reset()


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
