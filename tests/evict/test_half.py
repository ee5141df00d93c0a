"""A prompt in 16 bits, scored without fp32 copies, keeps what it keeps in fp32; on a GPU, where its kernels are."""

import pytest
import torch

from qkvcache.evict import observer
from qkvcache.evict.layer import EvictingLayer
from qkvcache.evict.observe import sum_attention
from qkvcache.evict.rope import Rope
from qkvcache.formats import resolve
from qkvcache.policies import H2O, AdaKV, ExpectedAttention, KeyDiff, SnapKV
from tests.seeds import SEED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUPS, DIM, TOKENS, BUDGET = 2, 2, 32, 700, 200
ROPE = Rope(10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)), interleaved=False)
POLICIES = [
    KeyDiff(budget=BUDGET),
    ExpectedAttention(budget=BUDGET, recent=16),
    H2O(budget=BUDGET),
    AdaKV(SnapKV(budget=BUDGET, recent=16)),
]


def prompt_attention(policy, query, keys, scaling):
    """What attention reports to a layer of the policy after a prompt without padding."""
    weights = observer._query_weights(policy.observation_window, policy.decay, None, query)
    if weights is None:
        return None
    last = observer._last(policy.observation_window, None, query.shape[2])
    return sum_attention(query[:, :, last], keys, weights[:, last], None, scaling=scaling)


@torch.no_grad()
def kept(policy, dtype):
    """Positions that each head keeps of a prompt whose keys, values and queries lie around a center."""
    generator = torch.Generator().manual_seed(SEED)

    def around(heads, spread):
        shape = 1, TOKENS, heads, DIM  # as a model has it in memory
        x = torch.randn(shape, generator=generator) * (spread + torch.rand(*shape[:3], 1, generator=generator))
        return (x + torch.randn(1, 1, heads, DIM, generator=generator)).bfloat16().transpose(1, 2).to(DEVICE, dtype)

    keys, values, queries = around(HEADS, 0.5), around(HEADS, 0.5), around(HEADS * GROUPS, 1.0)
    layer = EvictingLayer(resolve("identity"), policy, policy.budgets[0], rope=ROPE)
    layer.update(keys, values)
    layer.begin_attention(None, queries, DIM**-0.5)
    layer.end_attention(prompt_attention(policy, queries, keys, DIM**-0.5))
    return [set(head.tolist()) - {-1} for head in layer.positions()[0]]


def check(exact, found):
    assert sum(len(a & b) for a, b in zip(exact, found, strict=True)) >= 0.97 * sum(map(len, exact))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_prompt_in_16_bits_keeps_what_it_keeps_in_fp32(policy):
    check(kept(policy, torch.float32), kept(policy, torch.bfloat16))


BY_KERNEL = ("ExpectedAttention", "SnapKV")


@pytest.mark.parametrize("policy", [x for x in POLICIES if x.name in BY_KERNEL], ids=lambda policy: policy.name)
def test_kernels_score_a_prompt_as_torch_does(policy, monkeypatch):
    """fp16: the interpreter has no products of bfloat16."""
    triton = pytest.importorskip("triton")
    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU, or Triton's interpreter")
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    exact = kept(policy, torch.float32)
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    check(exact, kept(policy, torch.float16))
