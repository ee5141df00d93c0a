"""`plan`: what a cache will take, how many requests fit beside the weights, and how long they may be; before anything is allocated.

The cache itself is built, empty, and asked what its layers are; `layout.py` counts what they will hold. Bytes are decimal: 1 GB = 1e9.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache

from .. import formats
from ..caches import CompressedCache
from ..caches.arguments import layer_indices
from ..formats import Format, Identity
from ..policies import Policy, check_count
from .layout import Bytes, held, kind
from .model import has_unknown_states, model_dtype, shapes, text_config, weights_bytes

FURTHEST = 2**32
"""Tokens beyond which a context counts as without a limit."""


@dataclass(frozen=True)
class Plan:
    """What a cache takes for `batch` requests of `context` tokens, in bytes summed over `gpus`.

    `request` is one request as `cache.memory()` counts it: codes, scales, exact tokens, bookkeeping. `dense` is the same in a DynamicCache.
    `requests` fit into `gpu_memory` beside `weights_memory`, and at `batch` requests each may have `longest_context` tokens; both are None
    without `gpu_memory`, and `longest_context` also where the cache stops growing before the memory ends (`unbounded`).
    """

    model: str
    format: str | None
    policy: str | None
    dtype: str
    context: int
    batch: int
    tensor_parallel: int
    request: Bytes
    dense: int
    gpu_memory: float | None
    weights_memory: float | None
    requests: int | None
    longest_context: int | None
    unbounded: bool
    notes: tuple[str, ...]

    @property
    def bytes_per_request(self) -> int:
        return self.request.total

    @property
    def bytes_per_token(self) -> float:
        """Of one request, averaged over all tokens of the context, those forgotten among them."""
        return self.bytes_per_request / self.context

    @property
    def bytes_per_gpu(self) -> int:
        """Of the whole batch, on each GPU."""
        return self.bytes_per_request * self.batch // self.tensor_parallel

    @property
    def ratio(self) -> float:
        """How many times smaller than a DynamicCache in the model's dtype."""
        return self.dense / self.bytes_per_request

    @property
    def fits(self) -> bool:
        """Whether `batch` requests fit; True without `gpu_memory`."""
        return self.requests is None or self.requests >= self.batch

    @property
    def name(self) -> str:
        return " + ".join(filter(None, (self.format, self.policy))) or f"dense {self.dtype}"

    @property
    def reason(self) -> str:
        """The plan in words."""
        words = [f"{self.model}, {self.name}: a request of {self.context:,} tokens takes {in_words(self.bytes_per_request)}"]
        if self.bytes_per_request > self.dense:
            words[0] += f", {self.bytes_per_request / self.dense:.2f}x more than {in_words(self.dense)} dense"
        elif self.format is not None or self.policy is not None:
            words[0] += f", {self.ratio:.2f}x less than {in_words(self.dense)} dense"
        words[0] += "."
        if self.gpu_memory is not None and self.weights_memory is not None:
            gpus = f"{self.tensor_parallel} x {in_words(self.gpu_memory)}" if self.tensor_parallel > 1 else in_words(self.gpu_memory)
            words.append(f"{gpus} less {in_words(self.weights_memory)} of weights hold {self.requests:,} such requests")
            each = f"{self.batch} requests of" if self.batch > 1 else "one request of"
            longest = "any length" if self.unbounded else f"up to {self.longest_context:,} tokens"
            words[-1] += f", or {each} {longest}." if self.unbounded or self.longest_context else f", and not {each} a single token."
        return " ".join((*words, *self.notes))

    def __str__(self) -> str:
        return self.reason

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        names = ("codes", "scales", "exact", "bookkeeping")
        taken = {name: getattr(self.request, name) for name in names}
        fields = {name: value for name, value in vars(self).items() if name != "request"}
        derived = ("bytes_per_request", "bytes_per_token", "bytes_per_gpu", "ratio", "fits", "reason")
        return fields | taken | {name: getattr(self, name) for name in derived}


