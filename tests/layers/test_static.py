"""A preallocated layer against a plain one: what is stored, where, and that nothing moves."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from qkvcache.attention import CompressedKV
from qkvcache.kernels import attend, attend_on_codes, attend_pages
from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, TOKENS
from qkvcache.kernels.store import reference
from qkvcache.layers.compressed import CompressedLayer
from tests import updates
from tests.codes import codes_of
from tests.matrix import COVER
from tests.matrix import FORMATS as REGISTRY
from tests.plain_cache import PlainLayer
from tests.reference import assert_close
from tests.tolerance import rounding, same_decoded
from tests.updates import DIM, HEADS, ROWS, VALUE_DIM, Pair, new

FIRST, RECENT, LIMIT = 2, 6, 90
ZONES = {"zones": (FIRST, RECENT), "bare": (0, 0), "no_first": (0, RECENT), "no_recent": (FIRST, 0)}
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


def same_tokens(layer: CompressedLayer, expected) -> bool:
    """Whether `layer` holds the tokens of `expected`, which were decoded in other blocks."""
    return all(same_decoded(*pair) for pair in zip(layer.dense(), expected, layer.format.codecs(), strict=True))


def addresses(layer: CompressedLayer) -> list[int]:
    return [x.data_ptr() for _, x in layer.tensors()]


def snapshot(layer: CompressedLayer) -> list:
    held = [x.flatten().view(torch.uint8).clone() for _, x in layer.tensors()]
    return [layer.get_seq_length(), layer.storage.tokens.length, layer.empty, addresses(layer), [x.tolist() for x in held]]


def plain(layer: CompressedLayer) -> PlainLayer:
    return PlainLayer(layer.format, layer.num_sink_tokens, layer.residual_length)


def check(layer: CompressedLayer, tokens: PlainLayer) -> None:
    assert layer.get_seq_length() == tokens.seen
    with torch.no_grad():
        assert layer.get_mask_sizes(0) == (layer.max_length if tokens.seen else 0, 0)
    if not tokens.seen:
        return
    assert layer.storage.tokens.length == tokens.quantized
    assert layer.storage.rows[:, [TOKENS, LENGTH]].tolist() == [[tokens.seen, tokens.quantized]] * len(tokens.exact[0])
    assert layer.storage.control[DROPPED] == 0
    assert same_tokens(layer, tokens.dense())


# Against a plain layer


@pytest.mark.sums
@pytest.mark.parametrize("zones", ZONES)
@pytest.mark.parametrize("format", COVER)
def test_update_returns_the_tensors_and_then_handles(format, zones):
    layer = empty(format, ZONES[zones])
    tokens = plain(layer)
    for size in (20, 1, 3, 1, 20, 1, 1):
        x, before = new(size), tokens.seen and layer.dense()
        got = layer.update(*x)
        tokens.update(x)
        check(layer, tokens)
        if not before:
            assert all(a is b for a, b in zip(got, x, strict=True))
            continue
        assert all(isinstance(handle, CompressedKV) for handle in got) and got[0].attention_inputs is got[1].attention_inputs
        seen = layer.dense() if size == 1 else [torch.cat(pair, 2) for pair in zip(before, x, strict=True)]
        assert all(same_decoded(handle.dense(), *pair) for handle, *pair in zip(got, seen, layer.format.codecs(), strict=True))


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


@st.composite
def histories(draw):
    sizes = st.one_of(st.just(1), st.integers(1, 12), st.integers(1, 40))
    kinds = ("update",) * 8 + ("crop", "crop", "reorder", "select", "repeat", "reset", "copy")
    return [(draw(st.sampled_from(kinds)), draw(sizes), draw(st.integers(0, 999))) for _ in range(draw(st.integers(1, 14)))]


@pytest.mark.parametrize("format", KINDS)
@settings(max_examples=15)
@given(history=histories(), zones=st.sampled_from(list(ZONES.values())), limit=st.sampled_from([20, 60, 90]))
def test_any_history(format, history, zones, limit):
    layer = empty(format, zones, limit)
    tokens, rows = plain(layer), 2
    for what, size, seed in history:
        torch.manual_seed(seed)
        kept = addresses(layer)
        index = torch.randint(rows, (rows,)).tolist()
        if what == "update":
            x = new(size, rows)
            if tokens.seen + size > limit:
                before = tokens.seen and snapshot(layer)
                with pytest.raises(ValueError, match=f"max_length={limit}"):
                    layer.update(*x)
                assert not before or snapshot(layer) == before
            else:
                layer.update(*x)
                tokens.update(x)
        elif what == "crop":
            layer.crop(-size)
            if tokens.seen:
                tokens.crop(size)
        elif what == "reorder":
            layer.reorder_cache(torch.tensor(index))
            if tokens.seen:
                tokens.select(index)
        elif what == "copy":
            layer = copy.deepcopy(layer)
        elif what == "reset":
            layer.reset()
            tokens = plain(layer)
        elif tokens.seen:
            keep = sorted(index)[: seed % rows + 1] if what == "select" else [i for i in range(rows) for _ in range(2)]
            if what == "select":
                layer.batch_select_indices(torch.tensor(keep))
            elif rows < 4:
                layer.batch_repeat_interleave(2)
            else:
                continue
            tokens.select(keep)
            rows = len(keep)
        check(layer, tokens)
        if kept and what in ("crop", "reorder", "reset") or kept and what == "update" and tokens.seen > size:
            assert addresses(layer) == kept


def test_cropped_slots_are_written_anew():
    layer = filled(50, 9)
    tokens = layer.dense()
    kept = addresses(layer)
    layer.crop(-30)
    # what was encoded stays encoded: no token is left in the ring
    assert (layer.storage.seq_length, layer.storage.tokens.length) == (29, 27)
    assert same_tokens(layer, [x[:, :, :29] for x in tokens])
    x = new(3)
    layer.update(*x)
    assert same_tokens(layer, [torch.cat([a[:, :, :29], b], 2) for a, b in zip(tokens, x, strict=True)])
    layer.crop(-1000)
    assert layer.get_seq_length() == 0 and addresses(layer) == kept
    assert all(got is y for got, y in zip(layer.update(*x), x, strict=True))


def test_rows_are_reordered_in_place_with_their_codes_and_means():
    layer = filled(50, 9, format="int8_asymmetric")
    before, kept = layer.dense(), addresses(layer)
    layer.reorder_cache(torch.tensor([2, 2, 0]))
    assert same_tokens(layer, [x[[2, 2, 0]] for x in before]) and addresses(layer) == kept


def test_a_copy_lives_its_own_life():
    layer = filled(format="fp8_tensor")
    before, twin = snapshot(layer), copy.deepcopy(layer)
    assert not set(addresses(layer)) & set(addresses(twin)) and layer.storage.inputs.handle is not twin.storage.inputs.handle
    exact = *twin.storage.sinks, *twin.storage.residual
    assert all(a is b for a, b in zip((*twin.storage.inputs.sinks, *twin.storage.inputs.ring), exact, strict=True))
    twin.update(*new(5)), twin.reorder_cache(torch.tensor([1, 1, 0])), twin.crop(-20), twin.reset()
    assert snapshot(layer) == before


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


def test_gradients_reach_the_new_tokens():
    layer, plain = filled(), filled()
    plain.reset(), layer.reset()
    past, x = new(50), new(3)
    layer.update(*past), plain.update(*past)
    before = layer.dense()
    for step in (x, tuple(side[:, :, :1] for side in x)):
        held = layer.get_seq_length()
        graded = tuple(side.clone().requires_grad_() for side in step)
        got = layer.update(*graded)
        plain.update(*step)
        assert all(type(side) is Tensor for side in got)
        past = before if step[0].shape[2] > 1 else layer.dense()  # a step of one token is stored before its attention
        assert same([side[:, :, :held] for side in got], [side[:, :, :held] for side in past])
        weights = [torch.randn_like(side) for side in got]
        sum((side * w).sum() for side, w in zip(got, weights, strict=True)).backward()
        assert same([side.grad for side in graded], [w[:, :, held:] for w in weights])
        assert not any(x.requires_grad for _, x in layer.tensors())
        assert same(layer.dense(), plain.dense())
        before = layer.dense()


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_may_come_and_go(modes):
    layer, plain = empty(), empty()
    for i, size in enumerate((40, 1, 20, 1, 1, 3)):
        x = new(size)
        plain.update(*x)
        with modes[i % 2]():
            layer.update(*x)
            layer.reorder_cache(torch.arange(ROWS))
            layer.crop(0)
    assert same(layer.dense(), plain.dense())


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


BAD_UPDATES = updates.BAD_UPDATES | {"too many": new(39)}


@pytest.mark.parametrize("bad", BAD_UPDATES)
def test_a_refused_update_changes_nothing(bad):
    layer = filled()
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"\[3, 2, 52, \d+\].*reset\(\)|differ in batch|52 tokens and 39 more do not fit in max_length=90"):
        layer.update(*BAD_UPDATES[bad])
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


@pytest.mark.parametrize("dims", [(65, 64), (64, 65)])
def test_a_refused_head_dim_leaves_the_layer_empty(dims):
    layer = empty("int4")
    with pytest.raises(ValueError, match="cannot hold .*head_dim 65"):
        layer.update(*new(3, dims=dims))
    assert not layer.is_initialized and layer.get_seq_length() == 0 and list(layer.tensors()) == []
    layer.update(*new(3))


def test_a_refused_crop_changes_nothing():
    layer = filled()
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"crop\(3\): pass a negative number"):
        layer.crop(3)
    layer.crop(0)
    assert snapshot(layer) == before


def test_an_empty_layer():
    layer = empty()
    layer.reorder_cache(torch.tensor([0])), layer.batch_repeat_interleave(2), layer.crop(-3), layer.reset()
    assert layer.get_seq_length() == 0 and list(layer.tensors()) == [] and layer.dense_bytes == 0
    assert (layer.get_max_length(), layer.get_mask_sizes(7)) == (LIMIT, (7, 0))
    with pytest.raises(ValueError, match="empty"):
        layer.dense()
    with pytest.raises(NotImplementedError, match=r"layer.dense\(\)"):
        layer.keys  # noqa: B018


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


def masks(columns: int) -> dict[str, Tensor | None]:
    """By column; each row of queries sees the first of them, even where few are stored."""
    shown = torch.rand(ROWS, 1, 1, columns) < 0.6
    shown[..., 0] = True
    additive = torch.randn(ROWS, 4, 1, columns).masked_fill(~shown, -torch.inf)
    return {
        "none": None,
        "bool": shown,
        "additive": additive,
        "lowest": torch.zeros(ROWS, 1, 1, columns).masked_fill(~shown, torch.finfo(torch.float32).min),
        "one row": shown[:1],
        "fewer dimensions": shown[0, 0],
        "one for all columns": torch.ones(ROWS, 1, 1, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("mask", masks(1))
@pytest.mark.parametrize("sizes", [(1,), (4,), (30, 1, 1, 1), (86, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("format", ["identity", "turboquant_3bit_nc"])
def test_attention_over_slots_equals_that_over_tokens(format, sizes, mask):
    layer = filled(*sizes, format=format)
    layer.commit()
    given = masks(LIMIT)[mask]
    query = torch.randn(ROWS, 4, 1, DIM)
    attention_inputs, seen = layer.storage.attention_inputs(), layer.get_seq_length()
    options = {"scaling": 0.3, "softcap": 2.0, "sinks": torch.randn(4)} if mask in ("none", "additive") else {}
    expected = attend(query, attention_inputs, given if given is None or given.shape[-1] == 1 else given[..., :seen], **options)
    assert_close(attend_pages(query, layer.storage.inputs, given, **options)[0], expected, rounding(DIM, LIMIT))


def test_what_lies_in_unused_slots_counts_for_nothing():
    """Codes that were cropped, which may be of anything finite."""
    layer = filled(60, 1, 1, format="int8")
    layer.crop(-45)
    layer.storage.tokens.pages.planes[0]["codes"][:, :, layer.storage.tokens.length :] = 127
    query = torch.randn(ROWS, 4, 1, DIM)
    expected = attend(query, layer.storage.attention_inputs())
    assert_close(attend_pages(query, layer.storage.inputs)[0], expected, rounding(DIM, LIMIT))
