"""What a receiver said to a message: its beginning, for people who look for the reason of a status.

Rule: an answer comes from a stranger. It is read for a bounded time and up to a bounded size, shown
as one printable line, and repeats neither our signing secrets nor what the address had in its
query, nor anything else that looks like a secret. The status counts whatever becomes of the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from urllib.parse import unquote_plus, urlsplit

import httpcore2

from headgate.redaction import redacted

MAX_READ_BYTES = 4_096
READ_SECONDS = 1.0
_CUT = "…"

_BREAKS = (
    OSError,
    TimeoutError,
    ssl.SSLError,
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
)


async def beginning_of(response: httpcore2.Response, *, seconds: float = READ_SECONDS) -> str:
    """Read as much of an answer as explains a status, and close it; the rest is not read."""
    body = bytearray()
    with suppress(*_BREAKS):
        async with asyncio.timeout(seconds), aclosing(response):
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) >= MAX_READ_BYTES:
                    break
    return bytes(body[:MAX_READ_BYTES]).decode(errors="replace")


def without_secrets(text: str, url: str, secrets: Sequence[str]) -> str:
    """Return an answer on one line, without what its receiver should have kept to itself."""
    return " ".join(printable(redacted(text, (*secrets, *_query_values(url)))).split())


def printable(text: str) -> str:
    """Return a text with a space in place of all that nobody sees."""
    return "".join(mark if mark.isprintable() else " " for mark in text)


def cut(text: str, most: int) -> str:
    """Return a text that is not longer than this."""
    return text if len(text) <= most else text[: most - 1] + _CUT


def _query_values(url: str) -> Iterator[str]:
    for parameter in urlsplit(url).query.split("&"):
        name, sign, value = parameter.partition("=")
        written = value if sign else name
        yield from (written, unquote_plus(written))
