"""`Client`: a service's verbs for programs with asyncio."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
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
    DeliveryBody,
    DeliveryListBody,
    JournalBody,
    LaneListBody,
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
from headgate.client import calls, steps
from headgate.client.address import address_of, headers_of, token_of
from headgate.client.async_transport import AsyncTransport
from headgate.client.calls import (
    AgentChange,
    Amount,
    BudgetChange,
    Call,
    ProjectChange,
    Query,
    TargetChange,
)
from headgate.client.steps import Following, StreamOverError, event_of, is_last, is_news
from headgate.client.task_fields import ListFilter, TaskFields, TaskFilter
from headgate.core.events import TaskEvent
from headgate.core.slots.status import SlotBody, SlotListBody, SlotLogBody
from headgate.core.task_view import TaskSnapshot
from headgate.errors import ServiceError
from headgate.storage.tokens import Permission

# The verbs of `Client` that administer a service.


class AdminVerbs:
    """A part of `Client`."""

    async def list_projects(self) -> ProjectListBody:
        """Return all projects."""
        return await self._send(calls.list_projects())

    async def get_project(self, project_id: str) -> ProjectBody:
        """Return a project as it is in force."""
        return await self._send(calls.get_project(project_id))

    async def change_project(
        self, project_id: str, *, reset: Iterable[str] = (), **change: Unpack[ProjectChange]
    ) -> ProjectBody:
        """Change a project; fields in `reset` are as the file says again."""
        return await self._send(calls.change_project(project_id, reset, change))

    async def list_agents(self) -> AgentListBody:
        """Return the agents that are configured, or that have tasks now."""
        return await self._send(calls.list_agents())

    async def get_agent(self, agent_id: str) -> AgentBody:
        """Return an agent as it is in force."""
        return await self._send(calls.get_agent(agent_id))

    async def change_agent(
        self, agent_id: str, *, reset: Iterable[str] = (), **change: Unpack[AgentChange]
    ) -> AgentBody:
        """Change an agent; fields in `reset` are as the file says again."""
        return await self._send(calls.change_agent(agent_id, reset, change))

    async def list_targets(self) -> TargetListBody:
        """Return all targets."""
        return await self._send(calls.list_targets())

    async def get_target(self, target: str) -> TargetBody:
        """Return a target as it is in force."""
        return await self._send(calls.get_target(target))

    async def change_target(
        self, target: str, *, reset: Iterable[str] = (), **change: Unpack[TargetChange]
    ) -> TargetBody:
        """Pause, resume or drain a target; fields in `reset` are as the file says again."""
        return await self._send(calls.change_target(target, reset, change))

    async def list_budgets(self) -> BudgetListBody:
        """Return the limits of budgets."""
        return await self._send(calls.list_budgets())

    async def change_budget(
        self, scope: str, *, reset: Iterable[str] = (), **change: Unpack[BudgetChange]
    ) -> BudgetListBody:
        """Change the limits of a scope; the empty one is the root."""
        return await self._send(calls.change_budget(scope, reset, change))

    async def create_budget(
        self,
        scope: str,
        *,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str = "none",
    ) -> LimitBody:
        """Set the limits of a scope that has none; other limits there: `budget_mismatch`."""
        body = {"limit_usd": limit_usd, "limit_tokens": limit_tokens, "window": window}
        return await self._send(calls.create_budget(scope, body))

    async def budget_status(self, scope: str | None = None) -> BudgetStatusBody:
        """Return what a scope and everything within it has used and holds."""
        return await self._send(calls.budget_status(scope))

    async def budget_journal(
        self, scope: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> JournalBody:
        """Return one page of the changes of a scope, newest first."""
        return await self._send(calls.budget_journal(scope, limit=limit, cursor=cursor))

    async def lanes(
        self, project_id: str | None = None, *, find: str | None = None
    ) -> LaneListBody:
        """Return where tasks wait, for how long, and how loaded each lane is."""
        return await self._send(calls.lanes(project_id, find=find))

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
        """Hold an amount before the work; call the provider only while the answer `is_live`."""
        return await self._send(
            calls.reserve(
                {
                    "id": reservation_id,
                    "scope": scope,
                    "usd": usd,
                    "tokens": tokens,
                    "also": also,
                    "lease_seconds": lease_seconds,
                    "dispatched": dispatched,
                }
            )
        )

    async def dispatched(self, reservation_id: str, scope: str) -> ReservationBody:
        """Note that the provider is about to be called."""
        return await self._send(calls.dispatched(reservation_id, scope))

    async def commit(
        self, reservation_id: str, scope: str, *, usd: Amount = 0, tokens: int = 0
    ) -> SettledBody:
        """Book what the work has cost."""
        return await self._send(calls.commit(reservation_id, scope, usd=usd, tokens=tokens))

    async def release(self, reservation_id: str, scope: str) -> SettledBody:
        """Give back what was held."""
        return await self._send(calls.release(reservation_id, scope))

    async def list_tokens(self) -> TokenListBody:
        """Return all tokens, without their secrets."""
        return await self._send(calls.list_tokens())

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
        """Make a token; its secret is in this answer and nowhere else."""
        wish = NewTokenBody(
            name=name,
            permissions=list(permissions),
            expires_at=expires_at,
            agent_id=agent_id,
            project_id=project_id,
            least_priority=least_priority,
        )
        return await self._send(calls.create_token(wish))

    async def revoke_token(self, token_id: str) -> TokenBody:
        """End a token for good."""
        return await self._send(calls.revoke_token(token_id))

    async def list_webhooks(
        self,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        task: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryListBody:
        """Return one page of webhooks, newest first."""
        return await self._send(
            calls.list_webhooks(state=state, task=task, limit=limit, cursor=cursor)
        )

    async def get_webhook(self, webhook_id: str) -> DeliveryBody:
        """Return what is known of a webhook."""
        return await self._send(calls.get_webhook(webhook_id))

    async def redeliver(self, webhook_id: str) -> DeliveryBody:
        """Send a webhook again, from its first try on."""
        return await self._send(calls.redeliver(webhook_id))

    async def ping_webhook(self, url: str, *, timeout_seconds: float = 90.0) -> PingedBody:
        """Send a signed message to an address now, and return what it answered."""
        return await self._send(calls.ping_webhook(url, timeout_seconds=timeout_seconds))

    async def webhook_secrets(self) -> SecretListBody:
        """Return the secrets that webhooks are signed with."""
        return await self._send(calls.webhook_secrets())

    async def rotate_webhook_secret(self) -> SecretListBody:
        """Make a new secret; the one before signs as well for a while."""
        return await self._send(calls.rotate_webhook_secret())

    async def slots(self) -> SlotListBody:
        """Return all slots: how much of each quota is used, when it resets, who waits."""
        return await self._send(calls.slots())

    async def slot(self, name: str) -> SlotBody:
        """Return a slot."""
        return await self._send(calls.slot(name))

    async def slot_log(self, name: str, *, limit: int | None = None) -> SlotLogBody:
        """Return what a node has logged of a slot lately, oldest first."""
        return await self._send(calls.slot_log(name, limit=limit))

    async def warm_slot(self, name: str, *, timeout_seconds: float = 60.0) -> SlotBody:
        """Open a slot's window now; refused while it is open already."""
        return await self._send(calls.warm_slot(name, timeout_seconds=timeout_seconds))

    async def enable_slot(self, name: str) -> SlotBody:
        """Poll and wake a slot again, whatever has disabled it."""
        return await self._send(calls.enable_slot(name))

    async def disable_slot(self, name: str) -> SlotBody:
        """Neither poll nor wake a slot until it is enabled; its tasks wait."""
        return await self._send(calls.disable_slot(name))

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
        return await self._send(
            calls.settings(
                section=section,
                text=text,
                changed="true" if changed else None,
                limit=limit,
                cursor=cursor,
            )
        )

    async def audit(self, *, limit: int | None = None, cursor: str | None = None) -> AuditListBody:
        """Return one page of who changed what, newest first."""
        return await self._send(calls.audit(limit=limit, cursor=cursor))

    @abstractmethod
    async def _send(self, call: Call[Answered]) -> Answered: ...


