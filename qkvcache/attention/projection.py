"""Norms of values in the output of their layer: the Gram matrices of the output projection."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the output projection in attention modules."""

_projections: weakref.WeakKeyDictionary[nn.Module, OutputProjection] = weakref.WeakKeyDictionary()


class OutputProjection:
    """The output projection of an attention module. All caches of a model share one object.

    `gram` fp32 `[Hq, D, D]`: `W W^T` for the rows `W` `[D, hidden]` of each query head in the transposed projection.
    The value `v` contributes a vector of norm `sqrt(v W W^T v)` to the output.
    """

    def __init__(self, gram: Tensor):
        self.gram = gram

    def __deepcopy__(self, memo: dict) -> OutputProjection:
        return self

    @staticmethod
    @torch.no_grad()
    def of(module: nn.Module, heads: int, dim: int) -> OutputProjection:
        """The output projection of attention `module` with `heads` query heads and values of `dim` channels; computed once, since weights
        are assumed to be constant.

        Raises NotImplementedError for a module without an output projection of `heads * dim` channels.
        """
        if module not in _projections:
            projection = next((getattr(module, name) for name in NAMES if isinstance(getattr(module, name, None), nn.Module)), None)
            if projection is None:
                raise NotImplementedError(
                    f"{type(module).__name__} has no output projection ({', '.join(NAMES)}): leave out the policy's option that needs it"
                )
            rows = transposed_weight(projection, heads * dim)
            if rows.shape[0] != heads * dim:
                raise NotImplementedError(
                    f"the output projection takes {rows.shape[0]} channels, the values of all query heads have {heads * dim}"
                )
            rows = rows.float().unflatten(0, (heads, dim))
            gram = torch.stack([each @ each.mT for each in rows])
            torch._dynamo.mark_static_address(gram)  # CUDA graphs would copy it at each replay
            _projections[module] = OutputProjection(gram)
        return _projections[module]


def transposed_weight(projection: nn.Module, channels: int, device: torch.device | None = None) -> Tensor:
    """The transposed weight `[channels, outputs]` of a projection of `channels`. That of a layer other than a plain
    `Linear`, which may be quantized, adapted, offloaded or divided among devices, is computed: its outputs for unit
    vectors, on `device` or where it has tensors."""
    weight: Any = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta:
        return weight.mT
    like = next((x for x in (*projection.parameters(), *projection.buffers()) if x.is_floating_point()), None)
    dtype = torch.float32 if like is None else like.dtype
    units = torch.eye(channels, dtype=dtype, device=device or (None if like is None else like.device))
    return projection(units) - projection(torch.zeros_like(units[:1]))
