"""A chat that never ends in memory that never grows.

    python examples/streaming_chat.py                                     the embedded model, a few turns of its own
    python examples/streaming_chat.py --model MODEL --device cuda --ask   your chat model, your turns; an empty line ends it

One cache goes through all turns: each turn computes its own tokens alone. What left the window is gone, and the chat says so by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from qkvcache import SinkCache, demo, models

ASKED = "What is the code word of {0}? The code word of {0} is"


def turns_of_the_demo() -> Iterator[str]:
    """The embedded model is no chat model: it is told facts and reads texts, and is asked for code words."""
    text = demo.text()
    yield "The code word of Anna is dilzon. The code word of Bruno is 48213."
    yield ASKED.format("Anna")
    for begin in (10_000, 20_000, 30_000):
        yield " ".join(text[begin : begin + 1500].split())
        yield ASKED.format("Anna")


def read_turns() -> Iterator[str]:
    while turn := input("\nyou: ").strip():
        yield turn


def tokens_of(tokenizer: PreTrainedTokenizerBase, turn: str, first: bool) -> torch.Tensor:
    """What a turn adds to the chat, `[1, T]`."""
    if tokenizer.chat_template is None:
        return tokenizer(turn if first else f"\n\n{turn}", add_special_tokens=first, return_tensors="pt")["input_ids"]
    said = [{"role": "user", "content": turn}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    return ids if first or ids[0, 0] != tokenizer.bos_token_id else ids[:, 1:]


def chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turns: Iterator[str], window: int, new_tokens: int) -> list[dict]:
    """A row for each turn, printed as it comes."""
    cache = SinkCache(model.config, window_length=window, num_sink_tokens=4, positions="cache")
    ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
    streamer, rows = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), []
    for turn in turns:
        ids = torch.cat([ids, tokens_of(tokenizer, turn, not rows).to(model.device)], dim=1)
        begin, computed = ids.shape[1], ids.shape[1] - cache.get_seq_length()
        print(f"\nuser: {turn[:90]}{' ...' if len(turn) > 90 else ''}\nmodel:", end=" ", flush=True)
        options = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids), "streamer": streamer}
        ids = model.generate(ids, cache=cache, **options)
        answer = tokenizer.decode(ids[0, begin:], skip_special_tokens=True)
        rows.append({"turn": turn, "answer": answer, "computed": computed, "seen": cache.get_seq_length(), "bytes": cache.nbytes})
        print(f"[{rows[-1]['seen']:,} tokens so far, {cache.stored_length():,} held in {cache.nbytes / 1e6:.2f} MB]")
    return rows


def main(arguments: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--window", type=int, default=508, help="tokens held beside four sinks")
    parser.add_argument("--new-tokens", type=int, default=8, help="the longest answer")
    parser.add_argument("--ask", action="store_true", help="read turns from the terminal")
    args = parser.parse_args(arguments)
    model, tokenizer = models.load(args.model, torch.bfloat16, args.device)
    turns = read_turns() if args.ask else turns_of_the_demo()
    return chat(model, tokenizer, turns, args.window, args.new_tokens)


if __name__ == "__main__":
    main()
