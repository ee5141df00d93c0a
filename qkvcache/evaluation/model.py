"""`CacheLM`: lm-eval's Hugging Face model with scores computed through a cache.

lm-eval computes a request, and the prompt of a `generate`, in one forward pass, which attends to exact keys and values
whatever the cache is: the cache affects neither loglikelihoods and perplexities nor the first token of an answer. Here

- a choice is scored by reading the context without its last token, and then this token and the choice through the
  cache. The context is read once for all its choices, each of which gets a copy of the cache;
- a text is read in chunks, each through the cache of the chunks before;
- `generate` starts from the cache of the prompt without its last token.

`scoring="deployed"` reads as a server does: prompts are read whole, so that the first token of an answer is always
exact, and a text to be scored is read as lm-eval reads it. Rows of a batch have the same length, so that caches contain
no padding and the batch size does not affect results.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby

import torch
import torch.nn.functional as F
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache

from .. import models
from ..caches import CompressedCache
from ..formats.base import check_count, check_option
from ..releases import passing
from .quality import held_bytes
from .spec import CacheSpec

SCORING = ("cached", "deployed")
"""Values of `scoring`: scored tokens are always read through the cache, or only where a server reads them through
it."""


OF_CACHE = {field.name for field in fields(CacheSpec)} - {"max_length"}
"""Options of CacheSpec; `max_length` is HFLM's."""
SAME_ANSWERS = ("batch_size", "max_batch_size", "device", "parallelize", "tp_plan", "max_memory_per_gpu", "max_cpu_memory")
"""Options of HFLM that do not affect answers."""


@dataclass
class Measured:
    """Sums over all caches of a run, each after its last token: bytes, bytes of dense caches, tokens seen."""

    bytes: int = 0
    dense: int = 0
    tokens: int = 0

    def count(self, cache: Cache, rows: int) -> None:
        size = held_bytes(cache)
        self.bytes += size
        self.dense += cache.memory().dense if isinstance(cache, CompressedCache) else size
        self.tokens += rows * int(cache.get_seq_length())


Group = tuple[tuple[int, ...], list[tuple[int, list[int]]]]
"""A context and its choices, each `(number of the request, continuation)`."""


