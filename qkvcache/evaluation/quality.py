"""Quality of a cache against the dense run of the same model: divergence, perplexity, recall, bytes.

Every measurement prefills a context and reads a continuation through the cache. The prefill itself is exact for every
cache, so that only reading from the cache is measured. Numbers are kept for each passage. Tokens of one passage are
read through the same codes and are not independent: standard errors are of the means of passages, and two caches
are compared by their differences on the same passages. The question of a recall case is unseen when the context is
compressed. If it is seen (on request), it ends the prompt, and tokens are chosen with knowledge of it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from ..caches import CompressedCache
from ..caches.memory import measured
from ..layers.compressed import CompressedLayer
from ..releases import passing
from ..storage import GROUP
from .recall import CODE_WORD, Form, RecallCase, recall_case

CacheFactory = Callable[[], Cache]
DISTRACTORS = 3
"""Facts about other names in a recall case."""
SCORES = 2**30
"""The most attention scores of one forward pass, since torch allocates all of them in fp32 for grouped heads."""


class Prefilled(DynamicCache):
    """The dense cache of a prompt, from which other caches are filled."""

    @property
    def copies(self) -> bool:
        """Whether every layer has full attention, so that its keys and values can be copied into another cache."""
        return all(type(layer) is DynamicLayer for layer in self.layers)

    @torch.no_grad()
    def fill(self, cache: Cache, model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase | None = None) -> Cache:
        """Fills `cache` as a prefill of `ids` `[B, T]` without padding does, and returns it. The model reads `ids`
        again for caches that follow its attention, and if some layers do not have full attention. With `tokenizer`, caches that read
        the context twice ask for its repetition (`CompressedCache.compress`)."""
        if isinstance(cache, CompressedCache) and cache._maker.reads_twice:
            cache.compress(model, ids, tokenizer=tokenizer, progress=False)
        elif not (self.copies and keeps_all(cache)):
            model(ids, **passing(cache), logits_to_keep=1)
        else:
            for index, layer in enumerate(self.layers):
                cache.update(layer.keys, layer.values, index)  # type: ignore[arg-type, union-attr]
        return cache


def in_groups(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, ...]:
    """Groups of rows of `ids` `[B, T]` that are read together."""
    scores = model.config.get_text_config(decoder=True).num_attention_heads * ids.shape[1] ** 2
    return ids.split(max(SCORES // scores, 1))


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: Tensor) -> tuple[Prefilled, Tensor]:
    """The dense cache of `ids` `[B, T]`, and the logits after the last token `[B, V]`. If every layer has full attention, rows are read in
    groups of at most `SCORES` scores."""
    cache = Prefilled(config=model.config)
    groups = in_groups(model, ids) if cache.copies else (ids,)
    parts = [cache] if len(groups) == 1 else [Prefilled(config=model.config) for _ in groups]
    logits = [model(rows, **passing(part), logits_to_keep=1).logits[:, -1] for rows, part in zip(groups, parts, strict=True)]
    if len(parts) > 1:
        for index, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
            cache.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    return cache, torch.cat(logits)


@dataclass(frozen=True)
class Passages:
    """`context` `[B, T]` to prefill and `continuation` `[B, N]` to read token by token, with the dense run's results."""

    context: Tensor
    continuation: Tensor
    prefilled: Prefilled
    first_logits: Tensor
    log_probs: Tensor  # [B, N, V], for the position of each token of the continuation

    @classmethod
    def read(cls, model: PreTrainedModel, ids: Tensor, context_tokens: int) -> Passages:
        """The passages of `ids` `[B, T + N]`, split after `context_tokens`, with the dense run's results."""
        context, continuation = ids[:, :context_tokens], ids[:, context_tokens:]
        prefilled, first = prefill(model, context)
        cache = prefilled.fill(DynamicCache(config=model.config), model, context)
        return cls(context, continuation, prefilled, first, read_on(model, cache, continuation, first))

    @property
    def perplexity(self) -> float:
        """Perplexity of the dense run, over the tokens that `divergence` counts."""
        return _losses(self.log_probs[:, 1:], self.continuation[:, 1:]).mean().exp().item()


