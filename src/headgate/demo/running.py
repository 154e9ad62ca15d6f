"""One run of the demonstration, beside the service: a folder to throw away, and a thread.

The thread has an event loop of its own for the fake provider, the place where tasks are done and
the agents, so that what they take is not taken from the service's. Rule: nothing of the user's is
read or written, and when the run has ended nothing of it is left.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple, Self

import structlog

from headgate.client.async_client import Client
from headgate.demo.fleet import DemoFleet
from headgate.demo.plan import SEED, plan
from headgate.demo.world import DemoWorld, served
from headgate.testing.fake_provider import FakeProvider

WINDOW_MINUTES = 5.0
PERCENT_PER_REQUEST = 0.65
START_SECONDS = 10.0
STOP_SECONDS = 5.0
SETTINGS = "headgate.toml"
FAILING_SLOTS = frozenset({"retired"})
"""Slots of the settings whose failure is part of what is shown."""

KEYS = {
    "DEMO_KEY_MAIN": "demo-key-main",
    "DEMO_KEY_SPARE": "demo-key-spare",
    "DEMO_KEY_RETIRED": "demo-key-retired",
}

log = structlog.get_logger("headgate.demo")


class Service(NamedTuple):
    """Where the service is, and the token that it lets the agents in with."""

    address: str
    token: str | None


class Demo:
    """Everything that a demonstration needs beside the service; enter it to start."""

    def __init__(self, seed: int = SEED) -> None:
        self.folder = Path()
        self._seed = seed
        self._thread = threading.Thread(target=self._run, name="headgate-demo", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._addresses: Future[dict[str, str]] = Future()
        self._service: asyncio.Future[Service] | None = None
        self._work: asyncio.Task[None] | None = None

    @property
    def settings_file(self) -> Path:
        """The settings that the service is started with."""
        return self.folder / SETTINGS

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables of the service: the keys of its slots, and none of the user's."""
        return KEYS

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="headgate-demo-"))
        try:
            self._thread.start()
            addresses = self._addresses.result(START_SECONDS)
            template = files("headgate.demo").joinpath(SETTINGS).read_text(encoding="utf-8")
            self.settings_file.write_text(Template(template).substitute(addresses))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self, address: str, token: str | None) -> None:
        """Have the agents submit tasks to a service that takes them."""
        loop, service = self._loop, self._service
        if loop is not None and service is not None:
            loop.call_soon_threadsafe(_tell, service, Service(address, token))

    def remove_folder(self) -> None:
        """Remove what was written; for an end at which nothing else is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
        loop, work = self._loop, self._work
        if loop is not None and work is not None and not loop.is_closed():
            loop.call_soon_threadsafe(work.cancel)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        self.remove_folder()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            return
        except Exception as error:
            if not self._addresses.done():
                self._addresses.set_exception(error)
            else:
                log.exception("the demonstration has stopped; the service goes on without it")

    async def _live(self) -> None:
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        self._service = self._loop.create_future()
        async with AsyncExitStack() as stack:
            provider = await stack.enter_async_context(
                FakeProvider(window_minutes=WINDOW_MINUTES, percent_per_request=PERCENT_PER_REQUEST)
            )
            strict = await stack.enter_async_context(FakeProvider(key="another-key"))
            work = await stack.enter_async_context(served(DemoWorld(provider).serve_request))
            self._addresses.set_result(
                {"provider": provider.address, "strict_provider": strict.address, "work": work}
            )
            service = await self._service
            # Each task is submitted once: what is not taken is left out.
            client = await stack.enter_async_context(
                Client(service.address, token=service.token, retries=0)
            )
            await DemoFleet(client, f"{work}/hooks").run(plan(self._seed))


def _tell(future: asyncio.Future[Service], service: Service) -> None:
    if not future.done():
        future.set_result(service)
