"""The check that a model's tokens can be evicted: its attention must go through transformers and must not depend on the
columns of keys."""

from __future__ import annotations

from transformers import PreTrainedConfig

OWN_ATTENTION = frozenset((
    "autoformer", "big_bird", "blip_text_model", "clvp_decoder", "coarse_acoustics", "codegen", "cpmant", "falcon", "fine_acoustics",
    "flaubert", "fsmt", "git", "gpt_neo", "gpt_neox_japanese", "gptj", "imagegpt", "informer", "led", "megatron-bert", "mvp", "prophetnet",
    "reformer", "rembert", "roformer", "semantic", "speecht5", "tapas", "trocr", "xglm", "xlm",
))  # fmt: skip
"""Model types of transformers that compute attention themselves. `_supports_attention_backend` is False on others, too (BART, Zamba)."""


def why_not_evict(config: PreTrainedConfig) -> str | None:
    """The reason why tokens of this model cannot be evicted, or None."""
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "ALiBi takes a key's position from its column, which evicted tokens would shift"
    if getattr(config, "relative_attention_num_buckets", None):
        return "relative position bias takes a key's position from its column, which evicted tokens would shift"
    if getattr(config, "index_topk", None):
        return "its indexer selects keys by column"
    if getattr(config, "kv_lora_rank", None):
        return "it expands latents after the cache, so that attention does not see what is stored"
    if config.model_type in OWN_ATTENTION:
        return "its attention does not go through transformers' AttentionInterface, so that no policy sees it; leave out the policy"
    return None
