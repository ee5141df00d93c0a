"""A chat of several turns over a long document, with and without a prefix store, on the embedded model.

    python examples/prefix_chat.py

Every turn sends the document and the whole conversation again. Without the store all of it is computed again; with it, only what is new.
Then the process "restarts": a new store finds the conversation on disk. Time to first token includes fetching.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, PrefixStore, demo
from qkvcache.evaluation.recall import KEYS, NEEDLE, QUESTION, code_word, plant
from qkvcache.evaluation.speed import Clock

ANSWER_TOKENS = 10


def document(text: str, facts: dict[str, str]) -> str:
    """`text` with a sentence for each fact, spread evenly."""
    for i, (key, word) in enumerate(facts.items()):
        text = plant(text, NEEDLE.format(key=key, word=word), (i + 0.5) / len(facts))
    return text


def answer(model, tokenizer, ids: list[int], past: Cache) -> tuple[list[int], str, float]:
    """The token ids of the answer up to its full stop, its text, and the seconds until its first token."""
    clock, prompt = Clock(), torch.tensor([ids])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": ANSWER_TOKENS, "do_sample": False}
    begin = time.perf_counter()
    out = model.generate(prompt, cache=past, stopping_criteria=StoppingCriteriaList([clock]), **options)
    first, new = clock.times[0] - begin, out[0, len(ids) :].tolist()
    for count in range(1, len(new) + 1):
        text = tokenizer.decode(new[:count])
        if "." in text:
            break
    return new[:count], text.split(".")[0].strip(), first


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000, help="of the document")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--format", default="int8")
    parser.add_argument("--directory", help="where the store writes; a temporary one by default")
    args = parser.parse_args(arguments)

    transformers.logging.disable_progress_bar()
    model, tokenizer = demo.load(torch.bfloat16)
    rng = random.Random(0)
    facts = {key: code_word(rng) for key in rng.sample(KEYS, args.turns)}
    text = tokenizer.decode(demo.text_ids(tokenizer)[: args.tokens])
    ids = tokenizer(document(text, facts))["input_ids"]
    console = Console(width=120)
    console.print(f"A document of {len(ids):,} tokens that hides {len(facts)} code words, and one question a turn.\n")
    answer(model, tokenizer, ids[:200], CompressedCache(model.config, format=args.format))  # warms up

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = args.directory or folder
        options = {"max_bytes": 2**30, "format": args.format, "directory": directory, "tokenizer": tokenizer}
        store = PrefixStore(model, **options)
        turns = [*facts, next(iter(facts))]
        for turn, key in enumerate(turns):
            restarted = turn == len(facts)
            if restarted:
                store = PrefixStore(model, **options)  # knows nothing but the directory
            ids += tokenizer(f"\n\n{QUESTION.format(key=key)}", add_special_tokens=False)["input_ids"]
            alone = CompressedCache(model.config, format=args.format)
            _, alone_text, alone_seconds = answer(model, tokenizer, ids, alone)

            begin = time.perf_counter()
            with store.reuse(ids) as past:
                reused = past.get_seq_length()
                fetching = time.perf_counter() - begin
                new, text, seconds = answer(model, tokenizer, ids, past)
                memory = past.memory()
            rows.append(
                {
                    "turn": "after a restart" if restarted else str(turn + 1),
                    "prompt": len(ids),
                    "reused": reused,
                    "first_without": alone_seconds,
                    "first_with": fetching + seconds,
                    "fetch": fetching,
                    "store_bytes": store.stats.nbytes,
                    "dense_bytes": memory.dense,
                    "asked": key,
                    "answer": text,
                    "answer_without": alone_text,
                    "right": text == facts[key],
                }
            )
            ids += new
    show(rows, console)
    return rows


def show(rows: list[dict], console: Console) -> None:
    table = Table(box=None, pad_edge=False, collapse_padding=True, title="time to first token, in milliseconds")
    for header in ("turn", "prompt", "reused", "without", "with store", "of it fetch", "faster", "store holds", "dense would", "answer"):
        table.add_column(header, justify="left" if header in ("turn", "answer") else "right", no_wrap=True)
    for row in rows:
        times = (f"{1000 * row[name]:,.0f}" for name in ("first_without", "first_with", "fetch"))
        bytes_held = (f"{row[name] / 1e6:.1f} MB" for name in ("store_bytes", "dense_bytes"))
        mark = "" if row["right"] else " (wrong)"
        faster = f"{row['first_without'] / row['first_with']:.1f}x"
        table.add_row(row["turn"], f"{row['prompt']:,}", f"{row['reused']:,}", *times, faster, *bytes_held, row["answer"] + mark)
    console.print(table)


if __name__ == "__main__":
    main()
