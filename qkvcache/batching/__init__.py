"""Compressed pages for transformers' continuous batching, in which many requests run at once."""

from .context import Batching, continuous_batching
from .metrics import Metrics
from .statistics import Statistics

__all__ = ["Batching", "Metrics", "Statistics", "continuous_batching"]
