"""Every call of a service, described once: method, path, what is sent and what comes back.

Both clients perform these descriptions, so that neither has a route of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from headgate.bodies.admin import BulkCancelBody, BulkRetryBody, ReloadBody, SwitchBody
from headgate.bodies.tasks import (
    BatchBody,
    CancelledBody,
    ReadyBody,
    StatsBody,
    SubmittedBody,
    TaskListBody,
    UsageBody,
    WhyBody,
)
from headgate.client.task_fields import ListFilter, TaskFields, TaskFilter, camel, task_body
from headgate.core.tasks.submit_keys import KEY_RULE, is_key
from headgate.errors import InvalidFieldError
from headgate.task_snapshot import TaskSnapshot

IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"

Answered = TypeVar("Answered")
Query = Mapping[str, str | int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[Answered]):
    """One request, ready to be sent; `is_repeatable` if sending it twice does what once does.

    `timeout_seconds` is for calls that wait on purpose, over the client's own.
    """

    method: str
    path: str
    answer: type[Answered]
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_repeatable: bool = False
    timeout_seconds: float | None = None


def request(
    method: str,
    path: str,
    *,
    answer: type[Answered],
    body: object = None,
    query: Query | None = None,
    headers: Mapping[str, str] | None = None,
    is_repeatable: bool | None = None,
    timeout_seconds: float | None = None,
) -> Call[Answered]:
    """Describe any call; one that only reads, or that has an idempotency key, is repeatable."""
    given = {name: value for name, value in (query or {}).items() if value is not None}
    sent = dict(headers or {})
    if is_repeatable is None:
        is_repeatable = method in ("GET", "PUT", "DELETE") or IDEMPOTENCY_KEY in sent
    return Call(
        method=method,
        path=f"{path}?{urlencode(given)}" if given else path,
        answer=answer,
        body=None if body is None else msgspec.json.encode(body),
        headers=sent,
        is_repeatable=is_repeatable,
        timeout_seconds=timeout_seconds,
    )


def submit(fields: TaskFields, *, idempotency_key: str | None = None) -> Call[SubmittedBody]:
    """Describe the submission of a task; however often it is sent, one task is taken."""
    return _keyed("/tasks", task_body(fields), SubmittedBody, idempotency_key)


def submit_batch(
    tasks: Iterable[TaskFields],
    *,
    agent_id: str | None = None,
    project_id: str | None = None,
    callback_url: str | None = None,
    idempotency_key: str | None = None,
) -> Call[BatchBody]:
    """Describe the submission of up to 50 tasks, with what they share."""
    shared = {"agentId": agent_id, "projectId": project_id, "callbackUrl": callback_url}
    body: dict[str, object] = {name: value for name, value in shared.items() if value is not None}
    bodies = [task_body(fields) for fields in tasks]
    body["tasks"] = bodies
    if not ("agentId" in body or "projectId" in body):
        body |= shared_by(bodies)
    return _keyed("/tasks/batch", body, BatchBody, idempotency_key)


def shared_by(bodies: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return an agent or a project for a batch whose tasks all name their own.

    The service asks for one even then. It goes for no task: what a task says itself comes first.
    """
    for name in ("agentId", "projectId"):
        if bodies and all(name in body for body in bodies):
            return {name: bodies[0][name]}
    return {}


def get(task_id: str) -> Call[TaskSnapshot]:
    """Describe the question for a task."""
    return request("GET", task_path(task_id), answer=TaskSnapshot)


def list_tasks(
    which: ListFilter, *, limit: int | None = None, cursor: str | None = None
) -> Call[TaskListBody]:
    """Describe the question for one page of tasks."""
    given: dict[str, object] = {**which, "limit": limit, "cursor": cursor}
    named = {camel(name): _asked(value) for name, value in given.items()}
    return request("GET", "/tasks", query=named, answer=TaskListBody)


def cancel(task_id: str) -> Call[CancelledBody]:
    """Describe a cancel."""
    return request("POST", task_path(task_id, "cancel"), answer=CancelledBody)


