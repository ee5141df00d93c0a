"""Attention of many new tokens over a quantized past, without a dense layer.

The past is dequantized chunk by chunk into scratch of a bounded size, flash attention runs on each chunk, and
the outputs are merged by their log-sum-exps. The exact tokens, with the new ones, are one more part:

    part       keys and values                                    mask
    chunk i    the next quantized tokens, in the model's dtype    none, or the columns that padding hides
    exact      sink tokens, residual, the new tokens              causal among the new tokens, and the same columns

Flash attention takes no mask of columns: up to the last column that is hidden, torch's memory-efficient attention runs.
On Hopper `gluon_dense.py` takes the place of flash attention. cuDNN prepares a plan for each shape that it first meets, which takes 45 to
800 ms on an H200: longer than a turn.

The query heads of a group are rows of their KV head, so that keys and values are never copied for query
heads. Vectors that are stored rotated stay rotated in the scratch: queries are rotated before, and the merged
output of the chunks is rotated back. `attention/route.py` says which queries attend so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from ...formats.base import Codec
from ...formats.rotation import rotation_block
from ..host.dispatch import dequantize_pages, module, on_triton
from ..inputs import AttentionInputs
from ..pages import Pages
from ..segments import Exact, Packed, Pair, join_tokens
from ..store.reference import dequantized
from .reference import MASKED_SCORE

CHUNK_TOKENS, CHUNK_BYTES = 65536, 512 * 2**20
"""The most tokens of a chunk, and the most bytes of its keys and values together."""
BLOCK = 2**24
"""The most scores in memory at a time where torch computes them."""
MERGED_PARTS = 8
"""The number of parts from which on they are merged. Up to 7 wait while a chunk adds up to 8: the outputs of more would take more memory
than a dense layer."""
FEWEST_DENSE_ROWS = 1025
"""Query rows of a KV head from which on attention to dequantized chunks by `gluon_dense.py` takes less time than attention to codes in
tiles, which takes less memory. On an H200, after 32,768 tokens of 128 channels, chunks take .94 to 1.01 of the time of tiles at 1,024 rows
and .89 to 1.01 at 1,280 (`"what": "new tokens in chunks` in `eval/results/past.jsonl`). Nobody measured shorter pasts."""


Fill = Callable[[Pair], None]
"""A function that writes the keys and values of a chunk, rotated as stored, into tensors `[B, H, T, D]`."""
Piece = tuple[int, tuple[Codec, Codec], Fill]
"""A chunk of quantized tokens: their number, the codecs that rotated them, and the function that dequantizes them."""
Part = tuple[Tensor, Tensor]
"""Output `[B, H', R, Dv]` and log-sum-exp, fp32 `[B, H', R]`, of one part of the tokens. `H'` and `R` are
query heads and queries, or, folded, KV heads and the queries of a group's heads one after another."""


