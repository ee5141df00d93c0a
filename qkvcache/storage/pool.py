"""`PagePool`: the pages of one layer, which caches and their forks share.

A page is one range of bytes with the planes of keys `[H', PAGE, width]`, then the planes of values. Pages are
allocated in slabs, have numbers, and are counted: a page that several tables name is copied before one of its
owners writes (`PagedTokens.own`). A slab whose pages are all free is given back.

Kernels find pages by address. Where torch reads them, the pages of a row in a slab are neighbours instead,
plane by plane, so that their tokens are a view of each plane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Codec, Codes

ALIGNMENT = 64
"""The alignment of planes and of pages in bytes. Entries of tables count in this unit where kernels find pages by address."""
ANCHOR = 2**42
"""The entry of the first page of a pool whose pages kernels find by address: entries of slabs below it are positive, too."""

Numbers = numpy.ndarray
"""Numbers of pages, int64."""


@dataclass(frozen=True)
class PageLayout:
    """The planes in the bytes of a page.

    Args:
        dims: channels of keys and of values.
        heads: KV heads in a page.
        page_size: tokens of a page.
        dtype: the model's dtype.
        per_head: heads have copies of buffers that they could share, since a slot holds another token in each of them.
    """

    codecs: tuple[Codec, Codec]
    dims: tuple[int, int]
    heads: int
    page_size: int
    dtype: torch.dtype
    per_head: bool = False

    def keeps(self, side: int, name: str) -> bool:
        """Whether pages have the buffer of keys (`side` 0) or values (1)."""
        return True

    @property
    def planes(self) -> tuple[Plane, ...]:
        return _planes(self)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a page."""
        _, _, dtype, heads, width, at = self.planes[-1]
        return at + aligned(heads * self.page_size * width * dtype.itemsize, ALIGNMENT)

    def views(self, data: Tensor, groups: int, neighbours: int = 1, step: int | None = None, begin: int = 0) -> tuple[Codes, Codes]:
        """Views of the planes of `groups` groups of `neighbours` pages in `data`, uint8 `[bytes]`, from byte
        `begin` on: `[G, H', n * PAGE, width]` of keys and of values. `step`: bytes from a group to the next,
        which has all its planes; None: the planes of all groups follow one another, so that matmuls read
        heads and groups as one batch."""
        sides: tuple[Codes, Codes] = ({}, {})
        tokens = neighbours * self.page_size
        for side, name, dtype, heads, width, at in self.planes:
            size, first = dtype.itemsize, neighbours * at * (groups if step is None else 1)
            strides = heads * tokens * width if step is None else step // size, tokens * width, width, 1
            sides[side][name] = data.view(dtype).as_strided((groups, heads, tokens, width), strides, (begin + first) // size)
        return sides

    def roles(self, sides: tuple[Codes, Codes]) -> Iterator[tuple[str, Tensor]]:
        """The buffers of keys and of values with their roles, `codes` or `scales`."""
        for codec, codes, dim in zip(self.codecs, sides, self.dims, strict=True):
            yield from codec.roles(codes, dim)


class Plane(NamedTuple):
    """One plane of a page."""

    side: int
    """0: of keys, 1: of values."""
    name: str
    """The buffer."""
    dtype: torch.dtype
    heads: int
    width: int
    at: int
    """Its first byte."""


@functools.lru_cache(maxsize=256)
def _planes(layout: PageLayout) -> tuple[Plane, ...]:
    found, at = list[Plane](), 0
    for side, (codec, dim) in enumerate(zip(layout.codecs, layout.dims, strict=True)):
        for buffer in codec.buffers(dim):
            if buffer.tokens == "each" and layout.keeps(side, buffer.name):
                heads = layout.heads if layout.per_head or buffer.heads == "each" else 1
                found.append(Plane(side, buffer.name, buffer.dtype or layout.dtype, heads, buffer.width, at))
                at += aligned(heads * layout.page_size * buffer.width * found[-1].dtype.itemsize, ALIGNMENT)
    return tuple(found)


@torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
def zeros(nbytes: int, device: torch.device) -> Tensor:
    """Zeros, uint8 `[nbytes]`."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


@dataclass(eq=False)
class Slab:
    """One allocation of `groups` groups of `neighbours` pages each; its pages have the numbers from `first`
    on. `step`: as in `PageLayout.views`. `address`: where it begins, in units of ALIGNMENT bytes."""

    layout: PageLayout
    data: Tensor
    groups: int
    neighbours: int
    first: int
    step: int | None = None
    zeros = staticmethod(zeros)

    def __post_init__(self) -> None:
        self.end = self.first + self.groups * self.neighbours
        self.place(self.data)

    @torch.inference_mode(False)
    def place(self, data: Tensor) -> None:
        """Sets the bytes, uint8 `[bytes]`, and `planes`, their views; and the same with an index for each entry of tables."""
        self.data, self.planes = data, self.layout.views(data, self.groups, self.neighbours, self.step)
        self.address = 0 if data.is_meta else data.data_ptr() // ALIGNMENT
        entries = 0 if self.step is None else (self.groups - 1) * (self.step // ALIGNMENT) + 1
        self.planes_by_entry = self.layout.views(data, entries, step=ALIGNMENT) if entries else self.planes

    def __getstate__(self) -> dict:
        """Leaves out the planes, which are views of `data`: `torch.save` does not save several views of other dtypes."""
        return {name: x for name, x in self.__dict__.items() if not name.startswith("planes")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self.place(self.data)

    def __deepcopy__(self, memo: dict) -> Slab:
        return replace(self, data=self.zeros(len(self.data), self.data.device).copy_(self.data))


class PagePool:
    """Pages of `layout` on `device`.

    Args:
        by_address: kernels read and write the pages.
    """

    slab = Slab
    """The class of slabs."""

    def __init__(self, layout: PageLayout, device: torch.device, by_address: bool):
        self.layout, self.device, self.by_address = layout, device, by_address
        self.slabs: list[Slab] = []
        self.owners = numpy.zeros(0, numpy.int32)
        """Owners of each page, by number."""

    @torch.inference_mode(False)
    def planes(self) -> list[tuple[Codes, Codes]]:
        """The planes of each slab, where kernels find pages by address with an index for each entry: they overlap themselves."""
        none = torch.empty(0, dtype=torch.uint8, device=self.device)
        return [slab.planes_by_entry for slab in self.slabs] or [self.layout.views(none, 0, step=ALIGNMENT)]

    @property
    def step(self) -> int:
        """The difference of the entries of two neighbours in memory."""
        return self.layout.nbytes // ALIGNMENT if self.by_address else 1

    def firsts(self) -> list[int]:
        """The entry in tables of the first page of each slab."""
        if not self.by_address:
            return [slab.first for slab in self.slabs] or [0]
        return [slab.address - self.slabs[0].address + ANCHOR for slab in self.slabs] or [ANCHOR]

    def entries(self, numbers: Numbers, firsts: Sequence[int]) -> Numbers:
        """The entries in tables of pages, by the first one of each slab."""
        begins = numpy.array([slab.first for slab in self.slabs])
        slab = begins.searchsorted(numbers, side="right") - 1
        return numpy.array(firsts)[slab] + (numbers - begins[slab]) * self.step

    def slab_of(self, number: int) -> Slab:
        return next(slab for slab in self.slabs if slab.first <= number < slab.end)

    def allocate(self, groups: int, neighbours: int) -> Numbers:
        """Adds a slab; returns the numbers of its pages `[G, n]`, which have one owner."""
        first, count = len(self.owners), groups * neighbours
        if not count:
            return numpy.zeros((groups, neighbours), numpy.int64)
        shape = (count, 1) if self.by_address else (groups, neighbours)
        data = self.slab.zeros(count * self.layout.nbytes, self.device)
        self.slabs.append(self.slab(self.layout, data, *shape, first, self.layout.nbytes if self.by_address else None))
        self.owners = numpy.concatenate([self.owners, numpy.ones(count, numpy.int32)])
        return numpy.arange(first, first + count).reshape(groups, neighbours)

    def take(self, count: int) -> Numbers:
        """The numbers `[N]` of pages without an owner, which get one; pages are allocated if they are too few."""
        free = self.free()[:count]
        self.owners[free] = 1
        missing = count - len(free)
        return numpy.concatenate([free, self.allocate(missing, 1)[:, 0]]) if missing else free

    def free(self) -> Numbers:
        """The numbers of pages without an owner."""
        live = numpy.zeros(len(self.owners), bool)
        for slab in self.slabs:
            live[slab.first : slab.end] = True
        return (live & (self.owners == 0)).nonzero()[0]

    def share(self, numbers: Numbers) -> None:
        """Adds an owner to each of these pages; a page may occur several times."""
        numpy.add.at(self.owners, numbers.ravel(), 1)

    def release(self, numbers: Numbers) -> None:
        """Takes an owner from each of these pages."""
        numpy.subtract.at(self.owners, numbers.ravel(), 1)

    def trim(self) -> None:
        """Gives back slabs whose pages have no owner."""
        self.slabs = [slab for slab in self.slabs if self.owners[slab.first : slab.end].any()]

    @property
    def capacity(self) -> int:
        """Pages, with an owner or without."""
        return sum(slab.end - slab.first for slab in self.slabs)

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(slab.data.nbytes for slab in self.slabs)

    @property
    def host_nbytes(self) -> int:
        """Bytes of the slabs in host memory."""
        return 0

    def simulate(self, count: int) -> None:
        """Adds a slab of `count` pages, which have no numbers: there may be billions. For planning."""
        data = torch.empty(count * self.layout.nbytes, dtype=torch.uint8, device="meta")
        self.slabs.append(self.slab(self.layout, data, count, 1, 0))

    def copy(self, source: Numbers, target: Numbers) -> None:
        """Copies pages `[N]` to others."""
        for side in dict.fromkeys(plane[0] for plane in self.layout.planes):
            self.write(side, target, self.read(side, source))

    def read(self, side: int, numbers: Numbers) -> Codes:
        """Copies of the planes of keys (`side` 0) or values (1) of pages `[N]`: `[N, H', PAGE, width]`."""
        found: Codes = {}
        for slab, here, index in self._places(numbers):
            for name, plane in slab.planes[side].items():
                words = _words(plane, slab.neighbours)[index]
                if here is not None:
                    words, part = found.get(name, words.new_empty(len(numbers), *words.shape[1:])), words
                    words[here] = part
                found[name] = words
        shapes = {name: (dtype, width) for of, name, dtype, _, width, _ in self.layout.planes if of == side}
        return {name: x.view(shapes[name][0]).unflatten(-1, (self.layout.page_size, shapes[name][1])) for name, x in found.items()}

    def write(self, side: int, numbers: Numbers, codes: Codes) -> None:
        """Writes planes `[N, H', PAGE, width]` of keys or of values into pages `[N]`."""
        for slab, here, index in self._places(numbers):
            for name, plane in slab.planes[side].items():
                words = _in_words(codes[name].flatten(-2))
                _words(plane, slab.neighbours)[index] = words if here is None else words[here]

    def write_row(self, side: int, numbers: Numbers, codes: Codes) -> None:
        """Writes codes `[1, H', T, width]` of keys or of values into pages `[N]`, from the first token of the first page on."""
        whole = {name: F.pad(x, (0, 0, 0, -x.shape[2] % self.layout.page_size)) for name, x in codes.items()}
        self.write(side, numbers, {name: x[0].unflatten(1, (len(numbers), -1)).transpose(0, 1) for name, x in whole.items()})

    def clear(self, numbers: Numbers) -> None:
        """Fills pages `[N]` with zeros: masked attention multiplies stale values by 0, and nan times 0 is nan."""
        for slab, _, index in self._places(numbers):
            for side in slab.planes:
                for plane in side.values():
                    _words(plane, slab.neighbours)[index] = 0

    def _places(self, numbers: Numbers) -> Iterator[tuple[Slab, Tensor | None, tuple[Tensor, Tensor]]]:
        """Yields each slab that has some of the pages `[N]`: which ones (None: all), and their group and their place in it."""
        for slab in self.slabs:
            here = (numbers >= slab.first) & (numbers < slab.end)
            if here.any():
                group, place = numpy.divmod(numbers[here] - slab.first, slab.neighbours)
                yield slab, None if here.all() else self._on_device(here.nonzero()[0]), (self._on_device(group), self._on_device(place))

    def _on_device(self, numbers: Numbers) -> Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def move(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
        """Moves all slabs to `device` by `move(tensor)`."""
        self.device = device
        for slab in self.slabs:
            slab.place(move(slab.data))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every plane with its role, `codes` or `scales`."""
        for slab in self.slabs:
            yield from self.layout.roles(slab.planes)


def selected(x: Tensor, index: Tensor, in_place: bool) -> Tensor:
    """The rows `index` of `x`; with `in_place` they overwrite it, since its address must stay."""
    rows = x.index_select(0, index)
    return x.copy_(rows) if in_place else rows


def _words(plane: Tensor, neighbours: int) -> Tensor:
    """The pages of a plane `[G, H', n * PAGE, width]` as `[G, n, H', words]` of eight bytes, which torch copies as fast as one."""
    return _in_words(plane.unflatten(2, (neighbours, -1)).transpose(1, 2).flatten(3))


def _in_words(x: Tensor) -> Tensor:
    return x.view(torch.int64) if x.numel() else x  # a side may have no channels


def aligned(count: int, to: int) -> int:
    """The least multiple of `to` that is at least `count`."""
    return -(-count // to) * to
