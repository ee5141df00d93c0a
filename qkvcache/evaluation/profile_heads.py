"""`profile_heads`: measures once, for `HeadProfile`, how much of a context each head of a model needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..evict.compress import ReadingLayer, read_twice
from ..evict.policies import Budget, HeadProfile, KVzip, check_count
from .calibrate import windows_of
from .provenance import provenance

QUANTILES = 128
"""The number of scores of a head in a profile."""


def profile_heads(
    model: PreTrainedModel,
    text: PreTrainedTokenizerBase | Tensor | Sequence[int],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    context: int = 2048,
    windows: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HeadProfile:
    """Measures which heads look up tokens of the context: the model reads windows of a text and then repeats them, and
    the score of a token in a head is the attention that it receives from the repetition (`KVzip`). Heads whose
    tokens score high need much of a context.

        profile = profile_heads(model, tokenizer)
        profile.save("llama.heads.json")
        cache = CompressedCache(model.config, policy=policies.SnapKV(budget=profile.budget(0.25)))

    Args:
        text: token ids `[T]`, or the tokenizer, which then reads the language reference of Python (`demo.text`).
        tokenizer: asks the model for the repetition; by default the tokenizer given as `text`, if any.
        context: tokens of a window.
        windows: pieces of the text, evenly spaced.
        progress: a function that is called with the number of finished windows and the number of all windows.

    Raises:
        ValueError: a text that is too short, a model without full attention.
        TypeError: a `text` of another type, a size that is not a number.
        NotImplementedError: an encoder-decoder, and models whose attention does not go through transformers' AttentionInterface.
    """
    check_count("context", context, 16)
    check_count("windows", windows, 1)
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{model.config.model_type} is an encoder-decoder: its cross attention is not compressed")
    if tokenizer is None and isinstance(text, PreTrainedTokenizerBase):
        tokenizer = text
    reading, found = KVzip(budget=Budget(share=1.0)), list[list[Tensor]]()
    for number, ids in enumerate(windows_of(text, windows, context).to(model.device).split(1), 1):
        dense, _ = read_twice(model, reading, ids, torch.ones_like(ids), tokenizer, progress=False)
        layers = [layer for layer in dense.layers if isinstance(layer, ReadingLayer)]
        if not layers:
            raise ValueError(f"no layer of {model.config.model_type} has full attention: there is nothing to profile")
        if any(layer.scores is None for layer in layers):
            raise NotImplementedError(
                f"profile_heads on {model.config.model_type}: its attention does not go through transformers' AttentionInterface"
            )
        found.append([layer.scores[0, :, reading.num_sink_tokens :].cpu() for layer in layers])  # type: ignore[index]
        progress(number, windows)
    ranks = (torch.arange(QUANTILES, dtype=torch.float32, device="cpu") + 0.5) / QUANTILES
    quantiles = tuple(
        tuple(tuple(torch.cat(windows_of_head).quantile(1 - ranks).tolist()) for windows_of_head in zip(*windows_of_layer, strict=True))
        for windows_of_layer in zip(*found, strict=True)
    )
    about: dict[str, object] = {"model_type": model.config.model_type, "dtype": str(model.dtype).removeprefix("torch.")}
    return HeadProfile(quantiles, about | {"context": context, "windows": windows} | provenance())
