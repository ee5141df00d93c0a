"""Attention over latents: the reference by segments and by pages, and the fused kernel against it in Triton's interpreter."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from qkvcache.formats import Int4
from qkvcache.formats.int8 import SymmetricInt8
from qkvcache.kernels.host import dispatch
from qkvcache.kernels.segments import Packed
from qkvcache.latents import dispatch as latents_dispatch
from qkvcache.latents.dispatch import attend_latents as dispatched
from qkvcache.latents.layer import LatentLayer
from qkvcache.latents.reference import attend_latent_pages, attend_latents
from tests.matrix import FORMATS, slowly
from tests.seeds import SEED
from tests.softmax import softmax_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan and infinity, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANK, ROPE = 64, 32
HALF = 6e-3 if DEVICE.type == "cpu" else 1.2e-2
"""Error of the kernel in fp16, which the interpreter sums in fp32."""
QUICK = ("int8", "turboquant_4bit_nc", "int4", "nvfp4", "hadaquant_k3v3")


def layer(format, tokens, *, batch=2, rank=RANK, rope=ROPE, dtype=torch.float16, **options) -> LatentLayer:
    """A layer with `tokens` latents, given as a prompt and step by step."""
    torch.manual_seed(SEED)
    found = LatentLayer(FORMATS[format], **{"num_sink_tokens": 3, "residual_length": 6} | options, latents=(rank, rope))
    x = [torch.randn(batch, 1, tokens, dim, device=DEVICE).to(dtype) for dim in (rank, rope)]
    begin = max(tokens - 5, 1)
    found.update(*(side[:, :, :begin] for side in x))
    for at in range(begin, tokens):
        found.update(*(side[:, :, at : at + 1] for side in x))
    return found


def queries(layer, heads, count=1):
    sides = layer.storage.residual
    return torch.randn(sides[0].shape[0], heads, count, sum(x.shape[3] for x in sides), device=DEVICE).to(sides[0].dtype)


def dense(layer, query, mask=None, causal=False, scaling=0.2):
    latents, rope = layer.dense()
    return softmax_attention(query, torch.cat([latents, rope], dim=-1), latents, mask, causal=causal, scaling=scaling)


def assert_near(got, expected, limit):
    error = (got.float() - expected).abs().max() / expected.abs().max()
    assert got.isfinite().all()
    assert error < limit, f"{error:.2e}"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    called = []
    supports = dispatch.module(".latents.launches").supports
    module = dispatch.module(".latents.launches")
    monkeypatch.setattr(module, "supports", lambda *args: called.append(supports(*args)) or called[-1])
    yield called
    assert all(called) and called


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [2**25, 300], ids=["at once", "in blocks of queries"])
@pytest.mark.parametrize("format", ["identity", *QUICK])
def test_the_reference(format, block, causal, monkeypatch):
    monkeypatch.setattr(sys.modules[attend_latents.__module__], "BLOCK", block)
    held = layer(format, 150, dtype=torch.float32, max_length=160)
    query = queries(held, 4, 5)
    mask = torch.rand(2, 1, 5, 150, device=DEVICE) < 0.7
    mask[..., -5:] = True
    got = attend_latents(query, held.storage.attention_inputs(), mask, scaling=0.2, causal=causal)
    assert_near(got, dense(held, query, mask, causal), 1e-5)
    paged = attend_latent_pages(query, held.storage.inputs, mask, scaling=0.2, causal=causal)
    assert_near(paged, dense(held, query, mask, causal), 1e-5)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("format", QUICK)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch gathers on a CPU alone")
def test_tokens_that_few_queries_see_are_gathered(format, count, additive, monkeypatch):
    """Each query sees others; those of all blocks are in one, and no others are unpacked."""
    monkeypatch.setattr("qkvcache.storage.storage.block_of", lambda like: 40 if like.shape[3] == RANK else 56)
    held = layer(format, 250, dtype=torch.float32)
    query, random = queries(held, 4, count), torch.rand(2, 1, count, 250, device=DEVICE)
    mask = random < random.kthvalue(20, keepdim=True).values
    mask[..., -1] = True
    given = torch.zeros_like(random).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    unpacked, levels = [], Packed.levels
    monkeypatch.setattr(Packed, "levels", lambda self: unpacked.append(self.tokens) or levels(self))
    got = attend_latents(query, held.storage.attention_inputs(), given, scaling=0.2)
    assert max(unpacked) <= 20 and len(unpacked) == 2
    assert_near(got, dense(held, query, mask), 1e-5)


@pytest.mark.parametrize("format", slowly(list(FORMATS), ("identity", *QUICK)))
def test_every_format(format, kernels):
    held = layer(format, 200)
    query = queries(held, 5)
    assert_near(dispatched(query, held.storage.attention_inputs(), scaling=0.2), dense(held, query), HALF)


@pytest.mark.parametrize("options", [{"max_length": 300}, {"compile": True}], ids=["preallocated", "growing"])
def test_counts_on_the_device(options, kernels):
    held = layer("turboquant_4bit_nc", 150, **options)
    query = queries(held, 5)
    got = latents_dispatch.attend_latent_pages(query, held.storage.inputs, scaling=0.2)
    assert_near(got, dense(held, query), HALF)


@pytest.mark.parametrize(
    ("tokens", "heads", "count", "rank", "rope"),
    [(9, 4, 1, 64, 32), (10, 3, 2, 128, 16), (64 + 9, 16, 1, 64, 32), (140, 17, 3, 64, 16), *slowly([(700, 40, 2, 512, 64)], [])],
)
def test_shapes(tokens, heads, count, rank, rope, kernels):
    """Odd counts of tokens and of rows, several splits and blocks, causal queries."""
    held = layer("int8", tokens, rank=rank, rope=rope)
    query = queries(held, heads, count)
    got = dispatched(query, held.storage.attention_inputs(), scaling=0.2, causal=True)
    assert_near(got, dense(held, query, causal=True), HALF)


@pytest.mark.parametrize("options", [{}, {"max_length": 300}], ids=["growing", "max_length"])
@pytest.mark.parametrize(
    ("format", "count", "most"), [("int8", 1, 9), ("identity", 2, 40), ("turboquant_4bit_nc", 3, 70), ("nvfp4", 2, 40), ("int4", 1, 70)]
)
def test_chosen_tokens_are_gathered_in_the_kernel(format, count, most, options, kernels, monkeypatch):
    """Each query of each row reads others, some of them exact, and a query none that are quantized; two queries a launch."""
    module = dispatch.module(".latents.launches")
    monkeypatch.setattr(module, "MOST_PARTIAL", 2 * 2 * 4 * 2 * 16 * RANK)
    monkeypatch.setattr(module, "CHOSEN_FROM", 64)  # several programs list them
    read = []
    monkeypatch.setattr(module, "chosen_tokens", lambda *given, of=module.chosen_tokens: read.append(of(*given)) or read[-1])
    held = layer(format, 190 - count, **options)
    query, random = queries(held, 5, count), torch.rand(2, 1, count, 190, device=DEVICE)
    mask = random < random.kthvalue(most, keepdim=True).values
    mask[1, :, 0, 3:180] = False
    mask[..., -1] = True
    shown = torch.nn.functional.pad(mask, (0, held.storage.columns - 190)) if options else mask
    new = [torch.randn(2, 1, count, dim, device=DEVICE).half() for dim in (RANK, ROPE)]
    inputs = held.update(*new)[0].attention_inputs
    got = dispatched(query, inputs, shown, scaling=0.2, chosen=most + 1)
    assert_near(got, attend_latents(query, inputs, mask, scaling=0.2).float(), HALF)
    assert [(*x.shape,) for x, _, _ in read] == [(2 * n, most + 1) for n in ([2] * (count // 2) + [1] * (count % 2))]


def test_padding(kernels):
    held = layer("turboquant_4bit_nc", 190)
    query, mask = queries(held, 5), torch.ones(2, 1, 1, 190, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :77] = False
    assert_near(dispatched(query, held.storage.attention_inputs(), mask, scaling=0.2), dense(held, query, mask), HALF)


def test_only_rotated_keys_have_another_codec():
    """A model may have layers of both kinds."""
    layer = LatentLayer(Int4(), latents=(RANK, ROPE))
    assert layer.codecs((RANK, ROPE)) == (Int4().key, SymmetricInt8())
    assert layer.codecs((RANK, RANK)) == Int4().codecs()


def test_what_no_kernel_serves_is_told_once(monkeypatch):
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    dispatch._warn_once.cache_clear()
    held = layer("int8", 40)
    query, mask = queries(held, 2, 2), torch.rand(2, 1, 2, 40, device=DEVICE) < 0.9
    mask[..., 0] = True
    with pytest.warns(UserWarning, match="no fused attention"):
        got = dispatched(query, held.storage.attention_inputs(), mask, scaling=0.2)
    assert_near(got, dense(held, query, mask), HALF)


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_a_preallocated_layer_makes_constants_beforehand(format, kernels):
    """What is cached while a graph is captured would be in memory that the graph uses again."""
    module = dispatch.module(".latents.launches")
    constants = module._order, module._order_of_pieces
    for cached in constants:
        cached.cache_clear()
    held = layer(format, 40, max_length=64)
    misses = [cached.cache_info().misses for cached in constants]
    latents_dispatch.attend_latent_pages(queries(held, 4), held.storage.inputs, scaling=0.2)
    assert [cached.cache_info().misses for cached in constants] == misses


@pytest.mark.parametrize("chosen", [None, 20])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("format", ["identity", "int8", "turboquant_4bit_nc", "nvfp4"])
def test_a_launch_on_hopper_has_all_arguments(format, heads, chosen, monkeypatch):
    """Of the kernel in Gluon, which no interpreter runs, where it serves."""
    module, launched = dispatch.module(".latents.launches"), []

    def call(self, grid, *tensors, held=()):
        launched.append((self.kernel, {*self.kernel.arg_names} - self._named(tensors, held).keys() - self.fixed.keys()))

    monkeypatch.setattr(module, "architecture", lambda device: (90, 132))
    monkeypatch.setattr("qkvcache.kernels.host.launch._callable", lambda kernel: False)
    monkeypatch.setattr(module.Launcher, "__call__", call)
    held = layer(format, 250, rank=512, rope=64, max_length=300)
    mask = None if chosen is None else torch.arange(held.storage.columns, device=DEVICE)[None, None, None] < chosen
    module.attend_latent_pages(queries(held, heads), held.storage.inputs, mask, scaling=0.2, chosen=chosen)
    gluon = module.gluon_kernel()
    assert [kernel is gluon for kernel, _ in launched].count(True) == (format != "nvfp4")
    assert not any(missing for _, missing in launched)


@pytest.mark.parametrize(
    ("release", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0.0", False)]
)
def test_another_triton_takes_the_other_kernel(release, known, monkeypatch):
    module = dispatch.module(".latents.launches")
    monkeypatch.setattr("triton.__version__", release)
    module.knows_gluon.cache_clear()
    layouts = tuple(codec.packed_layout for codec in LatentLayer(FORMATS["int8"], latents=(512, 64)).codecs((512, 64)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [module.on_hopper(arch, layouts, (512, 64)) for arch in (90, 90, 80, 100)] == [known, known, False, False]
    assert len(told) == (not known)
    module.knows_gluon.cache_clear()
