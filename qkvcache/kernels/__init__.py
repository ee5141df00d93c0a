"""Attention on compressed keys and values."""

from .attend import attend
from .segments import Exact, Packed, Payload, Side, mix, scores

__all__ = ["Exact", "Packed", "Payload", "Side", "attend", "mix", "scores"]
