"""Hears what PostgreSQL tells on a channel, with a connection and a thread of its own.

Rule: a watcher is called for every notification that it waits for, once for several that come
together; and once after each connect, because something may have been missed before it. So one
that looks for itself whenever it is called misses nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from headgate.databases.postgres import connection_parameters
from headgate.errors import StoreUnavailableError

Watcher = Callable[[], None]

MAX_WATCHERS = 2_000
# How long a thread that was told to stop may go on waiting.
POLL_SECONDS = 0.5
FIRST_WAIT_SECONDS = 0.1
LAST_WAIT_SECONDS = 5.0


class PostgresListener:
    """Calls watchers, each in its own event loop, when a payload comes that they wait for."""

    def __init__(self, url: str, channel: str) -> None:
        self._parameters = connection_parameters(url)
        self._listen = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._lock = threading.Lock()
        self._watchers: dict[str, tuple[asyncio.AbstractEventLoop, Watcher]] = {}
        self._stop: threading.Event | None = None

    def watch(self, payload: str, watcher: Watcher) -> None:
        """Call a watcher in the running loop whenever this payload comes."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if payload not in self._watchers and len(self._watchers) >= MAX_WATCHERS:
                problem = f"{MAX_WATCHERS} watch already; close another listener first"
                raise StoreUnavailableError(problem)
            self._watchers[payload] = (loop, watcher)
            if self._stop is None:
                self._stop = self._started()

    def unwatch(self, payload: str) -> None:
        """Call nobody any more for this payload."""
        with self._lock:
            self._watchers.pop(payload, None)

    def close(self) -> None:
        """Call nobody any more; the thread ends within a moment and is not waited for."""
        with self._lock:
            self._watchers = {}
            if self._stop is not None:
                self._stop.set()
                self._stop = None

    def _started(self) -> threading.Event:
        stop = threading.Event()
        threading.Thread(
            target=self._run, args=(stop,), name="headgate-listener", daemon=True
        ).start()
        return stop

    def _run(self, stop: threading.Event) -> None:
        wait_seconds = FIRST_WAIT_SECONDS
        while not stop.is_set():
            try:
                with self._connected() as connection:
                    wait_seconds = FIRST_WAIT_SECONDS
                    self._hear(connection, stop)
            except psycopg.Error:
                stop.wait(wait_seconds)
                wait_seconds = min(2 * wait_seconds, LAST_WAIT_SECONDS)

    def _connected(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            connection.execute(self._listen)
        except psycopg.Error:
            connection.close()
            raise
        return connection

    def _hear(self, connection: psycopg.Connection[Any], stop: threading.Event) -> None:
        self._call(list(self._watchers), stop)
        while not stop.is_set():
            heard = connection.notifies(timeout=POLL_SECONDS, stop_after=1)
            self._call(dict.fromkeys(notify.payload for notify in heard), stop)

    def _call(self, payloads: Iterable[str], stop: threading.Event) -> None:
        with self._lock:
            # A thread that was stopped may still be waiting while the next one is at work.
            watchers = [] if stop.is_set() else [self._watchers.get(name) for name in payloads]
        for loop, watcher in filter(None, watchers):
            # A loop that was closed has nobody left who watches.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(watcher)
