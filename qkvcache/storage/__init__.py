"""The quantized and exact tokens of one layer: pages, growth, counts on the device, what is evicted."""

from .chunks import GROUP, MAX_GROWTH, PAGE, Chunks, block_of, growth
from .counter import Counter, check_room
from .evicting import EvictingStorage, slots_of
from .ledger import Ledger
from .storage import Storage, differ, group_of, payload_of

__all__ = [
    "GROUP",
    "MAX_GROWTH",
    "PAGE",
    "Chunks",
    "Counter",
    "EvictingStorage",
    "Ledger",
    "Storage",
    "block_of",
    "check_room",
    "differ",
    "group_of",
    "growth",
    "payload_of",
    "slots_of",
]
