"""What eviction costs and what it saves, on the embedded model; rows in eval/results/eviction.jsonl, those of the same study replaced.

    python eval/eviction.py sinks budgets defaults combined choices    what is named, or all of them
    python eval/eviction.py --show | --plot                    tables | pngs, from the rows

sinks     perplexity of text streamed far beyond the window and the trained 4,096 positions, by number of sinks.
budgets   every policy at 5 to 100 % of 2,000 tokens: KL and perplexity of a continuation, recall of a code word.
defaults  what to choose where a policy leaves a choice.
combined  eviction, compression and both, and how many requests for Llama 70B at 128K eight H100 would hold by arithmetic.
choices   what `recommend` names.

One protocol: the model reads the prompt in one step, the cache cuts it down to the budget, then the model reads on, or answers, token by
token through what is left. Recall is *unseen* where the question comes after the cut, and *seen* where it ends the prompt, so that policies
can look at what it attends to; the first token of the answer is then the prompt's own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from eviction_plots import plot
from eviction_tables import show
from transformers import DynamicCache, PreTrainedConfig

from qkvcache import CompressedCache, demo
from qkvcache.caches import CombinedCache, H2OCache, SinkCache
from qkvcache.harness.quality import CacheFactory
from qkvcache.harness.rows import read_rows, replace_rows
from qkvcache.harness.stream import stream
from qkvcache.harness.workload import Workload
from qkvcache.planning.recommend import LADDERS
from qkvcache.policies import H2O, TOVA, KeyDiff, Knorm, LagKV, Policy, Random, SinkWindow, SnapKV
from qkvcache.policies.base import ALL

RESULTS = Path(__file__).parent / "results" / "eviction.jsonl"
CONTEXT, PASSAGES = 2000, 4
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
STREAMED, STREAMS, CHUNK, TRAINED = 8192, 3, 128, 4096
SINKS, WINDOWS = (0, 1, 2, 4, 8, 16, 32), (256, 1020)


def workload(dtype: torch.dtype, observes: tuple[int, ...], read_on: int, cases: int) -> Workload:
    model, tokenizer = demo.load(dtype)
    ids = demo.text_ids(tokenizer)
    return Workload.make(model, tokenizer, ids, context=CONTEXT, passages=PASSAGES, read_on=read_on, cases=cases, observes=observes)


def policy_row(bench: Workload, name: str, policy: Policy, **parameters) -> dict:
    found = bench.measure(lambda: CompressedCache(bench.model.config, policy=policy))
    return {"name": name, "policy": policy.name, "format": "identity", "parameters": parameters} | found


def sinks() -> Iterator[dict]:
    """Beyond: the second half of the stream, whose tokens are further on than the model was trained for."""
    model, tokenizer = demo.load()
    ids = demo.text_ids(tokenizer)
    apart = len(ids) // STREAMS
    text = torch.tensor([ids[i * apart : i * apart + STREAMED] for i in range(STREAMS)])

    def row(name: str, cache: DynamicCache, tokens: int, **parameters) -> dict:
        losses = torch.cat(list(stream(model, cache, text[:, :tokens], CHUNK)), dim=1)
        spans = {"within": losses[:, TRAINED // 2 : TRAINED], "beyond": losses[:, TRAINED:]}
        found = {f"perplexity_{span}": loss.mean().exp().item() for span, loss in spans.items() if loss.numel()}
        size = cache.nbytes / STREAMS / tokens if isinstance(cache, CompressedCache) else None
        same = {"tokens": tokens, "streams": STREAMS, "chunk": CHUNK, "bytes_per_token": size, "dtype": str(model.dtype)}
        return {"name": name, "policy": name, "format": "identity", "parameters": parameters} | found | same

    yield row("dense", DynamicCache(config=model.config), TRAINED)
    for window in WINDOWS:
        for count in SINKS:
            for positions in ("original", "cache") if count else ("original",):
                cache = SinkCache(model.config, window=window, sinks=count, positions=positions)  # type: ignore[arg-type]
                yield row("SinkWindow", cache, STREAMED, window=window, sinks=count, positions=positions)


def lag_of(budget: int) -> int:
    """The paper's 128 tokens do not fit into the smallest budgets."""
    return min(128, budget // 4)


def budgets(bench: Workload) -> Iterator[dict]:
    for share in SHARES:
        size = int(share * CONTEXT)
        lag = lag_of(size)
        chosen = {
            "H2O, mean": H2O(budget=size), "H2O, sum": H2O(budget=size, reduce="sum"), "TOVA": TOVA(budget=size),
            "SnapKV": SnapKV(budget=size), "KeyDiff": KeyDiff(budget=size), "LagKV": LagKV(budget=size, lag=lag, recent=lag),
            "Knorm": Knorm(budget=size), "SinkWindow": SinkWindow(window=size - 4), "Random": Random(budget=size),
        }  # fmt: skip
        for name, policy in chosen.items():
            yield policy_row(bench, name, policy, share=share, budget=size) | {"share": share}


def variants() -> Iterator[tuple[Callable[..., Policy], dict]]:
    yield from ((H2O, {"reduce": reduce, "recent": recent}) for reduce in ("mean", "sum") for recent in (0.25, 0.5))
    yield H2O, {"reduce": "mean", "recent": 0.5, "sinks": 4}
    for kind in (KeyDiff, TOVA, Knorm, SnapKV):
        yield from ((kind, {"sinks": 4, "recent": recent}) for recent in (0.0, 0.125, 0.5))
        yield kind, {"sinks": 0, "recent": 0.125}
    yield TOVA, {"sinks": 0, "recent": 0.0}  # the paper's
    yield from ((SnapKV, {"sinks": 4, "recent": 0.125, "kernel": kernel}) for kernel in (1, 7))
    yield from ((LagKV, {"sinks": 4, "lag": lag, "recent": lag}) for lag in (32, 64, 128))
    yield LagKV, {"sinks": 0, "lag": 64, "recent": 64}


def defaults(bench: Workload) -> Iterator[dict]:
    for share in (0.1, 0.2, 0.5):
        size = int(share * CONTEXT)
        for kind, options in variants():
            policy = kind(budget=size, **options)
            name = ", ".join([policy.name, *(f"{key}={value}" for key, value in options.items())])
            yield policy_row(bench, name, policy, share=share, budget=size, **options) | {"share": share}


# Llama 70B at 128K tokens on eight H100 of 80 GB. Nothing but weights and caches is counted.
LAYERS, KV_HEADS, HEAD_DIM, TOKENS, WEIGHTS, MEMORY = 80, 8, 128, 131_072, 2 * 70.6e9, 8 * 80e9


def request_bytes(cache: CompressedCache | DynamicCache) -> float:
    """Of one request: exact tokens in bf16, others in the format, a position (4 bytes) and a score (4 bytes) for a token and head."""
    bf16 = 4 * KV_HEADS * HEAD_DIM
    if not isinstance(cache, CompressedCache):
        return float(LAYERS * TOKENS * bf16)
    layer, policy = cache.layers[0], cache.policy
    kept, recent, beside = TOKENS, TOKENS, 0
    if policy:
        kept = policy.size(policy.budgets[0], TOKENS)
        recent = policy.recent_of(kept)
        beside = KV_HEADS * (4 + 4 * policy.scores)
    exact = layer.exact_first + min(layer.exact_recent, recent)  # type: ignore[attr-defined]
    return float(LAYERS * (exact * bf16 + (kept - exact) * cache.format.bytes_per_token(HEAD_DIM, KV_HEADS) + kept * beside))


def mixtures(config: PreTrainedConfig) -> Iterator[tuple[str, CacheFactory]]:
    yield "dense", lambda: DynamicCache(config=config)
    yield "H2O 50 %", lambda: H2OCache(config, budget=0.5, recent=CONTEXT // 4)
    yield "sinks 4 + window 1,020", lambda: SinkCache(config, positions="original")
    yield "sinks 4 + window 252", lambda: SinkCache(config, window=252, positions="original")
    for format in ("fp8", "nvfp4", "turboquant_4bit_nc"):
        yield format, lambda format=format: CompressedCache(config, format=format)
        yield f"{format} + H2O 50 %", lambda format=format: H2OCache(config, budget=0.5, recent=CONTEXT // 4, format=format)
        name = f"{format} + sinks 4 + recent 64 + H2O 30 %"
        yield name, lambda format=format: CombinedCache(config, sinks=4, recent=64, heavy=0.3, format=format)


def combined(bench: Workload) -> Iterator[dict]:
    for name, factory in mixtures(bench.model.config):
        cache = factory()
        ours = isinstance(cache, CompressedCache)
        policy = cache.policy if ours else None
        size = request_bytes(cache)
        row = {"name": name, "policy": policy.name if policy else None, "format": cache.format.name if ours else None}
        yield row | {"parameters": {"policy": str(policy)}} | bench.measure(factory) | {
            "request_bytes": size, "requests": int((MEMORY - WEIGHTS) // size)
        }  # fmt: skip


def choices(bench: Workload) -> Iterator[dict]:
    dense = bench.measure(lambda: DynamicCache(config=bench.model.config))
    yield {"name": "DynamicCache(config=config)", "policy": None, "format": None, "parameters": {}} | dense
    for choice in dict.fromkeys(choice.at(CONTEXT) for ladder in LADDERS.values() for choice in ladder):
        found = bench.measure(lambda choice=choice: CompressedCache(bench.model.config, format=choice.format, policy=choice.policy))
        policy = choice.policy and choice.policy.name
        yield {"name": choice.call, "policy": policy, "format": choice.format, "parameters": {}} | found


STUDIES = ("sinks", "budgets", "defaults", "combined", "choices")


def rows_of(study: str) -> Iterator[dict]:
    windows = (ALL, 1, 32)
    if study == "sinks":
        return sinks()
    if study == "budgets":
        return budgets(workload(torch.float32, windows, 48, 20))
    if study == "defaults":  # many and only compared with each other
        return defaults(workload(torch.float32, windows, 24, 12))
    if study == "choices":
        return choices(workload(torch.bfloat16, (ALL,), 48, 20))
    return combined(workload(torch.bfloat16, (ALL,), 64, 20))  # the bytes of formats are told in relation to 16 bit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY", help=" ".join(STUDIES))
    parser.add_argument("--show", action="store_true", help="the tables, from the rows")
    parser.add_argument("--plot", action="store_true", help="the pngs, from the rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows go")
    parser.add_argument("--threads", type=int, help="of torch; one is faster where others use the cores")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for study in args.studies or (() if args.show or args.plot else STUDIES):
        begin, rows = time.perf_counter(), []
        for row in rows_of(study):
            rows.append(row)
            replace_rows(args.out, f"eviction_{study}", rows)
            print(f"{time.perf_counter() - begin:4.0f} s  {study} {row['name']} {row['parameters']}", file=sys.stderr, flush=True)
        show(rows, study)
    if args.show or args.plot:
        found = read_rows(args.out)
        for study in STUDIES if args.show else ():
            show([row for row in found if row["what"] == f"eviction_{study}"], study)
        if args.plot:
            plot(found, args.out)


if __name__ == "__main__":
    main()
