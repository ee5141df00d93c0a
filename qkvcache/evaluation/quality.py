"""Quality of a cache against the dense run of the same model: divergence, perplexity, recall, bytes.

Every measurement prefills a context, then reads on through the cache. The prefill itself attends exactly whatever the cache is, so what is
measured is only what the cache hands back. Numbers are kept for each passage: tokens of one passage are read through the same codes, so
that errors are those of the means of passages, and two caches are compared by their differences on the same passages. The question of a
recall case is unseen when the context is compressed, or seen if that is asked for: then it ends the prompt, and what a policy forgets is
chosen with it in view. `observes` are the windows of attention that policies want (`Policy.observes`); a policy whose window is not among
them has the model read the prompt again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..caches import CompressedCache
from ..caches.memory import measured
from ..layers.compressed import CompressedLayer
from ..storage import GROUP
from .prefill import Prefilled, prefill, refill
from .recall import CODE_WORD, Form, RecallCase, recall_case

CacheFactory = Callable[[], Cache]


@dataclass(frozen=True)
class Passages:
    """`context` `[B, T]` to prefill and `continuation` `[B, N]` to read token by token, with what the dense run thinks of it."""

    context: Tensor
    continuation: Tensor
    prefilled: Prefilled
    first_logits: Tensor
    log_probs: Tensor  # [B, N, V], of each continuation token's position

    @classmethod
    def read(cls, model: PreTrainedModel, ids: Tensor, context_tokens: int, observes: tuple[int, ...] = ()) -> Passages:
        """`ids` `[B, T + N]`, split after `context_tokens`."""
        context, continuation = ids[:, :context_tokens], ids[:, context_tokens:]
        prefilled, first = prefill(model, context, observes)
        cache = refill(DynamicCache(config=model.config), prefilled, model, context)
        return cls(context, continuation, prefilled, first, read_on(model, cache, continuation, first))

    @property
    def perplexity(self) -> float:
        """Of the dense run, over the tokens that `divergence` counts."""
        return _losses(self.log_probs[:, 1:], self.continuation[:, 1:]).mean().exp().item()


@dataclass(frozen=True)
class Divergence:
    """Next-token distributions against the dense ones, a mean for each passage `[B]`, fp64 on the CPU.

    `kls`: KL divergence, nats. `same_tops`: share of tokens whose most probable successor is the dense run's. `loss_changes`: negative
    log-likelihood of the text less that of the dense run, nats. `bytes_per_token`: measured, of one row.
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
    """How many tokens may be fed in the next step so that each attends to what it would attend to if they came one by one.

    A step sees itself exactly, and what is older as it is stored. Tokens leave the exact residual in groups: until it is full, storage is
    the same either way. What evicts, has no residual or is preallocated changes at every token.
    """
    if not isinstance(cache, CompressedCache):
        return GROUP + 1
    if cache.policy or cache.max_length:
        return 1
    free = [layer.storage.free for layer in cache.layers if isinstance(layer, CompressedLayer) and layer.storage]
    return max(min(free, default=GROUP + 1), 1)


@torch.no_grad()
def steps(model: PreTrainedModel, cache: Cache, ids: Tensor, size: int | None = None) -> Iterator[Tensor]:
    """Logits `[B, n, V]` after each token of `ids` `[B, N]`, as decoding them one by one through `cache` gives them; `n` tokens a step."""
    while ids.shape[1]:
        step, ids = ids.tensor_split([size or at_once(cache)], dim=1)
        yield model(step, past_key_values=cache).logits


def read_on(model: PreTrainedModel, cache: Cache, ids: Tensor, first_logits: Tensor) -> Tensor:
    """Log-probabilities before each token of `ids` `[B, N]`, read as if they came one at a time: `[B, N, V]`, fp32."""
    return torch.cat([first_logits.unsqueeze(1), *steps(model, cache, ids[:, :-1])], dim=1).float().log_softmax(-1)


