"""`recommend`: a choice of a cache, as code and in words.

Fewer bits come before fewer tokens, since they lose fewer facts, except where a long text continues. The quoted KL divergences and
recalls come from docs/measurements: `MEASURED`, contexts up to 8,064 tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from ..caches import CompressedCache
from ..formats.base import check_count, check_option
from ..rooms import registered
from .model import model_dtype, text_config, weights_bytes
from .plan import Plan, in_words, plan

SHORT, LONG = 4096, 32_768
"""Tokens of context: a cache below SHORT is small beside the weights; from LONG on it is larger than the weights."""
LEAST_RATIO = 1.05
"""The ratio to a DynamicCache below which compressing is not worthwhile."""
MEASURED = "SmolLM2-135M"
"""The model of the quoted measurements."""
WORKLOADS = ("facts", "question", "continue")


@dataclass(frozen=True)
class Choice:
    """A cache, as the call that makes it, and the reason for it."""

    call: str
    why: str
    format: str | None = None
    policy: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of CompressedCache."""
        return {"format": self.format, "policy": self.policy}


def of_rooms(workload: str, context: int) -> list[Choice]:
    """What rooms offer for a workload, or for a "stream"."""
    return [Choice(**make(context, MEASURED)) for name, make in registered("CHOICES") if name == workload]


@dataclass(frozen=True)
class Recommendation:
    """call: code that makes the cache from `config`, with public names of qkvcache, or DynamicCache of transformers.
    reasons: why this cache, in sentences.
    plan: its bytes, and in `plan.verdict` whether `batch` requests fit into `gpu_memory`; if not, the cache is the smallest."""

    call: str
    reasons: tuple[str, ...]
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def reason(self) -> str:
        """The verdict, the reasons and the plan in words."""
        return " ".join(filter(None, (self.plan.verdict, *self.reasons, *self.plan.sentences)))

    def __str__(self) -> str:
        listed = "\n".join(f"- {sentence}" for sentence in (*self.reasons, *self.plan.sentences))
        return "\n\n".join(filter(None, (self.plan.verdict, f"    {self.call}", listed)))

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        return {"call": self.call, "fits": self.fits, "reason": self.reason, "plan": self.plan.as_json()}


INT8 = Choice('QuantizedPerTokenCache(config, dtype="int8")', f"8 bits change next to nothing (KL .00004 on {MEASURED})", "int8")
FOUR_BITS = Choice(
    "TurboQuantCache(config)",
    f"4 bits recall as many facts as no compression (61 ± 5 and 60 ± 5 %), at a KL of .0038 (on {MEASURED})",
    "turboquant_4bit_nc",
)
WHOLE = (
    INT8,
    Choice('TurboQuantCache(config, preset="k8v4")', f"int8 keys and 4-bit values stay close (KL .0005 on {MEASURED})", "turboquant_k8v4"),
    FOUR_BITS,
    Choice(
        "HadaQuantCache(config, key_bits=3, value_bits=3)",
        f"3 bits lose few facts: on {MEASURED} they recall 97 % of what no compression recalls, at a KL of .017; chosen by layer "
        "(`qkvcache calibrate`), the same bytes have about half of the divergence",
        "hadaquant_k3v3",
    ),
    Choice(
        "HadaQuantCache(config, key_bits=3, value_bits=2)",
        f"keys of 3 bits and values of 2 lose some facts: on {MEASURED} they recall 95 % of what no compression recalls, at a KL of .030; "
        "chosen by layer (`qkvcache calibrate`), the same bytes have .4 to .8 of the divergence",
        "hadaquant_k3v2",
    ),
)
"""Choices that keep all tokens, from the largest to the smallest. Formats whose KL divergence exceeds .05 on biased keys
(tests/caches/test_biased.py) are left out, as 2 bits."""
RECOMMENDED = tuple(choice.format for choice in WHOLE)
DENSE = Choice(
    "DynamicCache(config=config)",
    "nothing grows enough to be worth compressing: the context is short, or the model's layers slide or are linear",
)


