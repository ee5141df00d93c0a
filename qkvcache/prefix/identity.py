"""`Identity`: a name for all that keys and values depend on besides the tokens.

Weights are sampled evenly from every parameter and buffer (rotary frequencies included), which distinguishes fine-tunes of one base model
within milliseconds. An edit of a few entries of one matrix can be missed; `extra` covers such changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 64
"""Entries that are sampled from each tensor."""
_IGNORED = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "_attn_implementation_internal")


class Identity:
    """The name of `model` in its current state. `current` is cheap while no tensor was replaced or written to.

    Args:
        tokenizer: the tokenizer that makes the token ids, or None.
        extra: anything else that entries depend on.

    Raises ValueError if weights are not in memory (offloaded by accelerate) and cannot be sampled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, extra: str = ""):
        self.model, self.extra = model, extra
        self.tokenizer = None if tokenizer is None else _tokenizer(tokenizer)
        self._state: tuple | None = None
        self.name = b""
        self.current()

    def current(self) -> bytes:
        """The name of the model now, 16 bytes."""
        state = (_adapters(self.model), *((name, x.data_ptr(), _version(x)) for name, x in _tensors(self.model)))
        if state != self._state:
            parts = [_config(self.model), str(self.model.dtype), str(_adapters(self.model)), self.tokenizer, self.extra]
            digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16)
            for name, x in _tensors(self.model):
                digest.update(f"{name} {x.dtype} {list(x.shape)} ".encode())
            for sample in _samples(self.model):
                digest.update(sample.numpy().tobytes())
            self._state, self.name = state, digest.digest()
        return self.name


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        for name, x in named:
            x = x.to_local() if hasattr(x, "to_local") else x  # a shard
            if x.device.type == "meta":
                raise ValueError(f"{name} is not in memory, so that the weights cannot be identified: load the model without offloading")
            yield name, x.detach()


def _samples(model: nn.Module) -> Iterator[Tensor]:
    """Bytes of the sampled entries in host memory: one copy from each device."""
    samples: dict[torch.device, list[Tensor]] = {}
    for _, x in _tensors(model):
        if x.numel():
            flat = x.reshape(-1)
            entries = flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES]
            samples.setdefault(x.device, []).append(entries.contiguous().view(torch.uint8))
    for parts in samples.values():
        yield torch.cat(parts).cpu()


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _config(model: PreTrainedModel) -> dict:
    config = model.config.to_dict()
    return json.loads(json.dumps({name: value for name, value in config.items() if name not in _IGNORED}, default=str, sort_keys=True))


def _adapters(model: nn.Module) -> tuple[str, ...]:
    """Which adapters are active or merged, and their scaling: unlike the adapters' weights, these are no parameters."""
    marks = ("active_adapter", "merged_adapters", "disable_adapters", "scaling")
    return tuple(
        f"{name}.{mark}={getattr(module, mark)}"
        for name, module in model.named_modules()
        if hasattr(module, "merged_adapters")  # a tuner layer of peft
        for mark in marks
    )


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return hashlib.blake2b(json.dumps([vocabulary, special], sort_keys=True).encode(), digest_size=16).hexdigest()
