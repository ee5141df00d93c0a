"""`PrefixStore`: stored beginnings of prompts, in memory and on disk, in the formats of the caches that use them.

It matches prompts with entries (`match.py`, `entry.py`) in memory and on disk (`memory.py`, `disk.py`). What images and checkpoints add is
in `media.py` and `checkpoints.py`, what caches are like in `template.py`.

Tokens are compared, so that a wrong prefix cannot be used. Entries are named after the model, its weights, adapter and tokenizer
(`identity.py`) and the cache template. Codes are stored and restored as they are; nothing is quantized a second time.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import takewhile
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..attention.continued import check_continues, remember
from ..caches import CompressedCache
from ..formats import FormatLike
from ..formats.base import check_count
from . import match
from .checkpoints import Checkpoints, computed, thinned
from .disk import Damaged, DiskStore, file_name, read_checkpoints
from .entry import Entry, TooLarge, batch_size, snapshot_cache
from .host_memory import Blocks, on_host
from .identity import ModelIdentity, Ranks
from .media import DIGEST, Positions, unbroken
from .memory import MemoryStore
from .pages import StoredPages
from .prompt import Inputs, refusal, rotated_alike, rows, text_tokens, unpadded
from .snapshot import Snapshot
from .stats import Match, Stats
from .template import CacheTemplate, Templates


class PrefixStore:
    """Stores the keys and values of prompts for later prompts that begin with the same tokens.

        store = PrefixStore(model, max_bytes=8 * 2**30, format="turboquant_4bit_nc", directory="prefixes")
        with store.reuse(ids) as past:
            model.generate(ids, cache=past)

    Args:
        model: a decoder-only model.
        max_bytes: the most bytes of all entries in host memory, measured. The least recently used entries are removed;
            an entry larger than `max_bytes` is not stored.
        format: the format in which the tokens of a DynamicCache are stored, and of the caches that `reuse` returns.
        dense: whether DynamicCaches, dequantized, are returned in place of compressed caches.
        min_quantize_tokens: shorter DynamicCaches are stored exact.
        min_match_tokens: shorter beginnings are neither stored nor fetched.
        checkpoint_interval: tokens between checkpoints of recurrent states and sliding windows, from which prompts with as much in common
            go on; 0: only the ends of stored prompts. A checkpoint takes the bytes of these states and windows, and counts in `max_bytes`.
        directory: a directory to which entries are also written, for other processes and later runs; None keeps them in
            memory only.
        max_disk_bytes: the most bytes of all entries in the directory; None: ten times `max_bytes`.
        time_to_live: seconds after their last use for which entries and pages are kept, in memory and on disk; None: for ever.
            They are removed when a prompt looks for them, and whenever room is made.
        tokenizer: the tokenizer of the token ids; if given, entries are used only with the same vocabulary.
        identity: anything else that entries depend on and that a sample of the weights does not show.
        **options: options of the caches that `reuse` returns, as CompressedCache takes them, of caches that grow.

    Entries keep the format of the cache that they were stored from. Give the store the format of the caches that you
    store: after a restart it finds only entries of this format. Threads may use a store at the same time: each call waits for the others,
    and models run beside each other. Threads cannot share a model that keeps the positions of its latest prompt (`rope_deltas`).

    Raises:
        ValueError: negative sizes, an unknown format, options that exclude each other, a directory that cannot be written.
        TypeError: an argument of another type.
        NotImplementedError: an encoder-decoder model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_bytes: int,
        format: FormatLike = "int8",
        dense: bool = False,
        min_quantize_tokens: int = 256,
        min_match_tokens: int = 16,
        checkpoint_interval: int = 2048,
        directory: str | PathLike | None = None,
        max_disk_bytes: int | None = None,
        time_to_live: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        identity: str = "",
        **options,
    ):
        _check_model(model, tokenizer, dense, options)
        typed = {
            "dense": (dense, bool, "True or False"),
            "directory": (directory, str | PathLike | None, "a path"),
            "time_to_live": (time_to_live, int | float | None, "seconds or None"),
            "identity": (identity, str, "a string"),
        }
        for name, (value, kind, words) in typed.items():
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be {words}, got {value!r}")
        if time_to_live is not None and time_to_live <= 0:
            raise ValueError(f"time_to_live={time_to_live}: must be more than 0 seconds; leave it out to keep entries for ever")
        max_disk_bytes = 10 * max_bytes if max_disk_bytes is None else max_disk_bytes
        check_count("max_bytes", max_bytes, of="bytes")
        check_count("max_disk_bytes", max_disk_bytes, of="bytes")
        check_count("min_quantize_tokens", min_quantize_tokens)
        check_count("min_match_tokens", min_match_tokens)
        check_count("checkpoint_interval", checkpoint_interval)
        self.model, self.dense, self.min_quantize_tokens = model, dense, min_quantize_tokens
        self.min_match_tokens, self.checkpoint_interval = max(min_match_tokens, 1), checkpoint_interval
        own = CacheTemplate(CompressedCache(model.config, format=format, **options), model.config)
        self._templates = Templates(own, model.config, dense)
        self._ranks = Ranks(model)
        self._identity = ModelIdentity(model, tokenizer, f"{identity} shard {self._ranks.rank} of {self._ranks.size}")
        self._memory = MemoryStore(max_bytes, time_to_live)
        self._disk = None if directory is None else DiskStore(Path(directory), max_disk_bytes, model.config.model_type, time_to_live)
        self._pages: list[StoredPages] = []
        self._stats = Stats()
        self._lock = threading.RLock()
        """Held by calls, but not while a model runs."""
        self._positions = Positions(model)

    def fetch(self, ids: Inputs) -> Match:
        """Returns the longest stored beginning of `ids`, `[T]` or `[B, T]` with equal rows, in a new cache of `B` rows.

        `ids` may be the inputs of a prompt with images, as a processor returns them; they match as far as they show the same.
        The beginning has at most `T - 1` tokens, since `generate` needs one to compute. Raises TypeError or ValueError for invalid token
        ids, and for rows that differ.
        """
        inputs = rows(ids, self.model.config)
        with self._lock:
            return self._fetch(inputs)

    @torch.no_grad()
    def _fetch(self, inputs: list[Tensor]) -> Match:
        row = inputs[0]
        if any(not torch.equal(row, other) for other in inputs[1:]):
            raise ValueError(f"fetch got {len(inputs)} rows that differ: fetch one row at a time, with the cache of that row alone")
        limit = min(len(row) - 1, text_tokens(row, self.model.config)) if len(row) <= rotated_alike(self.model.config) else 0
        keys = self._keys(self._scanned(), row)
        while (longest := self._ranks.agree(lambda most: self._longest(keys, most), limit)) is not None:
            disk, stored, tokens = longest
            template, cache = self._templates.named(stored), None
            with suppress(Damaged):  # the file is not used again
                if disk is not None:
                    layers = disk.read(stored, tokens, Blocks() if self._on_gpu else None, template)
                    cache = template.restore(layers, self._devices(), self._templates.into(template))
                elif entry := self._memory.use(stored):  # another thread may have made room since
                    cache = template.restore(entry.cut(tokens), self._devices(), self._templates.into(template))
            if not self._ranks.least(cache is not None) or cache is None:
                continue
            if len(inputs) > 1:
                cache.batch_repeat_interleave(len(inputs))
            _remember(cache, inputs)
            self._positions.forget()
            kind = match.kind(stored, stored[: match.NAME] + keys[0][match.NAME :])
            self._stats.hits[kind] += 1
            self._stats.tokens_reused += tokens
            return Match(cache, tokens, kind, "disk" if disk else "memory")
        self._stats.misses += 1
        return Match()

    def store(self, ids: Inputs, cache: Cache) -> bool:
        """Stores the tokens of `ids`, `[T]` or one row for each row of `cache`, or of inputs with images, as far as `cache` holds them. The
        cache is not changed.

        One row of ids serves a cache whose rows all began with it, for example beams. Returns whether all rows are
        stored now; if not, `stats` has the reason. An entry is not stored again if another entry of the same template,
        in memory or on disk, holds its tokens.

        Raises TypeError or ValueError for invalid token ids, an argument that is not a cache, another number of rows, or a cache that is
        known to have seen other tokens.
        """
        inputs = rows(ids, self.model.config)
        if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
            raise TypeError(f"cache must be the cache of a decoder, such as DynamicCache, got {type(cache).__name__}")
        batch = batch_size(cache)
        if batch and len(inputs) not in (1, batch):
            raise ValueError(f"{len(inputs)} rows of ids for a cache of {batch} rows: pass the ids of each row, or one that all began with")
        if not _digested(inputs):
            check_continues(cache, torch.stack(inputs))
        with self._lock:
            identity = self._scanned()
            return all([self._store(row, cache, identity, number, padded=len(inputs) > 1) for number, row in enumerate(inputs)])

    @contextmanager
    def reuse(self, ids: Inputs) -> Iterator[Cache]:
        """A cache for `model.generate(ids, cache=past)` that holds the stored beginning of `ids`; stores the prompt on exit.

        The cache belongs to the store: on exit each layer is stored and then emptied, so that only one layer is in
        memory twice. Generated tokens are cut off. If the cache cannot be cut, because not all tokens stay or the model has
        sliding or linear layers, the prompt up to its last token is computed and stored before the block runs: at once
        if not all tokens stay, else in steps of `checkpoint_interval` tokens with a checkpoint after each. After an exception nothing is
        stored.

        The block must run the model on `ids`, and then on any further tokens, with this cache: the store cannot check
        it. For beams, samples or choices, call `past.batch_repeat_interleave(n)` first. To store the answer too, call
        `store(output_ids, past)`.

        For a prompt with images, videos or sounds, pass what the processor returned, of one row; the model reads those that the cache
        does not hold (`remaining`). With ids alone, a prompt is stored up to the first of them.

            with store.reuse(inputs) as past:
                out = model.generate(**remaining(model, inputs, past), cache=past)
                store.store({**inputs, "input_ids": out}, past)
        """
        with self._positions.kept():
            yield from self._reuse(ids)

    def _reuse(self, ids: Inputs) -> Iterator[Cache]:
        inputs = rows(ids, self.model.config)
        with self._lock:
            cache, row = self._fetch(inputs).cache, inputs[0]
        text = row[: text_tokens(row, self.model.config)]
        template = self._templates.into(self._templates.own)
        if cache is None:
            cache = template.cache()
        elif isinstance(cache, CompressedCache):
            template = self._templates.of(cache)
        try:
            begin = text[: unbroken(row, min(len(text), len(row) - 1))]
            with self._lock:
                computes = not template.cuttable and self._may_store(begin)
            if computes:
                self._compute(begin, ids, cache, len(inputs), self.checkpoint_interval if template.keeps_all else 0)
            yield cache
            if template.cuttable:
                with self._lock:
                    self._store(text, cache, self._identity.current(), release=True)
        finally:
            cache.layers = template.layers()
            _remember(cache, inputs)  # that it has seen none

    def pages(self, format: str, layout: str, size: int) -> StoredPages:
        """The pages of continuous batching of `size` tokens in a format and layout (`continuous_batching(store=)`)."""
        with self._lock:
            found = StoredPages(self._memory, self._disk, self._identity.current(), format, layout, size, self._on_gpu)
            self._pages.append(found)
        return found

    def pin(self, ids: Inputs) -> int:
        """Keeps the stored tokens of `ids` `[T]`, a system prompt for example, whatever their age and the room that others need: in
        memory and, for all processes, on disk, until `unpin`. Pinned bytes count in `max_bytes` and `max_disk_bytes`.

        Pins an entry of exactly these tokens, which is cut from a longer one if need be, and the full pages that `continuous_batching`
        has stored of them. Returns the number of tokens that are pinned. Raises ValueError if nothing of them is stored.
        """
        with self._lock:
            keys, words = self._pinnable(ids)
            entries = [entry for key in keys if (entry := self._entry(key)) is not None]
            for entry in entries:
                if self._disk is not None:
                    if self._disk.file(entry.key) is None and (reason := self._disk.write(entry)):
                        raise ValueError(f"the pinned entry is not on disk: {reason}")
                    self._disk.pin(file_name(entry.key))
                self._memory.pin(entry.key)
                self._memory.put(entry.key, entry)
            pinned = [pages.pin(words) for pages in self._pages] + [match.length(entry.key) for entry in entries]
            if not any(pinned):
                raise ValueError(f"no entry or page holds these {len(words)} tokens: store them first, by reuse(ids) or store(ids, cache)")
            return max(pinned)

    def unpin(self, ids: Inputs) -> None:
        """Lets the stored tokens of `ids` `[T]` be removed again. What is not pinned stays as it is."""
        with self._lock:
            keys, words = self._pinnable(ids)
            for pages in self._pages:
                pages.pin(words, False)
            for key in keys:
                self._memory.pin(key, False)
                if self._disk is not None and self._disk.file(key) is not None:
                    self._disk.pin(file_name(key), False)

    def _pinnable(self, ids: Inputs) -> tuple[list[bytes], list[int]]:
        """The keys of `ids`, and the tokens before the first image."""
        inputs = rows(ids, self.model.config)
        if len(inputs) > 1:
            raise ValueError(f"pin and unpin take the ids of one row, got {len(inputs)} rows")
        return self._keys(self._scanned(), inputs[0]), list(takewhile(lambda word: word < DIGEST, inputs[0].tolist()))

    def _entry(self, key: bytes) -> Entry | None:
        """An entry of exactly the tokens of `key`, from one in memory or on disk that begins with them; None if there is none."""
        if (stored := match.covering(self._memory.cuts, key)) is None:
            return self._loaded(key, self._memory.max_bytes)
        entry = self._memory.use(stored)
        if stored == key:
            return entry
        layers = [on_host(layer, self._on_gpu) for layer in entry.cut(match.length(key))]
        return Entry(key, entry.template, layers, entry.checkpoints_within(key))

    def _loaded(self, key: bytes, room: int) -> Entry | None:
        """An entry of exactly the tokens of `key`, of at most `room` bytes, from a file that begins with them; None if there is none."""
        if self._disk is None or (stored := match.covering(self._disk.cuts, key)) is None or (file := self._disk.file(stored)) is None:
            return None
        layers, left, tokens = list[Snapshot](), room - len(key), match.length(key)
        copy, template = partial(on_host, lock=self._on_gpu), self._templates.named(key)
        with suppress(Damaged):
            for layer in self._disk.read(stored, tokens, copy, template):
                layers.append(layer)
                if (left := left - layer.nbytes) < 0:
                    return None
            return Entry(key, template, layers, thinned(read_checkpoints(file, tokens - 1, copy), left))
        return None

    def trim(self, max_bytes: int, max_disk_bytes: int | None = None) -> None:
        """Removes the least recently used entries until at most `max_bytes` are in memory, and `max_disk_bytes` on disk if given. Pinned
        ones stay."""
        with self._lock:
            check_count("max_bytes", max_bytes, of="bytes")
            if max_disk_bytes is not None:
                check_count("max_disk_bytes", max_disk_bytes, of="bytes")
                self._require_disk().trim(max_disk_bytes)
            self._memory.trim(max_bytes)

    def save(self) -> int:
        """Writes the entries in memory that are not on disk, for example after files were removed; returns their
        number."""
        with self._lock:
            disk = self._require_disk()
            self._scanned()
            return sum(self._write(disk, entry) for entry in self._memory.entries)

    def load(self) -> int:
        """Reads entries from disk into memory, the most recently used first, as many as fit beside the present ones;
        returns their number."""
        with self._lock:
            disk = self._require_disk()
            loaded, room = list[Entry](), self._memory.max_bytes - self._memory.nbytes
            for key in disk.newest(self._scanned()):
                if match.covering(self._memory.cuts, key) is None and (entry := self._loaded(key, room)) is not None:
                    loaded.append(entry)
                    room -= entry.nbytes
            for entry in reversed(loaded):
                self._memory.pin(entry.key, disk.is_pinned(file_name(entry.key)))
                self._memory.put(entry.key, entry)
            return len(loaded)

    @property
    def stats(self) -> Stats:
        """A copy of the counts, with the current size."""
        with self._lock:
            counts = deepcopy(self._stats)
        now = replace(counts, entries=len(self), nbytes=self._memory.nbytes, evicted=self._memory.removed)
        if (disk := self._disk) is None:
            return now
        files, disk_bytes = disk.size()
        return replace(now, files=files, disk_bytes=disk_bytes, evicted_files=disk.removed, skipped=Counter(disk.skipped))

    def __len__(self) -> int:
        return len(self._memory.entries)

    def __repr__(self) -> str:
        where = "" if self._disk is None else f", directory={str(self._disk.directory)!r}"
        text, memory = self._templates.own.text, self._memory
        return f"PrefixStore({text}, entries={len(self)}, bytes={memory.nbytes:,} of {memory.max_bytes:,}{where})"

    def _keys(self, identity: bytes, row: Tensor) -> list[bytes]:
        """The key of a row for each template."""
        return [match.encode(identity + template, row) for template in self._templates.names]

    def _longest(self, keys: list[bytes], limit: int) -> tuple[DiskStore | None, bytes, int] | None:
        """The longest match: its store (None: memory, which is preferred), its key and its number of tokens."""
        stores = [None] if self._disk is None else [None, self._disk]
        found = [(disk, *match.best((disk or self._memory).cuts, key, limit)) for disk in stores for key in keys]
        longest = max(found, key=lambda one: one[2])
        return longest if longest[2] >= self.min_match_tokens else None

    def _compute(self, row: Tensor, inputs: Inputs, cache: Cache, count: int, interval: int) -> None:
        """Computes the tokens of `row`, the beginning of `inputs`, that `cache`, of `count` rows, has not seen, and stores them with
        checkpoints."""
        self._positions.forget()
        checkpoints = computed(self.model, row, inputs, count, cache, interval, self._memory.max_bytes // 2)
        if checkpoints is not None:
            with self._lock:
                self._store(row, cache, self._identity.current(), checkpoints=checkpoints)

    def _devices(self) -> list[torch.device]:
        """The device of each layer."""
        other = self.model.device
        return [self._identity.devices.get(i, other) for i in range(len(self._templates.own))]

    @property
    def _on_gpu(self) -> bool:
        """Whether a layer is on a GPU, for which host memory is locked."""
        return any(device.type == "cuda" for device in self._devices())

    @torch.no_grad()
    def _store(
        self,
        row: Tensor,
        cache: Cache,
        identity: bytes,
        number: int = 0,
        padded: bool = False,
        release: bool = False,
        checkpoints: Checkpoints | None = None,
    ) -> bool:
        seen = cache.get_seq_length()
        row = row[: unbroken(row, min(seen, unpadded(row, self.model.config)))]
        if not self._may_store(row, padded, seen):
            return False
        most = self._memory.max_bytes
        try:
            template = self._templates.of(cache)
            key = match.encode(identity + template.name, row)
            if (covering := match.covering(self._memory.cuts, key)) is not None:
                self._memory.use(covering)
                self._stats.covered += 1
                return True
            # A fetch must give the same result from memory and from disk: both keep the entry that was stored first.
            if (entry := self._loaded(key, most)) is not None:
                self._memory.put(key, entry)
                self._stats.covered += 1
                return True
            entry = snapshot_cache(cache, template, key, number, len(row) >= self.min_quantize_tokens, most, release)
            if entry.cuts is not None:
                known = checkpoints or {}
                for other in self._memory.entries if template.keeps_all else ():
                    known = other.checkpoints_within(key) | known
                entry = replace(entry, checkpoints=thinned(known, most - entry.nbytes))
        except TooLarge:
            self._stats.rejected += 1
            return False
        except NotImplementedError as refused:  # as it will be for later prompts
            if str(refused) not in self._stats.refused:
                warnings.warn(f"the PrefixStore does not store this cache: {refused}", stacklevel=3)
            self._stats.refused[str(refused)] += 1
            return False
        self._memory.put(key, entry)
        self._stats.stored += 1
        if self._disk:
            self._write(self._disk, entry)
        return True

    def _may_store(self, row: Tensor, padded: bool = False, seen: int = 0) -> bool:
        """Whether a row may be stored; if not, the reason is counted."""
        if reason := refusal(row, self.model.config, self.min_match_tokens, padded, seen):
            self._stats.refused[reason] += 1
        return not reason

    def _write(self, disk: DiskStore, entry: Entry) -> bool:
        if match.covering(disk.cuts, entry.key) is not None:
            return False
        if reason := disk.write(entry):
            self._stats.refused[f"on disk: {reason}"] += 1
        return not reason

    def _scanned(self) -> bytes:
        """The identity of the model. Also finds the files that other processes have written for it."""
        identity = self._identity.current()
        self._memory.trim()
        if self._disk is not None:
            self._disk.scan(identity, self._templates.names)
        return identity

    def _require_disk(self) -> DiskStore:
        if self._disk is None:
            raise ValueError("the store has no directory: pass directory=... when it is made")
        return self._disk


def _digested(inputs: list[Tensor]) -> bool:
    """Whether digests of images stand among the token ids."""
    return any(bool((row >= DIGEST).any()) for row in inputs)


def _remember(cache: Cache, inputs: list[Tensor]) -> None:
    """Notes which tokens are in the cache."""
    if not _digested(inputs):
        remember(cache, torch.stack(inputs))


def _check_model(model: object, tokenizer: object, dense: bool, options: dict) -> None:
    """Raises TypeError, ValueError or NotImplementedError for a model and options of caches that cannot be stored."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig) or not isinstance(model, torch.nn.Module):  # peft wraps models
        raise TypeError(f"model must be a transformers model, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise NotImplementedError(f"{config.model_type} is an encoder-decoder model: its cache depends on more than a prefix")
    if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
        raise TypeError(f"tokenizer must be a transformers tokenizer, got {tokenizer!r}")
    if options.get("max_length") is not None:
        raise ValueError(f"max_length={options['max_length']}: the caches of a store grow; leave it out")
    if dense and options.get("policy") is not None:
        raise ValueError("dense=True with a policy: a cache that evicts has no dense form; leave one of them out")
