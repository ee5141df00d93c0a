"""Quality against bytes: a model with every format, and with what evicts tokens; rows in eval/results/quality.jsonl.

    python eval/quality.py                                        the embedded model: minutes on two cores
    python eval/quality.py --model smollm2 --context 1000 --formats int8,turboquant_4bit_nc     a real one: minutes on two cores
    python eval/quality.py --model smollm2 --device cuda --context 8064 --passages 12 --read-on 128 --facts-in 1000 4000 8000 --cases 16
    python eval/quality.py --show | --markdown | --plot      from the rows of --model

The model reads a context once, then reads on, or answers, through each cache as if the tokens came one by one. KL divergence is of the next
token from the dense run, in nats. Recall is of facts, the question *unseen* when the context is stored and cut down, or *seen* at its end.
Errors are standard errors over the passages, or of a share of the facts. Where formats or policies are named, nothing else is measured.
The model computes in fp32, so that nothing but the cache rounds; bytes are counted for the same cache in 16 bit. `identity`, which stores
what it is given, shows by how much numbers differ anyway.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

from harness import at_least, described, fraction, in_time, load, name_of, parser_of, present, refused, stored_or_measured
from quality_pictures import plot, table
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache
from workload import CacheMaker, Workload

from qkvcache import CompressedCache, policies
from qkvcache.evaluation.recall import FORMS
from qkvcache.formats import REGISTRY
from qkvcache.planning.model import shapes
from qkvcache.progress import progress, track

ZONES = {"4 + 64": {}, "none": {"num_sink_tokens": 0, "residual_length": 0}}
EVICTED = ("turboquant_4bit_nc",)
"""What evicting caches store tokens in: what `recommend` takes most often."""


BUDGETS, LEAST = (0.1, 0.25, 0.5), 200
"""Shares of the context that policies keep, unless told, and the tokens below which such a share is left out."""


def policy_of(name: str, size: int) -> policies.Policy:
    return policies.named(name, budget=size - 4 if name == "sink_window" else size)


def caches(config: PreTrainedConfig, args: argparse.Namespace) -> Iterator[tuple[dict, CacheMaker]]:
    """What names a row, and what makes its cache."""

    def format_cache(context: int, **options) -> Cache:
        return CompressedCache(config, **options)

    def evicting(context: int, format: str, policy: str, share: float) -> Cache:
        return CompressedCache(config, format=format, policy=policy_of(policy, int(share * context)))

    yield {"format": None, "policy": None, "exact": "all"}, lambda context: DynamicCache(config=config)
    for format in args.formats:
        for exact in args.exact:
            yield {"format": format, "policy": None, "exact": exact}, functools.partial(format_cache, format=format, **ZONES[exact])
    for format in args.evicted:
        for share in args.budgets:
            for name in args.policies:
                row = {"format": format, "policy": name, "budget": share, "exact": "4 + 64"}
                yield row, functools.partial(evicting, format=format, policy=name, share=share)


def measure(args: argparse.Namespace) -> Iterator[dict]:
    model, tokenizer, ids = load(args)
    dims = head_dims(model.config)
    args.formats = [name for name in args.formats if not any(REGISTRY[name].refuses(dim) for dim in dims)]
    sizes = {"context": args.context, "passages": args.passages, "read_on": args.read_on, "cases": args.cases}
    with progress("reading without a compressed cache"):
        workload = Workload.make(model, tokenizer, ids, **sizes, facts_in=args.facts_in, form=FORMS[args.facts])
    every = list(caches(model.config, args))
    for row, make in in_time(track(every, "caches", len(every)), args.minutes):
        yield described(args) | row | workload.measure(make) | {"facts": args.facts}


def head_dims(config: PreTrainedConfig) -> set[int]:
    return {shape.head_dim for shape in shapes(config, 2)}


def _refused(args: argparse.Namespace) -> str | None:
    if wrong := refused(args):
        return wrong
    least = min(args.context, *args.facts_in)
    for part in args.budgets:
        try:
            for name in args.policies:
                policy_of(name, int(part * least))
        except ValueError as error:
            return f"argument --budgets: {part} of {least} tokens is too little for {name}: {error}"
    return None


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "quality", model="demo")
    parser.add_argument("--formats", nargs="*", choices=[[], *REGISTRY], metavar="A,B", help="default: all, or none with --policies")
    parser.add_argument("--exact", nargs="+", default=list(ZONES), choices=ZONES, help="exact zones of formats without a policy")
    all_or_none = {"nargs": "*", "choices": [[], *policies.REGISTRY], "help": "default: all, or none with --formats"}
    parser.add_argument("--policies", metavar="POLICY", **all_or_none)
    parser.add_argument("--budgets", nargs="*", type=fraction, help=f"shares of the context that policies keep; default: {BUDGETS}")
    parser.add_argument("--evicted", nargs="*", default=EVICTED, choices=REGISTRY, metavar="FORMAT", help="formats of evicting caches")
    parser.add_argument("--context", type=at_least(100), default=2000, help="tokens of the texts to read on")
    parser.add_argument("--passages", type=at_least(1), default=8, help="texts to read on")
    parser.add_argument("--read-on", type=at_least(2), default=34, help="tokens of each; the first does not count")
    parser.add_argument("--facts-in", nargs="*", type=at_least(200), default=[], help="tokens of contexts with facts; default: --context")
    parser.add_argument("--cases", type=at_least(1), default=8, help="facts in each, with the question seen and unseen")
    parser.add_argument(
        "--facts", choices=FORMS, help="what is to be recalled; default: code_word for the embedded model, number for others"
    )
    args = parser.parse_args(arguments)
    formats = list(args.formats if args.formats is not None else () if args.policies else REGISTRY)
    args.policies = list(args.policies if args.policies is not None else () if args.formats else policies.REGISTRY)
    args.formats = formats
    args.facts_in = args.facts_in or [args.context]
    if args.budgets is None:
        args.budgets = [part for part in BUDGETS if part * min(args.context, *args.facts_in) >= LEAST]
    args.facts = args.facts or ("code_word" if args.model == "demo" else "number")
    rows = stored_or_measured(parser, args, f"quality_{name_of(args.model)}", measure, _refused)
    present(args, [table(rows)], lambda: plot(rows, args.out.with_name(f"{args.out.stem}_{name_of(args.model)}.png")))


if __name__ == "__main__":
    main()
