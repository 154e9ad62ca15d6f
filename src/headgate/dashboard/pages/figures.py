"""`/ui/history`: the figures over time, as columns for the charts, and as rows for a table.

Rule: a moment of which nothing is known has null in every column, so that a line is not drawn over
it as if it were. The columns are made once for each step, however many pages ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from headgate.core.money import MICRO_PER_USD
from headgate.dashboard.headers import PAGE_HEADERS, gzipped, takes_gzip
from headgate.dashboard.page import PageRoute, View, answer_route
from headgate.runtime.looking.history import LONG_STEP_SECONDS, STEP_SECONDS, History, Step, summed
from headgate.web.http.answers import Answer, Headers
from headgate.web.refusals import Refusal, invalid_field

OK = 200
RANGES = ("hour", "day")
ROW_SECONDS = 300
MAX_ROWS = 12
MINUTE_SECONDS = 60
MISSED_STEPS = 3
WAIT_DIGITS = 4
AT_DIGITS = 1

Column = list[float | None]


class FiguresBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The figures of a range, a column each: counts and dollars per minute, waits in seconds."""

    step_seconds: float
    at: list[float]
    queued: Column
    inflight: Column
    completed: Column
    failed: Column
    wait_average: Column
    wait95: Column
    spent_usd: Column


class _Encoded(NamedTuple):
    """The figures of a range as they are sent, and the steps that they were made of."""

    steps: tuple[int, float, float]
    content: bytes
    compressed: bytes


_encoded: WeakKeyDictionary[History, dict[str, _Encoded]] = WeakKeyDictionary()


async def show_history(view: View, _: str) -> Answer:
    """Answer with the figures of the last hour, or of the last day."""
    chosen = view.request.query().get("range", RANGES[0])
    if chosen not in RANGES:
        raise invalid_field("range", f"must be one of {', '.join(RANGES)}")
    history = view.api.history
    if history is None or view.caller.is_bound:
        raise Refusal("forbidden", "the figures over time are of the whole service")
    found = _encoded_figures(history, chosen)
    headers: Headers = (*PAGE_HEADERS, (b"vary", b"accept-encoding"))
    if not takes_gzip(view.request.header(b"accept-encoding")):
        return Answer(OK, found.content, headers)
    return Answer(OK, found.compressed, (*headers, (b"content-encoding", b"gzip")))


def _encoded_figures(history: History, chosen: str) -> _Encoded:
    is_hour = chosen == RANGES[0]
    steps = list(history.hour if is_hour else history.day)
    known = (len(steps), steps[0].at, steps[-1].at) if steps else (0, 0.0, 0.0)
    kept = _encoded.setdefault(history, {})
    if chosen not in kept or kept[chosen].steps != known:
        body = figures(steps, STEP_SECONDS if is_hour else LONG_STEP_SECONDS)
        content = msgspec.json.encode(body)
        kept[chosen] = _Encoded(known, content, gzipped(content))
    return kept[chosen]


def figures(steps: Sequence[Step], step_seconds: float) -> FiguresBody:
    """Return steps as columns; where some are missing, there is a gap."""
    shown = list(with_gaps(steps, step_seconds))
    return FiguresBody(
        step_seconds=step_seconds,
        at=[round(at, AT_DIGITS) for at, _ in shown],
        queued=[None if step is None else step.queued for _, step in shown],
        inflight=[None if step is None else step.inflight for _, step in shown],
        completed=[_per_minute(step, "completed") for _, step in shown],
        failed=[_per_minute(step, "failed") for _, step in shown],
        wait_average=[_wait(step, "wait_average_seconds") for _, step in shown],
        wait95=[_wait(step, "wait_p95_seconds") for _, step in shown],
        spent_usd=[_dollars(step) for _, step in shown],
    )


def with_gaps(steps: Iterable[Step], step_seconds: float) -> Iterable[tuple[float, Step | None]]:
    """Yield each step with its time, and one without a step before whatever came too late."""
    before: float | None = None
    for step in steps:
        if before is not None and step.at - before > MISSED_STEPS * step_seconds:
            yield before + step_seconds, None
        yield step.at, step
        before = step.at


def rows_of(view: View) -> list[Step]:
    """Return the last hour in rows of five minutes, the newest first, for those without a chart."""
    history = view.api.history
    if history is None or view.caller.is_bound:
        return []
    grouped = groupby(history.hour, key=lambda step: int(step.at // ROW_SECONDS))
    rows = [row for _, group in grouped if (row := summed(group)) is not None]
    return rows[::-1][:MAX_ROWS]


def _per_minute(step: Step | None, name: str) -> float | None:
    if step is None:
        return None
    return round(float(getattr(step, name)) * MINUTE_SECONDS / step.seconds, 2)


def _dollars(step: Step | None) -> float | None:
    if step is None:
        return None
    return round(step.spent_micro_usd / MICRO_PER_USD * MINUTE_SECONDS / step.seconds, WAIT_DIGITS)


def _wait(step: Step | None, name: str) -> float | None:
    seconds = None if step is None else getattr(step, name)
    return None if seconds is None else round(float(seconds), WAIT_DIGITS)


ROUTES: tuple[PageRoute, ...] = (answer_route("/ui/history", show_history),)