class CacheLM(HFLM):
    """`--model qkvcache`: lm-eval's `hf` with every score computed through a cache of this library or a DynamicCache.

        python -m qkvcache.evaluation run --model qkvcache --model_args pretrained=MODEL,cache=turboquant_4bit_nc --tasks TASKS

    Args:
        cache, policy, budget, recent, head_profile, num_sink_tokens, residual_length,
            attention_budget, offload_pages: as `CacheSpec` takes them.
        scoring: "cached" or "deployed" (see the module's docstring).
        chunk: tokens that are read together after the context; they attend to each other exactly. 1 is decoding. None: 32, and 1 with an
            attention budget, which holds for each token.
        **options: options of lm-eval's HFLM, `pretrained`, `dtype`, `batch_size`, `tp_plan`, `parallelize` among them; log-probabilities
            are computed in float32 unless `softmax_dtype` says otherwise.

    Raises:
        ValueError: the errors of `CacheSpec`, an unknown `scoring`, an automatic batch size.
        NotImplementedError: an encoder-decoder model; beams with scoring="cached".
    """

    def __init__(self, pretrained, *, scoring: str = "cached", chunk: int | None = None, **options):
        _check_names(options)
        self.spec = CacheSpec(**{name: options.pop(name) for name in OF_CACHE & options.keys()})
        check_option("scoring", scoring, SCORING)
        chunk = (32 if self.spec.attention_budget is None else 1) if chunk is None else chunk
        check_count("chunk", chunk, 1)
        size = options.get("batch_size", 1)
        if str(size).startswith("auto"):
            raise ValueError(f"batch_size={size!r}: is found by trying forward passes without a cache; pass a number")
        digits = isinstance(size, str) and size.removeprefix("-").isdecimal()  # from a command line
        check_count("batch_size", int(size) if digits else size, 1, of="rows")
        if options.get("device"):
            models.usable(options["device"])
        if isinstance(pretrained, str):
            pretrained = models.folder(pretrained)
        super().__init__(pretrained, **{"softmax_dtype": "float32"} | options)
        self._options = {name: value for name, value in options.items() if name not in SAME_ANSWERS}
        if self.backend != "causal":
            raise NotImplementedError(f"{self.config.model_type} is an encoder-decoder: its cross attention is not compressed; use hf")
        self.scoring, self.chunk = scoring, chunk
        self.measured = Measured()
        made = self.new_cache()  # raises now if the format does not support the model's heads
        if isinstance(made, CompressedCache) and made._maker.reads_twice:
            raise NotImplementedError(f"{self.spec.name} reads a context twice, which scoring does not: choose another cache")

    def new_cache(self) -> Cache:
        return self.spec.make(self.model.config)

    # Reading through the cache.

    def _forward(self, ids: Tensor, cache: Cache, last_only: bool = False) -> Tensor:
        """Logits `[B, T, V]` of `ids` `[B, T]`, or with `last_only` `[B, 1, V]`."""
        keep = {"logits_to_keep": 1} if last_only and self.model._supports_logits_to_keep() else {}
        precision = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            logits = self.model(ids, **passing(cache), use_cache=True, **keep).logits
        return logits[:, -1:] if last_only else logits

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """`[B, T]`; shorter rows are padded with zeros at their end, to which no scored token attends."""
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.long, device=self.device)

    def _score(self, cache: Cache, first: Tensor | None, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `targets` `[B, N]`, and whether each is the most probable token. `inputs` `[B, N or N -
        1]` precede them; `first` `[B, 1, V]`: the logits of the first target if it has no input."""
        at_once = self.chunk if cache.get_seq_length() or self.scoring == "cached" else inputs.shape[1]
        if inputs.shape[1] % at_once == 1 < at_once:  # the token of a step of its own attends to one exact token fewer
            inputs = F.pad(inputs, (0, 1))
        steps = inputs.split(at_once, dim=1) if inputs.shape[1] else ()
        pieces = ([] if first is None else [lambda: first]) + [lambda step=step: self._forward(step, cache) for step in steps]
        found, likeliest, done = [], [], 0
        for piece in pieces:
            log_probs = piece().log_softmax(-1, dtype=self.softmax_dtype)
            target = targets[:, done : done + log_probs.shape[1]].to(log_probs.device)
            log_probs = log_probs[:, : target.shape[1]]
            found.append(log_probs.gather(-1, target[..., None])[..., 0])
            likeliest.append(log_probs.argmax(-1) == target)
            done += target.shape[1]
        return torch.cat(found, dim=1), torch.cat(likeliest, dim=1)

    # The interface of lm-eval.

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None) -> list[tuple[float, bool]]:
        groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = defaultdict(list)
        for number, (_, context, continuation) in enumerate(requests):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise ValueError(
                    f"request {number}: a context of {len(context)} tokens and a continuation of {len(continuation)}; expected one token "
                    f"or more of each, and a continuation of at most max_length={self.max_length}: shorten it, or pass a larger max_length"
                )
            whole = (context + continuation)[-(self.max_length + 1) :]  # cut from the left, as in lm-eval
            groups[tuple(whole[: -len(continuation)])].append((number, continuation))
        answers: dict[int, tuple[float, bool]] = {}
        rows = int(override_bs or self.batch_size)
        ordered = sorted(groups.items(), key=lambda group: -len(group[0]))
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests") as progress:
            for _, alike in groupby(ordered, key=lambda group: len(group[0])):
                for some in _pieces(list(alike), rows):
                    for number, answer in self._score_groups(some, rows):
                        answers[number] = answer
                        if (strings := requests[number][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", strings, answer)
                        progress.update()
        return [answers[number] for number in range(len(requests))]

    def _score_groups(self, groups: Sequence[Group], rows: int) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Answers to the requests of contexts of equal length, `rows` at a time."""
        cache, first = self.new_cache(), None
        contexts = self._tensor([context for context, _ in groups])
        apart = 0 if self.scoring == "deployed" and contexts.shape[1] > 1 else 1  # context tokens that are read with the choice
        if contexts.shape[1] > apart:
            first = self._forward(contexts[:, : contexts.shape[1] - apart], cache, last_only=True)
        choices = [(row, *choice) for row, (_, of) in enumerate(groups) for choice in of]
        pieces = list(_pieces(choices, rows))
        for place, piece in enumerate(pieces):
            fork = cache if place == len(pieces) - 1 else copy.deepcopy(cache)
            at = torch.tensor([row for row, _, _ in piece], dtype=torch.int64, device=self.device)
            if fork.get_seq_length() and at.tolist() != list(range(len(groups))):
                fork.reorder_cache(at)  # type: ignore[arg-type]
            targets = self._tensor([continuation for _, _, continuation in piece])
            inputs = torch.cat([contexts[at, contexts.shape[1] - apart :], targets[:, :-1]], dim=1)
            scores = self._score(fork, None if apart else first[at.to(first.device)], inputs, targets)  # type: ignore[index, union-attr]
            self.measured.count(fork, len(piece))
            for (_, number, continuation), found, likeliest in zip(piece, *scores, strict=True):
                length = len(continuation)
                yield number, (float(found[:length].sum()), bool(likeliest[:length].all()))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options) -> Tensor:
        """Generates as lm-eval does, one batch of rows of equal length at a time.

        With `compress_before=TEXT` among the options (a task's `generation_kwargs`), the prompt up to its last TEXT
        fills the cache, which then drops tokens if it does; the rest, the question, is read through the cache.
        """
        mask, marker = options.pop("attention_mask", None), options.pop("compress_before", None)
        if self.scoring == "cached" and options.get("num_beams", 1) * options.get("num_return_sequences", 1) > 1:
            raise NotImplementedError("several sequences a prompt with scoring='cached': generate repeats no cache; use scoring='deployed'")
        is_valid = torch.ones_like(context) if mask is None else mask
        new, pad = max_length - context.shape[1], self.tokenizer.pad_token_id
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, length in enumerate(is_valid.sum(-1).tolist()):
            begin = self._begin_of(marker, context[row, -length:].tolist()) if marker else length - (self.scoring == "cached")
            by_shape[length, begin].append(row)
        out = context.new_full((context.shape[0], max_length), pad)
        out[:, : context.shape[1]] = context
        for (length, begin), rows in by_shape.items():
            ids, cache = context[rows, -length:], self.new_cache()
            if 0 < begin < length:
                self._forward(ids[:, :begin], cache, last_only=True)
            options["attention_mask"] = torch.ones_like(ids)
            made = super()._model_generate(ids, length + new, stop, **passing(cache), **options)[:, length:]
            self.measured.count(cache, len(rows))
            out[rows, context.shape[1] : context.shape[1] + made.shape[1]] = made
        return out

    def _begin_of(self, marker: str, ids: list[int]) -> int:
        """The index of the token at which the last `marker` begins."""
        for begin in range(len(ids) - 1, 0, -1):
            if marker in self.tokenizer.decode(ids[begin:]):
                return begin
        raise ValueError(f"compress_before={marker!r} is not in the prompt: {self.tokenizer.decode(ids[-60:])!r}")

    def get_model_info(self) -> dict:
        """lm-eval's information, with `kv_` options and the measured bytes of a token over all ranks, averaged over all
        tokens read."""
        measured, ranks = self.measured, getattr(self.model, "tp_size", None) or 1
        options = {"cache": self.spec.cache} if self.spec.dense else asdict(self.spec)
        named = {f"kv_{name}": value for name, value in options.items() if value is not None}
        named |= {"kv_scoring": self.scoring, "kv_chunk": self.chunk, "kv_dtype": str(self.model.dtype).removeprefix("torch.")}
        if measured.bytes:
            named |= {"kv_bytes_per_token": ranks * measured.bytes / measured.tokens, "kv_ratio": measured.dense / measured.bytes}
        return super().get_model_info() | named | {"kv_tensor_parallel": ranks}

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Uses a separate table of `--use_cache` for each set of options, since lm-eval's keys are the requests
        alone."""
        super().set_cache_hook(cache_hook)
        if (answers := cache_hook.dbdict) is None:
            return
        from sqlitedict import SqliteDict

        of = [str(self.pretrained if isinstance(self.pretrained, str) else self.config.to_dict()), str(self.model.dtype), self.chunk]
        words = json.dumps([*of, self.scoring, asdict(self.spec), self._options], default=str, sort_keys=True)
        table = f"qkvcache_{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        SqliteDict(answers.filename, tablename=table, autocommit=True).close()  # creates it
        answers.tablename = table


def _check_names(options: dict) -> None:
    """Raises TypeError for a misspelled option of CacheLM, which HFLM would pass to transformers or ignore."""
    for name in options.keys() - OF_CACHE - inspect.signature(HFLM).parameters.keys():
        if meant := difflib.get_close_matches(name, {*OF_CACHE, "scoring", "chunk"}, n=1, cutoff=0.8):
            raise TypeError(f"{name}={options[name]!r}: no option of that name; did you mean {meant[0]!r}?")


def _pieces(items: Sequence, size: int) -> Iterator[Sequence]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))
