"""The line from a worker to its service: what is asked, and until when it is asked again.

A worker outlives outages of its service. What is worth asking again is asked for ever, with waits
that grow and differ; what the service refuses for good is the caller's to judge.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar
from urllib.parse import quote

from headgate.bodies.workers import (
    BeatBody,
    ClaimBody,
    ClaimedBody,
    CompleteBody,
    FailBody,
    HeartbeatBody,
    SettledTaskBody,
)
from headgate.core.tasks.retries import Backoff
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
)

BACKOFF = Backoff(base_seconds=0.5, max_seconds=15.0)
ANSWER_SECONDS = 10.0
BEAT_SECONDS = 5.0

Answered = TypeVar("Answered")


class Asks(Protocol):
    """The one thing that a line needs of a client."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        answer: type[Answered],
        body: object = None,
        timeout_seconds: float | None = None,
    ) -> Answered:
        """Send a request once, and return its answer as this type."""


class ServiceLine:
    """Asks one service for one agent."""

    def __init__(
        self,
        client: Asks,
        agent_id: str,
        *,
        told: Callable[[str], None],
        draws: random.Random | None = None,
    ) -> None:
        self._client = client
        self._agent = f"/agents/{quote(agent_id, safe='')}"
        self._told = told
        self._draws = draws or random.Random()  # noqa: S311
        self._is_away = False

    async def claim(self, body: ClaimBody) -> ClaimedBody:
        """Offer places, once."""
        return await self._client.request(
            "POST",
            f"{self._agent}/claim",
            body=body,
            answer=ClaimedBody,
            timeout_seconds=body.wait_seconds + ANSWER_SECONDS,
        )

    async def beat(self, body: HeartbeatBody) -> BeatBody:
        """Show that the worker lives, once."""
        return await self._client.request(
            "POST",
            f"{self._agent}/heartbeat",
            body=body,
            answer=BeatBody,
            timeout_seconds=BEAT_SECONDS,
        )

    async def report(self, task_id: str, body: CompleteBody | FailBody) -> SettledTaskBody:
        """Hand in what came of an attempt, again and again until the service has answered."""
        verb = "complete" if isinstance(body, CompleteBody) else "fail"
        path = f"/tasks/{quote(task_id, safe='')}/{verb}"
        return await self.insist(
            lambda: self._client.request("POST", path, body=body, answer=SettledTaskBody)
        )

    async def insist(self, ask: Callable[[], Awaitable[Answered]]) -> Answered:
        """Ask until there is an answer, or a refusal that stays one."""
        tries = 0
        while True:
            try:
                answer = await ask()
            except ServiceError as error:
                if not _may_pass(error):
                    raise
                tries += 1
                await self.pause(tries, error)
            else:
                self.is_back()
                return answer

    async def pause(self, tries: int, error: ServiceError) -> None:
        """Wait before the next try, longer each time; the first of a row is told of."""
        if not self._is_away:
            self._is_away = True
            self._told(f"the service does not answer, and is asked again: {error}")
        await asyncio.sleep(BACKOFF.seconds(tries, draw=self._draws.random()))

    def is_back(self) -> None:
        """Note that the service has answered."""
        if self._is_away:
            self._is_away = False
            self._told("the service answers again")


def _may_pass(error: ServiceError) -> bool:
    # A token may be let in again, or another one be put in its place.
    return isinstance(error, ServiceUnavailableError | ServiceLimitError | NotAllowedError)


def is_stale(error: RequestRefusedError) -> bool:
    """Tell whether what was asked about is not the worker's any more."""
    return error.code in ("stale_worker", "stale_lease", "not_found")
