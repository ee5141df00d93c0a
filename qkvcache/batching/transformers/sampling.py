"""The logits processors of requests that have a temperature, top_p, seed or grammar of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from ..grammars import Grammar, masked
from ..sampling import GREEDY, gumbel, key


class Sampling(ContinuousBatchingLogitsProcessorList):
    """The logits processors of a manager whose requests have sampling options of their own; `config` has the defaults.

    A batch leaves out what none of its requests needs: sorting vocabularies for top_p takes long.
    """

    def __init__(self, config: GenerationConfig, vocab_size: int):
        super().__init__(LogitsProcessorList())
        self.vocab_size = vocab_size
        self.supported_keys = {"temperature": float, "top_p": float, "seed": int}
        self.default, self.tensors_required, self.do_processing = config, len(self.supported_keys), True
        self._top_k = TopKLogitsWarper(config.top_k) if config.top_k else None
        self._top_p = ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(1.0))
        self.masks: Tensor | None = None
        """The tokens that the latest batch may have, if a request has a grammar: int32 `[B, vocabulary / 32]`."""
        self.needed = [False] * self.tensors_required
        """Whether the latest batch needs temperatures, top_p, and noise."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.view(torch.float32).copy_(torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float32, device="cpu"))

    def prepare_tensor_args(self, requests_in_batch: list[FutureRequestState], arg_storage: Tensor) -> Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        options = [GREEDY | state.logit_processor_kwargs for state in states]
        self._mask([getattr(state, "grammar", None) for state in states])
        self.needed = [any(given[name] != GREEDY[name] for given in options) for name in self.supported_keys]
        if any(self.needed):
            children = [state.request_id.partition("__child#")[2] for state in states]
            keys = [key(given["seed"], state.position_offset, child) for given, state, child in zip(options, states, children, strict=True)]
            given = [[given[name] for given in options] for name in ("temperature", "top_p")]
            real = torch.tensor(given, dtype=torch.float32, device="cpu").view(torch.int32)
            arg_storage[:, : len(states)] = torch.stack([*real, torch.tensor(keys, dtype=torch.int32, device="cpu")])
        return arg_storage

    def _mask(self, grammars: list[Grammar | None]) -> None:
        self.masks = None
        if any(grammars):
            masks = torch.full((len(grammars), -(-self.vocab_size // 32)), -1, dtype=torch.int32, device="cpu")
            for row, grammar in zip(masks, grammars, strict=True):
                if grammar is not None:
                    grammar.mask(row)
            self.masks = masks

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        if self.masks is not None:  # only where steps are not captured and follow each other (`add_request`)
            scores = torch.cat([masked(scores[: len(self.masks)], self.masks.to(scores.device)), scores[len(self.masks) :]])
        temperature, top_p, keys = logits_processor_args[:, : len(scores)]
        if self.needed[0]:
            scores = scores / temperature.view(torch.float32)[:, None]
        if self._top_k is not None and self.needed[2]:
            scores = self._top_k(None, scores)
        if self.needed[1]:
            scores = self._top_p(scores, top_p)
        if self.needed[2]:  # forked requests have different noise
            scores = torch.where(keys[:, None] == 0, scores, scores + gumbel(keys[:, None], scores.shape[1]))
        return scores
