"""The quantized and exact tokens of one layer: pages, growth, counts on the device, eviction, crop, copies."""

from .by_head import StorageByHead
from .evicting import EvictingStorage, StaticLayout
from .head_pages import HeadPages
from .metadata import TokenMetadata
from .paged import GROUP, MAX_GROWTH, PAGE, RowPages, growth
from .pool import PageLayout, PagePool, aligned, selected
from .storage import Storage, attention_inputs_of, check_room
