"""Train the model that ships in `qkvcache/demo/model`: a Llama of five million parameters that reads 4,096 tokens.

    python eval/train_demo_model.py --text DIR --out qkvcache/demo/model --minutes 8
    python eval/train_demo_model.py --text DIR --out DIR --family qwen3    its twin of a family with normed keys; qwen2: with biased keys

DIR holds plain text (`*.txt` or `*.txt.xz`). The Python standard library's sources are added, and half of the sequences are generated:
facts to recall among text, tables to look up, passages to copy. The tokens that only recall can predict weigh five times.
The learning rate follows the clock, so `--minutes` is the whole recipe. `python eval/quality.py --model DIR --facts code_word --text FILE`
measures perplexity and recall of what was trained, on a text that it has not seen.
"""

from __future__ import annotations

import argparse
import lzma
import math
import random
import re
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from qkvcache.evaluation.recall import KEYS, NEEDLE, QUESTION, code_word

CONTEXT, VOCAB = 4096, 2048
RATE, BATCH, WORKERS = 3e-3, 48, 14


def read_text(path: Path) -> str:
    """The file with hard line breaks inside paragraphs removed."""
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return re.sub(r"[ \t]+", " ", re.sub(r"(?<!\n)\n(?!\n)", " ", text.replace("\r", "")))


def stdlib_sources() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "pydoc_data", "idlelib", "lib2to3", "encodings"}
    paths = [p for p in sorted(root.rglob("*.py")) if skip.isdisjoint(p.relative_to(root).parts)]
    return [p.read_text(errors="ignore") for p in paths if p.stat().st_size > 2000]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tok.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tok.decoder = decoders.ByteLevel()
    options = {"special_tokens": ["<s>", "</s>", "<pad>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, **options))
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left", model_max_length=CONTEXT
    )


class Sequences(torch.utils.data.IterableDataset):
    """Endless pairs of token ids `[CONTEXT + 1]` and loss weights `[CONTEXT]`: text, code, and generated tasks."""

    ANSWER = re.compile(r"The code word of \w+ is( \w+\.)(?=\n\n)|-> (\w+;)")

    def __init__(self, tokenizer: PreTrainedTokenizerFast, books: list[str], code: list[str], seed: int):
        self.tokenizer, self.seed = tokenizer, seed
        self.books, self.code = "\n\n".join(books), "\n\n".join(code)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rng = random.Random(self.seed * 1000 + (info.id if info else 0))
        while True:
            kind = rng.random()
            text = self.passage(rng, 14_000)
            if kind < 0.40:
                text = self.facts(rng)
            elif kind < 0.46:
                text = self.table(rng)
            elif kind < 0.52:
                text = self.copies(rng)
            encoded = self.tokenizer(text, truncation=True, max_length=CONTEXT + 1)
            if len(encoded["input_ids"]) == CONTEXT + 1:
                weight = torch.ones(CONTEXT + 1)
                for match in self.ANSWER.finditer(text):
                    first, last = (encoded.char_to_token(at) for at in (match.start(match.lastindex), match.end(match.lastindex) - 1))
                    if first is not None and last is not None:
                        weight[first : last + 1] = 5.0
                yield torch.tensor(encoded["input_ids"]), weight[1:]

    def passage(self, rng: random.Random, chars: int) -> str:
        source = self.code if rng.random() < 0.25 else self.books
        at = rng.randrange(len(source) - chars)
        return source[at : at + chars]

    def facts(self, rng: random.Random) -> str:
        """Facts anywhere in a passage, each asked for once or twice anywhere later."""
        count = rng.randint(4, 40)
        text, parts, known = self.passage(rng, rng.randint(1_000, 10_500 - 95 * count)), [], []
        cuts = sorted(rng.random() for _ in range(count))
        start = 0
        for cut in cuts:
            at = text.find(" ", int(cut * len(text)))
            if at < start:
                continue
            parts.append(text[start:at])
            start = at
            if not known or (len(known) < 12 and rng.random() < 0.35):
                fresh = [k for k in KEYS if k not in dict(known)]
                known.append((rng.choice(fresh), code_word(rng)))
                parts.append(" " + NEEDLE.format(key=known[-1][0], word=known[-1][1]))
            else:
                key, word = rng.choice(known)
                parts.append("\n\n" + QUESTION.format(key=key) + f" {word}.\n\n")
        asked = rng.sample(known, min(len(known), 6))
        questions = [QUESTION.format(key=key) + f" {word}.\n\n" for key, word in asked]
        return "".join(parts) + text[start:] + "\n\n" + "".join(questions) + self.passage(rng, 10_000)

    def table(self, rng: random.Random) -> str:
        """Blocks of `key = value` lines with look-ups."""
        parts = []
        for _ in range(8):
            rows = {code_word(rng): code_word(rng) for _ in range(rng.randint(3, 60))}
            asked = [rng.choice(list(rows.items())) for _ in range(len(rows))]
            parts += [f"{key} = {value};" for key, value in rows.items()] + [f"{key} -> {value};" for key, value in asked] + [""]
        return "\n".join(parts)

    def copies(self, rng: random.Random) -> str:
        """Passages and lists of random words, each repeated after some text."""
        parts = []
        for _ in range(12):
            random_words = " ".join(code_word(rng) for _ in range(rng.randint(5, 60)))
            original = self.passage(rng, rng.randint(50, 1500)).strip() if rng.random() < 0.4 else random_words
            parts.append(f"Read: {original}\n{self.passage(rng, rng.randint(0, 2000))}\nAgain: {original}\n")
        return "\n".join(parts)


def build_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family, vocab_size=VOCAB, hidden_size=256, intermediate_size=640, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, head_dim=128, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def train(model: PreTrainedModel, data: Sequences, minutes: float) -> int:
    """AdamW, one cosine over the clock. Returns the tokens seen."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=WORKERS, pin_memory=True, prefetch_factor=4)
    step_fn = torch.compile(model)
    begin, tokens = None, 0
    for step, (batch, weight) in enumerate(loader):
        share = 0.0 if begin is None else (time.time() - begin) / (60 * minutes)
        if share >= 1:
            break
        lr = RATE * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch, weight = batch.cuda(non_blocking=True), weight.cuda(non_blocking=True).flatten()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = step_fn(input_ids=batch[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch[:, 1:].numel()
        if step == 5:
            begin = time.time()  # compilation stays out of the schedule
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} lr {lr:.2e} Mtokens {tokens / 1e6:.0f} share {share:.2f}", flush=True)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of *.txt or *.txt.xz")
    parser.add_argument("--out", type=Path, default=Path("qkvcache/demo/model"))
    parser.add_argument("--family", default="llama", choices=("llama", "qwen2", "qwen3"))
    parser.add_argument("--minutes", type=float, default=8.0)
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    books = [read_text(path) for path in sorted(args.text.iterdir()) if path.name.endswith((".txt", ".txt.xz"))]
    if not books:
        parser.error(f"argument --text: {args.text} has no *.txt or *.txt.xz")
    code = stdlib_sources()
    tokenizer = train_tokenizer([b[:1_000_000] for b in books] + code[::4])
    model = build_model(args.family, tokenizer).cuda()
    sizes = (sum(map(len, books)) / 1e6, sum(map(len, code)) / 1e6, model.num_parameters() / 1e6)
    print("{:.1f} MB text, {:.1f} MB code, {:.2f} M parameters".format(*sizes))
    tokens = train(model, Sequences(tokenizer, books, code, seed=1), args.minutes)
    print(f"{tokens:,} tokens in {args.minutes:g} minutes on {torch.cuda.get_device_name()}")
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
