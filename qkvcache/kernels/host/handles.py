"""Handles: one tensor stands for the inputs of a layer in compiled code.

torch.compile checks every tensor of a graph at each step, and a layer has a dozen. A graph is therefore given
a `handle`, a tensor of one element, and operators find the inputs by its address. Inputs have the same handle
if and only if their tensors have the same addresses, shapes and dtypes. A CUDA graph is recorded again for a
handle at another address, and therefore never reads a tensor that has moved.

torch does not see the tensors that operators write behind a handle. Operators that write therefore say that
they write `order`, and those that read also take it, so that they run in the order of the code.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

ORDER: dict[torch.device, Tensor] = {}
"""The tensor `order` of each device."""
_HANDLES: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()
"""Handles by the identity of inputs."""
_INPUTS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""`PagedInputs` by the address of their handle."""
_USED: dict[int, Tensor] = {}
"""Handles that compiled code was given, by address. CUDA graphs know these addresses, which no other handle may get."""


def give_handle(inputs: Any) -> None:
    """Sets the `handle` of `PagedInputs`, through which operators find these inputs from now on."""
    identity, device = inputs.identity, inputs.ring[0].device
    if device not in ORDER:
        ORDER[device] = _static(device)
    handle = _HANDLES.get(identity)
    if handle is None:
        handle = _HANDLES[identity] = _static(device)
    inputs.prepared.handle = handle
    _INPUTS[handle.data_ptr()] = inputs


def _static(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        x = torch.zeros(1, dtype=torch.int32, device=device)
    torch._dynamo.mark_static_address(x)
    return x


def inputs_of(handle: Tensor) -> Any:
    """The `PagedInputs` for which `handle` stands.

    Raises RuntimeError where there are none, as in a program that was exported in another process."""
    address = handle.data_ptr()
    inputs = _INPUTS.get(address)
    if inputs is None:
        raise RuntimeError(
            "compiled code was called whose cache is gone or belongs to another process: export or compile with the cache that it is to use"
        )
    _USED[address] = inputs.handle
    return inputs.compiled
