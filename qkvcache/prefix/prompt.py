"""Token ids of prompts: checks, and the tokens that a store may use.

They are examined with numpy: on many cores, torch starts a team of threads for as few as 32,768 ids, which takes longer
than a fetch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.cache_utils import Cache

from ..releases import passing
from .media import DIGEST, digested, placeholders, remaining, unbroken

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
Inputs = Ids | Mapping[str, Any]
"""Token ids, or what a processor returns: ids and, for one row, the content of images, videos and sounds."""
STEPS_MATTER = frozenset(("cpmant", "jamba", "moshi", "paligemma", "prophetnet", "recurrent_gemma", "zamba"))
"""Model types of transformers whose answers depend on the steps in which a prompt is read, so that none may go on from a stored
one: some start recurrent states anew in each step of several tokens, and tokens of others attend to later ones."""


def rows(ids: Inputs, config: PreTrainedConfig) -> list[Tensor]:
    """Token ids `[T]` or `[B, T]` as rows, int64 `[T]` each, in host memory; in that of inputs with images, videos or sounds, digests stand
    for them (`media.py`). Raises TypeError or ValueError for anything else."""
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise ValueError(f"inputs must have input_ids, got {', '.join(ids) or 'nothing'}")
        found = rows(ids["input_ids"], config)
        return found if len(found) > 1 else [digested(found[0], ids, config)]
    try:
        all_ids = torch.as_tensor(ids, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"token ids must be a list of integers or a tensor, got {type(ids).__name__}: {error}") from error
    if all_ids.ndim not in (1, 2) or not all_ids.numel():
        raise ValueError(f"token ids must be [T] or [B, T] with at least one token, got {list(all_ids.shape)}")
    if all_ids.is_floating_point() or all_ids.is_complex() or all_ids.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got {all_ids.dtype}")
    least, most = int(all_ids.numpy().min()), int(all_ids.numpy().max())
    if least < 0 or most >= 2**31:
        raise ValueError(f"token ids must be from 0 to 2**31 - 1, got {least} to {most}")
    return list(all_ids.long().view(-1, all_ids.shape[-1]))


def text_tokens(row: Tensor, config: PreTrainedConfig) -> int:
    """The number of tokens before the first placeholder of an image, a video or a sound, whose content the ids do not
    show."""
    hits = numpy.isin(row.numpy(), sorted(placeholders(config)))
    return int(hits.argmax()) if hits.any() else len(row)


@torch.no_grad()
def compute(model: Any, words: Tensor, inputs: Inputs, count: int, cache: Cache, interval: int) -> Iterator[int]:
    """Runs the model on the tokens of `words` `[T]`, the beginning of a row of `inputs`, that `cache`, of `count` rows, has not seen, up to
    each multiple of `interval` (0: all at once), and yields the number of tokens seen after each step."""
    seen, taken = cache.get_seq_length(), inspect.signature(model.forward).parameters
    ids, given = words.expand(count, -1).to(model.device), inputs if isinstance(inputs, Mapping) and bool((words >= DIGEST).any()) else None
    step = GenerationConfig(max_new_tokens=1, do_sample=False, disable_compile=True, pad_token_id=0)
    while seen < len(words):
        end = min((seen // interval + 1) * interval, len(words)) if interval else len(words)
        if given is not None:
            end = unbroken(words, end, 1)
            model.generate(**remaining(model, given, cache, end), **passing(cache), generation_config=step)
        else:
            positions = torch.arange(seen, end, device=ids.device)[None]  # some models count from 0 by default
            options = {"logits_to_keep": 1, "position_ids": positions.expand(len(ids), -1)}
            known = {name: x for name, x in options.items() if name in taken}
            model(input_ids=ids[:, seen:end], **passing(cache), use_cache=True, **known)
        seen = end
        yield seen


def unpadded(row: Tensor, config: PreTrainedConfig) -> int:
    """The number of tokens up to the last one that is not padding."""
    text = row.numpy() != _padding(config)
    return len(row) - int(text[::-1].argmax()) if text.any() else 0


def rotated_alike(config: PreTrainedConfig) -> float:
    """The most tokens of a text whose keys do not depend on its length: longer ones are rotated by other frequencies, from the first on."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    known = [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]  # some have one for each kind of layer
    lengths = [one.get("original_max_position_embeddings") or text.max_position_embeddings for one in known if _depends_on_length(one)]
    return min(lengths, default=math.inf)


def _depends_on_length(rope: dict[str, Any]) -> bool:
    kind = rope.get("rope_type", "default")
    return "dynamic" in kind or kind == "longrope"


def refusal(row: Tensor, config: PreTrainedConfig, least: int, padded: bool = False, seen: int = 0) -> str | None:
    """The reason why a row is not stored, or None. `padded`: whether the row is part of a batch. `seen`: tokens of the cache, which may
    have read more than the row."""
    text = config.get_text_config(decoder=True)
    end = getattr(text, "eos_token_id", None)  # some configs lack special tokens
    ends = end if isinstance(end, list) else [end]
    if len(row) < least:
        return "fewer tokens than min_match_tokens"
    if kinds := {config.model_type, text.model_type} & STEPS_MATTER:
        return f"{kinds.pop()}, whose answers depend on the steps in which a prompt is read"
    if max(len(row), seen) > (alike := rotated_alike(config)):
        return f"more than {alike} tokens, from which on the model rotates all keys by other frequencies"
    if not placeholders(config) and any(name.startswith(("vision_", "audio_")) for name in config.sub_configs):
        return "a model of images or sounds whose config names no placeholder for them"
    if text_tokens(row, config) < len(row):
        return "images, videos or sounds among the tokens, which ids do not tell apart"
    first = int(row[0])
    if first in (_padding(config), *ends) and (padded or first != getattr(text, "bos_token_id", None) or int(row[1:2]) == first):
        return "a padded row, whose tokens stand at other positions than alone"
    return None


def _padding(config: PreTrainedConfig) -> int:
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return -1 if padding is None else padding