def ladder(workload: str, context: int, chat: bool = False) -> list[Choice]:
    """Choices for a workload, from the first one for this context to the smallest. A `chat` excludes a second reading,
    since later turns are read once."""
    few = [] if chat else of_rooms(workload, context)
    if workload == "continue" and context >= LONG and few:
        return few
    whole = WHOLE if context < SHORT else WHOLE[WHOLE.index(FOUR_BITS) :]
    return [*(whole[:-1] if workload == "continue" and few else whole), *few]  # a text goes on better with half of the tokens


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
        streaming: whether the text has no end; `workload` is then not read.
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
        raise ValueError("streaming=True with chat=True: a stream forgets earlier turns, which a chat refers to; choose one")
    text_config(config)
    dtype = model_dtype(config, dtype)
    check_count("context", context, 1)
    if gpu_memory is not None and weights_memory is None:
        weights_memory = weights_bytes(config, dtype)

    def planned(choice: Choice, **reading: Any) -> Plan:
        return plan(
            config, **choice.options, context=context, batch=batch, gpu_memory=gpu_memory,
            weights_memory=weights_memory, tensor_parallel=tensor_parallel, dtype=dtype, **reading,
        )  # fmt: skip

    if streaming:
        for choice in of_rooms("stream", context):
            return _answer(choice, planned(choice), [choice.why])
        raise NotImplementedError("streaming=True: this installation of qkvcache comes without caches of constant size")
    choices = ladder("facts" if chat else workload, context, chat)
    choices = [choice for choice in choices if _possible(config, choice)] or [choice for choice in WHOLE if _possible(config, choice)][-1:]
    tried = list[tuple[Choice, Plan]]()
    for choice in choices:
        of_choice = planned(choice)
        if tried and of_choice.requests == 0 and getattr(choice.policy, "second_reading", False):
            break  # no context fits uncompressed
        tried.append((choice, of_choice))
        if of_choice.fits:
            break
    choice, found = tried[-1]
    if found.ratio < LEAST_RATIO and found.fits and (whole := planned(DENSE)).fits:
        return _answer(DENSE, whole, [DENSE.why])
    reasons = [choice.why]
    if len(tried) > 1 and found.fits:
        reasons.append(f"{tried[-2][0].call} would not hold {batch} such request{'s' * (batch > 1)}")
    if not found.fits:
        reasons = [
            "this is the smallest cache for the workload; shorten the requests, or add memory",
            *reasons,
            *_remedies(config, found, planned),
        ]
    if chat:
        reasons.append("keep one cache over the turns, and share what all chats begin with in a PrefixStore")
    return _answer(choice, found, reasons)


def _remedies(config: PreTrainedConfig, found: Plan, planned: Callable[..., Plan]) -> Iterator[str]:
    """What may still be done where even the smallest cache does not fit."""
    if found.policy is None:
        yield f"with budgets by head (`qkvcache profile-heads`), half of the tokens recall 89 to 97 % of what all recall (on {MEASURED})"
    if found.context >= LONG and _possible(config, FOUR_BITS, attention_budget=4096):
        few = planned(FOUR_BITS, attention_budget=4096, offload_pages=True)
        if few.fits:
            yield (
                "TurboQuantCache(config, attention_budget=4096, offload_pages=True) fits: each request takes "
                f"{in_words(few.bytes_per_request - few.host)} of the GPU's memory and {in_words(few.host)} of the host's"
            )


def _possible(config: PreTrainedConfig, choice: Choice, **options: Any) -> bool:
    """Whether the format supports the model's heads, and its attention what chooses tokens, and the `options`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "nothing will be compressed": the ratio shows it
        try:
            CompressedCache(config, **choice.options, **options)
        except (ValueError, NotImplementedError):
            return False
    return True


def _answer(choice: Choice, plan: Plan, reasons: list[str]) -> Recommendation:
    return Recommendation(choice.call, tuple(f"{reason[0].upper()}{reason[1:]}." for reason in reasons), plan)