def compare(log_probs: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergence from `dense`, nats, and whether the most probable token is the same: `[B, N]` each, of `[B, N, V]`."""
    kl = torch.stack([(q.exp() * (q - p)).sum(-1) for p, q in zip(log_probs, dense, strict=True)])
    return kl, log_probs.argmax(-1) == dense.argmax(-1)


def divergence(model: PreTrainedModel, passages: Passages, factory: CacheFactory) -> Divergence:
    """How far reading through `factory()` is from the dense run. The first token, which no cache touched, is not counted."""
    cache = refill(factory(), passages.prefilled, model, passages.context)
    log_probs = read_on(model, cache, passages.continuation, passages.first_logits)[:, 1:]
    dense, target = passages.log_probs[:, 1:], passages.continuation[:, 1:]
    losses = _losses(log_probs, target)
    kls, same_tops, changes = (x.double().mean(1).cpu() for x in (*compare(log_probs, dense), losses - _losses(dense, target)))
    rows, tokens = passages.context.shape[0], cache.get_seq_length()
    return Divergence(kls, same_tops, changes, losses.mean().exp().item(), held_bytes(cache) / rows / tokens)


def _losses(log_probs: Tensor, target: Tensor) -> Tensor:
    return -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def held_bytes(cache: Cache) -> int:
    """Bytes of keys, values and states of linear layers that `cache` holds, measured: ours or a DynamicCache, counted alike."""
    if not isinstance(cache, CompressedCache | DynamicCache):
        raise TypeError(f"cannot count what a {type(cache).__name__} holds: expected a CompressedCache or a DynamicCache")
    return measured(cache.layers).total


@dataclass(frozen=True)
class RecallSet:
    """Cases of equal length that ask for the same key, prefilled once: `context` `[B, T]`, `question` `[1, Q]`. Where the question has been
    seen, it ends the context, and `first` `[B, 1]` is the first token of the answers."""

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
        distractors: int = 3,
        seed: int = 0,
        seen: bool = False,
        observes: tuple[int, ...] = (),
        form: Form = CODE_WORD,
    ) -> RecallSet:
        """`count` contexts of nearly `tokens` tokens cut from `text_ids`, the fact at depths spread from 0 to 95 %."""
        rng = random.Random(seed)
        cases, rows = [], []
        filler_tokens = tokens - form.tokens * (distractors + 1)
        for i in range(count):
            at = rng.randrange(len(text_ids) - filler_tokens)
            filler = str(tokenizer.decode(text_ids[at : at + filler_tokens]))
            case = recall_case(rng, filler, 0.95 * i / max(count - 1, 1), distractors, key="Anna", form=form)
            cases.append(case)
            rows.append(tokenizer(form.opening + case.context, verbose=False)["input_ids"])
        shortest = min(map(len, rows))  # code words differ in length: a few tokens go from the end, where there is no fact
        context = torch.tensor([row[:shortest] for row in rows], device=model.device)
        asked = form.before_question + cases[0].question
        question = tokenizer(asked, add_special_tokens=False, return_tensors="pt")["input_ids"].to(model.device)
        if seen:
            context = torch.cat([context, question.expand(count, -1)], dim=1)
        prefilled, logits = prefill(model, context, observes)
        return cls(cases, context, question, prefilled, logits.argmax(-1, keepdim=True) if seen else None)


@torch.no_grad()
def recall(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: RecallSet, factory: CacheFactory) -> float:
    """Share of the cases whose answer comes out right, greedily, when context, question and answer all pass through `factory()`."""
    cache = refill(factory(), cases.prefilled, model, cases.context)
    step = cases.question.expand(len(cases.cases), -1) if cases.first is None else cases.first
    longest = max(len(tokenizer(case.answer, add_special_tokens=False)["input_ids"]) for case in cases.cases)
    answers = [] if cases.first is None else [cases.first]
    while len(answers) <= longest:
        step = model(step, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        answers.append(step)
    texts = tokenizer.batch_decode(torch.cat(answers, dim=1))
    return sum(bool(re.match(re.escape(case.answer) + r"(?!\w)", text)) for text, case in zip(texts, cases.cases, strict=True)) / len(texts)
