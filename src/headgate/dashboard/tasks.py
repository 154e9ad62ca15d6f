"""The list of tasks: filters in the address, pages, and rows that stay up to date.

Rule: a page answers within a bounded time. What it did not come to is said, with the way to look
further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import floor
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec

from headgate.api.callers import Caller
from headgate.api.errors import ApiError, invalid_field
from headgate.api.schema.admin import TaskFilterBody
from headgate.api.tasks import (
    ENDED,
    LIVE,
    cancel_filter,
    cancel_matching,
    read_query,
    retry_filter,
    retry_matching,
)
from headgate.core.lifecycle import parse_rfc3339
from headgate.core.task import TaskRecord, TaskStatus
from headgate.dashboard.formats import assumption, capital, seconds_so_far
from headgate.dashboard.forms import FILTER_FIELDS, error_text
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.engine.engine import read_on
from headgate.errors import InvalidFieldError
from headgate.storage.queries import BulkFilter
from headgate.storage.store import TaskPage, TaskQuery
from headgate.storage.task_ids import seconds_of
from headgate.storage.tokens import Permission

# The filters of the list of tasks, as they stand in the address of the page.
#
# An address says which tasks are meant, so that it can be kept, sent and opened again. Rule: what
# is left out means everything, and each filter can be taken away by itself.

TASKS = "/ui/tasks"
PAGE_ROWS = 50
MAX_FIELDS = 32
MAX_VIA = 10
"""How many pages back the way is known; before that, it leads to the newest."""

STATES = tuple(status.value for status in TaskStatus)
TEXTS = (
    "text",
    "project",
    "agent",
    "target",
    "slot",
    "provider",
    "scope",
    "label",
    "since",
    "until",
)
TIMES = ("since", "until")
STATE_LABEL = "state"

_API_NAMES = {
    "project": "projectId",
    "agent": "agentId",
    "since": "createdAfter",
    "until": "createdBefore",
}
FIELD_LABELS = {
    **FILTER_FIELDS,
    **{api_name: FILTER_FIELDS[name] for name, api_name in _API_NAMES.items()},
}
"""What the form calls its fields, also by what the API calls them, which refuses some."""

_CHIP_WORDS = {
    "scope": "charged to",
    "since": "submitted since",
    "until": "submitted before",
    "text": "text has",
}
_LOCAL_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?")
_WITH_MINUTES = len("2026-01-31T12:00")


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """One filter that is set, and the address without it."""

    label: str
    value: str
    without: str


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for, as it was written; times without a zone are UTC.

    `PATH` is the page of the list, and `TEXTS` are the fields of its form beside the states.
    """

    PATH: ClassVar[str] = TASKS
    TEXTS: ClassVar[tuple[str, ...]] = TEXTS

    states: tuple[str, ...] = ()
    texts: dict[str, str] = {}
    before: str = ""
    via: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        """Return what a field of the form has in it."""
        return self.texts.get(name, "")

    def field(self, name: str) -> str:
        """Return what a field of the form is filled with; one for times knows no zone."""
        return _local(self.text(name)) if name in TIMES else self.text(name)

    @property
    def is_set(self) -> bool:
        """Whether not all tasks are meant."""
        return bool(self.states or self.texts)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the filters as fields of a form, or of an address."""
        return [("state", state) for state in self.states] + list(self.texts.items())

    def url(self, path: str = "", **more: str) -> str:
        """Return the address of these filters; `more` adds to them or replaces them."""
        path = path or self.PATH
        pairs = [(name, value) for name, value in self.pairs() if name not in more]
        query = urlencode(pairs + [(name, value) for name, value in more.items() if value])
        return f"{path}?{query}" if query else path

    def chips(self) -> list[Chip]:
        """Return every filter that is set, each with the way to take it away."""
        chips = [
            Chip(label=STATE_LABEL, value=one, without=self._without_state(one).url())
            for one in self.states
        ]
        for name, value in self.texts.items():
            chips.append(
                Chip(label=_CHIP_WORDS.get(name, name), value=value, without=self.url(**{name: ""}))
            )
        return chips

    def older(self, before: str) -> str:
        """Return the address of the next page, which knows the way back."""
        via = (*self.via, self.before or "newest")[-MAX_VIA:]
        return self.url(before=before, via=",".join(via))

    def newer(self) -> str | None:
        """Return the address of the page before this one, if the way is known."""
        if not self.via or self.via[-1] == "newest":
            return None
        return self.url(before=self.via[-1], via=",".join(self.via[:-1]))

    def query(self, view: View) -> TaskQuery:
        """Return the question for a page of what belongs to the visitor, or refuse it."""
        given = {_API_NAMES.get(name, name): value for name, value in self.timed().items()}
        before = self.checked_before() or ""
        given |= {"state": ",".join(self.states), "cursor": before, "limit": str(PAGE_ROWS)}
        return view.caller.narrowed(read_query(given))

    def checked_before(self) -> str | None:
        """Return from before which task a page goes on, or refuse what is no task."""
        if self.before and seconds_of(self.before) is None:
            raise invalid_field("before", "must be the id of a task")
        return self.before or None

    def body(self, allowed: tuple[TaskStatus, ...]) -> TaskFilterBody:
        """Return the tasks that something can be done to, as the API is told of them."""
        names = {status.value for status in allowed}
        states = [state for state in self.states if state in names]
        if self.states and not states:
            raise ApiError("conflict", "no task in these states can be worked on")
        timed = self.timed()
        return TaskFilterBody(
            agent_id=timed.get("agent"),
            project_id=timed.get("project"),
            state=states,
            target=timed.get("target"),
            slot=timed.get("slot"),
            provider=timed.get("provider"),
            scope=timed.get("scope"),
            label=timed.get("label"),
            created_after=_moment(timed.get("since")),
            created_before=_moment(timed.get("until")),
            text=timed.get("text"),
        )

    def _without_state(self, state: str) -> Filters:
        rest = tuple(one for one in self.states if one != state)
        return msgspec.structs.replace(self, states=rest)

    def timed(self) -> dict[str, str]:
        """Return what the fields have in them, times as the API reads them."""
        times = {name: _zoned(name, self.texts[name]) for name in TIMES if self.text(name)}
        return {**self.texts, **times}


Kind = TypeVar("Kind", bound=Filters)


def read_filters(view: View) -> Filters:
    """Read the filters of an address."""
    return filters_of(form_of(view))


def form_of(view: View) -> Form:
    """Return the fields of an address, as a form has them."""
    try:
        pairs = parse_qsl(view.request.query_string(), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ApiError("invalid_field", "the address has too many fields") from None
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return Form(fields)


def filters_of(form: Form) -> Filters:
    """Read the filters of a form."""
    return filled(Filters, form)


def filled(kind: type[Kind], form: Form) -> Kind:
    """Return filters of a kind, as a form has them."""
    states = [one.strip() for given in form.all("state") for one in given.split(",")]
    return kind(
        states=tuple(dict.fromkeys(one for one in states if one)),
        texts={name: form.get(name) for name in kind.TEXTS if form.get(name)},
        before=form.get("before"),
        via=tuple(one for one in form.get("via").split(",") if one)[-MAX_VIA:],
    )


def _zoned(name: str, text: str) -> str:
    """Return a time as the API reads it; a field for times knows no zone, and means UTC."""
    zoned = text
    if _LOCAL_TIME.fullmatch(text) is not None:
        zoned = f"{text}:00Z" if len(text) == _WITH_MINUTES else f"{text}Z"
    if _moment(zoned) is None:
        raise invalid_field(name, "is written as 2026-01-31T12:00")
    return zoned


def _local(text: str) -> str:
    """Return a time in UTC as a field for times takes it; nothing where it cannot be read."""
    try:
        moment = datetime.fromisoformat(text)
        at = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return ""
    is_local = _LOCAL_TIME.fullmatch(text) is not None
    return text if is_local else at.replace(tzinfo=None).isoformat(timespec="seconds")


def _moment(text: str | None) -> datetime | None:
    """Return a time in UTC; None for what is none, or before or after all that can be counted."""
    seconds = None if text is None else parse_rfc3339(text)
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError):
        return None


# Cancelling and trying again all tasks that match: first a page with their number, which asks.
#
# Rule: nothing is done to tasks that nobody counted. The form says when they were counted and how
# many they were: later tasks are left alone, and where more match than were shown it is asked
# again. What one request does is bounded; what is left is counted again, and asked about again.

COUNT_SECONDS = 0.12
"""How long tasks are counted before the page is shown; then there may be more."""

_SAME_WORK = (
    "Each becomes a new task with the same work and its own cost. The old tasks stay as they are."
)
_NOT_COUNTED = "Look at the number first, then confirm"


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
        raise ApiError("forbidden", "the dashboard of this service is read-only")
    filters, at = read_filters(view), _end_of_moment(view.now)
    wanted = work.wanted(_until(filters.body(work.allowed), at), view.caller)
    before, bulk = filters.checked_before(), view.api.bulk
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
        return f"{_SAME_WORK} Tasks that were retried already are left out."
    waits, runs = TaskStatus.QUEUED in states, any(one is not TaskStatus.QUEUED for one in states)
    done = {
        (True, True): "Waiting tasks do not start, and running ones are told to stop.",
        (True, False): "Waiting tasks do not start.",
        (False, True): "Running tasks are told to stop.",
    }
    return f"{done[waits, runs]} You cannot undo this, but you can retry a cancelled task."


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
    except (ApiError, InvalidFieldError) as error:
        return Done(to=filters.url(), said=f"{error_text(error, FIELD_LABELS)}.", is_error=True)
    said = f"{work.done}: {_tasks(done)}."
    if skipped:
        said += f" {_tasks(skipped)} had changed or could not be handled."
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
    counted = await view.api.bulk.count_within(wanted, seconds=COUNT_SECONDS)
    return counted.matched > number


async def _worked(work: Work, view: View, body: TaskFilterBody) -> tuple[int, int, int]:
    if work is CANCEL:
        cancelled = await cancel_matching(view.api, view.request, body)
        return cancelled.cancelled, cancelled.skipped, cancelled.remaining
    retried = await retry_matching(view.api, view.request, body)
    return retried.retried, retried.skipped, retried.remaining


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number:,} tasks"


BULK_ROUTES: tuple[PageRoute, ...] = tuple(
    route
    for work in (CANCEL, RETRY)
    for route in (
        page_route(work.path, partial(ask, work), needs=work.needs),
        action_route(work.path, partial(act, work), needs=work.needs),
    )
)


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
    assumed: str
    error: str


async def show(view: View, _: str) -> Page:
    """Show the tasks that match."""
    filters = read_filters(view)
    problem, page = "", TaskPage(records=())
    try:
        page = await look(view, filters.query(view))
    except (ApiError, InvalidFieldError) as error:
        problem = error_text(error, FIELD_LABELS)
    last = page.records[-1].task.id if page.records else ""
    has_stopped = page.next_before is not None and page.next_before != last
    context: dict[str, Any] = {
        "filters": filters,
        "chips": filters.chips(),
        "states": STATES,
        "labels": FILTER_FIELDS,
        "names": _names(view),
        "problem": capital(problem),
        "rows": [row_of(view.caller.shown(record), view.now) for record in page.records],
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
    return await read_on(view.api.engine.find, query, seconds=LOOK_SECONDS)


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
        assumed=assumption(
            (progress.assumed_tokens, progress.assumed_micro_usd),
            (progress.used_tokens, progress.used_micro_usd),
        ),
        error=record.error or "",
    )


def _has_any(filters: Filters, statuses: Iterable[TaskStatus]) -> bool:
    names = {status.value for status in statuses}
    return not filters.states or any(state in names for state in filters.states)


def _names(view: View) -> dict[str, list[str]]:
    """Return the names that the form proposes, to those who may see the settings."""
    if not view.may("admin"):
        return {}
    settings = view.api.config.settings
    found = {
        "project": list(settings.projects),
        "agent": list(settings.agents),
        "target": list(settings.targets),
    }
    return {name: some[:MAX_NAMES] for name, some in found.items()}


ROUTES: tuple[PageRoute, ...] = (page_route(TASKS, show, needs="read"), *BULK_ROUTES)
