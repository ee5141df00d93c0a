"""A format of the user's own, whose buffers have names that no kernel knows, works in every kind of cache."""

from dataclasses import dataclass

import pytest
import torch
from matrix import model
from reference import assert_close, prompt, run
from torch import Tensor

from qkvcache import CompressedCache, plan, policies
from qkvcache.formats import Buffer, Codec, Codes, Format, Levels


@dataclass(frozen=True)
class Halves(Codec):
    """Channels in fp16, in two planes."""

    def buffers(self, head_dim: int) -> tuple[Buffer, ...]:
        return Buffer("left", torch.float16, head_dim // 2), Buffer("right", torch.float16, head_dim // 2)

    def encode(self, x: Tensor, once: Codes) -> Codes:
        left, right = x.half().chunk(2, dim=-1)
        return {"left": left, "right": right}

    def unpack(self, codes: Codes, head_dim: int) -> Levels:
        return Levels(torch.cat([codes["left"], codes["right"]], dim=-1).float())


@dataclass(frozen=True)
class Own(Format):
    name = "own"

    def codecs(self) -> tuple[Codec, Codec]:
        return Halves(), Halves()


@pytest.mark.parametrize(
    "options",
    [{}, {"max_length": 200}, {"policy": policies.KeyDiff(budget=24)}, {"policy": policies.KeyDiff(budget=24), "max_length": 200}],
)
def test_a_format_of_ones_own(options):
    network = model("llama")
    bare = {"num_sink_tokens": 0, "residual_length": 0} | options
    own, exact = (CompressedCache(network.config, format=format, **bare) for format in (Own(), "identity"))
    logits = [torch.stack(run(network, cache, prompt(1, 90), max_new_tokens=4, output_logits=True, return_dict_in_generate=True).logits)
              for cache in (own, exact)]  # fmt: skip
    assert_close(*logits, 1e-2)
    assert not torch.equal(*logits) and own.nbytes < exact.nbytes


def test_a_plan_of_it():
    assert plan(model("llama").config, format=Own(), context=500).request.total > 0
