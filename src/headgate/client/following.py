"""Taking up a stream of events again after it broke: after which event, when, and how often."""

from __future__ import annotations

import random
from collections.abc import Callable

from headgate.client.event_stream import Message
from headgate.core.tasks.retries import Backoff
from headgate.errors import ServiceError, ServiceLimitError, ServiceUnavailableError

_BACKOFF = Backoff(base_seconds=0.5, max_seconds=15.0)


class Following:
    """What a client remembers of a stream from one connection to the next."""

    def __init__(
        self, last_event_id: str | None, patience_seconds: float, *, clock: Callable[[], float]
    ) -> None:
        self.last_event_id = last_event_id
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._failures = 0
        self._lost_at: float | None = None

    def saw(self, message: Message) -> None:
        """Note a message: the stream works, and goes on after it."""
        self.last_event_id = message.id or self.last_event_id
        self._failures = 0
        self._lost_at = None

    def ended(self) -> float:
        """Note that the service ended the stream, and return how long to wait."""
        return self._pause_seconds()

    def failed(self, error: ServiceError) -> float:
        """Return how long to wait after an error, or raise it if waiting does not help."""
        if not isinstance(error, (ServiceLimitError, ServiceUnavailableError)):
            raise error
        if self._lost_at is None:
            self._lost_at = self._clock()
        if self._clock() - self._lost_at >= self._patience_seconds:
            raise error
        return max(self._pause_seconds(), error.retry_after_seconds or 0.0)

    def _pause_seconds(self) -> float:
        self._failures += 1
        return _BACKOFF.seconds(self._failures, draw=random.random())  # noqa: S311 - spreads load
