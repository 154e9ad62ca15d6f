"""`Client`: a service's verbs for programs with asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack

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
from headgate.client import calls, steps
from headgate.client.address import address_of, headers_of, token_of
from headgate.client.async_admin import AdminVerbs
from headgate.client.async_transport import AsyncTransport
from headgate.client.calls import Call, Query
from headgate.client.event_stream import StreamOverError, event_of, is_last, is_news
from headgate.client.following import Following
from headgate.client.task_fields import ListFilter, TaskFields, TaskFilter
from headgate.core.tasks.events import TaskEvent
from headgate.errors import ServiceError
from headgate.task_snapshot import TaskSnapshot

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
