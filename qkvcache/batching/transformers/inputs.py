"""The inputs of a step, planned for all requests of a batch at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState

from .cache import CompressedPagedCache


class BatchInputs(ContinuousBatchingIOs):
    """Inputs of a forward pass, planned for all requests of a batch at once."""

    cache: CompressedPagedCache
    logit_processor: ContinuousBatchingLogitsProcessorList

    def _get_graph_key(self) -> tuple[int, ...]:
        return (*super()._get_graph_key(), *self.cache.store.kind, *getattr(self.logit_processor, "needed", ()))

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        """The arguments of the model as in transformers, without those that compressed pages do not read: compiled layers
        would check them in each call."""
        unread = ("write_index", "read_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q")
        return {name: x for name, x in super().get_model_kwargs(use_padding).items() if name not in unread}

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[FutureRequestState],
        logits_processors: ContinuousBatchingLogitsProcessorList,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Prepares a batch as transformers does, but without the indices of tokens to read, which would cost clearing
        `max_kv_read` entries and copying one for each token of the pool."""
        names = [future.state.request_id for future in requests_in_batch]
        past = [future.state.position_offset for future in requests_in_batch]
        super().prepare_batch_tensors(requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, 0, use_padding)
        store, allocators = self.cache.store, self.cache.allocators
        blocks = [[held.block_table[name] for name in names] for held in allocators]
        store.prepare(names, blocks, past, [future.query_length for future in requests_in_batch])
        if self.use_block_table:
            for group, table in zip(store.groups, self.block_table, strict=True):
                rows = torch.from_numpy(group.batch.table()[:, : table.shape[1]])
                table[: rows.shape[0], : rows.shape[1]].copy_(rows, non_blocking=True)
