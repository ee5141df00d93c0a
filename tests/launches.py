"""What runs on a device: torch operators and Triton kernels, counted in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from triton.runtime.interpreter import GridExecutor  # noqa: E402

ALLOCATIONS = ("empty", "new_empty", "new_empty_strided", "empty_strided", "empty_like", "_unsafe_view")
RUN = GridExecutor.__call__


class Launches(TorchDispatchMode):
    """Names of the operators, views and allocations left out, and of the Triton kernels that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = False

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Counts what runs within as one launch."""
        self.names.append(name)
        self.inside = True
        yield
        self.inside = False

    def launch(self, kernel: GridExecutor, *args: object, **kwargs: object) -> None:
        with self.one(kernel.fn.__name__):
            RUN(kernel, *args, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (self.inside or func.is_view or name in ALLOCATIONS):
            self.names.append(name)
        return func(*args, **kwargs or {})


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Counts what runs within, in this thread."""
    launches = Launches()
    with patch.context() as within, launches:
        within.setattr(GridExecutor, "__call__", lambda kernel, *args, **kwargs: launches.launch(kernel, *args, **kwargs))
        yield launches
