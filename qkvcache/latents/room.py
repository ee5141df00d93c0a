"""What this room registers with the core (`rooms.py`)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, StaticIndexedLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from ..attention.model_code import channels_of_latents, has_latents
from ..caches.refusals import Refusal
from ..layers.kinds import LayerKind, head_dim_of
from .attention import absorb
from .indexed import IndexedLayer
from .layer import LatentLayer

WISH = "Models with latent attention or an indexer"


def _latents(layer: Any, config: PreTrainedConfig) -> dict[str, Any]:
    return {"latents": channels_of_latents(config) if absorb(config) else None}


def _indexed(layer: Any, config: PreTrainedConfig) -> dict[str, Any]:
    return _latents(layer, config) | ({"exact_indexer": True} if getattr(config, "index_kpool", None) else {})


def _head_dim(config: PreTrainedConfig) -> int | None:
    return None if channels_of_latents(config) else head_dim_of(config)


def _of_model(cache: Any, *names: str) -> bool:
    return any(getattr(cache._config, name, None) for name in names)


KINDS = (
    LayerKind((DynamicLayer, StockStaticLayer), LatentLayer, has_latents, _latents, _head_dim),
    LayerKind((DynamicIndexedLayer, StaticIndexedLayer), IndexedLayer, options=_indexed, head_dim=_head_dim),
)


def _ranked(why: str, applies: Any) -> Refusal:
    def of(cache: Any) -> bool:
        return cache.policy is not None and applies(cache)

    return Refusal(WISH, "policy={cache.policy.name} on {cache._config.model_type}", why, "leave out the policy", of)


REFUSALS = (
    Refusal(
        WISH, "attention_budget={cache.attention_budget} on {cache._config.model_type}", "its latents are read whole", "leave it out",
        lambda cache: cache.attention_budget is not None and cache._config is not None and absorb(cache._config),
    ),
    _ranked("its indexer selects keys by column", lambda cache: _of_model(cache, "index_topk", "indexer_budget")),
    _ranked(
        "it expands latents after the cache, so that attention does not see what is stored",
        lambda cache: cache._config is not None and has_latents(cache._config),
    ),
)  # fmt: skip
