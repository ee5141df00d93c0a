"""`continuous_batching`: compressed pages for `generate_batch` and `init_continuous_batching` of a model."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .. import formats
from ..attention import install
from ..attention.model_code import OWN_ATTENTION
from ..formats import Format, FormatByLayer
from ..formats.base import check_count
from ..kernels import on_triton
from ..layers.kinds import head_dim_of
from ..rooms import option
from .metrics import Metrics
from .requests import check_prompt
from .statistics import Statistics

if TYPE_CHECKING:
    from ..prefix import PrefixStore
    from .transformers.manager import CompressedManager

INIT, GENERATE = "init_continuous_batching", "generate_batch"
"""The methods of a model that are replaced on the instance."""
READS_THE_PAST = frozenset(("diffllama", "doge", "jetmoe"))
"""Model types that compute with keys or values of the cache before attention. Others fail at their first request (`attention.NewKV`)."""


class Batching:
    """The result of `continuous_batching`, a context manager. Inside it, or until `close`, the model's continuous
    batching uses compressed pages. `statistics.save(path)` stores the frozen statistics of the format."""

    def __init__(self, model: PreTrainedModel, statistics: Statistics, **reading: Any):
        self.model, self.statistics, self._reading = model, statistics, reading
        self.manager: CompressedManager | None = None
        """The latest manager."""
        self._counters = Metrics()
        self._attention = model.config._attn_implementation

    def __call__(
        self, generation_config: GenerationConfig | None = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> CompressedManager:
        """The model's `init_continuous_batching`."""
        from .transformers.manager import manager_for

        options: dict[str, Any] = {"statistics": self.statistics, "counters": self._counters, **self._reading}
        self.manager = manager_for(self.model, generation_config, continuous_batching_config, workload_hints, **options)
        return self.manager

    def generate_batch(self, inputs: list[list[int]], *args: Any, **options: Any) -> Any:
        """Calls the model's `generate_batch`. Refuses prompts that it would leave out, and options that it would ignore."""
        stock: Any = type(self.model).generate_batch  # type: ignore[attr-defined]
        if unknown := options.keys() - inspect.signature(stock).parameters - {"max_new_tokens"}:
            raise TypeError(f"generate_batch has no option {', '.join(sorted(unknown))}: the generation config may")
        for ids in inputs:
            check_prompt(self.model.config, ids, options.get("max_new_tokens"))
        return stock(self.model, inputs, *args, **options)

    def metrics(self) -> Metrics:
        """The present numbers of requests, pages and tokens."""
        gauges = {} if self.manager is None else self.manager.gauges()
        return replace(self._counters, **gauges)

    def close(self, timeout: float | None = None) -> None:
        """Stops the manager and restores the model; further calls do nothing. `timeout`: seconds in which the manager's step has to end;
        later it is left running. None: any time."""
        if self.model.__dict__.get(INIT) is not self:
            return
        del self.model.__dict__[INIT], self.model.__dict__[GENERATE]
        if self.manager is not None:
            if self.manager.close(timeout) and self.model.config._attn_implementation != self._attention:
                self.model.set_attn_implementation(self._attention)
            self.manager = None

    def __deepcopy__(self, memo: dict) -> Batching:
        reading = self._reading | {"store": None}  # which is of the original's model
        return Batching(copy.deepcopy(self.model, memo), copy.deepcopy(self.statistics, memo), **reading)

    def __enter__(self) -> Batching:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def continuous_batching(
    model: PreTrainedModel,
    format: str | Format = "turboquant_4bit_nc",
    *,
    residual_length: int = 64,
    num_sink_tokens: int = 4,
    attention_budget: int | float | Literal["auto"] | None = None,
    offload_pages: bool = False,
    statistics: Statistics | str | Path | None = None,
    store: PrefixStore | None = None,
    reproducible: bool = False,
) -> Batching:
    """Keeps the requests of `model.generate_batch` and `model.init_continuous_batching` in compressed pages.

        with continuous_batching(model, format="turboquant_4bit_nc") as batching:
            outputs = model.generate_batch(prompts, max_new_tokens=100)

    Every token is quantized when it is written. Each request also keeps its last tokens in the model's dtype, and its first tokens beside
    its first block. The tokens of a step attend to each other exactly. Blocks that are shared, forked, or moved to the host and back keep
    their codes. Of layers with a sliding window, pages hold the tokens of the window, and requests share none, as in transformers.

    Args:
        format: a registry name (`qkvcache.formats.REGISTRY`) or a Format. Its scales must not span tokens.
        residual_length: number of last tokens of each request that attention reads in the model's dtype.
        num_sink_tokens: number of first tokens of each request that stay in the model's dtype, in layers without a sliding window.
        attention_budget: as in `CompressedCache`, of each request: tokens, or a share of them, that a step with one new token reads beside
            the exact ones. Prompts, and layers with a sliding window, read everything. None: all.
        offload_pages: an option of caches, refused here: requests share the pages of one pool on the GPU.
        statistics: for formats with one mean or scale for all tokens: the `batching.statistics` of an earlier run, or the file that its
            `save` wrote. None: they come from the first batch of prompts and are frozen for all later requests.
        store: a store of this model, to which complete pages are written and from which they come back, in this process and in later ones:
            the next turn of a conversation computes its new tokens alone. None: pages live as long as the pool has room for them.
        reproducible: whether an answer depends on its prompt, options and the statistics alone, to the bit: not on what was stored of the
            prompt, or on other requests. Every token then attends to the exact tokens of its page and to the codes of all pages before it;
            `residual_length` has no effect, and steps are slower.

    Raises:
        NotImplementedError: a release of transformers that is not supported, models with linear, chunked or latent attention or with
            attention code of their own, or encoder-decoders; pages in host memory.
        ValueError: an unknown format or one that cannot hold the model's head_dim; negative sizes; an attention budget that is no number of
            tokens and no share; statistics of another format or model; the store
            of another model; a model that already batches on compressed pages.
        TypeError: `format`, `statistics`, `attention_budget`, `store` or a size of another type.
    """
    if offload_pages:
        raise NotImplementedError(
            "offload_pages=True with continuous batching, whose requests share the pages of one pool on the GPU: for a few long contexts "
            "pass CompressedCache(config, attention_budget=4096, offload_pages=True) to generate, or serve with --no-continuous-batching; "
            "for many requests, ContinuousBatchingConfig(cpu_offload_space=GIB) keeps those in host memory that the pool has no room for"
        )
    resolved = formats.resolve(format)
    check_count("num_sink_tokens", num_sink_tokens)
    check_count("residual_length", residual_length)
    if (budget := option("attention_budget", attention_budget)) is not None:
        resolved = resolved.in_halves()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    check_config(model.config)
    if not model._can_set_attn_implementation():
        raise NotImplementedError(f"{type(model).__name__} does not go through transformers' attention interface")
    if not any(
        isinstance(part, PreTrainedModel) and "position_ids" in inspect.signature(part.forward).parameters for part in model.modules()
    ):
        raise NotImplementedError(
            f"{type(model).__name__} counts positions from the length of its cache and takes no position_ids: requests of a batch have "
            "lengths of their own; call generate"
        )
    chosen = check_format(resolved, head_dim_of(model.config.get_text_config(decoder=True)))
    if isinstance(statistics, str | Path):
        try:
            statistics = Statistics.load(statistics, chosen)
        except OSError as error:
            raise ValueError(f"statistics={str(statistics)!r} cannot be read: {error}") from error
    elif statistics is None:
        statistics = Statistics(chosen)
    elif not isinstance(statistics, Statistics):
        raise TypeError(f"statistics={statistics!r}: expected a file, or the statistics of an earlier run")
    if statistics.format != chosen:
        raise ValueError(f"statistics are of format {statistics.format.name!r}, not of {chosen.name!r}")
    if store is not None and not _is_store(store):
        raise TypeError(f"store must be a PrefixStore, got {store!r}")
    if store is not None and store.model is not model:
        raise ValueError("the store is of another model: make it with PrefixStore(model, ...)")
    if reproducible:
        check_reproducible(model, budget)
    if INIT in model.__dict__:
        raise ValueError("the model batches on compressed pages already: close that first")
    if not on_triton(model.device):
        kind = model.device.type
        warnings.warn(
            f"continuous batching on compressed pages has no kernels for {kind}: torch operations instead, which are slow", stacklevel=2
        )
    install()
    reading: dict[str, Any] = {"num_sink_tokens": num_sink_tokens, "residual_length": residual_length, "budget": budget, "store": store}
    reading["reproducible"] = reproducible
    batching = Batching(model, statistics, **reading)
    model.__dict__ |= {INIT: batching, GENERATE: batching.generate_batch}
    return batching


