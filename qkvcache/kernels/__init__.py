"""Attention on compressed keys and values."""

from .attend import attend, attend_observed
from .dispatch import attend_on_codes, column_mass, dense, encode_into, encodes, observe_on_codes, on_triton
from .prefill import prefill_with_lse
from .segments import Body, Exact, Packed, Payload, Segment, Side, mix, scores, slab_table

__all__ = [
    "Body",
    "Exact",
    "Packed",
    "Payload",
    "Segment",
    "Side",
    "attend",
    "attend_observed",
    "attend_on_codes",
    "column_mass",
    "dense",
    "encode_into",
    "encodes",
    "mix",
    "observe_on_codes",
    "on_triton",
    "prefill_with_lse",
    "scores",
    "slab_table",
]
