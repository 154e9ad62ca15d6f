"""The routes of tasks that exist: show, list, cancel, why."""

from __future__ import annotations

import re

from headgate.core.tasks import TERMINAL, TaskStatus
from headgate.errors import NotDispatchingError
from headgate.http_bodies import CancelledBody, TaskListBody
from headgate.intake import fields
from headgate.intake.bodies import check_unknown, shown
from headgate.store import TaskQuery
from headgate.task_snapshot import snapshot_of
from headgate.web.answers import Answer, json_answer
from headgate.web.api import Api
from headgate.web.refusals import Refusal, invalid_field, not_found
from headgate.web.requests import Request, read_limit

OK = 200
ACCEPTED = 202
QUERY_FIELDS = ("agentId", "projectId", "state", "limit", "cursor")

_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


async def show_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with everything that is known of a task."""
    record = request.caller.check_task(await api.engine.get(known_form(task_id)))
    return json_answer(OK, snapshot_of(record))


async def list_tasks(api: Api, request: Request, _: str) -> Answer:
    """Answer with one page of tasks, newest first."""
    page = await api.engine.find(request.caller.narrowed(read_query(request.query())))
    tasks = [snapshot_of(record) for record in page.records]
    return json_answer(
        OK, TaskListBody(tasks=tasks, count=len(tasks), next_cursor=page.next_before)
    )


async def cancel_task(api: Api, request: Request, task_id: str) -> Answer:
    """Cancel a task, and say whether it has stopped already."""
    await check_own(api, request, task_id)
    record = await api.engine.cancel(known_form(task_id))
    if record is None:
        raise not_found()
    state = record.task.status
    if state in TERMINAL and state is not TaskStatus.CANCELLED:
        raise Refusal("conflict", f"task is already {state.value}")
    if state is TaskStatus.CANCELLED:
        return json_answer(OK, CancelledBody(status="cancelled", task_id=task_id))
    return json_answer(ACCEPTED, CancelledBody(status="cancelling", task_id=task_id))


async def explain_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with every rule that keeps a task waiting; if need be, ask the node that knows."""
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
    return json_answer(OK, reasons)


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
        before=_cursor(given.get("cursor", "")),
        limit=read_limit(given),
    )


def _states(text: str) -> tuple[TaskStatus, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return tuple(dict.fromkeys([TaskStatus(name) for name in names]))
    except ValueError:
        allowed = ", ".join(status.value for status in TaskStatus)
        raise invalid_field("state", f"'{shown(text)}' is not a list of {allowed}") from None


def _cursor(text: str) -> str | None:
    if text and _TASK_ID.fullmatch(text) is None:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return text or None
