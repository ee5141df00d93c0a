"""`Branches`: the pages of sessions, such as the turns of an agent.

The next turn of a session supersedes the turn before it. Pages of that turn with which the new prompt does not begin are a dead branch:
nobody asks for them any more, and they are the first to go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

MOST_NAMES = 2**17
"""Sessions, and pages of them, that are known; the sessions that were used longest ago are forgotten first."""


class Branches:
    """The links (`links`) of the pages of each session. Threads may use it at the same time."""

    def __init__(self, most: int = MOST_NAMES):
        self._sessions: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._uses: Counter[bytes] = Counter()
        """The sessions that have a page."""
        self._most, self._lock = most, Lock()

    def turn(self, session: str, prompt: list[bytes], is_read: Callable[[bytes], bool]) -> list[bytes]:
        """A turn begins, whose prompt has the pages `prompt`. Returns the pages that no session has any more. Pages of an earlier turn that
        a running request reads stay in the session."""
        with self._lock:
            known, kept = self._sessions.get(session, {}), dict.fromkeys(prompt)
            dead = [link for link in known if link not in kept and not is_read(link)]
            self._drop(session, dead)
            self._add(session, prompt)
            return [link for link in dead if link not in self._uses]

    def add(self, session: str, links: Iterable[bytes]) -> None:
        """Pages of a turn are complete."""
        with self._lock:
            self._add(session, links)

    def pages(self, session: str) -> list[bytes]:
        """The pages of a session, the first ones of a prompt before its last ones."""
        with self._lock:
            return list(self._sessions.get(session, ()))

    def release(self, session: str) -> list[bytes]:
        """Forgets a session. Returns its pages that no other session has."""
        with self._lock:
            dead = list(self._sessions.get(session, ()))
            self._drop(session, dead)
            self._sessions.pop(session, None)
            return [link for link in dead if link not in self._uses]

    def _add(self, session: str, links: Iterable[bytes]) -> None:
        known = self._sessions.setdefault(session, {})
        new = [link for link in links if link not in known]
        known |= dict.fromkeys(new)
        self._uses.update(new)
        self._sessions.move_to_end(session)
        while len(self._sessions) + len(self._uses) > self._most and len(self._sessions) > 1:
            oldest = next(iter(self._sessions))
            self._drop(oldest, list(self._sessions[oldest]))
            del self._sessions[oldest]

    def _drop(self, session: str, links: Iterable[bytes]) -> None:
        for link in links:
            del self._sessions[session][link]
            self._uses[link] -= 1
            if not self._uses[link]:
                del self._uses[link]
