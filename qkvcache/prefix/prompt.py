"""What a prompt's token ids say, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
MEDIA = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


def rows(ids: Ids) -> list[Tensor]:
    """Token ids `[T]` or `[B, T]` as rows, int64 `[T]` in host memory. Raises TypeError or ValueError for anything else."""
    try:
        given = torch.as_tensor(ids).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"token ids must be a list of integers or a tensor, got {type(ids).__name__}: {error}") from error
    if given.ndim not in (1, 2) or not given.numel():
        raise ValueError(f"token ids must be [T] or [B, T] with at least one token, got {list(given.shape)}")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got {given.dtype}")
    if given.min() < 0 or given.max() >= 2**31:
        raise ValueError(f"token ids must be from 0 to 2**31 - 1, got {int(given.min())} to {int(given.max())}")
    return list(given.long().view(-1, given.shape[-1]))


def text_tokens(row: Tensor, config: PreTrainedConfig) -> int:
    """Tokens before the first that stands for an image, a video or a sound: what it shows is not among the ids."""
    media = sorted({getattr(config, name, None) for name in MEDIA} - {None})
    hits = torch.isin(row, torch.tensor(media, dtype=torch.int64)).nonzero() if media else ()
    return int(hits[0]) if len(hits) else len(row)


def fillers(config: PreTrainedConfig) -> set[int]:
    """Tokens that rows of a batch are padded with."""
    text = config.get_text_config(decoder=True)
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    return {text.pad_token_id, *ends} - {None}
