"""A client of `qkvcache serve`, with the package `openai`: several requests at once, each streamed.

    qkvcache serve smollm2 --format turboquant_4bit_nc --port 8000
    python examples/serve_client.py --model smollm2 "Name three fruits." "What is the capital of France?"

Any OpenAI-compatible client does as well: the address is `http://HOST:PORT/v1`. The API key is that of QKVCACHE_API_KEY; a server
without keys accepts any.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI


def ask(client: OpenAI, model: str, prompt: str, new_tokens: int, raw: bool) -> dict:
    """One streamed request: its text, and when its first token came. `raw`: the prompt is continued, without a chat template."""
    options = {"model": model, "max_tokens": new_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    begin, first, text, tokens = time.perf_counter(), None, "", 0
    if raw:
        events = client.completions.create(prompt=prompt, **options)
    else:
        events = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
    for event in events:
        for choice in event.choices:  # none in the last event, which has the usage
            piece = choice.text if raw else choice.delta.content
            first = first or (time.perf_counter() - begin if piece else None)
            text += piece or ""
        tokens = event.usage.completion_tokens if event.usage else tokens
    return {"prompt": prompt, "text": text, "first": first, "seconds": time.perf_counter() - begin, "tokens": tokens}


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", required=True, help="as `qkvcache serve` was given it")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--raw", action="store_true", help="continue the prompts, for models without a chat template such as 'demo'")
    args = parser.parse_args(arguments)

    client = OpenAI(base_url=args.url, api_key=os.environ.get("QKVCACHE_API_KEY", "none").split()[0])
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(args.prompts)) as threads:
        answers = list(threads.map(lambda prompt: ask(client, args.model, prompt, args.new_tokens, args.raw), args.prompts))
    seconds = time.perf_counter() - begin
    for answer in answers:
        print(f"{answer['prompt']!r}: {answer['text']!r} (first token after {answer['first'] or answer['seconds']:.2f} s)")
    print(f"{len(answers)} requests, {sum(answer['tokens'] for answer in answers) / seconds:.1f} tokens/s")
    return answers


if __name__ == "__main__":
    main()