def plan(
    config: PreTrainedConfig,
    *,
    format: str | Format | None = None,
    policy: str | Policy | None = None,
    context: int,
    prompt: int | None = None,
    batch: int = 1,
    gpu_memory: float | None = None,
    weights_memory: float | None = None,
    tensor_parallel: int = 1,
    dtype: torch.dtype | str | None = None,
    num_sink_tokens: int = 4,
    residual_length: int = 64,
    skip_layers: Iterable[int] = (),
    max_length: int | None = None,
) -> Plan:
    """What `CompressedCache` with these options will hold: to the byte what `cache.nbytes` says then, save for padding and addresses.

        plan(config, format="turboquant_4bit_nc", context=131_072, gpu_memory=80e9, tensor_parallel=8)

    Args:
        format, policy, num_sink_tokens, residual_length, skip_layers: as CompressedCache takes them; without both, a DynamicCache,
            or with `max_length` a StaticCache.
        context: tokens of a request, the prompt and what is generated.
        prompt: tokens of it that are read at once, None for all. What comes later comes in chunks up to an eighth larger than needed.
        batch: requests that run together.
        gpu_memory: bytes of one GPU that weights and caches may take. Activations are not counted: leave room for them.
        weights_memory: bytes of the weights, over all GPUs; None counts the config's parameters in `dtype`.
        tensor_parallel: GPUs that share the KV heads of each layer evenly.
        dtype: what the model computes in, or its name; None asks the config, and takes bfloat16 where it does not say.
        max_length: tokens that storage is taken for at once, as CompressedCache takes it: every request then takes the same from its first
            token on, and `longest_context` is the largest `max_length` that fits.

    Raises:
        ValueError: what CompressedCache raises, sizes below 1, memory that is negative or infinite, a dtype that is not floating-point, a
            context beyond `max_length`, KV heads that do not divide among the GPUs, weights that cannot be counted or leave no memory.
        TypeError: `config` is no config, a size no number, or `dtype` neither a dtype nor a name.
        NotImplementedError: latent attention, an encoder-decoder, layer types that are unknown here.
    """
    for name, count, of in (("context", context, "tokens"), ("batch", batch, "requests"), ("tensor_parallel", tensor_parallel, "GPUs")):
        check_count(name, count, 1, of)
    check_count("num_sink_tokens", num_sink_tokens)
    check_count("residual_length", residual_length)
    _check_bytes("gpu_memory", gpu_memory)
    _check_bytes("weights_memory", weights_memory)
    if prompt is not None:
        check_count("prompt", prompt, 1)
    if max_length is not None:
        check_count("max_length", max_length, 1)
        if context > max_length:
            raise ValueError(f"context={context} does not fit in max_length={max_length}: raise max_length")
    text = text_config(config)
    dtype = model_dtype(config, dtype)
    layers = shapes(config, dtype.itemsize, tensor_parallel)
    zones = {"num_sink_tokens": num_sink_tokens, "residual_length": residual_length, "skip_layers": layer_indices(skip_layers)}

    def made(max_length: int | None) -> DynamicCache | StaticCache:
        if format is None and policy is None:
            return DynamicCache(config=config) if max_length is None else StaticCache(config, max_length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing will be compressed: the ratio says so
            return CompressedCache(config, format=format, policy=policy, max_length=max_length, **zones)  # type: ignore[arg-type]

    def taken(cache: Cache, context: int, rows: int) -> Bytes:
        at_once = context if prompt is None else min(prompt, context)
        alike = Counter((kind(layer), shape) for layer, shape in zip(cache.layers, layers, strict=True))
        one = {kind(layer): layer for layer in cache.layers}
        each = (held(one[of], shape, dtype, context, at_once, rows) * count for (of, shape), count in alike.items())
        return reduce(Bytes.__add__, each, Bytes()) * tensor_parallel

    cache = made(max_length)
    request = taken(cache, context, batch).each(batch)
    requests = longest = free = None
    if gpu_memory is not None:
        weights_memory = weights_bytes(config, dtype) if weights_memory is None else weights_memory
        free = _free(gpu_memory, weights_memory, tensor_parallel)
        requests = int(free // request.total)
        longest = _longest(lambda tokens: taken(made(tokens) if max_length else cache, tokens, batch).total <= free)
    unbounded = longest == FURTHEST
    return Plan(
        model=text.model_type,
        format=None if format is None else formats.resolve(format).name,
        policy=None if not isinstance(cache, CompressedCache) or cache.policy is None else _describe(cache.policy),
        dtype=str(dtype).removeprefix("torch."),
        context=context,
        batch=batch,
        tensor_parallel=tensor_parallel,
        request=request,
        dense=taken(DynamicCache(config=config), context, 1).total,
        gpu_memory=gpu_memory,
        weights_memory=None if gpu_memory is None else weights_memory,
        requests=requests,
        longest_context=None if unbounded else longest,
        unbounded=unbounded,
        notes=_notes(config, context),
    )


def plan_all(config: PreTrainedConfig, *, policy: str | Policy | None = None, context: int, **options) -> list[Plan]:
    """The plan of a DynamicCache, and then of every format that can hold the model's heads; `policy` and `options` are those of `plan`.

    Raises what `plan` does.
    """
    names = [None, *(name for name, format in formats.REGISTRY.items() if not isinstance(format, Identity))]
    dims = {shape.head_dim for shape in shapes(config, 2)}
    held = [name for name in names if name is None or not any(formats.REGISTRY[name].refuses(dim) for dim in dims)]
    if options.get("gpu_memory") is not None and options.get("weights_memory") is None:  # once for all
        options["weights_memory"] = weights_bytes(config, model_dtype(config, options.get("dtype")))
    return [plan(config, format=name, policy=policy if name else None, context=context, **options) for name in held]


def _check_bytes(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of bytes such as 80e9, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: must be 0 or more bytes, and finite, such as 80e9")


def _free(gpu_memory: float, weights_memory: float, gpus: int) -> float:
    """Bytes left for caches, over all GPUs."""
    free = gpu_memory * gpus - weights_memory
    if free <= 0:
        raise ValueError(
            f"gpu_memory={gpu_memory:g} x {gpus} GPUs leaves nothing beside {in_words(weights_memory)} of weights: raise gpu_memory or "
            "tensor_parallel, or pass weights_memory for quantized weights"
        )
    return free


def _longest(fits: Callable[[int], bool]) -> int:
    """The most tokens, up to `FURTHEST`, that fit."""
    low, high = 0, 1
    while high <= FURTHEST and fits(high):
        low, high = high, high * 2
    if low == FURTHEST:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _describe(policy: Policy) -> str:
    """The policy with the budget of its first layer."""
    budget = policy.budgets[0]
    parts = (f"{budget.tokens:,}" if budget.tokens else "", f"{budget.share:.0%}" if budget.share else "")
    return f"{policy.name} {' + '.join(filter(None, parts))}"


def _notes(config: PreTrainedConfig, context: int) -> tuple[str, ...]:
    text, notes = text_config(config), []
    trained = getattr(text, "max_position_embeddings", None)
    if trained and context > trained:
        notes.append(f"The config names {trained:,} positions, fewer than the context.")
    if has_unknown_states(config):
        notes.append("States of convolutions and recurrent layers, which do not grow, are not counted.")
    return tuple(notes)


def in_words(count: float) -> str:
    """Bytes as GB, MB or kB, which are decimal."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}" if count < 100 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:,.0f} bytes"
