"""`ModelIdentity`: a name for everything besides the tokens that keys and values depend on, the release of transformers included, whose
code computes them; and the device of each layer. `Ranks`: the processes that share the model.

Weights are sampled evenly from every parameter and buffer (rotary frequencies included), which distinguishes fine-tunes
of one base model within milliseconds. An edit of a few entries of one matrix can be missed; pass `extra` for these
changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import transformers
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..autocast import autocast_dtype

SAMPLES = 64
"""Entries that are sampled from each tensor."""
Modules = list[tuple[str, nn.Module]]
Store = TypeVar("Store")
_IGNORED = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "_attn_implementation_internal")


class ModelIdentity:
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
        self.devices: dict[int, torch.device] = {}
        """The devices of layers, by index, whose keys and values are not computed on the model's device."""
        self.current()

    def current(self) -> bytes:
        """The name of the model now, 16 bytes."""
        modules = list(self.model.named_modules())
        tensors = (_local(x) for _, module in modules for x in (*module._parameters.values(), *module._buffers.values()) if x is not None)
        state = (_adapters(modules), _computes_in(self.model), [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors])
        if state != self._state:
            config = {name: value for name, value in self.model.config.to_dict().items() if name not in _IGNORED}
            parts = [config, state[1], str(state[0]), self.tokenizer, self.extra, transformers.__version__]
            digest = hashlib.blake2b(json.dumps(parts, default=str, sort_keys=True).encode(), digest_size=16)
            for sample in _samples(self.model):
                digest.update(sample)
            self._state, self.name, self.devices = state, digest.digest(), _devices(modules)
        return self.name


class Ranks:
    """The processes that share `model`; a single one without tensor parallelism. Each stores its own heads, and all must
    continue from the same token."""

    def __init__(self, model: PreTrainedModel):
        mesh = getattr(model, "_device_mesh", None)
        self.size = (getattr(model, "_tp_size", None) or 1) if distributed.is_available() and distributed.is_initialized() else 1
        self.rank = distributed.get_rank() % self.size if self.size > 1 else 0
        self._group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        self._device = model.device

    def agree(self, find: Callable[[int], tuple[Store, bytes, int] | None], limit: int) -> tuple[Store, bytes, int] | None:
        """The result of `find(limit)` for the highest limit at which its last item, a number of tokens, is the same on
        all ranks."""
        while True:
            agreed = find(limit)
            tokens = agreed[2] if agreed else 0
            limit = self.least(tokens)
            if self.least(-tokens) == -limit:  # the maximum equals the minimum
                return agreed

    def least(self, value: int) -> int:
        """The minimum of `value` over all processes, each of which must call this."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, distributed.ReduceOp.MIN, self._group)
        return int(shared)


@torch.no_grad()
def _samples(model: nn.Module) -> Iterator[bytes]:
    """Names, forms and sampled entries of all weights, copied from each device at once."""
    samples: dict[torch.device, list[Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        x = _local(tensor)
        if x.device.type == "meta":
            raise ValueError(f"{name} is not in memory, so that the weights cannot be identified: load the model without offloading")
        yield f"{name} {x.dtype} {list(x.shape)} ".encode()
        if x.numel():
            entries = x.reshape(-1)[:: max(x.numel() // SAMPLES, 1)][:SAMPLES]
            samples.setdefault(x.device, []).append(entries.contiguous().view(torch.uint8))
    yield from (torch.cat(parts).cpu().numpy().tobytes() for parts in samples.values())


def _computes_in(model: PreTrainedModel) -> str:
    """The model's dtype, and the dtype of autocast if it is on."""
    cast = autocast_dtype(model.device)
    return str(model.dtype) if cast is None else f"{model.dtype} autocast {cast}"


def _local(x: Tensor) -> Tensor:
    """The shard of this process."""
    return x.to_local() if hasattr(x, "to_local") else x


def _devices(modules: Modules) -> dict[int, torch.device]:
    devices = {}
    for _, module in modules:
        if isinstance(index := getattr(module, "layer_idx", None), int):
            weight = next(module.parameters(), None)
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is not None or weight is not None:
                devices[index] = torch.device(weight.device if device is None else device)  # type: ignore[union-attr]
    return devices


def _adapters(modules: Modules) -> tuple[str, ...]:
    """The adapters that are active or merged, and their scaling, which are not parameters as the adapters' weights
    are."""
    marks = ("active_adapter", "merged_adapters", "disable_adapters", "scaling")
    tuners = [(name, module) for name, module in modules if "merged_adapters" in vars(module)]  # layers of peft
    return tuple(f"{name}.{mark}={getattr(module, mark)}" for name, module in tuners for mark in marks)


def _tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items())
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    return hashlib.blake2b(json.dumps([vocabulary, special], sort_keys=True).encode(), digest_size=16).hexdigest()
