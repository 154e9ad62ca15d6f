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

import asyncio
import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import NamedTuple

import structlog

from headgate.api.forwarding import FORWARDED
from headgate.core.call import CALL_PREFIX
from headgate.providers.connection_pool import (
    NotSentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)

log = structlog.get_logger("headgate.gateway")

PLACE = b"x-headgate-place"
"""The header in which nodes tell each other the place of a call; clients never see it."""

FORWARDED_SECONDS = 300.0
"""For how long a node is believed that it passes a request on, by the clock of the store."""

MAX_NODES = 8
"""To how many nodes connections are kept: the one that dispatches changes now and then."""

CONNECT_SECONDS = 3.0
READ_SECONDS = 600.0
MAX_LOST_PLACES = 10_000
LOST_PLACE_SECONDS = 60.0
"""How many calls that were lost with the node that decided keep their place, and for how long."""

LEFT_LOOK_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""How often it is looked whether another node decides than the one that was asked, and how long
that one may take to show that it lives."""

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
    """Connections to the nodes that decide, or did.

    `leader_address` says where the node is that decides now. What was passed on to another one goes
    on there, as long as that one lives: it is asked now and then. A process that is stopped and a
    host that is cut off close no connection.
    """

    def __init__(self, leader_address: Callable[[], str]) -> None:
        self._leader_address = leader_address
        self._pools: OrderedDict[str, UpstreamPool] = OrderedDict()
        self._relayed: dict[str, set[asyncio.Future[None]]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._unreached = ""

    def watch(self, address: str) -> asyncio.Future[None]:
        """Return what is done once the node at an address has neither the lead nor an answer."""
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        relayed = self._relayed.get(address)
        if relayed is None:
            relayed = self._relayed[address] = set()
            self._watching[address] = asyncio.ensure_future(self._watch(address, relayed))
        relayed.add(lost)
        return lost

    def unwatch(self, address: str, lost: asyncio.Future[None]) -> None:
        """Take note that something has its answer that was passed on."""
        if address in self._relayed:
            self._relayed[address].discard(lost)

    async def _watch(self, address: str, relayed: set[asyncio.Future[None]]) -> None:
        try:
            while relayed:
                await asyncio.sleep(LEFT_LOOK_SECONDS)
                if self._leader_address() in ("", address) or await self._answers(address):
                    continue
                waiting = [one for one in relayed if not one.done()]
                if waiting:
                    log.warning("the previous dispatcher does not answer", address=address)
                for lost in waiting:
                    lost.set_result(None)
        finally:
            del self._relayed[address], self._watching[address]

    async def _answers(self, address: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                (await self._pool(address).send("HEAD", "/", (), b"")).close()
        except (UpstreamError, TimeoutError):
            return False
        return True

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
            if address != self._unreached:
                self._unreached = address
                log.warning(
                    "the deciding node cannot be reached", address=address, problem=str(error)
                )
            raise NotRelayedError(was_sent=False) from None
        except UpstreamError:
            raise NotRelayedError(was_sent=True) from None
        self._unreached = ""
        return closing(response)

    async def close(self) -> None:
        """End what watches the nodes, and close all connections."""
        watching = list(self._watching.values())
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for pool in self._pools.values():
            await pool.close()

    def _pool(self, address: str) -> UpstreamPool:
        pools = self._pools
        pool = pools.get(address)
        if pool is None:
            self._make_room()
            pool = pools[address] = UpstreamPool(
                address,
                connect_seconds=CONNECT_SECONDS,
                response_seconds=READ_SECONDS,
                read_seconds=READ_SECONDS,
            )
        pools.move_to_end(address)
        return pool

    def _make_room(self) -> None:
        """Let go of the node that was not asked for longest, unless all have calls under way."""
        if len(self._pools) < MAX_NODES:
            return
        for address, pool in self._pools.items():
            if not pool.in_use:
                pool.retire()
                del self._pools[address]
                return


def relayed_headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that go to the client: all but those between nodes."""
    own = (*_HOP_BY_HOP, b"x-request-id", PLACE)
    return [one for one in response.headers if one[0] not in own]
