"""Attention on compressed keys and values."""

from . import ops
from .attend import attend, attend_observed
from .dispatch import (
    arrive,
    attend_on_buffers,
    attend_on_codes,
    column_mass,
    dense,
    dense_payload,
    encode_into,
    encodes,
    launch_of_step,
    observe_on_codes,
    on_triton,
    prepare,
    retire,
    step,
    unfold,
    whole,
)
from .prefill import prefill_with_lse
from .retire import Places, take
from .segments import Body, Buffers, Exact, Packed, Pair, Payload, Segment, Side, chunk_table, mix, number, scores

__all__ = [
    "Body",
    "Buffers",
    "Exact",
    "Packed",
    "Pair",
    "Payload",
    "Places",
    "Segment",
    "Side",
    "arrive",
    "attend",
    "attend_observed",
    "attend_on_buffers",
    "attend_on_codes",
    "chunk_table",
    "column_mass",
    "dense",
    "dense_payload",
    "encode_into",
    "encodes",
    "launch_of_step",
    "mix",
    "number",
    "observe_on_codes",
    "on_triton",
    "ops",
    "prefill_with_lse",
    "prepare",
    "retire",
    "scores",
    "step",
    "take",
    "unfold",
    "whole",
]
