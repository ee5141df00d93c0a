"""The nearest setting of a serving engine, for those who move to one: names as vLLM 0.33 and SGLang 0.5 spell them."""

from __future__ import annotations

VLLM = {
    "int8": "int8_per_token_head",
    "fp8": "fp8_per_token_head",
    "int4": "int4_per_token_head",
    "int4_vllm": "int4_per_token_head",
    "nvfp4": "nvfp4",
    "nvfp4_four_over_six": "nvfp4_4over6",
    "turboquant_k8v4": "turboquant_k8v4",
    "turboquant_4bit_nc": "turboquant_4bit_nc",
    "turboquant_k3v4_nc": "turboquant_k3v4_nc",
    "turboquant_3bit_nc": "turboquant_3bit_nc",
    "nvfp4_mse": "nvfp4_4over6",
    "hadaquant_k4v4": "turboquant_4bit_nc",
    "hadaquant_k4v4_trellis": "turboquant_4bit_nc",
    "hadaquant_k3v3_trellis": "turboquant_3bit_nc",
}
"""`--kv-cache-dtype` of vLLM for our formats."""
SGLANG = "fp8_e4m3"
"""That of SGLang, whose 4-bit formats are for Blackwell only."""


def vllm_flag(format: str | None) -> str:
    """What to pass to `vllm serve` for a format of ours; FP8 where vLLM has no such format."""
    return f"--kv-cache-dtype {'auto' if format is None else VLLM.get(format, 'fp8_e4m3')}"


def sglang_flag(format: str | None, chat: bool = False) -> str:
    """What to pass to `sglang.launch_server`; for `chat`, with the store of prefixes in host memory."""
    return f"--kv-cache-dtype {'auto' if format is None else SGLANG}{' --enable-hierarchical-cache' if chat else ''}"
