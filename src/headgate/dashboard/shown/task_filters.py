"""The filters of the list of tasks, as they stand in the address of the page.

An address says which tasks are meant, so that it can be kept, sent and opened again. Rule: what is
left out means everything, and each filter can be taken away by itself.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlencode

import msgspec

from headgate.bodies.admin import TaskFilterBody
from headgate.core.tasks.deadlines import parse_rfc3339
from headgate.core.tasks.task import TaskStatus
from headgate.dashboard.page import Form, View
from headgate.dashboard.shown.field_labels import FILTER_FIELDS
from headgate.task_ids import seconds_of
from headgate.task_query import TaskQuery
from headgate.web.handlers.tasks import read_query
from headgate.web.refusals import Refusal, invalid_field

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
    """What is looked for, as it was written; times without a zone are UTC."""

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

    def url(self, path: str = TASKS, **more: str) -> str:
        """Return the address of these filters; `more` adds to them or replaces them."""
        pairs = [(name, value) for name, value in self.pairs() if name not in more]
        query = urlencode(pairs + [(name, value) for name, value in more.items() if value])
        return f"{path}?{query}" if query else path

    def chips(self) -> list[Chip]:
        """Return every filter that is set, each with the way to take it away."""
        chips = [
            Chip(label=STATE_LABEL, value=one, without=_without_state(self, one).url())
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
        given = {_API_NAMES.get(name, name): value for name, value in self._timed().items()}
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
            raise Refusal("conflict", "no task in these states can be worked on")
        timed = self._timed()
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

    def _timed(self) -> dict[str, str]:
        times = {name: _zoned(name, self.texts[name]) for name in TIMES if self.text(name)}
        return {**self.texts, **times}


def read_filters(view: View) -> Filters:
    """Read the filters of an address."""
    try:
        pairs = parse_qsl(view.request.query_string(), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise Refusal("invalid_field", "the address has too many fields") from None
    fields: dict[str, list[str]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return filters_of(Form(fields))


def filters_of(form: Form) -> Filters:
    """Read the filters of a form."""
    states = [one.strip() for given in form.all("state") for one in given.split(",")]
    return Filters(
        states=tuple(dict.fromkeys(one for one in states if one)),
        texts={name: form.get(name) for name in TEXTS if form.get(name)},
        before=form.get("before"),
        via=tuple(one for one in form.get("via").split(",") if one)[-MAX_VIA:],
    )


def _without_state(filters: Filters, state: str) -> Filters:
    rest = tuple(one for one in filters.states if one != state)
    return Filters(states=rest, texts=filters.texts)


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
