"""What a store refuses when it is made."""

from __future__ import annotations

from os import PathLike

from torch.nn import Module
from transformers import PreTrainedConfig

from ..policies import check_count


def check_store(model: object, options: dict, *, dense: object, tokenizer: object, identity: object, directory: object) -> None:
    """Raises TypeError, ValueError or NotImplementedError, with the name of the argument."""
    if not isinstance(getattr(model, "config", None), PreTrainedConfig) or not isinstance(model, Module):  # peft wraps models
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if model.config.is_encoder_decoder:  # type: ignore[union-attr]
        name = model.config.model_type  # type: ignore[union-attr]
        raise NotImplementedError(f"{name} is an encoder-decoder model: its cache depends on more than a prefix")
    if not isinstance(dense, bool):
        raise TypeError(f"dense must be True or False, got {dense!r}")
    if not isinstance(identity, str):
        raise TypeError(f"identity must be a string, got {identity!r}")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise TypeError(f"tokenizer must be a transformers tokenizer, got {tokenizer!r}")
    if directory is not None and not isinstance(directory, str | PathLike):
        raise TypeError(f"directory must be a path, got {directory!r}")
    if options.get("max_length") is not None:
        raise ValueError(f"max_length={options['max_length']}: what a store hands out grows; leave it out")
    if dense and options.get("policy") is not None:
        raise ValueError("dense=True with a policy: what evicts has no dense form; leave one of them out")


def check_sizes(max_bytes: int, max_disk_bytes: int, min_quantize_tokens: int, min_match_tokens: int) -> None:
    """Raises TypeError or ValueError."""
    check_count("max_bytes", max_bytes, of="bytes")
    check_count("max_disk_bytes", max_disk_bytes, of="bytes")
    check_count("min_quantize_tokens", min_quantize_tokens)
    check_count("min_match_tokens", min_match_tokens)
