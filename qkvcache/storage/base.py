"""The base of storage: counts of the tokens seen, on the device and on the host, and snapshots."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.base import Codes
from ..kernels import Pair, dense
from .head_pages import HeadPages
from .paged import RowPages

SIDES = ("key", "value")


def check_room(seq_length: int, tokens: int, max_length: int) -> None:
    """Raises ValueError if `tokens` more than the `seq_length` tokens seen exceed `max_length`."""
    if seq_length + tokens > max_length:
        again = (
            "; with use_cache=False generate gives all tokens again at every step: pass no cache then" if 0 < seq_length < tokens else ""
        )
        raise ValueError(
            f"{seq_length} tokens and {tokens} more do not fit in max_length={max_length}: make the cache with a larger one, or call "
            f"reset() for another prompt{again}"
        )


def differ(stored: Tensor, given: Tensor) -> bool:
    """Whether two tensors `[B, H, T, D]` differ in batch, heads, head_dim or dtype."""
    a, b = stored.shape, given.shape
    return a[0] != b[0] or a[1] != b[1] or a[3] != b[3] or stored.dtype is not given.dtype


class LayerStorage:
    """The base of `Storage` and `EvictingStorage`.

    A count on the host would be compiled into compiled code as a constant. Compiled code therefore counts on the device
    and sets `uncounted` and `counts_stale` on the host; `sync_counts` reads the device once when an exact count is
    needed.
    """

    max_length: int | None
    """The most tokens that may be seen; None: no limit."""
    seq_length: int
    """Tokens seen, as counted on the host."""
    uncounted: int
    """Tokens of a compiled step that `seq_length` does not include yet."""
    counts_stale: bool
    """Whether compiled code ran since the host last read the counts: it may have run more than once."""
    tokens: RowPages | HeadPages
    num_sink_tokens: int
    sinks: Pair
    residual: Pair

    def device_length(self) -> int | Tensor:
        """Tokens seen: a 0-d tensor on the device, or an int while nothing is counted there."""
        raise NotImplementedError

    def read_counts(self) -> None:
        """Copies the counts from the device to the host."""
        raise NotImplementedError

    def advance(self, tokens: int) -> None:
        """Adds `tokens` to the counts on the host."""
        self.seq_length += tokens

    def reset_counts(self) -> None:
        self.seq_length = self.uncounted = 0
        self.counts_stale = False

    def record_compiled_step(self, tokens: int) -> None:
        self.uncounted, self.counts_stale = tokens, True

    def sync_counts(self) -> None:
        """Makes the counts on the host exact."""
        if self.counts_stale:
            self.read_counts()
            self.uncounted, self.counts_stale = 0, False

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more. Raises ValueError if `max_length` does not allow them."""
        if self.uncounted:
            self.advance(self.uncounted)
            self.uncounted = 0
        if self.max_length is not None:
            check_room(self.seq_length, tokens, self.max_length)

    def query_offset(self) -> int | Tensor:
        """Tokens seen, without waiting for the device."""
        return self.device_length() if self.counts_stale or torch.compiler.is_compiling() else self.seq_length

    def zones(self) -> tuple[Pair, Pair]:
        """The sinks and the residual in token order, keys and values `[B, H, T, D]` each. The quantized tokens lie between them."""
        raise NotImplementedError

    def attention_inputs(self):
        raise NotImplementedError

    def dense(self) -> Pair:
        """All stored tokens in the model's dtype, keys and values `[B, H, T, D]`."""
        inputs = self.attention_inputs()
        return dense(inputs.key), dense(inputs.value)

    def snapshot(self, row: int) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Row `row`, as views where possible.

        Returns tensors of one row named `key.sinks`, `key.region.<buffer>`, `key.statistics.<buffer>`, `key.residual`,
        and the same names with `value`, and counts that do not follow from shapes. Codes are not changed.
        """
        (sinks, residual), rows = self.zones(), slice(row, row + 1)
        region = self.tokens.snapshot(row)
        tensors: dict[str, Tensor] = {}
        for side, first, codes, statistics, last in zip(SIDES, sinks, region, self.tokens.statistics, residual, strict=True):
            tensors[f"{side}.sinks"] = first[rows]
            tensors |= {f"{side}.region.{name}": x for name, x in codes.items()}
            if self.tokens.calibrated:
                tensors |= {f"{side}.statistics.{name}": x[rows] for name, x in statistics.items()}
            tensors[f"{side}.residual"] = last[rows]
        return tensors, {}

    def check(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int) -> None:
        """Raises ValueError unless these are a valid snapshot, for `restore`, of a row that has seen `seen` tokens.
        Names, dtypes and shapes must be those of this storage, which is empty and on the meta device, with the
        snapshot's number of tokens in each zone."""
        like, codes = self.sinks, next((x for name, x in tensors.items() if name.startswith("key.region.")), None)
        region: tuple[Codes, Codes] = ({}, {}) if codes is None else self.tokens.form(codes)
        expected: dict[str, Tensor] = {}
        for side, statistics, x, planes in zip(SIDES, self.tokens.statistics, like, region, strict=True):
            for zone in ("sinks", "residual"):
                expected[f"{side}.{zone}"] = x.new_empty(*x.shape[:2], tensors[f"key.{zone}"].shape[2], x.shape[3])
            expected |= {f"{side}.region.{name}": plane for name, plane in planes.items()}
            expected |= {f"{side}.statistics.{name}": plane for name, plane in statistics.items()}
        expected |= self.metadata_form(tensors, codes)
        for name in sorted(expected.keys() | tensors.keys()):
            found, wanted = (f"{list(x[name].shape)} in {x[name].dtype}" if name in x else "missing" for x in (tensors, expected))
            if found != wanted:
                raise ValueError(f"{name!r} is {found}, expected {wanted}")
        sinks, residual = (tensors[f"key.{zone}"].shape[2] for zone in ("sinks", "residual"))
        if sinks != min(seen, self.num_sink_tokens):
            raise ValueError(f"{sinks} sinks after {seen} tokens")
        self.check_counts(tensors, numbers, seen, residual if codes is None else residual + codes.shape[2])

    def metadata_form(self, tensors: dict[str, Tensor], codes: Tensor | None) -> dict[str, Tensor]:
        """Empty tensors of the shapes and dtypes of a snapshot's metadata. `codes`: a plane of codes of the
        snapshot."""
        return {}

    def check_counts(self, tensors: dict[str, Tensor], numbers: dict[str, int], seen: int, stored: int) -> None:
        """Raises ValueError unless the counts of a snapshot agree with each other and with `seen`. Its tensors have
        been checked. `stored`: columns of the region and of the residual."""
        if numbers or stored != max(seen - self.num_sink_tokens, 0):
            raise ValueError(f"{stored} tokens and counts {numbers}, after {seen} tokens")

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, int]) -> None:
        """Copies the result of `snapshot` into this storage, which must be empty."""
        codes, statistics = ((_named(tensors, f"key.{zone}."), _named(tensors, f"value.{zone}.")) for zone in ("region", "statistics"))
        self.tokens.load(codes, statistics)


def _named(tensors: dict[str, Tensor], prefix: str) -> Codes:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
