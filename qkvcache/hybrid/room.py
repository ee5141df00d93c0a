"""What this room registers with the core (`rooms.py`)."""

from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer

from ..layers.kinds import LayerKind
from .layer import HybridLayer

KINDS = (
    LayerKind(
        (LinearAttentionAndFullAttentionLayer, LinearAttentionAndStaticFullAttentionLayer),
        HybridLayer,
        options=lambda layer, config: {"number_of_states": layer.number_of_states},
    ),
)
