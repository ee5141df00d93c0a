"""A request: what it brings beside its prompt, and the end of its answer."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus

from ..grammars import Grammar
from ..requests import Asked, StopStrings


class Request(RequestState):
    """A request that can end at strings and knows how many tokens of its prompt were already in pages."""

    stop: StopStrings | None = None
    salt = b""
    session: str | None = None
    asked: Asked | None = None
    grammar: Grammar | None = None
    cached_tokens: int | None = None
    """The number of cached tokens of its prompt; None until the prompt is read."""

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        if self.asked is not None and not self.asked.first_token:
            self.asked.first_token = time.perf_counter()
        done = super().update_and_check_completion(token_id, logprob)
        if not done and self.grammar is not None and self.grammar.ends_with(token_id):
            self.status = RequestStatus.FINISHED
            return True
        if done or self.stop is None:
            return done
        # A preempted request has its first generated tokens at the end of its prompt.
        before = self.initial_tokens[self._true_initial_tokens :] if self._true_initial_tokens else []
        if not self.stop.end(chain(reversed(self.generated_tokens), reversed(before))):
            return False
        self.status = RequestStatus.FINISHED
        return True

    def to_generation_output(self) -> GenerationOutput:
        output: Any = super().to_generation_output()
        output.cached_tokens = self.cached_tokens or 0
        return output

    def create_equivalent_initial_request(self) -> Request:
        state: Any = super().create_equivalent_initial_request()
        state.__class__ = Request
        for name in ("stop", "salt", "session", "asked", "grammar", "cached_tokens"):
            setattr(state, name, getattr(self, name))
        return state
