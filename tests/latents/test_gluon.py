"""The kernel for Hopper, on a GPU: its tiles need latents of 512 channels."""

from __future__ import annotations

import pytest
import torch

from qkvcache.kernels.attend.launches import architecture
from qkvcache.kernels.host import dispatch
from qkvcache.kernels.segments import layout_of
from qkvcache.latents.dispatch import attend_latents as dispatched
from qkvcache.latents.reference import attend_latents
from tests.latents.test_kernel import DEVICE, HALF, assert_near, dense, layer, queries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(architecture(DEVICE)[0] // 10 != 9, reason="needs a Hopper GPU"),
]
FORMATS = ("identity", "int8", "fp8", "turboquant_k8v4", "int4_vllm", "turboquant_4bit_nc", "hadaquant_k2v2")
RANK, ROPE = 512, 64


@pytest.fixture
def gluon(monkeypatch):
    """The kernels that run."""
    ran, module = [], dispatch.module(".latents.launches")
    run = module.attend_latent_pages

    def watched(query, inputs, *args, **options):
        ran.append(module.on_hopper(90, tuple(map(layout_of, inputs.pages.codecs)), (RANK, ROPE)))
        return run(query, inputs, *args, **options)

    monkeypatch.setattr(module, "attend_latent_pages", watched)
    yield
    assert all(ran) and ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "count", "tokens"), [(16, 1, 700), (128, 1, 700), (40, 3, 140), (5, 2, 75), (128, 2, 9)])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, heads, count, tokens, dtype, gluon):
    held = layer(format, tokens, rank=RANK, rope=ROPE, dtype=dtype)
    query = queries(held, heads, count)
    got = dispatched(query, held.storage.attention_inputs(), scaling=0.05, causal=True)
    assert_near(got, dense(held, query, causal=True, scaling=0.05), HALF)


@pytest.mark.parametrize("options", [{}, {"max_length": 800}], ids=["growing", "preallocated"])
@pytest.mark.parametrize("format", FORMATS)
def test_padding(format, options, gluon):
    held = layer(format, 600, rank=RANK, rope=ROPE, **options)
    query, mask = queries(held, 20), torch.ones(2, 1, 1, 600, dtype=torch.bool, device=DEVICE)
    mask[1, ..., :277] = False
    shown = torch.nn.functional.pad(mask, (0, held.storage.columns - 600)) if options else mask
    got = dispatched(query, held.storage.attention_inputs(), shown, scaling=0.05)
    assert_near(got, dense(held, query, mask, scaling=0.05), HALF)


@pytest.mark.parametrize("options", [{}, {"max_length": 600}], ids=["growing", "preallocated"])
@pytest.mark.parametrize(("format", "count"), [("identity", 2), ("int8", 1), ("turboquant_4bit_nc", 3), ("hadaquant_k2v2", 2)])
def test_chosen_tokens(format, count, options, gluon):
    """Each query of each row reads others, and a query none that are quantized."""
    held = layer(format, 500 - count, rank=RANK, rope=ROPE, **options)
    query, random = queries(held, 128, count), torch.rand(2, 1, count, 500, device=DEVICE)
    mask = random < random.kthvalue(150, keepdim=True).values
    mask[1, :, 0, 3:490] = False
    mask[..., -1] = True
    shown = torch.nn.functional.pad(mask, (0, held.storage.columns - 500)) if options else mask
    new = [torch.randn(2, 1, count, dim, device=DEVICE).half() for dim in (RANK, ROPE)]
    inputs = held.update(*new)[0].attention_inputs
    got = dispatched(query, inputs, shown, scaling=0.05, chosen=151)
    assert_near(got, attend_latents(query, inputs, mask, scaling=0.05).float(), HALF)


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_sums_of_many_tokens_lose_no_bits(format, gluon):
    """Outputs are small beside what was added up, since random latents cancel."""
    held = layer(format, 30_000, batch=1, rank=RANK, rope=ROPE, dtype=torch.bfloat16)
    query = queries(held, 128)
    got = dispatched(query, held.storage.attention_inputs(), scaling=0.02)
    assert_near(got, dense(held, query, scaling=0.02), HALF)
