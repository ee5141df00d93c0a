"""Errors of caches for arguments of the wrong type, unknown options, and models whose tokens cannot be evicted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from transformers import DynamicCache, PreTrainedConfig

from ..attention.latents import has_latents
from ..formats import Format, FormatByLayer
from ..formats.base import hint
from ..kernels import AttentionBudget
from ..kernels.pages import WHOLE
from ..policies import Policy, check_count
from ..releases import CACHE_ARGUMENT

LEAST_READ, LEAST_AUTO = 512, 2048
"""The fewest tokens that attention reads under a budget that is a share, and under "auto"."""
OWN_ATTENTION = frozenset((
    "autoformer", "big_bird", "blip_text_model", "clvp_decoder", "coarse_acoustics", "cpmant", "falcon", "fine_acoustics",
    "flaubert", "fsmt", "git", "gpt_neo", "gpt_neox_japanese", "imagegpt", "informer", "led", "megatron-bert", "mvp", "prophetnet",
    "reformer", "rembert", "roformer", "semantic", "speecht5", "tapas", "trocr", "xglm", "xlm",
)).union(() if CACHE_ARGUMENT == "cache" else ("codegen", "gptj"))  # fmt: skip
"""Model types of transformers that compute attention themselves. `_supports_attention_backend` is False on others, too (BART, Zamba)."""


def layer_indices(skip_layers: Iterable[int]) -> tuple[int, ...]:
    """`skip_layers` as a tuple. Raises TypeError for anything that is not iterable, for example a single index."""
    if not isinstance(skip_layers, Iterable):
        raise TypeError(f"skip_layers={skip_layers!r}: expected a tuple of layer indices, such as (0,) or (0, -1)")
    return tuple(skip_layers)


def budget_of(attention_budget: int | float | Literal["auto"] | None) -> AttentionBudget | None:
    """The tokens that attention reads. Raises TypeError for another type, ValueError for less than a token, and for a share that is not
    between 0 and 1."""
    if attention_budget is None:
        return None
    if attention_budget == "auto":
        return AttentionBudget(LEAST_AUTO, WHOLE // 4)
    if isinstance(attention_budget, bool) or not isinstance(attention_budget, int | float):
        raise TypeError(
            f"attention_budget={attention_budget!r}: expected a number of tokens, such as 4096, a share, such as 0.125, or 'auto'"
        )
    if isinstance(attention_budget, int):
        check_count("attention_budget", attention_budget, least=1)
        return AttentionBudget(attention_budget)
    if not 0 < attention_budget < 1:
        raise ValueError(f"attention_budget={attention_budget}: a share is between 0 and 1; pass a whole number for tokens")
    return AttentionBudget(LEAST_READ, math.ceil(attention_budget * WHOLE))


def refuse_unknown(cache: DynamicCache, options: Mapping[str, object], format: Format | FormatByLayer, policy: Policy | None) -> None:
    """Raises TypeError for the first of the unknown `options`; the message names the format or policy that has the
    option, or the nearest name."""
    for name, value in options.items():
        kinds = type(cache).__mro__[: type(cache).__mro__.index(DynamicCache)]
        known = dict.fromkeys(word for kind in kinds for word in _keywords(kind))
        fix = hint(name, known)
        for word, module, part in (("format", "formats", format), ("policy", "policies", policy)):
            if isinstance(part, Format | Policy) and name in _keywords(type(part)):
                fix = f"it is the {word}'s: CompressedCache(config, {word}={module}.{type(part).__name__}({name}={value!r}))"
        raise TypeError(f"{type(cache).__name__} has no option {name}={value!r}: {fix}")


def _keywords(kind: type) -> list[str]:
    return [name for name, at in inspect.signature(kind).parameters.items() if at.kind is not at.VAR_KEYWORD]


def why_not_evict(config: PreTrainedConfig) -> str | None:
    """The reason why tokens of this model cannot be evicted, or None."""
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi takes a key's position from its column, which evicted tokens would shift"
    if getattr(config, "relative_attention_num_buckets", None) or getattr(config, "rel_extent", None):
        return "relative position bias takes a key's position from its column, which evicted tokens would shift"
    if getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None):
        return "its indexer selects keys by column"
    if has_latents(config):
        return "it expands latents after the cache, so that attention does not see what is stored"
    if config.model_type in OWN_ATTENTION:
        return "its attention does not go through transformers' AttentionInterface, so that no policy sees it; leave out the policy"
    return None
