"""`qkvcache.policies`, as users name it: the policies of the room that evicts."""

from .evict.policies import *  # noqa: F403
from .evict.policies import __all__ as __all__
