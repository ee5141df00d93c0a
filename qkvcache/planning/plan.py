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
from ..caches.arguments import Named, layer_indices
from ..caches.makers import LayerMaker
from ..caches.memory import Bytes
from ..caches.reread import limit_of
from ..formats import FormatLike, Identity
from ..formats.base import check_count
from ..formats.outlying import Int8Keys
from ..layers.compressed import CompressedLayer
from .batching import BatchingPlan, Mix, check_mix, plan_batching
from .layout import cache_bytes
from .model import Shape, activation_bytes, has_biased_keys, has_unknown_states, model_dtype, shapes, text_config, weights_bytes
from .prompts import Prompts

FURTHEST = 2**30
"""The number of tokens from which a context counts as unlimited."""


@dataclass(frozen=True)
class Plan:
    """The bytes of `batch` requests of `context` tokens, summed over all GPUs.

    request: bytes of one request, as `cache.memory()` counts them.
    host: bytes of `total` that `offload_pages` keeps in host memory.
    dense: bytes of one request in a DynamicCache.
    activations: bytes that are needed beside the cache while the prompts are read, `prefill_chunk_size` tokens a step; None where they
        are not known (experts).
    prefill_chunk_size: the tokens of each request that a step should read; None: all of them.
    requests: the number of requests that fit into `gpu_memory` beside `weights_memory` and their activations; None without `gpu_memory`.
        Caches that read a context twice hold one request uncompressed until then.
    spare: bytes that `batch` requests leave free, negative where they lack; None without `gpu_memory`.
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
    activations: int | None
    prefill_chunk_size: int | None
    requests: int | None
    spare: float | None
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
        """Bytes of one request divided by all tokens of its context."""
        return self.bytes_per_request / self.context

    @property
    def bytes_per_gpu(self) -> int:
        """Bytes of the whole batch on each GPU."""
        return (self.bytes_per_request - self.host) * self.batch // self.tensor_parallel

    @property
    def ratio(self) -> float:
        """Bytes of a DynamicCache in the model's dtype, divided by the bytes of this cache."""
        return self.dense / self.bytes_per_request

    @property
    def fits(self) -> bool:
        """Whether `batch` requests (of the mix, if given) fit; True without `gpu_memory`."""
        if self.batching is not None:
            return self.batching.requests >= self.batch
        return self.requests is None or self.requests >= self.batch

    @property
    def parts(self) -> tuple[str, ...]:
        """What a cache of this library is made of, in words; empty for caches of transformers."""
        return tuple(filter(None, (self.format, self.policy)))

    @property
    def name(self) -> str:
        return " + ".join(self.parts) or f"dense {self.dtype}"

    @property
    def verdict(self) -> str:
        """Whether the requests fit, in one sentence; empty without `gpu_memory`."""
        if self.spare is None:
            return ""
        batch = f"{self.batch:,} requests" if self.batch > 1 else "one request"
        if self.batching is not None:
            return f"{'Fits' if self.fits else 'Does not fit'}: {batch} of the mix, of which {self.batching.requests:,} would."
        left = f"{in_words(abs(self.spare) / self.tensor_parallel)}{' on each GPU' * (self.tensor_parallel > 1)}"
        if self.fits:
            return f"Fits: {batch}, {left} to spare."
        return f"Does not fit: {batch}, for which {left} {'are' if self.batch > 1 else 'is'} missing; {self.requests or 'none'} would."

    @property
    def sentences(self) -> tuple[str, ...]:
        """The plan in words, without the verdict."""
        takes = "takes at most" if self.at_most else "takes"
        first = f"{self.model}, {self.name}: a request of {self.context:,} tokens {takes} {in_words(self.bytes_per_request)}"
        if self.bytes_per_request > self.dense:
            first += f", {self.bytes_per_request / self.dense:.2f}x more than {in_words(self.dense)} dense"
        elif self.parts:
            first += f", {self.ratio:.2f}x less than {in_words(self.dense)} dense"
        words = [first + (f"; {in_words(self.host)} of it in host memory." if self.host else ".")]
        if self.gpu_memory is not None and self.weights_memory is not None:
            gpus = f"{self.tensor_parallel} x {in_words(self.gpu_memory)}" if self.tensor_parallel > 1 else in_words(self.gpu_memory)
            beside = f" and {in_words(self.activations)} of activations" if self.activations else ""
            such = "one such request" if self.requests == 1 else f"{self.requests:,} such requests"
            words.append(f"{gpus} less {in_words(self.weights_memory)} of weights{beside} hold {such}")
            each = f"{self.batch} requests of" if self.batch > 1 else "one request of"
            longest = "any length" if self.unbounded else f"up to {self.longest_context:,} tokens"
            words[-1] += f", or {each} {longest}." if self.unbounded or self.longest_context else f", and not {each} a single token."
        if self.batching is not None:
            words.append(self.batching.reason)
        return *words, *self.notes

    @property
    def reason(self) -> str:
        """The plan in words, the verdict first."""
        return " ".join(filter(None, (self.verdict, *self.sentences)))

    def __str__(self) -> str:
        return self.reason

    def as_json(self) -> dict:
        """Plain values, in bytes and tokens."""
        fields = vars(self) | vars(self.request) | {"batching": self.batching and self.batching.as_json()}
        derived = ("bytes_per_request", "bytes_per_token", "bytes_per_gpu", "ratio", "fits", "verdict", "reason")
        return {name: value for name, value in fields.items() if name != "request"} | {name: getattr(self, name) for name in derived}


