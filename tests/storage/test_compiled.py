"""A storage that grows under compiled steps: pages join between them, and nothing is compiled anew but at powers of two."""

import copy

import pytest
import torch

from qkvcache.kernels import attend
from qkvcache.kernels import step as step_on_device
from qkvcache.kernels.host.handles import ORDER
from qkvcache.kernels.paged_inputs import ROOM
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import FORMATS
from tests.reference import assert_close
from tests.seeds import SEED
from tests.updates import DIM, compiled_steps, new

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels read tensors of the CPU: needs the interpreter")


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    yield from compiled_steps()


def grown(tokens: int, **options) -> CompressedLayer:
    layer = CompressedLayer(FORMATS["int8"], 2, 6, **options)
    layer.update(*new(tokens, rows=1))
    layer.update(*new(1, rows=1))
    return layer


def addresses(layer: CompressedLayer) -> list[int]:
    """Returns the addresses of all tensors that compiled code reads."""
    inputs = layer.storage.inputs
    return [x.data_ptr() for x in (inputs.handle, *inputs.pages.compiled.tensors, *inputs.sinks, *inputs.ring, inputs.rows, inputs.control)]


def test_pages_join_between_compiled_steps(compiled):
    step, graphs = compiled
    torch.manual_seed(SEED)
    layer = grown(68, compile=True)
    torch.manual_seed(SEED)
    plain = grown(68, max_length=200)
    query = torch.randn(1, 4, 1, DIM)
    fixed = addresses(layer)
    for seen in range(69, 80):
        assert layer.get_mask_sizes(1) == (128, 0)  # which makes room
        x = new(1, rows=1)
        out = step(layer, x, query)
        plain.update(*x)
        assert_close(out, attend(query, plain.storage.attention_inputs()), 2e-3)
        assert len(layer.storage.tokens.pool.slabs) == 1 + (seen + 1 - 9 > 64)
    assert len(graphs) == 1
    assert addresses(layer) == fixed
    assert layer.storage.counts_stale and layer.get_seq_length() == 80
    assert layer.storage.tokens.length == plain.storage.tokens.length == 71
    for mine, theirs in zip(layer.dense(), plain.dense(), strict=True):
        assert torch.equal(mine, theirs)
    twin = copy.deepcopy(layer)
    layer.crop(-5), twin.crop(-5)
    x = new(1, rows=1)
    outs = []
    for held in (layer, twin):  # one graph serves any of them
        held.reserve(1)
        outs.append(step(held, x, query))
    assert torch.equal(*outs) and len(graphs) == 1


def test_nothing_is_compiled_anew_but_at_powers_of_two(compiled):
    step, graphs = compiled
    layer = grown(20, compile=True)
    found, query = [], torch.randn(1, 4, 1, DIM)
    for columns in (64, 64, 128, 128, 256, 512):
        layer.reserve(columns - layer.storage.seq_length)
        assert layer.storage.columns == columns
        assert step(layer, new(1, rows=1), query).isfinite().all()
        layer.get_seq_length()
        found.append(len(graphs))
    assert found[0] == found[1] and found[2] == found[3] and found[-1] <= 4
    assert layer.get_seq_length() == 27


def test_tokens_without_room_are_dropped_and_then_said(compiled):
    step, _ = compiled
    layer = grown(60, compile=True)
    room = int(layer.storage.control[ROOM])
    query = torch.randn(1, 4, 1, DIM)
    for _ in range(room - 61 + 2):
        layer.storage.record_compiled_step(1)
        step_on_device(layer.storage.inputs, new(1, rows=1))
    with pytest.raises(ValueError, match="2 tokens came when the cache was full: masks must be made outside of compiled code"):
        layer.get_seq_length()
    layer.reset()
    layer.update(*new(9, rows=1))
    assert step(layer, new(1, rows=1), query).isfinite().all()


def test_torch_operations_say_what_they_cannot(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    layer = grown(20, compile=True)
    x = new(1, rows=1)
    with pytest.raises(NotImplementedError, match="pass max_length"):
        torch.ops.qkvcache.step(layer.storage.inputs.handle, ORDER[x[0].device], *x)
    layer.update(*new(1, rows=1))  # uncompiled steps count on the host
    assert layer.get_seq_length() == 22
