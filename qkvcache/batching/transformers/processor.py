"""Steps, one after another: which requests run, and what becomes of one that has no room."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.requests import RequestStatus

from ..reproducible import FixedRows
from .cache import CompressedPagedCache
from .inputs import BatchInputs
from .sampling import Sampling
from .scheduler import client_of, running_by_client

TURN = 0.5
"""Seconds for which a client may run two requests more than one that waits, until one of them gives way."""


class CompressedProcessor(ContinuousBatchProcessor):
    """A processor that fails a request that outgrows the pool and continues with the others. It stops if a layer does not attend
    to its pages."""

    cache: CompressedPagedCache
    _unequal: float | None = None
    """Since when a client waits that runs fewer requests than another."""
    NO_ROOM = "No requests can be scheduled and no requests can be offloaded."
    """transformers' error for a request that does not fit into an empty pool."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        made = self.inputs_and_outputs
        pairs: list[Any] = made.io_pairs if isinstance(made, ContinuousBatchingAsyncIOs) else []
        every: list[Any] = [io for pair in pairs for io in (pair.host_io, pair.device_io)] or [made]
        for inputs in every:
            inputs.__class__, inputs.logit_processor = BatchInputs, self.logit_processor  # transformers makes them
        self.cache.stream = made.compute_stream
        if isinstance(self.logit_processor, Sampling):
            self.do_sample = self.model_runner.do_sample = False  # the logits processors draw the tokens

    def _give_way(self) -> None:
        """Lets the newest request of the client that runs the most wait, if another client waits and runs at least two fewer. It goes on
        from its pages, or from its tokens."""
        scheduler, now = self.scheduler, time.monotonic()
        held = running_by_client(scheduler.active_requests)
        ((most, count),) = held.most_common(1) or [(None, 0)]
        if count < 2 + min(held[client_of(state)] for state in scheduler.waiting_requests.values()):
            self._unequal = None
            return
        self._unequal = self._unequal or now
        if now - self._unequal < TURN:
            return
        self._unequal, scheduler.block_new_requests = now, False
        state: Any = next(state for state in reversed(scheduler.active_requests.values()) if client_of(state) == most)
        again = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED  # as for preempted requests: ignores the result of a step that still runs
        self.cache.counters.preemptions += 1
        scheduler.finish_request(state.request_id)
        scheduler.add_waiting_request(again)

    def prepare_next_batch(self) -> bool:
        self.cache.release()
        if self.scheduler.waiting_requests:
            self._give_way()
        else:
            self._unequal = None
        while True:
            try:
                return super().prepare_next_batch()
            except RuntimeError as error:
                if str(error) != self.NO_ROOM or not self.scheduler.starved_requests:
                    raise
                state, tokens = self.scheduler.starved_requests[0]
                if (too_large := self.cache.too_large(state.request_id, state.current_len() + tokens)) is None:
                    raise
                self._handle_request_error(too_large, state)
                self.scheduler.finish_request(state.request_id)
                self.scheduler.block_new_requests = False

    def _generation_step(self, model: torch.nn.Module) -> None:
        with nullcontext() if self.cache.store.rings.read else FixedRows(model.device.type == "cpu"):
            super()._generation_step(model)
        if layers := self.cache.store.unwritten:
            raise NotImplementedError(
                f"{type(model).__name__}: layers {sorted(layers)} stored nothing in compressed pages, and would forget all tokens: their "
                "attention does not go through transformers' attention interface; leave `continuous_batching`, and call generate"
            )
