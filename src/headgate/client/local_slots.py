"""Slots for programs on this machine: the process that runs them alone, and what responses tell.

`headgate slot run` answers over a socket in its data directory that only its owner can open. A
line of JSON asks, and a line answers with the status and the body that the API would send. A
`SlotReporter` tells it, or a service, what the responses to a program's own requests say of a
quota.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from headgate.client.responses import Response, no_response, read_body
from headgate.client.sync_client import SyncClient
from headgate.core.slots.status import SlotBody, SlotListBody, SlotResponseBody
from headgate.errors import HeadgateError, InvalidSettingError

SOCKET_NAME = "slots.sock"
MAX_REPLY_BYTES = 64 << 20
ASK_SECONDS = 30.0
MAX_ADDRESS_BYTES = 100

SocketVerb = Literal["list", "show", "warm", "enable", "disable", "observe"]
Body = TypeVar("Body")


class SocketRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked of the process that runs slots alone."""

    verb: SocketVerb
    name: str = ""
    response: SlotResponseBody | None = None


class SocketReply(msgspec.Struct, frozen=True, kw_only=True):
    """The status and the body that the API would answer with."""

    status: int
    body: msgspec.Raw


class SlotsAlone:
    """Asks the process that runs slots alone in a data directory, as a client asks a service."""

    def __init__(self, directory: Path, *, timeout_seconds: float = ASK_SECONDS) -> None:
        self._directory = directory
        self._timeout_seconds = timeout_seconds
        self.place = f"in {directory}"

    def slots(self) -> SlotListBody:
        """Return all slots."""
        return self._asked(SlotListBody, SocketRequest(verb="list"))

    def slot(self, name: str) -> SlotBody:
        """Return a slot."""
        return self._asked(SlotBody, SocketRequest(verb="show", name=name))

    def warm_slot(self, name: str, *, timeout_seconds: float) -> SlotBody:
        """Open a slot's window now; refused while it is open already."""
        self._timeout_seconds = timeout_seconds
        return self._asked(SlotBody, SocketRequest(verb="warm", name=name))

    def enable_slot(self, name: str) -> SlotBody:
        """Poll and wake a slot again, whatever has disabled it."""
        return self._asked(SlotBody, SocketRequest(verb="enable", name=name))

    def disable_slot(self, name: str) -> SlotBody:
        """Leave a slot alone until it is enabled."""
        return self._asked(SlotBody, SocketRequest(verb="disable", name=name))

    def observe_slot(self, name: str, *, status: int, headers: Mapping[str, str]) -> SlotBody:
        """Tell what came back to a request that was sent with the key of a slot."""
        response = SlotResponseBody(status=status, headers=dict(headers))
        request = SocketRequest(verb="observe", name=name, response=response)
        return self._asked(SlotBody, request)

    def close(self) -> None:
        """Do nothing: each question has a connection of its own."""

    def _asked(self, kind: type[Body], request: SocketRequest) -> Body:
        place = str(self._directory / SOCKET_NAME)
        try:
            with connected_socket(self._directory, self._timeout_seconds) as connection:
                connection.sendall(msgspec.json.encode(request) + b"\n")
                with connection.makefile("rb") as answer:
                    told = answer.readline(MAX_REPLY_BYTES)
            reply = msgspec.json.decode(told, type=SocketReply)
        except TimeoutError:
            raise no_response(place, f"none in {self._timeout_seconds:g} seconds") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise no_response(place, error) from None
        return read_body(Response(reply.status, {}, bytes(reply.body)), kind)


@contextmanager
def short_address(directory: Path) -> Iterator[str]:
    """Give the address of the socket of a directory, however long the path of that is.

    The address of a socket has about a hundred characters. Where the path has more, its folder is
    reached by a link in a temporary one.
    """
    whole = str(directory / SOCKET_NAME)
    if len(os.fsencode(whole)) <= MAX_ADDRESS_BYTES:
        yield whole
        return
    with tempfile.TemporaryDirectory(prefix="headgate-") as folder:
        link = Path(folder) / "d"
        link.symlink_to(directory.absolute(), target_is_directory=True)
        yield str(link / SOCKET_NAME)


def connected_socket(directory: Path, timeout_seconds: float) -> socket.socket:
    """Return a connection to whoever runs slots alone there; `OSError` if nobody does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_seconds)
        with short_address(directory) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


# What the responses to a program's own requests say of a slot: the newest is sent, seldom.

REPORT_SECONDS = 5.0
"""How often at most a report is sent; one of a 429 after a second."""
NEWS_SECONDS = 1.0
SEND_SECONDS = 10.0
MAX_HEADERS = 64
MAX_VALUE = 256

_TOO_MANY = 429
_LIMITS = ("anthropic-ratelimit-", "x-ratelimit-")
_log = logging.getLogger("headgate.slots")


class SlotReporter:
    """Tells whoever has a slot what responses say of its quota: the `on_response` of an SDK client.

    It reports to the process that runs slots alone in the directory `data`, or else to the service
    at `url`. Only the headers of limits go there, the newest, from a thread of its own; calling it
    never waits and never fails. A report that cannot be sent is dropped: the next response says it
    again. Any thread may call it.
    """

    def __init__(
        self,
        slot: str,
        *,
        url: str | None = None,
        token: str | None = None,
        data: Path | str | None = None,
    ) -> None:
        if url is not None and data is not None:
            raise InvalidSettingError("data", "give either a url or a data directory, not both")
        self.slot = slot
        self._client: SyncClient | SlotsAlone = (
            SyncClient(url, token=token, timeout_seconds=SEND_SECONDS, retries=0)
            if data is None
            else SlotsAlone(Path(data), timeout_seconds=SEND_SECONDS)
        )
        self._newest: tuple[int, dict[str, str]] | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_failed = False
        self._sent_at = float("-inf")
        self._thread: threading.Thread | None = None

    def __call__(self, status: int, headers: Mapping[str, str]) -> None:
        """Take note of a response."""
        told = {name.lower(): value[:MAX_VALUE] for name, value in headers.items()}
        limits = {name: value for name, value in told.items() if name.startswith(_LIMITS)}
        if not limits or len(limits) > MAX_HEADERS:
            return
        with self._changed:
            self._newest = (status, limits)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="slot reports", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(SEND_SECONDS)
        self._client.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (seconds := self._seconds_left()) != 0:
                    self._changed.wait(seconds)
                newest, self._newest = self._newest, None
                is_last = self._is_closed
            if newest is not None:
                self._send(*newest)
            if is_last:
                return

    def _seconds_left(self) -> float | None:
        """Return how long the next report has to wait; None if there is none to send."""
        if self._is_closed:
            return 0
        if self._newest is None:
            return None
        wait = NEWS_SECONDS if self._newest[0] == _TOO_MANY else REPORT_SECONDS
        return max(0.0, self._sent_at + wait - time.monotonic())

    def _send(self, status: int, headers: dict[str, str]) -> None:
        self._sent_at = time.monotonic()
        try:
            self._client.observe_slot(self.slot, status=status, headers=headers)
        except HeadgateError as error:
            if not self._has_failed:
                _log.warning("slot %s: what responses say cannot be reported: %s", self.slot, error)
            self._has_failed = True
        else:
            self._has_failed = False
