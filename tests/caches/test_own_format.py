"""Formats of the user's own in every kind of cache: one that no kernel knows, and one that declares a layout that kernels know."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qkvcache import CompressedCache, plan, policies
from qkvcache.formats import Buffer, Codec, Codes, Format, PackedLayout, QuantizedValues
from qkvcache.kernels import attend_pages, dequantize_pages, quantizes
from qkvcache.kernels.attend.reference import attend_pages as attend_in_torch
from tests.kernels.paged_inputs import build
from tests.matrix import model
from tests.reference import assert_close, count_fused, prompt, run


@dataclass(frozen=True)
class Halves(Codec):
    """Channels in fp16, in two planes."""

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return Buffer("left", torch.float16, head_dim // 2), Buffer("right", torch.float16, head_dim // 2)

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        left, right = x.half().chunk(2, dim=-1)
        return {"left": left, "right": right}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(torch.cat([codes["left"], codes["right"]], dim=-1).float())


@dataclass(frozen=True)
class Own(Format):
    name = "own"

    def codecs(self) -> tuple[Codec, Codec]:
        return Halves(), Halves()


@dataclass(frozen=True)
class Clipped(Codec):
    """INT8 whose scale is that of three standard deviations: codes of a kind that kernels read, chosen by a rule that they do not know."""

    @property
    def packed_layout(self) -> PackedLayout:
        return PackedLayout("int8", "fp16", planes=("bytes", "", "steps"), writable=False)

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return Buffer("bytes", torch.int8, head_dim), Buffer("steps", torch.float16, 1, "scales")

    def quantize(self, x: Tensor, statistics: Codes) -> Codes:
        steps = (3 / 127 * x.float().square().mean(-1, keepdim=True).sqrt()).clamp_min(2**-24).half()
        return {"bytes": (x.float() / steps.float()).round().clamp(-127, 127).to(torch.int8), "steps": steps}

    def unpack(self, codes: Codes, head_dim: int) -> QuantizedValues:
        return QuantizedValues(codes["bytes"].float(), codes["steps"].float())


@dataclass(frozen=True)
class Fast(Format):
    name = "fast"

    def codecs(self) -> tuple[Codec, Codec]:
        return Clipped(), Clipped()


@pytest.mark.parametrize("own", [Own(), Fast()], ids=lambda own: own.name)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_length": 200}, {"policy": policies.KeyDiff(budget=24)}, {"policy": policies.KeyDiff(budget=24), "max_length": 200}],
)
def test_a_format_of_ones_own(own, options):
    network = model("llama")
    bare = {"num_sink_tokens": 0, "residual_length": 0} | options
    cache, exact = (CompressedCache(network.config, format=format, **bare) for format in (own, "identity"))
    logits = [torch.stack(run(network, cache, prompt(1, 90), max_new_tokens=4, output_logits=True, return_dict_in_generate=True).logits)
              for cache in (cache, exact)]  # fmt: skip
    assert_close(*logits, 1e-2 if own.name == "own" else 0.2)
    assert not torch.equal(*logits) and cache.nbytes < exact.nbytes


def test_a_plan_of_it():
    assert plan(model("llama").config, format=Own(), context=500).request.total > 0


def test_kernels_for_it(monkeypatch):
    """A declaration brings attention and dequantizing on codes; torch quantizes, since the rule is its own."""
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = tuple(torch.randn(1, 2, 100, 64, device=device).half() for _ in range(2))
    inputs = build(Fast(), [100], sinks=0, ring=0, device=device)
    x = tuple(torch.randn(1, 2, 100, 64, device=device).half() for _ in range(2))
    assert not quantizes(inputs.pages.codecs, x)
    query, calls = torch.randn(1, 4, 1, 64, device=device).half(), count_fused(monkeypatch)
    out, lse = attend_pages(query, inputs)
    wanted, wanted_lse = attend_in_torch(query, inputs)
    assert len(calls) == 1
    torch.testing.assert_close(out, wanted, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    dense = tuple(torch.empty_like(side) for side in x)
    dequantize_pages(inputs.pages, dense)
    for side, codec, codes in zip(dense, inputs.pages.codecs, (inputs.pages.gather(i, 100)[0] for i in (0, 1)), strict=True):
        assert torch.equal(side, codec.dequantize(codes, 64, torch.float16))
