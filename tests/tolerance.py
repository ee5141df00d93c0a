"""How far apart two computations of the same numbers may be. All tolerances of tests that compare sums come from here.

Bit equality belongs to codes, stored bytes and copies of one tensor. What is summed twice (in another batch or shape, on other threads,
with other vector instructions) is rounded in another order. A sum of `n` terms is rounded `n` times, by at most eps / 2 of what it has
reached; the roundings add up like a random walk, to about eps * sqrt(n) / 2 of the largest results. Sums that follow each other count as
one long sum. The largest difference among the thousands of entries of a test was up to 1.4 * eps * sqrt(n) on the instruction sets that
were tried, and `SPREAD` is about twice that. `test_tolerance.py` checks both ends: rounding comes to more than a tenth of the bounds, and
a single wrong code exceeds them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qkvcache.formats import Codec
from tests.matrix import FORMATS

SPREAD = 3
TURNED = 5e-3
"""Of the largest logit, where both sides quantize on their own to 8 bits: a value that lies between two codes may turn to either, which
moves the logits of the tiny models by up to 7e-4. `turned` is for any format."""


def rounding(*lengths: int, dtype: torch.dtype = torch.float32) -> float:
    """For sums of `lengths` terms, one after the other, relative to the largest result."""
    return SPREAD * torch.finfo(dtype).eps * math.sqrt(sum(lengths))


def turned(format: str) -> float:
    """`TURNED` for a format by name: codes of fewer bits are further apart. A turned one moves logits by up to 8.4e-3 in 4, 5.4e-3 in 3."""
    return 2e-2 if any(codec.packed_layout and codec.packed_layout.packed for codec in FORMATS[format].codecs()) else TURNED


def of_model(network: PreTrainedModel, tokens: int = 64) -> float:
    """For the logits of `network` over up to `tokens` tokens, relative to the largest one: the sums of all its linear layers, of its scores
    and of what these weigh.

    Linear attention has one more source: in a chunk, a decay is exp(a - b) with a and b sums of log decays over the tokens before. These
    sums are rounded to eps / 2 of what they reach, which is the relative error of the decay.
    """
    linear = [layer.in_features for layer in network.modules() if isinstance(layer, nn.Linear)]
    linear += [layer.nx for layer in network.modules() if isinstance(layer, Conv1D)]
    attention = [getattr(m, "head_dim", 0) + tokens for m in network.modules() if type(m).__name__.endswith("Attention")]
    states = [m for m in network.modules() if hasattr(m, "A_log")]
    decays = [float((m.A_log.detach().exp().view(-1, 1) * F.softplus(m.dt_bias.detach()).view(m.A_log.numel(), -1)).max()) for m in states]
    return rounding(*linear, *attention) + max(decays, default=0) * tokens * torch.finfo().eps / 2


def of_angles(positions: int) -> float:
    """For keys that were turned by up to `positions` tokens: RoPE's angles are fp32 products, rounded to eps / 2 of themselves."""
    return positions * torch.finfo().eps / 2


def same_vectors(a: Tensor, b: Tensor) -> bool:
    """Whether two `[..., D]` in fp32 are the same vectors but for the sum that a rotation makes of their D channels: its terms have a root
    mean square of |b| / sqrt(D)."""
    near = rounding(b.shape[-1]) * b.shape[-1] ** -0.5 * torch.linalg.vector_norm(b, dim=-1, keepdim=True)
    return a.shape == b.shape and bool(((a - b).abs() <= near).all())


def same_decoded(a: Tensor, b: Tensor, codec: Codec) -> bool:
    """Whether two `[B, H, T, D]` that `codec` decoded, perhaps in other shapes, are the same codes: bit for bit, unless it rotates."""
    return torch.equal(a, b) if codec.rotation is None else same_vectors(a, b)
