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
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from error_bars import share_error, standard_error
from harness import at_least, described, fraction, in_time, load, name_of, parser_of, present, refused, stored_or_measured
from quality_pictures import plot, table
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, policies
from qkvcache.evaluation.calibrate import windows_of
from qkvcache.evaluation.quality import Passages, Prefilled, RecallSet, divergence, held_bytes, prefill, recall
from qkvcache.evaluation.recall import FORMS
from qkvcache.formats import REGISTRY
from qkvcache.planning.model import shapes
from qkvcache.progress import progress, track

CacheMaker = Callable[[int], Cache]
"""Makes a new cache for a context of the given tokens, of which a policy's budget may be a share."""


@dataclass(frozen=True)
class Workload:
    """`passages` to continue, and facts whose question is `unseen` or `seen` when the context is compressed, by tokens of context."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    passages: Passages
    unseen: dict[int, RecallSet]
    seen: dict[int, RecallSet]
    half: PreTrainedModel
    """The model in 16 bits, with which bytes are measured whatever dtype the model computes in."""
    row: Prefilled
    """The first passage's context, read by `half`."""

    @classmethod
    def read(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], args: argparse.Namespace) -> Workload:
        """Passages of `ids`, evenly spaced, and facts in contexts of each of `args.facts_in` tokens. Raises ValueError for a text that is
        shorter than all passages."""
        windows = windows_of(ids, args.passages, args.context + args.read_on).to(model.device)

        def facts(seen: bool) -> dict[int, RecallSet]:
            make = functools.partial(RecallSet.make, model, tokenizer, ids, seed=0, seen=seen, form=FORMS[args.facts])
            return {tokens: make(tokens, args.cases) for tokens in args.facts_in}

        passages, half = Passages.read(model, windows, args.context), model
        if model.dtype == torch.float32:
            half = copy.deepcopy(model).to(torch.bfloat16)
        return cls(model, tokenizer, passages, facts(False), facts(True), half, prefill(half, passages.context[:1])[0])

    def bytes_per_token(self, cache: Cache) -> float:
        """Measured bytes of the empty `cache` after the first passage's context."""
        self.row.fill(cache, self.half, self.passages.context[:1], self.tokenizer)
        return held_bytes(cache) / self.passages.context.shape[1]

    def measure(self, make: CacheMaker) -> dict:
        """Bytes and quality of a cache: `kl` (nats), `same_top` and `perplexity_ratio` with standard errors over the passages, and values
        of each passage; `recall`: facts recalled with the question unseen and seen, by tokens of context."""
        passages, context = self.passages.context.shape
        result = divergence(self.model, self.passages, functools.partial(make, context), self.tokenizer)
        size, dense = (self.bytes_per_token(cache) for cache in (make(context), DynamicCache(config=self.model.config)))
        change = result.loss_changes.mean().exp().item()
        right = {str(tokens): [self._right(sets[tokens], make, tokens) for sets in (self.unseen, self.seen)] for tokens in self.unseen}
        counted = passages * (self.passages.continuation.shape[1] - 1)
        same_top_error = max(standard_error(result.same_tops), share_error(result.same_top * counted, counted))
        last = right[str(max(self.unseen))]
        return {
            "bytes_per_token": size, "ratio": dense / size, "kl": result.kl, "kl_error": standard_error(result.kls),
            "same_top": result.same_top, "same_top_error": same_top_error,
            "perplexity": result.perplexity, "dense_perplexity": self.passages.perplexity,
            "perplexity_ratio": change, "perplexity_ratio_error": change * standard_error(result.loss_changes),
            "recall": right, "recall_unseen": last[0] / self.cases, "recall_seen": last[1] / self.cases, "cases": self.cases,
            "context": context, "read_on": [passages, self.passages.continuation.shape[1]], "dtype": str(self.model.dtype),
            "kls": rounded(result.kls), "loss_changes": rounded(result.loss_changes),
        }  # fmt: skip

    def _right(self, cases: RecallSet, make: CacheMaker, tokens: int) -> int:
        return round(recall(self.model, self.tokenizer, cases, functools.partial(make, tokens)) * self.cases)

    @property
    def cases(self) -> int:
        return len(next(iter(self.unseen.values())).cases)


def rounded(values: Tensor) -> list[float]:
    return [float(f"{x:.5g}") for x in values.tolist()]


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
    dims = {shape.head_dim for shape in shapes(model.config, 2)}
    args.formats = [name for name in args.formats if not any(REGISTRY[name].refuses(dim) for dim in dims)]
    with progress("reading without a compressed cache"):
        workload = Workload.read(model, tokenizer, ids, args)
    every = list(caches(model.config, args))
    for row, make in in_time(track(every, "caches", len(every)), args.minutes):
        yield described(args) | row | workload.measure(make) | {"facts": args.facts}


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
    parser = parser_of(__doc__, "quality", float("inf"), model="demo")
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
