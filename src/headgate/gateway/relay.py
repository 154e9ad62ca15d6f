"""Passing a request on to the node that decides, where this one does not.

Calls are decided in one place, so that shares, permits and waiting are those of the whole fleet. A
node that does not dispatch passes a request on as it came, and its answer back as it comes. When
another node decides from then on, whoever decided before sends a call that waits back with its
place, and the node that has its client asks the next one.

Rule: a request is passed on once. One that was passed on to the wrong node is sent back, so that
two nodes that take each other for the dispatcher cannot keep a client waiting. Only a node can say
that it has passed a request on, and only with that request is a place believed: both are signed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
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

FORWARDED_SECONDS = 300.0
"""For how long a node is believed that it passes a request on, by the clock of the store."""

MAX_NODES = 8
"""To how many nodes connections are kept: the one that dispatches changes now and then."""

READ_SECONDS = 600.0
MAX_LOST_PLACES = 10_000
LOST_PLACE_SECONDS = 60.0
"""How many calls that were lost with the node that decided keep their place, and for how long."""

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"upgrade")
)


_NOT_PASSED_ON = _HOP_BY_HOP | {b"host", FORWARDED, PLACE}


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

    def signed(self, secret: bytes, request_key: bytes) -> bytes:
        """Return it as nodes send it, for one request; no client can make one up."""
        text = f"{self.call_id};{self.created_at!r};{self.events}".encode()
        return text + b";" + _signature(secret, b"place", request_key, text)

    @classmethod
    def read(cls, value: bytes, secret: bytes, request_key: bytes) -> Place | None:
        """Return what a node has sent for a request; None of anything else."""
        text, _, signature = value.rpartition(b";")
        expected = _signature(secret, b"place", request_key, text)
        if not hmac.compare_digest(signature, expected):
            return None
        call_id, created_at, events = text.decode("ascii").split(";")
        return cls(call_id, float(created_at), int(events))


def key_of_request(target: str, authorization: bytes, api_key: bytes, body: bytes) -> bytes:
    """Return what a place is bound to: the method and path, who asks, and for what."""
    digest = hashlib.sha256(body)
    for part in (target.encode(errors="replace"), authorization, api_key):
        digest.update(b"%d:%b" % (len(part), part))
    return digest.digest()


def forwarded_mark(target: str, now: float, secret: bytes) -> bytes:
    """Return how a node says that it passes a request on, for a method and path."""
    at = repr(now).encode()
    return at + b";" + _signature(secret, b"forwarded", at, target.encode(errors="replace"))


def is_forwarded_mark(value: bytes, target: str, now: float, secret: bytes) -> bool:
    """Tell whether a node has passed a request on of late; what a client says does not count."""
    at, _, signature = value.partition(b";")
    expected = _signature(secret, b"forwarded", at, target.encode(errors="replace"))
    if not hmac.compare_digest(signature, expected):
        return False
    return abs(now - float(at)) <= FORWARDED_SECONDS


def _signature(secret: bytes, *parts: bytes) -> bytes:
    text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
    return hmac.digest(secret, text, "sha256").hex().encode()


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
_COMMENT = re.compile(re.escape(_COMMENT_START) + rb"[^\n]{0,400}\n{0,2}")


class HandoverReader:
    """Takes the place off the end of an event stream, in whatever pieces the stream arrives."""

    def __init__(self) -> None:
        self.signed_place = b""
        """The place that the stream has ended with."""

        self._kept = b""
        self._shown_last = b"\n\n"

    def feed(self, piece: bytes) -> bytes:
        """Return what the client gets now: all but the last comment while that may be a place."""
        text = self._shown_last + self._kept + piece
        end = len(text)
        start = text.rfind(b"\n\n:") + 2
        if start >= len(self._shown_last) and _may_be_comment(text[start:]):
            end = start
        shown, self._kept = text[len(self._shown_last) : end], text[end:]
        self._shown_last = text[:end][-2:]
        return shown

    def finish(self) -> bytes:
        """Return what was kept back and is no place, when the stream has ended."""
        if self._kept.startswith(_COMMENT_START):
            self.signed_place = self._kept.split(b" ", 2)[2].rstrip(b"\n")
            return b""
        return self._kept


def _may_be_comment(tail: bytes) -> bool:
    return _COMMENT_START.startswith(tail) or _COMMENT.fullmatch(tail) is not None


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
        mark: bytes,
        place: bytes,
    ) -> closing[UpstreamResponse]:
        """Send a request to the node at an address; the answer is to be closed."""
        kept = [one for one in headers if one[0] not in _NOT_PASSED_ON]
        kept += ((FORWARDED, mark), (PLACE, place))
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
    """Return the headers of an answer that go to the client: all but those between nodes."""
    own = (*_HOP_BY_HOP, b"x-request-id", PLACE)
    return [one for one in response.headers if one[0] not in own]
