"""Attention on compressed keys and values."""

from . import ops
from .attend import attend, attend_observed
from .dispatch import (
    append,
    arrive,
    attend_on_codes,
    attend_on_store,
    column_mass,
    dense,
    encode_into,
    encodes,
    observe_on_codes,
    on_triton,
    prepare,
    retire,
    step,
    unfold,
)
from .ops import dense_payload
from .prefill import prefill_with_lse
from .retire import Places, take
from .segments import Body, Exact, Packed, Payload, Segment, Side, mix, number, scores, slab_table
from .store import Store

__all__ = [
    "Body",
    "Exact",
    "Packed",
    "Payload",
    "Places",
    "Segment",
    "Side",
    "Store",
    "append",
    "arrive",
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
    "number",
    "observe_on_codes",
    "on_triton",
    "ops",
    "prefill_with_lse",
    "prepare",
    "retire",
    "scores",
    "slab_table",
    "step",
    "take",
    "unfold",
]
