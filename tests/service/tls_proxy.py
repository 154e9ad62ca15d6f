"""A reverse proxy that ends TLS before a service, as nginx and Caddy do, and as they may be set.

It has a certificate of its own, made by `openssl`. Each connection carries one request; what comes
back is passed on as it comes, so that a stream is one here too.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

NAME = "gate.test"
"""A name that no service knows to be its own.

Browsers have to be told that it is this machine. One below `localhost` they would know by
themselves, and trust as if it came over HTTPS whichever way it does.
"""

END_OF_HEAD = b"\r\n\r\n"
PIECE_BYTES = 64 * 1024
START_SECONDS = 10.0
REPLACED = (b"connection:", b"host:", b"x-forwarded-for:", b"x-forwarded-proto:")


class TlsProxy:
    """Passes requests on to a service, with the Host that the client sent or with another."""

    def __init__(self, service_address: str, certificate: Path, host: str | None) -> None:
        self.port = 0
        self.certificate = certificate
        self._service = urlsplit(service_address)
        self._host = host
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._loop = asyncio.new_event_loop()
        self._passing: set[asyncio.Task[None]] = set()
        self._end = asyncio.Event()
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        """The address that people open."""
        return f"https://{NAME}:{self.port}"

    def start(self) -> None:
        """Serve in a thread of its own, and return when it does."""
        self._thread.start()
        assert self._is_serving.wait(START_SECONDS)

    def stop(self) -> None:
        """Break everything off."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        self._is_serving.set()
        await self._end.wait()
        server.close()
        for one in self._passing:
            one.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _take(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        passing = self._loop.create_task(self._pass_on(client, back))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass_on(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        place = self._service.hostname, self._service.port
        answers, service = await asyncio.open_connection(*place)
        try:
            head = (await client.readuntil(END_OF_HEAD)).removesuffix(END_OF_HEAD)
            service.write(self._rewritten(head))
            service.write(await client.readexactly(_length(head)))
            await _copy(answers, back, client)
        except (OSError, EOFError):
            pass  # One of the two has gone, and so the other is left.
        finally:
            for one in (service, back):
                one.close()
            await asyncio.gather(
                *[one.wait_closed() for one in (service, back)], return_exceptions=True
            )

    def _rewritten(self, head: bytes) -> bytes:
        first, *lines = head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(REPLACED)]
        host = _value(lines, b"host:") if self._host is None else self._host.encode()
        own = [
            b"Host: " + host,
            b"Connection: close",
            b"X-Forwarded-Proto: https",
            b"X-Forwarded-For: 203.0.113.7",
        ]
        return b"\r\n".join([first, *kept, *own]) + END_OF_HEAD


async def _copy(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, client: asyncio.StreamReader
) -> None:
    """Pass pieces on as they come, until there are no more or the client has gone."""
    gone = asyncio.ensure_future(client.read())
    while True:
        piece = asyncio.ensure_future(source.read(PIECE_BYTES))
        await asyncio.wait([piece, gone], return_when=asyncio.FIRST_COMPLETED)
        if not piece.done() or not piece.result():
            piece.cancel()
            gone.cancel()
            return
        target.write(piece.result())
        await target.drain()


def _value(lines: list[bytes], name: bytes) -> bytes:
    found = [line for line in lines if line.lower().startswith(name)]
    return found[0][len(name) :].strip() if found else b""


def _length(head: bytes) -> int:
    return int(_value(head.split(b"\r\n"), b"content-length:") or 0)


def certificate_in(folder: Path) -> Path:
    """Make a certificate that nobody signed, and return it with its key; skip without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate, and is not here")
    key, certificate, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME},IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [openssl, "req", "-x509", *kind, *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


@contextmanager
def running_proxy(
    service_address: str, folder: Path, *, host: str | None = None
) -> Iterator[TlsProxy]:
    """Run a proxy before a service; with a `host`, it names that one instead of the client's."""
    proxy = TlsProxy(service_address, certificate_in(folder), host)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
