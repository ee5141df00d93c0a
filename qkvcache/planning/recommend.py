"""`recommend`: which cache to take, in code and in words.

It follows the usual selection guide (short: FP8; medium: FP8 and H2O with half of the tokens; long: sinks, H2O with 30 % and FP8; streams:
sinks and a window; chat: FP8 and shared prefixes) as far as what was measured here agrees, and says where it does not. The KL divergences
and recalls quoted are of `eval/quality.py --model smollm2`: a real model of 135 million parameters, 8,064 tokens, facts in 1,000 to 8,000.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedConfig

from .. import policies
from ..caches import CompressedCache
from ..formats.base import check_option
from ..policies import Policy
from .engines import sglang_flag, vllm_flag
from .model import model_dtype, text_config, weights_bytes
from .plan import Plan, plan

SHORT, LONG = 4096, 32_768
"""Tokens of context: below the first a cache is small beside the weights, from the second on it is larger than they are."""
LEAST_RATIO = 1.05
"""What is smaller by less than this is not worth another cache."""


@dataclass(frozen=True)
class Choice:
    """A cache, what makes it, and what was measured of it. A budget that is a share of the context is `{tokens}` in the call."""

    call: str
    format: str | None
    policy: Policy | None
    why: str

    def at(self, context: int) -> Choice:
        """The same for `context` tokens: a budget in tokens, which `max_length` allows."""
        if self.policy is None or not (budget := self.policy.budgets[0]).share:
            return self
        tokens = max(budget.size(context), 1)
        policy = replace(self.policy, budget=tokens)  # type: ignore[call-arg]
        return replace(self, call=self.call.format(tokens=f"{tokens:_}"), policy=policy)


@dataclass(frozen=True)
class Recommendation:
    """`call` makes the cache from `config` and the public names of qkvcache (DynamicCache: of transformers); `guide` is what the usual
    selection guide takes; `vllm` and `sglang` are the nearest flags of these engines, both of which keep every token."""

    call: str
    reason: str
    guide: str
    plan: Plan
    vllm: str
    sglang: str

    def __str__(self) -> str:
        return f"{self.call}\n{self.reason}"

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        return vars(self) | {"plan": self.plan.as_json()}


INT8 = Choice('QuantizedPerTokenCache(config, dtype="int8")', "int8", None, "8 bits change next to nothing (KL .00004)")
K8V4 = Choice(
    'TurboQuantCache(config, preset="k8v4")', "turboquant_k8v4", None, "int8 keys and 4-bit values stay close (KL .0005)"
)  # fmt: skip
FOUR_BITS = Choice(
    "HadaQuantCache(config)", "hadaquant_k4v4", None,
    "4 bits are as small as fp8 with half of the tokens evicted by H2O, and recall what the dense run does, where H2O recalls half of it "
    "(KL .0040)",
)  # fmt: skip
THREE_BITS = Choice(
    'HadaQuantCache(config, key_bits=3, value_bits=3, quantizer="trellis")', "hadaquant_k3v3_trellis", None,
    "3 bits on a trellis lose few facts (KL .012; 93 % of what the dense run recalls)",
)  # fmt: skip
THREE_AND_TWO = Choice(
    'HadaQuantCache(config, key_bits=3, value_bits=2, quantizer="trellis")', "hadaquant_k3v2_trellis", None,
    "keys of 3 bits and values of 2 lose few facts (KL .030, and 95 % of what the dense run recalls, without the trellis)",
)  # fmt: skip
SNAPKV_50 = Choice(
    'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget={tokens}))',
    "turboquant_4bit_nc", policies.SnapKV(budget=0.5),
    "to go on with a text, 4 bits and half of the tokens stay close (KL .008, where H2O has .014); of facts that the dense run recalls, "
    "less than half are left if they are asked for later, and seven of ten if the prompt ends with the question",
)  # fmt: skip
SNAPKV_25 = Choice(
    'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget={tokens}))',
    "turboquant_4bit_nc", policies.SnapKV(budget=0.25),
    "to go on with a text, 4 bits and a quarter of the tokens are the smallest that stay near (KL .032); facts are lost",
)  # fmt: skip
STREAM = Choice(
    'SinkCache(config, window_length=1020, num_sink_tokens=4)', None,
    policies.SinkWindow(window_length=1020, num_sink_tokens=4, positions="cache"),
    "sinks and a window take constant memory, and perplexity stays flat over 200,000 tokens when sinks are read at positions of the cache; "
    "what left the window is gone",
)  # fmt: skip

FACTS = (INT8, K8V4, FOUR_BITS, THREE_BITS, THREE_AND_TWO)
LADDERS: dict[str, tuple[Choice, ...]] = {
    "facts": FACTS,
    "question": (*FACTS, SNAPKV_50),
    "continue": (INT8, K8V4, FOUR_BITS, THREE_BITS, SNAPKV_50, SNAPKV_25),
}
"""For each workload, from the closest to the smallest. Nothing evicts where facts may be asked for later: no policy keeps them and stays
close. KeyDiff, which does on the embedded model, does not on a real one. No format is among them whose KL divergence exceeds .05 on keys
with biases (tests/caches/test_biased.py): 2 bits, on a trellis too, read on with .054 there, and with .6 in a pretrained model of the
Qwen2 family."""
LONG_START = {"facts": FOUR_BITS, "question": FOUR_BITS, "continue": SNAPKV_50}


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
    """Which cache to take for a model and a workload, and what it takes.

        recommend(model.config, workload="continue", context=100_000, gpu_memory=80e9)

    Args:
        workload: "facts" that may be asked for later (agents, retrieval, code), a "question" that ends the prompt, or "continue" a text
            or a chain of thought.
        streaming: tokens come without end.
        chat: several turns; what one turn read may be asked for in the next, so that "facts" it is.
        batch: requests of `context` tokens that must fit into `gpu_memory`; where they do not, a smaller cache is chosen.
        context, gpu_memory, weights_memory, tensor_parallel, dtype: as `plan` takes them.

    Raises:
        ValueError: an unknown workload, streaming and chat at once, and what `plan` raises.
        TypeError, NotImplementedError: what `plan` raises.
    """
    check_option("workload", workload, LADDERS, "; chat=True (--chat) and streaming=True (--streaming) are options beside it")
    if streaming and chat:
        raise ValueError("streaming=True with chat=True: a stream forgets the turns that a chat goes back to; choose one")
    text_config(config)
    dtype = model_dtype(config, dtype)
    if gpu_memory is not None and weights_memory is None:
        weights_memory = weights_bytes(config, dtype)

    def planned(choice: Choice) -> Plan:
        return plan(
            config, format=choice.format, policy=choice.policy, context=context, batch=batch, gpu_memory=gpu_memory,
            weights_memory=weights_memory, tensor_parallel=tensor_parallel, dtype=dtype,
        )  # fmt: skip

    guide = _guide(context, streaming, chat)
    if streaming:
        return _answer(STREAM, planned(STREAM), guide, [STREAM.why], chat)
    tried = []
    for choice in _ladder(config, "facts" if chat else workload, context):
        choice = choice.at(context)
        tried.append((choice, planned(choice)))
        if tried[-1][1].fits:
            break
    choice, found = tried[-1]
    dense = Choice("DynamicCache(config=config)", None, None, "")
    if found.ratio < LEAST_RATIO and found.fits and (whole := planned(dense)).fits:
        why = "nothing grows enough to be worth compressing: the context is short, or the model's layers slide or are linear"
        return _answer(dense, whole, guide, [why], chat)
    reasons = [choice.why]
    if len(tried) > 1 and found.fits:
        reasons.append(f"{tried[-2][0].call} would not hold {batch} such requests")
    if not found.fits:
        reasons.append(f"not even this holds {batch} such requests: shorten them, or add memory")
    if chat:
        reasons.append("keep one cache over the turns, and share what all chats begin with in a PrefixStore")
    return _answer(choice, found, guide, reasons, chat)


def _ladder(config: PreTrainedConfig, workload: str, context: int) -> list[Choice]:
    """What to try, from where the context says to begin, of what the model allows."""
    ladder = LADDERS[workload]
    start = INT8 if context < SHORT else FOUR_BITS if context < LONG else LONG_START[workload]
    possible = [choice for choice in ladder if _possible(config, choice)]
    wanted = ladder[ladder.index(start) :]
    return [choice for choice in possible if choice in wanted] or possible[-1:]


def _possible(config: PreTrainedConfig, choice: Choice) -> bool:
    """Whether the format holds the model's heads, and its attention allows the policy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing will be compressed: the ratio says so
        try:
            CompressedCache(config, format=choice.format, policy=choice.policy)
        except (ValueError, NotImplementedError):
            return False
    return True


def _guide(context: int, streaming: bool, chat: bool) -> str:
    if streaming:
        return "sinks + sliding window"
    if chat:
        return "FP8 + prefix caching"
    if context < SHORT:
        return "FP8"
    return "FP8 + H2O 50 %" if context < LONG else "sinks + H2O 30 % + FP8"


def _answer(choice: Choice, found: Plan, guide: str, reasons: list[str], chat: bool) -> Recommendation:
    words = ". ".join(reason[0].upper() + reason[1:] for reason in reasons)
    return Recommendation(choice.call, f"{words}. {found.reason}", guide, found, vllm_flag(choice.format), sglang_flag(choice.format, chat))