def supports(query: Tensor, attention_inputs: AttentionInputs) -> bool:
    """Whether torch has attention with log-sum-exp for these tensors, without gradients and uncompiled."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and query.requires_grad):
        return False
    return query.dtype == attention_inputs.key.dtype and supports_queries(query, attention_inputs.value.shape[3])


def supports_queries(query: Tensor, value_dim: int) -> bool:
    """Whether `attend_chunked` supports these queries, with keys of their dtype and values of `value_dim` channels."""
    dtypes = (torch.float16, torch.bfloat16) if query.is_cuda else (torch.float16, torch.bfloat16, torch.float32)
    dim = query.shape[3]
    return (
        query.device.type in ("cuda", "cpu")
        and query.dtype in dtypes
        and value_dim == dim
        and dim <= 256
        and (dim % 8 == 0 or not query.is_cuda)
    )


def attend_chunked_pages(
    query: Tensor, pages: Pages, begin: int, end: int, sinks: Pair, recent: Pair, *, scaling: float | None = None
) -> tuple[Tensor, Tensor]:
    """`attend_chunked` over the tokens `begin` to `end` of pages with one table for all heads, between exact
    keys and values `[B, H, T, D]`: first tokens, and the tokens after the pages, of which the last `Q` belong
    to the queries `[B, Hq, Q, D]`."""
    tokens = ChunkedKV.of_pages(pages, begin, end, sinks, recent)
    return attend_chunked(query, tokens, scaling=scaling)


def _pieces_of_pages(pages: Pages, begin: int, end: int, size: int) -> Iterator[Piece]:
    for at in range(begin, end, size):
        yield min(size, end - at), pages.codecs, functools.partial(dequantize_pages, pages, begin=at)


@dataclass(frozen=True)
class ChunkedKV:
    """Exact keys and values `[B, H, T, D]`, with quantized tokens after the first `before` of them. `pieces`
    cuts the quantized tokens into chunks of a given number of tokens."""

    exact: Pair
    before: int
    pieces: Callable[[int], Iterator[Piece]]

    @staticmethod
    def of_pages(pages: Pages, begin: int, end: int, sinks: Pair, recent: Pair) -> ChunkedKV:
        """Build them from the arguments of `attend_chunked_pages`."""
        exact = join_tokens((sinks[0], recent[0])), join_tokens((sinks[1], recent[1]))
        return ChunkedKV(exact, sinks[0].shape[2], functools.partial(_pieces_of_pages, pages, begin, end))

    @staticmethod
    def of(attention_inputs: AttentionInputs) -> ChunkedKV:
        key, value, paged = attention_inputs.key, attention_inputs.value, attention_inputs.paged
        if paged is not None and paged.pages.by_page:
            end = key.shape[2] - paged.sinks[0].shape[2] - paged.ring[0].shape[2]
            if attention_inputs.joined is None:
                return ChunkedKV.of_pages(paged.pages, 0, end, paged.sinks, paged.ring)
            return ChunkedKV(attention_inputs.joined, paged.sinks[0].shape[2], functools.partial(_pieces_of_pages, paged.pages, 0, end))
        keys, values = (tuple(segment.x for segment in side.segments if isinstance(segment, Exact)) for side in (key, value))
        before = sum(segment.tokens for segment in takewhile(lambda segment: isinstance(segment, Exact), key.segments))
        packed = [(k, v) for k, v in zip(key.segments, value.segments, strict=True) if isinstance(k, Packed) and isinstance(v, Packed)]
        exact = attention_inputs.joined or (join_tokens(keys), join_tokens(values))
        return ChunkedKV(exact, before, functools.partial(_pieces_of_blocks, packed))


class Chunks:
    """Tokens in chunks for queries `[B, Hq, Q, D]`, and the `scratch` into which these are dequantized, `[2, B, H, T, D]`.

    `chunk_tokens`: the most tokens of a chunk. None: as many as fit in CHUNK_TOKENS and CHUNK_BYTES."""

    def __init__(self, query: Tensor, tokens: AttentionInputs | ChunkedKV, chunk_tokens: int | None = None) -> None:
        self.tokens = tokens = ChunkedKV.of(tokens) if isinstance(tokens, AttentionInputs) else tokens
        heads = tokens.exact[0].shape[1]
        size = min(CHUNK_TOKENS, most_tokens(query, heads))
        self.pieces = list(tokens.pieces(min(size, chunk_tokens or size)))
        room = max((count for count, _, _ in self.pieces), default=0)
        self.scratch = query.new_empty(2, len(query), heads, room, query.shape[3])

    @property
    def end(self) -> int:
        """The column after the last chunk."""
        return self.tokens.before + sum(count for count, _, _ in self.pieces)


def attend_chunked(
    query: Tensor,
    tokens: AttentionInputs | ChunkedKV | Chunks,
    hidden: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shown_from: int | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last `Q` tokens: the output `[B, Hq, Q, D]` in the query's dtype, and the log
    of the normaliser, fp32 `[B, Hq, Q]`.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads; the tokens of the queries are the last `Q` of `tokens`, and exact.
        hidden: columns that no query sees, bool `[B or 1, T]` (padding), or `[B, H, T]` where heads have pages of their own and store
        different numbers of tokens; or None.
        scaling: factor on the scores, `D ** -0.5` by default.
        softcap: `softcap * tanh(score / softcap)` before the mask (Gemma 2), in plain torch.
        sinks: a learned logit for each query head, `[Hq]`, that takes part in the softmax and has no value (gpt-oss).
        shown_from: a column from which on nothing is hidden. None: not known.
        chunk_tokens: as in `Chunks`.
    """
    chunks = tokens if isinstance(tokens, Chunks) else Chunks(query, tokens, chunk_tokens)
    _, query_heads, queries, dim = query.shape
    exact, before, pieces, scratch = chunks.tokens.exact, chunks.tokens.before, chunks.pieces, chunks.scratch
    heads = exact[0].shape[1]
    scaling = dim**-0.5 if scaling is None else scaling
    folded = fold(query, heads)
    masked = 0 if hidden is None else hidden.shape[-1] if shown_from is None else shown_from
    if on_triton(query.device):
        from .triton_merge import merge as merge_parts
    else:
        merge_parts = merge
    column, parts, rotated, unrotated = before, list[Part](), folded, scaling
    if pieces:
        rotated, factor = rotate(folded, pieces[0][1][0])
        unrotated = scaling * factor
    for count, _, fill in pieces:
        fill((scratch[0, :, :, :count], scratch[1, :, :, :count]))
        under_mask = min(max(masked - column, 0), count)
        counts = [part for part in (under_mask, count - under_mask) if part]
        for keys, values in zip(*(x[:, :, :count].split(counts, dim=2) for x in scratch), strict=True):
            shown, bias = keys.shape[2], None
            if hidden is not None and column < masked:
                bias = hidden_bias(_by_head(hidden)[:, :, None, column : column + shown], query.dtype)
            if bias is None and softcap is None and serves_dense(rotated, keys, values):
                parts += gluon_attend(rotated, keys, values, unrotated)
            else:
                parts.append(library_attention(rotated, keys, values, bias, unrotated, softcap))
            column += shown
            if len(parts) >= MERGED_PARTS:
                parts = [merge_parts(parts, query_heads, queries, heads, None)]
    if pieces and (codec := pieces[0][1][1]).rotation is not None:
        out, lse = merge_parts(parts, query_heads, queries, heads, None) if len(parts) > 1 else parts[0]
        parts = [(rotate_back(out, codec), lse)]
    own = hidden_exact(hidden, chunks)
    seen, among = exact, own
    if own is not None and masked <= column and before + queries <= exact[0].shape[2]:  # else some sinks are new tokens
        if before:
            bias = hidden_bias(own[:, None, None, :before], query.dtype)
            parts.append(library_attention(folded, exact[0][:, :, :before], exact[1][:, :, :before], bias, scaling, softcap))
        seen, among = (exact[0][:, :, before:], exact[1][:, :, before:]), None
    parts += causal_attention(query, folded, *seen, among, scaling, softcap)
    return merge_parts(parts, query_heads, queries, heads, sinks)


