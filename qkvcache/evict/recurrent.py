"""Layers with a recurrent state beside attention that evict tokens."""

from __future__ import annotations

from ..hybrid.layer import HybridLayer
from .layer import EvictingLayer


class EvictingHybridLayer(HybridLayer, EvictingLayer):  # type: ignore[misc,override]
    """An `EvictingLayer` with the states of a `HybridLayer`."""
