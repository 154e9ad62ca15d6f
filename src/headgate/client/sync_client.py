"""`SyncClient`: a service's verbs for programs without asyncio, and for the command line."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from headgate.client.sync_transport import SyncTransport
from headgate.client.task_fields import ListFilter, TaskFields, TaskFilter
from headgate.core.events import TaskEvent
from headgate.core.slots.status import SlotBody, SlotListBody, SlotLogBody
from headgate.core.task_view import TaskSnapshot
from headgate.errors import ServiceError
from headgate.storage.tokens import Permission

# The verbs of `SyncClient` that administer a service.


class SyncAdminVerbs:
    """A part of `SyncClient`."""

    def list_projects(self) -> ProjectListBody:
        """Return all projects."""
        return self._send(calls.list_projects())

    def get_project(self, project_id: str) -> ProjectBody:
        """Return a project as it is in force."""
        return self._send(calls.get_project(project_id))

    def change_project(
        self, project_id: str, *, reset: Iterable[str] = (), **change: Unpack[ProjectChange]
    ) -> ProjectBody:
        """Change a project; fields in `reset` are as the file says again."""
        return self._send(calls.change_project(project_id, reset, change))

    def list_agents(self) -> AgentListBody:
        """Return the agents that are configured, or that have tasks now."""
        return self._send(calls.list_agents())

    def get_agent(self, agent_id: str) -> AgentBody:
        """Return an agent as it is in force."""
        return self._send(calls.get_agent(agent_id))

    def change_agent(
        self, agent_id: str, *, reset: Iterable[str] = (), **change: Unpack[AgentChange]
    ) -> AgentBody:
        """Change an agent; fields in `reset` are as the file says again."""
        return self._send(calls.change_agent(agent_id, reset, change))

    def list_targets(self) -> TargetListBody:
        """Return all targets."""
        return self._send(calls.list_targets())

    def get_target(self, target: str) -> TargetBody:
        """Return a target as it is in force."""
        return self._send(calls.get_target(target))

    def change_target(
        self, target: str, *, reset: Iterable[str] = (), **change: Unpack[TargetChange]
    ) -> TargetBody:
        """Pause, resume or drain a target; fields in `reset` are as the file says again."""
        return self._send(calls.change_target(target, reset, change))

    def list_budgets(self) -> BudgetListBody:
        """Return the limits of budgets."""
        return self._send(calls.list_budgets())

    def change_budget(
        self, scope: str, *, reset: Iterable[str] = (), **change: Unpack[BudgetChange]
    ) -> BudgetListBody:
        """Change the limits of a scope; the empty one is the root."""
        return self._send(calls.change_budget(scope, reset, change))

    def create_budget(
        self,
        scope: str,
        *,
        limit_usd: Amount | None = None,
        limit_tokens: int | None = None,
        window: str = "none",
    ) -> LimitBody:
        """Set the limits of a scope that has none; other limits there: `budget_mismatch`."""
        body = {"limit_usd": limit_usd, "limit_tokens": limit_tokens, "window": window}
        return self._send(calls.create_budget(scope, body))

    def budget_status(self, scope: str | None = None) -> BudgetStatusBody:
        """Return what a scope and everything within it has used and holds."""
        return self._send(calls.budget_status(scope))

    def budget_journal(
        self, scope: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> JournalBody:
        """Return one page of the changes of a scope, newest first."""
        return self._send(calls.budget_journal(scope, limit=limit, cursor=cursor))

    def lanes(self, project_id: str | None = None, *, find: str | None = None) -> LaneListBody:
        """Return where tasks wait, for how long, and how loaded each lane is."""
        return self._send(calls.lanes(project_id, find=find))

    def reserve(
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
        return self._send(
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

    def dispatched(self, reservation_id: str, scope: str) -> ReservationBody:
        """Note that the provider is about to be called."""
        return self._send(calls.dispatched(reservation_id, scope))

    def commit(
        self, reservation_id: str, scope: str, *, usd: Amount = 0, tokens: int = 0
    ) -> SettledBody:
        """Book what the work has cost."""
        return self._send(calls.commit(reservation_id, scope, usd=usd, tokens=tokens))

    def release(self, reservation_id: str, scope: str) -> SettledBody:
        """Give back what was held."""
        return self._send(calls.release(reservation_id, scope))

    def list_tokens(self) -> TokenListBody:
        """Return all tokens, without their secrets."""
        return self._send(calls.list_tokens())

    def create_token(
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
        return self._send(calls.create_token(wish))

    def revoke_token(self, token_id: str) -> TokenBody:
        """End a token for good."""
        return self._send(calls.revoke_token(token_id))

    def list_webhooks(
        self,
        *,
        state: Literal["pending", "delivered", "dead"] | None = None,
        task: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> DeliveryListBody:
        """Return one page of webhooks, newest first."""
        return self._send(calls.list_webhooks(state=state, task=task, limit=limit, cursor=cursor))

    def get_webhook(self, webhook_id: str) -> DeliveryBody:
        """Return what is known of a webhook."""
        return self._send(calls.get_webhook(webhook_id))

    def redeliver(self, webhook_id: str) -> DeliveryBody:
        """Send a webhook again, from its first try on."""
        return self._send(calls.redeliver(webhook_id))

    def ping_webhook(self, url: str, *, timeout_seconds: float = 90.0) -> PingedBody:
        """Send a signed message to an address now, and return what it answered."""
        return self._send(calls.ping_webhook(url, timeout_seconds=timeout_seconds))

    def webhook_secrets(self) -> SecretListBody:
        """Return the secrets that webhooks are signed with."""
        return self._send(calls.webhook_secrets())

    def rotate_webhook_secret(self) -> SecretListBody:
        """Make a new secret; the one before signs as well for a while."""
        return self._send(calls.rotate_webhook_secret())

    def slots(self) -> SlotListBody:
        """Return all slots: how much of each quota is used, when it resets, who waits."""
        return self._send(calls.slots())

    def slot(self, name: str) -> SlotBody:
        """Return a slot."""
        return self._send(calls.slot(name))

    def slot_log(self, name: str, *, limit: int | None = None) -> SlotLogBody:
        """Return what a node has logged of a slot lately, oldest first."""
        return self._send(calls.slot_log(name, limit=limit))

    def warm_slot(self, name: str, *, timeout_seconds: float = 60.0) -> SlotBody:
        """Open a slot's window now; refused while it is open already."""
        return self._send(calls.warm_slot(name, timeout_seconds=timeout_seconds))

    def enable_slot(self, name: str) -> SlotBody:
        """Poll and wake a slot again, whatever has disabled it."""
        return self._send(calls.enable_slot(name))

    def disable_slot(self, name: str) -> SlotBody:
        """Neither poll nor wake a slot until it is enabled; its tasks wait."""
        return self._send(calls.disable_slot(name))

    def settings(
        self,
        *,
        section: str | None = None,
        text: str | None = None,
        changed: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SettingsBody:
        """Return one page of the settings in force, and what the last reload changed."""
        return self._send(
            calls.settings(
                section=section,
                text=text,
                changed="true" if changed else None,
                limit=limit,
                cursor=cursor,
            )
        )

    def audit(self, *, limit: int | None = None, cursor: str | None = None) -> AuditListBody:
        """Return one page of who changed what, newest first."""
        return self._send(calls.audit(limit=limit, cursor=cursor))

    @abstractmethod
    def _send(self, call: Call[Answered]) -> Answered: ...


Answered = TypeVar("Answered")


class SyncClient(SyncAdminVerbs):
    """Talks to one service. `url` and `token` are HEADGATE_URL and HEADGATE_TOKEN unless given.

    Requests that found no service, no room or no answer are sent again up to `retries` times, a
    submission under one idempotency key. Any thread may use it.
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
        self._transport = SyncTransport(
            address, headers_of(token_of(token)), timeout_seconds=timeout_seconds
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the service."""
        self._transport.close()

    def submit(
        self, *, idempotency_key: str | None = None, **fields: Unpack[TaskFields]
    ) -> SubmittedBody:
        """Submit a task; when this returns, it is on the service's disk."""
        return self._send(calls.submit(fields, idempotency_key=idempotency_key))

    def submit_batch(
        self,
        tasks: Iterable[TaskFields],
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
    ) -> BatchBody:
        """Submit up to 50 tasks; the answer has an entry for each, in their order."""
        return self._send(
            calls.submit_batch(
                tasks,
                agent_id=agent_id,
                project_id=project_id,
                callback_url=callback_url,
                idempotency_key=idempotency_key,
            )
        )

    def get(self, task_id: str) -> TaskSnapshot:
        """Return everything that is known of a task."""
        return self._send(calls.get(task_id))

    def list_tasks(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        **which: Unpack[ListFilter],
    ) -> TaskListBody:
        """Return one page of tasks, newest first; only its `next_cursor` says if there are more."""
        return self._send(calls.list_tasks(which, limit=limit, cursor=cursor))

    def iterate_tasks(self, **which: Unpack[ListFilter]) -> Iterator[TaskSnapshot]:
        """Give all tasks that are meant, newest first, page by page."""
        cursor = None
        while True:
            page = self.list_tasks(cursor=cursor, **which)
            yield from page.tasks
            cursor = page.next_cursor
            if cursor is None:
                return

    def cancel(self, task_id: str) -> CancelledBody:
        """Cancel a task."""
        return self._send(calls.cancel(task_id))

    def retry(self, task_id: str) -> SubmittedBody:
        """Submit again what a task that ended was to do; it becomes a new task."""
        return self._send(calls.retry(task_id))

    def why(self, task_id: str) -> WhyBody:
        """Return every rule that keeps a task waiting."""
        return self._send(calls.why(task_id))

    def stats(self) -> StatsBody:
        """Return what waits, what has happened, and the limits in force."""
        return self._send(calls.stats())

    def ready(self) -> ReadyBody:
        """Return the role of a node that does its work, or raise what keeps it from that."""
        return self._send(calls.ready())

    def cancel_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkCancelBody:
        """Count the tasks that match; if `confirm` is set, cancel them, up to 1,000 at a time."""
        return self._send(calls.cancel_matching(which, confirm=confirm))

    def retry_matching(
        self, *, confirm: bool = False, **which: Unpack[TaskFilter]
    ) -> BulkRetryBody:
        """Count the tasks that match; if `confirm` is set, submit them again, as `retry` does."""
        return self._send(calls.retry_matching(which, confirm=confirm))

    def usage(
        self,
        by: Literal["project", "agent", "model", "day"] = "project",
        *,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
    ) -> UsageBody:
        """Return the tokens and dollars that tasks used, of the last 30 days unless said."""
        return self._send(calls.usage(by, since=since, until=until))

    def pause(self) -> SwitchBody:
        """Start nothing new until `resume`; what runs goes on."""
        return self._send(calls.pause())

    def resume(self) -> SwitchBody:
        """Start tasks again."""
        return self._send(calls.resume())

    def reload(self) -> ReloadBody:
        """Have the service read its settings again, and return what changed."""
        return self._send(calls.reload())

    def progress(
        self, task_id: str, *, timeout_seconds: float | None = None
    ) -> Iterator[TaskSnapshot]:
        """Give a task as it is, and again whenever it has moved on, until it has ended."""
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        seen: TaskSnapshot | None = None
        while seen is None or not steps.has_ended(seen):
            seen = self._carry_out(
                steps.next_change(
                    task_id, seen, retries=self._retries, clock=time.monotonic, until=until
                )
            )
            yield seen

    def wait(self, task_id: str, *, timeout_seconds: float | None = None) -> TaskSnapshot:
        """Return a task when it has ended, or raise `WaitTimeoutError`; it goes on then."""
        *_, last = self.progress(task_id, timeout_seconds=timeout_seconds)
        return last

    def events(
        self,
        task_id: str | None = None,
        *,
        agent_id: str | None = None,
        project_id: str | None = None,
        kind: str | None = None,
        last_event_id: str | None = None,
        patience_seconds: float = 300.0,
    ) -> Iterator[TaskEvent]:
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
                for message in self._transport.stream(call):
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
            time.sleep(pause)

    def request(
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
        return self._send(
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

    def _send(self, call: Call[Answered]) -> Answered:
        return self._carry_out(steps.attempts(call, retries=self._retries))

    def _carry_out(self, todo: steps.Steps[Answered]) -> Answered:
        outcome: steps.Outcome = None
        while True:
            try:
                step = todo.send(outcome)
            except StopIteration as end:
                answer: Answered = end.value
                return answer
            outcome = self._do(step)

    def _do(self, step: steps.Step) -> steps.Outcome:
        if isinstance(step, Call):
            return self._transport.send(step)
        if isinstance(step, steps.Listen):
            return self._listen(step)
        time.sleep(step.seconds)
        return None

    def _listen(self, step: steps.Listen) -> bool:
        until = time.monotonic() + step.seconds
        call = calls.events(step.seen.task_id)
        try:
            for message in self._transport.stream(call, silence_seconds=step.seconds):
                if is_news(message, step.seen) or time.monotonic() >= until:
                    return True
        except StreamOverError:
            return True
        except ServiceError:
            return False
        return False
