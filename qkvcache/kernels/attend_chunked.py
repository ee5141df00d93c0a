"""Attention of many new tokens over a quantized past, without a dense layer.

The past is dequantized chunk by chunk into scratch of a bounded size, torch's best attention runs on each chunk, and the outputs are
merged by their log-sum-exps. The exact tokens, the new ones among them, are one more part:

    part       keys and values                                    mask
    chunk i    the next quantized tokens, in the model's dtype    none, or the columns that padding hides
    exact      sink tokens, residual, the new tokens              causal among the new tokens, and the same columns

The query heads of a group are rows of their KV head, so that keys and values are never copied for query heads. `attention/route.py` says
from how many queries on this is faster than reading the codes in the decode kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from .segments import Exact, Packed, Payload

CHUNK_TOKENS, CHUNK_BYTES = 16384, 512 * 2**20
"""Tokens of a chunk, and the bound on its scratch, keys and values together, which may make it shorter."""
ROW_STEP = 128
"""Folded rows are padded to a multiple of this, so that few shapes exist."""
CUDNN_QUERIES = 512
"""cuDNN prepares a plan for each new shape, which takes a tenth of a second on an H100: fewer queries never win that back."""
MASKED = -1e30

Part = tuple[Tensor, Tensor]
"""Output `[B, H', R, Dv]` and log-sum-exp, fp32 `[B, H', R]`, of one part of the tokens. `H'` and `R` are query heads and queries, or,
folded, KV heads and the queries of a group's heads one after another, with rows of padding at the end."""


def supports(query: Tensor, payload: Payload) -> bool:
    """Whether torch has attention with log-sum-exp for these tensors."""
    dtypes = (torch.float16, torch.bfloat16) if query.is_cuda else (torch.float16, torch.bfloat16, torch.float32)
    dim = query.shape[3]
    return (
        query.device.type in ("cuda", "cpu")
        and query.dtype == payload.key.dtype
        and query.dtype in dtypes
        and payload.value.shape[3] == dim
        and dim <= 256
        and (dim % 8 == 0 or not query.is_cuda)
    )


