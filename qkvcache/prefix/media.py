"""Images, videos and sounds of a prompt. In a row of ids, the placeholders of each give way to words of a digest of its content, so that
prompts match where they show the same; and a model that goes on after some of them gets the others alone (`remaining`)."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..files import as_bytes

NAMES = re.compile(r"(image|video|audio|speech|media|visual|vision)(_placeholder|_indicator)?_token_(id|ids|index)")
"""Names of a config's placeholders of images, videos and sounds."""
BY_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs of a model with a column for each token."""
DIGEST = 2**31
"""The least word of a digest; ids of tokens are smaller."""
LEAST = 4
"""Placeholders that hold a digest of 124 bits. What has fewer counts as unknown."""


class Positions:
    """How far an image of the latest prompt has shifted the positions after it, as modules of some models remember."""

    def __init__(self, model: Module):
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]

    def forget(self) -> None:
        """Lets the model compute its positions anew: a cache of the store holds text alone, before any image."""
        for module in self._modules:
            module.rope_deltas = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which they are as before: another conversation may go on."""
        positions = [(module, module.rope_deltas) for module in self._modules]
        try:
            yield
        finally:
            for module, deltas in positions:
                module.rope_deltas = deltas


@dataclass(frozen=True)
class Span:
    """The tokens from `begin` to `end` that stand for one image, video or sound, or for several that cannot be told apart; and its rows of
    each input, `(begin, end)`, or None for all of them."""

    begin: int
    end: int
    rows: dict[str, tuple[int, int] | None]

    def part(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The span's rows of the inputs `given`."""
        return {name: given[name] if rows is None else given[name][slice(*rows)] for name, rows in self.rows.items()}


def placeholders(config: PreTrainedConfig) -> set[int]:
    """The token ids of images, videos and sounds, which the config or one within it names."""
    found = [value for name, value in vars(config).items() if NAMES.fullmatch(name) and value is not None]
    inner = [x for name in config.sub_configs if isinstance(x := getattr(config, name, None), PreTrainedConfig)]
    own = {token for value in found for token in (value if isinstance(value, list | tuple) else [value])}
    return own.union(*map(placeholders, inner))


def contents(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The inputs that images, videos and sounds have. Raises TypeError for one that is no tensor of numbers."""
    try:
        return {name: torch.as_tensor(x) for name, x in inputs.items() if name not in BY_TOKEN and x is not None}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"inputs must be tensors, as a processor returns them with return_tensors='pt': {error}") from error


def spans(row: Tensor, given: Mapping[str, Tensor], config: PreTrainedConfig) -> list[Span]:
    """The images, videos and sounds in ids `[T]`, in order, with their rows of the inputs `given`.

    They are told apart where all are of one kind, each a run of placeholders as long as its rows of the inputs say; else all are one span,
    with the text between them.
    """
    shown = numpy.isin(row.numpy(), sorted(placeholders(config)))
    if not given or not shown.any():
        return []
    edges = numpy.flatnonzero(numpy.diff(shown, prepend=False, append=False)).reshape(-1, 2).tolist()
    lengths = [end - begin for begin, end in edges]
    count, weights = len(edges), [1] * len(edges)
    grid = next((x for name, x in given.items() if name.endswith("grid_thw")), None)
    if grid is not None and len(grid) == count:
        weights = grid.prod(-1).tolist()
    alike = all(length * sum(weights) == weight * sum(lengths) for length, weight in zip(lengths, weights, strict=True))
    sizes = {name: x.shape[0] if x.ndim else 0 for name, x in given.items()}
    if count == 1 or len(set(row[shown].tolist())) > 1 or not alike or not {*sizes.values()} <= {count, sum(weights)}:
        return [Span(edges[0][0], edges[-1][1], dict.fromkeys(given))]
    ends = numpy.cumsum(weights).tolist()
    return [
        Span(edge[0], edge[1], {name: (i, i + 1) if size == count else (ends[i] - weights[i], ends[i]) for name, size in sizes.items()})
        for i, edge in enumerate(edges)
    ]


def digested(row: Tensor, inputs: Mapping[str, Any], config: PreTrainedConfig) -> Tensor:
    """A row of ids `[T]` whose spans are words of digests, up to the first that is too short for one."""
    given, words = contents(inputs), row.clone()
    for span in spans(row, given, config):
        if span.end - span.begin < LEAST:
            break
        digest = hashlib.blake2b(as_bytes(row[span.begin : span.end]).data)
        for name, x in sorted(span.part(given).items()):
            digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
            digest.update(as_bytes(x.cpu().contiguous()).data)
        drawn = hashlib.shake_256(digest.digest()).digest(4 * (span.end - span.begin))
        words[span.begin : span.end] = torch.from_numpy(numpy.frombuffer(drawn, "<u4").astype("int64") % DIGEST) + DIGEST
    return words


def unbroken(words: Tensor, tokens: int, step: int = -1) -> int:
    """`tokens`, or the number of words before the span within which they end; with `step=1`, after it."""
    while 0 < tokens < len(words) and bool((words[tokens - 1 : tokens + 1] >= DIGEST).all()):
        tokens += step
    return tokens


def remaining(model: Any, inputs: Mapping[str, Any], past: Cache, tokens: int | None = None) -> dict[str, Any]:
    """The keywords with which `generate` goes on from `past`: `inputs` without the images, videos and sounds that `past` holds, and
    with the positions of all tokens.

        model.generate(**remaining(model, inputs, past), cache=past)

    Args:
        model: a model of images, videos or sounds.
        inputs: the whole prompt, of one row, as a processor returns it with `return_tensors="pt"`.
        past: a cache of the beginning of the prompt. It may end within no image.
        tokens: where the prompt is cut; None: not.

    Raises TypeError for inputs that are no tensors, ValueError for several rows and for a cache that ends within an image.
    """
    ids = torch.as_tensor(inputs["input_ids"])
    given, seen, end = contents(inputs), past.get_seq_length(), ids.shape[-1] if tokens is None else tokens
    if given and ids.dim() > 1 and len(ids) > 1:
        raise ValueError(f"inputs of {len(ids)} rows with {', '.join(given)}: pass one row")
    all_spans = spans(ids.detach().cpu().view(-1), given, model.config)
    if any(span.begin < at < span.end for span in all_spans for at in (seen, end)):
        raise ValueError(f"the cache holds {seen} of {end} tokens and ends within an image: crop it to the tokens before")
    found = {name: x[..., :end] for name, x in inputs.items() if name in BY_TOKEN and x is not None}
    found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))

    def between(begin: int) -> dict[str, Tensor]:
        left = [span.part(given) for span in all_spans if begin <= span.begin and span.end <= end]
        return {name: torch.cat([part[name] for part in left]) if len(left) > 1 else left[0][name] for name in given} if left else {}

    if not all_spans:
        return found | given
    if "position_ids" not in found and "position_ids" in inspect.signature(model.forward).parameters:
        with torch.no_grad():
            found["position_ids"] = model._prepare_position_ids_for_generation(found["input_ids"], found | between(0))
    return found | between(seen)
