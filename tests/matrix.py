"""Every kind of format, every cache and model once. A line here puts a new one under every test that is about all of them."""

from __future__ import annotations

import collections
import functools
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import transformers as hf
from transformers.cache_utils import DynamicLayer

from qkvcache import CompressedCache, HadaQuantCache, NVFP4Cache, QuantizedPerTokenCache, TurboQuantCache, formats, policies
from qkvcache.attention import install
from qkvcache.formats import FP8, NVFP4, HadaQuant, Identity, Int4, Int8, TurboQuant
from tests.seeds import SEED

FORMAT_ERRORS: dict[formats.Format, float] = {
    Identity(): 0.0,
    Int8(): 0.0070,
    Int8("token"): 0.0083,
    Int8(symmetric=False): 0.0065,
    Int8(center=False): 0.0070,
    Int8(halves=True): 0.0070,
    FP8(): 0.0275,
    FP8(scale="token"): 0.0280,
    FP8(scale="tensor"): 0.0280,
    FP8("e5m2", scale="tensor"): 0.0555,
    Int4(): 0.102,
    Int4("vllm"): 0.106,
    Int4("group"): 0.102,
    NVFP4("amax"): 0.099,
    NVFP4("four_over_six"): 0.091,
    NVFP4(): 0.085,
    TurboQuant("k8v4"): 0.106,
    TurboQuant("k8v4", center=False): 0.106,
    TurboQuant("4bit_nc"): 0.106,
    TurboQuant("k3v4_nc"): 0.194,
    TurboQuant("3bit_nc"): 0.226,
    TurboQuant("3bit_nc", center=False): 0.226,
    HadaQuant(4, 4): 0.101,
    HadaQuant(4, 3): 0.194,
    HadaQuant(3, 3): 0.194,
    HadaQuant(3, 2): 0.37,
    HadaQuant(2, 2): 0.37,
}
"""Formats, registered or not, and the error allowed to keys and to values on N(0, 1) at head_dim 128: RMS of the difference over RMS
of the data."""

FORMATS = {format.name: format for format in FORMAT_ERRORS}
ALL = bool(os.environ.get("QKVCACHE_TEST_ALL"))
"""Whether covering sets are full products: `make test-all`."""


def slowly(values: Iterable, fast: Iterable) -> list:
    """All values with `ALL`, else those that are `fast`."""
    fast = list(fast)
    return [value for value in values if ALL or value in fast]


COVER = slowly(
    FORMATS,
    ["identity", "int8", "int8_asymmetric", "fp8_token", "fp8_tensor", "fp8_e5m2_tensor", "int4", "int4_vllm", "nvfp4_mse",
     "turboquant_4bit_nc", "turboquant_3bit_nc", "hadaquant_k3v2", "int8_halves"],
)  # fmt: skip
"""Formats that have each kind of code, of scale, of group and of rotation once at least; for properties at their lowest level."""
THREE = slowly(FORMATS, ["fp8_token", "turboquant_3bit_nc", "hadaquant_k3v2"])
"""Formats for properties that a lower level has tested: bytes with scales that heads share, packed bits, codes of both sides rotated."""


def covering(*axes: Iterable, strength: int = 2) -> list[tuple]:
    """Rows of the product of `axes` in which every combination of values of any `strength` axes occurs, and each value about as often as
    others; all rows with `ALL`."""
    rows = list(itertools.product(*axes))
    if ALL:
        return rows

    def parts(row: tuple) -> set[tuple]:
        return set(itertools.combinations(enumerate(row), strength))

    missing, used, found = set().union(*map(parts, rows)), collections.Counter(), []
    while missing:
        row = max(rows, key=lambda row: (len(parts(row) & missing), -sum(used[part] for part in enumerate(row))))
        found.append(row)
        missing -= parts(row)
        used.update(enumerate(row))
    return found


def by_layer(config: hf.PreTrainedConfig) -> list[formats.Format]:
    """Formats for the full-attention layers of a model, each other than the one before: with a mean or without, shared scales, of 2 to 8
    bits."""
    layers = hf.DynamicCache(config=config).layers
    count = sum(isinstance(layer, DynamicLayer) and not layer.is_sliding for layer in layers)
    chosen = HadaQuant(3, 2), FP8(scale="token"), TurboQuant("k8v4", center=False)
    return list(itertools.islice(itertools.cycle(chosen), count))


