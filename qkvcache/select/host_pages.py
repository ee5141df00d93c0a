"""`HostPages`: pages in host memory, which the GPU reads by their addresses, as fast as the bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..formats.base import Codec
from ..kernels.host.dispatch import module
from ..kernels.pages import Pages
from ..kernels.segments import layout_of, names


@dataclass(eq=False, kw_only=True)
class HostPages(Pages):
    """Pages in host memory.

    index   copies on the device of what chooses blocks, the buffers `index_names` of keys
    """

    index: Pages
    on_host: ClassVar[bool] = True

    @property
    def tensors(self) -> list:
        return super().tensors + self.index.tensors

    def copy_of(self, tokens: int, begin: int | None = None) -> Callable[[], None]:
        """A function that copies tokens into the index: `tokens` of them from `begin` on; None: the last ones, as the device counts."""
        return module(".select.triton_fetch_blocks").copy_index(self, tokens, begin)


def index_of(pages: Pages) -> Pages | None:
    """The index of pages in host memory; None for others."""
    return pages.index if isinstance(pages, HostPages) else None


def index_names(codec: Codec, head_dim: int) -> tuple[str, ...]:
    """The buffers, kept for each token, of the upper halves of codes, where these are kept apart; else all."""
    layout = layout_of(codec)
    read = None if layout is None else (layout.upper or layout).planes
    return tuple(name for name in names(codec, head_dim, "each") if read is None or name in read)
