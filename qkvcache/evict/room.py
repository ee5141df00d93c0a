"""What this room registers with the core (`rooms.py`)."""

from .choices import CHOICES
from .maker import EvictingMaker
from .policies import REGISTRY, Budget, from_words
from .refusals import REFUSALS

__all__ = ["CHOICES", "MAKERS", "OPTIONS", "REFUSALS", "SAVED"]
MAKERS = (("policy", EvictingMaker),)
OPTIONS = (("policy", from_words),)
SAVED = (*REGISTRY.values(), Budget)
