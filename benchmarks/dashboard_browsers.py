"""Open browsers as the service sees them: a stream each, and the regions that it calls for.

They are a process of their own, so that what they do costs the service nothing but the answers and
its share of the machine. Which regions a page has, and on which event each is fetched, is read from
the page itself; the figures of the charts are fetched every five seconds, as the script does.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from benchmarks.http_load import Client, Connection
from benchmarks.options import ROOT
from service.support import environment

FIGURES_SECONDS = 5.0
READY = "ready"
_TAG = re.compile(r"<[a-z]+ [^>]*hx-get=[^>]*>")
_TRIGGER = re.compile(r"sse:([a-z]+)(?: throttle:([0-9]+)s)?")
_ATTRIBUTE = re.compile(r'([a-z-]+)="([^"]*)"')


class Region(NamedTuple):
    """A part of a page, where it is fetched, upon which event, and how often at most."""

    name: str
    url: str
    event: bytes
    rest_seconds: float


class Visits(NamedTuple):
    """What browsers saw: how long each answer took, how many there were, and their bytes."""

    times_ms: list[float]
    requests: int
    sent: int

    @property
    def p50_ms(self) -> float:
        """The median, 0 if there were none."""
        return statistics.median(self.times_ms) if self.times_ms else 0.0

    @property
    def worst_ms(self) -> float:
        """The slowest answer."""
        return max(self.times_ms, default=0.0)

    def joined(self, other: Visits) -> Visits:
        """Return both together."""
        times = self.times_ms + other.times_ms
        return Visits(times, self.requests + other.requests, self.sent + other.sent)


class OpenBrowsers:
    """A process of browsers; what they saw is known when they are closed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._visits: Visits | None = None

    def close(self) -> None:
        """Close all browsers, and read what they saw."""
        output, _ = self._process.communicate(timeout=30.0)
        self._visits = msgspec.json.decode(output, type=Visits)

    def visits(self) -> Visits:
        """Return what was seen."""
        if self._visits is None:
            raise RuntimeError("the browsers are still open")
        return self._visits


@contextmanager
def open_browsers(address: str, number: int) -> Iterator[OpenBrowsers]:
    """Open so many browsers on the overview, and close them afterwards."""
    command = [sys.executable, "-m", "benchmarks.dashboard_browsers", address, str(number)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            line = process.stdout.readline() if process.stdout else b""
            if line.strip() != READY.encode():
                problem = f"the browsers did not open: {line!r}"
                raise RuntimeError(problem)
            browsers = OpenBrowsers(process)
            yield browsers
            browsers.close()
        finally:
            process.kill()


class Browser:
    """One page that is open: it listens, and fetches what the events call for."""

    def __init__(self, client: Client, visits: list[tuple[float, int]]) -> None:
        self._client = client
        self._visits = visits

    async def run(self, opened: asyncio.Semaphore) -> None:
        """Open the page and keep it up to date, until it is cancelled."""
        connection = await self._client.connect()
        _, body = await connection.request(self._client.head("GET", "/"))
        regions = dict.fromkeys(regions_of(body.decode()), 0.0)
        reader, writer = await self._client.open("/ui/live")
        answered = [await reader.readline()]
        while answered[-1] and not answered[-1].startswith((b"retry:", b"event: refused")):
            answered.append(await reader.readline())
        if b" 200 " not in answered[0] or not answered[-1].startswith(b"retry:"):
            problem = f"a browser may not listen: {answered[0]!r}, {answered[-1]!r}"
            raise RuntimeError(problem)
        opened.release()
        figures = asyncio.create_task(self._figures())
        try:
            while line := await reader.readline():
                for region, due_at in regions.items():
                    now = time.perf_counter()
                    if line.strip() == b"event: " + region.event and now >= due_at:
                        regions[region] = now + region.rest_seconds
                        await self._fetch(connection, region.url, region.name)
        finally:
            figures.cancel()
            writer.close()
            connection.close()

    async def _figures(self) -> None:
        connection = await self._client.connect()
        while True:
            await self._fetch(connection, "/ui/history")
            await asyncio.sleep(FIGURES_SECONDS)

    async def _fetch(self, connection: Connection, url: str, region: str = "") -> None:
        named = {"HX-Request": "true", "HX-Target": region} if region else {}
        began = time.perf_counter()
        status, body = await connection.request(self._client.head("GET", url, headers=named))
        if status != 200:
            problem = f"{url} {region} was answered with {status}"
            raise RuntimeError(problem)
        self._visits.append(((time.perf_counter() - began) * 1e3, len(body)))


def regions_of(page: str) -> Iterator[Region]:
    """Give the regions of a page that an event fetches anew."""
    for tag in _TAG.findall(page):
        found = dict(_ATTRIBUTE.findall(tag))
        trigger = _TRIGGER.fullmatch(found.get("hx-trigger", ""))
        if trigger is not None:
            url = found["hx-get"].replace("&amp;", "&")
            yield Region(found["id"], url, trigger[1].encode(), float(trigger[2] or 0))


async def _browse(address: str, number: int) -> Visits:
    place = urlsplit(address)
    client = Client(place.hostname or "", place.port or 0)
    visits: list[tuple[float, int]] = []
    opened = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(Browser(client, visits).run(opened)) for _ in range(number)]
        for _ in range(number):
            await opened.acquire()
        print(READY, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
    times, sizes = [one for one, _ in visits], [size for _, size in visits]
    return Visits(times, len(visits), sum(sizes))


if __name__ == "__main__":
    seen = asyncio.run(_browse(sys.argv[1], int(sys.argv[2])))
    sys.stdout.buffer.write(msgspec.json.encode(seen))
