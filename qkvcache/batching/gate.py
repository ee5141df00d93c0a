"""Who may call `qkvcache serve`, and how much of it: keys, sizes, times and connections, before any work is done."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from .fields import Refusal

OPEN = "/health"
"""The path that needs no key: probes have none."""
BYTES_PER_POSITION, MORE_BYTES, WITHOUT_POSITIONS = 16, 65_536, 1_000_000


@dataclass(frozen=True)
class Limits:
    """What clients of a server may ask for.

    max_waiting             answers that wait for their first token at the same time, of all clients; more get 429
    max_waiting_per_client  waiting answers of one client: of an API key, or of an address where there are no keys
    max_n                   answers of one request (`n`)
    max_body_bytes          bytes of a request; None: 64 KiB, and 16 bytes for each position of the model
    max_connections         open connections; where there are more, the one that is idle for longest is closed
    read_seconds            seconds in which a request has to arrive, its head and then its body
    stall_seconds           seconds without the end of a step after which `/health` gets 503

    Raises ValueError for limits that are not above 0, or that contradict each other.
    """

    max_waiting: int = 512
    max_waiting_per_client: int = 128
    max_n: int = 16
    max_body_bytes: int | None = None
    max_connections: int = 1024
    read_seconds: float = 10.0
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        if any(limit is not None and limit <= 0 for limit in astuple(self)):
            raise ValueError(f"{self}: every limit is above 0")
        if not self.max_n <= self.max_waiting_per_client <= self.max_waiting:
            raise ValueError(f"{self}: max_n is at most max_waiting_per_client, which is at most max_waiting")

    def body_bytes(self, positions: int | None) -> int:
        """The most bytes of a request to a model with so many positions."""
        return self.max_body_bytes or MORE_BYTES + BYTES_PER_POSITION * (positions or WITHOUT_POSITIONS)


class Keys:
    """The API keys of a server, of which it has the digests alone.

    Raises ValueError for keys that a header cannot carry, and for a server without keys that other machines reach, unless `open` says so.
    """

    def __init__(self, keys: Sequence[str], host: str, open: bool = False):
        if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
            raise ValueError("an API key has printable ASCII characters, without spaces, and at least one")
        if not keys and not open and not is_loopback(host):
            raise ValueError(
                f"host={host!r} is reached by other machines, and the server has no API key: pass --api-key, or set QKVCACHE_API_KEY; "
                "--no-api-key serves everybody"
            )
        self._digests = [digest_of(key) for key in keys]

    def tenant(self, authorization: str) -> str | None:
        """The digest of the key in a header; None: everybody may call. Raises Refusal for another key. All keys are compared, each
        in a time that does not depend on the header."""
        if not self._digests:
            return None
        kind, _, key = authorization.partition(" ")
        found = digest_of(key)
        if not (any([compare_digest(found, known) for known in self._digests]) and kind.lower() == "bearer"):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """The ASGI middleware that asks for a key. `request.state.tenant` is the key's sha256 digest, in hexadecimal digits, or None;
    `request.state.client` is the tenant, or the client's address. `refuse` answers a request with a Refusal."""

    def __init__(self, app: Callable, keys: Keys, refuse: Callable):
        self.app, self.keys, self.refuse = app, keys, refuse

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        try:
            tenant = None if scope["path"] == OPEN else self.keys.tenant(request.headers.get("authorization", ""))
        except Refusal as error:
            return await self.refuse(request, error)(scope, receive, send)
        address = None if request.client is None else request.client.host
        request.state.tenant, request.state.client = tenant, tenant or address
        return await self.app(scope, receive, send)


async def body_of(receive: Callable, most: int, seconds: float) -> bytes:
    """The body of a request. Raises Refusal for one that has more than `most` bytes or takes longer than `seconds`, ClientDisconnect
    if its client leaves."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > most:
                    raise Refusal(f"the request has more than {most} bytes", status=413)
    except TimeoutError:
        raise Refusal(f"the request has not arrived within {seconds} seconds", status=408) from None
    return bytes(body)


def connections(most: int, seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol with a limit of connections, and a time in which the head of a request has to arrive."""

    class Connection(H11Protocol):
        timer: asyncio.TimerHandle | None = None
        since = 0.0

        @property
        def idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.since = self.loop.time()
            self._limit()
            every: Any = self.connections
            if len(every) > most:
                oldest = min((one for one in every if one.idle), key=lambda one: one.since)
                every.discard(oldest)
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.idle != (self.timer is not None):
                self._limit()

        def on_response_complete(self) -> None:
            self.since = self.loop.time()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(exc)

        def _limit(self) -> None:
            """Begins the time of a head, or ends it."""
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(seconds, self.transport.abort) if self.idle else None

    return Connection
