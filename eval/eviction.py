"""What eviction costs and what it saves, on any model; rows in eval/results/eviction.jsonl, those of the same study and model replaced.

    python eval/eviction.py sinks budgets defaults combined choices    what is named, or all of them, on the embedded model
    python eval/eviction.py combined --model smollm2 --context 1000 --cases 4                    a real one: minutes on two cores
    python eval/eviction.py combined choices --model smollm2 --device cuda --context 8000 --passages 12 --read-on 64 --facts-in 4000 8000
    python eval/eviction.py --show | --plot                    tables | pngs, from the rows of --model

sinks     perplexity of text streamed far beyond the window and the positions that the model was trained for, by number of sinks.
budgets   every policy at 5 to 100 % of the context: KL and perplexity of a continuation, recall of a fact.
defaults  what to choose where a policy leaves a choice.
combined  eviction, compression and both, and how many requests for Llama 70B at 128K eight H100 would hold by arithmetic.
choices   what `recommend` names.

One protocol: the model reads the prompt in one step, the cache cuts it down to the budget, then the model reads on, or answers, token by
token through what is left. Errors and bytes are those of `quality.py`. Recall is *unseen* where the question comes after the cut, and
*seen* where it ends the prompt, so that policies can look at what it attends to; the first token of the answer is then the prompt's own.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from arguments import add_model, at_least, described, in_time, load, name_of, refused
from eviction_plots import plot
from eviction_tables import show
from rows import read_rows, replace_rows
from transformers import DynamicCache, PreTrainedConfig
from workload import CacheMaker, Workload

from qkvcache import CompressedCache
from qkvcache.caches import CombinedCache, H2OCache, SinkCache
from qkvcache.evaluation.quality import stream
from qkvcache.evaluation.recall import CODE_WORD, NUMBER
from qkvcache.planning.recommend import LADDERS, Choice
from qkvcache.policies import H2O, TOVA, KeyDiff, Knorm, LagKV, Policy, Random, SinkWindow, SnapKV

RESULTS = Path(__file__).parent / "results" / "eviction.jsonl"
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
STREAMS, CHUNK = 3, 128
SINKS, WINDOWS = (0, 1, 2, 4, 8, 16, 32), (256, 1020)


class Bench:
    """The model, and the workload of all studies but `num_sink_tokens`, which is made once."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.context = args, args.context
        self.model, self.tokenizer, self.ids = load(args)

    @functools.cached_property
    def workload(self) -> Workload:
        args = self.args
        sizes = {name: getattr(args, name) for name in ("context", "passages", "read_on", "cases", "facts_in")}
        form = CODE_WORD if args.model == "demo" else NUMBER
        return Workload.make(self.model, self.tokenizer, self.ids, **sizes, form=form)

    def measure(self, make: CacheMaker) -> dict:
        return self.workload.measure(make)

    def policy_row(self, name: str, policy_of: Callable[[int], Policy], **parameters) -> dict:
        """Of a policy for so many tokens of context."""
        found = self.measure(lambda context: CompressedCache(self.model.config, policy=policy_of(context)))
        return {"name": name, "policy": policy_of(self.context).name, "format": "identity", "parameters": parameters} | found


