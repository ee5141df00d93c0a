"""`plan`: the bytes of a cache, the requests that fit beside the weights, and the longest context, before anything is allocated.

It builds the empty cache and computes the bytes of its layers with `layout.py`. Bytes are decimal: 1 GB = 1e9.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache

from .. import formats
from ..caches import CompressedCache
from ..caches.arguments import PolicyLike, layer_indices
from ..caches.memory import Bytes
from ..caches.reread import limit_of
from ..formats import FormatLike, Identity
from ..formats.base import check_count
from ..formats.outlying import Int8Keys
from ..layers.compressed import CompressedLayer
from .batching import BatchingPlan, Mix, check_mix, plan_batching
from .layout import cache_bytes
from .model import Shape, activation_bytes, has_biased_keys, has_unknown_states, model_dtype, shapes, text_config, weights_bytes

FURTHEST = 2**30
"""The number of tokens from which a context counts as unlimited."""
DOES_NOT_FIT = "Does not fit."
CHUNK = 4096
"""The `prefill_chunk_size` that the notes name for longer prompts."""


@dataclass(frozen=True)
class Plan:
    """The bytes of `batch` requests of `context` tokens, summed over all GPUs.

    request: bytes of one request, as `cache.memory()` counts them.
    host: those of them that `offload_pages` keeps in host memory.
    dense: bytes of one request in a DynamicCache.
    requests: the number of requests that fit into `gpu_memory` beside `weights_memory`; None without `gpu_memory`.
    longest_context: the most tokens that each of `batch` requests can have; None without `gpu_memory`, and if the cache
        stops growing before memory is full (`unbounded`).
    at_most: whether heads share budgets (`AdaKV`), so that the bytes depend on the text; the bytes are then an upper
        bound, and `requests` a lower bound.
    batching: the plan of continuous batching, if `plan` was given `requests`.
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
    at_most: bool = False
    host: int = 0
    batching: BatchingPlan | None = None

    @property
    def bytes_per_request(self) -> int:
        return self.request.total

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one request divided by the tokens of its context, evicted ones included."""
        return self.bytes_per_request / self.context

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes of the whole batch on each GPU."""
        return (self.bytes_per_request - self.host) * self.batch // self.tensor_parallel

    @property
    def ratio(self) -> float:
        """Bytes of a DynamicCache in the model's dtype divided by those of this cache."""
        return self.dense / self.bytes_per_request

    @property
    def fits(self) -> bool:
        """Whether `batch` requests (of the mix, if given) fit; True without `gpu_memory`."""
        if self.batching is not None:
            return self.batching.requests >= self.batch
        return self.requests is None or self.requests >= self.batch

    @property
    def name(self) -> str:
        return " + ".join(filter(None, (self.format, self.policy))) or f"dense {self.dtype}"

    @property
    def reason(self) -> str:
        """The plan in words."""
        takes = "takes at most" if self.at_most else "takes"
        first = f"{self.model}, {self.name}: a request of {self.context:,} tokens {takes} {in_words(self.bytes_per_request)}"
        if self.bytes_per_request > self.dense:
            first += f", {self.bytes_per_request / self.dense:.2f}x more than {in_words(self.dense)} dense"
        elif self.format is not None or self.policy is not None:
            first += f", {self.ratio:.2f}x less than {in_words(self.dense)} dense"
        words = [] if self.fits else [DOES_NOT_FIT]
        words.append(first + (f"; {in_words(self.host)} of it in host memory." if self.host else "."))
        if self.gpu_memory is not None and self.weights_memory is not None:
            gpus = f"{self.tensor_parallel} x {in_words(self.gpu_memory)}" if self.tensor_parallel > 1 else in_words(self.gpu_memory)
            such = "one such request" if self.requests == 1 else f"{self.requests:,} such requests"
            words.append(f"{gpus} less {in_words(self.weights_memory)} of weights hold {such}")
            each = f"{self.batch} requests of" if self.batch > 1 else "one request of"
            longest = "any length" if self.unbounded else f"up to {self.longest_context:,} tokens"
            words[-1] += f", or {each} {longest}." if self.unbounded or self.longest_context else f", and not {each} a single token."
        if self.batching is not None:
            words.append(self.batching.reason)
        return " ".join((*words, *self.notes))

    def __str__(self) -> str:
        return self.reason

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        fields = vars(self) | vars(self.request) | {"batching": self.batching and self.batching.as_json()}
        derived = ("bytes_per_request", "bytes_per_token", "bytes_per_gpu", "ratio", "fits", "reason")
        return {name: value for name, value in fields.items() if name != "request"} | {name: getattr(self, name) for name in derived}