MAX_LISTENING = 32

Answered = TypeVar("Answered")


class Client(AdminVerbs):
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
        self._listening = 0
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

    async def submit(
        self, *, idempotency_key: str | None = None, **fields: Unpack[TaskFields]
    ) -> SubmittedBody:
        """Submit a task; when this returns, it is on the service's disk."""
        return await self._send(calls.submit(fields, idempotency_key=idempotency_key))

    async def submit_batch(
        self,
        tasks: Iterable[TaskFields],
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> BatchBody:
        """Submit up to 50 tasks; the answer has an entry for each, in their order."""
        return await self._send(
            calls.submit_batch(
                tasks,
                agent_id=agent_id,
                project_id=project_id,
                callback_url=callback_url,
                idempotency_key=idempotency_key,
            )
        )

    async def get(self, task_id: str) -> TaskSnapshot:
        """Return everything that is known of a task."""
        return await self._send(calls.get(task_id))

    async def list_tasks(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        **which: Unpack[ListFilter],
    ) -> TaskListBody:
        """Return one page of tasks, newest first; only its `next_cursor` says if there are more."""
        return await self._send(calls.list_tasks(which, limit=limit, cursor=cursor))

    async def iterate_tasks(self, **which: Unpack[ListFilter]) -> AsyncIterator[TaskSnapshot]:
        """Give all tasks that are meant, newest first, page by page."""
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
        return await self._send(calls.cancel(task_id))

    async def retry(self, task_id: str) -> SubmittedBody:
        """Submit again what a task that ended was to do; it becomes a new task."""
        return await self._send(calls.retry(task_id))

    async def why(self, task_id: str) -> WhyBody:
        """Return every rule that keeps a task waiting."""
        return await self._send(calls.why(task_id))

    async def stats(self) -> StatsBody:
        """Return what waits, what has happened, and the limits in force."""
        return await self._send(calls.stats())

    async def ready(self) -> ReadyBody:
        """Return the role of a node that does its work, or raise what keeps it from that."""
        return await self._send(calls.ready())

    async def cancel_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkCancelBody:
        """Count the tasks that match; if `confirm` is set, cancel them, up to 1,000 at a time."""
        return await self._send(calls.cancel_matching(which, confirm=confirm))

    async def retry_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkRetryBody:
        """Count the tasks that match; if `confirm` is set, submit them again, as `retry` does."""
        return await self._send(calls.retry_matching(which, confirm=confirm))

    async def usage(
        self,
        by: Literal["project", "agent", "model", "day"] = "project",
        *,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
    ) -> UsageBody:
        """Return the tokens and dollars that tasks used, of the last 30 days unless said."""
        return await self._send(calls.usage(by, since=since, until=until))

    async def pause(self) -> SwitchBody:
        """Start nothing new until `resume`; what runs goes on."""
        return await self._send(calls.pause())

    async def resume(self) -> SwitchBody:
        """Start tasks again."""
        return await self._send(calls.resume())

    async def reload(self) -> ReloadBody:
        """Have the service read its settings again, and return what changed."""
        return await self._send(calls.reload())

    async def progress(
        self, task_id: str, *, timeout_seconds: float | None = None
    ) -> AsyncIterator[TaskSnapshot]:
        """Give a task as it is, and again whenever it has moved on, until it has ended."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        seen: TaskSnapshot | None = None
        while seen is None or not steps.has_ended(seen):
            seen = await self._carry_out(
                steps.next_change(
                    task_id, seen, retries=self._retries, clock=time.monotonic, until=until
                )
            )
            yield seen

    async def wait(self, task_id: str, *, timeout_seconds: float | None = None) -> TaskSnapshot:
        """Return a task when it has ended, or raise `WaitTimeoutError`; it goes on then."""
        seen = [task async for task in self.progress(task_id, timeout_seconds=timeout_seconds)]
        return seen[-1]

    async def events(
        self,
        task_id: str | None = None,
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        kind: str | None = None,
        last_event_id: str | None = None,
        patience_seconds: float = 300.0,
    ) -> AsyncIterator[TaskEvent]:
        """Give events as they happen, of all tasks or of one until it has ended.

        `kind` may be several, as `task.completed,task.failed`; filters are for all tasks only.
        A stream that breaks is taken up again after the last event that was seen. If the service
        is away for longer than `patience_seconds`, that is an error.
        """
        following = Following(last_event_id, patience_seconds, clock=time.monotonic)
        while True:
            call = calls.events(
                task_id,
                agent_id=agent_id,
                project_id=project_id,
                kind=kind,
                last_event_id=following.last_event_id,
            )
            try:
                async with aclosing(self._transport.stream(call)) as messages:
                    async for message in messages:
                        following.saw(message)
                        if (event := event_of(message)) is not None:
                            yield event
                        if task_id is not None and is_last(message):
                            return
                pause = following.ended()
            except StreamOverError:
                return
            except ServiceError as error:
                pause = following.failed(error)
            await asyncio.sleep(pause)

    async def request(
        self,
        method: str,
        path: str,
        *,
        answer: type[Answered],
        body: object = None,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool | None = None,
        timeout_seconds: float | None = None,
    ) -> Answered:
        """Send any request, and return its answer as this type."""
        return await self._send(
            calls.request(
                method,
                path,
                answer=answer,
                body=body,
                query=query,
                headers=headers,
                is_repeatable=is_repeatable,
                timeout_seconds=timeout_seconds,
            )
        )

    async def _send(self, call: Call[Answered]) -> Answered:
        return await self._carry_out(steps.attempts(call, retries=self._retries))

    async def _carry_out(self, todo: steps.Steps[Answered]) -> Answered:
        outcome: steps.Outcome = None
        while True:
            try:
                step = todo.send(outcome)
            except StopIteration as end:
                answer: Answered = end.value
                return answer
            outcome = await self._do(step)

    async def _do(self, step: steps.Step) -> steps.Outcome:
        if isinstance(step, Call):
            return await self._transport.send(step)
        if isinstance(step, steps.Listen):
            return await self._listen(step)
        await asyncio.sleep(step.seconds)
        return None

    async def _listen(self, step: steps.Listen) -> bool:
        # Each stream holds a connection. Whoever waits beyond these looks once in a while instead.
        if self._listening >= MAX_LISTENING:
            return False
        self._listening += 1
        try:
            return await self._hear(step)
        finally:
            self._listening -= 1

    async def _hear(self, step: steps.Listen) -> bool:
        call = calls.events(step.seen.task_id)
        try:
            async with (
                asyncio.timeout(step.seconds),
                aclosing(self._transport.stream(call)) as messages,
            ):
                async for message in messages:
                    if is_news(message, step.seen):
                        return True
        except TimeoutError:
            return True
        except StreamOverError:
            return True
        except ServiceError:
            return False
        return False
