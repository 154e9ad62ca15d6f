"""The client of commands: it goes on without a token file that is wrong where no token is needed.

A data directory keeps the token of one service, and another may run on this machine. Rule: only a
token that was read from a file is left out, only on loopback, and only if the service then answers:
nobody asked for that token, and who is on this machine needs none there.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import click

from headgate.cli.connection import FoundService
from headgate.client.event_stream import Message
from headgate.client.requests import Call, headers_of
from headgate.client.responses import Response
from headgate.client.sync_client import SyncClient
from headgate.client.sync_transport import SyncTransport
from headgate.core.text import printable
from headgate.errors import NotAllowedError

UNAUTHORIZED = 401


class CommandTransport(SyncTransport):
    """Connections to one service; `is_without_token` once its token was left out."""

    def __init__(self, service: FoundService, *, timeout_seconds: float) -> None:
        super().__init__(
            service.address, headers_of(service.token), timeout_seconds=timeout_seconds
        )
        self._service = service
        self.is_without_token = False
        self._has_warned = False

    def send(self, call: Call[Any]) -> Response:
        """Return what comes back, if need be to the same request without a token."""
        response = super().send(call)
        if response.status != UNAUTHORIZED:
            self._warn_of_file()
        if response.status != UNAUTHORIZED or not self._may_leave_out:
            return response
        kept, self._headers = self._headers, headers_of(None)
        again = super().send(call)
        if again.status == UNAUTHORIZED:
            self._headers = kept
            return response
        self._leave_out()
        return again

    def stream(
        self, call: Call[Any], *, until: float | None = None
    ) -> Generator[Message, None, None]:
        """Give the messages of a stream, if need be of one that was asked for without a token."""
        try:
            for message in super().stream(call, until=until):
                self._warn_of_file()
                yield message
        except NotAllowedError as error:
            # A stream is refused before its first message, so none comes twice.
            if error.status != UNAUTHORIZED or not self._may_leave_out:
                raise
        else:
            return
        kept, self._headers = self._headers, headers_of(None)
        try:
            messages = super().stream(call, until=until)
            first = next(messages, None)
        except NotAllowedError:
            self._headers = kept
            raise
        self._leave_out()
        if first is not None:
            yield first
            yield from messages

    @property
    def _may_leave_out(self) -> bool:
        return self._service.may_do_without and not self.is_without_token

    def _leave_out(self) -> None:
        self.is_without_token = True
        _warn(f"this service does not recognise the token in {self._service.origin}")

    def _warn_of_file(self) -> None:
        """Say once why the token in the file is not used, where none is needed."""
        if self._service.problem and not self._has_warned:
            self._has_warned = True
            _warn(self._service.problem)


def _warn(problem: str) -> None:
    advice = "going on without it (--data names the directory of another service)"
    click.echo(printable(f"headgate: warning: {problem}; {advice}"), err=True)


class CommandClient(SyncClient):
    """A client of the service that the options of a command name."""

    def __init__(self, service: FoundService, *, retries: int, timeout_seconds: float) -> None:
        super().__init__(service.url, token=service.token, retries=retries)
        self._transport = self._own = CommandTransport(service, timeout_seconds=timeout_seconds)

    @property
    def place(self) -> str:
        """Where what it lists is, as the end of a sentence."""
        return f"at {self.url}"

    @property
    def is_without_token(self) -> bool:
        """Whether the service did not know the token of the file, and answers without one."""
        return self._own.is_without_token
