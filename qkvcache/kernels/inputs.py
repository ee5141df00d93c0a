"""The inputs of attention of one layer for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .paged_inputs import PagedInputs
from .segments import KeysOrValues, Pair


class RunningStep:
    """The running step of a cache: the `plan` of attention that its first layer has made and its other layers run; None: none yet.

    The plan is of this process, and is not copied."""

    plan: Any = None

    def __getstate__(self) -> dict:
        return {}


@dataclass(eq=False)  # frozen ones take four times as long to make, at every step
class AttentionInputs:
    """The keys and values of one layer for one step, which are not changed.

    key, value  what the torch reference reads
    paged       the same as `PagedInputs`, for kernels; None where only torch can read the tokens
    joined      keys and values `[B, H, T, D]` of sinks and residual in one tensor each, where they are contiguous in memory
    running     the running step; None: its layers do not share a plan
    """

    key: KeysOrValues
    value: KeysOrValues
    paged: Any = None
    joined: Pair | None = None
    running: RunningStep | None = None

    @property
    def tokens(self) -> int:
        """Tokens of each row, or slots for them."""
        return self.key.shape[2]

    @property
    def counted(self) -> bool:
        """Whether the device counts the tokens, which are the same for all heads."""
        return self.paged is not None and self.paged.rows is not None and not self.by_head

    @property
    def compiled(self) -> bool:
        """Whether compiled code attends to these inputs by operators."""
        return self.paged is not None and self.paged.handle is not None

    @property
    def by_head(self) -> bool:
        """Whether each head has pages of its own. Slots without a token are left out by `paged`; attention over `key` and `value`,
        which have as many quantized tokens as the longest head, needs a mask for each head then."""
        return self.paged is not None and self.paged.pages.per_head


class TokenInputs(AttentionInputs):
    """Inputs of a step of one token, whose `key` and `value` are built if somebody asks: kernels do not need them.

    build   returns `key` and `value`
    tokens  tokens of each row
    """

    tokens = 0  # type: ignore[assignment]

    def __init__(self, build: Callable[[], tuple[KeysOrValues, KeysOrValues]], paged: PagedInputs | None, tokens: int) -> None:
        self.build, self.paged, self.joined, self.running, self.tokens = build, paged, None, None, tokens
        self.sides: tuple[KeysOrValues, KeysOrValues] | None = None

    @property
    def key(self) -> KeysOrValues:  # type: ignore[override]
        return self.built()[0]

    @property
    def value(self) -> KeysOrValues:  # type: ignore[override]
        return self.built()[1]

    def built(self) -> tuple[KeysOrValues, KeysOrValues]:
        """`key` and `value`, built once. (torch.compile traces no `cached_property`.)"""
        if self.sides is None:
            self.sides = self.build()
        return self.sides
