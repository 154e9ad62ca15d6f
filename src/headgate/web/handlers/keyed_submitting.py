"""Submitting with an `Idempotency-Key`: a request that may be sent again without being done again.

A key belongs to its caller and to one request: to its path and to the very bytes of its body. The
store decides whether it knows the key, in the transaction that would store the tasks; so a request
is read here whatever was answered before, and what is wrong with it is an entry like any other.
"""

from __future__ import annotations

from collections.abc import Awaitable
from hashlib import blake2b

from headgate.bodies.tasks import BatchBody, BatchEntryBody, Details, SubmittedBody
from headgate.core.tasks.submit_keys import (
    KEY_RULE,
    InvalidEntry,
    KeyRefusal,
    OrphanEntry,
    RejectedEntry,
    SubmitEntry,
    SubmitKey,
    TakenEntry,
    is_key,
)
from headgate.core.tasks.task import TaskStatus
from headgate.errors import InvalidTaskError
from headgate.intake import Draft
from headgate.store import KeyedAnswer
from headgate.task_snapshot import exact_moment
from headgate.web.api import Api
from headgate.web.handlers import submitting
from headgate.web.http.answers import Answer, json_answer, refusal_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal, queue_full, unknown_parent
from headgate.web.tracing import traced, traced_all

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
ACCEPTED = 202

_NAME = HEADER.lower().encode()
_REPLAYED = (REPLAYED.lower().encode(), b"true")
_MISMATCH = "this Idempotency-Key was used with another request; send a new key with a new request"
_FULL = "no further Idempotency-Key can be kept now; send the request later, or without a key"


def submit_task(api: Api, request: Request, name: str) -> Awaitable[Answer]:
    """Take one task, once if the request has a key."""
    keys = request.headers(_NAME)
    return _task_once(api, request, keys) if keys else submitting.submit_task(api, request, name)


def submit_batch(api: Api, request: Request, name: str) -> Awaitable[Answer]:
    """Take the tasks of a batch, once if the request has a key."""
    keys = request.headers(_NAME)
    return _batch_once(api, request, keys) if keys else submitting.submit_batch(api, request, name)


async def _task_once(api: Api, request: Request, keys: list[bytes]) -> Answer:
    body = await request.json_body()
    key = _submit_key(request, keys, b"task", body)
    entry: Draft | InvalidTaskError
    try:
        draft = api.intake.read_task(body, now=api.engine.now(), bounds=request.caller.bounds)
        (entry,) = await submitting.bound(api, request.caller, [traced(api, request, draft)])
    except InvalidTaskError as error:
        entry = error
    answer = _checked(await api.engine.submit_keyed(key, [_draft_or_invalid(entry)]))
    return _marked(_task_answer(answer.entries[0], request.request_id), answer)


async def _batch_once(api: Api, request: Request, keys: list[bytes]) -> Answer:
    body = await request.json_body()
    key = _submit_key(request, keys, b"batch", body)
    try:
        batch = api.intake.read_batch(body, now=api.engine.now(), bounds=request.caller.bounds)
        bound = await submitting.bound(api, request.caller, batch.entries)
        drafts = [_draft_or_invalid(entry) for entry in traced_all(api, request, bound)]
    except InvalidTaskError as error:
        drafts = [_invalid(error, is_whole=True)]
    answer = _checked(await api.engine.submit_keyed(key, drafts))
    return _marked(_batch_answer(answer.entries, request.request_id), answer)


def _submit_key(request: Request, keys: list[bytes], kind: bytes, body: bytes) -> SubmitKey:
    if len(keys) != 1 or not is_key(keys[0].decode("latin-1")):
        problem = f"must be one key of {KEY_RULE}"
        raise Refusal("invalid_field", f"field '{HEADER}': {problem}", details={"field": HEADER})
    digest = blake2b(body, digest_size=20, person=kind).hexdigest()
    return SubmitKey(owner=request.caller.token_id, name=keys[0].decode(), digest=digest)


def _draft_or_invalid(entry: Draft | InvalidTaskError) -> Draft | InvalidEntry:
    return entry if isinstance(entry, Draft) else _invalid(entry)


def _invalid(error: InvalidTaskError, *, is_whole: bool = False) -> InvalidEntry:
    return InvalidEntry(code=error.code, field=error.field, message=str(error), is_whole=is_whole)


def _checked(answer: KeyedAnswer | KeyRefusal) -> KeyedAnswer:
    if isinstance(answer, KeyedAnswer):
        return answer
    if answer is KeyRefusal.MISMATCH:
        raise Refusal("idempotency_mismatch", _MISMATCH, details={"field": HEADER})
    raise Refusal("idempotency_full", _FULL)


def _marked(response: Answer, answer: KeyedAnswer) -> Answer:
    if not answer.is_replay:
        return response
    return response._replace(headers=(*response.headers, _REPLAYED))


def _task_answer(entry: SubmitEntry, request_id: bytes) -> Answer:
    if not isinstance(entry, TakenEntry):
        return refusal_answer(_refusal(entry), request_id)
    at = exact_moment(entry.created_at)
    return json_answer(ACCEPTED, SubmittedBody(entry.task_id, entry.state, entry.position, at))


def _batch_answer(entries: tuple[SubmitEntry, ...], request_id: bytes) -> Answer:
    first = entries[0]
    if isinstance(first, InvalidEntry) and first.is_whole:
        return refusal_answer(_refusal(first), request_id)
    submitted = sum(isinstance(entry, TakenEntry) for entry in entries)
    tasks = [_entry_body(entry) for entry in entries]
    return json_answer(ACCEPTED, BatchBody(tasks=tasks, submitted=submitted))


def _entry_body(entry: SubmitEntry) -> BatchEntryBody:
    if isinstance(entry, TakenEntry):
        return BatchEntryBody(task_id=entry.task_id, state=entry.state, position=entry.position)
    refused = _refusal(entry).body
    rejected = entry if isinstance(entry, RejectedEntry) else None
    return BatchEntryBody(
        task_id=None if rejected is None else rejected.task_id,
        state=None if rejected is None else TaskStatus.REJECTED,
        code=refused.code,
        error=refused.error,
        retryable=refused.retryable,
    )


def _refusal(entry: RejectedEntry | OrphanEntry | InvalidEntry) -> Refusal:
    if isinstance(entry, RejectedEntry):
        return queue_full(entry.rejected, entry.task_id)
    if isinstance(entry, OrphanEntry):
        return unknown_parent(entry.parent_id)
    details: Details | None = {"field": entry.field} if entry.field else None
    return Refusal(entry.code, entry.message, details=details)
