"""The quantized and exact tokens of one layer: growth, counts on the device, eviction, crop, copies."""

from .base import check_room, differ
from .chunks import GROUP, MAX_GROWTH, PAGE, Chunks, block_of, growth
from .evicting import EvictingStorage
from .head_pages import HeadPages
from .metadata import TokenMetadata
from .storage import Storage, attention_inputs_of
