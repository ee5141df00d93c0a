"""Attention of a batch of requests over compressed pages: the attention implementation `qkvcache_pages`.

The tokens of a step attend to each other exactly, and to the past as stored:

    prompts                     torch's attention on exact keys and values, of all prompts in one call
    chunks with a past          the same, once the pasts have been dequantized, in one launch, before the new tokens; a past that does not
                                fit into the scratch in pieces, whose outputs are merged (`kernels/attend/chunked.py`)
    rows with one new token     the fused kernel over the first tokens, pages and ring

Chunks attend before the new tokens are written, while the ring still holds their past; rows with one token attend afterwards. Where
answers are to be reproducible, all tokens are chunks that attend to what is written (`reproducible.py`).
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..attention.masks import HARMLESS
from ..kernels import PagedInputs, Pair, attend_pages, plan_pages
from ..kernels.attend.chunked import attend_chunked_pages, supports_queries
from ..storage.ring import in_order
from .gather import gather_rows
from .reproducible import attend_by_page
from .step import PromptChunks, Rows
from .store import PageStore
from .varlen import varlen_attention

NAME = "qkvcache_pages"
IGNORED = HARMLESS.union(("is_causal", "sliding_window", "logits_indices", "logits_processor_args"))
"""Keywords that change nothing here: they are about the model's head, or the layout of pages has them."""


