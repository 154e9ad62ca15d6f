"""What the answer of an HTTP endpoint means for a task.

| status | outcome | what is booked |
| --- | --- | --- |
| 2xx | done | the usage that the body tells, otherwise what was reserved |
| 429; 503 and 529 with Retry-After | a pause, which costs no attempt | nothing |
| 408 and 5xx | failed, may be tried again | what was reserved |
| 425 | failed, may be tried again | nothing |
| other 4xx | failed for good | nothing: the endpoint refused |
| anything else | failed for good | what was reserved |
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.tasks.outcomes import NOTHING_USED, UNKNOWN_USAGE, Failed, Limited, Usage
from headgate.executors.results import shortened
from headgate.http_headers import retry_after_seconds

EXECUTOR = "executor"
"""What an endpoint is called in the error of a task, unless it is something else."""

TOO_MANY_REQUESTS = 429
_OVERLOADED = frozenset((503, 529))
_REQUEST_TIMEOUT = 408
_TOO_EARLY = 425
_CLIENT_ERRORS = range(400, 500)
_SERVER_ERRORS = range(500, 600)


def refused(
    status: int, headers: Mapping[str, str], text: str, *, now: float, whom: str = EXECUTOR
) -> Failed | Limited:
    """Return the outcome of an answer that is not a success."""
    error = f"{whom} returned {status}: {shortened(text) or '(no body)'}"
    seconds = retry_after_seconds(headers, now=now)
    if status == TOO_MANY_REQUESTS or (status in _OVERLOADED and seconds is not None):
        return Limited(retry_after_seconds=seconds, error=error)
    is_transient = status in {_REQUEST_TIMEOUT, _TOO_EARLY} or status in _SERVER_ERRORS
    return Failed(error=error, is_transient=is_transient, usage=_usage_of_refusal(status))


def _usage_of_refusal(status: int) -> Usage:
    # A gateway answers 408 when it has stopped waiting, which the work behind it may not know.
    if status in _CLIENT_ERRORS and status != _REQUEST_TIMEOUT:
        return NOTHING_USED
    return UNKNOWN_USAGE
