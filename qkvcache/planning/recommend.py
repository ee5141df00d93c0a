"""`recommend`: a choice of a cache, as code and in words.

Fewer bits come before fewer tokens, since they lose fewer facts, except where a long text continues. The quoted KL
divergences and recalls come from docs/measurements (quality, eviction): one model of 135 million
parameters, contexts up to 8,064 tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from ..caches import CompressedCache
from ..formats.base import check_count, check_option
from .model import model_dtype, text_config, weights_bytes
from .plan import DOES_NOT_FIT, Plan, in_words, plan

SHORT, LONG = 4096, 32_768
"""Tokens of context: a cache below SHORT is small beside the weights; from LONG on it is larger than the weights."""
LEAST_RATIO = 1.05
"""The ratio to a DynamicCache below which compressing is not worthwhile."""
WORKLOADS = ("facts", "question", "continue")


def _policies() -> Any:
    from ..evict import policies  # a room, which may not be there

    return policies


@dataclass(frozen=True)
class Choice:
    """A cache, as the call that makes it, and the reason for it."""

    call: str
    why: str
    format: str | None = None
    make_policy: Callable[[], Any] | None = None

    @property
    def policy(self) -> Any:
        return self.make_policy and self.make_policy()

    @property
    def second_reading(self) -> bool:
        return self.policy is not None and self.policy.second_reading

    def holds(self, plan: Plan) -> int | None:
        """The number of requests that fit. With a second reading, each request in turn is uncompressed until it has
        been read twice."""
        if plan.requests is None or not self.second_reading:
            return plan.requests
        left = plan.requests * plan.bytes_per_request - plan.dense
        return left // plan.bytes_per_request + 1 if left >= 0 else 0

    def fits(self, plan: Plan) -> bool:
        held = self.holds(plan)
        return plan.fits and (held is None or held >= plan.batch)


@dataclass(frozen=True)
class Recommendation:
    """call: code that makes the cache from `config`, with public names of qkvcache, or DynamicCache of transformers.
    fits: whether `batch` requests fit into `gpu_memory`; if not, `reason` begins with it, and the cache is the smallest."""

    call: str
    reason: str
    plan: Plan
    fits: bool

    def __str__(self) -> str:
        return f"{self.call}\n{self.reason}" if self.fits else f"{self.reason}\n{self.call}"

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        return vars(self) | {"plan": self.plan.as_json()}


INT8 = Choice('QuantizedPerTokenCache(config, dtype="int8")', "8 bits change next to nothing (KL .00004)", "int8")
FOUR_BITS = Choice(
    "TurboQuantCache(config)",
    "4 bits are as small as fp8 with half of the tokens evicted by H2O, and recall what the dense run does, where H2O recalls half of it "
    "(KL .0038)",
    "turboquant_4bit_nc",
)
WHOLE = (
    INT8,
    Choice('TurboQuantCache(config, preset="k8v4")', "int8 keys and 4-bit values stay close (KL .0005)", "turboquant_k8v4"),
    FOUR_BITS,
    Choice(
        "HadaQuantCache(config, key_bits=3, value_bits=3)",
        "3 bits lose few facts (KL .017; 97 % of what the dense run recalls); calibrated by layer (`qkvcache calibrate`), the same bytes "
        "have about half of the divergence",
        "hadaquant_k3v3",
    ),
    Choice(
        "HadaQuantCache(config, key_bits=3, value_bits=2)",
        "keys of 3 bits and values of 2 lose few facts (KL .030; 95 % of what the dense run recalls); calibrated by layer "
        "(`qkvcache calibrate`), the same bytes have .4 to .8 of the divergence",
        "hadaquant_k3v2",
    ),
)
"""Choices that evict nothing, from the largest to the smallest. Formats whose KL divergence exceeds .05 on biased keys
(tests/caches/test_biased.py) are left out, as 2 bits."""
RECOMMENDED = tuple(choice.format for choice in WHOLE)
DENSE = Choice(
    "DynamicCache(config=config)",
    "nothing grows enough to be worth compressing: the context is short, or the model's layers slide or are linear",
)
STREAM = Choice(
    "SinkCache(config, window_length=1020, num_sink_tokens=4)",
    "sinks and a window take constant memory, and perplexity stays flat over 200,000 tokens when sinks are read at positions of the cache; "
    "what left the window is gone",
    make_policy=lambda: _policies().SinkWindow(window_length=1020, num_sink_tokens=4, positions="cache"),
)


KVZIP = Choice(
    'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.KVzip(budget=0.25))',
    "in 4 bits a quarter of the tokens recall 92 % of what the dense run recalls. `cache.compress(model, ids, tokenizer=tokenizer)` fills "
    "the cache and reads the context twice; until then the context is uncompressed, so fill one cache after another",
    "turboquant_4bit_nc",
    lambda: _policies().KVzip(budget=0.25),
)
"""Tokens that the model does not need to repeat the context are evicted: with equal budgets of all heads, no policy that
reads the context once retains facts."""


def snapkv(context: int) -> Choice:
    """A budget in tokens, so that `max_length` can be added to the call."""
    budget = max(context // 2, 16)
    return Choice(
        f'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget={budget:_}))',
        "to go on with a text, 4 bits and half of the tokens stay close (KL .008, where H2O has .014); of facts that the dense run "
        "recalls, less than half are left if they are asked for later, and seven of ten if the prompt ends with the question",
        "turboquant_4bit_nc",
        lambda: _policies().SnapKV(budget=budget),
    )


def ladder(workload: str, context: int, chat: bool = False) -> list[Choice]:
    """Choices for a workload, from the first one for this context to the smallest. A `chat` excludes a second reading,
    since later turns are read once."""
    if workload == "continue" and context >= LONG:
        return [snapkv(context)]
    whole = WHOLE if context < SHORT else WHOLE[WHOLE.index(FOUR_BITS) :]
    if workload == "facts":
        return [*whole] if chat else [*whole, KVZIP]
    return [*(whole if workload == "question" else whole[:-1]), snapkv(context)]  # a text goes on better with half of the tokens


def recommend(
    config: PreTrainedConfig,
    *,
    workload: Literal["facts", "question", "continue"] = "facts",
    context: int,
    streaming: bool = False,
    chat: bool = False,
    batch: int = 1,
    gpu_memory: float | None = None,
    weights_memory: float | None = None,
    tensor_parallel: int = 1,
    dtype: torch.dtype | str | None = None,
) -> Recommendation:
    """Recommends a cache for a model and a workload, with its bytes and the reasons.

        recommend(model.config, workload="continue", context=100_000, gpu_memory=80e9)

    Args:
        workload: "facts", which may be asked for later (agents, retrieval, code); "question", which ends the prompt; or
            "continue", a text or a chain of thought.
        streaming: whether the text has no end.
        chat: whether there are several turns. Later turns may ask for anything in earlier ones, so the workload is
            "facts".
        batch: requests of `context` tokens that must fit into `gpu_memory`; if they do not, a smaller cache is chosen.
        context, gpu_memory, weights_memory, tensor_parallel, dtype: as `plan` takes them.

    Raises:
        ValueError: an unknown workload, streaming together with chat, and the errors of `plan`.
        TypeError, NotImplementedError: the errors of `plan`.
    """
    check_option("workload", workload, WORKLOADS, "; chat=True (--chat) and streaming=True (--streaming) are options beside it")
    if streaming and chat:
        raise ValueError("streaming=True with chat=True: a stream evicts earlier turns, which a chat refers to; choose one")
    text_config(config)
    dtype = model_dtype(config, dtype)
    check_count("context", context, 1)
    if gpu_memory is not None and weights_memory is None:
        weights_memory = weights_bytes(config, dtype)

    def planned(choice: Choice, **reading: Any) -> Plan:
        return plan(
            config, format=choice.format, policy=choice.policy, context=context, batch=batch, gpu_memory=gpu_memory,
            weights_memory=weights_memory, tensor_parallel=tensor_parallel, dtype=dtype, **reading,
        )  # fmt: skip

    if streaming:
        return _answer(STREAM, planned(STREAM), [STREAM.why])
    choices = ladder("facts" if chat else workload, context, chat)
    choices = [choice for choice in choices if _possible(config, choice)] or [choice for choice in WHOLE if _possible(config, choice)][-1:]
    tried = list[tuple[Choice, Plan]]()
    for choice in choices:
        of_choice = planned(choice)
        if tried and choice.holds(of_choice) == 0 and choice.second_reading:
            break  # no context fits uncompressed
        tried.append((choice, of_choice))
        if choice.fits(of_choice):
            break
    choice, planned_bytes = tried[-1]
    fits = choice.fits(planned_bytes)
    if planned_bytes.ratio < LEAST_RATIO and fits and (whole := planned(DENSE)).fits:
        return _answer(DENSE, whole, [DENSE.why])
    reasons = [choice.why]
    if len(tried) > 1 and fits:
        reasons.append(f"{tried[-2][0].call} would not hold {batch} such request{'s' * (batch > 1)}")
    if not fits and not choice.second_reading:
        reasons.append("with budgets by head (`qkvcache profile-heads`), half of the tokens hold most facts")
    if choice.format is not None and context >= LONG and _possible(config, choice, attention_budget=4096):
        few = planned(choice, attention_budget=4096, offload_pages=True)
        on_gpu, host = in_words(few.bytes_per_request - few.host), in_words(few.host)
        reasons.append(
            "with attention_budget=4096, a step reads few of these tokens; with offload_pages=True as well, a request takes "
            f"{on_gpu} of the GPU's memory and {host} of the host's"
        )
    if chat:
        reasons.append("keep one cache over the turns, and share what all chats begin with in a PrefixStore")
    return _answer(choice, planned_bytes, reasons)


def _possible(config: PreTrainedConfig, choice: Choice, **options: Any) -> bool:
    """Whether the format supports the model's heads, and the model's attention the policy and the `options`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nothing will be compressed": the ratio shows it
        try:
            CompressedCache(config, format=choice.format, policy=choice.policy, **options)
        except (ValueError, NotImplementedError):
            return False
    return True


def _answer(choice: Choice, plan: Plan, reasons: list[str]) -> Recommendation:
    fits = choice.fits(plan)
    if not fits:
        requests = f"{plan.batch} such requests" if plan.batch > 1 else "one such request"
        while_filled = ", the last of which is uncompressed while it is filled" if choice.second_reading else ""
        reasons = [f"does not fit: even this cache does not hold {requests}{while_filled}; shorten them, or add memory", *reasons]
    words = ". ".join(reason[0].upper() + reason[1:] for reason in reasons)
    return Recommendation(choice.call, f"{words}. {plan.reason.removeprefix(f'{DOES_NOT_FIT} ')}", plan, fits)
