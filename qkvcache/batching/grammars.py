"""Answers that follow a JSON schema: the tokens that may come next, by llguidance."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000, "verbose_errors": False}
"""Work of llguidance: 20 ms for a schema, some milliseconds for a token. A schema or an answer that takes more fails."""


class Grammar:
    """The grammar of one answer, and how far the answer is."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def copy(self) -> Grammar:
        """The grammar of another answer, which is as far."""
        return Grammar(self._matcher.deep_copy())

    def mask(self, row: Tensor) -> None:
        """Writes the tokens that may come next into a row on the CPU, int32 `[vocabulary / 32]`, a bit for each token."""
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def ends_with(self, token: int) -> bool:
        """Takes the next token of the answer. Returns whether the answer is complete, or cannot go on."""
        self._matcher.consume_token(token)
        return self._matcher.is_error() or self._matcher.is_stopped()


class Grammars:
    """Makes the grammars of a model's answers. Raises ImportError without llguidance, ValueError for a slow tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ImportError("structured outputs need llguidance: pip install 'qkvcache[structured]'") from error
        self._matcher, self._limits = LLMatcher, LLParserLimits(**LIMITS)
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size)  # type: ignore[arg-type]

    def of(self, schema: dict) -> Grammar:
        """The grammar of a JSON schema, whose answers have no white space but after commas and colons. Raises ValueError for a schema that
        llguidance does not take."""
        text = self._matcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
        matcher = self._matcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(f"the schema of response_format is not supported: {matcher.get_error():.300}")
        return Grammar(matcher)


def masked(scores: Tensor, masks: Tensor) -> Tensor:
    """Scores `[B, vocabulary]` of which those without a bit in `masks`, int32 `[B, vocabulary / 32]`, are -inf."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks[:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]]
    return scores.masked_fill(allowed == 0, float("-inf"))
