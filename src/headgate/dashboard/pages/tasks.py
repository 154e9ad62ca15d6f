"""The list of tasks: filters in the address, pages, and rows that stay up to date.

Rule: a page answers within a bounded time. What it did not come to is said, with the way to look
further.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus
from headgate.dashboard.page import Page, PageRoute, View, page_route
from headgate.dashboard.pages.bulk_tasks import ROUTES as BULK_ROUTES
from headgate.dashboard.shown.field_labels import FILTER_FIELDS, told
from headgate.dashboard.shown.formats import capital
from headgate.dashboard.shown.task_filters import (
    FIELD_LABELS,
    STATES,
    TASKS,
    Filters,
    read_filters,
)
from headgate.dashboard.shown.task_times import seconds_so_far
from headgate.errors import InvalidFieldError
from headgate.runtime.looking.finding import look_on
from headgate.task_ids import seconds_of
from headgate.task_query import TaskPage, TaskQuery
from headgate.web.handlers.bulk import ENDED, LIVE
from headgate.web.refusals import Refusal

LOOK_SECONDS = 0.12
"""How long a page goes on looking for tasks that match."""

MAX_LABELS = 4
MAX_NAMES = 200


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the list; `seconds` is how long it took, or has waited or run until now."""

    task_id: str
    state: str
    project: str
    agent: str | None
    action: str
    labels: list[tuple[str, str]]
    more_labels: int
    created_at: float
    seconds: float | None
    attempt: int
    micro_usd: int | None
    tokens: int | None
    error: str


async def show(view: View, _: str) -> Page:
    """Show the tasks that match."""
    filters = read_filters(view)
    problem, page = "", TaskPage(records=())
    try:
        page = await look(view, filters.query(view))
    except (Refusal, InvalidFieldError) as error:
        problem = told(error, FIELD_LABELS)
    last = page.records[-1].task.id if page.records else ""
    has_stopped = page.next_before is not None and page.next_before != last
    context: dict[str, Any] = {
        "filters": filters,
        "chips": filters.chips(),
        "states": STATES,
        "labels": FILTER_FIELDS,
        "names": _names(view),
        "problem": capital(problem),
        "rows": [row_of(record, view.now) for record in page.records],
        "older": None if page.next_before is None else filters.older(page.next_before),
        "newer": filters.newer(),
        "newest": filters.url() if filters.before else None,
        "has_stopped": has_stopped,
        "searched_back_to": seconds_of(page.next_before or "") if has_stopped else None,
        "is_search": bool(filters.text("text") or filters.text("label")),
        "can_cancel": view.can("cancel") and _has_any(filters, LIVE),
        "can_retry": view.can("submit") and _has_any(filters, ENDED),
    }
    return Page(
        template="tasks.html", title="Tasks", context=context, status=400 if problem else 200
    )


async def look(view: View, query: TaskQuery) -> TaskPage:
    """Return a page of tasks; while it is not full and time is left, look further back."""
    return await look_on(view.api.engine.find, query, seconds=LOOK_SECONDS)


def row_of(record: TaskRecord, now: float) -> Row:
    """Return what the list shows of a task."""
    task, progress, labels = record.task, record.progress, list(record.submission.labels.items())
    return Row(
        task_id=task.id,
        state=task.status.value,
        project=task.project_id,
        agent=record.agent_id or task.agent_id,
        action=record.submission.action,
        labels=labels[:MAX_LABELS],
        more_labels=max(0, len(labels) - MAX_LABELS),
        created_at=task.created_at,
        seconds=seconds_so_far(record, now),
        attempt=progress.attempt,
        micro_usd=progress.used_micro_usd if record.micro_usd is not None else None,
        tokens=progress.used_tokens if record.tokens is not None else None,
        error=record.error or "",
    )


def _has_any(filters: Filters, statuses: Iterable[TaskStatus]) -> bool:
    names = {status.value for status in statuses}
    return not filters.states or any(state in names for state in filters.states)


def _names(view: View) -> dict[str, list[str]]:
    """Return the names that the form proposes, to those who may see the settings."""
    administration = view.api.administration
    if administration is None or not view.may("admin"):
        return {}
    settings = administration.settings
    found = {
        "project": list(settings.projects),
        "agent": list(settings.agents),
        "target": list(settings.targets),
    }
    return {name: some[:MAX_NAMES] for name, some in found.items()}


ROUTES: tuple[PageRoute, ...] = (page_route(TASKS, show, needs="read"), *BULK_ROUTES)
