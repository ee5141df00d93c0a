"""How many tokens a storage has seen: on the device, and on the host beside it, so that nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor


def check_room(seen: int, tokens: int, max_length: int) -> None:
    if seen + tokens > max_length:
        again = "; with use_cache=False generate gives all tokens again at every step: pass no cache then" if 0 < seen < tokens else ""
        raise ValueError(
            f"{seen} tokens and {tokens} more do not fit in max_length={max_length}: make the cache with a larger one, or call reset() for "
            f"another prompt{again}"
        )


class Counter:
    """A mixin. Compiled code may only leave a note, since whatever it reads from the host would be compiled in; outside of it, the note
    is enough to check for room, and who needs the exact count reads it from the device once."""

    max_length: int | None
    """Tokens that may come, if there is a limit."""
    seen: int
    """Tokens seen, as far as the host knows."""
    taken: int
    """Tokens of a compiled step that the host has not counted yet."""
    stale: bool
    """Whether compiled code ran since the host read the counts: it may have run more than once."""

    def on_device(self) -> int | Tensor:
        """Tokens seen, a tensor without dimensions; a number as long as nothing is counted on the device."""
        raise NotImplementedError

    def read_counts(self) -> None:
        """Sets what the host knows to what the device has."""
        raise NotImplementedError

    def advance(self, tokens: int) -> None:
        self.seen += tokens

    def start_counting(self) -> None:
        self.seen = self.taken = 0
        self.stale = False

    def note(self, tokens: int) -> None:
        self.taken, self.stale = tokens, True

    def count(self) -> None:
        if self.stale:
            self.read_counts()
            self.taken, self.stale = 0, False

    def expect(self, tokens: int) -> None:
        """Raises ValueError if there is no room for so many more."""
        if self.taken:
            self.advance(self.taken)
            self.taken = 0
        if self.max_length is not None:
            check_room(self.seen, tokens, self.max_length)

    def query_offset(self) -> int | Tensor:
        """Tokens seen, without waiting for the device."""
        return self.on_device() if self.stale or torch.compiler.is_compiling() else self.seen