def plan(
    config: PreTrainedConfig,
    *,
    format: FormatLike | None = None,
    policy: str | Named | None = None,
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
            CompressedCache takes them. Without the first two, the plan is for a DynamicCache, or with `max_length`
            for a StaticCache. `gpu_memory` must hold what is not in host memory.
        context: tokens of a request, prompt and answer together. None: the longest of `requests`.
        prompt: tokens of the context that are read at once; None: all. Phi-3 and its kin read a text anew when it passes
            `original_max_position_embeddings`, and these tokens then count. Pages for later tokens are added as the cache
            grows, up to an eighth more than needed.
        batch: requests that run together.
        requests: kinds of requests of continuous batching, each `(weight, prompt tokens, answer tokens)`.
            `Plan.batching` then says how many of them run together in pages of 256 tokens in `format` (None:
            transformers' own pages), in the share of the memory that transformers takes by default. Requires
            `gpu_memory`; excludes `policy`, `max_length` and `skip_layers`.
        gpu_memory: bytes of one GPU for weights, caches, and the activations of prompts, which are read together.
        weights_memory: bytes of the weights over all GPUs; None counts the config's parameters in `dtype`.
        tensor_parallel: GPUs that share the KV heads of each layer evenly.
        dtype: the model's dtype, or its name; None: the dtype of the config, or bfloat16 if it has none.
        max_length: the tokens for which CompressedCache allocates pages at once: a request then has the same bytes
            from its first token on, and `longest_context` is the largest `max_length` that fits.

    Raises:
        ValueError: the errors of CompressedCache; sizes below 1; memory that is negative or infinite; a dtype that is
            not floating-point; a context beyond `max_length`; KV heads that do not divide among the GPUs; weights that
            cannot be counted or leave no memory.
        TypeError: a `config` that is not a config, a size that is not a number, a `dtype` that is neither a dtype nor a
            name.
        NotImplementedError: an encoder-decoder, latent attention with an indexer, unknown layer types; with `requests`, what
            `continuous_batching` refuses.
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

    cached: dict[str, Any] = {"format": format, "policy": policy}

    def made(max_length: int | None) -> DynamicCache | StaticCache:
        if all(x is None for x in cached.values()):
            return DynamicCache(config=config) if max_length is None else StaticCache(config, max_length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "nothing will be compressed": the ratio shows it
            return CompressedCache(config, **cached, max_length=max_length, **options)

    def bytes_of(cache: Cache, context: int, rows: int) -> tuple[Counter[str], int]:
        """Bytes by role of `rows` requests of `context` tokens on all GPUs, and how many of them are in host memory."""
        at_once = context if prompt is None else min(prompt, context)
        sizes, host = cache_bytes(cache, layers, dtype, context, at_once, rows)
        return Counter({role: size * tensor_parallel for role, size in sizes.items()}), host * tensor_parallel

    cache = made(max_length)
    maker = cache._maker if isinstance(cache, CompressedCache) else LayerMaker(cache)
    twice = maker.reads_twice
    each = activation_bytes(config, dtype, tensor_parallel)

    def dense(context: int) -> int:
        return bytes_of(DynamicCache(config=config), context, 1)[0].total()

    def prompts(context: int, rows: int) -> Prompts:
        return Prompts(min(context, prompt or context), 1 if twice else rows, each)

    def needed(context: int, rows: int, held: float) -> float:
        """Bytes on all GPUs at the peak of `rows` requests whose cache takes `held`."""
        filling = max(dense(context) - held / rows, 0) if twice else 0  # the last context is uncompressed until it has been read twice
        return held + filling + (prompts(context, rows).activations or 0)

    sizes, host = bytes_of(cache, context, batch)
    request = Bytes(**{role: size // batch for role, size in sizes.items()})
    read = prompts(context, batch)
    fitting = longest = batching = spare = None
    if gpu_memory is not None:
        weights_memory = weights_bytes(config, dtype) if weights_memory is None else weights_memory
        free, on_gpu = _free(gpu_memory, weights_memory, tensor_parallel), request.total - host // batch
        spare = free - needed(context, batch, on_gpu * batch)

        def too_long(tokens: int) -> bool:
            sizes, host = bytes_of(made(tokens) if max_length else cache, tokens, batch)
            return needed(tokens, batch, sizes.total() - host) > free

        fitting = bisect_left(range(1, FURTHEST + 1), True, key=lambda rows: needed(context, rows, on_gpu * rows) > free)
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
        policy=maker.rule,
        dtype=str(dtype).removeprefix("torch."),
        context=context,
        batch=batch,
        tensor_parallel=tensor_parallel,
        request=request,
        dense=dense(context),
        gpu_memory=gpu_memory,
        weights_memory=None if gpu_memory is None else weights_memory,
        activations=read.activations,
        prefill_chunk_size=read.chunk,
        requests=fitting,
        spare=spare,
        longest_context=None if unbounded else longest,
        unbounded=unbounded,
        notes=(
            *(() if gpu_memory is None or batching else _of_chunks(read)),
            *((f"The last context is uncompressed until it has been read twice, {in_words(dense(context))}.",) if twice else ()),
            *_notes(config, context),
            *((f"The model reads a text anew, and at once, when it passes {limit_of(text):,} tokens.",) if anew else ()),
            *(_int8_keys(cache, layers, tensor_parallel) if isinstance(cache, CompressedCache) and has_biased_keys(config) else ()),
        ),
        at_most=maker.at_most,
        host=host // batch,
        batching=batching,
    )


def plan_all(
    config: PreTrainedConfig,
    names: Iterable[str] | None = None,
    *,
    context: int | None = None,
    **options,
) -> list[Plan]:
    """The plans of a DynamicCache and of the formats called `names` that can hold the model's heads, in pages if there are
    `requests`. `names=None`: every format of the registry but `identity`. `options`: see `plan`.

    Raises what `plan` does.
    """
    if names is None:
        names = [name for name, format in formats.REGISTRY.items() if not isinstance(format, Identity)]
    dims = {shape.head_dim for shape in shapes(config, 2)}
    possible = [name for name in (None, *names) if name is None or not any(formats.REGISTRY[name].refuses(dim) for dim in dims)]
    of_ours = {name: options.pop(name) for name in ("policy", "attention_budget", "offload_pages") if name in options}
    if options.get("gpu_memory") is not None and options.get("weights_memory") is None:  # once for all plans
        options["weights_memory"] = weights_bytes(config, model_dtype(config, options.get("dtype")))
    return [plan(config, format=name, context=context, **options, **(of_ours if name else {})) for name in possible]


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


def _of_chunks(read: Prompts) -> Iterator[str]:
    """How long prompts are read, and what activations do not count."""
    if read.chunk is not None:
        at_once = "" if read.at_once is None else f": at once, their activations take {in_words(read.at_once)}"
        yield f"Read prompts with generate(..., prefill_chunk_size={read.chunk}){at_once}."
    if read.each is None:
        yield "The activations of this model are not known, and not counted."


def _notes(config: PreTrainedConfig, context: int) -> tuple[str, ...]:
    text, notes = text_config(config), []
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
