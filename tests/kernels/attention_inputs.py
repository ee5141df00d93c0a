"""Payloads as a layer hands them to attention: exact zones around chunks of codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkvcache.formats import Format
from qkvcache.kernels import AttentionInputs
from qkvcache.storage import Chunks, attention_inputs_of


def build(
    format: Format, key: Tensor, value: Tensor, first: int, recent: int, cuts: Sequence[int] = (), per_head: bool = False
) -> AttentionInputs:
    """Keys `[B, H, T, D]` and values, all but the first and the recent tokens packed.

    `cuts` are token counts of the body after which a new piece is appended, and with it a chunk if the last one is full. Slots without a
    token hold nan, or codes that show. `per_head`: as layers that evict have them.
    """
    chunks = Chunks((format.key, format.value), (key.shape[3], value.shape[3]), per_head)
    begin, end = first, key.shape[2] - recent
    edges = [begin, *(begin + cut for cut in cuts), end]
    for low, high in zip(edges, edges[1:], strict=False):
        if high > low:
            x = key[:, :, low:high], value[:, :, low:high]
            chunks.reserve(high - low, x)
            _poison(chunks)
            chunks.calibrate(x)
            _encode(chunks, x)
    attention_inputs = attention_inputs_of((key[:, :, :begin], value[:, :, :begin]), chunks, (key[:, :, end:], value[:, :, end:]))
    exact = (key[:, :, :begin], value[:, :, :begin], key[:, :, end:], value[:, :, end:])
    region = None if not chunks.length else dataclasses.replace(chunks.region, tokens=chunks.length)
    return AttentionInputs(attention_inputs.key, attention_inputs.value, region, exact)


def _encode(chunks: Chunks, x: tuple[Tensor, Tensor]) -> None:
    """By the torch reference, whatever kernels there are."""
    for chunk, at, part in chunks.free_slots(x[0].shape[2]):
        for codec, planes, statistics, side in zip(chunks.codecs, chunk, chunks.statistics, x, strict=True):
            for name, codes in codec.quantize(side[:, :, part], statistics).items():
                planes[name][:, :, at : at + part.stop - part.start] = codes
    chunks.length += x[0].shape[2]


def _poison(chunks: Chunks) -> None:
    """All bits set in what is free."""
    start = 0
    for chunk in chunks.chunks:
        for plane in (*chunk[0].values(), *chunk[1].values()):
            free = torch.arange(start, start + plane.shape[2], device=plane.device) >= chunks.length
            plane.view(torch.uint8)[:, :, free] = 0xFF
        start += plane.shape[2]
