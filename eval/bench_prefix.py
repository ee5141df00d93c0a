"""Fetching a prefix against computing it again, in one run; rows in eval/results/prefix.jsonl.

    python eval/bench_prefix.py                       32,768 tokens of a Llama of eight billion parameters, on a GPU
    python eval/bench_prefix.py --section hybrids     4,096 tokens of four layers of a Qwen3.5, on a CPU: 3 minutes
    python eval/bench_prefix.py --markdown            the table of the documentation, from the rows

prefix     for each format: milliseconds of the prefill into a compressed and into a dense cache, of storing, and of fetching all or half of
           the tokens from host memory, from files in the page cache and from files that are not, with what they take. `same` says that the
           next token has the logits of the cache that was stored, bit for bit. Every number is the least of `--repeats`; the files lie in
           `--directory`.
hybrids    CPU seconds to the first token of requests that begin as earlier ones did: computed by a new DynamicCache,
           and with a `PrefixStore`, with and without checkpoints of the recurrent states. Storing the prompt is included.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu import device, milliseconds, random_llama
from harness import Table, device_name, parser_of, replace_rows, run_or_show
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, Qwen3_5TextConfig
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore
from qkvcache.releases import passing


def forget(directory: Path) -> None:
    """Takes the files out of the page cache."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Bench:
    """A prompt of `tokens` in a compressed cache, and the logits after one more token."""

    def __init__(self, model: PreTrainedModel, format: str, tokens: int, repeats: int):
        self.model, self.format, self.tokens, self.repeats = model, format, tokens, repeats
        self.ids = torch.randint(model.config.vocab_size, (1, tokens + 1), device=model.device)
        self.prefill(self.compressed())  # warms up
        self.cache = self.prefill(self.compressed())
        self.last = self.logits(copy.deepcopy(self.cache))

    def compressed(self) -> CompressedCache:
        return CompressedCache(self.model.config, format=self.format)

    def prefill(self, cache: Cache) -> Cache:
        self.model(self.ids[:, :-1], **passing(cache), logits_to_keep=1)
        return cache

    def logits(self, cache: Cache) -> Tensor:
        return self.model(self.ids[:, -1:], **passing(cache)).logits

    def least(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        return min(milliseconds(call, before) for _ in range(self.repeats))

    def fetching(self, store: PrefixStore, name: str) -> dict:
        """Milliseconds for all tokens, and for half of them."""
        half = self.ids[:, : self.tokens // 2 + 1]
        return {f"{name}_ms": self.least(lambda: store.fetch(self.ids)), f"{name}_half_ms": self.least(lambda: store.fetch(half))}

    def measure(self, directory: Path) -> dict:
        dense = partial(DynamicCache, config=self.model.config)
        times = {"prefill_ms": self.least(lambda: self.prefill(self.compressed()))}
        times |= {"prefill_dense_ms": self.least(lambda: self.prefill(dense()))}
        row = times | self.in_memory() | self.from_disk(directory)
        row |= {"fetch_share": row["fetch_ms"] / row["prefill_ms"], "read_share": row["read_ms"] / row["prefill_ms"]}
        return row | {"fetch_half_share": row["fetch_half_ms"] / row["fetch_ms"], "same": row.pop("same_memory") and row.pop("same_disk")}

    def in_memory(self) -> dict:
        store, stored = PrefixStore(self.model, max_bytes=2**40, format=self.format), self.ids[:, :-1]
        row = {"store_ms": self.least(lambda: store.store(stored, self.cache), before=lambda: store.trim(0))}
        size, whole = store.stats.nbytes, self.cache.memory().dense
        row |= {"bytes": size, "ratio": whole / size, "dense_bytes": whole, "identity_ms": self.least(store._identity.current)}
        return row | self.fetching(store, "fetch") | {"same_memory": torch.equal(self.logits(store.fetch(self.ids).cache), self.last)}

    def from_disk(self, directory: Path) -> dict:
        make = partial(PrefixStore, self.model, max_bytes=2**40, format=self.format, directory=directory)
        writer = make()
        row = {"store_and_write_ms": milliseconds(lambda: writer.store(self.ids[:, :-1], self.cache))}
        row |= {"disk_bytes": writer.stats.disk_bytes}
        writer.trim(0)  # what is fetched now comes from the files
        row |= self.fetching(writer, "read")
        row |= {"read_cold_ms": milliseconds(lambda: writer.fetch(self.ids), before=lambda: forget(writer._disk.directory))}
        found = make().fetch(self.ids)
        same = found.source == "disk" and torch.equal(self.logits(found.cache), self.last)
        writer.trim(0, 0)
        return row | {"same_disk": same}


DENSE, ENDS, STORE = "DynamicCache", "checkpoint_interval=0", "PrefixStore"


def hybrid(tiny: bool) -> PreTrainedModel:
    size = 64 if tiny else 1024
    config = Qwen3_5TextConfig(
        hidden_size=size, intermediate_size=7 * size // 2, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=size // 4, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=size // 8,
        linear_value_head_dim=size // 8, vocab_size=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


CHAT = ("a second turn", "a prompt with 5/8 of the first one")
AGENT = ("six turns of an agent", "the last of them")


def requests(model: PreTrainedModel, tokens: int) -> dict[str, list[Tensor]]:
    """The prompts of each scenario, in their order. A turn adds an eighth of `tokens`: an answer and the next message."""
    step = tokens // 8
    text, other = torch.randint(model.config.vocab_size, (2, 1, tokens + step), generator=torch.Generator().manual_seed(0))
    branch = torch.cat([text[:, : 5 * step], other[:, : 3 * step]], dim=1)
    return {"chat": [text[:, :tokens], text, branch], "agent": [text[:, : (turn + 3) * step] for turn in range(6)]}


def first_tokens(model: PreTrainedModel, way: str, prompts: list[Tensor], interval: int) -> dict:
    """CPU seconds to the first token of each prompt, and the tokens that it did not compute."""
    store = PrefixStore(model, max_bytes=2**40, format="int8", checkpoint_interval=0 if way == ENDS else interval)
    seconds, reused = [], []
    for ids in prompts:
        begin, before = time.process_time(), store.stats.tokens_reused
        if way == DENSE:
            model.generate(ids, **passing(DynamicCache(config=model.config)), max_new_tokens=1)
        else:
            with store.reuse(ids) as past:
                model.generate(ids, **passing(past), max_new_tokens=1)
        seconds.append(time.process_time() - begin)
        reused.append(store.stats.tokens_reused - before)
    return {"seconds": seconds, "reused": reused, "store_bytes": store.stats.nbytes}


def measure_hybrids(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model, tokens = hybrid(args.tiny), args.tokens or 4096
    config = model.config
    same = {"machine": "CPU", "threads": 1, "layers": config.layer_types, "hidden_size": config.hidden_size}
    for scenario, prompts in requests(model, tokens).items():
        for way in (DENSE, ENDS, STORE):
            row = {"scenario": scenario, "way": way, "tokens": [ids.shape[1] for ids in prompts]} | same
            row |= {"interval": tokens // 2} | first_tokens(model, way, prompts, tokens // 2)
            replace_rows(args.out, "hybrids", [row], "scenario", "way")


def hybrid_tables(rows: list[dict]) -> Iterator[Table]:
    found = {(row["scenario"], row["way"]): row for row in rows}
    shown = [("chat", slice(i, i + 1), name) for i, name in enumerate(CHAT, 1)]
    shown += [("agent", slice(6), AGENT[0]), ("agent", slice(5, 6), AGENT[1])]
    lines = []
    for scenario, at, name in shown:
        seconds = [sum(found[scenario, way]["seconds"][at]) for way in (DENSE, ENDS, STORE)]
        counts = [f"{sum(found[scenario, STORE][what][at]):,}" for what in ("tokens", "reused")]
        lines.append([name, *counts, *(f"{x:.1f}" for x in seconds), f"{seconds[0] / seconds[2]:.1f}x"])
    yield Table(["", "tokens", "reused", "`DynamicCache`, s", "without checkpoints, s", "`PrefixStore`, s", "sooner"], lines)


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    if args.section == "hybrids":
        return measure_hybrids(args)
    args.tokens = args.tokens or 32_768
    model = random_llama(args.tiny)
    shape = {"layers": "num_hidden_layers", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    same = {name: getattr(model.config, option) for name, option in shape.items()} | {"machine": device_name(device())}
    same |= {"tokens": args.tokens, "parameters": sum(x.numel() for x in model.parameters()), "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for format in args.formats:
            row = Bench(model, format, args.tokens, args.repeats).measure(Path(folder))
            replace_rows(args.out, "prefix", [{"format": format} | same | row], "format", "machine")


def tables(rows: list[dict]) -> Iterator[Table]:
    if rows[0]["what"] == "hybrids":
        yield from hybrid_tables(rows)
        return
    numbers = "{bytes:,.0f} | {ratio:.2f}x | {prefill_ms:,.0f} | {fetch_ms:.0f} | {fetch_half_ms:.0f} | {read_ms:.0f}"
    lines = [
        [f"`{row['format']}`", *numbers.format(**row | {"bytes": row["bytes"] / 1e6}).split(" | "), "yes" if row["same"] else "no"]
        for row in rows
    ]
    headers = ["format", "MB", "smaller", "computed, ms", "fetched, ms", "half of it, ms", "from disk, ms", "same logits, to the bit"]
    yield Table(headers, lines, rule=(" --- ",))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "prefix")
    parser.add_argument("--section", choices=("prefix", "hybrids"), default="prefix")
    parser.add_argument("--formats", nargs="+", default=["int8", "turboquant_4bit_nc"], metavar="A,B")
    parser.add_argument("--tokens", type=int, help="32,768 by default, and 4,096 of hybrids")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where files are written; a temporary one by default")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    args = parser.parse_args(arguments)
    run_or_show(parser, args, measure, args.section, tables, gpu=args.section == "prefix")


if __name__ == "__main__":
    main()
