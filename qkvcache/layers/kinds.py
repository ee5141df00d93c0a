"""The kinds of layers of this library, each with the layers of transformers in whose place it comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import StaticLayer as StockStaticLayer

from ..rooms import registered
from .compressed import CompressedLayer


def head_dim_of(config: PreTrainedConfig) -> int | None:
    """The number of channels of a cached key; None if the config does not tell."""
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    if head_dim is None and getattr(config, "num_attention_heads", None):
        head_dim = config.hidden_size // config.num_attention_heads
    return head_dim if isinstance(head_dim, int) else None


def no_options(layer: Any, config: PreTrainedConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer.

    Args:
        stock: classes of transformers' layers in whose place it comes.
        make: the class, called with the arguments of `CompressedLayer` and with `options(layer, config)`.
        serves: whether it comes in the place of these layers in a model with this text config.
        options: further arguments for the layer in place of `layer`, whose own config is given.
        head_dim: the channels of a key in a layer with this config, which the format must hold; None: not known.
    """

    stock: tuple[type, ...]
    make: Callable[..., CompressedLayer]
    serves: Callable[[PreTrainedConfig], bool] = lambda config: True
    options: Callable[[Any, PreTrainedConfig], dict[str, Any]] = no_options
    head_dim: Callable[[PreTrainedConfig], int | None] = head_dim_of


COMPRESSED = LayerKind((DynamicLayer, StockStaticLayer), CompressedLayer)


def kinds_of(config: PreTrainedConfig) -> dict[type, LayerKind]:
    """The kind that comes in place of each class of transformers' layers in a model with this text config: a room's, where there is one."""
    kinds = [COMPRESSED, *(kind for kind in registered("KINDS") if kind.serves(config))]
    return {stock: kind for kind in kinds for stock in kind.stock}


def stock_of(layer: type) -> tuple[type, ...]:
    """The classes of transformers' layers in whose place layers of the class `layer` come."""
    kinds = [kind for kind in (*registered("KINDS"), COMPRESSED) if issubclass(layer, kind.make)]  # type: ignore[arg-type]
    return max(kinds, key=lambda kind: len(kind.make.__mro__)).stock  # type: ignore[attr-defined]