def attend_chunked(
    query: Tensor,
    payload: Payload,
    hidden: Tensor | None = None,
    *,
    scaling: float | None = None,
    sinks: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Causal attention of the last `Q` tokens, `[B, Hq, Q, D]` in the query's dtype.

    Args:
        query: `[B, Hq, Q, D]`, `Hq` a multiple of the KV heads; the tokens of the queries are the last `Q` of the payload, and exact.
        hidden: columns that no query sees, bool `[B, T]` (padding), or None.
        scaling: factor on the scores, `D ** -0.5` by default.
        sinks: a learned logit for each query head, `[Hq]`, that takes part in the softmax and has no value (gpt-oss).
        chunk_tokens: bound on the tokens of a chunk.
    """
    batch, query_heads, queries, dim = query.shape
    heads = payload.key.shape[1]
    scaling = dim**-0.5 if scaling is None else scaling
    folded = fold(query, heads)
    size = min(chunk_tokens, max(CHUNK_BYTES // (2 * batch * heads * dim * query.itemsize) // 64, 1) * 64)
    first, recent, packed = tokens_of(payload)
    column = first[0].shape[2]
    parts: list[Part] = []
    scratch: Tensor | None = None
    for chunk in chunks(packed, size):
        count = sum(key.tokens for key, _ in chunk)
        if scratch is None:
            scratch = query.new_empty(2, batch, heads, count, dim)
        at = 0
        for pair in chunk:
            for side, tokens in enumerate(pair):
                dequantize_into(tokens, scratch[side, :, :, at : at + tokens.tokens])
            at += pair[0].tokens
        keys, values = scratch[0, :, :, :count], scratch[1, :, :, :count]
        bias = None if hidden is None else _bias(hidden[:, None, None, column : column + count], query.dtype)
        parts.append(library_attention(folded, keys, values, bias, scaling, plan=count == size and queries >= CUDNN_QUERIES))
        column += count
    keys, values = (torch.cat([x, y], dim=2) if x.shape[2] else y for x, y in zip(first, recent, strict=True))
    if hidden is not None:
        hidden = torch.cat([hidden[:, : first[0].shape[2]], hidden[:, column:]], dim=1)
    parts.append(causal_attention(query, folded, keys, values, hidden, scaling))
    if query.is_cuda:
        from .triton_merge import merge as merge_parts

        return merge_parts(parts, query_heads, queries, heads, sinks)
    return merge(parts, query_heads, queries, heads, sinks)


def tokens_of(payload: Payload) -> tuple[Sequence[Tensor], Sequence[Tensor], Iterator[tuple[Packed, Packed]]]:
    """Exact keys and values before the quantized tokens, those after them, and the quantized keys and values in runs of tokens."""
    if payload.exact:
        return payload.exact[:2], payload.exact[2:], _runs(payload)
    first, recent = [], []
    for side in (payload.key, payload.value):
        places = [i for i, segment in enumerate(side.segments) if isinstance(segment, Packed)] or [0]
        exact = [(i, segment.x) for i, segment in enumerate(side.segments) if isinstance(segment, Exact)]
        empty = exact[-1][1][:, :, :0]
        first.append(torch.cat([empty, *(x for i, x in exact if i < places[0])], dim=2))
        recent.append(torch.cat([empty, *(x for i, x in exact if i >= places[0])], dim=2))
    pairs = zip(payload.key.segments, payload.value.segments, strict=True)
    return first, recent, ((k, v) for k, v in pairs if isinstance(k, Packed) and isinstance(v, Packed))


def _runs(payload: Payload) -> Iterator[tuple[Packed, Packed]]:
    if (body := payload.body) is None:
        return
    dims, left = (payload.key.shape[3], payload.value.shape[3]), body.tokens
    for chunk in body.chunks:
        slots = chunk[0][_per_token(body.key, dims[0])[0]].shape[2]
        count = min(left, slots)
        left -= count
        if count:
            yield Packed(body.key, chunk[0], count, dims[0]), Packed(body.value, chunk[1], count, dims[1])


@functools.lru_cache(maxsize=64)
def _per_token(codec: Codec, dim: int) -> tuple[str, ...]:
    return tuple(buffer.name for buffer in codec.buffers(dim) if buffer.tokens == "each")


def _part(packed: Packed, begin: int, count: int) -> Packed:
    codes: Codes = dict(packed.codes)
    for name in _per_token(packed.codec, packed.head_dim):
        codes[name] = packed.codes[name][:, :, begin : begin + count]
    return Packed(packed.codec, codes, count, packed.head_dim)


def chunks(runs: Iterator[tuple[Packed, Packed]], size: int) -> Iterator[list[tuple[Packed, Packed]]]:
    """Quantized keys and values in chunks of `size` tokens; the last one may be shorter."""
    chunk: list[tuple[Packed, Packed]] = []
    room = size
    for key, value in runs:
        at = 0
        while at < key.tokens:
            count = min(room, key.tokens - at)
            chunk.append((_part(key, at, count), _part(value, at, count)))
            at, room = at + count, room - count
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def dequantize_into(packed: Packed, out: Tensor) -> None:
    """Writes the tokens of `packed` into `out` `[B, H, T, D]`."""
    if out.is_cuda:
        from .triton_decode import decode, supports

        if supports(packed.codec, packed.head_dim):
            decode(packed.codec, packed.codes, out)
            return
    out.copy_(packed.codec.decode(packed.codes, packed.head_dim, out.dtype))


def fold(query: Tensor, heads: int) -> Tensor:
    """`[B, Hq, Q, D]` to `[B, H, R, D]`. Rows of padding hold anything."""
    batch, query_heads, queries, dim = query.shape
    rows = query_heads // heads * queries
    step = ROW_STEP if query.is_cuda else 1
    folded = query.new_empty(batch, heads, -(-rows // step) * step, dim)
    folded[:, :, :rows].view(batch, heads, query_heads // heads, queries, dim).copy_(query.unflatten(1, (heads, -1)))
    return folded


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive, with memory for whole vectors of 16 bytes in each row, which torch's kernel asks for."""
    tokens = hidden.shape[3]
    bias = torch.zeros(*hidden.shape[:3], -(-tokens // 16) * 16, dtype=dtype, device=hidden.device)[..., :tokens]
    return bias.masked_fill_(hidden, MASKED)


def library_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, plan: bool = False) -> Part:
    """Attention without causality of folded queries over `[B, H, T, D]`. `plan`: the shape will come again, and a plan of cuDNN's pays."""
    aten = torch.ops.aten
    mask = None if bias is None else bias.expand(*query.shape[:3], -1)
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
    if mask is not None:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, 0.0, False, scale=scaling)
        return out, lse[:, :, : query.shape[2]]
    if plan and _cudnn_is_faster(query):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, False, False, scale=scaling)
        return out, lse.view(query.shape[:3])
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, scale=scaling)[:2]


def _cudnn_is_faster(query: Tensor) -> bool:
    """On Hopper and later, where its programs, one for 128 rows, fill the GPU: flash attention also splits keys."""
    properties = torch.cuda.get_device_properties(query.device)
    programs = query.shape[0] * query.shape[1] * -(-query.shape[2] // 128)
    return not torch.version.hip and properties.major >= 9 and query.shape[3] <= 128 and 2 * programs >= properties.multi_processor_count


def causal_attention(query: Tensor, folded: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scaling: float) -> Part:
    """Attention over the exact tokens `[B, H, T, D]`, of which the last `Q` are the queries' own."""
    queries, tokens = query.shape[2], key.shape[2]
    if query.is_cuda and hidden is None:
        # Causal means aligned with the last key in this operator. It serves the heads of a group without copies.
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scaling)[:2]
    later = torch.ones(queries, tokens, dtype=torch.bool, device=query.device).triu(tokens - queries + 1)[None, None]
    masked = later if hidden is None else later | hidden[:, None, None, :]
    groups, rows = query.shape[1] // key.shape[1], folded.shape[2]
    masked = masked.repeat(1, 1, groups, 1)
    masked = torch.nn.functional.pad(masked, (0, 0, 0, rows - masked.shape[2]))
    return library_attention(folded, key, value, _bias(masked, query.dtype), scaling)


def merge(parts: list[Part], query_heads: int, queries: int, heads: int, sinks: Tensor | None) -> Tensor:
    """`[B, Hq, Q, D]` out of parts, folded or not."""

    def unfolded(x: Tensor) -> Tensor:
        if x.shape[1] == query_heads and heads != query_heads:
            return x
        return x[:, :, : query_heads // heads * queries].reshape(x.shape[0], query_heads, queries, *x.shape[3:])

    lse = torch.stack([unfolded(part[1]) for part in parts])
    total = torch.logsumexp(lse, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    weights = (lse - total).exp()[..., None]
    return torch.stack([unfolded(part[0]) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0).to(parts[0][0].dtype)
