"""Every call of a service, described once: method, path, what is sent and what comes back.

Both clients perform these descriptions, so that neither has a route of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Generic, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from headgate.api.schema.admin import (
    AgentBody,
    AgentListBody,
    AuditListBody,
    BudgetListBody,
    BulkCancelBody,
    BulkRetryBody,
    DeliveryBody,
    DeliveryListBody,
    JournalBody,
    LaneListBody,
    PingedBody,
    ProjectBody,
    ProjectListBody,
    ProjectStatusText,
    ReloadBody,
    SecretListBody,
    SettingsBody,
    StandingText,
    SwitchBody,
    TargetBody,
    TargetListBody,
)
from headgate.api.schema.tasks import (
    BatchBody,
    BudgetStatusBody,
    CancelledBody,
    CreatedTokenBody,
    LimitBody,
    NewTokenBody,
    ReadyBody,
    ReservationBody,
    SettledBody,
    StatsBody,
    SubmittedBody,
    TaskListBody,
    TokenBody,
    TokenListBody,
    UsageBody,
    WhyBody,
)
from headgate.client.task_fields import ListFilter, TaskFields, TaskFilter, camel, task_body
from headgate.core.idempotency import KEY_RULE, is_key
from headgate.core.slots.status import SlotBody, SlotListBody, SlotLogBody
from headgate.core.task_view import TaskSnapshot
from headgate.errors import InvalidFieldError

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


# What a program says of a change to something that is configured.
#
# What is left out stays as it is, and None takes the value away, which leaves the default.

Amount = str | int | float | Decimal
"""Dollars; a text or a `Decimal` is exact."""


class ProjectChange(TypedDict, total=False):
    """A change of a project."""

    credit_weight: float | None
    max_concurrent_agents: int | None
    budget_limit: int | None
    status: ProjectStatusText | None


class AgentChange(TypedDict, total=False):
    """A change of an agent."""

    type: str | None
    capacity: int | None
    accepts_open: bool | None
    status: StandingText | None


class TargetChange(TypedDict, total=False):
    """A change of a target."""

    status: StandingText | None


class BudgetChange(TypedDict, total=False):
    """A change of what a scope may use."""

    limit_usd: Amount | None
    limit_tokens: int | None
    window: str | None


# The calls that administer a service, described once, as `calls` does for tasks.
#
# A change says what is to be so, and a reservation has a name; so both may be sent twice. A new
# token, a new secret, a wake and a webhook that is sent again may not.


def list_projects() -> Call[ProjectListBody]:
    """Describe the question for all projects."""
    return request("GET", "/projects", answer=ProjectListBody)


def get_project(project_id: str) -> Call[ProjectBody]:
    """Describe the question for a project."""
    return request("GET", _path("projects", project_id), answer=ProjectBody)


def change_project(
    project_id: str, reset: Iterable[str], change: Mapping[str, object]
) -> Call[ProjectBody]:
    """Describe a change of a project."""
    return _change(_path("projects", project_id), reset, change, ProjectBody)


def list_agents() -> Call[AgentListBody]:
    """Describe the question for the agents."""
    return request("GET", "/agents", answer=AgentListBody)


def get_agent(agent_id: str) -> Call[AgentBody]:
    """Describe the question for an agent."""
    return request("GET", _path("agents", agent_id), answer=AgentBody)


def change_agent(
    agent_id: str, reset: Iterable[str], change: Mapping[str, object]
) -> Call[AgentBody]:
    """Describe a change of an agent."""
    return _change(_path("agents", agent_id), reset, change, AgentBody)


def list_targets() -> Call[TargetListBody]:
    """Describe the question for all targets."""
    return request("GET", "/targets", answer=TargetListBody)


def get_target(target: str) -> Call[TargetBody]:
    """Describe the question for a target."""
    return request("GET", _path("targets", target), answer=TargetBody)


def change_target(
    target: str, reset: Iterable[str], change: Mapping[str, object]
) -> Call[TargetBody]:
    """Describe a change of a target."""
    return _change(_path("targets", target), reset, change, TargetBody)


def list_budgets() -> Call[BudgetListBody]:
    """Describe the question for the limits of budgets."""
    return request("GET", "/budgets", answer=BudgetListBody)


def change_budget(
    scope: str, reset: Iterable[str], change: Mapping[str, object]
) -> Call[BudgetListBody]:
    """Describe a change of the limits of a scope."""
    return _change("/budgets", reset, change, BudgetListBody, query={"scope": scope})


def create_budget(scope: str, limits: Mapping[str, object]) -> Call[LimitBody]:
    """Describe the wish that a scope has limits, if it has none."""
    given = {camel(name): value for name, value in limits.items() if value is not None}
    return _named("found", {"scope": scope, **given}, LimitBody)


def budget_status(scope: str | None) -> Call[BudgetStatusBody]:
    """Describe the question for what a scope has used."""
    return request("GET", "/budgets/status", query={"scope": scope}, answer=BudgetStatusBody)


def budget_journal(
    scope: str | None, *, limit: int | None, cursor: str | None
) -> Call[JournalBody]:
    """Describe the question for one page of the changes of a scope."""
    query = {"scope": scope, "limit": limit, "cursor": cursor}
    return request("GET", "/budgets/journal", query=query, answer=JournalBody)


def lanes(project_id: str | None, *, find: str | None) -> Call[LaneListBody]:
    """Describe the question where tasks wait."""
    query = {"projectId": project_id, "find": find}
    return request("GET", "/scheduler/lanes", query=query, answer=LaneListBody)


def reserve(body: Mapping[str, object]) -> Call[ReservationBody]:
    """Describe the wish to hold an amount."""
    given = {camel(name): value for name, value in body.items()}
    return _named("reserve", given, ReservationBody)


def dispatched(reservation_id: str, scope: str) -> Call[ReservationBody]:
    """Describe the word that the provider is about to be called."""
    return _named("dispatched", {"id": reservation_id, "scope": scope}, ReservationBody)


def commit(reservation_id: str, scope: str, *, usd: Amount, tokens: int) -> Call[SettledBody]:
    """Describe what the work has cost."""
    body = {"id": reservation_id, "scope": scope, "usd": usd, "tokens": tokens}
    return _named("commit", body, SettledBody)


def release(reservation_id: str, scope: str) -> Call[SettledBody]:
    """Describe the giving back of what was held."""
    return _named("release", {"id": reservation_id, "scope": scope}, SettledBody)


def list_tokens() -> Call[TokenListBody]:
    """Describe the question for the tokens."""
    return request("GET", "/tokens", answer=TokenListBody)


def create_token(wish: NewTokenBody) -> Call[CreatedTokenBody]:
    """Describe the wish for a token."""
    return request("POST", "/tokens", body=wish, answer=CreatedTokenBody)


def revoke_token(token_id: str) -> Call[TokenBody]:
    """Describe the end of a token."""
    return request("DELETE", _path("tokens", token_id), answer=TokenBody)


def list_webhooks(**query: str | int | None) -> Call[DeliveryListBody]:
    """Describe the question for one page of webhooks."""
    return request("GET", "/webhooks", query=query, answer=DeliveryListBody)


def get_webhook(webhook_id: str) -> Call[DeliveryBody]:
    """Describe the question for a webhook."""
    return request("GET", _path("webhooks", webhook_id), answer=DeliveryBody)


def redeliver(webhook_id: str) -> Call[DeliveryBody]:
    """Describe the wish to send a webhook again."""
    path = f"{_path('webhooks', webhook_id)}/redeliver"
    return request("POST", path, body={}, answer=DeliveryBody)


def ping_webhook(url: str, *, timeout_seconds: float) -> Call[PingedBody]:
    """Describe the wish to try an address."""
    return request(
        "POST",
        "/webhooks/ping",
        body={"url": url},
        answer=PingedBody,
        timeout_seconds=timeout_seconds,
    )


def webhook_secrets() -> Call[SecretListBody]:
    """Describe the question for the secrets that webhooks are signed with."""
    return request("GET", "/webhooks/secret", answer=SecretListBody)


def rotate_webhook_secret() -> Call[SecretListBody]:
    """Describe the wish for a new secret."""
    return request("POST", "/webhooks/secret/rotate", body={}, answer=SecretListBody)


def slots() -> Call[SlotListBody]:
    """Describe the question for all slots."""
    return request("GET", "/slots", answer=SlotListBody)


def slot(name: str) -> Call[SlotBody]:
    """Describe the question for a slot."""
    return request("GET", _path("slots", name), answer=SlotBody)


def slot_log(name: str, *, limit: int | None) -> Call[SlotLogBody]:
    """Describe the question for what was logged of a slot lately."""
    path = f"{_path('slots', name)}/log"
    return request("GET", path, query={"limit": limit}, answer=SlotLogBody)


def warm_slot(name: str, *, timeout_seconds: float) -> Call[SlotBody]:
    """Describe the wish that a slot's window is opened now."""
    path = f"{_path('slots', name)}/warm"
    return request("POST", path, answer=SlotBody, timeout_seconds=timeout_seconds)