def hidden_exact(hidden: Tensor | None, chunks: Chunks) -> Tensor | None:
    """The exact tokens among `hidden` columns, bool `[B, T]`: they are the same in all heads."""
    if hidden is None:
        return None
    own, before = _by_head(hidden)[:, 0], chunks.tokens.before
    return torch.cat([own[:, :before], own[:, chunks.end :]], dim=1)


def _pieces_of_blocks(blocks: list[tuple[Packed, Packed]], size: int) -> Iterator[Piece]:
    """Whole blocks, together at most `size` tokens unless one alone has more."""
    while blocks:
        ends = accumulate(key.tokens for key, _ in blocks)
        count = max(sum(end <= size for end in ends), 1)
        chunk, blocks = blocks[:count], blocks[count:]
        codecs = chunk[0][0].codec, chunk[0][1].codec
        yield sum(key.tokens for key, _ in chunk), codecs, functools.partial(_dequantize_blocks, chunk)


def _dequantize_blocks(chunk: list[tuple[Packed, Packed]], out: Pair) -> None:
    """Dequantizes blocks one after another, in plain torch."""
    at = 0
    for pair in chunk:
        for packed, side in zip(pair, out, strict=True):
            side[:, :, at : at + packed.tokens] = dequantized(packed.codec, packed.codes, side, stored=True)
        at += pair[0].tokens


def rotate(query: Tensor, codec: Codec) -> tuple[Tensor, float]:
    """Rotates queries `[B, H, R, D]` as stored keys are rotated, up to a factor, which is returned too."""
    if codec.rotation is None:
        return query, 1.0
    return query @ codec.rotation.matrix(query.shape[3], query.device, query.dtype), rotation_block(query.shape[3]) ** -0.5


def rotate_back(out: Tensor, codec: Codec) -> Tensor:
    """Rotates outputs of attention `[B, H, R, D]` back from the rotation of stored values."""
    if codec.rotation is None:
        return out
    matrix = codec.rotation.matrix(out.shape[3], out.device, out.dtype).mT
    rows = out.transpose(1, 2) if out.transpose(1, 2).is_contiguous() else out  # as attention kernels lay it out
    flat = rows.reshape(-1, out.shape[3])
    flat = torch.addmm(matrix[0], flat, matrix, beta=0, alpha=rotation_block(out.shape[3]) ** -0.5).view(rows.shape)
    return flat.transpose(1, 2) if rows is not out else flat


def fold(query: Tensor, heads: int) -> Tensor:
    """`[B, Hq, Q, D]` to contiguous `[B, H, R, D]`."""
    return query.unflatten(1, (heads, -1)).flatten(2, 3).contiguous()


def _by_head(hidden: Tensor) -> Tensor:
    """`[B, 1 or H, T]`."""
    return hidden if hidden.dim() == 3 else hidden[:, None]


