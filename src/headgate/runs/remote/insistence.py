"""Asking a service that may be away for a while: again and again, and saying so meanwhile.

Rule: what may pass is waited out for ever, with waits that grow and differ; whoever wants to stop
cancels. What is refused for good, such as a token that is not let in, is raised at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headgate.core.tasks.retries import Backoff
from headgate.errors import ServiceError, ServiceLimitError, ServiceUnavailableError

BACKOFF = Backoff(base_seconds=0.25, max_seconds=15.0)
LONGEST_WAIT_SECONDS = 60.0

Answered = TypeVar("Answered")


class Insistence:
    """What a run is waiting for at its service, in words."""

    def __init__(self) -> None:
        self._away = ""
        self._full = ""
        self._draws = random.Random()  # noqa: S311 - spreads load, no secret

    @property
    def trouble(self) -> str:
        """Why nothing goes on at the service, in one line; empty if nothing is wrong."""
        return self._away or self._full

    async def ask(self, call: Callable[[], Awaitable[Answered]]) -> Answered:
        """Ask until there is an answer, or a refusal that stays one."""
        tries = 0
        while True:
            try:
                answer = await call()
            except ServiceError as error:
                if not may_pass(error):
                    raise
                tries += 1
                self._away = f"the service does not answer, and is asked again: {error}"
                await asyncio.sleep(self._pause_seconds(tries, error.retry_after_seconds))
            else:
                self._away = ""
                return answer

    def has_room(self) -> None:
        """Note that the service takes tasks."""
        self._full = ""

    async def wait_for_room(self, tries: int, why: str, ended: asyncio.Event) -> None:
        """Wait until the service may have room again: a task has ended, or some time is over."""
        self._full = f"the service takes no more tasks now, and is asked again: {why}"
        ended.clear()
        try:
            async with asyncio.timeout(self._pause_seconds(tries, None)):
                await ended.wait()
        except TimeoutError:
            return

    def _pause_seconds(self, tries: int, wanted_seconds: float | None) -> float:
        drawn = BACKOFF.seconds(tries, draw=self._draws.random())
        return min(max(drawn, wanted_seconds or 0.0), LONGEST_WAIT_SECONDS)


def may_pass(error: ServiceError) -> bool:
    """Tell whether asking again can help; what is no Headgate service does not become one."""
    passes = isinstance(error, ServiceUnavailableError | ServiceLimitError)
    return passes and error.code != "bad_answer"
