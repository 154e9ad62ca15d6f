"""A server that answers with what a test wrote down, byte by byte, and notes what it was asked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

JSON = "application/json"


def response(status: int, body: str = "{}", *, kind: str = JSON, **headers: str) -> bytes:
    """Return the bytes of a whole response."""
    given = {"content-type": kind, "content-length": str(len(body)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([f"HTTP/1.1 {status} Said", *lines, "", body]).encode()


class ScriptedServer:
    """Gives one answer a request, in their order; an empty one closes the connection instead.

    After one with the header `x-then: close` the connection is closed, and the client not told.
    """

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = answers
        self.requests: list[str] = []
        self.closed = 0
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def headers(self, name: str) -> list[str]:
        """Return what each request had under a name."""
        found = []
        for request in self.requests:
            lines = [line for line in request.split("\r\n") if line.lower().startswith(f"{name}:")]
            found.append(lines[0].partition(":")[2].strip() if lines else "")
        return found

    def close(self) -> None:
        self._answers.clear()
        for one in (self._listener, *self._connections):
            # Whoever waits on it in the other thread is told that there is nothing to come.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def _serve(self) -> None:
        while self._answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            with connection:
                self._talk(connection)
            self.closed += 1

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        while self._answers and (request := _whole(connection)):
            self.requests.append(request)
            answer = self._answers.pop(0)
            if not answer:
                return
            connection.sendall(answer)
            if b"x-then: close" in answer:
                return


def _whole(connection: socket.socket) -> str:
    """Return one request with its body; empty if the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            piece = connection.recv(65536)
        except OSError:
            return ""
        if not piece:
            return ""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = int(sizes[0].partition(b":")[2]) if sizes else 0
    while len(body) < size:
        body += connection.recv(65536)
    return (head + b"\r\n\r\n" + body).decode()


@contextmanager
def scripted(*answers: bytes) -> Iterator[ScriptedServer]:
    """Run a server with these answers."""
    server = ScriptedServer(list(answers))
    try:
        yield server
    finally:
        server.close()
