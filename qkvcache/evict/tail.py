"""`Tail`: the last tokens of a layer that evicts, in the model's dtype, and their metadata, in a ring."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import Pair, both
from ..storage.ring import in_order, put

TokenFields = dict[str, Tensor]
"""`positions` int32, and `score`, `key_norm`, `value_norm` fp32 if the policy needs them: `[B, H, T]` each."""


class Tail:
    """Keys and values `[B, H, R, D]`, and fields `[B, H, R]`: token `i` of `count` is in slot `(start + i) % R`. Scores of slots without a
    token are 0."""

    def __init__(self, sides: Pair, fields: TokenFields):
        self.set(sides, fields)

    def set(self, sides: Pair, fields: TokenFields) -> None:
        """Takes all tokens, in order, in place of those before."""
        self.sides, self.fields, self.start = sides, fields, 0
        self.count = self.slots = sides[0].shape[2]

    def of(self, x: Tensor, begin: int = 0, count: int | None = None) -> Tensor:
        """The tokens from `begin` on in a side or field `x`, in order: `count` tokens, or all."""
        return in_order(x, self.start + begin, self.count - begin if count is None else count)

    def tokens(self) -> Pair:
        """Keys and values `[B, H, count, D]` in order."""
        return both(self.of, self.sides)

    def part(self, begin: int, count: int) -> tuple[Pair, TokenFields]:
        """`count` tokens from `begin` on, in order, `[B, H, count, D]`, and their fields, as views where possible."""
        (key, value), fields, at = self.sides, dict(self.fields), (self.start + begin) % max(self.slots, 1)
        end = at + count
        if end > self.slots:
            return both(lambda x: self.of(x, begin, count), self.sides), {name: self.of(x, begin, count) for name, x in fields.items()}
        for name, x in fields.items():
            fields[name] = x[:, :, at:end]
        return (key[:, :, at:end], value[:, :, at:end]), fields

    def write(self, x: Tensor, begin: int, new: Tensor) -> None:
        """Writes `new`, `[B, H, N, ...]`, to the tokens from `begin` on in a side or field `x`."""
        put(x, self.start + begin, new)

    def extend(self, new: Pair) -> None:
        """Adds the tokens of a step, `[B, H, N, D]`, whose fields are 0 until they are written. The tensors of a single step are not
        copied."""
        count = new[0].shape[2]
        fields = {name: F.pad(self.of(x), (0, count)) for name, x in self.fields.items()}
        if self.count:
            key, value = (torch.cat(sides, dim=2) for sides in zip(self.tokens(), new, strict=True))
            new = key, value
        self.set(new, fields)

    def resize(self, slots: int) -> None:
        """Copies the tokens into a ring of so many slots."""
        count = self.count
        with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside of it
            sides = both(lambda x: x.new_zeros(*x.shape[:2], slots, x.shape[3]), self.sides)
            fields = {name: x.new_zeros(*x.shape[:2], slots) for name, x in self.fields.items()}
        old = *self.sides, *self.fields.values()
        for ring, x in zip((*sides, *fields.values()), old, strict=True):
            ring[:, :, :count] = self.of(x)
        self.set(sides, fields)
        self.count = count

    def drop(self, count: int) -> None:
        """Removes the first `count` tokens."""
        if "score" in self.fields and count:
            score, at = self.fields["score"], self.start
            if score.is_inference() and not torch.is_inference_mode_enabled():
                score = self.fields["score"] = score.clone()
            score[:, :, at : at + count] = 0
            if at + count > self.slots:
                score[:, :, : at + count - self.slots] = 0
        self.start, self.count = (self.start + count) % max(self.slots, 1), self.count - count

    def by_slot(self, x: Tensor) -> Tensor:
        """`x` `[B, H, N + count]`, of other columns and of the tokens in order, as `[B, H, N + R]`, by slot."""
        if not self.start and self.count == self.slots:
            return x
        others = x.shape[2] - self.count
        out = F.pad(x[:, :, :others], (0, self.slots))
        self.write(out[:, :, others:], 0, x[:, :, others:])
        return out