def enable_slot(name: str) -> Call[SlotBody]:
    """Describe the wish that a slot is polled and woken again."""
    return request("POST", f"{_path('slots', name)}/enable", answer=SlotBody, is_repeatable=True)


def disable_slot(name: str) -> Call[SlotBody]:
    """Describe the wish that a slot is left alone."""
    return request("POST", f"{_path('slots', name)}/disable", answer=SlotBody, is_repeatable=True)


def settings(**query: str | int | None) -> Call[SettingsBody]:
    """Describe the question for one page of the settings in force."""
    return request("GET", "/settings", query=query, answer=SettingsBody)


def audit(*, limit: int | None, cursor: str | None) -> Call[AuditListBody]:
    """Describe the question for one page of changes."""
    return request("GET", "/audit", query={"limit": limit, "cursor": cursor}, answer=AuditListBody)


def _change(
    path: str,
    reset: Iterable[str],
    change: Mapping[str, object],
    answer: type[Answered],
    query: Mapping[str, str] | None = None,
) -> Call[Answered]:
    body: dict[str, object] = {camel(name): value for name, value in change.items()}
    named = [camel(name) for name in reset]
    if named:
        body["reset"] = named
    return request("PATCH", path, body=body, query=query, answer=answer, is_repeatable=True)


def _named(verb: str, body: Mapping[str, object], answer: type[Answered]) -> Call[Answered]:
    return request("POST", f"/budgets/{verb}", body=body, answer=answer, is_repeatable=True)


def _path(kind: str, name: str) -> str:
    if not name:
        raise InvalidFieldError("id", "must not be empty")
    return f"/{kind}/{quote(name, safe='')}"
