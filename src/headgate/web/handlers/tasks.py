"""The routes of tasks that exist: show, list, cancel, why."""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from headgate.bodies.tasks import CancelledBody, TaskListBody
from headgate.core.budgets.scopes import parse_scope
from headgate.core.tasks.deadlines import parse_rfc3339
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.errors import NotDispatchingError
from headgate.intake import fields
from headgate.intake.bodies import check_unknown, shown
from headgate.task_query import TaskQuery
from headgate.task_snapshot import CONTENTS, snapshot_of, whole_snapshot_of
from headgate.web.api import Api
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request, read_limit
from headgate.web.refusals import Refusal, invalid_field, not_found

OK = 200
ACCEPTED = 202
QUERY_FIELDS = (
    "agentId",
    "projectId",
    "state",
    "target",
    "slot",
    "provider",
    "scope",
    "label",
    "createdAfter",
    "createdBefore",
    "text",
    "order",
    "omit",
    "limit",
    "cursor",
)
ORDERS = ("newest", "oldest")
MAX_TEXT_LENGTH = 200
"""How long a text may be that is looked for."""


MAX_LABEL_LENGTH = fields.MAX_LABEL_KEY_LENGTH + 1 + fields.MAX_LABEL_VALUE_LENGTH

_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


async def show_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with everything that is known of a task."""
    record = request.caller.check_task(await api.engine.get(known_form(task_id)))
    return json_answer(OK, whole_snapshot_of(record))


async def list_tasks(api: Api, request: Request, _: str) -> Answer:
    """Answer with one page of tasks, newest first unless asked otherwise."""
    given = request.query()
    left_out = dict.fromkeys(_contents(given.get("omit", "")))
    page = await api.engine.find(request.caller.narrowed(read_query(given)))
    tasks = [snapshot_of(record) for record in page.records]
    if left_out:
        tasks = [replace(task, **left_out) for task in tasks]
    return json_answer(
        OK, TaskListBody(tasks=tasks, count=len(tasks), next_cursor=page.next_before)
    )


async def cancel_task(api: Api, request: Request, task_id: str) -> Answer:
    """Cancel a task, and say whether it has stopped already."""
    body = await cancelled(api, request, task_id)
    return json_answer(OK if body.status == "cancelled" else ACCEPTED, body)


async def cancelled(api: Api, request: Request, task_id: str) -> CancelledBody:
    """Cancel a task of the caller's; one that has ended otherwise is refused."""
    await check_own(api, request, task_id)
    record = await api.engine.cancel(known_form(task_id))
    if record is None:
        raise not_found()
    state = record.task.status
    if state in TERMINAL and state is not TaskStatus.CANCELLED:
        raise Refusal("conflict", f"task is already {state.value}")
    is_over = state is TaskStatus.CANCELLED
    return CancelledBody(status="cancelled" if is_over else "cancelling", task_id=task_id)


async def explain_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with every rule that keeps a task waiting; if need be, ask the node that knows."""
    answer = await explained(api, request, task_id)
    return answer if isinstance(answer, Answer) else json_answer(OK, answer)


async def explained(api: Api, request: Request, task_id: str) -> msgspec.Struct | Answer:
    """Return every rule that keeps a task waiting, or the answer of the node that knows."""
    await check_own(api, request, task_id)
    try:
        reasons = await api.engine.why(known_form(task_id), request.caller.bounds)
    except NotDispatchingError as error:
        answer = await api.forwarder.ask(error.address, f"/tasks/{task_id}/why", request)
        if answer is None:
            raise
        return answer
    if reasons is None:
        raise not_found()
    return reasons


async def check_own(api: Api, request: Request, task_id: str) -> None:
    """Refuse a task that does not belong to the caller, as if there were none."""
    if request.caller.is_bound:
        request.caller.check_task(await api.engine.get(known_form(task_id)))


def known_form(task_id: str) -> str:
    """Return an id that could be one; any other is not asked for."""
    if _TASK_ID.fullmatch(task_id) is None:
        raise not_found()
    return task_id


def read_query(given: dict[str, str]) -> TaskQuery:
    """Read the filter and the page of a list."""
    check_unknown(given, QUERY_FIELDS)
    return TaskQuery(
        agent_id=fields.wanted(given.get("agentId"), "agentId"),
        project_id=fields.wanted(given.get("projectId"), "projectId"),
        states=_states(given.get("state", "")),
        target=fields.wanted(given.get("target"), "target"),
        slot=fields.wanted(given.get("slot"), "slot"),
        provider=fields.wanted(given.get("provider"), "provider"),
        scope=read_scope(given.get("scope") or None),
        label=read_label(given.get("label") or None),
        created_after=_moment(given, "createdAfter"),
        created_before=_moment(given, "createdBefore"),
        text=read_text(given.get("text") or None),
        before=_cursor(given.get("cursor", "")),
        limit=read_limit(given),
        is_oldest_first=_is_oldest_first(given.get("order", "")),
    )


def read_label(text: str | None) -> tuple[str, str | None] | None:
    """Read a label that is looked for, as `key=value`, or as `key` for any value."""
    if text is None:
        return None
    key, sign, value = text.partition("=")
    if not key or "\0" in text or len(text) > MAX_LABEL_LENGTH:
        raise invalid_field("label", "is written as key=value, or as key for any value")
    return key, value if sign else None


def read_text(text: str | None) -> str | None:
    """Read a text that is looked for; an empty one is not looked for."""
    if text is None:
        return None
    if len(text) > MAX_TEXT_LENGTH or not text.isprintable():
        problem = f"must be 1 to {MAX_TEXT_LENGTH} printable characters"
        raise invalid_field("text", problem)
    return text


def read_scope(text: str | None) -> str | None:
    """Read the budget that tasks are charged to."""
    return None if text is None else parse_scope(text, field="scope")


def _is_oldest_first(text: str) -> bool:
    if text not in ("", *ORDERS):
        raise invalid_field("order", f"must be {' or '.join(ORDERS)}")
    return text == "oldest"


def _moment(given: dict[str, str], field: str) -> float | None:
    text = given.get(field, "")
    seconds = parse_rfc3339(text) if text else None
    if text and seconds is None:
        raise invalid_field(field, "is a time with a zone, as 2026-01-31T12:00:00Z")
    return seconds


def _contents(text: str) -> list[str]:
    """Read which contents of tasks a list leaves out."""
    names = _names(text)
    if not set(names).issubset(CONTENTS):
        allowed = ", ".join(CONTENTS)
        raise invalid_field("omit", f"'{shown(text)}' is not a list of {allowed}")
    return names


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _states(text: str) -> tuple[TaskStatus, ...]:
    try:
        return tuple(dict.fromkeys([TaskStatus(name) for name in _names(text)]))
    except ValueError:
        allowed = ", ".join(status.value for status in TaskStatus)
        raise invalid_field("state", f"'{shown(text)}' is not a list of {allowed}") from None


def _cursor(text: str) -> str | None:
    if text and _TASK_ID.fullmatch(text) is None:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return text or None
