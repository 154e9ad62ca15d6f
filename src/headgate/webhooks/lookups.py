"""Looking up the addresses of a host, in threads of their own and a bounded number at a time.

The system's resolver takes no time limit and cannot be stopped. A lookup that hangs keeps its
thread, and so its place among the few; it keeps nobody else who uses threads, nor the end of the
process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address

MAX_LOOKUPS = 16

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, in the order in which they are to be tried."""


class SystemLookup:
    """Asks the resolver of the system."""

    def __init__(self, *, most: int = MAX_LOOKUPS) -> None:
        self._places = asyncio.Semaphore(most)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host; `OSError` if it has none."""
        if _is_address(host):
            return [host]
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Sequence[str]] = loop.create_future()
        found.add_done_callback(_retrieve)
        thread = threading.Thread(
            target=self._ask, args=(loop, found, host, port), name="headgate-lookup", daemon=True
        )
        thread.start()
        return await asyncio.shield(found)

    def _ask(
        self,
        loop: asyncio.AbstractEventLoop,
        found: asyncio.Future[Sequence[str]],
        host: str,
        port: int,
    ) -> None:
        addresses: Sequence[str] | OSError
        try:
            addresses = _addresses(host, port)
        except (OSError, UnicodeError) as error:
            addresses = OSError(str(error))
        # A loop that was closed has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._end, found, addresses)

    def _end(
        self, found: asyncio.Future[Sequence[str]], addresses: Sequence[str] | OSError
    ) -> None:
        self._places.release()
        if found.done():
            return
        if isinstance(addresses, OSError):
            found.set_exception(addresses)
        else:
            found.set_result(addresses)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _retrieve(found: asyncio.Future[Sequence[str]]) -> None:
    """Mark an error as seen: whoever asked may have stopped waiting."""
    if not found.cancelled():
        found.exception()


def _addresses(host: str, port: int) -> Sequence[str]:
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # A scope such as fe80::1%eth0 is no part of the address that is judged.
    return list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