class NewKV:
    """The new keys or values `[1, H, T, D]` of a layer, which the cache passes to attention, and attention stores in pages.

    A plain object: a model that changes its keys or values after `update` is refused, since pages hold them as they were passed.

    place: the pages, and the index of the layer. In a tuple, torch.compile does not read the index, and layers share compiled code.
    """

    __slots__ = ("place", "tensor")

    def __init__(self, place: tuple[PageStore, int], tensor: Tensor):
        self.place, self.tensor = place, tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise changed(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise changed(getattr(func, "__name__", "?"))


def changed(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"attention code of the model calls {what!r} on keys or values after it passed them to the cache, and pages hold "
        "them as they were: leave `continuous_batching`, and call generate"
    )


@torch.compiler.disable
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: NewKV,
    value: NewKV,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the queries `[1, Hq, T, D]` of a batch; keys and values `[1, H, T, D]`. Returns `[1, T, Hq, D]`.

    Raises RuntimeError for a forward pass that does not come from continuous batching, and NotImplementedError for other keywords.
    """
    if not isinstance(key, NewKV):
        raise RuntimeError(
            "the model serves requests from compressed pages: call it after the manager has stopped, or leave `continuous_batching` before"
        )
    if names := sorted(name for name in kwargs.keys() - IGNORED if kwargs[name] is not None):
        raise NotImplementedError(
            f"{type(module).__name__} calls attention with {', '.join(names)}, which attention over pages does not know"
        )
    (store, layer), new = key.place, (key.tensor, value.tensor)
    step = store.step_of(layer, block_table, query.shape[2])
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    if step.rows is not None and step.rows.at is None:
        store.write(layer, step.writes, new)
        return attend_rows(store, layer, step.rows, query, options).transpose(1, 2).contiguous(), None
    out = query.new_empty(1, query.shape[2], *query.shape[1::2])
    if step.tokens < query.shape[2]:
        out[:, step.tokens :] = 0
    if not store.rings.read:
        exact = [own_pages(store, layer, chunks, new) for chunks in step.chunks]  # rings are written next
        store.calibrate(layer, new)
        store.write(layer, step.writes, new)
        for chunks, own in zip(step.chunks, exact, strict=True):
            now = slice(chunks.begin, chunks.end)
            out[:, now] = attend_codes(store, layer, chunks, query[:, :, now], own, options)
        return out, None
    for chunks in step.chunks:
        now = slice(chunks.begin, chunks.end)
        part = new[0][:, :, now], new[1][:, :, now]
        out[:, now] = attend_chunks(store, layer, chunks, query[:, :, now], part, options)
    store.calibrate(layer, new)
    store.write(layer, step.writes, new)
    if step.rows is not None:
        at = step.rows.at
        out[:, at] = attend_rows(store, layer, step.rows, query[:, :, at], options).transpose(1, 2)
    return out, None


def attend_rows(store: PageStore, layer: int, rows: Rows, query: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention `[1, Hq, B, D]` of rows with one query each, `[1, Hq, B, D]`; `options`: see `varlen_attention`."""
    scaling, softcap, sinks = options["scaling"], options["softcap"], options["s_aux"]
    query, inputs, key = query.permute(2, 1, 0, 3), store.inputs(layer, rows), (scaling, softcap, sinks is None)
    plan = rows.plans.get(key)
    if plan is None or not plan.fits(query, inputs):
        plan = rows.plans[key] = plan_pages(query, inputs, scaling=scaling, softcap=softcap, sinks=sinks)
    if plan is None:
        out = attend_pages(query, inputs, scaling=scaling, softcap=softcap, sinks=sinks)[0]
    else:
        out = plan.run(query, inputs, sinks)[0]
    return out.permute(2, 1, 0, 3)


def attend_chunks(store: PageStore, layer: int, chunks: PromptChunks, query: Tensor, new: Pair, options: dict[str, Any]) -> Tensor:
    """Attention `[1, T, Hq, D]` of prompts, or of parts of them, `[1, Hq, T, D]`; `options`: see `varlen_attention`."""
    window = store.group_of[layer].layout.window
    if chunks.past is None:
        return varlen_attention(query, *new, chunks.sequences, window=window, **options)
    inputs = store.inputs(layer, chunks.past)
    plain = options["softcap"] is None and options["s_aux"] is None and window is None
    if not chunks.fits and plain and supports_queries(query, new[1].shape[3]):
        _, first, row, begin, start, count, quantized, _ = chunks.columns[0].tolist()
        sinks = tuple(x[first : first + 1, :, :begin] for x in inputs.sinks)
        recent = tuple(torch.cat([in_order(ring[row : row + 1], start, count), x], dim=2) for ring, x in zip(inputs.ring, new, strict=True))
        scaling = options["scaling"]
        out, _ = attend_chunked_pages(query, inputs.pages, begin, quantized, sinks, recent, scaling=scaling)  # type: ignore[arg-type]
        return out.transpose(1, 2)
    key, value = gathered(inputs, chunks, new, chunks.sequences.starts)
    return varlen_attention(query, key, value, chunks.sequences, window=window, **options)


def own_pages(store: PageStore, layer: int, chunks: PromptChunks, new: Pair) -> list[Pair]:
    """The exact tokens of each request from the page of its first new token on, `[1, H, T, D]` each: a ring has one page."""
    counts, starts = chunks.sequences.queries, [0, *accumulate(chunks.sequences.queries)]
    kept = list(zip(chunks.batch.ring.tolist(), (chunks.batch.past % store.rings.slots).tolist(), starts, counts, strict=False))
    sides = zip(store.rings.layer(store.ring_index[layer]), (x[:, :, chunks.begin : chunks.end] for x in new), strict=True)
    keys, values = (
        [torch.cat([ring[row : row + 1, :, :past], x[:, :, at : at + count]], dim=2) for row, past, at, count in kept] for ring, x in sides
    )
    return list(zip(keys, values, strict=True))


def attend_codes(store: PageStore, layer: int, chunks: PromptChunks, query: Tensor, own: list[Pair], options: dict[str, Any]) -> Tensor:
    """`attend_chunks` over the exact tokens of `own_pages` and the codes of the pages before, which are written (`reproducible.py`)."""
    none, starts = tuple(x[:, :, :0] for x in own[0]), chunks.sequences.starts
    inputs = store.inputs(layer, chunks.past)  # type: ignore[arg-type]
    codes = gathered(inputs, chunks, none, (torch.zeros_like(starts[1]), starts[1]))  # type: ignore[arg-type]
    return attend_by_page(query, codes, own, chunks.sequences, store.rings.slots, **options)


def gathered(inputs: PagedInputs, chunks: PromptChunks, new: Pair, starts: tuple[Tensor, Tensor]) -> Pair:
    """Keys and values `[1, H, T, D]` of all tokens of chunks, in the model's dtype: those in pages, and `new` ones after them."""
    key, value = (x.new_empty(1, x.shape[1], chunks.tokens, x.shape[3]) for x in new)
    gather_rows(inputs, new, starts, chunks.past.tiles, (key, value))  # type: ignore[union-attr, arg-type]
    return key, value
