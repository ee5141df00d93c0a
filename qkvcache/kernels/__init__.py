"""Attention on compressed keys and values."""

from .attend import attend
from .segments import Exact, Packed, Payload, Segment, Side, mix, scores

__all__ = ["Exact", "Packed", "Payload", "Segment", "Side", "attend", "mix", "scores"]