CACHES = {
    "compressed": functools.partial(CompressedCache, format="turboquant_4bit_nc"),
    "int8": functools.partial(QuantizedPerTokenCache, dtype="int8"),
    "int8_asymmetric": functools.partial(QuantizedPerTokenCache, dtype="int8", symmetric=False),
    "fp8": functools.partial(QuantizedPerTokenCache, dtype="fp8"),
    "fp8_e5m2": functools.partial(QuantizedPerTokenCache, dtype="fp8_e5m2"),
    "int4": functools.partial(QuantizedPerTokenCache, dtype="int4"),
    "int4_vllm": functools.partial(QuantizedPerTokenCache, dtype="int4", symmetric=False),
    "nvfp4": NVFP4Cache,
    "turboquant": TurboQuantCache,
    "hadaquant": functools.partial(HadaQuantCache, key_bits=3, value_bits=3),
    "turboquant_3bit": functools.partial(TurboQuantCache, preset="3bit_nc", boundary_layers=1),
    "by_layer": lambda config, **options: CompressedCache(config, format=by_layer(config), **options),
}
"""Named caches as users make them: `CACHES[name](config, **zones)`."""


@dataclass(frozen=True, kw_only=True)
class KeyNorm(policies.Policy):
    """A policy of a user's own: it keeps keys of small norm."""

    def score(self, tokens: policies.Arrivals) -> torch.Tensor:
        return -torch.linalg.vector_norm(tokens.keys, dim=-1, dtype=torch.float32)


POLICIES = {
    "sink_window": lambda budget: policies.SinkWindow(window_length=budget - 4),
    "sliding_window": lambda budget: policies.SlidingWindow(window_length=budget),
    "h2o": lambda budget: policies.H2O(budget=budget),
    "h2o_sum": lambda budget: policies.H2O(budget=budget, reduce="sum", num_sink_tokens=1, recent=3),
    "h2o_decay": lambda budget: policies.H2O(budget=budget, decay=0.9, recent=2),
    "tova": lambda budget: policies.TOVA(budget=budget, num_sink_tokens=2, recent=3),
    "tova_paper": lambda budget: policies.TOVA(budget=budget, num_sink_tokens=0, recent=0),
    "snapkv": lambda budget: policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3),
    "keydiff": lambda budget: policies.KeyDiff(budget=budget, recent=3),
    "key_norm": lambda budget: KeyNorm(budget=budget, recent=3),
    "random": lambda budget: policies.Random(budget=budget, recent=2),
    "expected_attention": lambda budget: policies.ExpectedAttention(budget=budget, recent=3, n_future_positions=16),
    "expected_attention_epsilon": lambda budget: policies.ExpectedAttention(budget=budget, recent=2, n_future_positions=9, epsilon=0.1),
    "custom": lambda budget: policies.Custom(function=lambda tokens: tokens.score * tokens.value_norm, budget=budget, recent=2),
}
"""Policies with every option, of an interval of 1: `POLICIES[name](budget)`, of 12 tokens at least."""

SHARED = {
    "snapkv": lambda budget: policies.AdaKV(policies.SnapKV(budget=budget, interval=1, window_size=4, recent=3)),
    "snapkv_interval": lambda budget: policies.AdaKV(policies.SnapKV(budget=budget, interval=3, window_size=4, recent=2), 0.3),
    "h2o": lambda budget: policies.AdaKV(policies.H2O(budget=budget, recent=2), 0.5),
    "tova": lambda budget: policies.AdaKV(policies.TOVA(budget=budget, num_sink_tokens=0, recent=0), 0.0),
    "expected_attention": lambda budget: policies.AdaKV(policies.ExpectedAttention(budget=budget, recent=3, n_future_positions=16), 0.1),
    "custom": lambda budget: policies.AdaKV(policies.Custom(function=lambda t: t.score * t.value_norm, budget=budget, recent=2)),
}
"""Policies whose heads share the budget: `SHARED[name](budget)`."""

CUT_FREE = ["sink_window", "sliding_window", "key_norm", "random"]
"""Those whose tokens do not depend on how a text is cut into steps."""


# Models: tiny, random, fp32. Head dims and windows differ on purpose; the window is short, so that every test crosses it.

