"""`PagePool`: the pages of one layer, which caches and their forks share.

A page is one range of bytes with the planes of keys `[H', PAGE, width]`, then those of values. Pages are allocated in slabs, have numbers,
and are counted: a page that several tables name is copied before one of its owners writes (`PagedTokens.own`). A slab
whose pages are all free is given back.

Pages may lie in host memory. Kernels then have an index on the device, in pages with the same numbers: copies of what each step reads.

Kernels find pages by address. Where torch reads them, the pages of a row in a slab are neighbours instead, plane by plane, so that their
tokens are a view of each plane.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy
import torch
from torch import Tensor

from ..formats.base import Codec, Codes
from ..kernels.pages import index_names

ALIGNMENT = 64
"""The alignment of planes and of pages in bytes. Entries of tables count in this unit where kernels find pages by address."""
ANCHOR = 2**42
"""The entry of the first page of a pool whose pages kernels find by address: those of slabs below it are positive, too."""

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
        index: pages have the buffers of an index alone (`kernels.Pages.index`), of keys (1) or of values too (2); 0: all buffers.
    """

    codecs: tuple[Codec, Codec]
    dims: tuple[int, int]
    heads: int
    page_size: int
    dtype: torch.dtype
    per_head: bool = False
    index: int = 0

    @cached_property
    def planes(self) -> tuple[tuple[int, str, torch.dtype, int, int, int], ...]:
        """The side (0: keys), buffer, dtype, heads, width and first byte of each plane."""
        found, at = [], 0
        for side, (codec, dim) in enumerate(zip(self.codecs, self.dims, strict=True)):
            only = index_names(codec, dim) if side < self.index else ()
            for buffer in codec.buffers(dim):
                if buffer.tokens == "each" and (not self.index or buffer.name in only):
                    dtype, heads = buffer.dtype or self.dtype, self.heads if self.per_head or buffer.heads == "each" else 1
                    found.append((side, buffer.name, dtype, heads, buffer.width, at))
                    at += aligned(heads * self.page_size * buffer.width * dtype.itemsize, ALIGNMENT)
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a page."""
        _, _, dtype, heads, width, at = self.planes[-1]
        return at + aligned(heads * self.page_size * width * dtype.itemsize, ALIGNMENT)

    def views(self, data: Tensor, groups: int, neighbours: int = 1, step: int | None = None, begin: int = 0) -> tuple[Codes, Codes]:
        """Views of the planes of `groups` groups of `neighbours` pages in `data`, uint8 `[bytes]`, from byte `begin` on: `[G, H', n * PAGE,
        width]` of keys and of values. `step`: bytes from a group to the next, which has all its planes; None: the planes of all groups
        follow one another, so that matmuls read heads and groups as one batch."""
        sides: tuple[Codes, Codes] = ({}, {})
        tokens = neighbours * self.page_size
        for side, name, dtype, heads, width, at in self.planes:
            size, first = dtype.itemsize, neighbours * at * (groups if step is None else 1)
            strides = heads * tokens * width if step is None else step // size, tokens * width, width, 1
            sides[side][name] = data.view(dtype).as_strided((groups, heads, tokens, width), strides, (begin + first) // size)
        return sides


class Slab:
    """One allocation of `groups` groups of `neighbours` pages each; its pages have the numbers from `first` on. `step`: as in
    `PageLayout.views`. `on_host`: it is in host memory."""

    def __init__(
        self, layout: PageLayout, data: Tensor, groups: int, neighbours: int, first: int, step: int | None = None, on_host: bool = False
    ):
        self.layout, self.groups, self.neighbours, self.first, self.step, self.on_host = layout, groups, neighbours, first, step, on_host
        self.end = first + groups * neighbours
        self.place(data)

    @torch.inference_mode(False)
    def place(self, data: Tensor) -> None:
        """Sets the bytes, uint8 `[bytes]`, and `planes`, their views."""
        self.data, self.planes = data, self.layout.views(data, self.groups, self.neighbours, self.step)

    def __deepcopy__(self, memo: dict) -> Slab:
        twin = copy.copy(self)
        twin.place(zeros(len(self.data), self.data.device, self.on_host).copy_(self.data))
        return twin


class PagePool:
    """Pages of `layout` on `device`.

    Args:
        by_address: kernels read and write the pages.
        index: of the layout of the index, where pages lie in host memory; 0: they lie on the device.
    """

    def __init__(self, layout: PageLayout, device: torch.device, by_address: bool, index: int = 0):
        self.layout, self.device, self.by_address, self.on_host = layout, device, by_address, index > 0
        indexed = index and (by_address or device.type == "meta")  # which is for planning
        self.index = PagePool(replace(layout, index=index), device, True) if indexed else None
        self.slabs: list[Slab] = []
        self.owners = numpy.zeros(0, numpy.int32)
        """Owners of each page, by number."""
        self.anchor = 0
        """The address of the first slab in units of ALIGNMENT."""

    @torch.inference_mode(False)
    def bind(self) -> tuple[list[tuple[Codes, Codes]], list[int]]:
        """The planes of all slabs and the entries of their first pages, as `kernels.Pages` has them."""
        layout = self.layout
        if not self.slabs:
            return [_no_pages(layout, self.device)], [ANCHOR if self.by_address else 0]
        planes = [slab.planes for slab in self.slabs]
        if not self.by_address:
            return planes, [slab.first for slab in self.slabs]
        self.anchor = self._address(self.slabs[0])
        return planes, [self._address(slab) - self.anchor + ANCHOR for slab in self.slabs]

    @property
    def step(self) -> int:
        """The difference of the entries of two neighbours in memory."""
        return self.layout.nbytes // ALIGNMENT if self.by_address else 1

    @staticmethod
    def _address(slab: Slab) -> int:
        return 0 if slab.data.is_meta else slab.data.data_ptr() // ALIGNMENT

    def entries(self, numbers: Numbers) -> Numbers:
        """The entries in tables of pages, after `bind`."""
        if not self.by_address or not self.slabs:
            return numbers
        firsts = numpy.array([slab.first for slab in self.slabs])
        bases = numpy.array([self._address(slab) for slab in self.slabs]) - self.anchor + ANCHOR
        slab = firsts.searchsorted(numbers, side="right") - 1
        return bases[slab] + (numbers - firsts[slab]) * self.step

    def slab_of(self, number: int) -> Slab:
        return next(slab for slab in self.slabs if slab.first <= number < slab.end)

    def allocate(self, groups: int, neighbours: int) -> Numbers:
        """Adds a slab; returns the numbers of its pages `[G, n]`, which have one owner."""
        first, count = len(self.owners), groups * neighbours
        if not count:
            return numpy.zeros((groups, neighbours), numpy.int64)
        shape = (count, 1) if self.by_address else (groups, neighbours)
        data = zeros(count * self.layout.nbytes, self.device, self.on_host)
        self.slabs.append(Slab(self.layout, data, *shape, first, self.layout.nbytes if self.by_address else None, self.on_host))
        if self.index is not None:
            self.index.allocate(groups, neighbours)
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
        for pool in (self, self.index):
            if pool is not None:
                pool.slabs = [slab for slab in pool.slabs if self.owners[slab.first : slab.end].any()]

    @property
    def capacity(self) -> int:
        """Pages, with an owner or without."""
        return sum(slab.end - slab.first for slab in self.slabs)

    @property
    def nbytes(self) -> int:
        """Bytes of the slabs, without the index."""
        return sum(slab.data.nbytes for slab in self.slabs)

    def copy(self, source: Numbers, target: Numbers) -> None:
        """Copies pages `[N]` to others."""
        for side in dict.fromkeys(plane[0] for plane in self.layout.planes):
            self.write(side, target[None], self.read(side, source[None]))
        if self.index is not None:
            self.index.copy(source, target)

    def read(self, side: int, numbers: Numbers) -> Codes:
        """Codes of the keys (`side` 0) or values (1) in pages `[B, W]`: `[B, H', W * PAGE, width]`."""
        found: Codes = {}
        if row := self._row(numbers):
            slab, first = row
            planes = {name: plane[first : first + numbers.size] for name, plane in slab.planes[side].items()}
            copies = {name: _words(plane).transpose(0, 1).contiguous()[None] for name, plane in planes.items()}
            return {name: copies[name].view(plane.dtype).unflatten(-1, plane.shape[2:]).flatten(2, 3) for name, plane in planes.items()}
        for planes, index, at in self._slabs_of(side, numbers):
            for name, plane in planes.items():
                like = plane.shape[2:]
                if at is None:
                    heads = torch.arange(like[0], device=self.device)[:, None]
                    words = _words(plane)[index[0][:, None], index[1][:, None], heads]
                    found[name] = words.view(plane.dtype).unflatten(-1, like[1:])
                    continue
                if name not in found:
                    found[name] = plane.new_empty(numbers.shape[0], like[0], numbers.shape[1], *like[1:])
                found[name].transpose(1, 2)[at] = plane[index]
        return {name: x.flatten(2, 3) for name, x in found.items()}

    def write(self, side: int, numbers: Numbers, codes: Codes, begin: int = 0) -> None:
        """Writes codes `[B, H', T, width]` into pages `[B, W]`, from token `begin` of the first page on."""
        size, at = self.layout.page_size, begin
        end = begin + next(iter(codes.values())).shape[2]
        row = self._row(numbers)
        while at < end:
            first, offset = divmod(at, size)
            whole = 0 if offset else (end - at) // size
            pages, count = max(whole, 1), whole * size or min(size - offset, end - at)
            slabs: Iterable[tuple[Codes, tuple, tuple[Tensor, ...] | None]]
            if row is None:
                slabs = self._slabs_of(side, numbers[:, first : first + pages])
            else:
                slabs = [(row[0].planes[side], (slice(row[1] + first, row[1] + first + pages),), None)]
            for planes, index, part in slabs:
                for name, plane in planes.items():
                    new = codes[name][:, :, at - begin : at - begin + count].unflatten(2, (pages, -1)).transpose(1, 2)
                    if row is not None:
                        new = new[0]
                    if whole:  # words are copied sooner than bytes
                        new = _words(new)
                        plane = _words(plane).view(new.dtype)
                    else:
                        plane = plane[..., offset : offset + count, :]
                    plane[index] = new if part is None else new[part]
            at += count

    def _row(self, numbers: Numbers) -> tuple[Slab, int] | None:
        """The slab of the pages `[1, W]` of one row and the first of them in it, if they follow one another there; else None."""
        if len(numbers) > 1 or not numbers.size:
            return None
        slab, first = self.slab_of(int(numbers[0, 0])), int(numbers[0, 0])
        if slab.neighbours > 1 or numbers[0, -1] >= slab.end or (numbers[0, 1:] != numbers[0, :-1] + 1).any():
            return None
        return slab, first - slab.first

    def _slabs_of(self, side: int, numbers: Numbers) -> Iterator[tuple[Codes, tuple[Tensor, ...], tuple[Tensor, ...] | None]]:
        """Yields for each slab that has some of the pages `[B, W]`: its planes as `[G, n, H', PAGE, width]`; the index of these pages in
        the first two dimensions; and their indices in `numbers`, None if the slab has all pages: the index then gives `[B, W, ...]`."""

        def tensors(*arrays: Numbers) -> tuple[Tensor, ...]:
            return tuple(torch.from_numpy(x).to(self.device, non_blocking=True) for x in arrays)

        for slab in self.slabs:
            here = (numbers >= slab.first) & (numbers < slab.end)
            if not here.any():
                continue
            planes = {name: x.unflatten(2, (slab.neighbours, -1)).transpose(1, 2) for name, x in slab.planes[side].items()}
            if here.all():
                yield planes, tensors(*numpy.divmod(numbers - slab.first, slab.neighbours)), None
                return
            yield planes, tensors(*numpy.divmod(numbers[here] - slab.first, slab.neighbours)), tensors(*here.nonzero())

    def clear(self, numbers: Numbers) -> None:
        """Fills pages with zeros: masked attention multiplies stale values by 0, and nan times 0 is nan."""
        for side in (0, 1):
            for planes, index, _ in self._slabs_of(side, numbers):
                for plane in planes.values():
                    plane[index] = 0

    def move(self, device: torch.device, move: Callable[[Tensor], Tensor]) -> None:
        """Moves all slabs to `device` by `move(tensor)`."""
        self.device = device
        for slab in self.slabs:
            slab.place(move(slab.data))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every plane with its role, `codes` or `scales`."""
        for slab in (*self.slabs, *(() if self.index is None else self.index.slabs)):
            for codec, codes, dim in zip(self.layout.codecs, slab.planes, self.layout.dims, strict=True):
                yield from codec.roles(codes, dim)


