"""Rotation of cached keys, which carry the rotary embedding (RoPE) of their positions, to other positions.

The pairs of channels and the angle of each pair come from the model's own code, not from a list of models: its rotary
module has the frequencies, and its `apply_rotary_pos_emb`, applied to a probe, shows the pairs. If the probe does not
confirm them, NotImplementedError is raised.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..attention.model_code import code_of
from .dispatch import rotate

LAYER_TYPE = "full_attention"  # the layers whose keys are cached here; some models have a rotation for each type of layer
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb", "_apply_rotary_emb")
PROBE_AT, PROBE_BY, PROBE_TOLERANCE = 7, 1009, 1e-2  # the fp32 angles of the models err by 1e-4 there, a wrong pairing by 1


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of a model's keys: the pairs of channels, and the angle of each pair for one position.

    `inv_freq` is fp32 or fp64 `[R/2]` on the CPU, of the first R channels. Pairs are (2i, 2i+1) if `interleaved` (GPT-J, Cohere), else
    (i, i + R/2) (Llama).
    """

    inv_freq: Tensor
    interleaved: bool
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Rope:
        """The rotation of the full-attention layers of a model with this config.

        Raises:
            NotImplementedError: no RoPE; frequencies that change with the length ("dynamic", "longrope"); positions of
                several axes; RoPE in some layers only; latent attention (MLA); or code that applies RoPE in an unknown
                way.
        """
        config = config.get_text_config(decoder=True)
        name = config.model_type
        parameters = getattr(config, "rope_parameters", None)
        if not parameters:
            raise NotImplementedError(f"{name!r} has no rope_parameters in its config: its keys are not rotated by a known RoPE")
        nested = any(isinstance(value, dict) for value in parameters.values())
        own = parameters.get(LAYER_TYPE) if nested else parameters
        if not own:
            raise NotImplementedError(f"{name!r} has RoPE for {sorted(parameters)} and none for {LAYER_TYPE!r}")
        kind = own.get("rope_type", "default")
        if "dynamic" in kind or kind == "longrope":
            raise NotImplementedError(f"{name!r} has rope_type {kind!r}: its frequencies change with the length")
        if getattr(config, "qk_rope_head_dim", None):
            raise NotImplementedError(
                f"{name!r} has latent attention: it rotates {config.qk_rope_head_dim} channels that are not the first"
            )
        several_axes = f"{name!r} has multimodal RoPE: its positions have several axes, a gap is not one number"
        if any("mrope" in key for key in own):
            raise NotImplementedError(several_axes)
        module = code_of(config)
        if module is None:
            raise NotImplementedError(f"{name!r}: no code of the model is known that shows how it rotates its keys")
        apply = next((getattr(module, function) for function in APPLY if hasattr(module, function)), None)
        rotary = _rotary(config, module)
        if apply is None or rotary is None:
            raise NotImplementedError(f"{name!r}: no rotary module and function ({', '.join(APPLY)}) in {module.__name__}")
        if any("mrope" in key for key in vars(rotary)):
            raise NotImplementedError(several_axes)
        if where := _exception(module, apply.__name__):
            raise NotImplementedError(f"{name!r} rotates keys in some layers only ({where}), and which ones is unknown")
        return _probed(name, rotary, apply, LAYER_TYPE if nested else None)

    def frequencies(self, device: torch.device) -> Tensor:
        """`inv_freq` in fp64 on `device`, always the same tensor, as CUDA graphs need it."""
        if device not in self._on_device:
            with torch.inference_mode(False):  # it must also serve callers that differentiate
                self._on_device[device] = self.inv_freq.to(device, torch.float64, copy=True)
            if device.type != "meta":
                torch._dynamo.mark_static_address(self._on_device[device])
        return self._on_device[device]

    def rotate(self, keys: Tensor, by: int | Tensor) -> Tensor:
        """`keys` `[B, H, T, D]` rotated forward by `by` positions, an int or a tensor `[B]` or `[B, T]`, in the keys' dtype.

        Angles are computed in fp64, which distant positions need, and the rotation in fp32 at least. Channels beyond R are unchanged.
        Raises ValueError for keys with fewer than R channels and for another shape of `by`.
        """
        batch, _, tokens, head_dim = keys.shape
        channels = 2 * len(self.inv_freq)
        if channels > head_dim:
            raise ValueError(f"the model rotates {channels} channels, the keys have {head_dim}: they are of another model")
        device = torch.device("cpu") if keys.device.type == "mps" else keys.device  # MPS has no fp64
        if isinstance(by, Tensor):
            if by.shape not in ((), (batch,), (batch, tokens)):
                raise ValueError(f"by has shape {list(by.shape)}: keys {list(keys.shape)} take an int, [{batch}] or [{batch}, {tokens}]")
            by = by.to(device) if by.dim() == 2 else by.to(device).reshape(-1, 1)
        else:
            by = torch.full((1, 1), by, dtype=torch.int64, device=device)
        return rotate(keys, by, self.frequencies(device), self.interleaved)


