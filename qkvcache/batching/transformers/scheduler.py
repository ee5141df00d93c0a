"""The order of waiting requests: clients take turns, and requests whose stored pages are on their way wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from .cache import CompressedPagedCache
from .request import Request


def client_of(state: RequestState) -> str | None:
    asked = getattr(state, "asked", None)
    return None if asked is None else asked.client


def running_by_client(active: dict[str, RequestState]) -> Counter[str | None]:
    return Counter(map(client_of, active.values()))


class FairScheduling:
    """A mixin for schedulers: clients take turns, requests know how many of their tokens were cached, and cancelled requests are dropped
    completely."""

    forget: Callable[[str], None]
    cache: CompressedPagedCache
    active_requests: dict[str, RequestState]

    def add_waiting_request(self, state: Request) -> None:
        super().add_waiting_request(state)  # type: ignore[misc]
        self.cache.expect(state)

    def _get_waiting_candidates(self) -> list[RequestState]:
        """The waiting requests whose stored pages have been fetched. They are sorted by how many requests of the
        same client run or wait before them, fewest first."""
        states = super()._get_waiting_candidates()  # type: ignore[misc]
        if len(states) > 1:
            held, ranked = running_by_client(self.active_requests), []
            for state in states:
                ranked.append((held[client_of(state)], state))
                held[client_of(state)] += 1
            states = [state for _, state in sorted(ranked, key=itemgetter(0))]
        if not (rings := self.cache.store.rings).read:  # each running request keeps its ring
            states = states[: max(rings.count - len(self.active_requests), 0)]
        if self.cache.sessions is None:
            return states
        fetched = self.cache.sessions.fetched([state.request_id for state in states])
        return [state for state in states if state.request_id in fetched]

    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        tokens = super()._infer_request_tokens(state, *args)  # type: ignore[misc]
        if isinstance(state, Request) and state.cached_tokens is None:
            state.cached_tokens = state.position_offset
            if state.asked is not None:
                state.asked.cached_tokens = state.position_offset
            self.cache.counters.prompt_tokens += len(state.initial_tokens)
            self.cache.counters.cached_tokens += state.position_offset
        return tokens

    def clear_cancelled_requests(self) -> list[RequestState]:
        states = super().clear_cancelled_requests()  # type: ignore[misc]
        for state in states:
            state.status = RequestStatus.FINISHED  # ignores the result of a step that still runs
            self.forget(state.request_id)
        return states