def plan(
    config: PreTrainedConfig,
    *,
    format: FormatLike | None = None,
    policy: str | PolicyLike | None = None,
    context: int | None = None,
    prompt: int | None = None,
    batch: int = 1,
    requests: Mix | None = None,
    gpu_memory: float | None = None,
    weights_memory: float | None = None,
    tensor_parallel: int = 1,
    dtype: torch.dtype | str | None = None,
    num_sink_tokens: int = 4,
    residual_length: int = 64,
    skip_layers: Iterable[int] = (),
    max_length: int | None = None,
    attention_budget: int | float | Literal["auto"] | None = None,
    offload_pages: bool = False,
) -> Plan:
    """Returns the bytes that a `CompressedCache` with these options will take, as `cache.nbytes` measures them, for
    requests without padding. With `AdaKV` they are an upper bound.

        plan(config, format="turboquant_4bit_nc", context=131_072, gpu_memory=80e9, tensor_parallel=8)
        plan(config, format="turboquant_4bit_nc", requests=[(3, 1_000, 200), (1, 16_000, 500)], gpu_memory=80e9)

    Args:
        format, policy, num_sink_tokens, residual_length, skip_layers, attention_budget, offload_pages: as
            CompressedCache takes them. Without format and policy, the plan is for a DynamicCache, or with `max_length`
            for a StaticCache. With `offload_pages`, `gpu_memory` must hold what is not in host memory.
        context: tokens of a request, prompt and answer together. None: those of the longest of `requests`.
        prompt: tokens of the context that are read at once; None: all. Phi-3 and its kin read a text anew when it passes
            `original_max_position_embeddings`, and these tokens then count. Pages for later tokens are added as the cache
            grows, up to an eighth more than needed.
        batch: requests that run together.
        requests: kinds of requests of continuous batching, each `(weight, prompt tokens, answer tokens)`.
            `Plan.batching` then says how many of them run together in pages of 256 tokens in `format` (None:
            transformers' own pages), in the share of the memory that transformers takes by default. Requires
            `gpu_memory`; excludes `policy`, `max_length` and `skip_layers`.
        gpu_memory: bytes of one GPU for weights and caches. Activations are not counted; `notes` estimates those of a long prompt.
        weights_memory: bytes of the weights over all GPUs; None counts the config's parameters in `dtype`.
        tensor_parallel: GPUs that share the KV heads of each layer evenly.
        dtype: the model's dtype, or its name; None: that of the config, or bfloat16 if it has none.
        max_length: the tokens for which CompressedCache allocates pages at once: a request then has the same bytes
            from its first token on, and `longest_context` is the largest `max_length` that fits.

    Raises:
        ValueError: the errors of CompressedCache; sizes below 1; memory that is negative or infinite; a dtype that is
            not floating-point; a context beyond `max_length`; KV heads that do not divide among the GPUs; weights that
            cannot be counted or leave no memory.
        TypeError: a `config` that is not a config, a size that is not a number, a `dtype` that is neither a dtype nor a
            name.
        NotImplementedError: latent attention, an encoder-decoder, unknown layer types; with `requests`, what `continuous_batching` refuses.
    """
    if requests is not None:
        requests = check_mix(requests)
        if gpu_memory is None or policy is not None or max_length is not None or skip_layers:
            raise ValueError("requests= says how many fit into gpu_memory=, in pages without policy=, max_length= and skip_layers=")
        context = max(prompt + answer for _, prompt, answer in requests) if context is None else context
    if context is None:
        raise ValueError("context=None: pass the tokens of a request (--context), or requests= (--requests)")
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
    if anew := prompt is not None and prompt <= limit_of(text) < context:
        prompt = int(limit_of(text)) + 1
    dtype = model_dtype(config, dtype)
    layers = shapes(config, dtype.itemsize, tensor_parallel)
    options: dict[str, Any] = {
        "num_sink_tokens": num_sink_tokens, "residual_length": residual_length, "skip_layers": layer_indices(skip_layers),
        "attention_budget": attention_budget, "offload_pages": offload_pages,
    }  # fmt: skip
    if format is None and attention_budget is not None:
        raise ValueError(f"attention_budget={attention_budget} without a format: pass one, such as format='turboquant_4bit_nc'")

    def made(max_length: int | None) -> DynamicCache | StaticCache:
        if format is None and policy is None:
            return DynamicCache(config=config) if max_length is None else StaticCache(config, max_length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "nothing will be compressed": the ratio shows it
            return CompressedCache(config, format=format, policy=policy, max_length=max_length, **options)

    def bytes_of(cache: Cache, context: int, rows: int) -> tuple[Counter[str], int]:
        """Bytes by role of `rows` requests of `context` tokens on all GPUs, and those of them in host memory."""
        at_once = context if prompt is None else min(prompt, context)
        sizes, host = cache_bytes(cache, layers, dtype, context, at_once, rows)
        return Counter({role: size * tensor_parallel for role, size in sizes.items()}), host * tensor_parallel

    cache = made(max_length)
    used = cache.policy if isinstance(cache, CompressedCache) else None
    sizes, host = bytes_of(cache, context, batch)
    request = Bytes(**{role: size // batch for role, size in sizes.items()})
    fitting = longest = batching = None
    if gpu_memory is not None:
        weights_memory = weights_bytes(config, dtype) if weights_memory is None else weights_memory
        free = _free(gpu_memory, weights_memory, tensor_parallel)
        fitting = int(free // (request.total - host // batch))

        def too_long(tokens: int) -> bool:
            sizes, host = bytes_of(made(tokens) if max_length else cache, tokens, batch)
            return sizes.total() - host > free

        longest = bisect_left(range(1, FURTHEST + 1), True, key=too_long)
        if requests is not None:
            batching = plan_batching(
                config, None if format is None else formats.resolve(format), requests, free=free / tensor_parallel, shapes=layers,
                dtype=dtype, tensor_parallel=tensor_parallel, num_sink_tokens=num_sink_tokens, residual_length=residual_length,
            )  # fmt: skip
    unbounded = longest == FURTHEST
    return Plan(
        model=text.model_type,
        format=None if format is None else formats.resolve(format).name,
        policy=None if used is None else _describe(used),
        dtype=str(dtype).removeprefix("torch."),
        context=context,
        batch=batch,
        tensor_parallel=tensor_parallel,
        request=request,
        dense=bytes_of(DynamicCache(config=config), context, 1)[0].total(),
        gpu_memory=gpu_memory,
        weights_memory=None if gpu_memory is None else weights_memory,
        requests=fitting,
        longest_context=None if unbounded else longest,
        unbounded=unbounded,
        notes=(
            *_notes(config, context, 0 if gpu_memory is None or batching else min(context, prompt or context), batch, dtype),
            *((f"The model reads a text anew, and at once, when it passes {limit_of(text):,} tokens.",) if anew else ()),
            *(_int8_keys(cache, layers, tensor_parallel) if isinstance(cache, CompressedCache) and has_biased_keys(config) else ()),
        ),
        at_most=used is not None and used.alpha_safeguard is not None,
        host=host // batch,
        batching=batching,
    )


def plan_all(
    config: PreTrainedConfig,
    names: Iterable[str] | None = None,
    *,
    policy: str | PolicyLike | None = None,
    context: int | None = None,
    **options,
) -> list[Plan]:
    """The plans of a DynamicCache and of the formats called `names` that can hold the model's heads, in pages if there are
    `requests`. `names=None`: every format of the registry but `identity`. `policy` and `options` are those of `plan`.

    Raises what `plan` does.
    """
    if names is None:
        names = [name for name, format in formats.REGISTRY.items() if not isinstance(format, Identity)]
    dims = {shape.head_dim for shape in shapes(config, 2)}
    possible = [name for name in (None, *names) if name is None or not any(formats.REGISTRY[name].refuses(dim) for dim in dims)]
    reading = {name: options.pop(name) for name in ("attention_budget", "offload_pages") if name in options}
    if options.get("gpu_memory") is not None and options.get("weights_memory") is None:  # once for all plans
        options["weights_memory"] = weights_bytes(config, model_dtype(config, options.get("dtype")))
    of_ours = options | reading | {"policy": policy}
    return [plan(config, format=name, context=context, **(of_ours if name else options)) for name in possible]


def _check_bytes(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of bytes such as 80e9, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: must be 0 or more bytes, and finite, such as 80e9")


def _free(gpu_memory: float, weights_memory: float, gpus: int) -> float:
    """The bytes for caches on all GPUs."""
    free = gpu_memory * gpus - weights_memory
    if free <= 0:
        raise ValueError(
            f"gpu_memory={gpu_memory:g} x {gpus} GPUs leaves nothing beside {in_words(weights_memory)} of weights: raise gpu_memory or "
            "tensor_parallel, or pass weights_memory for quantized weights"
        )
    return free


def _describe(policy: Any) -> str:
    """The policy in words, with its mean budget over layers."""
    budgets = policy.budgets
    tokens, share = round(sum(b.tokens for b in budgets) / len(budgets)), sum(b.share for b in budgets) / len(budgets)
    parts = (f"{tokens:,}" if tokens else "", f"{share:.0%}" if share else "")
    return f"{policy.name} {' + '.join(filter(None, parts))}"


def _notes(config: PreTrainedConfig, context: int, prompt: int, batch: int, dtype: torch.dtype) -> tuple[str, ...]:
    """`prompt`: the tokens of each request that one step reads; 0 where their activations need not be named."""
    text, notes = text_config(config), []
    if prompt > CHUNK:
        each, whole, parts = activation_bytes(config, dtype), "", ""
        if each is not None:  # chunks take a third more: they attend to what is stored
            whole, parts = f", about {in_words(each * prompt * batch)},", f" to some {in_words(1.3 * each * CHUNK * batch)}"
        notes.append(
            f"The activations of a prompt that is read at once{whole} are not counted; generate(..., prefill_chunk_size={CHUNK}) "
            f"bounds them{parts}."
        )
    trained = getattr(text, "max_position_embeddings", None)
    if trained and context > trained:
        notes.append(f"The config names {trained:,} positions, fewer than the context.")
    if has_unknown_states(config):
        notes.append("States of convolutions and recurrent layers, which do not grow, are not counted.")
    return tuple(notes)


def _int8_keys(cache: CompressedCache, layers: Sequence[Shape], tensor_parallel: int) -> Iterator[str]:
    """The note about layers that may choose int8 for their keys, which only the first prompt shows."""
    for layer, shape in zip(cache.layers, layers, strict=True):
        if isinstance(layer, CompressedLayer) and layer.instead:
            both = layer.format, Int8Keys(layer.format)
            before, after = (x.bytes_per_token(shape.head_dim, shape.heads * tensor_parallel) for x in both)
            yield (
                "The model's keys have biases. A layer whose keys have outlying channels, which only the first "
                f"prompt shows, holds them in int8; its {after - before:,} bytes more for each token are not counted."
            )
            return


def in_words(count: float) -> str:
    """Bytes as GB, MB or kB, which are decimal."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}" if count < 100 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:,.0f} bytes"
