"""How prompts are read, and what their activations take beside the cache."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK, LEAST = 4096, 64
"""The tokens, of all requests together, that a step reads of longer prompts, and the fewest of one request."""
IN_CHUNKS = 1.3
"""The activations of a chunk, divided by the activations of as many tokens read at once. A chunk also attends to what is stored."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of `tokens` tokens in `rows` requests, which are read together. `each`: bytes of activations of a token over all GPUs; None
    where they are not known."""

    tokens: int
    rows: int
    each: int | None

    @property
    def most(self) -> float:
        """The number of tokens, read at once, that need the activations of a chunk."""
        return IN_CHUNKS * max(CHUNK, LEAST * self.rows)

    @property
    def chunk(self) -> int | None:
        """The `prefill_chunk_size`; None: at once."""
        return max(CHUNK // self.rows // LEAST, 1) * LEAST if self.tokens * self.rows > self.most else None

    @property
    def activations(self) -> int | None:
        """Bytes over all GPUs."""
        return None if self.each is None else int(self.each * min(self.tokens * self.rows, self.most))

    @property
    def at_once(self) -> int | None:
        """Bytes over all GPUs without chunks."""
        return None if self.each is None else self.each * self.tokens * self.rows
