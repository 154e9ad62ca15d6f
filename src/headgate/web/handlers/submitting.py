"""`POST /tasks` and `POST /tasks/batch`: the two routes that take work.

They carry nearly all of the load, so they do little: read, ask the engine, write. What the engine
acknowledges is on disk. The tasks of a batch are handed over before the first is waited for, so
that they share a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headgate.bodies.tasks import BatchBody, BatchEntryBody, SubmittedBody
from headgate.errors import HeadgateError, InvalidTaskError, StoreError
from headgate.intake import Draft
from headgate.store import Queued, TurnedAway, UnknownParent
from headgate.task_snapshot import exact_moment
from headgate.web.api import Api
from headgate.web.callers import Caller
from headgate.web.http.answers import Answer, json_answer, refusal_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal, queue_full, refusal_of, unknown_parent
from headgate.web.tracing import traced, traced_all

ACCEPTED = 202
Outcome = Queued | TurnedAway | UnknownParent


async def submit_task(api: Api, request: Request, _: str) -> Answer:
    """Take one task."""
    body = await request.json_body()
    engine = api.engine
    draft = api.intake.read_task(body, now=engine.now(), bounds=request.caller.bounds)
    draft = traced(api, request, draft)
    if draft.terms.depends_on and request.caller.is_bound:
        (checked,) = await bound(api, request.caller, [draft])
        if isinstance(checked, InvalidTaskError):
            raise checked
    outcome = await engine.submit(draft.task, draft.terms, draft.submission)
    if not isinstance(outcome, Queued):
        return refusal_answer(_refusal(outcome), request.request_id)
    task = outcome.record.task
    submitted = SubmittedBody(task.id, task.status, outcome.position, exact_moment(task.created_at))
    return json_answer(ACCEPTED, submitted)


async def submit_batch(api: Api, request: Request, _: str) -> Answer:
    """Take the tasks of a batch, each by itself."""
    body = await request.json_body()
    batch = api.intake.read_batch(body, now=api.engine.now(), bounds=request.caller.bounds)
    entries = await bound(api, request.caller, batch.entries)
    handed_over = [_hand_over(api, entry) for entry in traced_all(api, request, entries)]
    outcomes = [
        _expected(end) for end in await asyncio.gather(*handed_over, return_exceptions=True)
    ]
    _check_outage(outcomes)
    tasks = [_entry(outcome) for outcome in outcomes]
    submitted = sum(isinstance(outcome, Queued) for outcome in outcomes)
    return json_answer(ACCEPTED, BatchBody(tasks=tasks, submitted=submitted))


async def bound(
    api: Api, caller: Caller, entries: Sequence[Draft | InvalidTaskError]
) -> list[Draft | InvalidTaskError]:
    """Return tasks, or why their caller may not submit them: parents of others are as none."""
    drafts = [entry for entry in entries if isinstance(entry, Draft)]
    parents = {parent_id for draft in drafts for parent_id in draft.terms.depends_on}
    if not parents or not caller.is_bound:
        return list(entries)
    own = await api.engine.within(sorted(parents), caller.bounds)
    return [_with_own_parents(entry, own) for entry in entries]


def _with_own_parents(
    entry: Draft | InvalidTaskError, own: frozenset[str]
) -> Draft | InvalidTaskError:
    if isinstance(entry, Draft):
        for parent_id in entry.terms.depends_on:
            if parent_id not in own:
                refused = unknown_parent(parent_id)
                return InvalidTaskError(refused.body.code, "dependsOn", refused.body.error)
    return entry


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
    is_answered = any(not isinstance(outcome, HeadgateError) for outcome in outcomes)
    if outages and not is_answered:
        raise outages[0]


def _entry(outcome: Outcome | HeadgateError) -> BatchEntryBody:
    if isinstance(outcome, Queued):
        task = outcome.record.task
        return BatchEntryBody(task_id=task.id, state=task.status, position=outcome.position)
    refused = _refusal(outcome).body
    rejected = outcome.record.task if isinstance(outcome, TurnedAway) else None
    return BatchEntryBody(
        task_id=None if rejected is None else rejected.id,
        state=None if rejected is None else rejected.status,
        code=refused.code,
        error=refused.error,
        retryable=refused.retryable,
    )


def _refusal(outcome: TurnedAway | UnknownParent | HeadgateError) -> Refusal:
    if isinstance(outcome, HeadgateError):
        return refusal_of(outcome)
    if isinstance(outcome, TurnedAway):
        return queue_full(outcome.rejected, outcome.record.task.id)
    return unknown_parent(outcome.parent_id)
