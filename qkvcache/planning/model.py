"""The shapes of a model's cache from its config: KV heads and channels of each layer, states of fixed size, bytes of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..attention.model_code import channels_of_latents, has_latents
from ..layers.kinds import head_dim_of

GROWING = {"full_attention", "sliding_attention", "chunked_attention", "reference_sliding_attention"}
STATES = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"}
EMPTY = {"moe", "mlp"}
"""Layer types in `config.layer_types`: those with keys and values, those with states of fixed size, and those with
neither."""


@dataclass(frozen=True)
class Shape:
    """One layer on one GPU: KV heads, query heads, channels of a key and of a value, and bytes of one row's state (linear
    attention). With latent attention there is one head, whose key is the latent and whose value is the rotated key."""

    heads: int
    query_heads: int
    head_dim: int
    value_dim: int
    state: int


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the decoder.

    Raises TypeError for an argument that is not a config, NotImplementedError for models whose cache cannot be computed
    from the config.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a transformers config such as model.config, got {type(config).__name__}")
    if config.is_encoder_decoder:
        raise NotImplementedError(
            f"planning for {config.model_type}, an encoder-decoder: the encoder's states stay dense and their length is not that of the "
            "context; measure cache.nbytes"
        )
    text = config.get_text_config(decoder=True)
    if has_latents(text) and (getattr(text, "index_head_dim", None) or not _keeps_latents(text)):
        raise NotImplementedError(
            f"planning for {text.model_type}: its latent attention (MLA) caches the keys of an indexer too, or expands latents before it "
            "caches them in this release of transformers; measure cache.nbytes"
        )
    if unknown := set(getattr(text, "layer_types", None) or ()) - GROWING - STATES - EMPTY:
        kinds = ", ".join(sorted(unknown))
        raise NotImplementedError(f"planning for {text.model_type}: what {kinds} layers store is unknown; measure cache.nbytes")
    return text


def _keeps_latents(text: PreTrainedConfig) -> bool:
    """Whether the model caches latents, and not what they expand to."""
    from ..latents.attention import absorb

    return absorb(text)


def shapes(config: PreTrainedConfig, itemsize: int, tensor_parallel: int = 1) -> list[Shape]:
    """The layers of the model on one of `tensor_parallel` GPUs. `itemsize`: bytes of an element in the model's dtype.

    Raises ValueError if KV heads do not divide among the GPUs, and the errors of `text_config`.
    """
    layers: Sequence[PreTrainedConfig] = text_config(config).per_layer_config
    return [_shape(layer, itemsize, tensor_parallel) for layer in layers]


def model_dtype(config: PreTrainedConfig, dtype: torch.dtype | str | None = None) -> torch.dtype:
    """The dtype `dtype`, or the dtype of this name; None: the config's, or bfloat16 if it has none.

    Raises TypeError for any other type, ValueError for anything but a floating-point dtype of torch.
    """
    name = text_config(config).dtype or config.dtype or torch.bfloat16 if dtype is None else dtype
    if not isinstance(name, torch.dtype | str):
        raise TypeError(f"dtype must be a torch dtype or its name, such as 'bfloat16', got {name!r}")
    resolved = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ValueError(f"dtype={name!r}: expected a floating-point dtype of torch, such as 'bfloat16', 'float16' or 'float32'")
    return resolved


def weights_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the model's weights in `dtype`, from its parameters on the meta device.

    Raises ValueError if they cannot be counted: for models that transformers does not know, and for quantized weights.
    """
    if getattr(config, "quantization_config", None):
        raise ValueError("the weights of this config are quantized: pass weights_memory=, the bytes that they take")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError) as error:
        raise ValueError(f"the weights of {config.model_type} cannot be counted ({error}): pass weights_memory=, in bytes") from error
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def activation_bytes(config: PreTrainedConfig, dtype: torch.dtype, tensor_parallel: int = 1) -> int | None:
    """Bytes that a gated MLP holds at once for each token of a step, over all GPUs: on each four vectors of the hidden size, and three of
    its part of the intermediate size. None where the config does not name them, and for experts, which read some of the tokens each."""
    text = text_config(config)
    hidden, intermediate = (getattr(text, name, None) for name in ("hidden_size", "intermediate_size"))
    experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    if experts or not isinstance(hidden, int) or not isinstance(intermediate, int):
        return None
    return (4 * hidden * tensor_parallel + 3 * intermediate) * dtype.itemsize


def has_unknown_states(config: PreTrainedConfig) -> bool:
    """Whether layers keep states of unknown size besides keys and values."""
    text = text_config(config)
    kinds = STATES & set(getattr(text, "layer_types", None) or ())
    return bool(kinds) and not (kinds == {"linear_attention"} and getattr(text, "linear_num_value_heads", None))


def has_biased_keys(config: PreTrainedConfig) -> bool:
    """Whether the config says that keys have biases. The attention of Qwen2 and the models made of it always
    has."""
    text = text_config(config)
    named = any(getattr(text, name, None) is True for name in ("attention_bias", "qkv_bias", "use_qkv_bias"))
    return named or text.model_type.startswith("qwen2")


def _shape(config: PreTrainedConfig, itemsize: int, tensor_parallel: int) -> Shape:
    heads, head_dim, latents = _kv_heads(config), head_dim_of(config), channels_of_latents(config)
    if latents:  # each GPU holds all of them
        return Shape(1, config.num_attention_heads // tensor_parallel, *latents, 0)
    if not isinstance(heads, int) or head_dim is None:
        raise NotImplementedError(f"planning for {config.model_type}: its config names no KV heads and head_dim; measure cache.nbytes")
    if heads % tensor_parallel:
        wide = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"tensor_parallel={tensor_parallel} does not divide {heads} KV heads: expected one of {wide}")
    query_heads = getattr(config, "num_attention_heads", None) or heads
    return Shape(heads // tensor_parallel, query_heads // tensor_parallel, head_dim, head_dim, _state_bytes(config, itemsize))


def _kv_heads(config: PreTrainedConfig) -> int | None:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # Falcon, GPT-BigCode; later Falcons expand their heads before the cache
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)


def _state_bytes(config: PreTrainedConfig, itemsize: int) -> int:
    """Bytes of one row's state in a gated delta rule (Qwen3-Next and later): the last inputs of a convolution in the
    model's dtype, and an fp32 matrix for each head. Every tensor-parallel rank is assumed to hold all of it."""
    value_heads = getattr(config, "linear_num_value_heads", None)
    if not value_heads:
        return 0
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + value_heads * value_dim
    return channels * config.linear_conv_kernel_dim * itemsize + value_heads * key_dim * value_dim * 4
