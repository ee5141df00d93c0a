"""Many requests at once: compressed pages in transformers' continuous batching."""

from .context import Batching, continuous_batching
from .metrics import Metrics
from .statistics import Statistics

__all__ = ["Batching", "Metrics", "Statistics", "continuous_batching"]
