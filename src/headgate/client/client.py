"""`Client`: a service's verbs for programs with asyncio.

`SyncClient` is generated from this file: `make sync-client`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

from headgate.api.schema.admin import (
    AgentBody,
    AgentListBody,
    AuditListBody,
    BudgetListBody,
    BulkCancelBody,
    BulkRetryBody,
    ClosureListBody,
    DeliveryBody,
    DeliveryListBody,
    JournalBody,
    LaneListBody,
    ModelBody,
    ModelListBody,
    Openable,
    PingedBody,
    ProjectBody,
    ProjectListBody,
    ReloadBody,
    SecretListBody,
    SettingsBody,
    SwitchBody,
    TargetBody,
    TargetListBody,
)
from headgate.api.schema.tasks import (
    BudgetLimitBody,
    BudgetStatusBody,
    CancelledBody,
    CreatedTokenBody,
    EstimatesBody,
    NewTokenBody,
    ReadyBody,
    ReleasedBody,
    ReservationBody,
    SettledBody,
    StatsBody,
    SubmittedBatchBody,
    SubmittedBody,
    TaskListBody,
    TokenBody,
    TokenListBody,
    UsageBody,
    WhyBody,
)
from headgate.client.async_transport import AsyncTransport
from headgate.client.event_stream import Reconnector, StreamOverError, event_of, is_last, is_news
from headgate.client.requests import (
    AgentChange,
    Amount,
    BudgetChange,
    ListFilter,
    ProjectChange,
    Query,
    SlotChange,
    TargetChange,
    TaskFields,
    TaskFilter,
    address_of,
    batch_body,
    change_body,
    events_call,
    given_keys,
    headers_of,
    key_headers,
    new_call,
    resource_path,
    task_body,
    task_path,
    task_query,
    timestamp,
    token_of,
)
from headgate.client.responses import pause_seconds, read_body
from headgate.core.events import TaskEvent
from headgate.core.retries import Backoff
from headgate.core.slots.status import SlotBody, SlotListBody, SlotLogBody
from headgate.core.task import TERMINAL
from headgate.core.task_view import TaskSnapshot
from headgate.errors import (
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)
from headgate.storage.tokens import Permission

LISTEN_SECONDS = 60.0
PATIENCE_SECONDS = 300.0
"""How long a service may be away while something is waited for that has no time of its own."""

Body = TypeVar("Body")

_POLLING = Backoff(base_seconds=0.1, max_seconds=2.0, spread=0.2)


class Client:
    """Talks to one service. `url` and `token` are HEADGATE_URL and HEADGATE_TOKEN unless given.

    Requests that found no service, no room or no answer are sent again up to `retries` times, a
    submission under one idempotency key. It belongs to one event loop.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
    ) -> None:
        address = address_of(url)
        self.url = address.url
        self._retries = retries
        self._transport = AsyncTransport(
            address, headers_of(token_of(token)), timeout_seconds=timeout_seconds
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to the service."""
        await self._transport.close()

    # Tasks.

    async def submit(
        self, *, idempotency_key: str | None = None, **fields: Unpack[TaskFields]
    ) -> SubmittedBody:
        """Submit a task; when this returns, the task is on the disk of the service."""
        return await self.request(
            "POST",
            "/tasks",
            response_type=SubmittedBody,
            body=task_body(fields),
            headers=key_headers(idempotency_key),
        )

    async def submit_batch(
        self,
        tasks: Iterable[TaskFields],
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> SubmittedBatchBody:
        """Submit up to 50 tasks; the response has an entry for each, in their order."""
        body = batch_body(
            tasks, agent_id=agent_id, project_id=project_id, callback_url=callback_url
        )
        return await self.request(
            "POST",
            "/tasks/batch",
            response_type=SubmittedBatchBody,
            body=body,
            headers=key_headers(idempotency_key),
        )

    async def get(self, task_id: str) -> TaskSnapshot:
        """Return all fields of a task."""
        return await self.request("GET", task_path(task_id), response_type=TaskSnapshot)

    async def list_tasks(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        **which: Unpack[ListFilter],
    ) -> TaskListBody:
        """Return one page of tasks, newest first; with a `next_cursor` there are more."""
        return await self.request(
            "GET",
            "/tasks",
            response_type=TaskListBody,
            query=task_query(which, limit=limit, cursor=cursor),
        )

    async def iterate_tasks(self, **which: Unpack[ListFilter]) -> AsyncIterator[TaskSnapshot]:
        """Yield all tasks that match, newest first, page by page."""
        cursor = None
        while True:
            page = await self.list_tasks(cursor=cursor, **which)
            for task in page.tasks:
                yield task
            cursor = page.next_cursor
            if cursor is None:
                return

    async def cancel(self, task_id: str) -> CancelledBody:
        """Cancel a task."""
        return await self.request("POST", task_path(task_id, "cancel"), response_type=CancelledBody)

    async def retry(self, task_id: str) -> SubmittedBody:
        """Make a new task from a task that has ended."""
        return await self.request("POST", task_path(task_id, "retry"), response_type=SubmittedBody)

    async def why(self, task_id: str) -> WhyBody:
        """Return every reason why a task waits."""
        return await self.request("GET", task_path(task_id, "why"), response_type=WhyBody)

    async def cancel_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkCancelBody:
        """Count the tasks that match; if `confirm` is set, cancel them, up to 1,000 at a time."""
        # What was worked on no longer matches, so that the same again only goes on with the rest.
        body = {**given_keys(which), "confirm": confirm}
        return await self.request(
            "POST", "/tasks/cancel", response_type=BulkCancelBody, body=body, is_repeatable=True
        )

    async def retry_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkRetryBody:
        """Count the tasks that match; if `confirm` is set, submit them again, as `retry` does."""
        # What was worked on no longer matches, so that the same again only goes on with the rest.
        body = {**given_keys(which), "confirm": confirm}
        return await self.request(
            "POST", "/tasks/retry", response_type=BulkRetryBody, body=body, is_repeatable=True
        )

    # The scheduler.

    async def stats(self) -> StatsBody:
        """Return counts of tasks, recent numbers, and the limits in force."""
        return await self.request("GET", "/scheduler/stats", response_type=StatsBody)

    async def ready(self) -> ReadyBody:
        """Return the role of the node, or raise an error if the node cannot do its work."""
        return await self.request("GET", "/readyz", response_type=ReadyBody)

    async def lanes(
        self, project_id: str | None = None, *, find: str | None = None
    ) -> LaneListBody:
        """Return the lanes with waiting tasks, their waits and their loads."""
        return await self.request(
            "GET",
            "/scheduler/lanes",
            response_type=LaneListBody,
            query={"projectId": project_id, "find": find},
        )

    async def usage(
        self,
        by: Literal["project", "agent", "model", "day"] = "project",
        *,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
    ) -> UsageBody:
        """Return the tokens and dollars that tasks used, of the last 30 days unless said."""
        query = {"by": by, "since": timestamp(since), "until": timestamp(until)}
        return await self.request("GET", "/usage", response_type=UsageBody, query=query)

    async def estimates(self, project_id: str | None = None) -> EstimatesBody:
        """Return the known costs of each kind of work, the most recently changed first."""
        query = {"projectId": project_id}
        return await self.request("GET", "/estimates", response_type=EstimatesBody, query=query)

    async def pause(self) -> SwitchBody:
        """Start no task until `resume`; running tasks continue."""
        return await self.request(
            "POST", "/scheduler/pause", response_type=SwitchBody, is_repeatable=True
        )

    async def resume(self) -> SwitchBody:
        """Start tasks again."""
        return await self.request(
            "POST", "/scheduler/resume", response_type=SwitchBody, is_repeatable=True
        )

    async def closures(self) -> ClosureListBody:
        """Return what is closed, who closed it, since when and until when."""
        return await self.request("GET", "/closures", response_type=ClosureListBody)

    async def open(self, kind: Openable, name: str) -> ClosureListBody:
        """End a closure early, and return the remaining closures."""
        return await self.request(
            "POST",
            "/closures/open",
            body={"kind": kind, "name": name},
            response_type=ClosureListBody,
            is_repeatable=True,
        )

    async def reload(self) -> ReloadBody:
        """Make the service read its settings again, and return what changed."""
        return await self.request(
            "POST", "/scheduler/reload", response_type=ReloadBody, is_repeatable=True
        )

    # Waiting for tasks, and events.

    async def progress(
        self, task_id: str, *, timeout_seconds: float | None = None
    ) -> AsyncIterator[TaskSnapshot]:
        """Yield a task now, and again after each change, until it has ended."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        task = await self.get(task_id)
        yield task
        while task.state not in TERMINAL:
            task = await self._next_change(task, until=until)
            yield task

    async def wait(self, task_id: str, *, timeout_seconds: float | None = None) -> TaskSnapshot:
        """Return a task when it has ended, or raise `WaitTimeoutError`; it goes on then.

        A service that is away meanwhile is asked again until the time is up; without a time, for
        five minutes.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        task = await self.get(task_id)
        while task.state not in TERMINAL:
            task = await self._next_change(task, until=until)
        return task

    async def events(
        self,
        task_id: str | None = None,
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        kind: str | None = None,
        last_event_id: str | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> AsyncIterator[TaskEvent]:
        """Give events as they happen, of all tasks or of one until it has ended.

        `kind` may be several, as `task.completed,task.failed`; filters are for all tasks only.
        A stream that breaks is taken up again after the last event that was seen. If the service
        is away for longer than `patience_seconds`, that is an error.
        """
        reconnector = Reconnector(last_event_id, patience_seconds, clock=time.monotonic)
        while True:
            call = events_call(
                task_id,
                agent_id=agent_id,
                project_id=project_id,
                kind=kind,
                last_event_id=reconnector.last_event_id,
            )
            try:
                async with aclosing(self._transport.stream(call)) as messages:
                    async for message in messages:
                        reconnector.saw(message)
                        if (event := event_of(message)) is not None:
                            yield event
                        if task_id is not None and is_last(message):
                            return
                pause = reconnector.ended()
            except StreamOverError:
                return
            except ServiceError as error:
                pause = reconnector.failed(error)
            await asyncio.sleep(pause)

    # Projects, agents and targets.

    async def list_projects(self) -> ProjectListBody:
        """Return all projects."""
        return await self.request("GET", "/projects", response_type=ProjectListBody)

    async def get_project(self, project_id: str) -> ProjectBody:
        """Return a project with the settings in force."""
        return await self.request(
            "GET", resource_path("projects", project_id), response_type=ProjectBody
        )

    async def change_project(
        self, project_id: str, *, reset: Iterable[str] = (), **change: Unpack[ProjectChange]
    ) -> ProjectBody:
        """Change a project; fields in `reset` get their value from the file again."""
        return await self.request(
            "PATCH",
            resource_path("projects", project_id),
            response_type=ProjectBody,
            body=change_body(reset, change),
            is_repeatable=True,
        )

    async def list_agents(self) -> AgentListBody:
        """Return the agents that are configured, or that have tasks now."""
        return await self.request("GET", "/agents", response_type=AgentListBody)

    async def get_agent(self, agent_id: str) -> AgentBody:
        """Return an agent with the settings in force."""
        return await self.request("GET", resource_path("agents", agent_id), response_type=AgentBody)

    async def change_agent(
        self, agent_id: str, *, reset: Iterable[str] = (), **change: Unpack[AgentChange]
    ) -> AgentBody:
        """Change an agent; fields in `reset` get their value from the file again."""
        return await self.request(
            "PATCH",
            resource_path("agents", agent_id),
            response_type=AgentBody,
            body=change_body(reset, change),
            is_repeatable=True,
        )

    async def list_models(self) -> ModelListBody:
        """Return the models that the settings name, with upstreams and prices."""
        return await self.request("GET", "/models", response_type=ModelListBody)

    async def get_model(self, model: str) -> ModelBody:
        """Return the upstreams and the price of a model."""
        return await self.request("GET", resource_path("models", model), response_type=ModelBody)

    async def list_targets(self) -> TargetListBody:
        """Return all targets."""
        return await self.request("GET", "/targets", response_type=TargetListBody)

    async def get_target(self, target: str) -> TargetBody:
        """Return a target with the settings in force."""
        return await self.request("GET", resource_path("targets", target), response_type=TargetBody)

    async def change_target(
        self, target: str, *, reset: Iterable[str] = (), **change: Unpack[TargetChange]
    ) -> TargetBody:
        """Change, pause or drain a target; `reset` lists fields that follow the file again."""
        return await self.request(
            "PATCH",
            resource_path("targets", target),
            response_type=TargetBody,
            body=change_body(reset, change),
            is_repeatable=True,
        )

    # Budgets and reservations.

    async def list_budgets(self) -> BudgetListBody:
        """Return the limits of budgets."""
        return await self.request("GET", "/budgets", response_type=BudgetListBody)

    async def change_budget(
        self, scope: str, *, reset: Iterable[str] = (), **change: Unpack[BudgetChange]
    ) -> BudgetListBody:
        """Change the limits of a scope; the empty string is the root."""
        return await self.request(
            "PATCH",
            "/budgets",
            response_type=BudgetListBody,
            query={"scope": scope},
            body=change_body(reset, change),
            is_repeatable=True,
        )

    async def delete_budget(self, scope: str) -> BudgetListBody:
        """Remove the limits of a scope; booked costs stay booked."""
        return await self.request(
            "DELETE", "/budgets", response_type=BudgetListBody, query={"scope": scope}
        )

    async def create_budget(
        self,
        scope: str,
        *,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str = "none",
    ) -> BudgetLimitBody:
        """Set the limits of a scope that has none; raise `budget_mismatch` if it has others."""
        body = {
            "scope": scope,
            "limit_usd": limit_usd,
            "limit_tokens": limit_tokens,
            "window": window,
        }
        return await self._ledger("create", given_keys(body), BudgetLimitBody)

    async def adjust_budget(
        self,
        adjustment_id: str,
        scope: str,
        *,
        reason: str,
        action: str = "adjust",
        usd: Amount | None = None,
        tokens: int | None = None,
    ) -> BudgetStatusBody:
        """Change the booked amount of a scope, or `accept` or `reject` its claims."""
        body = {
            "id": adjustment_id,
            "scope": scope,
            "action": action,
            "usd": usd,
            "tokens": tokens,
            "reason": reason,
        }
        return await self._ledger("adjust", given_keys(body), BudgetStatusBody)

    async def budget_status(self, scope: str | None = None) -> BudgetStatusBody:
        """Return the balances and limits of a scope and of the scopes inside it."""
        return await self.request(
            "GET", "/budgets/status", response_type=BudgetStatusBody, query={"scope": scope}
        )

    async def budget_journal(
        self, scope: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> JournalBody:
        """Return one page of the changes of a scope, newest first."""
        return await self.request(
            "GET",
            "/budgets/journal",
            response_type=JournalBody,
            query={"scope": scope, "limit": limit, "cursor": cursor},
        )

    async def reserve(
        self,
        reservation_id: str,
        scope: str,
        *,
        usd: Amount = 0,
        tokens: int = 0,
        also: Sequence[str] = (),
        lease_seconds: float = 60.0,
        dispatched: bool = False,
    ) -> ReservationBody:
        """Reserve an amount before work; call the provider only if the response `is_live`."""
        body = {
            "id": reservation_id,
            "scope": scope,
            "usd": usd,
            "tokens": tokens,
            "also": also,
            "leaseSeconds": lease_seconds,
            "dispatched": dispatched,
        }
        return await self._ledger("reserve", body, ReservationBody)

    async def dispatched(self, reservation_id: str, scope: str) -> ReservationBody:
        """Record that you are about to call the provider."""
        body = {"id": reservation_id, "scope": scope}
        return await self._ledger("dispatched", body, ReservationBody)

    async def extend(
        self, reservation_id: str, scope: str, *, lease_seconds: float = 60.0
    ) -> ReservationBody:
        """Renew the lease of a reservation; the lease never becomes shorter."""
        body = {"id": reservation_id, "scope": scope, "leaseSeconds": lease_seconds}
        return await self._ledger("extend", body, ReservationBody)

    async def commit(
        self, reservation_id: str, scope: str, *, usd: Amount = 0, tokens: int = 0
    ) -> SettledBody:
        """Book the actual cost of the work."""
        body = {"id": reservation_id, "scope": scope, "usd": usd, "tokens": tokens}
        return await self._ledger("commit", body, SettledBody)

    async def release(self, reservation_id: str, scope: str) -> SettledBody:
        """Release the reserved amount."""
        body = {"id": reservation_id, "scope": scope}
        return await self._ledger("release", body, SettledBody)

    async def release_any(self, reservation_id: str, *, reason: str = "") -> ReleasedBody:
        """Release any reservation, by the id that the journal shows."""
        return await self.request(
            "POST",
            resource_path("reservations", reservation_id, "release"),
            response_type=ReleasedBody,
            body={"reason": reason},
            is_repeatable=True,
        )

    async def extend_any(
        self, reservation_id: str, lease_seconds: float, *, reason: str = ""
    ) -> ReservationBody:
        """Extend the lease of any reservation, by the id that the journal shows."""
        return await self.request(
            "POST",
            resource_path("reservations", reservation_id, "extend"),
            response_type=ReservationBody,
            body={"leaseSeconds": lease_seconds, "reason": reason},
            is_repeatable=True,
        )

    # Tokens.

    async def list_tokens(self) -> TokenListBody:
        """Return all tokens, without their secrets."""
        return await self.request("GET", "/tokens", response_type=TokenListBody)

    async def create_token(
        self,
        name: str,
        permissions: Sequence[Permission],
        *,
        expires_at: datetime | None = None,
        agent_id: str | None = None,
        project_id: str | None = None,
        least_priority: int | None = None,
    ) -> CreatedTokenBody:
        """Create a token; only this response has its secret."""
        body = NewTokenBody(
            name=name,
            permissions=list(permissions),
            expires_at=expires_at,
            agent_id=agent_id,
            project_id=project_id,
            least_priority=least_priority,
        )
        return await self.request("POST", "/tokens", response_type=CreatedTokenBody, body=body)

    async def revoke_token(self, token_id: str) -> TokenBody:
        """Revoke a token."""
        return await self.request(
            "DELETE", resource_path("tokens", token_id), response_type=TokenBody
        )

    # Webhooks.

    async def list_webhooks(
        self,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        task: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryListBody:
        """Return one page of webhooks, newest first."""
        return await self.request(
            "GET",
            "/webhooks",
            response_type=DeliveryListBody,
            query={"state": state, "task": task, "limit": limit, "cursor": cursor},
        )

    async def get_webhook(self, webhook_id: str) -> DeliveryBody:
        """Return a webhook."""
        return await self.request(
            "GET", resource_path("webhooks", webhook_id), response_type=DeliveryBody
        )

    async def redeliver(self, webhook_id: str) -> DeliveryBody:
        """Send a webhook again, with all tries."""
        return await self.request(
            "POST",
            resource_path("webhooks", webhook_id, "redeliver"),
            response_type=DeliveryBody,
            body={},
        )

    async def ping_webhook(self, url: str, *, timeout_seconds: float = 90.0) -> PingedBody:
        """Send a signed message to an address now, and return the answer."""
        return await self.request(
            "POST",
            "/webhooks/ping",
            response_type=PingedBody,
            body={"url": url},
            timeout_seconds=timeout_seconds,
        )

    async def webhook_secrets(self) -> SecretListBody:
        """Return the secrets with which the service signs webhooks."""
        return await self.request("GET", "/webhooks/secret", response_type=SecretListBody)

    async def rotate_webhook_secret(self) -> SecretListBody:
        """Create a new secret; the old secret signs too for 24 hours."""
        return await self.request(
            "POST", "/webhooks/secret/rotate", response_type=SecretListBody, body={}
        )

    # Slots.

    async def slots(self) -> SlotListBody:
        """Return all slots: how much of each quota is used, when it resets, who waits."""
        return await self.request("GET", "/slots", response_type=SlotListBody)

    async def slot(self, name: str) -> SlotBody:
        """Return a slot."""
        return await self.request("GET", resource_path("slots", name), response_type=SlotBody)

    async def slot_log(self, name: str, *, limit: int | None = None) -> SlotLogBody:
        """Return the recent log of a slot, oldest first."""
        return await self.request(
            "GET",
            resource_path("slots", name, "log"),
            response_type=SlotLogBody,
            query={"limit": limit},
        )

    async def warm_slot(self, name: str, *, timeout_seconds: float = 60.0) -> SlotBody:
        """Open a slot's window now; raise an error if it is open already."""
        return await self.request(
            "POST",
            resource_path("slots", name, "warm"),
            response_type=SlotBody,
            timeout_seconds=timeout_seconds,
        )

    async def observe_slot(self, name: str, *, status: int, headers: Mapping[str, str]) -> SlotBody:
        """Report the response to a request that you sent with the key of a slot."""
        return await self.request(
            "POST",
            resource_path("slots", name, "observe"),
            response_type=SlotBody,
            body={"status": status, "headers": dict(headers)},
            is_repeatable=True,
        )

    async def enable_slot(self, name: str) -> SlotBody:
        """Enable a slot: poll and wake it again."""
        return await self.request(
            "POST",
            resource_path("slots", name, "enable"),
            response_type=SlotBody,
            is_repeatable=True,
        )

    async def disable_slot(self, name: str) -> SlotBody:
        """Disable a slot: neither poll nor wake it; its tasks wait."""
        return await self.request(
            "POST",
            resource_path("slots", name, "disable"),
            response_type=SlotBody,
            is_repeatable=True,
        )

    async def change_slot(
        self, name: str, *, reset: Iterable[str] = (), **change: Unpack[SlotChange]
    ) -> SlotBody:
        """Change a slot; fields in `reset` are as the file says again."""
        return await self.request(
            "PATCH",
            resource_path("slots", name),
            response_type=SlotBody,
            body=change_body(reset, change),
            is_repeatable=True,
        )

    # Settings and the audit log.

    async def settings(
        self,
        *,
        section: str | None = None,
        text: str | None = None,
        changed: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SettingsBody:
        """Return one page of the settings in force, and what the last reload changed."""
        query = {
            "section": section,
            "text": text,
            "changed": "true" if changed else None,
            "limit": limit,
            "cursor": cursor,
        }
        return await self.request("GET", "/settings", response_type=SettingsBody, query=query)

    async def audit(self, *, limit: int | None = None, cursor: str | None = None) -> AuditListBody:
        """Return one page of who changed what, newest first."""
        return await self.request(
            "GET", "/audit", response_type=AuditListBody, query={"limit": limit, "cursor": cursor}
        )

    # Any request, and how it is sent.

    async def request(
        self,
        method: str,
        path: str,
        *,
        response_type: type[Body],
        body: object = None,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool | None = None,
        timeout_seconds: float | None = None,
    ) -> Body:
        """Send any request, and return the body of its response as this type."""
        call = new_call(
            method,
            path,
            response_type=response_type,
            body=body,
            query=query,
            headers=headers,
            is_repeatable=is_repeatable,
            timeout_seconds=timeout_seconds,
        )
        attempt = 0
        while True:
            attempt += 1
            try:
                return read_body(await self._transport.send(call), response_type)
            except ServiceError as error:
                pause = pause_seconds(call, error, attempt)
                if pause is None or attempt > self._retries:
                    raise
            await asyncio.sleep(pause)

    async def _ledger(
        self, verb: str, body: Mapping[str, object], response_type: type[Body]
    ) -> Body:
        # A reservation has a name, so that any of these may be sent twice.
        return await self.request(
            "POST", f"/budgets/{verb}", response_type=response_type, body=body, is_repeatable=True
        )

    async def _next_change(self, seen: TaskSnapshot, *, until: float | None) -> TaskSnapshot:
        """Return a task when it is no longer as it was seen.

        Events say when to read it again, and only what is read counts. Where there are no events,
        because a proxy keeps them back, reading alone does.
        """
        reads = 0
        while True:
            reads += 1
            await self._until_news(seen, reads, until=until)
            task = await self._read_again(seen, until=until)
            if (task.state, task.attempt) != (seen.state, seen.attempt):
                return task
            if until is not None and time.monotonic() >= until:
                line = f"task {task.task_id} is still {task.state.value}; it goes on"
                raise WaitTimeoutError(line, code="wait_timeout", task_id=task.task_id)
            if reads > 1:
                # Events that promise a change which cannot be seen must not make this spin.
                await asyncio.sleep(_POLLING.seconds(reads, draw=random.random()))  # noqa: S311

    async def _read_again(self, seen: TaskSnapshot, *, until: float | None) -> TaskSnapshot:
        """Return a task as it is now; a service that is away is asked until time is up."""
        end = time.monotonic() + PATIENCE_SECONDS if until is None else until
        failures = 0
        while True:
            try:
                return await self.get(seen.task_id)
            except (ServiceLimitError, ServiceUnavailableError) as error:
                left = end - time.monotonic()
                if left <= 0 and until is None:
                    raise
                if left <= 0:
                    was = f"task {seen.task_id} was {seen.state.value} when it was last seen"
                    line = f"{was}; {error}"
                    raise WaitTimeoutError(
                        line, code="wait_timeout", task_id=seen.task_id
                    ) from error
                failures += 1
                draw = random.random()  # noqa: S311 - spreads load, no secret
                asked = error.retry_after_seconds or 0.0
                pause = max(_POLLING.seconds(failures, draw=draw), asked)
            await asyncio.sleep(min(pause, left))

    async def _until_news(self, seen: TaskSnapshot, reads: int, *, until: float | None) -> None:
        left = LISTEN_SECONDS if until is None else max(0.0, until - time.monotonic())
        if not left:
            return
        is_heard = await self._transport.listen(
            events_call(seen.task_id),
            lambda message: is_news(message, seen),
            seconds=min(left, LISTEN_SECONDS),
        )
        if not is_heard:
            draw = random.random()  # noqa: S311 - spreads load, no secret
            await asyncio.sleep(min(left, _POLLING.seconds(reads, draw=draw)))
