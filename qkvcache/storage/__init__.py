"""The quantized and exact tokens of one layer: pages, growth, counts on the device, crop, copies."""

from .paged import GROUP, MAX_GROWTH, PAGE, RowPages, growth
from .pool import PageLayout, PagePool, aligned, selected
from .storage import Storage, attention_inputs_of, check_room
