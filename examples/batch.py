"""Many prompts at once, in transformers' own pages and in compressed ones: the same memory holds more tokens.

    python examples/batch.py                                                   the embedded model, on a CPU
    python examples/batch.py --model MODEL --device cuda --pool-mb 8000        your model, your GPU

Each prompt tells a code word, goes on with a text and asks for the word. `generate_batch` reads and writes all of them together.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from qkvcache import continuous_batching, demo, models, plan

NAMES = ("Anna", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo")
WORDS = ("dilzon", "marvek", "tolbin", "sarnel", "pelfor", "kandis", "ribsol", "fentag")


def prompts(count: int) -> list[str]:
    """Prompts of different lengths."""
    text, found = demo.text(), []
    for i in range(count):
        name, word, begin = NAMES[i % len(NAMES)], WORDS[i % len(WORDS)], 997 * i
        passage = text[begin : begin + 300 + 150 * (i % 4)]
        found.append(f"The code word of {name} is {word}. {passage}\n\nWhat is the code word of {name}? The code word of {name} is")
    return found


def serve(model: PreTrainedModel, inputs: list[list[int]], format: str | None, pool_mb: float, new_tokens: int) -> dict:
    """Generates for all `inputs` in a pool of so many megabytes; without a format, in transformers' own pages."""
    memory = {"gpu_memory": 80e9, "weights_memory": 0}  # of which nothing but the size of a page is asked
    page = plan(model.config, format=format, dtype=model.dtype, requests=[(1, 100, 10)], **memory).batching
    config = ContinuousBatchingConfig(
        num_blocks=int(pool_mb * 1e6 / page.bytes_per_page), max_batch_tokens=1024, auto_switch_to_flash=False
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1)
    with nullcontext() if format is None else continuous_batching(model, format=format):
        begin = time.perf_counter()
        outputs = model.generate_batch(inputs, generation_config=greedy, continuous_batching_config=config)
        seconds = time.perf_counter() - begin
    answers = [output.generated_tokens for output in outputs.values()]
    written = sum(map(len, answers)) / seconds
    return {"pages": format or "transformers", "tokens": config.num_blocks * page.page_size, "tokens_s": written, "answers": answers}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--format", default="turboquant_4bit_nc")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--pool-mb", type=float, default=40, help="memory of the pages")
    args = parser.parse_args(arguments)

    model, tokenizer = models.load(args.model, getattr(torch, args.dtype), args.device)
    inputs = [tokenizer(prompt)["input_ids"] for prompt in prompts(args.prompts)]
    rows = [serve(model, inputs, format, args.pool_mb, args.new_tokens) for format in (None, args.format)]
    print(f"{len(inputs)} prompts of {min(map(len, inputs))} to {max(map(len, inputs))} tokens, {args.pool_mb:g} MB of pages")
    for row in rows:
        print(f"{row['pages']:>20}: {row['tokens']:,} tokens fit, {row['tokens_s']:.1f} tokens/s; {tokenizer.decode(row['answers'][0])!r}")
    return rows


if __name__ == "__main__":
    main()
