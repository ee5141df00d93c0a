"""Requests of continuous batching: the checks of a prompt, the options of a request, and the end of its answer."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass
class Asked:
    """A request over HTTP, with the values that transformers' handlers neither pass to the manager nor return from it.

    options         keyword arguments of `CompressedManager.add_request`
    request_id      a unique id, unlike an X-Request-ID header
    client          who sent it: waiting requests of clients take turns
    prompt          what its handler gets where it renders or tokenizes a prompt; None: it is not known yet
    admitted        whether the manager has accepted the request
    max_new_tokens  tokens that its answer can have
    first_token     when its answer began, of `time.perf_counter`; 0: it has not, or is not known
    cached_tokens   tokens of its prompt that were already in pages
    left            whether its client has left
    """

    request_id: str
    options: dict[str, Any] = field(default_factory=dict)
    client: str | None = None
    prompt: Any = None
    admitted: bool = False
    max_new_tokens: int | None = None
    first_token: float = 0.0
    cached_tokens: int = 0
    left: bool = False


ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)
"""The request that the current context handles."""


SHARE_PREFIXES = "all", "key", "none"
"""Requests that share pages: all requests, the requests of one API key, or none."""


def sharing(share_prefixes: str, tenant: str | None, cache_salt: str | None, session: str | None) -> dict[str, Any]:
    """The options `salt` and `session` of a request.

    Args:
        share_prefixes: one of `SHARE_PREFIXES`.
        tenant: who sends it; None: anybody. Sessions of one name belong to one tenant each.
        cache_salt: a word of those who share pages among themselves.
        session: the name of the client's conversation.
    """
    shared = [tenant if share_prefixes == "key" else None, cache_salt]
    options: dict[str, Any] = {"salt": json.dumps(shared).encode()} if any(shared) else {}
    return options if session is None else options | {"session": session_of(tenant, session)}


def session_of(tenant: str | None, session: str) -> str:
    """The name of a tenant's session among the sessions of all tenants; all names have one length."""
    return hashlib.blake2b(json.dumps([tenant, session]).encode(), digest_size=16).hexdigest()


def check_prompt(config: PreTrainedConfig, ids: Iterable[int], max_new_tokens: int | None) -> tuple[list[int], int | None]:
    """The prompt as a list, and the most tokens of its answer: `max_new_tokens`, or those up to the model's last position.

    Raises TypeError for ids that are not integers. Raises ValueError for an empty prompt (attention would read tokens of other requests),
    ids outside the vocabulary, prompts beyond the model's positions, and answers without tokens.
    """
    try:
        tokens = [operator.index(token) for token in ids]
    except TypeError:
        raise TypeError(f"input_ids={ids!r:.60}: expected a list of token ids") from None
    text = config.get_text_config(decoder=True)
    if not tokens:
        raise ValueError("the prompt is empty: it must have at least one token")
    if min(tokens) < 0 or max(tokens) >= text.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < text.vocab_size)
        raise ValueError(f"token id {wrong} is not in the vocabulary of {text.vocab_size} tokens")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: an answer has at least one token")
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        return tokens, max_new_tokens
    if len(tokens) > positions:
        raise ValueError(f"the prompt has {len(tokens)} tokens, and the model {positions} positions: shorten it")
    left = positions + 1 - len(tokens)  # the last token is not read
    return tokens, left if max_new_tokens is None else min(max_new_tokens, left)


class StopStrings:
    """Strings that end an answer. They are searched for in the text of its last tokens."""

    MARGIN = 8
    """Characters by which the text of some tokens can differ at its beginning from their part of a longer text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self.strings, self._tokenizer, self._special = tuple(strings), tokenizer, set(tokenizer.all_special_ids)
        self._longest = max(map(len, strings)) + self.MARGIN

    def end(self, backwards: Iterable[int]) -> bool:
        """Whether the last token of an answer completes one of the strings. `backwards`: its tokens, the last one first."""
        tokens = (token for token in backwards if token not in self._special)
        recent = list(islice(tokens, 1))
        text = self._tokenizer.decode(recent)
        wanted = len(text) + self._longest
        while len(text) < wanted and (more := list(islice(tokens, len(recent)))):
            recent += more
            text = self._tokenizer.decode(recent[::-1])
        return any(string in text for string in self.strings)

    def __deepcopy__(self, memo: dict) -> StopStrings:
        return self  # requests that fork share the tokenizer
