"""Attention over latents: the fused kernel where there is one, else the torch reference; in compiled code an operator of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import AttentionInputs, PagedInputs
from ..kernels.host.dispatch import fuses, module
from ..kernels.host.handles import ORDER, inputs_of
from ..kernels.host.ops import HANDLE, operator
from . import reference

KERNELS = ".latents.launches"


def attend_latents(
    query: Tensor,
    attention_inputs: AttentionInputs,
    mask: Tensor | None = None,
    *,
    scaling: float,
    causal: bool = False,
    chosen: int | None = None,
) -> Tensor:
    """`reference.attend_latents`, by the fused kernel where there is one, which reads at most `chosen` tokens for each query."""
    inputs = attention_inputs.paged
    if torch.compiler.is_compiling() and attention_inputs.compiled:
        rank = attention_inputs.key.shape[3]
        return torch.ops.qkvcache.attend_latents(query, inputs.handle, ORDER[query.device], rank, mask, scaling, causal, chosen)
    if inputs is not None and fuses(KERNELS, inputs, query, mask, causal, chosen):
        return module(KERNELS).attend_latent_pages(query, inputs, mask, scaling=scaling, causal=causal, chosen=chosen)
    return reference.attend_latents(query, attention_inputs, mask, scaling=scaling, causal=causal)


def attend_latent_pages(
    query: Tensor, inputs: PagedInputs, mask: Tensor | None = None, *, scaling: float, causal: bool = False, chosen: int | None = None
) -> Tensor:
    """`reference.attend_latent_pages`, by the fused kernel where there is one."""
    if fuses(KERNELS, inputs, query, mask, causal, chosen):
        return module(KERNELS).attend_latent_pages(query, inputs, mask, scaling=scaling, causal=causal, chosen=chosen)
    return reference.attend_latent_pages(query, inputs, mask, scaling=scaling, causal=causal)


@operator("attend_latents", f"Tensor query, {HANDLE}, SymInt dim, Tensor? mask, float scaling, bool causal, int? chosen", "Tensor")
def _attend_latents(query, handle, order, dim, mask, scaling, causal, chosen):
    inputs = inputs_of(handle)
    return attend_latent_pages(query, inputs, mask, scaling=scaling, causal=causal, chosen=chosen).contiguous()


@_attend_latents.register_fake
def _(query, handle, order, dim, *options):
    return query.new_empty(*query.shape[:3], dim)
