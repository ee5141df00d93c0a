"""Long answers: text that a model generates greedily through each cache against the dense run's; rows in eval/results/long_answers.jsonl.

    python eval/long_answers.py --model smollm2 --context 512 --tokens 96 --prompts 4        minutes on two cores
    python eval/long_answers.py --model smollm2 --device cuda --context 2000 --tokens 1000 --prompts 16
    python eval/long_answers.py --show | --markdown | --plot            from the rows of --model

A cache feeds on itself here: each token that it gets wrong is stored and read. Measured are where an answer first differs from the dense
run's; how many answers are still the same after so many tokens; KL divergence along the dense run's answer, by position; and whether a
chain of simple steps ends as it should, counted by words: how many come before the first mistake, and how alike the whole is (difflib).

text     goes on with a text: nothing is right or wrong
count    goes on counting
list     copies a list that stands in the first third of the prompt
recite   recites a part of the text that stands there, from its first words on
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from harness import at_least, described, fraction, in_time, load, name_of, parser_of, present, stored_or_measured
from long_answers_tables import BUCKETS, plot, table
from recording import record
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from workload import rounded

from qkvcache import policies
from qkvcache.evaluation.quality import compare, held_bytes, steps
from qkvcache.evaluation.recall import KEYS
from qkvcache.evaluation.spec import CacheSpec
from qkvcache.formats import REGISTRY

KINDS = ("text", "count", "list", "recite")
USUAL = (
    "identity", "int8", "fp8", "turboquant_k8v4", "hadaquant_k4v4", "turboquant_4bit_nc", "int4", "nvfp4",
    "hadaquant_k3v3", "turboquant_3bit_nc", "hadaquant_k2v2",
)  # fmt: skip
EVICTED = "turboquant_4bit_nc"


@dataclass(frozen=True)
class Prompt:
    """`ids`: the prompt; `expected`: the words that the answer should begin with, none where any will do."""

    kind: str
    ids: list[int]
    expected: list[str]


def prompt(kind: str, rng: random.Random, text: list[int], tokenizer: PreTrainedTokenizerBase, context: int, tokens: int) -> Prompt:
    """`context` tokens: a stretch of `text` with what the task needs in its first third and at its end."""

    def encode(string: str) -> list[int]:
        return tokenizer(string, add_special_tokens=False)["input_ids"]

    planted, question, expected = [], [], ""
    if kind == "count":
        begin = rng.randrange(100, 300)
        question = encode("\n\nNumbers in order: " + ", ".join(map(str, range(begin, begin + 20))) + ",")
        expected = " ".join(f"{n}," for n in range(begin + 20, begin + 20 + tokens))
    elif kind == "list":
        lines = [f"{i}. {rng.choice(KEYS)} {rng.randrange(100, 1000)}" for i in range(1, context // 3 // 9)]
        planted = encode("\n\nA list:\n" + "\n".join(lines) + "\n\n")
        question = encode("\n\nThe same list, copied without a mistake:\n" + "\n".join(lines[:4]) + "\n")
        expected = "\n".join(lines[4:])
    elif kind == "recite":
        part = rng.randrange(len(text) - context // 2)
        planted = encode("\n\n") + text[part : part + context // 3] + encode("\n\n")
        question = encode("\n\nThe same part once more:\n\n") + text[part : part + 32]
        expected = str(tokenizer.decode(text[part + 32 : part + context // 3]))
    filler = context - len(planted) - len(question)
    at = rng.randrange(len(text) - filler)
    before = filler // 10
    ids = text[at : at + before] + planted + text[at + before : at + filler] + question
    return Prompt(kind, ids, str(expected).split())


def outcome(expected: list[str], answer: str, whole: bool = False) -> dict:
    """Of what `answer` has of the `expected` words: how many come before the first mistake, and how alike the two are; the last word of an
    answer that ends in the middle of it does not count."""
    words = answer.split()[: None if whole else -1][: len(expected)]
    expected = expected[: len(words)]
    right = next((i for i, (x, y) in enumerate(zip(expected, words, strict=True)) if x != y), len(words))
    return {"words": len(words), "before_mistake": right, "similarity": SequenceMatcher(None, expected, words, autojunk=False).ratio()}


@torch.no_grad()
def generate(model: PreTrainedModel, cache: Cache, first: Tensor, tokens: int) -> Tensor:
    """Greedily, from the `first` token `[B, 1]` on, whatever ends an answer elsewhere: `[B, tokens]`."""
    answer = [first]
    while len(answer) < tokens:
        answer.append(model(answer[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    return torch.cat(answer, dim=1)


@torch.no_grad()
def along(model: PreTrainedModel, cache: Cache, dense: Cache, ids: Tensor) -> Tensor:
    """KL divergence after each token of `ids` `[B, N]`, which both caches read: `[B, N]`."""
    found, at = [], 0
    for logits in steps(model, cache, ids):
        other = model(ids[:, at : at + logits.shape[1]], past_key_values=dense).logits
        found.append(compare(logits.float().log_softmax(-1), other.float().log_softmax(-1))[0])
        at += logits.shape[1]
    return torch.cat(found, dim=1)


def measure(args: argparse.Namespace) -> Iterator[dict]:
    model, tokenizer, text = load(args)
    prompts = [prompt(KINDS[i % len(KINDS)], random.Random(i), text, tokenizer, args.context, args.tokens) for i in range(args.prompts)]
    ids = torch.tensor([each.ids for each in prompts], device=model.device)
    specs = [CacheSpec(cache=name) for name in args.formats]
    specs += [CacheSpec(cache=EVICTED, policy=name, budget=int(args.budget * args.context)) for name in args.policies]
    recorded, logits = record(model, ids)
    first = logits.argmax(-1, keepdim=True)

    def filled(spec: CacheSpec) -> Cache:
        return recorded.fill(spec.make(model.config), model, ids, tokenizer)

    dense = None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for spec in in_time(progress.track([CacheSpec(), *specs], description="caches"), args.minutes):
            cache = filled(spec)
            answer = generate(model, cache, first, args.tokens)
            size = held_bytes(cache) / args.prompts / cache.get_seq_length()
            del cache
            dense = answer if dense is None else dense
            differs = torch.cat([answer != dense, torch.ones_like(first, dtype=torch.bool)], dim=1).int().argmax(1).tolist()
            kl = torch.zeros(args.prompts, 0) if spec.dense else along(model, filled(spec), filled(CacheSpec()), dense[:, : args.forced])
            outcomes = [
                {"kind": each.kind, "first_difference": differs[i]}
                | (outcome(each.expected, str(tokenizer.decode(answer[i]))) if each.expected else {})
                for i, each in enumerate(prompts)
            ]
            buckets = {f"{low}-{high}": rounded(kl[:, low:high].mean(1)) for low, high in BUCKETS if low < kl.shape[1]}
            yield described(args) | {
                "cache": spec.name, "dtype": str(model.dtype), "context": args.context, "tokens": args.tokens, "prompts": args.prompts,
                "bytes_per_token": size, "answers": outcomes, "kls": buckets,
            }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "long_answers", model="demo")
    usual = [name for name in USUAL if name in REGISTRY]
    parser.add_argument("--formats", nargs="*", default=usual, choices=[[], *REGISTRY], metavar="FORMAT")
    parser.add_argument("--policies", nargs="*", default=[], choices=[[], *policies.REGISTRY], metavar="POLICY", help=f"with {EVICTED}")
    parser.add_argument("--budget", type=fraction, default=0.5, help="share of the context that policies keep")
    parser.add_argument("--context", type=at_least(300), default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=at_least(2), default=500, help="tokens of an answer")
    parser.add_argument("--forced", type=at_least(2), help="tokens of the dense answer along which KL is measured; default: --tokens")
    parser.add_argument("--prompts", type=at_least(1), default=8, help=f"a quarter each: {', '.join(KINDS)}")
    args = parser.parse_args(arguments)
    args.forced = min(args.forced or args.tokens, args.tokens)
    what = f"long_answers_{name_of(args.model)}"
    rows = stored_or_measured(parser, args, what, measure)
    present(args, [table(rows)], lambda: plot(rows, args.out.with_name(f"{what}.png")))


if __name__ == "__main__":
    main()
