"""Best of n: several samples of one prompt that hold the prompt once, beside rows that hold it each, on the embedded model.

    python examples/branches.py

A long document hides a code word. The model answers the question for it n times at a temperature, and the answer with the highest mean
log-probability of its tokens counts. Three ways to get n samples:

    rows          `num_return_sequences` with an empty cache: transformers repeats the prompt, and every row reads and holds it
    branches      the prompt is read once, `cache.batch_repeat_interleave(n)` makes n rows of it, which share its pages; on a GPU
                  attention, too, reads what they share once for all of them
    forks         `cache.fork(n - 1)`: n caches that share the pages, for branches that go on at their own time, as those of an agent
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import StoppingCriteriaList

from qkvcache import CompressedCache, demo
from qkvcache.evaluation.recall import KEYS, NEEDLE, QUESTION, code_word, plant
from qkvcache.evaluation.speed import Clock

ANSWER_TOKENS = 6
Sampled = tuple[list[tuple[float, str]], list[CompressedCache], Clock]
"""The mean log-probability and the text of each sample, the caches that hold them, and the times of their tokens."""


class Sampler:
    """Samples of the answer to the prompt `ids` `[1, T]`."""

    def __init__(self, model, tokenizer, ids: Tensor, format: str, temperature: float):
        self.model, self.tokenizer, self.ids, self.format, self.temperature = model, tokenizer, ids, format, temperature

    def cache(self) -> CompressedCache:
        return CompressedCache(self.model.config, format=self.format)

    def read(self) -> CompressedCache:
        """A cache that has read the prompt up to its last token, which `generate` reads."""
        cache = self.cache()
        with torch.no_grad():
            self.model(self.ids[:, :-1], cache=cache, logits_to_keep=1)
        return cache

    def sample(self, cache: CompressedCache, count: int, clock: Clock) -> list[tuple[float, str]]:
        out = self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), cache=cache, num_return_sequences=count, do_sample=True,
            temperature=self.temperature, top_k=0, max_new_tokens=ANSWER_TOKENS, stopping_criteria=StoppingCriteriaList([clock]),
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = out.sequences[:, self.ids.shape[1] :]
        logits = torch.stack(out.logits, dim=1).float().log_softmax(-1)
        chances = logits.gather(-1, new[..., None])[..., 0].tolist()
        texts = [[self.tokenizer.decode(row[: i + 1]) for i in range(len(row))] for row in new]
        ends = [next((i for i, text in enumerate(row) if "." in text), len(row) - 1) + 1 for row in texts]  # with the full stop
        answers = zip(chances, texts, ends, strict=True)
        return [(sum(chance[:end]) / end, text[end - 1].split(".")[0].strip()) for chance, text, end in answers]

    def rows(self, count: int) -> Sampled:
        cache, clock = self.cache(), Clock()
        return self.sample(cache, count, clock), [cache], clock

    def branches(self, count: int) -> Sampled:
        cache, clock = self.read(), Clock()
        cache.batch_repeat_interleave(count)
        return self.sample(cache, count, clock), [cache], clock

    def forks(self, count: int) -> Sampled:
        cache, clock = self.read(), Clock()
        caches = [cache, *(cache.fork(count - 1) if count > 1 else [])]
        return [found for branch in caches for found in self.sample(branch, 1, clock)], caches, clock


def held(caches: list[CompressedCache]) -> int:
    """The bytes of all tensors of the caches, those that several share once."""
    tensors = [x.untyped_storage() for cache in caches for layer in cache.layers for _, x in layer.tensors()]
    return sum({x.data_ptr(): x.nbytes() for x in tensors}.values())


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500, help="of the document")
    parser.add_argument("--branches", type=int, default=8, metavar="N", help="samples")
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--format", default="turboquant_4bit_nc")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    transformers.logging.disable_progress_bar()
    model, tokenizer = demo.load(torch.bfloat16)
    model.to(args.device)
    rng = random.Random(0)
    key, word = rng.choice(KEYS), code_word(rng)
    text = plant(tokenizer.decode(demo.text_ids(tokenizer)[: args.tokens]), NEEDLE.format(key=key, word=word), 0.4)
    ids = tokenizer(f"{text}\n\n{QUESTION.format(key=key)}", return_tensors="pt")["input_ids"].to(args.device)
    sampler = Sampler(model, tokenizer, ids, args.format, args.temperature)
    console = Console(width=100)
    console.print(f"A document of {ids.shape[1]:,} tokens, and {args.branches} samples of the answer to: {QUESTION.format(key=key)} ...\n")
    ways: dict[str, Callable[[int], Sampled]] = {"rows": sampler.rows, "branches": sampler.branches, "forks": sampler.forks}
    for way in ways.values() if args.device != "cpu" else ():
        way(2)  # compiles kernels

    rows = []
    for name, way in ways.items():
        torch.manual_seed(0)
        begin = time.perf_counter()
        answers, caches, clock = way(args.branches)
        best = max(answers)
        rows.append(
            {
                "way": name,
                "prompt_tokens": ids.shape[1] * (args.branches if name == "rows" else 1),
                "first": clock.times[0] - begin,
                "seconds": time.perf_counter() - begin,
                "bytes": held(caches),
                "right": sum(answer == word for _, answer in answers),
                "answer": best[1],
                "mean_log_probability": best[0],
                "word": word,
            }
        )
    show(rows, args.branches, console)
    return rows


def show(rows: list[dict], branches: int, console: Console) -> None:
    table = Table(box=None, title=f"best of {branches}")
    for header in ("", "prompt tokens read", "first token, ms", "all, ms", "MB held", "right", "best answer"):
        table.add_column(header, justify="left" if header in ("", "best answer") else "right", no_wrap=True)
    for row in rows:
        times = (f"{1000 * row[name]:,.0f}" for name in ("first", "seconds"))
        best = f"{row['answer']} ({row['mean_log_probability']:.2f})"
        counts = f"{row['bytes'] / 1e6:.1f}", f"{row['right']} of {branches}"
        table.add_row(row["way"], f"{row['prompt_tokens']:,}", *times, *counts, best)
    console.print(table)


if __name__ == "__main__":
    main()
