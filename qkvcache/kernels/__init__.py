"""Attention on compressed keys and values."""

from .attend import attend
from .dispatch import attend_on_codes, dense, encode_into, encodes, on_triton
from .segments import Body, Exact, Packed, Payload, Segment, Side, mix, scores, slab_table

__all__ = [
    "Body",
    "Exact",
    "Packed",
    "Payload",
    "Segment",
    "Side",
    "attend",
    "attend_on_codes",
    "dense",
    "encode_into",
    "encodes",
    "mix",
    "on_triton",
    "scores",
    "slab_table",
]
