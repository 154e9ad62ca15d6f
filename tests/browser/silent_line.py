"""A line to a service that can fall silent: connections stay open, and nothing comes through them.

So does a NAT, a VPN or a balancer that has forgotten a connection, and nobody is told.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

PIECE_BYTES = 64 * 1024


class SilentLine(ThreadingTCPServer):
    """Passes bytes on as long as nothing has fallen silent since their connection was made."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, service_address: str) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.service = urlsplit(service_address)
        self.falls = 0
        self.is_silent = False

    @property
    def address(self) -> str:
        """The address that people open."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fall_silent(self) -> None:
        """Lose whatever is sent from now on, over connections of now and over new ones."""
        self.is_silent = True
        self.falls += 1

    def take_new(self) -> None:
        """Carry what comes over connections that are made from now on; older ones stay silent."""
        self.is_silent = False
        self.falls += 1


class _Connection(BaseRequestHandler):
    server: SilentLine
    request: socket.socket

    def handle(self) -> None:
        """Carry one connection until one side ends it."""
        made_after, place = self.server.falls, self.server.service
        with socket.create_connection((place.hostname or "", place.port or 0)) as service:
            answers = threading.Thread(
                target=self._carry, args=(service, self.request, made_after), daemon=True
            )
            answers.start()
            self._carry(self.request, service, made_after)

    def _carry(self, source: socket.socket, target: socket.socket, made_after: int) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if made_after == self.server.falls and not self.server.is_silent:
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def silent_line(service_address: str) -> Iterator[SilentLine]:
    """Listen on a free port for the length of the block."""
    with SilentLine(service_address) as line:
        serving = threading.Thread(target=line.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield line
        finally:
            line.shutdown()
            serving.join()
