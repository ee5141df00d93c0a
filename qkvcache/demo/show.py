"""`qkvcache demo`: one prompt through a cache as in user code, then a table of a few caches: bytes, divergence and recall."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from .. import CompressedCache, TurboQuantCache
from ..evaluation.quality import Passages, RecallSet, divergence, recall
from ..evaluation.recall import CODE_WORD, NUMBER, Form, RecallCase, recall_case
from ..models import load
from ..options import table
from ..progress import progress
from ..releases import CACHE_ARGUMENT
from . import text_ids

CACHES = {
    "QuantizedPerTokenCache, 8 bits": "int8",
    "TurboQuantCache, 4 bits": "turboquant_4bit_nc",
    "HadaQuantCache, 3 bits": "hadaquant_k3v3",
}
"""The formats of the table beside the uncompressed cache, by the class that has each."""
SNIPPET = f"""\
cache = TurboQuantCache(model.config)
out = model.generate(
    **inputs, {CACHE_ARGUMENT}=cache, do_sample=False,
    max_new_tokens=16, stop_strings=".", tokenizer=tokenizer,
)
"""
"""What the demo prints and runs."""
PASSAGES = 4
"""Texts that are read on, whose means give the error of the divergence."""


@dataclass(frozen=True)
class Size:
    """The size of a demo. `context`: tokens of the prompt and of each text's context; `read_on`: tokens read after a
    context; `recalls`, `form`: number and form of recall cases."""

    context: int
    read_on: int
    recalls: int
    form: Form


SIZES = {"demo": Size(2000, 40, 8, CODE_WORD)}
REAL = Size(700, 16, 4, NUMBER)
"""The size for every other model: about a minute on two CPU cores for 135 million parameters."""


def run(
    name: str = "demo",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    console: Console | None = None,
    seed: int = 0,
    formats: Sequence[str] | None = None,
) -> list[dict]:
    """The rows of the table for the model called `name`, dense first: `bytes_per_token`, `ratio` (dense bytes divided by these), `kl`
    and its standard error `kl_error` in nats, `recall` (the share of right answers). Prints the snippet and its answer to `console` if
    given. `formats`: only these; None: the formats of `CACHES`."""
    model, tokenizer = load(name, dtype, device)
    size = SIZES.get(name, REAL)
    ids = text_ids(tokenizer)
    if console:
        case = recall_case(random.Random(seed), str(tokenizer.decode(ids[: size.context])), 0.4, distractors=3, form=size.form)
        answer(model, tokenizer, case, console)
    chosen = CACHES if formats is None else {format: format for format in formats}
    factories: dict[str, Callable[[], Cache]] = {"DynamicCache": partial(DynamicCache, config=model.config)}
    factories |= {label: partial(CompressedCache, model.config, format=format) for label, format in chosen.items()}
    with progress("measuring") as done:
        begin, steps = len(ids) // 2, 2 * len(factories) + 2
        window = torch.tensor(ids[begin : begin + PASSAGES * (size.context + size.read_on)], dtype=torch.int64, device=model.device)
        passages = Passages.read(model, window.view(PASSAGES, -1), size.context)
        done(1, steps)
        cases = RecallSet.make(model, tokenizer, ids, size.context, size.recalls, seed=seed, form=size.form)
        rows: list[dict] = []
        for label, factory in factories.items():
            done(2 + 2 * len(rows), steps)
            quality = divergence(model, passages, factory)
            rows.append(
                {
                    "cache": label,
                    "bytes_per_token": quality.bytes_per_token,
                    "ratio": (rows[0]["bytes_per_token"] if rows else quality.bytes_per_token) / quality.bytes_per_token,
                    "kl": quality.kl,
                    "kl_error": quality.kls.std().item() / PASSAGES**0.5,
                    "recall": recall(model, tokenizer, cases, factory),
                }
            )
    return rows


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: RecallCase, console: Console) -> None:
    """Prints `SNIPPET` and what it answers to the prompt of `case`, and the cache."""
    inputs = tokenizer(case.prompt, return_tensors="pt").to(model.device)
    names = {"TurboQuantCache": TurboQuantCache, "model": model, "tokenizer": tokenizer, "inputs": inputs}
    exec(SNIPPET, names)
    read = inputs["input_ids"].shape[1]
    console.print(f"A prompt of {read:,} tokens, with a fact 40 % into it, and the question for the fact at its end:\n")
    console.print(SNIPPET, highlight=False, soft_wrap=True)
    console.print(f"{case.question}[bold]{tokenizer.decode(names['out'][0, read:])}[/bold]", highlight=False)
    console.print(f"{names['cache']}\n", highlight=False)


def table_of(rows: list[dict], name: str = "demo") -> Table:
    """The table of the model called `name`."""
    size = SIZES.get(name, REAL)
    grid = table(
        ("cache", "bytes/token", "smaller", "KL", "recall"),
        left=("cache",),
        title=f"{name}, {size.context:,} tokens of context",
        caption="Each cache but the first keeps 4 + 64 tokens at the beginning and the end in the model's dtype. "
        f"KL: divergence from the run without compression in nats, of {size.read_on - 1} tokens after each of {PASSAGES} texts, ± standard "
        f"error. recall: facts found of {size.recalls} that are asked for after the text was compressed, which tells a broken cache from a "
        "working one and no more.",
    )
    for row in rows:
        grid.add_row(
            row["cache"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
            f"{round(row['recall'] * size.recalls)} of {size.recalls}",
        )  # fmt: skip
    return grid
