"""What this room registers with the core (`rooms.py`)."""

from ..caches.refusals import OFFLOAD, Refusal
from .arguments import budget_of

WISH = "Read the tokens that matter: `attention_budget`"

OPTIONS = (("attention_budget", budget_of),)
REFUSALS = (
    Refusal(
        WISH, "attention_budget={cache.attention_budget} with policy={cache.policy.name}", "a policy evicts the tokens", "leave one out",
        lambda cache: cache.attention_budget is not None and cache.policy is not None, ValueError,
    ),
    Refusal(
        OFFLOAD, "offload_pages=True without attention_budget", "each step would copy all tokens", "pass one, such as 4096",
        lambda cache: cache.offload_pages and cache.attention_budget is None, ValueError,
    ),
    Refusal(
        OFFLOAD, "offload_pages=True with offloading=True", "offloading moves whole layers", "leave one out",
        lambda cache: cache.offload_pages and cache.offloading, ValueError,
    ),
)  # fmt: skip
