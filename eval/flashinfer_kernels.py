"""Attention by kernels of FlashInfer, for benchmarks: a function for each peer, and a check of its output.

A peer makes, for a case and the dtype of its pages, a function of what `Case.data` returns, whose output is `[B * Q, Hq, D]`. What
FlashInfer compiles, and plans on the host, is done when that function has been called once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu import bf16, device
from torch import Tensor

KV_HEADS, DIM, LATENT, PAGE, BF16 = 8, 128, (512, 64), 64, torch.bfloat16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """The last `queries` of the tokens of each row attend, to all tokens up to their own."""

    section: str
    rows: int
    tokens: int
    queries: int = 1
    heads: int = 32

    def __str__(self) -> str:
        ends = {"decode": "", "latents": f", {self.heads} heads", "new": f" + {self.queries}"}
        return f"{self.rows}x{self.tokens - self.queries * (self.section == 'new')}{ends[self.section]}"

    def data(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B * Q, Hq, D]`; pages of keys and values, or of latents and rotated keys, `[pages, H, PAGE, D]`. Random."""
        heads, dims, width = (1, LATENT, sum(LATENT)) if self.section == "latents" else (KV_HEADS, (DIM, DIM), DIM)
        first, second = (bf16(self.rows * -(-self.tokens // PAGE), heads, PAGE, dim).to(dtype) for dim in dims)
        return bf16(self.rows * self.queries, self.heads, width), first, second

    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """int32: 0 to B, where the pages of each row begin and end, all pages, and the tokens in the last page of each row."""
        each = -(-self.tokens // PAGE)
        rows, pages = (torch.arange(n, dtype=torch.int32, device=device()) for n in (self.rows + 1, self.rows * each))
        return rows, rows * each, pages, torch.full_like(rows[1:], self.tokens - (each - 1) * PAGE)


flashinfer: Callable[[], Any] = functools.partial(importlib.import_module, "flashinfer")
zeros = functools.partial(torch.zeros, dtype=torch.uint8, device=device())


def xqa(case: Case, dtype: torch.dtype) -> Attend:
    attend, (_, _, pages, last) = flashinfer().xqa, case.places()
    table, lengths = pages.view(case.rows, -1), torch.full_like(last[:, None], case.tokens).view(torch.uint32)
    out, scratch, semaphores = bf16(case.rows, 1, case.heads, DIM), zeros(2**27), zeros(2**23).view(torch.uint32)
    options = table, lengths, out, scratch, semaphores, KV_HEADS, PAGE
    return lambda query, key, value: attend(query[:, None], key, value, *options, kv_layout="HND") or out[:, 0]  # attend returns None


def decode(case: Case, tensor_cores: bool, dtype: torch.dtype) -> Attend:
    wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(zeros(2**27), "HND", use_tensor_cores=tensor_cores)
    wrapper.plan(*case.places()[1:], case.heads, KV_HEADS, DIM, PAGE, q_data_type=BF16, kv_data_type=dtype)
    return lambda query, key, value: wrapper.run(query, (key, value))


def prefill(case: Case, backend: str, dtype: torch.dtype) -> Attend:
    wrapper, (rows, *places) = flashinfer().BatchPrefillWithPagedKVCacheWrapper(zeros(2**27), "HND", backend=backend), case.places()
    wrapper.plan(rows * case.queries, *places, case.heads, KV_HEADS, DIM, PAGE, causal=True, q_data_type=BF16, kv_data_type=dtype)
    return lambda query, key, value: wrapper.run(query, (key, value))


def mla(case: Case, backend: str, dtype: torch.dtype) -> Attend:
    wrapper, (*places, last) = flashinfer().BatchMLAPagedAttentionWrapper(zeros(2**27), backend=backend), case.places()
    scaling = sum(LATENT) ** -0.5
    wrapper.plan(*places, torch.full_like(last, case.tokens), case.heads, *LATENT, PAGE, False, scaling, BF16, dtype)
    return lambda query, latents, rope: wrapper.run(*query.split(LATENT, dim=-1), latents[:, 0], rope[:, 0])


KINDS = {"XQA": (xqa,), "decode": (decode, False), "decode on tensor cores": (decode, True)}
TYPES = {"bf16": BF16, "fp8": torch.float8_e4m3fn}
PEERS: dict[str, dict[str, tuple]] = {
    "decode": {f"FlashInfer {kind}, {name}": (*KINDS[kind], dtype) for kind in KINDS for name, dtype in TYPES.items()},
    "latents": {f"FlashInfer MLA {backend}, bf16": (mla, backend, BF16) for backend in ("fa3", "fa2")},
    "new": {f"FlashInfer prefill {backend}, bf16": (prefill, backend, BF16) for backend in ("fa3", "fa2")},
}
"""Maps a section to its peers, by name: the function of each, and the arguments that the function takes after the case."""


@functools.cache
def check(name: str, case: Case) -> None:
    """Raises ValueError where the output of a peer differs from the output of SDPA in fp32 on the same numbers."""
    prepare, *options = PEERS[case.section][name]
    query, *pages = case.data(options[-1])
    out = prepare(case, *options)(query, *pages)
    query, out, *pages = (x.float().unflatten(0, (case.rows, -1)).transpose(1, 2) for x in (query, out, *pages))
    key, value = (x.flatten(2, 3)[:, :, : case.tokens] for x in pages)
    if case.section == "latents":
        key, value = torch.cat([key, value], dim=-1), key
    shown = torch.ones(case.queries, case.tokens, dtype=torch.bool, device=device()).tril(case.tokens - case.queries)
    expected = F.scaled_dot_product_attention(query, key, value, shown, enable_gqa=True)
    error, most = float((out - expected).norm() / expected.norm()), 2e-2 if options[-1] == BF16 else 6e-2
    if not error < most:
        raise ValueError(f"the error has {error:.3f} of the norm of the output, and may have {most}")
