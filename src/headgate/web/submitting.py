"""`POST /tasks` and `POST /tasks/batch`: the two routes that take work.

They carry nearly all of the load, so they do little: read, ask the engine, write. What the engine
acknowledges is on disk. The tasks of a batch are handed over before the first is waited for, so
that they share a commit.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

import msgspec

from headgate.core.tasks import TaskStatus
from headgate.errors import HeadgateError, InvalidTaskError, StoreError
from headgate.intake import Draft
from headgate.store import Queued, TurnedAway, UnknownParent
from headgate.task_snapshot import exact_moment
from headgate.web.answers import Answer, json_answer, refusal_answer
from headgate.web.api import Api
from headgate.web.refusals import Refusal, queue_full, refusal_of
from headgate.web.requests import Request

ACCEPTED = 202
Outcome = Queued | TurnedAway | UnknownParent


class SubmittedBody(msgspec.Struct, rename="camel"):
    """The answer to a task that was taken."""

    task_id: str
    state: TaskStatus
    position: int
    created_at: datetime


class BatchEntryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of one task of a batch; without `task_id` nothing was stored."""

    task_id: str | None = None
    state: TaskStatus | None = None
    position: int | None = None
    code: str | None = None
    error: str | None = None
    retryable: bool | None = None


class BatchBody(msgspec.Struct):
    """The answer to a batch; `submitted` counts the tasks that were taken."""

    tasks: list[BatchEntryBody]
    submitted: int


async def submit_task(api: Api, request: Request, _: str) -> Answer:
    """Take one task."""
    body = await request.json_body()
    engine = api.engine
    draft = api.intake.read_task(body, now=engine.now())
    outcome = await engine.submit(draft.task, draft.terms, draft.submission)
    if not isinstance(outcome, Queued):
        return refusal_answer(_refusal(outcome))
    task = outcome.record.task
    submitted = SubmittedBody(task.id, task.status, outcome.position, exact_moment(task.created_at))
    return json_answer(ACCEPTED, submitted)


async def submit_batch(api: Api, request: Request, _: str) -> Answer:
    """Take the tasks of a batch, each by itself."""
    body = await request.json_body()
    batch = api.intake.read_batch(body, now=api.engine.now())
    handed_over = [_hand_over(api, entry) for entry in batch.entries]
    outcomes = [
        _expected(end) for end in await asyncio.gather(*handed_over, return_exceptions=True)
    ]
    _check_outage(outcomes)
    entries = [_entry(outcome) for outcome in outcomes]
    submitted = sum(isinstance(outcome, Queued) for outcome in outcomes)
    return json_answer(ACCEPTED, BatchBody(tasks=entries, submitted=submitted))


def _hand_over(api: Api, entry: Draft | InvalidTaskError) -> asyncio.Future[Outcome]:
    if isinstance(entry, Draft):
        try:
            return asyncio.ensure_future(api.engine.submit(*entry))
        except HeadgateError as error:
            return _failed(error)
    return _failed(entry)


def _failed(error: HeadgateError) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _expected(end: Outcome | BaseException) -> Outcome | HeadgateError:
    if isinstance(end, BaseException) and not isinstance(end, HeadgateError):
        raise end
    return end


def _check_outage(outcomes: list[Outcome | HeadgateError]) -> None:
    """Answer as a whole where nothing could be stored: a client tries such a batch again."""
    outages = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
    if len(outages) == len(outcomes):
        raise outages[0]


def _entry(outcome: Outcome | HeadgateError) -> BatchEntryBody:
    if isinstance(outcome, Queued):
        task = outcome.record.task
        return BatchEntryBody(task_id=task.id, state=task.status, position=outcome.position)
    refused = _refusal(outcome).body
    return BatchEntryBody(
        task_id=refused.task_id,
        state=outcome.record.task.status if isinstance(outcome, TurnedAway) else None,
        code=refused.code,
        error=refused.error,
        retryable=refused.retryable,
    )


def _refusal(outcome: TurnedAway | UnknownParent | HeadgateError) -> Refusal:
    if isinstance(outcome, HeadgateError):
        return refusal_of(outcome)
    if isinstance(outcome, TurnedAway):
        return queue_full(outcome.rejected, outcome.record.task.id)
    message = f"unknown task '{outcome.parent_id}' in 'dependsOn'"
    return Refusal("unknown_parent", message, details={"field": "dependsOn"})
