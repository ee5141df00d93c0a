"""`qkvcache demo`: one prompt through every cache, then a table of each cache's bytes and recall."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.cache_utils import Cache

from .. import CompressedCache
from ..evaluation.quality import Passages, RecallSet, divergence, recall
from ..evaluation.recall import CODE_WORD, NUMBER, Form, RecallCase, recall_case
from ..evaluation.speed import Clock
from ..evict.policies import KeyDiff, SnapKV
from ..models import load
from ..options import table
from ..progress import progress, track
from ..releases import passing
from . import text_ids

FORMATS = (
    "int8", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "int4", "nvfp4_mse", "hadaquant_k4v3", "hadaquant_k3v3", "turboquant_3bit_nc"
)  # fmt: skip
STREAMED = "turboquant_4bit_nc"
OTHERS: dict[str, dict[str, Any]] = {
    "4 bits + KeyDiff 50 %": {"policy": KeyDiff(budget=0.5)},
    "4 bits + SnapKV, 256": {"policy": SnapKV(budget=256)},
    "4 bits, 256 read": {"attention_budget": 256},
}
"""Caches in STREAMED's format that evict, or read few tokens."""
LATER = {"4 bits, 256 tokens read a step": "4 bits, 256 read", "4 bits, 256 tokens kept by SnapKV": "4 bits + SnapKV, 256"}
"""Caches of OTHERS that are asked after they have read a context, as they are printed."""
NEW_TOKENS = 16


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
"""The size for every other model: about three minutes on two CPU cores for 135 million parameters."""


def run(
    name: str = "demo",
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    console: Console | None = None,
    seed: int = 0,
    formats: Sequence[str] | None = None,
) -> list[dict]:
    """The rows of the table for the model called `name`, dense first; `recall` is the share of correct cases. Streams text
    to `console` if given. `formats`: only these; None: `FORMATS` and `OTHERS`."""
    model, tokenizer = load(name, dtype, device)
    size = SIZES.get(name, REAL)
    ids = text_ids(tokenizer)
    rng = random.Random(seed)
    case = recall_case(rng, str(tokenizer.decode(ids[: size.context])), 0.4, distractors=3)
    prompt = tokenizer(case.prompt, return_tensors="pt")["input_ids"].to(model.device)
    if console:
        asked, begun = case.question.split("? ")
        console.print(f"[bold]A prompt of {prompt.shape[1]:,} tokens, with a code word 40 % into it:[/bold] … {asked}?")
        console.print(f"[bold]{STREAMED}:[/bold] {begun}", end="")
        generate(model, tokenizer, prompt, CompressedCache(model.config, format=STREAMED), TextStreamer(tokenizer, skip_prompt=True))
        console.print("[bold]The same question, asked after the context had been compressed:[/bold]")
        for label, kind in LATER.items():
            cache = CompressedCache(model.config, format=STREAMED, **OTHERS[kind])
            console.print(f"[bold]{label}:[/bold]{ask_later(model, tokenizer, case, cache)}", highlight=False)
        console.print()
    begin = len(ids) // 2
    window = torch.tensor(ids[begin : begin + 2 * (size.context + size.read_on)], dtype=torch.int64, device=model.device).view(2, -1)
    with progress("reading without a compressed cache"):
        passages = Passages.read(model, window, size.context)
        cases = RecallSet.make(model, tokenizer, ids, size.context, size.recalls, seed=seed, form=size.form)

    rows: list[dict] = []
    every = list(_caches(model.config, formats))
    for name, factory in track(every, "measuring every cache", len(every)):
        text, tokens_per_second = generate(model, tokenizer, prompt, factory())
        quality = divergence(model, passages, factory)
        rows.append(
            {
                "cache": name,
                "bytes_per_token": quality.bytes_per_token,
                "ratio": (rows[0]["bytes_per_token"] if rows else quality.bytes_per_token) / quality.bytes_per_token,
                "kl": quality.kl,
                "perplexity_change": quality.perplexity / passages.perplexity - 1,
                "recall": recall(model, tokenizer, cases, factory),
                "tokens_per_second": tokens_per_second,
                "answer": text.split(".")[0].strip(),
            }
        )
    return rows


def table_of(rows: list[dict], name: str = "demo") -> Table:
    """The table of the model called `name`."""
    size = SIZES.get(name, REAL)
    grid = table(
        ("cache", "bytes/token", "smaller", "KL", "ppl", "recall", "tok/s"),
        left=("cache",),
        title=f"{name}, {size.context:,} tokens of context",
        caption="Each cache but the first keeps 4 + 64 tokens at the beginning and the end in the model's dtype. "
        f"KL, ppl (perplexity): 2 x {size.read_on - 1} tokens read on through the cache, against the dense run. "
        f"recall: {size.recalls} facts, each among three others, question unseen at compression. tok/s: decode, this machine.",
    )
    for row in rows:
        grid.add_row(
            row["cache"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", f"{row['kl']:.4f}",
            f"{row['perplexity_change']:+.1%}", f"{row['recall']:.0%}", f"{row['tokens_per_second']:.0f}",
        )  # fmt: skip
    return grid


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, cache: Cache, streamer: TextStreamer | None = None
) -> tuple[str, float]:
    """The text after `prompt`, and the tokens per second of decode steps; the first step warms up and does not
    count."""
    clock = Clock()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": streamer}
    ids = model.generate(prompt, **passing(cache), stopping_criteria=StoppingCriteriaList([clock]), **options)  # type: ignore[operator]
    return str(tokenizer.decode(ids[0, prompt.shape[1] :])), (len(clock.times) - 2) / (clock.times[-1] - clock.times[1])


def ask_later(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, case: RecallCase, cache: Cache) -> str:
    """The answer to a question that follows when the cache has read the context, with a token of the question a step."""
    context, prompt = (tokenizer(x, return_tensors="pt")["input_ids"].to(model.device) for x in (case.context, case.prompt))
    with torch.no_grad():
        model(context, **passing(cache), logits_to_keep=1)
    options = {"attention_mask": torch.ones_like(prompt), "prefill_chunk_size": 1, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    out = model.generate(prompt, **passing(cache), **options)  # type: ignore[operator]
    return str(tokenizer.decode(out[0, prompt.shape[1] :])).split(".")[0]


def _caches(config: PreTrainedConfig, formats: Sequence[str] | None) -> Iterator[tuple[str, Callable[[], Cache]]]:
    yield "DynamicCache", lambda: DynamicCache(config=config)
    for name in FORMATS if formats is None else formats:
        yield name, functools.partial(CompressedCache, config, format=name)
    for name, options in OTHERS.items() if formats is None else ():
        yield name, functools.partial(CompressedCache, config, format=STREAMED, **options)
