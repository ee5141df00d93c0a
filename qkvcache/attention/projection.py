"""Norms of values in the output of their layer: the Gram matrices of the output projection."""

from __future__ import annotations

import weakref

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
            rows = _rows(projection, heads * dim).float().unflatten(0, (heads, dim))
            gram = torch.stack([each @ each.mT for each in rows])
            torch._dynamo.mark_static_address(gram)  # CUDA graphs would copy it at each replay
            _projections[module] = OutputProjection(gram)
        return _projections[module]


def _rows(projection: nn.Module, channels: int) -> Tensor:
    """The transposed weight `[channels, hidden]`; for a quantized layer, its outputs for unit vectors."""
    weight = getattr(projection, "weight", None)
    if type(projection) is nn.Linear and isinstance(weight, Tensor) and weight.is_floating_point():
        rows = weight.mT
    else:
        like = next((x for x in (*projection.parameters(), *projection.buffers()) if x.is_floating_point()), None)
        dtype, device = (torch.float32, None) if like is None else (like.dtype, like.device)
        units = torch.eye(channels, dtype=dtype, device=device)
        rows = projection(units) - projection(torch.zeros_like(units[:1]))
    if rows.shape[0] != channels:
        raise NotImplementedError(f"the output projection takes {rows.shape[0]} channels, the values of all query heads have {channels}")
    return rows
