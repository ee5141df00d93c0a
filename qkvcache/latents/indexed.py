"""Layers whose model attends to the tokens that an indexer chooses (DeepSeek-V3.2, GLM-5, Qwen4 and others)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention.uncompiled import uncompiled
from ..autocast import without_autocast
from ..formats import Identity
from ..formats.base import Codes
from ..formats.int8 import SymmetricInt8
from ..layers.compressed import POSITIONS
from ..storage import selected
from .layer import LatentLayer


class IndexedLayer(LatentLayer):
    """A `LatentLayer` with the keys of an indexer: INT8 in every format but an exact one.

    Args:
        exact_indexer: whether they stay in the model's dtype, because they hold more than a key (GLM-5.3: gates and flags).
        **options: options of the layer without an indexer.

    Raises NotImplementedError for steps that are compiled while storage grows.
    """

    def __init__(self, *args: Any, exact_indexer: bool = False, **options: Any):
        super().__init__(*args, **options)
        if self.is_compileable and self.max_length is None:
            raise NotImplementedError("compile=True with indexed attention: pass max_length")
        exact = exact_indexer or isinstance(self.format, Identity)
        self.indexer_codec = Identity().key if exact else SymmetricInt8()
        self.indexer_codes: Codes = {}
        """Codes of the indexer's keys, `[B, 1, T, width]`; `T` is `max_length` where there is one."""
        self.indexer_empty = True
        """Whether there are no keys of the indexer."""
        self.indexer_length: Tensor | None = None
        """Tokens in codes of `max_length`, int64 `[]`."""
        self.indexer_position_ids: Tensor | None = None
        """Positions of all tokens `[dims, B, T]`, which a model may keep here for its indexers (Qwen4)."""

    is_restorable = False

    def why_not_taken(self) -> str | None:
        return f"the contents of a preallocated {type(self).__name__} cannot be taken out" if self.is_compileable else None

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """A tensor without memory: a model reads the number of columns of its shape."""
        columns = self.storage.columns if self.is_compileable and not self.indexer_empty else self.get_seq_length()  # type: ignore[union-attr]
        return torch.empty(self.rows, 1, columns, 0, dtype=torch.float32, device="meta")

    @without_autocast("indexer_key_states")
    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Stores keys `[B, T, D]`. Returns the keys of all tokens, or of `max_length` tokens once there are any, `[B, columns, D]`."""
        _ = self.storage  # the current stream waits for tokens that are being copied
        new = self.indexer_codec.quantize(indexer_key_states.detach()[:, None], {})
        if self.max_length is None:
            held = self.indexer_codes
            self.indexer_codes = {name: torch.cat([held[name], x], dim=2) if held else x for name, x in new.items()}
        else:
            if self.indexer_length is None:
                self._allocate_indexer(new, self.max_length)
            length: Tensor = self.indexer_length  # type: ignore[assignment]
            at = torch.arange(indexer_key_states.shape[1], device=length.device) + length
            for name, x in new.items():
                self.indexer_codes[name].index_copy_(2, at, x)
            length += len(at)
        if self.indexer_empty:
            self.indexer_empty = False
            return indexer_key_states
        codes = self.indexer_codes
        if self.max_length is not None and self._differentiates():
            codes = {name: x[:, :, : int(length)] for name, x in codes.items()}
        return self.indexer_codec.dequantize(codes, indexer_key_states.shape[2], indexer_key_states.dtype)[:, 0]

    @uncompiled("storage is made outside of compiled code: read the prompt before")
    def _allocate_indexer(self, new: Codes, tokens: int) -> None:
        with torch.inference_mode(False):
            self.indexer_codes = {name: x.new_zeros(*x.shape[:2], tokens, x.shape[3]) for name, x in new.items()}
            self.indexer_length = torch.zeros((), dtype=torch.int64, device=next(iter(new.values())).device)
        for x in (*self.indexer_codes.values(), self.indexer_length):
            torch._dynamo.mark_static_address(x)

    @without_autocast()
    def dense_indexer(self) -> Tensor | None:
        """The keys of all tokens in the model's dtype, `[B, T, D]`; None if there are none."""
        codes = self.indexer_codes
        return self.indexer_codec.dequantize(codes, codes["codes"].shape[3], self.dtype)[:, 0] if codes else None

    @property
    def indexer(self) -> Codes:
        """The tensors of the indexer by name, `[B, N, T, width]`: codes of its keys, and positions."""
        ids = self.indexer_position_ids
        return self.indexer_codes | ({} if ids is None else {POSITIONS: ids.transpose(0, 1)[..., None]})

    @indexer.setter
    def indexer(self, tensors: Codes) -> None:
        self.indexer_codes = {name: x for name, x in tensors.items() if name != POSITIONS}
        ids = tensors.get(POSITIONS)
        self.indexer_position_ids = None if ids is None else ids[..., 0].transpose(0, 1)

    def restore_indexer(self, tensors: Codes) -> None:
        """Gives the layer, which has the tokens, the tensors of `indexer`."""
        self.indexer = tensors
        self.indexer_empty = not self.indexer_codes

    def _change_indexer(self, change: Callable[[Tensor], Tensor]) -> None:
        self.indexer = {name: change(x) for name, x in self.indexer.items()}

    def crop(self, tokens_to_remove: int) -> None:
        seq_length = self.get_seq_length()
        super().crop(tokens_to_remove)
        left = max(seq_length + tokens_to_remove, 0)
        self.indexer_empty = not left
        codes = self.indexer_codes
        self._change_indexer(lambda x: x[:, :, :left])
        if self.indexer_length is not None:
            self.indexer_length.fill_(left)
            self.indexer_codes = codes

    def reset(self) -> None:
        super().reset()
        self.indexer_empty, self.indexer_position_ids = True, None
        if self.indexer_length is not None:
            self.indexer_length.zero_()
        else:
            self.indexer_codes = {}

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        if rows and self.indexer_codes:
            index = torch.tensor(rows, dtype=torch.int64, device=next(iter(self.indexer_codes.values())).device)
            fixed = self.max_length is not None and len(rows) == len(next(iter(self.indexer_codes.values())))  # addresses stay
            self._change_indexer(lambda x: selected(x, index, fixed))

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        self._change_indexer(lambda x: x.to(device, non_blocking=True))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors()
        for name, x in self.indexer_codes.items():
            yield "codes" if name == "codes" else "scales", x
        yield from (("bookkeeping", x) for x in (self.indexer_length, self.indexer_position_ids) if x is not None)

    @property
    def dense_bytes(self) -> int:
        keys = self.indexer_codes.get("codes")
        return super().dense_bytes + (0 if keys is None else self.get_seq_length() * keys.shape[0] * keys.shape[3] * self.dtype.itemsize)
