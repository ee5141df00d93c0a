"""Attention of a batch of requests over compressed pages: the attention implementation `qkvcache_pages`.

The tokens of a step attend to each other exactly, and to the past as it is stored:

    first chunk of a prompt     torch's attention on exact keys and values
    chunk with a past           the past is dequantized in pieces, and their outputs merged (`kernels/attend_chunked.py`)
    rows with one new token     the fused kernel over the first tokens, pages and ring

Chunks attend before the new tokens are written, while the ring still has their past; rows with one token after that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.full import full_attention
from ..kernels import PagedInputs, Pair, attend_pages, dequantize_pages, quantize_pages
from ..kernels.attend_chunked import attend_chunked_pages, supports_queries
from .pool import CompressedPagedCache
from .rings import Rings
from .step import Chunk, Rows, Writes

NAME = "qkvcache_pages"


@torch.compiler.disable
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the queries `[1, Hq, T, D]` of a batch; keys and values `[1, H, T, D]`. Returns `[1, T, Hq, D]`.

    Raises RuntimeError for a forward pass that does not come from continuous batching.
    """
    if not isinstance(cache, CompressedPagedCache):
        raise RuntimeError(
            "the model serves requests from compressed pages: call it after the manager has stopped, or leave `continuous_batching` before"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    step = cache.step_of(layer, block_table, query.shape[2])
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if step.rows is not None and step.rows.at is None:
        write(cache, layer, step.writes, (key, value))
        return attend_rows(cache, layer, step.rows, query, **options).transpose(1, 2).contiguous(), None
    out = query.new_zeros(1, query.shape[2], *query.shape[1::2])
    for chunk in step.chunks:
        now = slice(chunk.begin, chunk.end)
        new = key[:, :, now], value[:, :, now]
        out[:, now] = attend_chunk(cache, layer, chunk, query[:, :, now], new, **options)
    cache.calibrate(layer, (key, value))
    write(cache, layer, step.writes, (key, value))
    if step.rows is not None:
        at = step.rows.at
        out[:, at] = attend_rows(cache, layer, step.rows, query[:, :, at], **options).transpose(1, 2)
    return out, None


def attend_rows(
    cache: CompressedPagedCache, layer: int, rows: Rows, query: Tensor, scaling: float | None, softcap: float | None, s_aux: Tensor | None
) -> Tensor:
    """Attention `[1, Hq, B, D]` of rows with one query each, `[1, Hq, B, D]`."""
    allocator = cache.allocator
    pages = allocator.pages(layer, rows.table, rows.lengths)
    inputs = PagedInputs(pages, allocator.sinks(layer), cache.ring(layer), rows.columns, rows.max_length, rows.tokens)
    return attend_pages(query.permute(2, 1, 0, 3), inputs, scaling=scaling, softcap=softcap, sinks=s_aux)[0].permute(2, 1, 0, 3)


def attend_chunk(
    cache: CompressedPagedCache,
    layer: int,
    chunk: Chunk,
    query: Tensor,
    new: Pair,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention `[1, T, Hq, D]` of a prompt, or of a part of one, `[1, Hq, T, D]`."""
    exact: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, "is_causal": True}
    if chunk.table is None:
        return full_attention(None, query, *new, None, **exact)[0]  # type: ignore[arg-type]
    row, allocator = chunk.row, cache.allocator
    first = row.blocks[0]
    sinks = tuple(x[first : first + 1, :, : row.past_sinks] for x in allocator.sinks(layer))
    recent = tuple(
        torch.cat([Rings.unroll(ring, row.past_ring, row.past_quantized, row.past), x], dim=2)
        for ring, x in zip(cache.ring(layer), new, strict=True)
    )
    length = torch.full((1,), row.past_quantized, dtype=torch.int32, device=query.device)
    pages, begin = allocator.pages(layer, chunk.table, length), row.past_sinks
    if softcap is None and s_aux is None and supports_queries(query, new[1].shape[3]):
        out, _ = attend_chunked_pages(query, pages, begin, row.past_quantized, sinks, recent, scaling=scaling)  # type: ignore[arg-type]
        return out.transpose(1, 2)
    past = tuple(x.new_empty(*x.shape[:2], row.past_quantized - begin, x.shape[3]) for x in new)
    dequantize_pages(pages, past, begin)  # type: ignore[arg-type]
    key, value = (torch.cat(parts, dim=2) for parts in zip(sinks, past, recent, strict=True))
    return full_attention(None, query, key, value, None, **exact)[0]  # type: ignore[arg-type]


def write(cache: CompressedPagedCache, layer: int, writes: Writes, x: Pair) -> None:
    """Quantizes keys and values `[1, H, T, D]` into pages, and stores the first and the last tokens in the model's dtype."""
    allocator = cache.allocator
    quantize_pages(allocator.layout.codecs, x, allocator.views[layer][0], allocator.once[layer], writes.pages[None])
    for places, (row, slot), tokens in (
        (cache.ring(layer), writes.ring, writes.ring_tokens),
        (allocator.sinks(layer), writes.sinks, writes.sink_tokens),
    ):
        if row.numel():
            for place, side in zip(places, x, strict=True):
                place[row, :, slot] = (side[0] if tokens is None else side[0].index_select(1, tokens)).transpose(0, 1)