_TINY = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # attention far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_HEAD_DIM = {name: value for name, value in _TINY.items() if name != "head_dim"}
_HYBRID = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARED_KV = {
    "num_hidden_layers": 6,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_STATE = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_ENCODER = {"d_model": 64, "decoder_start_token_id": 0, "pad_token_id": 0, "vocab_size": 100, "eos_token_id": 2}
_WHISPER = {
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 96))},
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "max_target_positions": 128,
    "init_std": 0.2,
    "bos_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

MODELS = {
    "llama": lambda: hf.LlamaConfig(**_TINY),
    "qwen3": lambda: hf.Qwen3Config(**_TINY | {"head_dim": 64}),
    "gemma3": lambda: hf.Gemma3TextConfig(**_TINY | _HYBRID),
    "gemma2": lambda: hf.Gemma2Config(**_TINY | _HYBRID, attn_logit_softcapping=2.0, query_pre_attn_scalar=32),
    "gpt_oss": lambda: hf.GptOssConfig(**_TINY | _HYBRID, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: hf.Phi3Config(**_NO_HEAD_DIM | {"hidden_size": 384, "initializer_range": 0.1}),  # head_dim 96
    "mistral": lambda: hf.MistralConfig(**_TINY, sliding_window=16),
    "gpt2": lambda: hf.GPT2Config(vocab_size=100, n_positions=512, n_embd=64, n_layer=3, n_head=2, initializer_range=0.2, eos_token_id=2),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_TINY | {"num_hidden_layers": 4}, **_LINEAR, **_EXPERTS, rms_norm_eps=1e-3),
    "falcon_h1": lambda: hf.FalconH1Config(**_TINY | {"num_hidden_layers": 2}, **_STATE),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**_NO_HEAD_DIM | {"num_key_value_heads": 4}, **_LATENT, **_ROUTED, first_k_dense_replace=1),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **_TINY | _SHARED_KV | {"intermediate_size": [96] * 6}, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(**_TINY | _SHARED_KV, global_head_dim=64),
}
ENCODER_DECODERS = {
    "t5": lambda: hf.T5Config(**_ENCODER, d_ff=96, num_layers=2, num_heads=2, d_kv=32, initializer_factor=2.0),
    "whisper": lambda: hf.WhisperConfig(**_ENCODER | _WHISPER),
}
_SMALL = {name: value for name, value in _NO_HEAD_DIM.items() if name != "max_position_embeddings"} | {"num_hidden_layers": 2}
_EMBEDDED = {
    "vocab_size": 100,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE_ATTENTION = {
    "minicpm3": lambda: hf.MiniCPM3Config(**_SMALL | {"num_key_value_heads": 4}, **_LATENT),
    "jetmoe": lambda: hf.JetMoeConfig(**_SMALL, kv_channels=16, num_local_experts=4),
    "gptj": lambda: hf.GPTJConfig(**_EMBEDDED, n_embd=64, rotary_dim=8, n_positions=256),
    "bloom": lambda: hf.BloomConfig(**_EMBEDDED, hidden_size=64),
    "mpt": lambda: hf.MptConfig(vocab_size=100, d_model=64, n_layers=2, n_heads=4, max_seq_len=128, initializer_range=0.2, use_cache=True),
}
"""Models that expand what the cache returns, or attend to it on their own, beside `deepseek_v3`."""
ATTENTION = ("sdpa", "eager", "flex_attention", "qkvcache")
UNSUPPORTED = {  # by transformers
    ("gemma2", "sdpa"),
    ("gpt_oss", "sdpa"),
    ("gpt_oss", "flex_attention"),
    ("gpt2", "flex_attention"),
    ("qwen3_next", "flex_attention"),
    ("falcon_h1", "flex_attention"),
}


def model(name: str, attention: str = "sdpa", layers: int | None = None) -> hf.PreTrainedModel:
    """The model `name`, in inference mode, always with the same weights. `layers`: how many it has, where fewer say as much."""
    return _model(name, attention, layers)


@functools.lru_cache
def _model(name: str, attention: str, layers: int | None) -> hf.PreTrainedModel:
    install()  # registers "qkvcache"
    config: hf.PreTrainedConfig = (MODELS | ENCODER_DECODERS | DENSE_ATTENTION)[name]()
    config.num_hidden_layers = layers or config.num_hidden_layers
    config._attn_implementation = attention
    torch.manual_seed(SEED)
    kind = {"t5": hf.T5ForConditionalGeneration, "whisper": hf.WhisperForConditionalGeneration}.get(name)
    return (kind(config) if kind else hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)).eval()