class _Bytes:
    """A tensor of bytes in host memory, for `torch.as_tensor` on a GPU, which keeps it."""

    def __init__(self, x: Tensor):
        self.x = x
        self.__cuda_array_interface__ = {"shape": tuple(x.shape), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 2}


@torch.inference_mode(False)  # tensors made in inference mode cannot be written outside of it
def zeros(nbytes: int, device: torch.device, on_host: bool) -> Tensor:
    """Zeros, uint8 `[nbytes]`, on `device`; with `on_host`, in locked (pinned) host memory, as a tensor of the GPU, whose operations on it
    are as slow as the bus. Raises NotImplementedError if `device` has other addresses for host memory."""
    if not on_host or device.type != "cuda":
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    found = torch.as_tensor(_Bytes(held), device=device)
    if found.data_ptr() != held.data_ptr():
        raise NotImplementedError(f"offload_pages on {device}, which cannot read host memory by its address: leave it out")
    return found


@functools.lru_cache(maxsize=64)
def _no_pages(layout: PageLayout, device: torch.device) -> tuple[Codes, Codes]:
    """Planes without pages."""
    with torch.inference_mode(False):
        return layout.views(torch.empty(0, dtype=torch.uint8, device=device), 0, step=layout.nbytes)


def _words(x: Tensor) -> Tensor:
    """`x` `[..., PAGE, width]` as `[..., words]`, in the largest integers that its strides allow."""
    x = x.flatten(-2)
    for dtype in (torch.int64, torch.int32, torch.int16):
        count = dtype.itemsize // x.dtype.itemsize
        if count and not any(n % count for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
            return x.view(dtype)
    return x


def empty_codes(layout: PageLayout, rows: int, tokens: int) -> tuple[Codes, Codes]:
    """Empty codes `[rows, H', tokens, width]` of keys and of values on the meta device."""
    sides: tuple[Codes, Codes] = ({}, {})
    for side, name, dtype, heads, width, _ in layout.planes:
        sides[side][name] = torch.empty(rows, heads, tokens, width, dtype=dtype, device="meta")
    return sides


def aligned(count: int, to: int) -> int:
    """The least multiple of `to` that is at least `count`."""
    return -(-count // to) * to
