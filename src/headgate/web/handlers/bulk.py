"""The routes that work on tasks that ended, or on many at once: retry, bulk cancel, bulk retry.

Without `confirm` a bulk route only counts. With it, the work is bounded in tasks and time; what is
left is said, and the same request again goes on with it.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from headgate.administration.bulk import MAX_TASKS, BulkWork
from headgate.audit import Detail
from headgate.bodies.admin import BulkCancelBody, BulkRetryBody, TaskFilterBody
from headgate.bodies.tasks import SubmittedBody
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.intake import Draft, fields
from headgate.intake.bodies import read_body, shown
from headgate.store import Queued, TurnedAway
from headgate.stores.looking.selecting import BulkFilter
from headgate.task_query import TaskQuery
from headgate.task_snapshot import exact_moment
from headgate.web.api import Api
from headgate.web.callers import Caller
from headgate.web.handlers.auditing import record
from headgate.web.handlers.tasks import known_form, read_label, read_scope, read_text
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal, invalid_field, queue_full

OK = 200
ACCEPTED = 202
LIVE = tuple(status for status in TaskStatus if status not in TERMINAL)
ENDED = tuple(status for status in TaskStatus if status in TERMINAL)
RETRIED = (TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.REJECTED)
"""What a bulk retry means that names no states: whatever did not succeed."""


async def retry_task(api: Api, request: Request, task_id: str) -> Answer:
    """Make a new task of one that ended; the old one stays as it is."""
    return json_answer(ACCEPTED, await retried(api, request, task_id))


async def retried(api: Api, request: Request, task_id: str) -> SubmittedBody:
    """Submit again what a task of the caller's did that has ended."""
    ended = request.caller.check_task(await api.engine.get(known_form(task_id)))
    if not ended.is_terminal:
        line = f"task is {ended.task.status.value}; only one that has ended is retried"
        raise Refusal("conflict", line)
    draft = _again(api, request.caller, ended)
    answer = await api.engine.submit(*draft)
    if isinstance(answer, TurnedAway):
        raise queue_full(answer.rejected, answer.record.task.id)
    if not isinstance(answer, Queued):
        raise Refusal("conflict", "the task cannot be retried")
    task = answer.record.task
    created_at = exact_moment(task.created_at)
    return SubmittedBody(task.id, task.status, answer.position, created_at)


async def cancel_tasks(api: Api, request: Request, _: str) -> Answer:
    """Count the tasks that match, or cancel them."""
    body = read_body(await request.json_body(), TaskFilterBody)
    if not body.confirm:
        wanted = cancel_filter(body, request.caller)
        return json_answer(OK, BulkCancelBody(matched=await bulk_of(api).count(wanted)))
    return json_answer(OK, await cancel_matching(api, request, body))


async def cancel_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkCancelBody:
    """Cancel the tasks of the caller's that match, and note it."""
    tally = await bulk_of(api).cancel(cancel_filter(body, request.caller), limit=body.limit)
    answer = BulkCancelBody(
        matched=tally.matched,
        cancelled=tally.done,
        skipped=tally.skipped,
        remaining=tally.remaining,
    )
    await record(api, request, "tasks.cancel", "", _detail(body, answer))
    return answer


async def retry_tasks(api: Api, request: Request, _: str) -> Answer:
    """Count the tasks that match, or make a new one of each."""
    body = read_body(await request.json_body(), TaskFilterBody)
    if not body.confirm:
        wanted = retry_filter(body, request.caller)
        return json_answer(OK, BulkRetryBody(matched=await bulk_of(api).count(wanted)))
    return json_answer(OK, await retry_matching(api, request, body))


async def retry_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkRetryBody:
    """Make a new task of each of the caller's that match, and note it."""

    def again(ended: TaskRecord) -> Draft:
        return _again(api, request.caller, ended)

    wanted = retry_filter(body, request.caller)
    tally = await bulk_of(api).retry(wanted, again, limit=body.limit)
    answer = BulkRetryBody(
        matched=tally.matched,
        retried=tally.done,
        skipped=tally.skipped,
        remaining=tally.remaining,
    )
    await record(api, request, "tasks.retry", "", _detail(body, answer))
    return answer


def cancel_filter(body: TaskFilterBody, caller: Caller) -> BulkFilter:
    """Read which tasks a cancel means: of those that have not ended, all unless it names states."""
    return read_filter(body, caller, allowed=LIVE, default=LIVE)


def retry_filter(body: TaskFilterBody, caller: Caller) -> BulkFilter:
    """Read which tasks a retry means: of those that ended, what failed unless it names states."""
    wanted = read_filter(body, caller, allowed=ENDED, default=RETRIED)
    return msgspec.structs.replace(wanted, is_retry=True, leaves_out_refused_retries=not body.state)


def read_filter(
    body: TaskFilterBody,
    caller: Caller,
    *,
    allowed: tuple[TaskStatus, ...],
    default: tuple[TaskStatus, ...],
) -> BulkFilter:
    """Read which tasks are meant, as far as they belong to the caller."""
    if not 1 <= body.limit <= MAX_TASKS:
        raise invalid_field("limit", f"must be a number from 1 to {MAX_TASKS}")
    asked = TaskQuery(
        agent_id=_named(body.agent_id, "agentId"), project_id=_named(body.project_id, "projectId")
    )
    own = caller.narrowed(asked)
    return BulkFilter(
        states=_states(body.state, allowed) or default,
        agent_id=own.agent_id,
        project_id=own.project_id,
        target=_named(body.target, "target"),
        slot=_named(body.slot, "slot"),
        provider=_named(body.provider, "provider"),
        scope=read_scope(body.scope or None),
        label=read_label(body.label),
        created_before=_seconds(body.created_before, "createdBefore"),
        created_after=_seconds(body.created_after, "createdAfter"),
        text=read_text(body.text),
    )


def _states(names: list[str], allowed: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    by_name = {status.value: status for status in allowed}
    for name in names:
        if name not in by_name:
            raise invalid_field("state", f"'{shown(name)}' is none of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _named(text: str | None, field: str) -> str | None:
    """Check a name; an empty one is nobody's, and must not come to mean everybody."""
    return fields.identifier(text, field) if text else text


def _seconds(at: datetime | None, field: str) -> float | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise invalid_field(field, "needs a time zone, as in 2026-01-31T12:00:00Z")
    return at.timestamp()


def _again(api: Api, caller: Caller, ended: TaskRecord) -> Draft:
    draft = api.intake.again(ended, now=api.engine.now())
    least = caller.least_priority
    if least is None or draft.task.priority >= least:
        return draft
    return draft._replace(task=msgspec.structs.replace(draft.task, priority=least))


def bulk_of(api: Api) -> BulkWork:
    """Return what works on many tasks; a service without it has no such address."""
    if api.bulk is None:
        raise Refusal("not_found", "there is nothing at this address")
    return api.bulk


def _detail(body: TaskFilterBody, answer: msgspec.Struct) -> Detail:
    asked = msgspec.to_builtins(body)
    asked.pop("confirm", None)
    return {"filter": asked, **msgspec.structs.asdict(answer)}
