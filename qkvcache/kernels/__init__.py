"""Attention on compressed keys and values."""

from . import ops
from .attend import attend, attend_observed
from .dispatch import (
    append,
    attend_on_codes,
    attend_on_store,
    column_mass,
    dense,
    encode_into,
    encodes,
    observe_on_codes,
    on_triton,
    place,
    prepare,
    step,
    unfold,
)
from .ops import dense_payload
from .prefill import prefill_with_lse
from .segments import Body, Exact, Packed, Payload, Segment, Side, mix, scores, slab_table
from .store import Store

__all__ = [
    "Body",
    "Exact",
    "Packed",
    "Payload",
    "Segment",
    "Side",
    "Store",
    "append",
    "attend",
    "attend_observed",
    "attend_on_codes",
    "attend_on_store",
    "column_mass",
    "dense",
    "dense_payload",
    "encode_into",
    "encodes",
    "mix",
    "observe_on_codes",
    "on_triton",
    "ops",
    "place",
    "prefill_with_lse",
    "prepare",
    "scores",
    "slab_table",
    "step",
    "unfold",
]