def hidden_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive, with memory for whole vectors of 16 bytes in each row, which torch's kernel asks for."""
    tokens = hidden.shape[3]
    bias = torch.zeros(*hidden.shape[:3], -(-tokens // 16) * 16, dtype=dtype, device=hidden.device)[..., :tokens]
    return bias.masked_fill_(hidden, max(MASKED_SCORE, torch.finfo(dtype).min))


def library_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float | None) -> Part:
    """Attention without causality of folded queries over `[B, H, T, D]`."""
    if softcap is not None:
        return capped_attention(query, key, value, bias, scaling, softcap)
    aten = torch.ops.aten
    mask = None if bias is None else bias.expand(*query.shape[:3], -1)
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
    if mask is not None:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, False, scale=scaling)
        return out, lse[:, :, : query.shape[2]]
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scaling)[:2]


def serves_dense(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `gluon_dense.attend` serves these tensors."""
    if not on_triton(query.device) or query.dtype not in (torch.float16, torch.bfloat16) or query.shape[3] not in (64, 128):
        return False
    if any(x.dtype != query.dtype or x.shape[3] != query.shape[3] for x in (key, value)):
        return False
    fused = module("attend.launches")
    if fused.architecture(query.device)[0] // 10 != 9 or not fused.knows_gluon(*fused.GLUON_OF_TILES):
        return False
    aligned = (x.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in x.stride()[:3]) for x in (key, value))
    return query.stride(3) == key.stride(3) == value.stride(3) == 1 and all(aligned)


def gluon_attend(*args: Any) -> list[Part]:
    """`gluon_dense.attend`: Gluon is imported where it runs."""
    return module("attend.gluon_dense").attend(*args)


def outruns_tiles(query: Tensor, heads: int) -> bool:
    """Whether attention in chunks to tokens of which none is hidden is faster than in tiles."""
    return query.shape[1] // heads * query.shape[2] >= FEWEST_DENSE_ROWS and serves_dense(query, query, query)


def most_tokens(query: Tensor, heads: int) -> int:
    """The tokens whose keys and values, of `heads` heads and like the query `[B, Hq, Q, D]`, fit in CHUNK_BYTES."""
    batch, _, _, dim = query.shape
    return max(CHUNK_BYTES // (2 * batch * heads * dim * query.itemsize) // 64, 1) * 64


def capped_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, softcap: float) -> Part:
    """`library_attention` with softcap, which the library has not: scores in fp32, of a bounded block of rows at once."""
    key, value = key.float(), value.float()
    step = max(BLOCK // (key.shape[0] * key.shape[1] * key.shape[2]), 1)
    parts = []
    for begin in range(0, query.shape[2], step):
        rows = slice(begin, begin + step)
        scores = query[:, :, rows].float().mul(scaling / softcap) @ key.mT
        scores = scores.tanh_().mul_(softcap)
        if bias is not None:
            scores += bias if bias.shape[2] == 1 else bias[:, :, rows]
        lse = scores.logsumexp(-1)
        parts.append((scores.sub_(lse[..., None]).exp_() @ value, lse))
    out, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    return out.to(query.dtype), lse


def causal_attention(
    query: Tensor,
    folded: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> list[Part]:
    """Attention over the exact tokens `[B, H, T, D]`, of which the last `Q` are the queries' own."""
    queries, tokens = query.shape[2], key.shape[2]
    if hidden is None and softcap is None and serves_dense(folded, key, value):
        return gluon_attend(folded, key, value, scaling, queries)
    if query.is_cuda and hidden is None and softcap is None:
        # Causal means aligned with the last key in this operator. It serves the heads of a group without copies.
        return [torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[:2]]
    later = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).triu(tokens - queries + 1)[None, None]
    masked = later if hidden is None else later | hidden[:, None, None, :]
    masked = masked.repeat(1, 1, query.shape[1] // key.shape[1], 1)
    return [library_attention(folded, key, value, hidden_bias(masked, query.dtype), scaling, softcap)]


def merge(parts: Sequence[Part], query_heads: int, queries: int, heads: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output `[B, Hq, Q, D]` and log-sum-exp, fp32 `[B, Hq, Q]`, of parts, folded or not."""

    def unfolded(x: Tensor) -> Tensor:
        if x.shape[1] == query_heads and heads != query_heads:
            return x
        return x.reshape(x.shape[0], query_heads, queries, *x.shape[3:])

    lse = torch.stack([unfolded(part[1]) for part in parts])
    total = torch.logsumexp(lse, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    weights = (lse - total).exp()[..., None]
    out = torch.stack([unfolded(part[0]) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
    return out.to(parts[0][0].dtype), total
