"""The calls that administer a service, described once, as `calls` does for tasks.

A change says what is to be so, and a reservation has a name; so both may be sent twice. A new
token, a new secret, a wake and a webhook that is sent again may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar
from urllib.parse import quote

from headgate.bodies.admin import (
    AgentBody,
    AgentListBody,
    AuditListBody,
    BudgetListBody,
    ProjectBody,
    ProjectListBody,
    SettingsBody,
    TargetBody,
    TargetListBody,
)
from headgate.bodies.figures import JournalBody, LaneListBody
from headgate.bodies.slots import SlotBody, SlotListBody, SlotLogBody
from headgate.bodies.tasks import (
    BudgetStatusBody,
    CreatedTokenBody,
    LimitBody,
    NewTokenBody,
    ReservationBody,
    SettledBody,
    TokenBody,
    TokenListBody,
)
from headgate.bodies.webhooks import DeliveryBody, DeliveryListBody, PingedBody, SecretListBody
from headgate.client.admin_fields import Amount
from headgate.client.calls import Call, request
from headgate.client.task_fields import camel
from headgate.errors import InvalidFieldError

Answered = TypeVar("Answered")


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


def found_budget(scope: str, limits: Mapping[str, object]) -> Call[LimitBody]:
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
