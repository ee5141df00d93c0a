"""Operators and dispatch: what torch.compile sees, and what `QKVCACHE_KERNELS` forces."""

import copy
import weakref

import pytest
import torch

from qkvcache.formats import resolve
from qkvcache.kernels import attend, attend_on_codes, give_handle, on_triton
from qkvcache.kernels.host import dispatch, handles
from qkvcache.kernels.host.handles import ORDER, inputs_of
from qkvcache.layers.compressed import CompressedLayer
from tests.seeds import SEED

from .attention_inputs import assert_fake

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def on_kernels(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")


def attention_inputs(format: str = "turboquant_4bit_nc", step: int = 3):
    """What attention reads in a step of so many tokens: of one, storage that counts on the device."""
    layer = CompressedLayer(resolve(format))
    for tokens in (201 - step, step):
        keys, _ = layer.update(*torch.randn(2, 2, 2, tokens, 64, device=DEVICE, dtype=torch.float16))
    give_handle(keys.attention_inputs.paged)
    return keys.attention_inputs


def compiled(function, *args, **kwargs):
    """What `function` returns when compiled, and the operations of its graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch.compiler.reset()
    with torch.compiler.set_stance("default"):
        out = torch.compile(function, fullgraph=True, backend=backend)(*args, **kwargs)
    return out, [[target for target in graph if "getitem" not in target] for graph in graphs]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_operation_for_the_compiler(masked, step, on_kernels):
    query, held = torch.randn(2, 8, 1, 64, device=DEVICE, dtype=torch.float16), attention_inputs(step=step)
    mask = torch.rand(2, 1, 1, 201, device=DEVICE) > 0.2 if masked else None
    out, operations = compiled(attend_on_codes, query, held, mask)
    assert operations == [["qkvcache.attend"]]
    torch.testing.assert_close(out, attend_on_codes(query, held, mask))
    torch.testing.assert_close(out.float(), attend(query.float(), held, mask), rtol=0, atol=3e-3)


@pytest.mark.slow
def test_the_fake_knows_shapes(on_kernels):
    query, held = torch.randn(2, 8, 3, 64, device=DEVICE, dtype=torch.float16), attention_inputs()
    arguments = (query, held.paged.handle, ORDER[query.device], list(held.value.shape[1:]), None, None, None, None, True)
    assert_fake(torch.ops.qkvcache.attend, arguments)


def test_a_handle_stands_for_tensors_at_their_addresses(on_kernels, monkeypatch):
    """It is kept if compiled code was given it: a CUDA graph may know its address."""
    for name in ("_HANDLES", "_USED"):  # earlier tests had tensors at the same addresses
        monkeypatch.setattr(handles, name, type(getattr(handles, name))())
    held = attention_inputs().paged
    same, moved = held.anew(), held.anew(ring=tuple(x.clone() for x in held.ring))
    give_handle(same), give_handle(moved)
    assert same.handle is held.handle and moved.handle is not held.handle
    assert inputs_of(moved.handle).ring is moved.ring
    unused, used = weakref.ref(held.handle), weakref.ref(moved.handle)
    del held, same, moved
    assert unused() is None and used() is not None
    with pytest.raises(RuntimeError, match="whose cache is gone"):
        inputs_of(used())


def test_what_the_environment_forces(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("QKVCACHE_KERNELS", raising=False)
    assert not on_triton(cpu) and on_triton(gpu)
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    assert not on_triton(gpu)
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)
    assert on_triton(cpu)
    monkeypatch.setattr(dispatch, "_INTERPRETED", False)
    assert on_triton(gpu)
    with pytest.raises(ValueError, match="QKVCACHE_KERNELS='triton' for tensors of the CPU: set TRITON_INTERPRET=1"):
        on_triton(cpu)
    monkeypatch.setenv("QKVCACHE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="QKVCACHE_KERNELS='cuda': expected 'torch' or 'triton'"):
        on_triton(gpu)


def test_the_whole_cache_on_kernels(on_kernels):
    """Prefill, steps, a chunk and a crop through encode, attend and decode: as torch operations do it."""
    torch.manual_seed(SEED + 1)
    steps = [torch.randn(2, 2, 2, tokens, 64, device=DEVICE, dtype=torch.float16) for tokens in (150, 1, 40, 1, 70, 1)]
    layer = CompressedLayer(resolve("turboquant_k3v4_nc"), num_sink_tokens=2, residual_length=20)
    for step in steps:
        handle, _ = layer.update(*step)
    query = torch.randn(2, 4, 1, 64, device=DEVICE, dtype=torch.float16)
    expected = attend(query.float(), handle.attention_inputs)
    torch.testing.assert_close(attend_on_codes(query, handle.attention_inputs).float(), expected, rtol=0, atol=3e-3)
    dense = handle.dense()
    torch.testing.assert_close(dense, handle.attention_inputs.key.dense(), rtol=0, atol=4e-3)
    layer.crop(-30)
    assert layer.get_seq_length() == 233
    torch.testing.assert_close(layer.dense()[0], dense[:, :, :233])


def test_a_copy_reads_its_own_pages(on_kernels):
    """Which lie elsewhere, and as far from each other as it happens."""
    layer = CompressedLayer(resolve("int8"), num_sink_tokens=0, residual_length=0)
    query = torch.randn(1, 2, 1, 64, device=DEVICE)
    for tokens in (70, 70, 1):
        layer.update(*torch.randn(2, 1, 1, tokens, 64, device=DEVICE))
    other = copy.deepcopy(layer)
    assert len(other.storage.tokens.pool.slabs) > 1
    for held in (layer, other):
        handle, _ = held.update(*torch.randn(2, 1, 1, 1, 64, device=DEVICE))
        torch.testing.assert_close(
            attend_on_codes(query, handle.attention_inputs), attend(query, handle.attention_inputs), rtol=0, atol=3e-3
        )
