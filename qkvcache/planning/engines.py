"""The nearest settings of serving engines, in the names of vLLM 0.33 and SGLang 0.5."""

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
    "hadaquant_k3v3": "turboquant_3bit_nc",
}
"""vLLM's `--kv-cache-dtype` for each format."""
SGLANG = "fp8_e4m3"
"""SGLang's `--kv-cache-dtype` for every format, since its 4-bit formats run on Blackwell only."""


def vllm_flag(format: str | None) -> str:
    """The flag of `vllm serve` for a format; FP8 if vLLM does not have the format."""
    return f"--kv-cache-dtype {'auto' if format is None else VLLM.get(format, 'fp8_e4m3')}"


def sglang_flag(format: str | None, chat: bool = False) -> str:
    """The flag of `sglang.launch_server`; for `chat`, with prefixes stored in host memory."""
    return f"--kv-cache-dtype {'auto' if format is None else SGLANG}{' --enable-hierarchical-cache' if chat else ''}"
