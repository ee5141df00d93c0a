"""The number of requests, of a mix of lengths, that run together in continuous batching, with pages and rings as
`qkvcache.batching` allocates them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from ..formats import Format, FormatByLayer
from ..formats.base import check_count
from .model import Shape, text_config

PAGE_SIZE = 256
"""transformers' default, in tokens."""
MEMORY_SHARE = 0.9
"""transformers' default of `max_memory_percent` on a GPU."""
MOST_REQUESTS = 1024
"""transformers' default of `max_requests_per_batch`."""

Mix = Sequence[tuple[float, int, int]]
"""Kinds of requests, each with a weight, the tokens of the prompt and the tokens of the answer."""


@dataclass(frozen=True)
class BatchingPlan:
    """The pool of pages beside the weights, and the requests of a mix that fit into it, each at its full length.

    mix: kinds of requests as given.
    counts: the number of requests of each kind that fit at once.
    page_size: tokens of a page.
    pages: pages of the pool.
    rings: requests that may have exact last tokens at once (0: transformers' own pages).
    bytes_per_page, bytes_per_ring: over all layers and GPUs.
    """

    mix: tuple[tuple[float, int, int], ...]
    counts: tuple[int, ...]
    page_size: int
    pages: int
    rings: int
    bytes_per_page: int
    bytes_per_ring: int

    @property
    def requests(self) -> int:
        return sum(self.counts)

    @property
    def reason(self) -> str:
        """The plan in words."""
        kinds = ", ".join(f"{count:,} of {prompt:,} + {answer:,}" for count, (_, prompt, answer) in zip(self.counts, self.mix, strict=True))
        words = f"Continuous batching: {self.pages:,} pages of {self.page_size} tokens hold {self.requests:,} requests at once ({kinds})"
        limit = " More would share the memory of exact last tokens." if self.requests == self.rings else ""
        return f"{words}.{limit}"

    def as_json(self) -> dict[str, Any]:
        """Plain values, in bytes, pages and requests."""
        derived = ("requests", "reason")
        return vars(self) | {"mix": [list(kind) for kind in self.mix]} | {name: getattr(self, name) for name in derived}


def plan_batching(
    config: PreTrainedConfig,
    format: Format | FormatByLayer | None,
    kinds: tuple[tuple[float, int, int], ...],
    *,
    free: float,
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    tensor_parallel: int,
    num_sink_tokens: int,
    residual_length: int,
) -> BatchingPlan:
    """The plan for `free` bytes of each GPU beside the weights; `kinds` come from `check_mix`, `shapes` are the layers on one GPU.

    Raises the errors of `plan`."""
    from transformers import ContinuousBatchingConfig

    from ..batching.attention import NAME
    from ..batching.context import check_config, check_format
    from ..batching.transformers.allocator import FullAttentionCacheAllocator
    from ..batching.transformers.pool import PoolSize, page_layout

    check_config(config)
    text = copy.deepcopy(text_config(config))
    shape = shapes[0]
    # transformers' choice on a GPU, with buffers for two steps at once.
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE, max_memory_percent=MEMORY_SHARE, max_requests_per_batch=MOST_REQUESTS, max_blocks_per_request=0,
        use_async_batching=True,
    )  # fmt: skip
    options: dict[str, Any] = {"logits_to_keep": _keeps_logits(config), "kv_tp_size": tensor_parallel, "free": free}
    if format is None:
        text._attn_implementation = "flash_attention_2"  # the fastest for transformers' own pages, without masks
        page = FullAttentionCacheAllocator.get_bytes_per_page(shape.heads, shape.head_dim, dtype, PAGE_SIZE)
        size = PoolSize(text, batching, dtype, page, 0, **options)
    else:
        text._attn_implementation = NAME
        chosen = check_format(format, shape.head_dim)
        layout = page_layout(text, chosen, shape.heads, shape.head_dim, PAGE_SIZE, num_sink_tokens, dtype)
        size = PoolSize(text, batching, dtype, layout.nbytes, layout.ring_bytes(residual_length), **options)
    counts = fitting(kinds, size.sectors, PAGE_SIZE, size.rings or MOST_REQUESTS, size.groups)
    of_all = size.bytes_per_block * tensor_parallel, size.bytes_per_ring * tensor_parallel
    return BatchingPlan(kinds, counts, PAGE_SIZE, size.blocks, size.rings, *of_all)


def check_mix(mix: Mix) -> tuple[tuple[float, int, int], ...]:
    """The mix as tuples. Raises ValueError or TypeError for weights that are not positive and lengths below one token."""
    kinds: tuple[Any, ...] = tuple(map(tuple, mix))
    if not kinds or any(len(kind) != 3 for kind in kinds):
        raise ValueError(f"requests={mix!r}: expected one or more of (weight, prompt tokens, answer tokens), such as [(3, 1000, 200)]")
    for weight, prompt, answer in kinds:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"requests: a weight must be a number, got {weight!r}")
        if not 0 < weight < float("inf"):
            raise ValueError(f"requests: a weight must be above 0 and finite, got {weight!r}")
        check_count("prompt of requests", prompt, 1)
        check_count("answer of requests", answer, 1)
    return kinds


def fitting(
    kinds: tuple[tuple[float, int, int], ...],
    sectors: int,
    page_size: int,
    most: int,
    groups: Sequence[tuple[int, int | None]] = ((1, None),),
) -> tuple[int, ...]:
    """The number of requests of each kind that fit into `sectors`, at most `most` in all, in proportion to their weights. Each next request
    is of the kind that is furthest below its share. `groups`: of each group of layers the blocks in a sector, and the window."""
    total = sum(weight for weight, _, _ in kinds)
    counts, blocks = [0] * len(kinds), [0] * len(groups)
    for turn in range(1, most + 1):
        behind = [turn * weight / total - count for (weight, _, _), count in zip(kinds, counts, strict=True)]
        kind = max(range(len(kinds)), key=behind.__getitem__)
        tokens = kinds[kind][1] + kinds[kind][2]
        blocks = [count + -(-min(tokens, window or tokens) // page_size) for count, (_, window) in zip(blocks, groups, strict=True)]
        if sum(-(-count // each) for count, (each, _) in zip(blocks, groups, strict=True)) > sectors:
            break
        counts[kind] += 1
    return tuple(counts)


def _keeps_logits(config: PreTrainedConfig) -> bool:
    """Whether the model can compute logits of selected tokens only, as `GenerationMixin` requests."""
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
