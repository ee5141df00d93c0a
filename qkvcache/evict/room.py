"""What this room registers with the core (`rooms.py`)."""

from .maker import EvictingMaker
from .policies import REGISTRY, Budget
from .refusals import REFUSALS

__all__ = ["MAKERS", "REFUSALS", "SAVED"]
MAKERS = (("policy", EvictingMaker),)
SAVED = (*REGISTRY.values(), Budget)