def sinks(bench: Bench) -> Iterator[dict]:
    """Beyond: the second half of the stream, whose tokens are further on than the model was trained for."""
    model, trained = bench.model, bench.model.config.max_position_embeddings
    apart, streamed = len(bench.ids) // STREAMS, 2 * trained
    text = torch.tensor([bench.ids[i * apart : i * apart + streamed] for i in range(STREAMS)], device=model.device)

    def row(name: str, cache: DynamicCache, tokens: int, **parameters) -> dict:
        losses = torch.cat(list(stream(model, cache, text[:, :tokens], CHUNK)), dim=1)
        spans = {"within": losses[:, trained // 2 : trained], "beyond": losses[:, trained:]}
        found = {f"perplexity_{span}": loss.mean().exp().item() for span, loss in spans.items() if loss.numel()}
        size = cache.nbytes / STREAMS / tokens if isinstance(cache, CompressedCache) else None
        same = {"tokens": tokens, "streams": STREAMS, "chunk": CHUNK, "bytes_per_token": size, "dtype": str(model.dtype)}
        return {"name": name, "policy": name, "format": "identity", "parameters": parameters} | found | same

    yield row("dense", DynamicCache(config=model.config), trained)
    for window in WINDOWS:
        for count in SINKS:
            for positions in ("original", "cache") if count else ("original",):
                cache = SinkCache(model.config, window_length=window, num_sink_tokens=count, positions=positions)  # type: ignore[arg-type]
                yield row("SinkWindow", cache, streamed, window=window, num_sink_tokens=count, positions=positions)


def lag_of(budget: int) -> int:
    """The paper's 128 tokens do not fit into the smallest budgets."""
    return min(128, budget // 4)


def budgets(bench: Bench) -> Iterator[dict]:
    kinds: dict[str, Callable[[int], Policy]] = {
        "H2O, mean": lambda size: H2O(budget=size), "H2O, sum": lambda size: H2O(budget=size, reduce="sum"),
        "TOVA": lambda size: TOVA(budget=size), "SnapKV": lambda size: SnapKV(budget=size), "KeyDiff": lambda size: KeyDiff(budget=size),
        "LagKV": lambda size: LagKV(budget=size, lag=lag_of(size), recent=lag_of(size)), "Knorm": lambda size: Knorm(budget=size),
        "SinkWindow": lambda size: SinkWindow(window_length=size - 4), "Random": lambda size: Random(budget=size),
    }  # fmt: skip
    for share in SHARES:
        for name, kind in kinds.items():
            found = bench.policy_row(name, lambda context: kind(int(share * context)), share=share, budget=int(share * bench.context))  # noqa: B023
            yield found | {"share": share}


def variants() -> Iterator[tuple[Callable[..., Policy], dict]]:
    yield from ((H2O, {"reduce": reduce, "recent": recent}) for reduce in ("mean", "sum") for recent in (0.25, 0.5))
    yield H2O, {"reduce": "mean", "recent": 0.5, "num_sink_tokens": 4}
    for kind in (KeyDiff, TOVA, Knorm, SnapKV):
        yield from ((kind, {"num_sink_tokens": 4, "recent": recent}) for recent in (0.0, 0.125, 0.5))
        yield kind, {"num_sink_tokens": 0, "recent": 0.125}
    yield TOVA, {"num_sink_tokens": 0, "recent": 0.0}  # the paper's
    yield from ((SnapKV, {"num_sink_tokens": 4, "recent": 0.125, "kernel_size": kernel}) for kernel in (1, 7))
    yield from ((LagKV, {"num_sink_tokens": 4, "lag": lag, "recent": lag}) for lag in (32, 64, 128))
    yield LagKV, {"num_sink_tokens": 0, "lag": 64, "recent": 64}


def defaults(bench: Bench) -> Iterator[dict]:
    for share in (0.1, 0.2, 0.5):
        for kind, options in variants():
            made = functools.partial(_with_share, kind, share, options)
            policy = made(bench.context)
            name = ", ".join([policy.name, *(f"{key}={value}" for key, value in options.items())])
            yield bench.policy_row(name, made, share=share, budget=int(share * bench.context), **options) | {"share": share}


def _with_share(kind: Callable[..., Policy], share: float, options: dict, context: int) -> Policy:
    return kind(budget=int(share * context), **options)


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
    exact = layer.num_sink_tokens + min(layer.residual_length, recent)  # type: ignore[attr-defined]
    return float(LAYERS * (exact * bf16 + (kept - exact) * cache.format.bytes_per_token(HEAD_DIM, KV_HEADS) + kept * beside))


def mixtures(config: PreTrainedConfig) -> Iterator[tuple[str, CacheMaker]]:
    yield "dense", lambda context: DynamicCache(config=config)
    yield "H2O 50 %", lambda context: H2OCache(config, budget=0.5, recent=context // 4)
    yield "sinks 4 + window 1,020", lambda context: SinkCache(config, positions="original")
    yield "sinks 4 + window 252", lambda context: SinkCache(config, window_length=252, positions="original")
    for format in ("fp8", "nvfp4", "turboquant_4bit_nc"):
        yield format, lambda context, format=format: CompressedCache(config, format=format)
        yield f"{format} + H2O 50 %", lambda context, format=format: H2OCache(config, budget=0.5, recent=context // 4, format=format)
        name = f"{format} + sinks 4 + recent 64 + H2O 30 %"
        yield name, lambda context, format=format: CombinedCache(config, num_sink_tokens=4, recent=64, heavy=0.3, format=format)


def combined(bench: Bench) -> Iterator[dict]:
    for name, make in mixtures(bench.model.config):
        cache = make(bench.context)
        ours = isinstance(cache, CompressedCache)
        policy = cache.policy if ours else None
        size = request_bytes(cache)
        row = {"name": name, "policy": policy.name if policy else None, "format": cache.format.name if ours else None}
        yield row | {"parameters": {"policy": str(policy)}} | bench.measure(make) | {
            "request_bytes": size, "requests": int((MEMORY - WEIGHTS) // size)
        }  # fmt: skip


def choices(bench: Bench) -> Iterator[dict]:
    config = bench.model.config
    dense = bench.measure(lambda context: DynamicCache(config=config))
    yield {"name": "DynamicCache(config=config)", "policy": None, "format": None, "parameters": {}} | dense
    for choice in dict.fromkeys(choice for ladder in LADDERS.values() for choice in ladder):

        def make(context: int, choice: Choice = choice) -> CompressedCache:
            return CompressedCache(config, format=choice.format, policy=choice.at(context).policy)

        at = choice.at(bench.context)
        yield {"name": at.call, "policy": at.policy and at.policy.name, "format": at.format, "parameters": {}} | bench.measure(make)


STUDIES: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "sinks": sinks, "budgets": budgets, "defaults": defaults, "combined": combined, "choices": choices
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY", help=" ".join(STUDIES))
    add_model(parser, RESULTS)
    parser.add_argument("--context", type=at_least(200), default=2000, help="tokens of the texts to read on")
    parser.add_argument("--passages", type=at_least(1), default=8, help="texts to read on")
    parser.add_argument("--read-on", type=at_least(2), default=34, help="tokens of each; the first does not count")
    parser.add_argument("--facts-in", nargs="*", type=at_least(200), default=[], help="tokens of contexts with facts; default: --context")
    parser.add_argument("--cases", type=at_least(1), default=20, help="facts in each, with the question seen and unseen")
    parser.add_argument("--show", action="store_true", help="the tables, from the rows")
    parser.add_argument("--plot", action="store_true", help="the pngs, from the rows")
    parser.add_argument("--threads", type=int, help="of torch; one is faster where others use the cores")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    if not (args.show or args.plot):
        if wrong := refused(args):
            parser.error(wrong)
        begin, bench = time.perf_counter(), Bench(args)
        for study in args.studies or STUDIES:
            rows = []
            for row in in_time(STUDIES[study](bench), args.minutes, begin):
                rows.append(described(args) | row)
                replace_rows(args.out, what(study, args.model), rows)
                print(f"{time.perf_counter() - begin:4.0f} s  {study} {row['name']} {row['parameters']}", file=sys.stderr, flush=True)
    found = read_rows(args.out)
    of = {study: [row for row in found if row["what"] == what(study, args.model)] for study in args.studies or STUDIES}
    if args.plot:
        plot(of, args.out.with_name(args.out.stem + ("" if args.model == "demo" else f"_{name_of(args.model)}")))
    else:
        for study, rows in of.items():
            show(rows, study)


def what(study: str, model: str) -> str:
    return f"eviction_{study}" + ("" if model == "demo" else f"_{name_of(model)}")


if __name__ == "__main__":
    main()