@dataclass(frozen=True)
class Divergence:
    """Next-token distributions compared with the dense run's distributions, as means for each passage `[B]`, fp64 on the CPU.

    `kls`: KL divergence in nats. `same_tops`: share of tokens whose most probable successor is the dense run's.
    `loss_changes`: negative log-likelihood of the text, minus the dense run's, in nats. `bytes_per_token`:
    measured, for one row.
    """

    kls: Tensor
    same_tops: Tensor
    loss_changes: Tensor
    perplexity: float
    bytes_per_token: float

    @property
    def kl(self) -> float:
        return self.kls.mean().item()

    @property
    def same_top(self) -> float:
        return self.same_tops.mean().item()


def at_once(cache: Cache) -> int:
    """The number of tokens that the next step can read so that each attends to the same keys and values as if they were
    read one by one.

    The tokens of a step attend to each other exactly and to older tokens as stored, which makes no difference until the
    residual is full. Caches that drop tokens or are preallocated change with every token; with a budget each token chooses what it reads.
    """
    if not isinstance(cache, CompressedCache):
        return GROUP + 1 if isinstance(cache, DynamicCache) else 1
    if not keeps_all(cache) or cache.max_length or _chooses(cache):
        return 1
    free = [layer.storage.free for layer in cache.layers if isinstance(layer, CompressedLayer) and layer.storage]
    return max(min(free, default=GROUP + 1), 1)


def keeps_all(cache: Cache) -> bool:
    """Whether all tokens stay in the layers of this library."""
    return not (isinstance(cache, CompressedCache) and cache._maker.rule)


def _chooses(cache: Cache) -> bool:
    """Whether attention reads chosen tokens of `cache`, which several tokens of a step choose together."""
    return isinstance(cache, CompressedCache) and cache.attention_budget is not None


@torch.no_grad()
def steps(model: PreTrainedModel, cache: Cache, ids: Tensor, size: int | None = None) -> Iterator[Tensor]:
    """Yields logits `[B, n, V]` after each token of `ids` `[B, N]`, equal to the logits of decoding one by one through
    `cache`, in steps of `n` tokens."""
    while ids.shape[1]:
        step, ids = ids.tensor_split([size or at_once(cache)], dim=1)
        yield model(step, **passing(cache)).logits


