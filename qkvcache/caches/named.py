"""The named caches: thin subclasses that choose a format."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..formats import FP8, NVFP4, Format, HadaQuant, Int4, Int8, TurboQuant
from ..formats.base import check_count
from .arguments import Named, layer_indices
from .base import CompressedCache

Init = TypeVar("Init", bound=Callable[..., None])


class Options(TypedDict, total=False):
    """The options of CompressedCache that every named cache passes on."""

    residual_length: int
    skip_layers: Iterable[int]
    max_length: int | None
    compile: bool
    offloading: bool


class FormatOptions(Options, total=False):
    """The options of CompressedCache that a cache with a format of its own passes on."""

    policy: str | Named | None
    num_sink_tokens: int
    attention_budget: int | float | Literal["auto"] | None
    offload_pages: bool


def makes(name: str) -> Callable[[Init], Init]:
    """Decorates the `__init__` of a cache that makes `name` itself: its signature lists the options of
    CompressedCache in place of `**options`, and `name` among the options raises TypeError."""

    def decorate(init: Init) -> Init:
        own, general = (inspect.signature(one).parameters for one in (init, CompressedCache.__init__))
        listed = {**own, **{option: general[option] for option in general if option not in own and option != name}}

        @functools.wraps(init)
        def checked(self: CompressedCache, *args: Any, **options: Any) -> None:
            if name in options:
                words = " or ".join(f"{word}=" for word in own if word not in general and word != "options")
                raise TypeError(f"{type(self).__name__} makes its {name} itself: pass {words} in place of {name}={options[name]!r}")
            init(self, *args, **options)

        parameters = [parameter for parameter in listed.values() if parameter.kind is not parameter.VAR_KEYWORD]
        checked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


class QuantizedPerTokenCache(CompressedCache):
    """INT8, FP8 or INT4 with one scale for each token, computed when it is stored, without calibration data
    (vLLM RFC #37319 and what was merged from it).

        QuantizedPerTokenCache(model.config, dtype="int8")

    Args:
        dtype: "int8", "fp8" (e4m3), "fp8_e5m2" or "int4".
        scale: the values that share a scale: "token_head" (one token of one head), "token" (one token over all heads,
            int8 and fp8), or "tensor" (all tokens, of which larger ones saturate, fp8).
        symmetric: False adds a zero point (int8 and int4). For int4, True is the scheme of PR #5 (144 bytes at head_dim
            128) and False the rule that vLLM merged (136 bytes).
        center: keys are quantized around their mean. False is the authors' form, which models with biased keys (Qwen2) break.
        **options: options of CompressedCache.

    Raises:
        ValueError: a combination for which there is no format.
    """

    @makes("format")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        dtype: Literal["int8", "fp8", "fp8_e5m2", "int4"] = "int8",
        scale: Literal["token_head", "token", "tensor"] = "token_head",
        symmetric: bool = True,
        center: bool = True,
        **options: Unpack[FormatOptions],
    ):
        format = _per_token_format(dtype, scale, symmetric, center)
        super().__init__(config, format=format, **options)


def _per_token_format(dtype: str, scale: Literal["token_head", "token", "tensor"], symmetric: bool, center: bool) -> Format:
    if dtype == "int8":
        return Int8(scale=scale, symmetric=symmetric, center=center)  # type: ignore[arg-type]  # "tensor" is refused there
    if dtype in ("fp8", "fp8_e5m2"):
        if not symmetric:
            raise ValueError(f"symmetric=False for dtype={dtype!r}: float codes have no zero point; use dtype='int8' or 'int4'")
        return FP8(dtype="e5m2" if dtype == "fp8_e5m2" else "e4m3", scale=scale, center=center)
    if dtype == "int4":
        if scale != "token_head":
            raise ValueError(f"scale={scale!r} for dtype='int4': expected 'token_head'")
        return Int4(rule="hadamard" if symmetric else "vllm", center=center)
    raise ValueError(f"dtype={dtype!r}: expected 'int8', 'fp8', 'fp8_e5m2' or 'int4'")


class NVFP4Cache(CompressedCache):
    """NVFP4 in software on any device: E2M1 codes with E4M3 scales for 16 channels, 144 bytes a token and head at head_dim 128.

    Args:
        scale_search: how a block's scale is chosen. "mse" (default) takes the scale of least error, "four_over_six"
            (vLLM #45187) the better of two; "amax" (the format `nvfp4`, as its authors define it) does not
            search. A search makes storing slower; bytes and reading are the same.
        center: keys are quantized around their mean. False is the authors' form, which models with biased keys (Qwen2) break.
        **options: options of CompressedCache.
    """

    @makes("format")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        scale_search: Literal["amax", "four_over_six", "mse"] = "mse",
        center: bool = True,
        **options: Unpack[FormatOptions],
    ):
        super().__init__(config, format=NVFP4(scale_search=scale_search, center=center), **options)


class TurboQuantCache(CompressedCache):
    """TurboQuant (arXiv 2504.19874, vLLM #38479): Hadamard-rotated keys on Lloyd-Max levels, uniform values, no calibration data.

    Args:
        preset: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc": 198, 134, 118 and 102 bytes a token and head at head_dim 128.
        boundary_layers: number of full-attention layers at either end that stay exact (vLLM keeps 2 for dense models).
            Needs the config, and layers between the ends.
        center: keys are quantized around their mean. False is the authors' form, which models with biased keys (Qwen2) break.
        **options: options of CompressedCache.
    """

    @makes("format")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        preset: Literal["k8v4", "4bit_nc", "k3v4_nc", "3bit_nc"] = "4bit_nc",
        boundary_layers: int = 0,
        center: bool = True,
        **options: Unpack[FormatOptions],
    ):
        if boundary_layers:
            options["skip_layers"] = (*layer_indices(options.get("skip_layers", ())), *_boundary(config, boundary_layers))
        super().__init__(config, format=TurboQuant(preset=preset, center=center), **options)


def _boundary(config: PreTrainedConfig | None, count: int) -> list[int]:
    """Indices of the first and last `count` layers that hold keys and values for the whole context."""
    check_count("boundary_layers", count, of="layers")
    if config is None:
        raise ValueError(f"boundary_layers={count} needs the config, to know which layers are last")
    layers = DynamicCache(config=config).layers
    full = [i for i, layer in enumerate(layers) if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    if full and 2 * count >= len(full):
        raise ValueError(
            f"boundary_layers={count} at either end leaves none of the {len(full)} full-attention layers ({', '.join(map(str, full))}) "
            f"compressed: the most is {(len(full) - 1) // 2}"
        )
    return full[:count] + full[-count:]


class HadaQuantCache(CompressedCache):
    """Hadamard-rotated keys and values on Lloyd-Max levels around their means: less error for the same bytes,
    no calibration data. With 4 and 4 bits, `TurboQuantCache` is as close and faster.

    Args:
        key_bits, value_bits: 2 to 4 each. At head_dim 128 a token of one head takes 132 bytes with 4 and 4 bits, 116 with 4 and 3, 100 with
            3 and 3, 68 with 2 and 2.
        center: keys and values are quantized around their means. False quantizes them as they are.
        **options: options of CompressedCache.
    """

    @makes("format")
    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        key_bits: Literal[2, 3, 4] = 4,
        value_bits: Literal[2, 3, 4] = 3,
        center: bool = True,
        **options: Unpack[FormatOptions],
    ):
        super().__init__(config, format=HadaQuant(key_bits, value_bits, center), **options)
