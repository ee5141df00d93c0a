"""Layers with a recurrent state beside attention whose tokens a policy evicts."""

from __future__ import annotations

from ..evict.layer import EvictingLayer
from .layer import HybridLayer


class EvictingHybridLayer(HybridLayer, EvictingLayer):  # type: ignore[misc,override]
    """An `EvictingLayer` with the states of a `HybridLayer`."""