def check_config(config: PreTrainedConfig) -> None:
    """Raises NotImplementedError for models and releases of transformers that do not support compressed pages."""
    from . import transformers  # noqa: F401  # checks the release

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{config.model_type} is an encoder-decoder: transformers batches decoders only")
    if text.model_type in OWN_ATTENTION:
        raise NotImplementedError(f"{text.model_type} computes attention itself, not through transformers, and would not read the pages")
    if text.model_type in READS_THE_PAST:
        raise NotImplementedError(f"{text.model_type} computes with keys or values of the cache before attention: pages give it none")
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise NotImplementedError(
            f"{text.model_type} has {', '.join(sorted(kinds))} layers: transformers' continuous batching has no allocator for them, only "
            "for full and sliding attention, and passes its cache to attention alone"
        )
    if rank := getattr(text, "kv_lora_rank", None):
        raise NotImplementedError(
            f"{text.model_type} caches latents of {rank} channels and rotated keys of {text.qk_rope_head_dim} (MLA): transformers' "
            "continuous batching makes pages of num_key_value_heads heads with head_dim channels, and cannot store them"
        )
    try:
        alike = getattr(text, "global_head_dim", None) in (None, head_dim_of(text))
    except RuntimeError:  # transformers' error for an attribute that differs by layer
        alike = False
    if not alike:
        raise NotImplementedError(f"{text.model_type} has heads of several sizes: pages of all layers have one shape")
    if getattr(text, "num_kv_shared_layers", 0):
        raise NotImplementedError(f"{text.model_type} shares keys among layers: compressed pages hold each layer's own")


def check_reproducible(model: PreTrainedModel, budget: Any) -> None:
    """Raises NotImplementedError for models and options whose sums depend on a step's other tokens."""
    if budget is not None:
        raise NotImplementedError(
            "reproducible=True with an attention budget, which answers read and prompts do not: leave one of them out"
        )
    if experts := [name for name, x in model.named_parameters() if x.ndim > 2]:
        raise NotImplementedError(f"reproducible=True: {experts[0]} multiplies as many rows as a step has for it, as experts do")


def check_format(format: Format | FormatByLayer, head_dim: int | None) -> Format:
    """The format, if pages can hold it.

    Raises NotImplementedError for formats by layer, ValueError for a format that cannot hold `head_dim`.
    """
    if isinstance(format, FormatByLayer):
        raise NotImplementedError(f"format={format.name}: pages of all layers have one format; pass one")
    if head_dim:
        format.check(head_dim)
    return format


def _is_store(x: object) -> bool:
    from ..prefix import PrefixStore  # a room, which may not be there

    return isinstance(x, PrefixStore)
