"""Passing a request on to the node that decides, where this one does not.

Calls are decided in one place, so that shares, permits and waiting are those of the whole fleet. A
node that does not dispatch passes a request on as it came, and its answer back as it comes.

Rule: a request is passed on once. One that was passed on to the wrong node is refused there, so
that two nodes that take each other for the dispatcher cannot keep a client waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from headgate.api.forwarding import FORWARDED
from headgate.gateway.connection_pool import UpstreamError, UpstreamPool, UpstreamResponse

MAX_NODES = 8
"""To how many nodes connections are kept: the one that dispatches changes now and then."""

READ_SECONDS = 600.0
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"upgrade")
)


class NotRelayedError(Exception):
    """The node that decides cannot be asked, or is not known; the client may try again."""


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
    ) -> closing[UpstreamResponse]:
        """Send a request to the node at an address; the answer is to be closed."""
        given = list(headers)
        if not address or any(name == FORWARDED for name, _ in given):
            raise NotRelayedError
        kept = [one for one in given if one[0] not in _HOP_BY_HOP and one[0] != b"host"]
        try:
            pool = self._pool(address)
            response = await pool.send(method, path, [*kept, (FORWARDED, b"1")], body)
        except UpstreamError:
            raise NotRelayedError from None
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
