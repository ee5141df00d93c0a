"""A compressed layer, which grows or is preallocated: what `update` returns, moving rows, refusals, memory."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from qkvcache.attention import CompressedKV
from qkvcache.attention.compressed_kv import warn_once
from qkvcache.kernels import attend, segments
from qkvcache.layers.compressed import CompressedLayer
from tests.allocations import Allocations, reachable, storages
from tests.matrix import COVER, FORMATS
from tests.tolerance import same_decoded
from tests.updates import BAD_UPDATES, DIM, HEADS, ROWS, VALUE_DIM, new

LIMIT = 90
every_kind = pytest.mark.parametrize("limit", [None, LIMIT], ids=["growing", "preallocated"])


def filled(*sizes: int, format: str = "turboquant_4bit_nc", first: int = 2, recent: int = 8, limit: int | None = None) -> CompressedLayer:
    layer = CompressedLayer(FORMATS[format], first, recent, limit)
    for size in sizes or (50, 1, 1):
        layer.update(*new(size))
    return layer


def same(a, b) -> bool:
    a, b = list(a), list(b)
    return len(a) == len(b) and all(map(torch.equal, a, b))


def addresses(layer: CompressedLayer) -> list[int]:
    return [x.data_ptr() for _, x in layer.tensors()]


def same_tokens(layer: CompressedLayer, expected: tuple[Tensor, ...]) -> bool:
    """Whether `layer` holds the tokens of `expected`, which were decoded in other blocks."""
    return all(same_decoded(*pair) for pair in zip(layer.dense(), expected, (layer.format.key, layer.format.value), strict=True))


def rows(pair: tuple[Tensor, ...], index: list[int]) -> tuple[Tensor, ...]:
    return tuple(x[index] for x in pair)


def tokens(pair: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :, :count] for x in pair)


def state(layer: CompressedLayer) -> list:
    bytes_held = [
        (role, t.data_ptr(), t.flatten().view(torch.uint8).tolist()) for role, t in layer.tensors()
    ]  # slots in waiting may hold nan
    return [layer.get_seq_length(), layer.is_initialized, bytes_held]


# update


@every_kind
@pytest.mark.parametrize("zones", [(4, 64), (0, 0), (2, 0)])
@pytest.mark.parametrize("format", COVER)
def test_update_returns_the_tensors_and_then_handles(format, zones, limit):
    layer = CompressedLayer(FORMATS[format], *zones, limit)
    given = new(40)
    assert all(got is x for got, x in zip(layer.update(*given), given, strict=True))
    for size in (1, 3, 20):
        before, given = layer.dense(), new(size)
        handles = layer.update(*given)
        assert all(isinstance(handle, CompressedKV) for handle in handles)
        assert handles[0].attention_inputs is handles[1].attention_inputs
        # A step of one token is in the residual before attention, which the oldest leave for it.
        seen = layer.dense() if size == 1 else [torch.cat(pair, dim=2) for pair in zip(before, given, strict=True)]
        for handle, past, x, codec in zip(handles, seen, given, layer.format.codecs(), strict=True):
            assert same_decoded(handle.dense(), past, codec)
            assert torch.equal(handle.dense()[:, :, -size:], x)
    assert layer.get_seq_length() == 64
    with torch.no_grad():
        assert layer.get_mask_sizes(5) == (limit or 69, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_is_in_the_models_dtype(dtype):
    layer = CompressedLayer(FORMATS["turboquant_3bit_nc"], 2, 8)
    layer.update(*new(40, dtype=dtype))
    key, value = layer.update(*new(1, dtype=dtype))
    assert {key.dtype, value.dtype, key.dense().dtype, value.dense().dtype} == {dtype}
    assert [tuple(x.shape) for x in layer.dense()] == [(ROWS, HEADS, 41, DIM), (ROWS, HEADS, 41, VALUE_DIM)]


@every_kind
def test_gradients_reach_the_new_tokens(limit):
    layer, plain = (CompressedLayer(FORMATS["turboquant_4bit_nc"], 2, 8, limit) for _ in range(2))
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
        assert same(tokens(got, held), tokens(past, held))
        weights = [torch.randn_like(side) for side in got]
        sum((side * w).sum() for side, w in zip(got, weights, strict=True)).backward()
        assert same([side.grad for side in graded], [w[:, :, held:] for w in weights])
        assert not any(x.requires_grad for _, x in layer.tensors())
        assert same(layer.dense(), plain.dense())
        before = layer.dense()


def test_the_first_update_keeps_gradients_and_stores_none():
    layer, given = CompressedLayer(FORMATS["int8"], 2, 8), tuple(x.requires_grad_() for x in new(30))
    got = layer.update(*given)
    assert all(x is y for x, y in zip(got, given, strict=True))
    assert not any(t.requires_grad for _, t in layer.tensors())
    with torch.no_grad():
        assert isinstance(layer.update(*given)[0], CompressedKV)


def test_dropped_gradients_are_told_once(recwarn):
    """Not of a fixed prefix, nor after the tokens with gradients were taken back."""
    warn_once.cache_clear()
    layer = filled()
    for _ in range(2):
        layer.update(*(x.requires_grad_() for x in new(3)))
        layer.crop(-3)
    assert not recwarn
    for _ in range(3):
        layer.update(*(x.requires_grad_() for x in new(3)))
    assert ["gradients do not reach the tokens in the cache" in str(x.message) for x in recwarn] == [True]


@every_kind
@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_inference_mode_may_come_and_go(modes, limit):
    layer, plain = (CompressedLayer(FORMATS["turboquant_4bit_nc"], 2, 8, limit) for _ in range(2))
    for i, size in enumerate((40, 1, 20, 1, 1, 3)):
        x = new(size)
        plain.update(*x)
        with modes[i % 2]():
            layer.update(*x)
            layer.reorder_cache(torch.arange(ROWS))
            layer.crop(0)
    assert same(layer.dense(), plain.dense())


# Rows and lengths


@every_kind
@pytest.mark.sums
def test_crop(limit):
    layer = filled(50, 9, limit=limit)
    before, kept = layer.dense(), addresses(layer)
    layer.crop(0)
    assert same(layer.dense(), before)
    length = 59
    for count in (1, 6, 20):  # within the recent zone, into the body
        layer.crop(-count)
        length -= count
        assert layer.get_seq_length() == length and same_tokens(layer, tokens(before, length))
    assert layer.storage.tokens.length == 30  # what was encoded stays encoded: no token is left in the ring
    given = new(3)
    layer.update(*given)
    assert same_tokens(layer, tuple(torch.cat(pair, dim=2) for pair in zip(tokens(before, length), given, strict=True)))
    layer.crop(-34)  # into the first zone
    assert same_tokens(layer, tokens(before, 1))
    layer.crop(-1000)
    assert layer.get_seq_length() == 0 and (limit is None or addresses(layer) == kept)
    assert all(got is x for got, x in zip(layer.update(*given), given, strict=True))


@every_kind
@pytest.mark.parametrize("format", ["fp8_tensor", "int8_asymmetric"])
def test_rows_move_together(format, limit):
    layer = filled(50, 9, format=format, limit=limit)
    before, kept = layer.dense(), addresses(layer)
    layer.reorder_cache(torch.tensor([1, 1, 0]))
    before = rows(before, [1, 1, 0])
    assert same(layer.dense(), before) and (limit is None or addresses(layer) == kept)
    for move, index in (
        (lambda: layer.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda: layer.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        (lambda: layer.batch_repeat_interleave(3), [0, 0, 0, 1, 1, 1]),
        (lambda: layer.batch_select_indices(torch.tensor([True, False, False, True, False, False])), [0, 3]),
    ):
        move()
        before = rows(before, index)
        assert same(layer.dense(), before)
    given = new(30, rows=2)
    handles = layer.update(*given)
    assert same(tuple(handle.dense() for handle in handles), tuple(torch.cat(pair, dim=2) for pair in zip(before, given, strict=True)))


@every_kind
def test_moving_an_empty_layer_is_nothing(limit):
    layer = CompressedLayer(FORMATS["int8"], max_length=limit)
    layer.reorder_cache(torch.tensor([0]))
    layer.batch_repeat_interleave(2)
    layer.offload()
    layer.prefetch()
    layer.crop(-3)
    layer.reset()
    assert layer.get_seq_length() == 0 and list(layer.tensors()) == [] and layer.dense_bytes == 0
    assert layer.get_mask_sizes(7) == (7, 0) and layer.get_max_length() == (limit or -1)
    with pytest.raises(ValueError, match="empty"):
        layer.dense()


@pytest.mark.parametrize("format", COVER)
def test_offload_and_prefetch_move_every_tensor(format):
    layer = filled(format=format)
    before = layer.dense()
    layer.offload()
    assert {t.device.type for _, t in layer.tensors()} == {"cpu"} and same(layer.dense(), before)
    layer.prefetch()
    assert same(layer.dense(), before)
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {t.device.type for _, t in layer.tensors()} == {"meta"}


@pytest.mark.parametrize("options", [{}, {"compile": True}, {"max_length": LIMIT}], ids=["growing", "compiled", "preallocated"])
def test_reset_starts_over(options):
    """With the same storage, unless it grows; and for another batch."""
    layer = CompressedLayer(FORMATS["int8"], 2, 8, **options)
    layer.update(*new(60)), layer.update(*new(1))
    kept = addresses(layer)
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.is_initialized == bool(options)
    assert addresses(layer) == (kept if options else [])
    for given in (new(7), new(4, rows=1, heads=5, dims=(VALUE_DIM, 128), dtype=torch.bfloat16)):
        assert layer.update(*given)[0] is given[0] and same(layer.dense(), given)
        layer.reset()


@every_kind
@pytest.mark.sums
def test_a_copy_lives_its_own_life(limit):
    layer = filled(format="fp8_tensor", limit=limit)
    before, held, twin = layer.dense(), state(layer), copy.deepcopy(layer)
    assert not set(addresses(layer)) & set(addresses(twin))
    assert limit is None or layer.storage.inputs.handle is not twin.storage.inputs.handle
    exact = *twin.storage.sinks, *twin.storage.residual
    assert all(a is b for a, b in zip((*twin.storage.inputs.sinks, *twin.storage.inputs.ring), exact, strict=True))
    twin.update(*new(30))
    twin.crop(-60)
    assert same_tokens(twin, tokens(before, 22))
    twin.reorder_cache(torch.tensor([1, 1, 0])), twin.reset()
    assert state(layer) == held


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.update(*new(200)),
        lambda layer: layer.crop(-40),
        lambda layer: layer.offload(),
        lambda layer: layer.reset(),
        lambda layer: layer.reorder_cache(torch.tensor([2, 1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
    ],
    ids=["update", "crop", "offload", "reset", "reorder", "repeat"],
)
def test_a_handle_outlives_what_happens_to_the_layer(change):
    layer = filled(format="fp8_tensor")
    handles = layer.update(*new(2))
    before = tuple(handle.dense() for handle in handles)
    change(layer)
    assert same(tuple(handle.dense() for handle in handles), before)


# Refusals


@every_kind
@pytest.mark.parametrize("bad", BAD_UPDATES)
def test_a_refused_update_changes_nothing(bad, limit):
    layer = filled(limit=limit)
    before = state(layer)
    with pytest.raises(ValueError, match=r"\[3, 2, 52, \d+\].*reset\(\)|differ in batch"):
        layer.update(*BAD_UPDATES[bad])
    assert state(layer) == before
    layer.update(*new(1))


@every_kind
@pytest.mark.parametrize("dims", [(65, 64), (64, 65)])
def test_a_refused_head_dim_leaves_the_layer_empty(dims, limit):
    layer = CompressedLayer(FORMATS["int4"], max_length=limit)
    with pytest.raises(ValueError, match="cannot hold (keys|values) of head_dim 65"):
        layer.update(*new(3, dims=dims))
    assert not layer.is_initialized and layer.get_seq_length() == 0 and list(layer.tensors()) == []
    layer.update(*new(3))


@every_kind
def test_a_refused_crop_changes_nothing(limit):
    layer = filled(limit=limit)
    before = state(layer)
    with pytest.raises(ValueError, match=r"crop\(3\): pass a negative number"):
        layer.crop(3)
    assert state(layer) == before


def test_dense_keys_and_values_are_refused():
    for layer in (filled(), CompressedLayer(FORMATS["int8"])):
        for name in ("keys", "values"):
            with pytest.raises(NotImplementedError, match="EncoderDecoderCache.*layer.dense()"):
                getattr(layer, name)


# Memory


@pytest.mark.parametrize("format", COVER)
def test_tensors_are_all_that_is_held(format):
    layer = filled(format=format)
    for change in (lambda: None, lambda: layer.crop(-45), lambda: layer.update(*new(100)), lambda: layer.update(*new(1))):
        change()
        held, listed = storages(reachable(layer)), [t for _, t in layer.tensors()]  # views are kept from step to step
        assert held.keys() == storages(listed).keys()
    assert sum(held.values()) == sum(t.nbytes for t in listed)
    per_token = FORMATS[format].bytes_per_token(DIM, HEADS, VALUE_DIM)
    codes = sum(t.nbytes for role, t in layer.tensors() if role in ("codes", "scales"))
    if format != "identity":  # those bytes are counted for bf16
        statistics = sum(t.nbytes for side in layer.storage.tokens.statistics for t in side.values())
        assert codes == ROWS * per_token * layer.storage.tokens.capacity + statistics


@pytest.mark.parametrize("format", ["identity", "int8_asymmetric", "int4", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_a_step_decodes_no_more_than_a_block(format, monkeypatch):
    monkeypatch.setattr(segments, "BLOCK_ELEMENTS", 2**17)
    layer = CompressedLayer(FORMATS[format])
    layer.update(*new(8192, rows=1, dtype=torch.bfloat16))
    key, _ = layer.update(*new(1, rows=1, dtype=torch.bfloat16))
    query = torch.randn(1, HEADS, 1, DIM).bfloat16()
    attend(query, key.attention_inputs)  # makes the tables that are made once
    with Allocations() as step:
        attend(query, key.attention_inputs)
    block = segments.BLOCK_ELEMENTS * 4
    assert block / 2 <= step.largest <= block
    assert step.peak <= 4 * block < 8192 * HEADS * (DIM + VALUE_DIM) * 4 / 2


def test_an_update_encodes_no_more_than_a_block_at_a_time(monkeypatch):
    monkeypatch.setattr(segments, "BLOCK_ELEMENTS", 2**17)
    layer, given = CompressedLayer(FORMATS["turboquant_4bit_nc"]), new(8192, rows=1, dtype=torch.bfloat16)
    with Allocations() as step:
        layer.update(*given)
    assert step.largest <= segments.BLOCK_ELEMENTS * 8  # norms in float64


# tokens on their way from host memory


class Arrival:
    """Stands in for the event at the end of copies to a GPU."""

    def __init__(self):
        self.waits = 0

    def wait(self, stream: None) -> None:
        self.waits += 1


@pytest.mark.parametrize(
    "read",
    {
        "update": lambda layer: layer.update(*new(3)),
        "reserve": lambda layer: layer.reserve(100),
        "crop": lambda layer: layer.crop(-5),
        "reorder_cache": lambda layer: layer.reorder_cache(torch.arange(ROWS)),
        "batch_repeat_interleave": lambda layer: layer.batch_repeat_interleave(2),
        "offload": CompressedLayer.offload,
        "tensors": lambda layer: list(layer.tensors()),
        "dense": CompressedLayer.dense,
        "snapshot": lambda layer: pytest.importorskip("qkvcache.prefix.snapshot").snapshot(layer),
        "copy": copy.deepcopy,
        "pickle": pickle.dumps,
    }.items(),
    ids=lambda read: read[0],
)
def test_whoever_reads_tokens_waits_for_them_once(monkeypatch, read):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    layer, arrival = filled(), Arrival()
    layer.arrival = arrival
    for _ in range(2):
        read[1](layer)
        assert arrival.waits == 1 and layer.arrival is None


def test_tokens_that_are_counted_or_dropped_are_not_waited_for():
    layer, arrival = filled(), Arrival()
    layer.arrival = arrival
    assert layer.get_seq_length() and layer.get_mask_sizes(3)
    layer.reset()
    assert not arrival.waits and not layer.get_seq_length()
