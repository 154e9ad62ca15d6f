"""Cancelling and trying again all tasks that match: first a page with their number, which asks.

Rule: nothing is done to tasks that nobody counted. The form says when they were counted and how
many they were: later tasks are left alone, and where more match than were shown it is asked again.
What one request does is bounded; what is left is counted again, and asked about again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from math import floor
from typing import Any

import msgspec

from headgate.bodies.admin import TaskFilterBody
from headgate.core.tasks.task import TaskStatus
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.dashboard.shown.field_labels import told
from headgate.dashboard.shown.task_filters import (
    FIELD_LABELS,
    STATE_LABEL,
    TASKS,
    filters_of,
    read_filters,
)
from headgate.errors import InvalidFieldError
from headgate.stores.looking.selecting import BulkFilter
from headgate.task_ids import seconds_of
from headgate.tokens import Permission
from headgate.web.callers import Caller
from headgate.web.handlers.bulk import (
    ENDED,
    LIVE,
    bulk_of,
    cancel_filter,
    cancel_matching,
    retry_filter,
    retry_matching,
)
from headgate.web.refusals import Refusal

COUNT_SECONDS = 0.12
"""How long tasks are counted before the page is shown; then there may be more."""

_SAME_WORK = (
    "Each becomes a new task with the same work, which costs what the work costs. The old ones "
    "stay as they are."
)
_NOT_COUNTED = "Look at the number first, then say so"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two things that can be done to many tasks."""

    verb: str
    done: str
    path: str
    needs: Permission
    allowed: tuple[TaskStatus, ...]

    def wanted(self, body: TaskFilterBody, caller: Caller) -> BulkFilter:
        """Return which tasks are meant."""
        return (cancel_filter if self is CANCEL else retry_filter)(body, caller)


CANCEL = Work(verb="Cancel", done="Cancelled", path=f"{TASKS}/cancel", needs="cancel", allowed=LIVE)
RETRY = Work(verb="Retry", done="Tried again", path=f"{TASKS}/retry", needs="submit", allowed=ENDED)


async def ask(work: Work, view: View, _: str) -> Page:
    """Show how many tasks match, and ask."""
    if not view.can(work.needs):
        raise Refusal("forbidden", "the dashboard of this service is read-only")
    filters, at = read_filters(view), _end_of_moment(view.now)
    wanted = work.wanted(_until(filters.body(work.allowed), at), view.caller)
    before, bulk = filters.checked_before(), bulk_of(view.api)
    counted = await bulk.count_within(wanted, seconds=COUNT_SECONDS, before=before)
    further = counted.next_before
    # Whoever counts further found none so far, and some may have come since.
    is_all = counted.is_all and before is None
    context: dict[str, Any] = {
        "work": work,
        "filters": filters,
        "chips": [chip for chip in filters.chips() if chip.label != STATE_LABEL],
        "counted": counted,
        "is_all": is_all,
        "further": None if further is None else filters.url(work.path, before=further),
        "counted_back_to": None if further is None else seconds_of(further),
        "counted_at": at.isoformat(),
        "states": _either(wanted.states),
        "figure": _figure(counted.matched, wanted.states, is_all=is_all),
        "effect": effect_of(work, wanted.states),
    }
    return Page(template="bulk_tasks.html", title=f"{work.verb} tasks", context=context)


def effect_of(work: Work, states: Sequence[TaskStatus]) -> str:
    """Say what is done to tasks in these states."""
    if work is RETRY:
        return f"{_SAME_WORK} One that was tried again already is left out."
    waits, runs = TaskStatus.QUEUED in states, any(one is not TaskStatus.QUEUED for one in states)
    done = {
        (True, True): "What waits does not start, and what runs is asked to stop.",
        (True, False): "What waits does not start.",
        (False, True): "What runs is asked to stop.",
    }
    return f"{done[waits, runs]} This cannot be undone; a cancelled task can be tried again."


def _figure(matched: int, states: Sequence[TaskStatus], *, is_all: bool) -> str:
    least = "" if is_all else "At least "
    is_one = matched == 1 and is_all
    number, word = f"{least}{matched:,}", "task" if is_one else "tasks"
    if len(states) == 1:
        return f"{number} {states[0].value} {word}"
    return f"{number} {word} that {'is' if is_one else 'are'} {_either(states)}"


def _either(states: Sequence[TaskStatus]) -> str:
    *most, last = (one.value for one in states)
    return f"{', '.join(most)} or {last}" if most else last


async def act(work: Work, view: View, _: str, form: Form) -> Done:
    """Do it to the tasks that were counted, and say what is left."""
    filters = filters_of(form)
    try:
        body = filters.body(work.allowed)
        shown = _shown(form)
        if shown is None:
            return Done(to=filters.url(work.path), said=f"{_NOT_COUNTED}.", is_error=True)
        body = msgspec.structs.replace(_until(body, shown.at), limit=min(body.limit, shown.number))
        if shown.is_all and await _are_more(work, view, body, shown.number):
            said = f"More tasks match than the {shown.number:,} that were shown"
            return Done(to=filters.url(work.path), said=f"{said}.", is_error=True)
        done, skipped, remaining = await _worked(work, view, body)
    except (Refusal, InvalidFieldError) as error:
        return Done(to=filters.url(), said=f"{told(error, FIELD_LABELS)}.", is_error=True)
    said = f"{work.done}: {_tasks(done)}."
    if skipped:
        said += f" {_tasks(skipped)} had changed, or could not be taken."
    if not remaining:
        return Done(to=filters.url(), said=said)
    said += f" {_tasks(remaining)} more match; go on below."
    return Done(to=filters.url(work.path), said=said)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What the page said that a form was sent from; not `is_all` if it said `at least`."""

    at: datetime
    number: int
    is_all: bool


def _shown(form: Form) -> Shown | None:
    """Read what was counted, and when; None where nobody counted anything."""
    try:
        at, number = datetime.fromisoformat(form.get("counted_at")), int(form.get("counted"))
    except ValueError:
        return None
    if at.tzinfo is None or number < 1:
        return None
    return Shown(at=at, number=number, is_all=not form.has("at_least"))


def _end_of_moment(now: float) -> datetime:
    # Ids know milliseconds: what was submitted just before the count belongs to it.
    return datetime.fromtimestamp((floor(now * 1000) + 1) / 1000, UTC)


def _until(body: TaskFilterBody, at: datetime) -> TaskFilterBody:
    """Return the same filter without what is submitted later."""
    given = body.created_before
    return msgspec.structs.replace(body, created_before=at if given is None else min(given, at))


async def _are_more(work: Work, view: View, body: TaskFilterBody, number: int) -> bool:
    wanted = work.wanted(body, view.caller)
    counted = await bulk_of(view.api).count_within(wanted, seconds=COUNT_SECONDS)
    return counted.matched > number


async def _worked(work: Work, view: View, body: TaskFilterBody) -> tuple[int, int, int]:
    if work is CANCEL:
        cancelled = await cancel_matching(view.api, view.request, body)
        return cancelled.cancelled, cancelled.skipped, cancelled.remaining
    retried = await retry_matching(view.api, view.request, body)
    return retried.retried, retried.skipped, retried.remaining


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number:,} tasks"


ROUTES: tuple[PageRoute, ...] = tuple(
    route
    for work in (CANCEL, RETRY)
    for route in (
        page_route(work.path, partial(ask, work), needs=work.needs),
        action_route(work.path, partial(act, work), needs=work.needs),
    )
)
