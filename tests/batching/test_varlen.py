"""Attention of sequences of different lengths, against one after another."""

from __future__ import annotations

import pytest
import torch

from qkvcache.attention.full import full_attention
from qkvcache.batching.varlen import Sequences, in_one_launch, varlen_attention

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
LENGTHS = {
    "prompts": ((5, 1, 130, 64), (5, 1, 130, 64)),
    "pasts": ((5, 1, 70, 300), (5, 200, 70, 333)),
    "one token": ((1, 1), (9, 70)),
}
OPTIONS = {
    "": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window": {"window": 60},
    "window of one": {"window": 1},
    "window and softcap": {"window": 290, "softcap": 3.0},
    "window and sinks": {"window": 20, "s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def case(queries, keys, device: str, dim: int = 64):
    """Queries and keys as a model makes them, `[1, H, T, D]` in memory of `[1, T, H, D]`, and their sequences."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query = torch.randn(1, sum(queries), 4, dim, device=device, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(1, 2, sum(keys), dim, device=device, dtype=dtype) for _ in range(2))
    starts = tuple(torch.tensor([0, *x], device=device).cumsum(0).int() for x in (queries, keys))
    return query, key, value, Sequences(list(queries), list(keys), starts)


def one_by_one(query, key, value, queries, keys, window=1000, **options) -> torch.Tensor:
    """In fp32, with a mask."""
    parts, q, k = [], 0, 0
    for new, tokens in zip(queries, keys, strict=True):
        mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
        mask = mask.triu(tokens - new - window + 1)[None, None]
        sides = (x[:, :, begin : begin + n].float() for x, begin, n in ((query, q, new), (key, k, tokens), (value, k, tokens)))
        parts.append(full_attention(None, *sides, mask, **options)[0])
        q, k = q + new, k + tokens
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sequences_one_after_another(device, lengths, options):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    query, key, value, sequences = case(*LENGTHS[lengths], device)
    assert in_one_launch(query, value) == (device == "cuda")
    out = varlen_attention(query, key, value, sequences, scaling=0.2, **options)
    wanted = one_by_one(query, key, value, *LENGTHS[lengths], scaling=0.2, **options)
    assert out.shape == (1, query.shape[2], 4, 64)
    torch.testing.assert_close(out.float(), wanted, rtol=1e-5, atol=1e-5) if device == "cpu" else torch.testing.assert_close(
        out.float(), wanted, rtol=2e-2, atol=2e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_sequence_does_not_depend_on_the_others(dim):
    """Bit by bit, wherever it lies; and it launches one kernel."""
    queries, keys = (700, 30, 257), (700, 1000, 300)
    query, key, value, sequences = case(queries, keys, "cuda", dim)
    together = varlen_attention(query, key, value, sequences)
    q, k = 0, 0
    for new, tokens in zip(queries, keys, strict=True):
        starts = tuple(torch.tensor([0, n], device="cuda", dtype=torch.int32) for n in (new, tokens))
        alone = varlen_attention(
            query[:, :, q : q + new], *(x[:, :, k : k + tokens] for x in (key, value)), Sequences([new], [tokens], starts)
        )
        assert torch.equal(alone, together[:, q : q + new])
        q, k = q + new, k + tokens
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        varlen_attention(query, key, value, sequences)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "sync" not in name.lower()]) == 1, kernels
