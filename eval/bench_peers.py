"""Attention of one layer by kernels of FlashInfer and torch beside ours, in one run; rows in eval/results/peers_speed.jsonl.

    python eval/bench_peers.py [--sections decode latents new]     measures on a GPU, prints the tables, writes the rows
    python eval/bench_peers.py --tiny            tiny shapes on any device, to try the script
    python eval/bench_peers.py --markdown        the tables of the documentation, from the rows: needs no GPU

decode   one query of each row, 32 query heads over 8 KV heads of 128 channels. Ours has 4 + 96 exact tokens on top.
latents  one query of each row over latents of 512 + 64 channels (DeepSeek-V3), from absorbed queries to sums of latents: no side is timed
         with the projections.
new      causal attention of new tokens over a past and themselves, heads as above. Ours takes the path that a cache takes; SDPA has no
         mask, which for the last of many tokens spares it nearly nothing, and the faster grouping of heads.

GPU time, by replays of a CUDA graph over sets of random data in turn (`sets_of` in `gpu.py`); medians. Pages of FlashInfer have 64 tokens
and lie in their order. What is compiled, or planned on the host, is not timed: `--processes` processes compile all kernels
first, side by side. Before a peer is timed, its output is compared with SDPA in fp32 on the same numbers. Floor: the bytes of
the codes, or of the keys and values, at the highest rate of any row of the device.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from operator import itemgetter

import torch
from bench_kernels import code_bytes, payloads, sdpa_us
from bench_latents import Bench
from bench_turns import causal_step
from flashinfer_kernels import DIM, KV_HEADS, PEERS, Case, check
from gpu import LLAMA, bf16, device, graph_us, let_go, sets_of
from harness import Table, at_least, device_name, grouped, in_time, note, outcome, parser_of, pivot, run_or_show
from torch import Tensor
from transformers import LlamaConfig

from qkvcache.kernels import attend_on_codes
from qkvcache.latents.dispatch import attend_latents

SHARED = ("int8", "turboquant_4bit_nc", "nvfp4", "identity")
FORMATS = {"decode": (*SHARED, "hadaquant_k3v3", "hadaquant_k2v2"), "latents": SHARED, "new": SHARED[:2]}
SDPA = "best SDPA, bf16"
CASES = {
    "decode": [Case("decode", *size) for size in ((128, 2048), (256, 512), (32, 4096), (8, 32768), (1, 32768), (8, 131072))],
    "latents": [Case("latents", *size, heads=heads) for heads in (128, 16) for size in ((8, 32768), (1, 32768), (64, 4096))],
    "new": [Case("new", rows, 32768 + n, n) for rows, sizes in ((8, (16, 64, 128, 512)), (1, (64, 128, 512, 2048))) for n in sizes],
}
TINY = {"decode": [Case("decode", 2, 300)], "latents": [Case("latents", 2, 300, heads=4)], "new": [Case("new", 2, 316, 16)]}


def attention(case: Case, name: str, tiny: bool) -> tuple[Callable[[], Tensor], int]:
    """Attention to random data, and the bytes of the codes, or of the keys and values."""
    section, rows, tokens, queries, heads = case
    if name in PEERS[section]:
        prepare, *options = PEERS[section][name]
        query, *pages = case.data(options[-1])
        return functools.partial(prepare(case, *options), query, *pages), sum(x.nbytes for x in pages)
    if section == "latents":
        bench = Bench(tiny, rows, tokens, heads)
        keys, nbytes = bench.keys(name)
        query = keys.expansion.absorbed(bench.query)
        return functools.partial(attend_latents, query, keys.expansion.inputs, scaling=bench.scaling), nbytes
    if section == "new":
        step = causal_step(name, rows, queries, LlamaConfig(**LLAMA), tokens - queries)
        return step, code_bytes(name, rows, KV_HEADS, tokens - queries, DIM)
    inputs = payloads(name, rows, KV_HEADS, tokens, DIM)[0]
    return functools.partial(attend_on_codes, bf16(rows, heads, 1, DIM), inputs), code_bytes(name, rows, KV_HEADS, tokens, DIM)


def timed(case: Case, name: str, tiny: bool) -> dict:
    if name == SDPA:
        us, backend = sdpa_us(case.rows, case.heads, KV_HEADS, case.tokens, DIM, case.queries)
        return {"us": us, "bytes": code_bytes("identity", case.rows, KV_HEADS, case.tokens, DIM), "backend": backend}
    if name in PEERS[case.section]:
        check(name, case._replace(rows=2, tokens=min(case.tokens, 1000), queries=min(case.queries, 128)))
    call, nbytes = attention(case, name, tiny)
    calls = [call, *(attention(case, name, tiny)[0] for _ in range(1, 1 if tiny else sets_of(nbytes)))]
    return {"us": graph_us(calls), "bytes": nbytes}


def tasks(args: Namespace) -> Iterator[tuple[Case, str]]:
    """Cases with the names of formats and of peers."""
    for section in args.sections:
        for case in (TINY if args.tiny else CASES)[section]:
            yield from ((case, name) for name in (*FORMATS[section], *[SDPA][: section != "latents"], *PEERS[section]))


@torch.no_grad()
def called(case: Case, name: str, tiny: bool) -> None:
    """One call, which leaves its kernels in the compilers' caches on the disk."""
    attention(case, name, tiny)[0]()
    let_go()


def compile_first(args: Namespace) -> None:
    """Calls each format in each case, and each peer in one case, since its kernels serve all; what fails is left to `measure`."""
    peers: dict[tuple[str, str], tuple[Case, str]] = {}
    formats = []
    for case, name in tasks(args):
        if name in PEERS[case.section]:
            peers.setdefault((case.section, name), (case, name))
        elif name != SDPA:
            formats.append((case, name))
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for case, name in (*peers.values(), *formats):
            pool.submit(called, case, name, args.tiny)


@torch.no_grad()
def measure(args: Namespace) -> None:
    """Rows of the sections. What fails has a row that says so."""
    if args.processes:
        compile_first(args)
    same: dict = {"tiny": args.tiny, "device": device_name(device())}
    same |= {name: importlib.import_module(name).__version__ for name in ("triton", "flashinfer") if importlib.util.find_spec(name)}
    for case, name in in_time(tasks(args), args.minutes):
        let_go()
        row = {"case": str(case), "name": name} | outcome(functools.partial(timed, case, name, args.tiny)) | same
        note(args.out, case.section, row, "case", "name", "tiny", "device")


def cell(row: dict, fastest: float) -> str:
    return "failed" if "failed" in row else f"{row['us']:,.0f} / {row['bytes'] / fastest:,.0f}"


def tables(rows: list[dict]) -> Iterator[Table]:
    """A table for each section that has rows, of each device."""
    for (place, what, tiny), found in grouped(rows, "device", "what", "tiny"):
        alike = (row for row in rows if (row["device"], row["tiny"]) == (place, tiny) and "us" in row)
        cells = functools.partial(cell, fastest=max((row["bytes"] / row["us"] for row in alike), default=1))
        yield replace(pivot(found, itemgetter("name"), itemgetter("case"), cells), title=f"{place}, {what}: us / floor")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "peers_speed", float("inf"))
    parser.add_argument("--sections", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--processes", type=at_least(0), default=8, help="that compile kernels before any is timed")
    run_or_show(parser, parser.parse_args(arguments), measure, "", tables)


if __name__ == "__main__":
    main()
