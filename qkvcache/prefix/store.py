"""`PrefixStore`: beginnings of prompts that need not be computed again, in memory and on disk, as compressed as the caches they go into.

Tokens are compared, so that a wrong prefix cannot be used; entries carry the name of the model, its weights, adapter and tokenizer
(`identity.py`) and of the kind of cache that they are for. Codes go in and codes come out: nothing is quantized a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..caches import CompressedCache
from ..formats import Format
from ..layers.snapshot import Snapshot
from ..policies import check_count
from . import match
from .checks import check_sizes, check_store
from .disk import Damaged
from .entry import Entry, Mould, TooLarge, batch, give, owned, take
from .identity import Identity
from .memory import Memory
from .place import Staging, layer_devices
from .prompt import Ids, compute, refusal, rows, text_tokens, written
from .ranks import Ranks
from .shelf import Shelf
from .stats import Match, Stats


class PrefixStore:
    """Keeps the keys and values of prompts, and hands them to later prompts that begin alike.

        store = PrefixStore(model, max_bytes=8 * 2**30, format="turboquant_4bit_nc", directory="prefixes")
        with store.reuse(ids) as past:
            model.generate(ids, past_key_values=past)

    Args:
        model: a decoder-only model.
        max_bytes: what entries may take in host memory, measured; those used longest ago make room. A larger one is stored nowhere.
        format: how the tokens of a DynamicCache are stored, and the format of the caches that `reuse` hands out.
        dense: hand out DynamicCaches, decoded, in place of compressed caches.
        min_quantize_tokens: shorter DynamicCaches are stored exact.
        min_match_tokens: shorter beginnings are neither stored nor handed out.
        directory: where entries are also written, to be found after a restart and by other processes; None keeps them in memory.
        max_disk_bytes: what all entries in the directory may take; None: ten times `max_bytes`.
        tokenizer: what makes the token ids; its vocabulary then counts among what entries depend on.
        identity: anything else that they depend on and the weights, which are sampled, do not show.
        **options: those of CompressedCache, for what `reuse` hands out: `policy`, `num_sink_tokens`, `residual_length`, `skip_layers`.

    Entries keep the form of the cache that they were stored from. Give the store the format of the caches that you hand it: after a restart
    it looks for no other. Not for use by several threads at once.

    Raises:
        ValueError: sizes that are negative, an unknown format, options that do not go together, a directory that cannot be written.
        TypeError: an argument of another type.
        NotImplementedError: an encoder-decoder model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_bytes: int,
        format: str | Format = "int8",
        dense: bool = False,
        min_quantize_tokens: int = 256,
        min_match_tokens: int = 16,
        directory: str | PathLike | None = None,
        max_disk_bytes: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        identity: str = "",
        **options,
    ):
        check_store(model, options, dense=dense, tokenizer=tokenizer, identity=identity, directory=directory)
        max_disk_bytes = 10 * max_bytes if max_disk_bytes is None else max_disk_bytes
        check_sizes(max_bytes, max_disk_bytes, min_quantize_tokens, min_match_tokens)
        self.model, self.dense, self.min_quantize_tokens = model, dense, min_quantize_tokens
        self.min_match_tokens = max(min_match_tokens, 1)
        self._template = Mould(CompressedCache(model.config, format=format, **options), model.config)
        self._dense = Mould(DynamicCache(config=model.config), model.config)
        self._moulds = {self._template.name: self._template}
        self._ranks = Ranks(model)
        self._identity = Identity(model, tokenizer, f"{identity} shard {self._ranks.rank} of {self._ranks.size}")
        self._memory = Memory(max_bytes)
        self._shelf = None if directory is None else Shelf(Path(directory), max_disk_bytes, model.config.model_type)
        self._stats = Stats()
        self._copy = Staging()

    @torch.no_grad()
    def fetch(self, ids: Ids) -> Match:
        """The longest stored beginning of `ids`, `[T]` or `[B, T]` with equal rows, in a cache of `B` rows that nothing else holds.

        At most `T - 1` tokens, since `generate` must have one to compute. Raises TypeError or ValueError for what are no token ids, and for
        rows that differ.
        """
        given = rows(ids)
        row = given[0]
        if any(not torch.equal(row, other) for other in given):
            raise ValueError(f"fetch got {len(given)} rows that differ: fetch one row at a time, with the cache of that row alone")
        limit = min(len(row) - 1, text_tokens(row, self.model.config))
        key = match.encode(self._identity.current(), row)
        self._scan()
        while (found := self._ranks.agree(lambda most: self._best(key, most), limit)) is not None:
            shelf, stored, tokens = found
            if shelf is None:
                entry = self._memory.use(stored)
                mould, errors = entry.mould, entry.errors
                layers: Iterable[Snapshot] = entry.cut(tokens)
            else:
                file, layers = shelf.get(stored), shelf.read(stored, tokens)
                mould, errors = self._moulds[file.mould], file.errors
            cache = self._fill(mould, layers)
            if not self._ranks.least(cache is not None) or cache is None:
                continue
            if len(given) > 1:
                cache.batch_repeat_interleave(len(given))
            self._stats.hits[kind := match.kind(stored, key)] += 1
            self._stats.tokens_reused += tokens
            return Match(cache, tokens, kind, "disk" if shelf else "memory", max(errors, default=0.0))
        self._stats.misses += 1
        return Match()

    def store(self, ids: Ids, cache: Cache) -> bool:
        """Stores what `cache` holds of `ids`, `[T]` or a row for each of the cache's: as many tokens as both have. The cache stays.

        A row of ids serves a cache of several rows, as beams are, if all of them began with it. Returns whether everything given is now
        stored; if not, `stats` says why. What an entry from such a cache holds already, in memory or on disk, stays as it is there.

        Raises TypeError or ValueError for what are no token ids, no cache, or other numbers of rows.
        """
        given = rows(ids)
        if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
            raise TypeError(f"cache must be the cache of a decoder, such as DynamicCache, got {type(cache).__name__}")
        held = batch(cache)
        if held and len(given) not in (1, held):
            raise ValueError(f"{len(given)} rows of ids for a cache of {held} rows: pass the ids of each row, or one that all began with")
        self._scan()
        return all([self._take(row, cache, number, padded=len(given) > 1) for number, row in enumerate(given)])

    @contextmanager
    def reuse(self, ids: Ids) -> Iterator[Cache]:
        """A cache for `model.generate(ids, past_key_values=past)` that holds what is stored of `ids`; takes in the prompt on exit.

        The cache is the store's: when the block ends it is emptied, one layer at a time as it is stored, so that nothing exists twice.
        Generated tokens are cut off. Where they cannot be, because the cache evicts or the model has sliding or linear layers, the prompt
        is computed here up to its last token and stored before the block runs. After an exception nothing is stored.

        What the block computes with the cache must be `ids`, and what may follow them: a cache does not know its tokens. For beams, samples
        or choices, call `past.batch_repeat_interleave(n)` first. To store the answer as well, call `store(output_ids, past)`.
        """
        found = self.fetch(ids)
        given = rows(ids)
        row = given[0]
        text = row[: text_tokens(row, self.model.config)]
        own = self._dense if self.dense and not self._template.evicts else self._template
        cache = own.cache() if found.cache is None else found.cache
        if found.cache is not None:
            own = self._mould(cache) if isinstance(cache, CompressedCache) else self._dense
        try:
            begin = text[: len(row) - 1]
            if not own.cuttable and not self._refuses(begin) and compute(self.model, begin.expand(len(given), -1), cache):
                self._take(begin, cache)
            yield cache
            if own.cuttable:
                self._take(text, cache, release=own)
        finally:
            cache.layers = own.layers()

    def trim(self, max_bytes: int, max_disk_bytes: int | None = None) -> None:
        """Drops what was used longest ago until entries take at most `max_bytes` in memory, and `max_disk_bytes` on disk if given."""
        check_count("max_bytes", max_bytes, of="bytes")
        if max_disk_bytes is not None:
            check_count("max_disk_bytes", max_disk_bytes, of="bytes")
            self._need_shelf().trim(max_disk_bytes)
        self._memory.trim(max_bytes)

    def save(self) -> int:
        """Writes the entries in memory that are not on disk, as after files were removed; returns how many."""
        shelf = self._need_shelf()
        self._scan()
        return sum(self._write(shelf, entry) for entry in self._memory.entries)

    def load(self) -> int:
        """Reads entries from disk into memory, those used last first, as many as fit beside what is there; returns how many."""
        shelf = self._need_shelf()
        self._scan()
        loaded = 0
        for key in shelf.newest(self._identity.current()):
            file = shelf.get(key)
            if self._memory.covering(key, file.mould) is None:
                with suppress(Damaged):
                    entry = owned(key, self._moulds[file.mould], shelf.read(key, file.tokens), file.errors)
                    loaded += self._memory.add_oldest(entry)
        return loaded

    @property
    def stats(self) -> Stats:
        """Counts so far and what is held now, a copy."""
        shelf = self._shelf
        now = replace(deepcopy(self._stats), entries=len(self), nbytes=self._memory.nbytes, evicted=self._memory.evicted)
        if shelf is None:
            return now
        files, disk_bytes = shelf.size()
        return replace(now, files=files, disk_bytes=disk_bytes, evicted_files=shelf.evicted, skipped=Counter(shelf.skipped))

    def __len__(self) -> int:
        return len(self._memory)

    def __repr__(self) -> str:
        where = "" if self._shelf is None else f", directory={str(self._shelf.directory)!r}"
        return (
            f"PrefixStore({self._template.text}, entries={len(self)}, bytes={self._memory.nbytes:,} of {self._memory.max_bytes:,}{where})"
        )

    # How.

    def _best(self, key: bytes, limit: int) -> tuple[Shelf | None, bytes, int] | None:
        """Where the longest match is (None: in memory, which goes before), its key and its tokens."""
        where, (stored, tokens) = None, self._memory.index.best(key, limit)
        if self._shelf is not None:
            on_disk, more = self._shelf.index.best(key, limit)
            if more > tokens:
                where, stored, tokens = self._shelf, on_disk, more
        return None if stored is None or tokens < self.min_match_tokens else (where, stored, tokens)

    def _fill(self, mould: Mould, layers: Iterable[Snapshot]) -> Cache | None:
        """None if the file that they come from turns out to be damaged or gone, which is then known."""
        into = self._dense if self.dense and not mould.evicts else mould
        try:
            return give(into, layers, mould, layer_devices(self.model, len(mould)), self._copy)
        except Damaged:
            return None

    @torch.no_grad()
    def _take(self, row: Tensor, cache: Cache, number: int = 0, padded: bool = False, release: Mould | None = None) -> bool:
        row = row[: min(cache.get_seq_length(), written(row, self.model.config))]
        tokens = len(row)
        try:
            if reason := self._refuses(row, padded):
                raise NotImplementedError(reason)
            mould = self._mould(cache)
            key = match.encode(self._identity.current(), row)
            if (held := self._memory.covering(key, mould.name)) is not None:
                self._memory.use(held)
                self._stats.covered += 1
                return True
            # What is fetched does not depend on whether it comes from memory or from disk: both hold what was given first.
            if self._shelf is not None and (held := self._shelf.covering(key, mould.name)) is not None:
                with suppress(Damaged):
                    errors, layers = self._shelf.get(held).errors, list(self._shelf.read(held, tokens))
                    cache.layers = release.layers() if release else cache.layers
                    self._memory.put(owned(key, mould, layers, errors, self._memory.max_bytes))
                    self._stats.covered += 1
                    return True
            entry = take(cache, mould, key, number, tokens >= self.min_quantize_tokens, self._memory.max_bytes, self._copy, release)
        except TooLarge:
            self._stats.rejected += 1
            return False
        except NotImplementedError as refusal:
            self._stats.refused[str(refusal)] += 1
            return False
        self._memory.put(entry)
        self._stats.stored += 1
        if self._shelf:
            self._write(self._shelf, entry)
        return True

    def _refuses(self, row: Tensor, padded: bool = False) -> str | None:
        return refusal(row, self.model.config, self.min_match_tokens, padded)

    def _write(self, shelf: Shelf, entry: Entry) -> bool:
        if shelf.covering(entry.key, entry.mould.name) is not None:
            return False
        if reason := shelf.write(entry):
            self._stats.refused[f"on disk: {reason}"] += 1
        return not reason

    def _mould(self, cache: Cache) -> Mould:
        """How what `cache` holds is stored: a compressed cache as it is, any other as the store's `format`."""
        mould = Mould(cache, self.model.config) if isinstance(cache, CompressedCache) else self._template
        return self._moulds.setdefault(mould.name, mould)

    def _scan(self) -> None:
        if self._shelf is not None:
            self._shelf.scan(self._identity.current(), self._moulds)

    def _need_shelf(self) -> Shelf:
        if self._shelf is None:
            raise ValueError("the store has no directory: pass directory=... when it is made")
        return self._shelf
