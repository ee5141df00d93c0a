"""What eviction refuses."""

from __future__ import annotations

from typing import Any

from ..attention.model_code import OWN_ATTENTION
from ..caches.refusals import Refusal

WISH = "Evict tokens: `policy`"


def rotates_sinks(policy: Any) -> bool:
    """Whether sinks are read at positions in the cache."""
    return getattr(policy, "positions", "original") == "cache"


def of_rope(policy: Any) -> str | None:
    """The option for which the rotation of keys must be known; None: there is none."""
    return "positions='cache'" if rotates_sinks(policy) else f"policy={policy.name}" if policy.needs_rope else None


def _on_model(why: str, applies: Any) -> Refusal:
    def of(cache: Any) -> bool:
        return cache.policy is not None and cache._config is not None and applies(cache._config)

    return Refusal(WISH, "policy={cache.policy.name} on {cache._config.model_type}", why, "leave out the policy", of)


def _compiled(what: str, why: str, instead: str, applies: Any) -> Refusal:
    def of(cache: Any) -> bool:
        return cache.compile and cache.policy is not None and applies(cache.policy)

    return Refusal(WISH, f"{what} with {{cache.fixed_by}}", why, instead, of)


def _without_config(what: str, why: str, applies: Any) -> Refusal:
    def of(cache: Any) -> bool:
        return cache.policy is not None and cache._config is None and applies(cache.policy)

    return Refusal(WISH, what, why, "pass model.config", of, ValueError)


def _heads(cache: Any) -> bool:
    heads = getattr(cache._config, "num_key_value_heads", None)
    return cache.policy is not None and isinstance(heads, int) and bool({len(x.heads) for x in cache.policy.budgets} - {0, heads})


REFUSALS = (
    Refusal(
        WISH, "offloading=True with a policy", "a layer that evicts stores few tokens, and must observe its attention", "leave it out",
        lambda cache: cache.offloading and cache.policy is not None,
    ),
    _compiled(
        "budget={cache.policy.budget}", "a share has no fixed size", "pass a number of tokens",
        lambda policy: any(budget.share for budget in policy.budgets),
    ),
    _compiled("positions='cache'", "sinks are rotated again at every step", "pass positions='original'", rotates_sinks),
    _compiled(
        "alpha_safeguard={cache.policy.alpha_safeguard}", "a compiled step has as many slots in each head", "leave out one of the two",
        lambda policy: policy.differs_by_head and policy.alpha_safeguard is not None,
    ),
    _compiled(
        "budgets of heads", "a compiled step has as many slots in each head", "leave out one of the two",
        lambda policy: policy.differs_by_head,
    ),
    _without_config(
        "policy={cache.policy.name} needs the config", "the layers must be known before they are filled",
        lambda policy: policy.second_reading,
    ),
    _without_config(
        "budgets by layer need the config", "it says which layers they are for",
        lambda policy: len(policy.budgets) > 1,
    ),
    _without_config("positions='cache' needs the config", "it says how keys are rotated", rotates_sinks),
    _without_config("policy={cache.policy.name} needs the config", "it says how keys are rotated", lambda policy: policy.needs_rope),
    _on_model(
        "ALiBi takes a key's position from its column, which evicted tokens would shift",
        lambda config: getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"),
    ),
    _on_model(
        "relative position bias takes a key's position from its column, which evicted tokens would shift",
        lambda config: getattr(config, "relative_attention_num_buckets", None) or getattr(config, "rel_extent", None),
    ),
    _on_model(
        "its attention does not go through transformers' AttentionInterface, so that no policy sees it",
        lambda config: config.model_type in OWN_ATTENTION,
    ),
    Refusal(
        WISH, "budgets for other heads than the {cache._config.num_key_value_heads} KV heads of {cache._config.model_type}",
        "each head needs its part", "pass one for each", _heads, ValueError,
    ),
    Refusal(
        WISH, "a policy with {cache.fixed_by} on {cache._config.model_type}", "its layers share keys", "leave out {cache.fixed_by}",
        lambda cache: cache.policy is not None and cache.compile and getattr(cache._config, "num_kv_shared_layers", 0),
    ),
)  # fmt: skip
