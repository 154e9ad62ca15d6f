"""Passing a request on to the node that decides, where this one does not.

Calls are decided in one place, so that shares, permits and waiting are those of the whole fleet. A
node that does not dispatch passes a request on as it came, and its answer back as it comes. When
another node decides from then on, whoever decided before sends a call that waits back with its
place, and the node that has its client asks the next one.

Rule: a request is passed on once. One that was passed on to the wrong node is sent back, so that
two nodes that take each other for the dispatcher cannot keep a client waiting.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import closing
from typing import NamedTuple

from headgate.api.forwarding import FORWARDED
from headgate.core.call import CALL_PREFIX
from headgate.gateway.connection_pool import (
    NotSentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

PLACE = b"x-headgate-place"
"""The header in which nodes tell each other the place of a call; clients never see it."""

MAX_NODES = 8
"""To how many nodes connections are kept: the one that dispatches changes now and then."""

READ_SECONDS = 600.0
MAX_LOST_PLACES = 10_000
LOST_PLACE_SECONDS = 60.0
"""How many calls that were lost with the node that decided keep their place, and for how long."""

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"upgrade")
)


_NOT_PASSED_ON = _HOP_BY_HOP | {b"host", PLACE}


class NotRelayedError(Exception):
    """The node that decides cannot be asked; unless it `was_sent`, another may be asked."""

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__()
        self.was_sent = was_sent


class Place(NamedTuple):
    """What a call keeps when another node decides: its id, and since when it waits.

    `events` is how many events its client has got that count, if its stream is open; else -1.
    """

    call_id: str
    created_at: float
    events: int = -1

    @property
    def is_open(self) -> bool:
        """Whether the client has the head of a stream."""
        return self.events >= 0

    def signed(self, secret: bytes) -> bytes:
        """Return it as nodes send it; no client can make one up."""
        text = f"{self.call_id};{self.created_at!r};{self.events}".encode()
        return text + b";" + hmac.digest(secret, text, "sha256").hex().encode()

    @classmethod
    def read(cls, value: bytes, secret: bytes) -> Place | None:
        """Return what a node has sent; None of anything else."""
        text, _, signature = value.rpartition(b";")
        expected = hmac.digest(secret, text, "sha256").hex().encode()
        if not hmac.compare_digest(signature, expected):
            return None
        call_id, created_at, events = text.decode("ascii").split(";")
        return cls(call_id, float(created_at), int(events))


class LostPlaces:
    """The places of calls that were lost with the node that decided, for their retries."""

    def __init__(self, *, most: int = MAX_LOST_PLACES, seconds: float = LOST_PLACE_SECONDS) -> None:
        self._most = most
        self._seconds = seconds
        self._places: OrderedDict[bytes, tuple[Place, float]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._places)

    def keep(self, key: bytes, place: Place, now: float) -> None:
        """Keep a place for a while; the oldest one goes where there are too many."""
        self._places[key] = (place, now + self._seconds)
        self._places.move_to_end(key)
        if len(self._places) > self._most:
            self._places.popitem(last=False)

    def take(self, key: bytes, now: float) -> Place | None:
        """Return the place of a call that comes again, and forget those that did not in time."""
        while self._places and next(iter(self._places.values()))[1] <= now:
            self._places.popitem(last=False)
        found = self._places.pop(key, None)
        return None if found is None else found[0]


def as_comment(signed: bytes) -> bytes:
    """Return a signed place as the last words of an event stream that another node goes on with."""
    return b": %b %b\n\n" % (PLACE, signed)


_COMMENT_START = b": " + PLACE + b" " + CALL_PREFIX.encode()


def split_comment(piece: bytes) -> tuple[bytes, bytes]:
    """Return a piece of an event stream without the place that it ends with, and the place."""
    if not piece.endswith(b"\n\n"):
        return piece, b""
    start = piece.rfind(_COMMENT_START)
    if start < 0:
        return piece, b""
    return piece[:start], piece[start:].split(b" ", 2)[2].rstrip(b"\n")


class LeaderRelay:
    """Connections to the nodes that decide, or did."""

    def __init__(self) -> None:
        self._pools: dict[str, UpstreamPool] = {}

    async def send(
        self,
        address: str,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        *,
        place: bytes = b"",
    ) -> closing[UpstreamResponse]:
        """Send a request to the node at an address; the answer is to be closed."""
        kept = [one for one in headers if one[0] not in _NOT_PASSED_ON]
        kept.append((FORWARDED, b"1"))
        if place:
            kept.append((PLACE, place))
        try:
            response = await self._pool(address).send(method, path, kept, body)
        except NotSentError as error:
            raise NotRelayedError(was_sent=error.was_tried) from None
        except UpstreamError:
            raise NotRelayedError(was_sent=True) from None
        return closing(response)

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            await pool.close()

    def _pool(self, address: str) -> UpstreamPool:
        pool = self._pools.get(address)
        if pool is None:
            if len(self._pools) >= MAX_NODES:
                del self._pools[next(iter(self._pools))]
            pool = self._pools[address] = UpstreamPool(
                address, response_seconds=READ_SECONDS, read_seconds=READ_SECONDS
            )
        return pool


def relayed_headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that go to the client: all but those of the connection."""
    own = (*_HOP_BY_HOP, b"x-request-id")
    return [one for one in response.headers if one[0] not in own]
