"""Temperature, top_p and seed of each request in a batch.

A request's next token is the one with the largest sum of processed logit and Gumbel noise, so that each token is drawn
with its probability. The noise is a hash of the request's seed, the position and the token: it is the same in any
batch, on any rank, and after a preemption.
"""

from __future__ import annotations

import hashlib
import secrets
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

GREEDY = {"temperature": 1.0, "top_p": 1.0, "seed": 0}
"""Arguments of a request that takes the most probable token."""


class Sampling(ContinuousBatchingLogitsProcessorList):
    """The logits processors of a manager whose requests have sampling options of their own; `config` has the defaults.

    A batch leaves out the processors that none of its requests needs: sorting vocabularies for top_p takes long.
    """

    def __init__(self, config: GenerationConfig):
        self._default = config
        stages: list[Any] = [TemperatureLogitsWarper(1.0), TopPLogitsWarper(1.0), Noise()]
        if config.top_k:
            stages.insert(1, TopKLogitsWarper(config.top_k))
        super().__init__(LogitsProcessorList(stages), per_request_processors=True)
        self.tensors_required = len(stages)
        self.needed = [False] * len(stages)
        """Flags, one for each processor: whether the latest batch needs it."""

    def options(self, temperature: float | None = None, top_p: float | None = None, seed: int | None = None) -> dict[str, Any]:
        """The arguments of a request. Temperature 0 is greedy. Without a temperature, the request samples if the
        default does or if `top_p` is given."""
        default = self._default
        if temperature is not None and not (isinstance(temperature, Real) and 0 <= temperature < float("inf")):
            raise ValueError(f"temperature={temperature!r}: expected a number of at least 0")
        if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
            raise ValueError(f"top_p={top_p!r}: expected a number above 0, at most 1")
        if seed is not None and not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: expected an integer")
        if temperature == 0 or (temperature is None and top_p is None and not default.do_sample):
            return dict(GREEDY)
        if temperature is None:
            temperature = (default.do_sample and default.temperature) or 1.0
        if top_p is None:
            top_p = (default.do_sample and default.top_p) or 1.0
        seed = secrets.randbits(62) if seed is None else seed
        # Division by a smaller number overflows; the seed of a greedy request is 0.
        return {"temperature": max(float(temperature), 1e-4), "top_p": float(top_p), "seed": 2 * seed + 1}

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        sampled = [
            request.state.logit_processor_kwargs
            for request in requests_in_batch
            if request.has_new_token and request.state.logit_processor_kwargs.get("seed")
        ]
        self.needed = [
            any(arguments[name] != GREEDY[name] for arguments in sampled) if name in GREEDY else bool(sampled)
            for name in (next(iter(stage.supported_kwargs)) for stage in self.logits_processor)
        ]
        return super().prepare_tensor_args(requests_in_batch, arg_storage) if sampled else arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        for i, (stage, needed) in enumerate(zip(self.logits_processor, self.needed, strict=True)):
            if needed:
                scores = stage(scores, logits_processor_args[i])
        return scores


class Noise(ContinuousBatchingLogitsProcessor):
    """Adds Gumbel noise to the logits of requests with a seed."""

    supported_kwargs: dict[str, type] = {"seed": int}
    ignored_kwargs: tuple[str, ...] = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        return torch.tensor([key(request.state) for request in requests_with_new_token], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        keys = tensor_arg[: scores.shape[0], None]
        return torch.where(keys == 0, scores, scores + gumbel(keys, scores.shape[1]))


def key(state: RequestState) -> int:
    """A 32-bit key of a request at a position; 0 if it is greedy. Forked requests have different keys."""
    seed = state.logit_processor_kwargs.get("seed", 0)
    if not seed:
        return 0
    child = state.request_id.partition("__child#")[2]
    digest = hashlib.blake2b(f"{seed} {state.position_offset} {child}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, fp32 `[B, count]`, from int32 keys `[B, 1]`, by MurmurHash3's finalizer of token and
    key."""
    bits = torch.arange(count, dtype=torch.int32, device=keys.device) * -1640531535 + keys
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * -2048144789
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * -1028477387
    bits = bits ^ (bits >> 16 & 0xFFFF)
    share = ((bits >> 8 & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log1p(-share))
