"""Attention, quantizing and dequantizing over pages against chunks of contiguous planes, on one GPU: checks first, then GPU times.

    python eval/bench_pages.py                  some five minutes; a JSON line for each row

Rows are of 8 x 32768 and 1 x 32768 tokens of 32 query and 8 KV heads of 128; times are medians of CUDA-graph replays over several copies
of the storage, so that nothing stays in the L2 cache. At the end, the rows of a batch of requests, of different lengths up to a limit that
is far above them: with the splits of each row by that limit, and with splits that share the tokens of all rows.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from qkvcache.formats import REGISTRY, Format
from qkvcache.kernels import PagedInputs, Pages, attend_pages, dequantize_pages, fused, quantize_into, split_rows
from qkvcache.kernels import pages as reference
from qkvcache.kernels.triton_step import launch_of_step
from qkvcache.storage.storage import Storage

HEADS, GROUPS, DIM, RING, SINKS = 8, 4, 128, 65, 4
FORMATS = ("identity", "int8", "fp8", "nvfp4", "int4_vllm", "turboquant_4bit_nc", "turboquant_3bit_nc", "hadaquant_k2v2")


def paged(format: Format, lengths: Sequence[int], page: int) -> PagedInputs:
    """Rows of `lengths` tokens in pages anywhere in a pool."""
    device, dtype, batch, longest = "cuda", torch.bfloat16, len(lengths), max(lengths)
    count = -(-longest // page) + 1
    total = batch * count
    table = torch.randperm(total).int().view(batch, count).to(device)
    like = torch.randn(1, HEADS, 256, DIM, device=device, dtype=dtype)
    planes = tuple(codec.allocate(like.new_empty(total, HEADS, 0, DIM), page) for codec in format.codecs())
    statistics = tuple(codec.calibrate(like) for codec in format.codecs())
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    slots = (table[..., None] * page + torch.arange(page, device=device)).flatten(1)[:, :longest]
    slots = slots.masked_fill(torch.arange(longest, device=device) >= counts[:, None], -1)
    for begin in range(0, slots.shape[1], 4096):
        part = slots[:, begin : begin + 4096]
        x = tuple(torch.randn(batch, HEADS, part.shape[1], DIM, device=device, dtype=dtype) for _ in range(2))
        quantize_into(format.codecs(), x, planes, statistics, part)
    rows = torch.zeros(batch, 6, dtype=torch.int32, device=device)
    rows[:, reference.SINK_ROW] = rows[:, reference.RING_ROW] = torch.arange(batch)
    rows[:, reference.SINKS], rows[:, reference.RING_TOKENS] = SINKS, RING
    sinks, ring = (tuple(torch.randn(batch, HEADS, n, DIM, device=device, dtype=dtype) for _ in range(2)) for n in (SINKS, RING))
    return PagedInputs(Pages(*format.codecs(), planes, statistics, table, counts), sinks, ring, rows, max_length=longest)


def chunked(format: Format, batch: int, length: int) -> Storage:
    """The same in one preallocated chunk."""
    like = tuple(torch.randn(batch, HEADS, 1024, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    storage = Storage(format.codecs(), like, SINKS, RING - 1, max_length=length + 256)
    for _ in range(0, length + SINKS + RING, 1024):
        count = min(1024, length + SINKS + RING - storage.seq_length)
        if count > 0:
            storage.reserve(count)
            storage.chunks.calibrate(like)
            storage.append(tuple(x[:, :, :count] for x in like))
    return storage


def time(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of one call, the calls one after another in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return sorted(times)[len(times) // 2]


def emit(**row: object) -> None:
    print(json.dumps(row), flush=True)


def check(name: str) -> None:
    torch.manual_seed(0)
    inputs = paged(REGISTRY[name], (4000, 777), 64)
    for queries in (1, 4, 16):
        query = torch.randn(2, HEADS * GROUPS, queries, DIM, device="cuda", dtype=torch.bfloat16)
        observed = torch.ones(2, queries, device="cuda")
        out, lse, sums = attend_pages(query, inputs, causal=queries > 1, observed=observed)
        wanted, wanted_lse, wanted_sums = reference.attend_pages(query.float(), inputs, causal=queries > 1, observed=observed)
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        emit(check="attend", format=name, queries=queries, error=round(error, 5), lse=round((lse - wanted_lse).abs().max().item(), 5),
             sums=round((sums - wanted_sums).abs().max().item(), 5), ok=error < 0.02)  # fmt: skip
    out, wanted = (tuple(torch.empty(2, HEADS, 1000, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(2))
    dequantize_pages(inputs.pages, out, 100)
    reference.dequantize_pages(inputs.pages, wanted, 100)
    error = max(((x - y).float().norm() / y.float().norm()).item() for x, y in zip(out, wanted, strict=True))
    emit(check="dequantize", format=name, error=round(error, 5), ok=error < 0.02)


def bench(name: str, batch: int, length: int) -> None:
    format, copies = REGISTRY[name], 2 if batch > 1 else 6
    query = torch.randn(batch, HEADS * GROUPS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    new = tuple(torch.randn(batch, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    storages = [chunked(format, batch, length) for _ in range(copies)]
    base = time([lambda s=s: fused.fused_attend(query, s.attention_inputs()) for s in storages])
    steps = [launch_of_step(s.buffers, new) for s in storages]
    step = time([lambda s=s: s(new) for s in steps])
    del storages, steps
    emit(bench="chunks", format=name, batch=batch, length=length, attend_us=round(base, 1), step_us=round(step, 1))
    for page in (64, 256, 1024):
        pools = [paged(format, [length] * batch, page) for _ in range(copies)]
        attend = time([lambda p=p: attend_pages(query, p) for p in pools])
        emit(bench="pages", page=page, format=name, batch=batch, length=length, attend_us=round(attend, 1), ratio=round(attend / base, 3))
        del pools


def bench_requests(name: str, requests: int) -> None:
    """Prompts of 1k to 4k tokens, lognormal, with a share of answers of 2k to 16k."""
    generator = torch.Generator().manual_seed(1)

    def lognormal(low: int, high: int) -> torch.Tensor:
        begin, end = math.log(low), math.log(high)
        drawn = (begin + end) / 2 + (end - begin) / 4 * torch.randn(requests, generator=generator)
        return drawn.clamp(begin, end).exp()

    lengths = (lognormal(1024, 4096) + torch.rand(requests, generator=generator) * lognormal(2048, 16384)).int().tolist()
    inputs = replace(paged(REGISTRY[name], lengths, 256), max_length=2**17, tokens=sum(lengths))
    shared = replace(inputs, splits=split_rows(inputs.pages.lengths, inputs.max_length, HEADS))
    query = torch.randn(requests, HEADS * GROUPS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    each, all_rows = (time([lambda p=p: attend_pages(query, p)]) for p in (inputs, shared))
    splitting = time([lambda: split_rows(inputs.pages.lengths, inputs.max_length, HEADS)])
    emit(bench="requests", format=name, rows=requests, tokens=sum(lengths), longest=max(lengths), each_row_us=round(each, 1),
         all_rows_us=round(all_rows, 1), splitting_us=round(splitting, 1))  # fmt: skip


def main() -> None:
    sections: list[tuple[str, Callable[[], None]]] = [(f"check {name}", lambda name=name: check(name)) for name in FORMATS]
    sections += [
        (f"bench {name} {batch}", lambda name=name, batch=batch: bench(name, batch, 32768)) for batch in (8, 1) for name in FORMATS
    ]
    sections += [
        (f"requests {name}", lambda name=name, rows=rows: bench_requests(name, rows))
        for name, rows in (("identity", 44), ("int8", 96), ("turboquant_4bit_nc", 187))
    ]
    failed = 0
    for label, section in sections:
        try:
            section()
        except Exception:
            failed += 1
            print(f"FAILED {label}", flush=True)
            traceback.print_exc()
        torch.cuda.empty_cache()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
