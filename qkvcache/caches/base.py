"""`CompressedCache`: a cache in any format for any model, to pass as `cache`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from .. import attention, formats, kernels
from ..formats import FormatByLayer, FormatLike
from ..formats.base import check_count
from ..formats.outlying import Int8Keys
from ..kernels.inputs import RunningStep
from ..layers.compressed import CompressedLayer, rows_of
from ..layers.static_sliding import StaticSlidingLayer
from ..releases import CACHE_ARGUMENT, warn_if_newer
from ..rooms import feature, option
from .arguments import Named, layer_indices, refuse_unknown
from .biased import BiasedKeys, OutlyingKeys
from .makers import maker_of
from .memory import Memory, measured
from .refusals import refuse
from .reread import CALLER, length_for
from .steps import Steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompressedCache(DynamicCache):
    """A KV cache that stores tokens compressed, attends to them while compressed, and can retain some of them only.

        model.generate(**inputs, cache=CompressedCache(model.config, format="turboquant_4bit_nc"))
        model.generate(**inputs, cache=CompressedCache(model.config, format="fp8", policy=policies.KeyDiff(budget=2048)))

    Layers with full attention are compressed, also those that hold a recurrent state beside it; sliding,
    linear and shared layers are layers of transformers. Every feature of `generate` works: batches with
    padding, beams, several turns, deepcopy; and where all tokens stay, assisted decoding and offloading.

    Args:
        config: the model's config. Optional where every layer has full attention.
        format: a registry name (`qkvcache.formats.REGISTRY`) or a Format; a sequence of these, one for each
            full-attention layer, including the layers of `skip_layers`; or the path of a calibration file
            with one format for each layer (`qkvcache calibrate`). None, where only some tokens are retained,
            keeps these in the model's dtype. A format with `center=False` warns once if the keys of a prompt
            have a large mean. With others of fewer than 8 bits, a layer whose keys have an outlying channel
            stores its keys in int8, and the cache warns once; formats of a sequence or of a file stay as they
            are.
        policy: selects the tokens that are retained: a registry name (`qkvcache.policies.REGISTRY`) or a Policy; None
            retains all. Exact zones then hold only tokens that it protects: at most its `num_sink_tokens`
            first and its `recent` last ones.
        num_sink_tokens: number of first tokens that stay in the model's dtype (attention sinks).
        residual_length: number of last tokens that stay in the model's dtype; nothing else improves quality as much
            (eval/README.md). With `num_sink_tokens=0, residual_length=0` the cache is the format as its
            authors define it; the tokens of the running step still attend to each other exactly.
        skip_layers: indices of layers to leave uncompressed, negative ones from the end.
        max_length: the most tokens that may be seen. Storage for them is allocated at once, at fixed addresses, so that `generate` compiles
            its steps and replays them as CUDA graphs, as with a StaticCache. None: the cache grows.
        compile: whether `generate` compiles the steps of a growing cache, which takes half a minute once: pages are
            added between steps, and the number of mask columns is a power of two. With `max_length` steps are
            always compiled. Needs formats with kernels, and attention other than eager.
        attention_budget: tokens that each query and KV head reads of those that are quantized, beside the exact ones: a number of tokens,
            or a share of them between 0 and 1; "auto": a quarter, at least 2,048, which recalls what all
            recall in `eval/results/attention_budget.jsonl`; None: all. Every token is kept: each step chooses
            the blocks of 32 tokens with the largest weights, by the keys' codes
            (`docs/guides/long-context.md`), once for each 32 new tokens. Until there are more tokens than the
            budget, attention reads everything, as it always does for more than 512 new tokens at once (parts
            of a prompt), and on a GPU where choosing takes longer than reading.
        offload_pages: keeps quantized tokens in host memory, and on the GPU what each step reads: what chooses blocks (of 4-bit keys in two
            planes and of `int8` the upper halves), the exact tokens, and the blocks that the last steps read,
            twice the budget. Needs a budget.
        offloading: keeps all layers except the running one in host memory, as DynamicCache does.

    Raises:
        ValueError: an unknown format or one that cannot hold the model's head_dim; a number of formats that differs
            from the number of layers; a file that is not a calibration file; negative sizes; a layer index
            that the model lacks.
        TypeError: `config`, `format`, `policy` or `skip_layers` of another type, neither format nor policy, an unknown option.
        NotImplementedError: options, or an option and a model, that do not go together (`docs/reference/limits.md`).
    """

    seen_ids: Tensor | None = None
    """The first tokens that the cache has seen, int64 `[B, T]`, as far as a call that had their ids told (`attention/continued.py`)."""

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        format: FormatLike | None = None,
        policy: str | Named | None = None,
        num_sink_tokens: int = 4,
        residual_length: int = 64,
        skip_layers: Iterable[int] = (),
        max_length: int | None = None,
        compile: bool = False,
        attention_budget: int | float | Literal["auto"] | None = None,
        offload_pages: bool = False,
        offloading: bool = False,
        **unknown: Never,
    ):
        self._maker = maker_of(self, policy=policy)
        if format is None and self._maker.rule is None:
            raise TypeError("pass a format such as format='turboquant_4bit_nc', a policy such as policy='keydiff', or both")
        self.format = formats.resolve("identity" if format is None else format)
        self.policy = self._maker.policy
        refuse_unknown(self, unknown, {"format": ("formats", self.format)} | self._maker.parts)
        check_count("num_sink_tokens", num_sink_tokens)
        check_count("residual_length", residual_length)
        if max_length is not None:
            check_count("max_length", max_length, least=1)
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a transformers config such as model.config, got {type(config).__name__}")
        skip_layers = layer_indices(skip_layers)
        self._config = None if config is None else config.get_text_config(decoder=True)
        self._encoder_decoder = config is not None and config.is_encoder_decoder
        self._layer_options = {"num_sink_tokens": num_sink_tokens, "residual_length": residual_length}
        self.max_length, self.compile, self.offloading = max_length, compile or max_length is not None, offloading
        self.fixed_by = "compile=True" if max_length is None else "max_length"
        """The option for which tensors have fixed addresses."""
        self.skip_layers = skip_layers
        self.attention_budget, self.offload_pages = attention_budget, offload_pages
        budget, self._pages = option("attention_budget", attention_budget), {}
        refuse(self)
        if budget is not None:
            self.format, self._pages = self.format.in_halves(), {"new_pages": budget.pages(offload_pages)}
        self._running = RunningStep()
        self._outlying_keys = OutlyingKeys()
        self._maker.prepare()
        if self._config is None:
            if skip_layers:
                raise ValueError(f"skip_layers={skip_layers} needs the config, to know how many layers there are")
            if isinstance(self.format, FormatByLayer):
                raise ValueError(f"{len(self.format.formats)} formats by layer need the config, to know which layers they are for")
            Cache.__init__(self, layer_class_to_replicate=self._maker.new, offloading=offloading)  # type: ignore[arg-type]
        else:
            Cache.__init__(self, self._maker.stock(self._config), offloading=offloading, offload_only_non_sliding=False)
            self._maker.swap(self.layers, self._config)
        # transformers makes one mask for all layers without a window, sized for the first of them: it needs a column
        # for each token that any of them holds. Layers with other columns take the running step's from it.
        self._keeps_all = next((i for i, layer in enumerate(self.layers) if _keeps_all(layer)), None)
        ours = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        if self._keeps_all is not None and self.compile and ((ours and self._maker.rule) or max_length is None):
            raise NotImplementedError(
                f"{self.fixed_by} on a model with layers other than full attention alone (layer {self._keeps_all}: "
                f"{type(self.layers[self._keeps_all]).__name__}), whose masks have another length: leave out {self.fixed_by}"
            )
        if max_length is not None and (self._keeps_all is not None or getattr(self._config, "model_type", None) == "bloom"):
            for layer in ours:  # layers of transformers, and BLOOM's ALiBi, use as many columns for a prompt
                layer.prompt_columns = max_length
        self._steps = Steps()
        self._biased_keys = BiasedKeys()
        attention.install()
        kernels.load_ahead()
        warn_if_newer()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Stores keys and values as transformers' Cache does. Raises ValueError for an encoder's states,
        which would be appended to the decoder's, and for a step after one that ended between two layers;
        RuntimeError if two threads use the cache at once."""
        # Outside of an EncoderDecoderCache, a step updates the same layer twice in a row.
        compiling = torch.compiler.is_compiling()
        if self._encoder_decoder and not compiling and layer_idx == self._steps.last and len(self.layers) > 1:
            self._refuse_bare()
        if layer_idx >= len(self.layers) and self.layer_class_to_replicate is None:
            raise ValueError(
                f"layer {layer_idx} of a cache for {len(self.layers)} layers: it was made for another model; make a new one from the "
                "config of this one"
            )
        if compiling:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._steps.enter(self.layers, layer_idx, "tokens")
        result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._steps.leave(layer_idx)
        if key_states.shape[2] > 1:
            self._biased_keys.await_padding(key_states, layer_idx, self.layers[layer_idx], result[0])
        return result

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        """Stores the state of a convolution as transformers' Cache does. Raises as `update` does."""
        return self._enter(super().update_conv_state, conv_states, layer_idx, state_idx, f"convolution {state_idx}", **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs) -> Tensor:
        """Stores the state of a recurrence as transformers' Cache does. Raises as `update` does."""
        return self._enter(super().update_recurrent_state, recurrent_states, layer_idx, state_idx, f"recurrence {state_idx}", **kwargs)

    def _enter(self, update: Callable[..., Tensor], states: Tensor, layer_idx: int, state_idx: int, what: str, **kwargs) -> Tensor:
        """Calls `update` of a state, `what`, of layer `layer_idx`."""
        if torch.compiler.is_compiling():
            return update(states, layer_idx, state_idx, **kwargs)
        self._steps.enter(self.layers, layer_idx, what)
        result = update(states, layer_idx, state_idx, **kwargs)
        self._steps.leave(layer_idx)
        return result

    def compress(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        tokenizer: Any = None,
        prefill_chunk_size: int | None = None,
        progress: bool = True,
    ) -> None:
        """Fills the empty cache with a context, which the model reads twice, to score tokens by the second
        reading (KVzip). `generate` with ids that begin with the context continues from it. The context is
        held uncompressed until the second reading ends.

        Args:
            model: the model that the cache is for.
            ids: the context, int64 `[B, T]`.
            attention_mask: `[B, T]`, 0 for padding.
            tokenizer: encodes the instruction to repeat the context; None: there is no instruction.
            prefill_chunk_size: the number of tokens that the first reading reads at a time, as in `generate`; None: all. 8,192 of 32,768
                tokens halve the peak of memory and take 1.13 times as long.
            progress: whether progress is shown on stderr.

        Raises:
            TypeError: ids or a chunk size of another type.
            ValueError: a cache that does not read twice or that holds tokens, shapes that do not match, or a chunk size below 1.
            NotImplementedError: compiled steps of a model with layers of other kinds than full attention, or layers with attention and a
                recurrent state in one.
        """
        self._maker.compress(model, ids, attention_mask, tokenizer, prefill_chunk_size, progress)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens; 0 keeps them all. A step that ended between two layers is taken back before."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:  # before any layer is touched
            raise ValueError(f"crop({tokens_to_remove}): pass a negative number, the count of tokens to remove from the end")
        ahead = self._steps.ahead(self.layers)
        for layer, more in zip(self.layers, ahead, strict=True):
            _check_crop(layer, tokens_to_remove - more)
        for layer, more in zip(self.layers, ahead, strict=True):
            layer.crop(tokens_to_remove - more)  # type: ignore[union-attr]
        self._steps.take_over()
        if self.seen_ids is not None:
            self.seen_ids = self.seen_ids[:, : int(self.get_seq_length())]

    def __deepcopy__(self, memo: dict) -> CompressedCache:
        """A copy that can be written outside of inference mode, even if this cache cannot."""
        with torch.inference_mode(False):
            made = self.__class__.__new__(self.__class__)
            memo |= {id(self): made, id(self._config): self._config}
            made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return made

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the cache to a safetensors file of at most about `nbytes` bytes, for `load`. The file has
        the stored tokens of all rows, the options of the cache and the sizes of its model, and is in place
        once it is complete. `torch.save(cache, path)` saves every cache, by pickling.

        Raises:
            NotImplementedError, before anything is written: a cache that was made without a config or with options of other classes
                than the classes of qkvcache, a preallocated cache with an indexer, sliding layers or layers
                whose tokens do not all stay, padded rows in such layers.
            OSError: the file cannot be written.
        """
        feature("saving").save(self, path)

    @staticmethod
    def load(
        path: str | PathLike[str], config: PreTrainedConfig, *, device: str | torch.device | Sequence[str | torch.device] = "cpu"
    ) -> CompressedCache:
        """Returns the cache that `save` wrote, of any class, as a CompressedCache that goes on as the saved one.

        Args:
            path: the file.
            config: the config of the model. Its weights are not compared: they must be those with which the cache was filled.
            device: of all layers, or one for each layer.

        Raises:
            ValueError: a file that is no saved cache, of another model, of another version, or damaged; another number of devices than
                layers.
            FileNotFoundError: there is no file.
        """
        return feature("saving").load(CompressedCache, path, config, device)

    @classmethod
    def from_cache(cls, cache: Cache, config: PreTrainedConfig, *, attention_mask: Tensor | None = None, **options: Any) -> Self:
        """Returns a new cache with the tokens of a DynamicCache that was filled elsewhere, which stays as it
        is. The tokens are stored as the tokens of one prompt.

            CompressedCache.from_cache(dynamic_cache, model.config, format="turboquant_4bit_nc")

        Args:
            cache: a DynamicCache, with layers of any kind that transformers makes for the model.
            config: the config of the model.
            attention_mask: `[B, T]` of the tokens in the cache, 0 for padding; None: there is no padding.
            **options: options of the class, such as `format`.

        Raises:
            TypeError: a cache of another kind.
            ValueError: another number of layers than the model has, a mask of another shape, more tokens than `max_length`.
            NotImplementedError: options that need the attention of the tokens; layers that hold no dense tokens.
        """
        convert = feature("convert")
        convert.check_source(cache)
        made = cls(config, **options)
        made._maker.check_source()
        convert.take(made, cache, attention_mask)
        return made

    def fork(self, n: int) -> list[CompressedCache]:
        """Returns `n` copies that share the stored tokens of compressed layers until one of them writes to a
        page: a branch costs what differs. Caches with `max_length` or `compile=True`, whose tensors have
        fixed addresses, are copied. Raises TypeError or ValueError for an `n` that is not a count of 1 or
        more."""
        check_count("n", n, least=1)
        forks = [copy.deepcopy(self, {id(self.layers): self._forked_layers()}) for _ in range(n)]
        for cache in forks:
            for layer in cache.layers:
                if isinstance(layer, CompressedLayer):
                    layer.running = cache._running
        return forks

    def _forked_layers(self) -> list[Any]:
        with torch.inference_mode(False):
            return [layer.fork() if isinstance(layer, CompressedLayer) else copy.deepcopy(layer) for layer in self.layers]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The mask sizes, as in transformers' Cache. Raises ValueError for a step without tokens, which
        `generate` makes if a prompt is shorter than the cache."""
        if not torch.compiler.is_compiling() and not query_length:
            raise ValueError(
                f"no token comes after the {self.get_seq_length(layer_idx)} that the cache has seen: for another prompt call reset(), or "
                "pass a new cache; to go on, pass the whole text, longer than the cache"
            )
        if not torch.compiler.is_compiling():
            self._steps.masked()
        if self.compile and not torch.compiler.is_compiling():  # all layers make room before a compiled step
            self._steps.check(self.layers)
            by_column = None if self._config is None else "flash" not in (self._config._attn_implementation or "")
            for layer in self.layers:
                if isinstance(layer, CompressedLayer):
                    layer.reserve(query_length)
                    layer.mask_by_column = by_column
        if self._keeps_all is not None and isinstance(self.layers[layer_idx], CompressedLayer):
            layer_idx = self._keeps_all
        return super().get_mask_sizes(query_length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0):
        """The tokens seen, as in transformers' Cache. Raises ValueError if Whisper asks an empty cache,
        because it would replace the cache by its own."""
        length = super().get_seq_length(layer_idx)
        if torch.compiler.is_compiling():
            return length
        caller = sys._getframe(1)  # through an EncoderDecoderCache, Whisper is the caller's caller
        if self._encoder_decoder and not length and caller.f_globals.get("__name__") == "transformers.models.whisper.modeling_whisper":
            self._refuse_bare()
        return length_for(self, length, caller) if caller.f_code.co_name == CALLER else length

    def _refuse_bare(self) -> Never:
        raise ValueError(
            "an encoder-decoder model keeps its encoder's states apart: pass "
            f"EncoderDecoderCache({type(self).__name__}(config, ...), DynamicCache()) as {CACHE_ARGUMENT}"
        )

    def get_query_offset(self, layer_idx: int = 0):
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.query_offset() if isinstance(layer, CompressedLayer) else super().get_query_offset(layer_idx)

    def early_initialization(self, *args, **kwargs) -> None:
        """Allocates storage before the first tokens, as in transformers' Cache; also after `reset`, for
        another batch size."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer | StaticSlidingLayer) and layer.supports_early_init:
                layer.is_initialized = layer.is_initialized and layer.get_seq_length() > 0
        super().early_initialization(*args, **kwargs)

    def reset(self) -> None:
        """Removes all tokens; the cache can then be used for another prompt and another batch size.

        Without it, another prompt is appended to the tokens that the cache has seen. `attach`,
        `custom_generate` and `PrefixStore` compare token ids and raise ValueError. `generate` alone has no
        ids to compare: it raises ValueError for a prompt of at most half as many tokens as the cache has
        seen, or of as many; it warns of others that are not longer; another prompt that is longer is not
        noticed.
        """
        super().reset()
        self._steps, self.seen_ids = Steps(), None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders the rows, as in transformers' Cache."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.seen_ids = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row, as in transformers' Cache."""
        super().batch_repeat_interleave(repeats)
        self.seen_ids = None

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps the rows `indices`, as in transformers' Cache. Raises ValueError if there are none."""
        rows_of(indices, max((layer.rows for layer in self.layers if isinstance(layer, CompressedLayer)), default=2**20))  # before any
        super().batch_select_indices(indices)
        self.seen_ids = None

    @property
    def is_initialized(self) -> bool:
        """Whether the layers that can have storage before the first tokens have it."""
        layers = [layer for layer in self.layers if isinstance(layer, CompressedLayer) or getattr(layer, "supports_early_init", True)]
        return bool(layers) and all(layer.is_initialized for layer in layers)  # type: ignore[union-attr]

    @property
    def nbytes(self) -> int:
        """Bytes of all live tensors of the cache."""
        return self.memory().total

    def memory(self) -> Memory:
        """The bytes of the cache by role, measured."""
        return measured(self.layers)

    def stored_length(self, layer_idx: int = 0) -> int:
        """The number of tokens that layer `layer_idx` stores, in the head that stores most. `get_seq_length`
        counts the tokens seen."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, CompressedLayer):
            return layer.stored_length()
        if layer is None:
            return self.get_seq_length(layer_idx)
        keys = getattr(layer, "keys", None)
        return 0 if keys is None or not keys.numel() else keys.shape[-2]

    def kept_positions(self, layer_idx: int = 0) -> Tensor:
        """Positions of the tokens that layer `layer_idx` retains, ascending, int32 `[B, H, T]`; -1 fills rows and heads that retain fewer.

        A position is the rank of a token in its row, padding left out. Raises ValueError for a layer that is
        empty or retains all tokens.
        """
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, CompressedLayer):
            raise ValueError(f"layer {layer_idx} retains all tokens")
        return layer.positions()

    def __repr__(self) -> str:
        memory = self.memory()
        tokens = max((layer.get_seq_length() for layer in self.layers if hasattr(layer, "get_seq_length")), default=0)
        compressed = sum(isinstance(layer, CompressedLayer) and not isinstance(layer.format, formats.Identity) for layer in self.layers)
        options = {name: part for name, (_, part) in self._maker.parts.items()}
        options |= {"attention_budget": self.attention_budget, "offload_pages": self.offload_pages or None}
        shown = "".join(f", {name}={x}" for name, x in (options | self._layer_options).items() if x is not None)
        counts = {"compressed": compressed, **self._maker.counts(self.layers)}
        counts = {name: count for name, count in counts.items() if count} or {"compressed": 0}
        layers = ", ".join(f"{count} of {len(self.layers)} {name}" for name, count in counts.items())
        formats_of = (getattr(layer, "format", None) for layer in self.layers)
        changed = [str(i) for i, format in enumerate(formats_of) if isinstance(format, Int8Keys)]
        int8 = f" (int8 keys in layer{'s' * (len(changed) > 1)} {', '.join(changed)})" if changed else ""
        return (
            f"{type(self).__name__}(format={self.format.name}{int8}{shown}, "
            f"layers={layers}, tokens={tokens}, bytes={memory.total:,}, ratio={memory.ratio:.2f})"
        )


def _keeps_all(layer: Any) -> bool:
    """Whether `layer` is a full-attention layer of transformers: it holds each token."""
    return isinstance(layer, DynamicLayer | StockStaticLayer) and not layer.is_sliding and not isinstance(layer, CompressedLayer)


def _check_crop(layer: Any, tokens_to_remove: int) -> None:
    """Raises NotImplementedError if the layer cannot return to the state before its last `-tokens_to_remove` tokens."""
    if isinstance(layer, CompressedLayer | StaticSlidingLayer):
        layer.check_crop(tokens_to_remove)
    if not tokens_to_remove:
        return
    recurrent = any(getattr(layer, "is_recurrent_states_initialized", {}).values())
    full = isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window
    if recurrent or ((full or hasattr(layer, "conv_states")) and not layer.record_past):
        raise NotImplementedError(
            f"crop({tokens_to_remove}): {type(layer).__name__} holds no earlier state; to go on from a part of a text, use a PrefixStore"
        )
