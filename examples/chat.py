"""A chat about a long document, through a compressed cache.

    python examples/chat.py                                         SmolLM2-135M-Instruct: reads Python's language reference, then asks you
    python examples/chat.py --document FILE --model MODEL --format turboquant_3bit_nc --device cuda
    python examples/chat.py --questions "What is the name of the old lighthouse?" --policy kvzip --budget 0.25

The document is read once; each turn reads its own tokens alone. The same model without compression is asked too (--no-compare leaves it
out), so that an answer that is wrong shows whether the cache or the model is to blame. Without --document, made-up facts are spread over
the reference. In the chat: /cache shows where the cache's bytes are, /reset forgets the turns, Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.cache_utils import Cache

from qkvcache import CompressedCache, demo, models
from qkvcache.evaluation.quality import prefill
from qkvcache.evaluation.recall import plant
from qkvcache.evaluation.spec import CacheSpec
from qkvcache.evaluation.speed import Clock
from qkvcache.progress import reading
from qkvcache.releases import passing

FACTS = {
    "the old lighthouse": "Kestrel Point",
    "the head gardener": "Margaret Finch",
    "the night train": "Silver Arrow",
    "the ship's cat": "Biscuit",
}
QUESTION = "What is the name of {}?"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOOP = 8
"""Tokens that an answer repeats when it runs in a circle."""
TEXT, READ, ASKED, ANSWERED = "Read this text:\n\n", "I have read the text. What would you like to know?", "<<asked>>", "<<answered>>"


class Turns:
    """The texts around document, questions and answers, as a model's chat template has them, or plain ones where it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, document: str):
        self.tokenizer = tokenizer
        if tokenizer.chat_template is None:
            self.document, self.between = f"{tokenizer.bos_token or ''}{document}", f"\n\n{ASKED}"
            return
        said = [
            {"role": "user", "content": f"{TEXT}{document}"},
            {"role": "assistant", "content": ANSWERED},
            {"role": "user", "content": ASKED},
        ]
        written = str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
        begin, _, self.between = written.rpartition(ANSWERED)
        self.document = begin + READ

    def ids(self, text: str) -> torch.Tensor:
        """`[1, T]`."""
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]

    def added(self, question: str, before: torch.Tensor) -> torch.Tensor:
        """What `question` adds to the tokens `before` `[1, T]`: `[1, N]`. A complete answer has generated the token that ends it."""
        new = self.ids(self.between.replace(ASKED, question))
        return new[:, 1:] if new[0, 0] == before[0, -1] else new


@dataclass
class Turn:
    """`read`: tokens that went through the model before the first new one. Seconds; `tokens_per_second` of the tokens after the first."""

    question: str
    answer: str
    ids: list[int]
    read: int
    first_token: float
    tokens_per_second: float


class Complete(StoppingCriteria):
    """Ends an answer, whose first token is at `begin`, with a sentence once it has half of its `tokens`, and where it repeats itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, begin: int, tokens: int):
        self.tokenizer, self.begin, self.tokens = tokenizer, begin, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
        answer = input_ids[0, self.begin :].tolist()
        ends = 2 * len(answer) >= self.tokens and str(self.tokenizer.decode(answer)).rstrip(' "').endswith((".", "!", "?"))
        runs = [answer[i : i + LOOP] for i in range(len(answer) - LOOP + 1)]
        circles = bool(runs) and runs[-1] in runs[:-LOOP]
        return torch.full((len(input_ids),), ends or circles, dtype=torch.bool, device=input_ids.device)


@dataclass
class Chat:
    """A model, a cache that has read the document, and the tokens so far, `[1, T]`."""

    model: PreTrainedModel
    turns: Turns
    cache: Cache
    ids: torch.Tensor
    new_tokens: int

    def ask(self, question: str, streamer: TextStreamer | None = None) -> Turn:
        """The answer, which `streamer` prints as it comes. Question and answer stay in the chat."""
        new = self.turns.added(question, self.ids).to(self.model.device)
        ids = torch.cat([self.ids, new], dim=1)
        read = ids.shape[1] - int(self.cache.get_seq_length())
        clock = Clock()
        options = {"max_new_tokens": self.new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids), "streamer": streamer}
        stops = StoppingCriteriaList([clock, Complete(self.turns.tokenizer, ids.shape[1], self.new_tokens)])
        begin = time.perf_counter()
        self.ids = self.model.generate(ids, **passing(self.cache), stopping_criteria=stops, **options)
        answer = self.ids[0, ids.shape[1] :].tolist()
        decoding = clock.times[-1] - clock.times[0]
        rate = (len(answer) - 1) / decoding if decoding else 0.0
        text = self.turns.tokenizer.decode(answer, skip_special_tokens=True).strip()
        return Turn(question, text, answer, read, clock.times[0] - begin, rate)


def read(model: PreTrainedModel, turns: Turns, spec: CacheSpec, args: argparse.Namespace) -> tuple[Chat, Chat | None]:
    """A chat through the cache of `spec` that has read the document, and one through an uncompressed cache unless `args.compare` is
    off. Both share a reading, except where the cache evicts."""
    ids, cache, dense = turns.ids(turns.document).to(model.device), spec.make(model.config), None
    task = f"reading {ids.shape[1]:,} tokens"
    if args.compare:
        with reading(model, task):
            dense, _ = prefill(model, ids)
    if cache.policy is not None and cache.policy.second_reading:
        cache.compress(model, ids, tokenizer=turns.tokenizer)
    elif dense is not None and dense.copies and cache.policy is None:
        dense.fill(cache, model, ids)
    else:
        with reading(model, f"{task} into {spec.name}"), torch.no_grad():
            model(ids, **passing(cache), logits_to_keep=1)
    return Chat(model, turns, cache, ids, args.new_tokens), dense and Chat(model, turns, dense, ids, args.new_tokens)


def holds(cache: CompressedCache, dtype: torch.dtype) -> str:
    """What a cache of a model in `dtype` holds, beside what all tokens so far would take in bf16."""
    memory, seen = cache.memory(), cache.get_seq_length()
    stored = round(sum(cache.stored_length(layer) for layer in range(len(cache.layers))) / len(cache.layers))
    parts = ", ".join(f"{part} {getattr(memory, part) / 1e6:.2f}" for part in ("codes", "scales", "exact", "bookkeeping"))
    kept = "" if stored == seen else f", {stored:,} of them kept,"
    smaller = memory.dense * 2 / dtype.itemsize / memory.total
    return f"{seen:,} tokens{kept} in {memory.total / 1e6:.2f} MB: {parts}; bf16 takes {smaller:.2f} times as much"


def same_words(ours: Turn, dense: Turn) -> str:
    """Whether the model answers alike without compression, or what it answers."""
    return f"uncompressed: {'the same words' if ours.ids == dense.ids else dense.answer}"


def asked_on_the_terminal() -> Iterator[str]:
    while True:
        try:
            line = input("\nyou: ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def document_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first `--tokens` tokens of the file, or of Python's language reference with the facts spread over it."""
    text = demo.text() if args.document is None else args.document.read_text()
    text = tokenizer.decode(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: args.tokens])
    if args.document is None:
        for i, (thing, name) in enumerate(FACTS.items()):
            text = plant(text, f"The name of {thing} is {name}.", (i + 0.5) / len(FACTS))
    return text


def parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, CacheSpec]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help=f"{models.known()}, a folder, a .gguf file, or a model on the Hub")
    parser.add_argument("--format", default="turboquant_4bit_nc", help="as `qkvcache formats` lists them")
    parser.add_argument("--policy", help="what evicts tokens: keydiff, h2o, sink_window and others")
    parser.add_argument("--budget", type=float, help="tokens that the policy keeps, or a share such as 0.5")
    parser.add_argument("--document", type=Path, help="a text file; Python's language reference by default")
    parser.add_argument("--tokens", type=int, default=2000, help="of the document")
    parser.add_argument("--questions", nargs="+", help="ask these and end; without a terminal, a few of its own")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="ask a DynamicCache too")
    parser.add_argument("--new-tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--max-length", type=int, help="take storage for so many tokens at once; on a GPU steps are compiled then")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    args = parser.parse_args(arguments)
    if args.document is not None and not args.document.is_file():
        parser.error(f"--document {args.document}: no such file")
    if args.document is not None and not args.questions and not sys.stdin.isatty():
        parser.error("--document without a terminal: pass --questions")
    budget = int(args.budget) if args.budget is not None and args.budget >= 1 else args.budget
    try:
        models.folder(args.model), models.usable(args.device)
        spec = CacheSpec(cache=args.format, policy=args.policy, budget=budget, max_length=args.max_length)
    except (ValueError, TypeError, OSError, ImportError) as error:
        parser.error(str(error))
    if spec.dense:
        parser.error("--format dynamic: pass --format identity for an uncompressed cache; a DynamicCache is asked beside every cache")
    return args, spec


def main(arguments: list[str] | None = None) -> list[Turn]:
    args, spec = parsed(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, tokenizer = models.load(args.model, DTYPES[args.dtype], args.device)
    turns = Turns(tokenizer, document_of(args, tokenizer))
    tokens, longest = turns.ids(turns.document).shape[1], model.config.max_position_embeddings
    if tokens > longest:
        sys.exit(f"the document has {tokens:,} tokens and {args.model} reads {longest:,}: pass a smaller --tokens")
    begin = time.perf_counter()
    try:
        chat, dense = read(model, turns, spec, args)
    except (ValueError, NotImplementedError) as error:
        sys.exit(f"{spec.name}: {error}")
    print(f"{args.model} has read the document in {time.perf_counter() - begin:.1f} s. {spec.name} holds {holds(chat.cache, model.dtype)}.")

    interactive = not args.questions and sys.stdin.isatty()
    if args.document is None and interactive:
        print(f"Ask, for instance: {' '.join(QUESTION.format(thing) for thing in FACTS)}")
    questions = asked_on_the_terminal() if interactive else args.questions or map(QUESTION.format, FACTS)
    found = []
    for question in questions:
        if question == "/cache":
            print(chat.cache)
            print(chat.cache.memory())
            continue
        if question == "/reset":
            chat, dense = read(model, turns, spec, args)
            print(f"[{holds(chat.cache, model.dtype)}]")
            continue
        if not interactive:
            print(f"\nyou: {question}")
        print(f"{args.model}: ", end="", flush=True)
        turn = chat.ask(question, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        if dense:
            print(same_words(turn, dense.ask(question)))
        print(f"[{turn.read} new tokens read, first answered after {turn.first_token:.2f} s, then {turn.tokens_per_second:.1f} tokens/s]")
        print(f"[{holds(chat.cache, model.dtype)}]")
        found.append(turn)
    return found


if __name__ == "__main__":
    main()
