"""A cache as a file: the snapshots of its layers (`snapshot_file.py`), the options that it was made with, and the sizes of its
model. Nothing is pickled: an option is a plain value, or an object of this library by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from ..files import Damaged, reading
from ..formats import REGISTRY, FormatByLayer
from ..rooms import registered
from .snapshot import Snapshot, check, restore, snapshot
from .snapshot_file import Parts, read_header, write

WHAT = "qkvcache_cache"
"""The kind of file."""
OPTIONS = ("policy", "skip_layers", "max_length", "attention_budget", "offload_pages", "offloading")
MODEL = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "kv_lora_rank",
    "vocab_size", "sliding_window", "rope_parameters",
)  # fmt: skip
"""Attributes of a config that must be the same."""
Cache = TypeVar("Cache")


@torch.no_grad()
def save(cache: Any, path: str | PathLike[str]) -> None:
    """`CompressedCache.save`."""
    if cache._config is None:
        raise NotImplementedError("save of a cache that was made without a config: make it with model.config")
    options = {name: getattr(cache, name) for name in OPTIONS} | cache._layer_options
    options |= {"format": cache.format, "compile": cache.compile and cache.max_length is None}
    kept, parts = {name: _plain(name, x) for name, x in options.items()}, {}
    for i, layer in enumerate(cache.layers):
        try:
            part = snapshot(layer, row=None)
        except NotImplementedError as reason:
            raise NotImplementedError(f"save of layer {i}: {reason}; torch.save(cache, path) saves every cache") from None
        parts[str(i)] = Snapshot(part.kind, {name: _on_host(x) for name, x in part.tensors.items()}, part.numbers)
    rows = max((len(x) for part in parts.values() for x in part.tensors.values()), default=0)
    header = {"options": kept, "model": _model(cache._config), "tokens": int(cache.get_seq_length()), "rows": rows}
    write(Path(path), WHAT, parts, header)


@torch.no_grad()
def load(
    make: Callable[..., Cache],
    path: str | PathLike[str],
    config: PreTrainedConfig,
    device: str | torch.device | Sequence[str | torch.device],
) -> Cache:
    """`CompressedCache.load`. `make`: the class."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a transformers config such as model.config, got {type(config).__name__}")
    file = Path(path)
    try:
        header = read_header(file, WHAT, "saved cache")
        with reading(file):
            _check_model(header["model"], config)
            options = {name: _made(x) for name, x in header["options"].items()}
            tokens, rows, parts = header["tokens"], header["rows"], Parts(file, header["parts"]).checked()
        cache: Any = make(config, **options)
        if parts.keys() != set(map(str, range(len(cache.layers)))):
            raise Damaged(f"it has layers {sorted(parts)}, and the cache of this model has {len(cache.layers)}")
        stored = [parts[str(i)] for i in range(len(parts))]
        with reading(file):
            for layer, part in zip(cache.layers, stored, strict=True):
                check(layer, part, tokens, rows)
    except FileNotFoundError:
        raise
    except (Damaged, OSError) as reason:
        raise ValueError(f"{str(path)!r} is refused: {reason}") from reason
    devices = [device] * len(stored) if isinstance(device, str | torch.device) else list(device)
    if len(devices) != len(stored):
        raise ValueError(f"{len(devices)} devices for {len(stored)} layers: pass one for all, or one for each")
    for layer, part, place in zip(cache.layers, stored, devices, strict=True):
        restore(layer, part, place)
    return cache


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", copy=True).contiguous()


def _model(config: PreTrainedConfig) -> dict[str, Any]:
    found = config.to_dict()  # an attribute may differ by layer, and then has no value
    return {name: found.get(config.attribute_map.get(name, name)) for name in MODEL}


def _check_model(saved: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raises Damaged, with the first difference, for a file of another model."""
    own = _model(config.get_text_config(decoder=True))
    for name in MODEL:
        if saved.get(name) != own.get(name):
            raise Damaged(f"it is of a model with {name}={saved.get(name)!r}, and the config has {own.get(name)!r}")


@functools.cache
def _classes() -> dict[str, type]:
    """The classes of values that a file holds by name."""
    return {kind.__name__: kind for kind in (*map(type, REGISTRY.values()), FormatByLayer, *registered("SAVED"))}


def _plain(name: str, x: Any) -> Any:
    """The value of an option as JSON has it. Raises NotImplementedError for anything but plain values and objects of this library."""
    if x is None or isinstance(x, bool | int | float | str):
        return x
    if isinstance(x, list | tuple):
        return [_plain(name, each) for each in x]
    if _classes().get(type(x).__name__) is not type(x):
        raise NotImplementedError(f"save of {name}={x!r}: a file holds objects of qkvcache alone; call torch.save(cache, path)")
    return {"class": type(x).__name__} | {field.name: _plain(name, getattr(x, field.name)) for field in dataclasses.fields(x) if field.init}  # type: ignore[arg-type]


def _made(x: Any) -> Any:
    """The value of which `_plain` made `x`."""
    if isinstance(x, list):
        return tuple(map(_made, x))
    if not isinstance(x, dict):
        return x
    return _classes()[x["class"]](**{name: _made(value) for name, value in x.items() if name != "class"})
