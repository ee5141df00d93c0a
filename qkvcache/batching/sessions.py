"""`Sessions`: pages of a pool that outlive it in a `PrefixStore`, so that the next turn of a conversation finds them
after the pool has lost them, or in another process.

Complete pages are copied to host memory behind the steps and written from there to disk, in threads of their own. A
request waits for its pages to be fetched into host memory; the scheduler admits it afterwards, and copies them into the
pool (`CompressedPagedCache`).
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..files import THREADS
from ..links import links
from .metrics import Metrics
from .statistics import Statistics

if TYPE_CHECKING:
    from ..prefix.pages import StoredPages
    from ..prefix.snapshot import Snapshot

WRITERS = 4
"""Threads that write files, each of which waits for its file to be on the device."""


@dataclass
class Fetch:
    """The stored pages of a waiting request: pages number `first` and the following ones. `nbytes`: the host memory
    that they take, at most; `future`: of the thread that reads them, once it has begun."""

    tokens: list[int]
    salt: bytes
    nbytes: int
    first: int = 0
    pages: list[Snapshot] = field(default_factory=list)
    future: Future | None = None


class Sessions:
    """Copies pages between the blocks of a pool and a store.

    Args:
        blocks: all blocks of the pool, uint8 `[N, bytes]`.
        in_pool: the number of pages, of the first ones with these links, that are in the pool.
        wake: called when pages were fetched.

    Pages depend on the statistics of their format, which are in the folder of the store: pages under others have other
    names.
    """

    def __init__(
        self,
        pages: StoredPages,
        statistics: Statistics,
        blocks: Tensor,
        counters: Metrics,
        in_pool: Callable[[list[bytes]], int],
        wake: Callable[[], None],
    ):
        self.pages, self._statistics, self._blocks, self._counters = pages, statistics, blocks, counters
        self._in_pool, self._wake = in_pool, wake
        self.copied: deque[int] = deque()
        """Blocks that were copied to the host, whose references can be released."""
        self._stream = torch.cuda.Stream(blocks.device) if blocks.is_cuda else None
        self._fetches: dict[str, Fetch] = {}
        self._copier, self._writers, self._fetcher, self._readers = map(ThreadPoolExecutor, (1, WRITERS, 1, THREADS))
        self._prefetcher, self._prefetches = ThreadPoolExecutor(1), dict[bytes, Future]()
        """The reads of pages of sessions, by the last one: requests that wait go first."""
        self._copies: Future | None = None
        self._lock, self.unwritten = Lock(), 0
        """`unwritten`: the bytes of pages that wait to be written."""

    # Fetching.

    def expect(self, request_id: str, tokens: list[int], salt: bytes) -> None:
        """A request waits, whose prompt has `tokens` of which all but the last may be in pages with this salt."""
        if self._begun() and (pages := (len(tokens) - 1) // self.pages.size):
            self._fetches[request_id] = Fetch(tokens, salt, pages * self._blocks.shape[1])

    def fetched(self, request_ids: Sequence[str]) -> set[str]:
        """The waiting requests whose pages are in host memory. Fetches the pages of the next ones, as many as the store may
        hold at once."""
        left = self.pages.memory.max_bytes
        waiting = [fetch for request_id in request_ids if (fetch := self._fetches.get(request_id)) is not None]
        for number, fetch in enumerate(waiting):
            if fetch.future is None and (fetch.nbytes <= left or not number):
                fetch.future = self._fetcher.submit(self._fetch, fetch)
                fetch.future.add_done_callback(lambda _: self._wake())
            left -= fetch.nbytes if fetch.future is not None else 0
        busy = {id for id, fetch in self._fetches.items() if fetch.future is None or not fetch.future.done()}
        return set(request_ids) - busy

    def take(self, request_id: str, room: int) -> Fetch | None:
        """The fetched pages of a request that is admitted, if there is room for them."""
        fetch = self._fetches.get(request_id)
        if fetch is None or fetch.future is None or len(fetch.pages) > room:
            return None
        del self._fetches[request_id]
        if error := fetch.future.exception():
            warnings.warn(f"pages could not be fetched, and are computed: {error}", stacklevel=2)
            return None
        self._counters.pages_fetched += len(fetch.pages)
        return fetch

    def drop(self, request_id: str) -> None:
        """A request is gone."""
        self._fetches.pop(request_id, None)

    def _fetch(self, fetch: Fetch) -> None:
        found = links(fetch.tokens[:-1], self.pages.size, fetch.salt)
        fetch.first = self._in_pool(found)
        fetch.pages = self._read(found, fetch.first)
        fetch.nbytes = len(fetch.pages) * self._blocks.shape[1]

    def _read(self, found: list[bytes], first: int) -> list[Snapshot]:
        """The stored pages from number `first` on, up to one that is missing. All pages of the prompt count as used."""
        now = self.pages.now()
        stored = [self.pages.touch(link, now, index) for index, link in enumerate(found)]
        wanted = takewhile(stored.__getitem__, range(first, len(found)))
        pages = self._readers.map(lambda index: self.pages.find(found[index]), wanted)
        return [page for page in takewhile(lambda page: page is not None, pages) if page]

    def prefetch(self, found: list[bytes]) -> None:
        """Reads pages into host memory, as many of the first ones as it may hold, for a request to come, unless they are being read."""
        self._prefetches = {last: future for last, future in self._prefetches.items() if not future.done()}
        if self._begun() and found[-1] not in self._prefetches:
            most = self.pages.memory.max_bytes // self._blocks.shape[1]
            self._prefetches[found[-1]] = self._prefetcher.submit(self._read, found[:most], 0)

    def demote(self, dead: list[bytes]) -> None:
        """Makes pages the first to go, once those that were completed before are copied."""
        if dead and self._begun():
            self._copier.submit(self.pages.demote, dead)

    def _begun(self) -> bool:
        """Whether pages have names, which depend on the statistics."""
        with self._lock:
            if not self.pages.begun and self._statistics.known():
                self.pages.begin(self._statistics.digest())
            return self.pages.begun

    # Storing.

    def store(self, found: Sequence[bytes], blocks: Sequence[int], first: int) -> None:
        """Stores complete pages of a request, from page number `first` on, by their links, in `blocks`; then they are `copied`."""
        self._copies = self._copier.submit(self._copy, found, blocks, first)

    def settle(self) -> None:
        """Waits until all pages are copied to the host."""
        if self._copies is not None:
            self._copies.result()

    def _copy(self, found: Sequence[bytes], blocks: Sequence[int], first: int) -> None:
        now = self.pages.now()
        try:
            self._begun()  # the first step has set the statistics
            with torch.cuda.stream(self._stream):  # None on a CPU
                for index, (link, block) in enumerate(zip(found, blocks, strict=True), first):
                    if not self.pages.touch(link, now, index):  # else another request has stored it
                        self._submit(link, self.pages.keep(link, self._blocks[block]), now, index)
        except Exception as error:  # in a thread of its own
            warnings.warn(f"pages are not stored: {error!r}", stacklevel=2)
        finally:
            self.copied.extend(blocks)

    def _submit(self, link: bytes, page: Snapshot, now: int, index: int) -> None:
        if self.pages.directory is None:
            return
        with self._lock:
            if self.unwritten and self.unwritten + page.nbytes > self.pages.memory.max_bytes:
                warnings.warn("pages are not written to the store: the disk is slower than the requests", stacklevel=2)
                return
            self.unwritten += page.nbytes
        self._writers.submit(self._write, link, page, now, index)

    def _write(self, link: bytes, page: Snapshot, now: int, index: int) -> None:
        reason = self.pages.write(link, page, now, index)
        with self._lock:
            self.unwritten -= page.nbytes
            self._counters.pages_written += reason is None
        if reason is not None:
            warnings.warn(f"a page is not written to the store: {reason}", stacklevel=2)

    def close(self) -> None:
        """Waits until all pages are written."""
        self.settle()
        reading = self._fetcher, self._prefetcher, self._readers
        for threads in (*reading, self._copier, self._writers):
            threads.shutdown(cancel_futures=threads in reading)