@torch.no_grad()
def stream(model: PreTrainedModel, cache: Cache, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Yields the negative log-likelihoods of all tokens of `ids` `[B, T]` except the first, read `chunk` tokens a step:
    fp32 `[B, n]` for each step."""
    for step, target in zip(ids[:, :-1].split(chunk, dim=1), ids[:, 1:].split(chunk, dim=1), strict=True):
        logits = model(step, **passing(cache)).logits
        yield torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view(target.shape)


def read_on(model: PreTrainedModel, cache: Cache, ids: Tensor, first_logits: Tensor) -> Tensor:
    """Log-probabilities before each token of `ids` `[B, N]`, read as if they came one at a time: `[B, N, V]`, fp32."""
    return torch.cat([first_logits.unsqueeze(1), *steps(model, cache, ids[:, :-1])], dim=1).float().log_softmax(-1)


def compare(log_probs: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """The KL divergence from `dense` in nats, and whether the most probable token is the same, `[B, N]` each, for
    log-probabilities `[B, N, V]`."""
    kl = torch.stack([(q.exp() * (q - p)).sum(-1) for p, q in zip(log_probs, dense, strict=True)])
    return kl, log_probs.argmax(-1) == dense.argmax(-1)


def divergence(
    model: PreTrainedModel, passages: Passages, factory: CacheFactory, tokenizer: PreTrainedTokenizerBase | None = None
) -> Divergence:
    """The divergence between reading through `factory()` and the dense run. The first token does not depend on the
    cache and is not counted. `tokenizer`: see `CompressedCache.compress`, for caches that read the context
    twice."""
    cache = passages.prefilled.fill(factory(), model, passages.context, tokenizer)
    log_probs = read_on(model, cache, passages.continuation, passages.first_logits)[:, 1:]
    dense, target = passages.log_probs[:, 1:], passages.continuation[:, 1:]
    losses = _losses(log_probs, target)
    kls, same_tops, changes = (x.double().mean(1).cpu() for x in (*compare(log_probs, dense), losses - _losses(dense, target)))
    rows, tokens = passages.context.shape[0], cache.get_seq_length()
    return Divergence(kls, same_tops, changes, losses.mean().exp().item(), held_bytes(cache) / rows / tokens)


def _losses(log_probs: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihoods `[B, N]` of `target` `[B, N]` under `log_probs` `[B, N, V]`."""
    return -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def held_bytes(cache: Cache) -> int:
    """Bytes of keys, values and states of linear layers, measured in the same way for caches of this library and of
    transformers."""
    return measured(cache.layers).total


@dataclass(frozen=True)
class RecallSet:
    """Recall cases of equal length that ask for the same key, prefilled once: `context` `[B, T]`, `question` `[1, Q]`.
    If the question is seen, it ends the context, and `first` `[B, 1]` is the first token of the answers."""

    cases: list[RecallCase]
    context: Tensor
    question: Tensor
    prefilled: Prefilled
    first: Tensor | None = None

    @classmethod
    def make(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text_ids: list[int],
        tokens: int,
        count: int,
        *,
        seed: int = 0,
        seen: bool = False,
        form: Form = CODE_WORD,
    ) -> RecallSet:
        """Makes `count` contexts of nearly `tokens` tokens from `text_ids`, with the fact at depths from 0 to 95 %."""
        rng = random.Random(seed)
        cases, rows = [], []
        filler_tokens = tokens - form.tokens * (DISTRACTORS + 1)
        for i in range(count):
            at = rng.randrange(len(text_ids) - filler_tokens)
            filler = str(tokenizer.decode(text_ids[at : at + filler_tokens]))
            case = recall_case(rng, filler, 0.95 * i / max(count - 1, 1), DISTRACTORS, key="Anna", form=form)
            cases.append(case)
            rows.append(tokenizer(form.opening + case.context, verbose=False)["input_ids"])
        shortest = min(map(len, rows))  # code words differ in length; the last tokens contain no fact
        context = torch.tensor([row[:shortest] for row in rows], dtype=torch.int64, device=model.device)
        asked = form.before_question + cases[0].question
        question = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        if seen:
            context = torch.cat([context, question.expand(count, -1)], dim=1)
        prefilled, logits = prefill(model, context)
        return cls(cases, context, question, prefilled, logits.argmax(-1, keepdim=True) if seen else None)


@torch.no_grad()
def recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: RecallSet, factory: CacheFactory) -> float:
    """The share of cases with the right greedy answer when context, question and answer all pass through
    `factory()`."""
    cache = cases.prefilled.fill(factory(), model, cases.context, tokenizer)
    step = cases.question.expand(len(cases.cases), -1) if cases.first is None else cases.first
    longest = max(len(tokenizer(case.answer, add_special_tokens=False)["input_ids"]) for case in cases.cases)
    answers = [] if cases.first is None else [cases.first]
    # A budget holds for each token of the question, too.
    size = 1 if _chooses(cache) else step.shape[1]
    while len(answers) <= longest:
        for part in step.split(size, dim=1):
            logits = model(part, **passing(cache), logits_to_keep=1).logits
        step = logits[:, -1:].argmax(-1)
        answers.append(step)
    texts = tokenizer.batch_decode(torch.cat(answers, dim=1))
    return sum(bool(re.match(re.escape(case.answer) + r"(?!\w)", text)) for text, case in zip(texts, cases.cases, strict=True)) / len(texts)
