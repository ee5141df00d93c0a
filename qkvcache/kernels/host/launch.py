"""Launches that cost the host little: Triton compiles and finds a kernel, and later launches call it.

At each launch Triton binds all arguments, and makes a key of their types, alignments and constants, which
takes several times as long as the launch itself. In a decode step little of that changes: a `Launcher` looks
at what may have changed, and calls the compiled kernel that Triton's own launch returned for arguments of the
same kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

OPTIONS = "num_warps", "num_stages", "maxnreg"
"""Options of a launch that are no arguments of the kernel."""
_KNOWN = "function", "packed_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "run"
"""Names that Triton's launch uses where it passes a compiled kernel what a `Launcher` passes."""


def described(values: Iterable[Any]) -> tuple[tuple, tuple]:
    """The kinds of arguments; and the arguments with addresses in place of tensors, which the driver would look at each time.

    Triton compiles one kernel for arguments of the same kinds. They may have more kinds than Triton tells
    apart. Raises KeyError for arguments of other types."""
    kinds, addresses = list[Any](), list[Any]()
    for x in values:
        kind: Any = type(x)
        if kind is int:
            small = -(2**31) <= x < 2**31
            kind = (1 if x == 1 else 0 if x & 15 else 16) if small else (x >= 2**63, x & 15)
        elif kind is tuple:
            kind, x = described(x)
        elif isinstance(x, Tensor):
            kind, x = x.dtype, x.data_ptr()
            kind = kind, x & 15 == 0
        else:
            kind = _PLAIN[kind]
        kinds.append(kind)
        addresses.append(x)
    return tuple(kinds), tuple(addresses)


_PLAIN = {float: float, bool: bool, NoneType: None}
_KINDS: dict[Any, int] = {}
"""A number for each tuple of kinds."""


class Held:
    """Arguments of launches, by name: numbers, and tensors that keep their addresses while this object is used."""

    def __init__(self, **values: Any) -> None:
        self.values = values
        kinds, self.addresses = described(values.values())
        self.kinds = _KINDS.setdefault(kinds, len(_KINDS))


# Functions in C: they run for each launch of each layer.
_kinds_of, _addresses_of, _dtype_of, _pointer_of = (
    attrgetter("kinds"), attrgetter("addresses"), attrgetter("dtype"), methodcaller("data_ptr"),
)  # fmt: skip
_low_bits = (15).__and__
"""The bits of an address that decide whether it is aligned."""


def _without_tensors(x: Any) -> Any:
    """`x` with what Triton looks at in a tensor in place of each. A tensor, such as the last query of a
    prompt, would keep memory alive while another thread compiles."""
    if isinstance(x, tuple):
        return tuple(map(_without_tensors, x))
    return SimpleNamespace(dtype=x.dtype, data_ptr=partial(int, x.data_ptr())) if isinstance(x, Tensor) else x


class _Ahead(threading.local):
    on = False


