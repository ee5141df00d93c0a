"""Fetching a prefix against computing it again, in one run: a Llama of eight billion parameters with random weights, 32,768 tokens.

    python eval/bench_prefix.py

For each format: milliseconds of the prefill into a compressed and into a dense cache, of storing, and of fetching all or half of the tokens
from host memory, from files in the page cache and from files that are not, with what they take. `same` says that the next token has the
logits of the cache that was stored, bit for bit. Every number is the least of `--repeats`; the files lie in `--directory`.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rows import replace_rows
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore

RESULTS = Path(__file__).parent / "results" / "prefix.jsonl"


def build(args: argparse.Namespace) -> PreTrainedModel:
    """Random weights, made on the device."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=2 * args.tokens,
    )
    torch.manual_seed(0)
    stock = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, args.dtype))
    try:
        with torch.device(args.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(stock)


def least(device: str, repeats: int, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Milliseconds of `call`, the device's work included; `before` runs ahead of each and is not counted."""
    times = []
    for _ in range(repeats):
        before()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times)


def forget(directory: Path) -> None:
    """Takes the files out of the page cache."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@torch.no_grad()
def measure(model: PreTrainedModel, format: str, args: argparse.Namespace, directory: Path) -> dict:
    ids = torch.randint(model.config.vocab_size, (1, args.tokens + 1), device=args.device)

    def prefill(cache: Cache) -> Cache:
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache

    row = {"format": format, "tokens": args.tokens, "layers": args.layers, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    row |= {"parameters": sum(x.numel() for x in model.parameters()), "dtype": args.dtype}
    prefill(CompressedCache(model.config, format=format))  # warms up
    row["prefill_ms"] = least(args.device, args.repeats, lambda: prefill(CompressedCache(model.config, format=format)))
    row["prefill_dense_ms"] = least(args.device, args.repeats, lambda: prefill(DynamicCache(config=model.config)))
    cache = prefill(CompressedCache(model.config, format=format))
    last = model(ids[:, -1:], past_key_values=copy.deepcopy(cache)).logits
    row |= in_memory(PrefixStore(model, max_bytes=2**40, format=format), ids, cache, last, args)
    row |= from_disk(partial(PrefixStore, model, max_bytes=2**40, format=format, directory=directory), ids, cache, last, args)
    row |= {"fetch_share": row["fetch_ms"] / row["prefill_ms"], "read_share": row["read_ms"] / row["prefill_ms"]}
    row |= {"fetch_half_share": row["fetch_half_ms"] / row["fetch_ms"], "same": row.pop("memory_same") and row.pop("disk_same")}
    return row


def in_memory(store: PrefixStore, ids: Tensor, cache: CompressedCache, last: Tensor, args: argparse.Namespace) -> dict:
    timed = partial(least, args.device, args.repeats)
    row = {"store_ms": timed(lambda: store.store(ids[:, :-1], cache), before=lambda: store.trim(0))}
    dense = cache.memory().dense
    row |= {"bytes": store.stats.nbytes, "ratio": dense / store.stats.nbytes, "dense_bytes": dense}
    row |= {"fetch_ms": timed(lambda: store.fetch(ids)), "fetch_half_ms": timed(lambda: store.fetch(ids[:, : args.tokens // 2 + 1]))}
    row |= {"identity_ms": timed(store._identity.current)}
    return row | {"memory_same": torch.equal(store.model(ids[:, -1:], past_key_values=store.fetch(ids).cache).logits, last)}


def from_disk(make: Callable[[], PrefixStore], ids: Tensor, cache: CompressedCache, last: Tensor, args: argparse.Namespace) -> dict:
    timed = partial(least, args.device, args.repeats)
    writer = make()
    row = {"store_and_write_ms": least(args.device, 1, lambda: writer.store(ids[:, :-1], cache)), "disk_bytes": writer.stats.disk_bytes}
    writer.trim(0)  # what is fetched now comes from the files
    row |= {"read_ms": timed(lambda: writer.fetch(ids)), "read_half_ms": timed(lambda: writer.fetch(ids[:, : args.tokens // 2 + 1]))}
    row |= {"read_cold_ms": least(args.device, 1, lambda: writer.fetch(ids), before=lambda: forget(writer._disk.directory))}
    found = make().fetch(ids)
    same = found.source == "disk" and torch.equal(writer.model(ids[:, -1:], past_key_values=found.cache).logits, last)
    writer.trim(0, 0)
    return row | {"disk_same": same}


def show(rows: list[dict]) -> None:
    table = Table(title=f"{rows[0]['tokens']:,} tokens, milliseconds; shares of the prefill", box=None, pad_edge=False)
    for header in ("format", "MB", "smaller", "prefill", "store", "fetch", "share", "half", "read", "share", "cold", "same"):
        table.add_column(header, justify="left" if header == "format" else "right", no_wrap=True)
    for row in rows:
        cells = [row["format"], f"{row['bytes'] / 1e6:,.0f}", f"{row['ratio']:.2f}x"]
        for name in ("prefill_ms", "store_ms", "fetch_ms", "fetch_share", "fetch_half_ms", "read_ms", "read_share", "read_cold_ms"):
            cells.append(f"{row[name]:.3f}" if name.endswith("share") else f"{row[name]:,.1f}")
        table.add_row(*cells, "yes" if row["same"] else "NO")
    Console(width=130).print(table)


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int8,turboquant_4bit_nc")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14_336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where files are written; a temporary one by default")
    parser.add_argument("--rows", type=Path, default=RESULTS, metavar="JSONL", help="saves the rows")
    args = parser.parse_args(arguments)

    model = build(args)
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    rows = []
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for format in args.formats.split(","):
            rows.append({"machine": machine} | measure(model, format, args, Path(folder)))
            print(rows[-1], flush=True)
    show(rows)
    replace_rows(args.rows, "prefix", rows)
    return rows


if __name__ == "__main__":
    main()