def _rotary(config: PreTrainedConfig, module: ModuleType) -> nn.Module | None:
    """The model's rotary module, without weights. Its constructor takes the model's config; those of encoders take another one."""
    kinds = [k for n, k in vars(module).items() if "Rotary" in n and inspect.isclass(k) and issubclass(k, nn.Module)]
    wanted = {kind.__name__ for kind in type(config).__mro__}
    fitting = [kind for kind in kinds if _config_class(kind) in wanted] or kinds
    if len(fitting) != 1:
        return None
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            return fitting[0](config)
    except (AttributeError, KeyError, TypeError) as error:
        raise NotImplementedError(f"{config.model_type!r}: {fitting[0].__name__} is not made from its config ({error})") from error


def _config_class(kind: type) -> str:
    """The name of the class that the constructor takes as `config`."""
    parameter = inspect.signature(kind).parameters.get("config")
    wants = parameter.annotation if parameter else None
    return wants if isinstance(wants, str) else getattr(wants, "__name__", "")


@functools.lru_cache(maxsize=32)
def _exception(module: ModuleType, function: str) -> str | None:
    """The first class in `module` that may cache keys without rotating them: it calls `function` only under an `if`, or
    never. None if there is none."""
    for kind in ast.parse(inspect.getsource(module)).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        calls = _calls(kind, function)
        under = {call: ast.unparse(node.test) for node in ast.walk(kind) if isinstance(node, ast.If) for call in _calls(node, function)}
        if calls and under.keys() == set(calls):
            return f"`if {under[calls[0]]}` in {kind.name}"
        if not calls and any(re.search("cache|past_key_value", ast.unparse(call.func)) for call in _calls(kind, "update")):
            return f"not in {kind.name}"
    return None


def _calls(node: ast.AST, function: str) -> list[ast.Call]:
    """The calls of a function, or of a method, below `node`."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [call for call in calls if function in (getattr(call.func, "id", None), getattr(call.func, "attr", None))]


@torch.inference_mode(False)
@torch.no_grad()
def _probed(name: str, rotary: nn.Module, apply: Any, layer_type: str | None) -> Rope:
    """The Rope of the model, checked with a probe: rotating a key from one position to another must give the model's
    own result."""
    frequencies = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    inv_freq = getattr(rotary, frequencies, None)
    if inv_freq is None:
        raise NotImplementedError(f"{name!r}: {type(rotary).__name__} holds no {frequencies}")
    keys = torch.randn(1, 1, 1, 2 * len(inv_freq), generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)

    def model(position: int) -> Tensor:
        cos, sin = rotary(keys, torch.tensor([[position]], dtype=torch.int64, device="cpu"), *([layer_type] if layer_type else []))
        offered = {"q": keys, "k": keys, "x": keys, "cos": cos, "sin": sin}
        rotated = apply(**{key: offered[key] for key in inspect.signature(apply).parameters if key in offered})
        return rotated[1] if isinstance(rotated, tuple) else rotated

    try:
        before, after = model(PROBE_AT), model(PROBE_AT + PROBE_BY)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise NotImplementedError(f"{name!r} calls {apply.__name__} in an unknown way ({error})") from error
    for interleaved in (False, True):
        rope = Rope(inv_freq.detach().clone(), interleaved)
        if after.shape == keys.shape and torch.allclose(rope.rotate(before, PROBE_BY), after, rtol=0, atol=PROBE_TOLERANCE):
            return rope
    raise NotImplementedError(f"{name!r}: {apply.__name__} rotates neither pairs (i, i + R/2) nor (2i, 2i+1) by its frequencies")