def retry(task_id: str) -> Call[SubmittedBody]:
    """Describe the wish for a new task that does what one that ended did."""
    return request("POST", task_path(task_id, "retry"), answer=SubmittedBody)


def why(task_id: str) -> Call[WhyBody]:
    """Describe the question why a task waits."""
    return request("GET", task_path(task_id, "why"), answer=WhyBody)


def stats() -> Call[StatsBody]:
    """Describe the question for counts and limits."""
    return request("GET", "/scheduler/stats", answer=StatsBody)


def ready() -> Call[ReadyBody]:
    """Describe the question whether the service does its work."""
    return request("GET", "/readyz", answer=ReadyBody)


def cancel_matching(which: TaskFilter, *, confirm: bool) -> Call[BulkCancelBody]:
    """Describe the count of tasks that match, or their cancel."""
    return _bulk("/tasks/cancel", which, BulkCancelBody, confirm=confirm)


def retry_matching(which: TaskFilter, *, confirm: bool) -> Call[BulkRetryBody]:
    """Describe the count of tasks that match, or the wish for a new one of each."""
    return _bulk("/tasks/retry", which, BulkRetryBody, confirm=confirm)


def usage(
    by: str, *, since: datetime | str | None = None, until: datetime | str | None = None
) -> Call[UsageBody]:
    """Describe the question for what tasks used."""
    query = {"by": by, "since": _moment(since), "until": _moment(until)}
    return request("GET", "/usage", query=query, answer=UsageBody)


def pause() -> Call[SwitchBody]:
    """Describe the wish that nothing new is started."""
    return request("POST", "/scheduler/pause", answer=SwitchBody, is_repeatable=True)


def resume() -> Call[SwitchBody]:
    """Describe the wish that tasks are started again."""
    return request("POST", "/scheduler/resume", answer=SwitchBody, is_repeatable=True)


def reload() -> Call[ReloadBody]:
    """Describe the wish that the service reads its settings again."""
    return request("POST", "/scheduler/reload", answer=ReloadBody, is_repeatable=True)


def events(
    task_id: str | None = None, *, last_event_id: str | None = None, **query: str | None
) -> Call[bytes]:
    """Describe a stream of events, of all tasks or of one, after the one that was seen last."""
    path = "/events" if task_id is None else task_path(task_id, "events")
    named = {camel(name): value for name, value in query.items()}
    headers = {"accept": "text/event-stream"}
    if last_event_id:
        headers[LAST_EVENT_ID] = last_event_id
    return request("GET", path, answer=bytes, headers=headers, query=named)


def task_path(task_id: str, verb: str = "") -> str:
    """Return the path of a task, or of what can be done with it."""
    if not task_id:
        raise InvalidFieldError("task_id", "must not be empty")
    path = f"/tasks/{quote(task_id, safe='')}"
    return f"{path}/{verb}" if verb else path


def key_headers(key: str | None, *, field: str = "idempotency_key") -> dict[str, str]:
    """Return the header for a key; one of its own where none was given."""
    if key is not None and not is_key(key):
        raise InvalidFieldError(field, f"must be {KEY_RULE}")
    return {IDEMPOTENCY_KEY: os.urandom(16).hex() if key is None else key}


def _keyed(path: str, body: object, answer: type[Answered], key: str | None) -> Call[Answered]:
    return request("POST", path, body=body, answer=answer, headers=key_headers(key))


def _bulk(path: str, which: TaskFilter, answer: type[Answered], *, confirm: bool) -> Call[Answered]:
    # What was worked on no longer matches, so that the same again only goes on with the rest.
    body = {camel(name): value for name, value in which.items() if value is not None}
    return request(
        "POST", path, body={**body, "confirm": confirm}, answer=answer, is_repeatable=True
    )


def _asked(value: object) -> str | int | None:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, int) else str(value)


def _moment(value: datetime | str | None) -> str | None:
    return value.isoformat() if isinstance(value, datetime) else value