_AHEAD = _Ahead()
_COMPILING: dict[Any, Future] = {}
"""Kernels that other threads compile, by `Launcher.variant`."""


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Launches by `Launcher` within, in this thread, compile their kernels in other threads, and run nothing.
    The first launch after them waits for its kernel."""
    _AHEAD.on = True
    try:
        yield
    finally:
        _AHEAD.on = False


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4, "qkvcache-compile")


class Launcher:
    """Launches of one kernel.

    Args:
        kernel: a function of `triton.jit`.
        device: where its tensors are.
        given: names of the arguments of a call, all of them tensors, in their order.
        held: names of those in its groups of `Held` arguments, in the order of the groups; the kernel may lack some. Of several
            arguments with a name, the first counts.
        fixed: all other arguments, and options; the kernel may lack some. Tensors among them keep their addresses.
    """

    def __init__(self, kernel: Any, device: torch.device, given: Sequence[str], held: Sequence[str] = (), **fixed: Any) -> None:
        self.kernel, self.device, self.index = kernel, device, device.index if device.type == "cuda" else -1
        self.given, self.taken = tuple(given), frozenset(kernel.arg_names)
        self.fixed = {name: x for name, x in fixed.items() if name in self.taken or name in OPTIONS}
        constants = {name: x for name, x in self.fixed.items() if name not in OPTIONS}
        self.rest = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in constants.values())
        names = *given, *held, *constants
        at = {name: i for i, name in reversed([*enumerate(names)])}
        self.in_order = itemgetter(*(at[name] for name in kernel.arg_names))
        self.compiled: dict[Any, Any] = {}
        self.direct = _callable(kernel)
        self.variant = kernel, *(self.fixed.get(param.name) for param in getattr(kernel, "params", ()) if param.is_constexpr)
        """The kernel with its constants."""

    def __call__(self, grid: tuple[int, int, int], *tensors: Tensor, held: Sequence[Held] = ()) -> None:
        """Launches the kernel on the current stream of its device."""
        if _AHEAD.on:
            if self.direct and self.variant not in _COMPILING:
                named = {name: _without_tensors(x) for name, x in self._named(tensors, held).items()}
                _COMPILING[self.variant] = _pool().submit(self._compile, grid, named)
            return
        if not self.direct:
            with torch.cuda.device(self.index):
                self._launch(grid, tensors, held)
            return
        current = driver.active.get_current_device()
        if current != self.index:
            with torch.cuda.device(self.index):
                self(grid, *tensors, held=held)
            return
        pointers = tuple(map(_pointer_of, tensors))
        key = (*map(_kinds_of, held), *map(_dtype_of, tensors), *map(_low_bits, pointers))
        compiled = self.compiled.get(key)
        if compiled is None or _watched(self.kernel):
            compiled = self._launch(grid, tensors, held)
            if compiled is not None:
                self.compiled[key] = compiled
            return
        compiled.run(
            *grid, driver.active.get_current_stream(current), compiled.function, compiled.packed_metadata, None, None, None,
            *self.in_order((*pointers, *chain.from_iterable(map(_addresses_of, held)), *self.rest)),
        )  # fmt: skip

    def _launch(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], held: Sequence[Held]) -> Any:
        """Launches the kernel as Triton does, which returns the compiled kernel."""
        if compiling := _COMPILING.pop(self.variant, None):
            wait([compiling])  # its errors are this launch's
        return self.kernel[grid](**self._named(tensors, held), **self.fixed)

    def _named(self, tensors: Sequence[Tensor], held: Sequence[Held]) -> dict[str, Any]:
        named = {name: x for group in reversed(held) for name, x in group.values.items() if name in self.taken}
        return named | dict(zip(self.given, tensors, strict=True))

    def _compile(self, grid: tuple[int, int, int], named: dict[str, Any]) -> None:
        """Compiles the kernel, and the code that launches it, of which Triton keeps both. Calls no CUDA but
        what says the device: a graph may be captured meanwhile."""
        with torch.cuda.device(self.index):
            compiled = self.kernel.warmup(**named, **self.fixed, grid=grid)
            if host := getattr(driver.active, "launcher_cls", None):
                host(compiled.src, compiled.metadata)


def _callable(kernel: Any) -> bool:
    """Whether compiled kernels can be called: by Triton's compiler for NVIDIA's GPUs (of AMD's, it looks at
    the sizes of tensors, too), in a release whose launch is as known."""
    return (
        isinstance(kernel, JITFunction)
        and {*_KNOWN} <= {*JITFunction.run.__code__.co_names}
        and driver.active.get_current_target().backend == "cuda"
    )


def _watched(kernel: Any) -> bool:
    """Whether someone wants to know of launches: a profiler, or a hook of the kernel."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook  # None, or what may have no calls
    return bool(kernel.pre_run_hooks or (before and getattr(before, "calls", True)) or (after and getattr(after, "calls", True)))
