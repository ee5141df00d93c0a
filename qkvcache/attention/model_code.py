"""Readers of a config: what the code of its model does."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType

from transformers import MODEL_MAPPING, PreTrainedConfig

from ..releases import CACHE_ARGUMENT

OWN_ATTENTION = frozenset((
    "autoformer", "big_bird", "blip_text_model", "clvp_decoder", "coarse_acoustics", "cpmant", "falcon", "fine_acoustics",
    "flaubert", "fsmt", "git", "gpt_neo", "gpt_neox_japanese", "imagegpt", "informer", "led", "megatron-bert", "mvp", "prophetnet",
    "reformer", "rembert", "roformer", "semantic", "speecht5", "tapas", "trocr", "xglm", "xlm",
)).union(() if CACHE_ARGUMENT == "cache" else ("codegen", "gptj"))  # fmt: skip
"""Model types of transformers that compute attention themselves. `_supports_attention_backend` is False on others, too (BART, Zamba)."""


def code_of(config: PreTrainedConfig) -> ModuleType | None:
    """The module beside the config's module or, for a model that shares the code of another one (Sarvam uses
    DeepSeek's code, EXAONE uses Llama's), where transformers finds it; None if there is none."""
    kinds = type(config).__mro__[: type(config).__mro__.index(PreTrainedConfig)]
    for kind in kinds:
        package, _, name = kind.__module__.rpartition(".")
        if name.startswith("configuration_"):
            with contextlib.suppress(ImportError):
                return importlib.import_module(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    return next((sys.modules[MODEL_MAPPING[kind].__module__] for kind in kinds if kind in MODEL_MAPPING), None)


def channels_of_latents(config: PreTrainedConfig) -> tuple[int, int] | None:
    """The channels of a latent and of a rotated key in a layer with this config; None if it caches no latents."""
    rank = getattr(config, "kv_lora_rank", None)
    return (rank, config.qk_rope_head_dim) if rank else None


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether layers of the model with this text config cache latents. Their channels may differ (Dots3)."""
    return any(channels_of_latents(layer) for layer in (config.per_layer_config if config.is_heterogeneous else [config]))
