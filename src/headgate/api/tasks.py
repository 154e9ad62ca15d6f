"""The routes of tasks that exist: show, list, cancel, why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from datetime import datetime
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from headgate.api import submission
from headgate.api.api import Api, record, traced, traced_all
from headgate.api.bulk import MAX_TASKS
from headgate.api.callers import Caller
from headgate.api.errors import (
    Refusal,
    invalid_field,
    not_found,
    queue_full,
    refusal_of,
    unknown_parent,
)
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Answer, json_answer, refusal_answer
from headgate.api.schema.admin import BulkCancelBody, BulkRetryBody, TaskFilterBody
from headgate.api.schema.tasks import (
    BatchBody,
    BatchEntryBody,
    CancelledBody,
    Details,
    SubmittedBody,
    TaskListBody,
)
from headgate.api.submission import check_unknown, read_body, shown
from headgate.core.budgets.scopes import parse_scope
from headgate.core.idempotency import (
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
from headgate.core.lifecycle import parse_rfc3339
from headgate.core.task import TERMINAL, Draft, TaskRecord, TaskStatus
from headgate.core.task_view import CONTENTS, exact_moment, snapshot_of, whole_snapshot_of
from headgate.errors import HeadgateError, InvalidTaskError, NotDispatchingError, StoreError
from headgate.storage.audit import Detail
from headgate.storage.queries import BulkFilter
from headgate.storage.store import KeyedAnswer, Queued, TaskQuery, TurnedAway, UnknownParent

OK = 200
ACCEPTED = 202
QUERY_FIELDS = (
    "agentId",
    "projectId",
    "state",
    "target",
    "slot",
    "provider",
    "scope",
    "label",
    "createdAfter",
    "createdBefore",
    "text",
    "order",
    "omit",
    "limit",
    "cursor",
)
ORDERS = ("newest", "oldest")
MAX_TEXT_LENGTH = 200
"""How long a text may be that is looked for."""


MAX_LABEL_LENGTH = submission.MAX_LABEL_KEY_LENGTH + 1 + submission.MAX_LABEL_VALUE_LENGTH

_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


async def show_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with everything that is known of a task."""
    record = request.caller.check_task(await api.engine.get(known_form(task_id)))
    return json_answer(OK, whole_snapshot_of(record))


async def list_tasks(api: Api, request: Request, _: str) -> Answer:
    """Answer with one page of tasks, newest first unless asked otherwise."""
    given = request.query()
    left_out = dict.fromkeys(_contents(given.get("omit", "")))
    page = await api.engine.find(request.caller.narrowed(read_query(given)))
    tasks = [snapshot_of(record) for record in page.records]
    if left_out:
        tasks = [replace(task, **left_out) for task in tasks]
    return json_answer(
        OK, TaskListBody(tasks=tasks, count=len(tasks), next_cursor=page.next_before)
    )


async def cancel_task(api: Api, request: Request, task_id: str) -> Answer:
    """Cancel a task, and say whether it has stopped already."""
    body = await cancelled(api, request, task_id)
    return json_answer(OK if body.status == "cancelled" else ACCEPTED, body)


async def cancelled(api: Api, request: Request, task_id: str) -> CancelledBody:
    """Cancel a task of the caller's; one that has ended otherwise is refused."""
    await check_own(api, request, task_id)
    record = await api.engine.cancel(known_form(task_id))
    if record is None:
        raise not_found()
    state = record.task.status
    if state in TERMINAL and state is not TaskStatus.CANCELLED:
        raise Refusal("conflict", f"task is already {state.value}")
    is_over = state is TaskStatus.CANCELLED
    return CancelledBody(status="cancelled" if is_over else "cancelling", task_id=task_id)


async def explain_task(api: Api, request: Request, task_id: str) -> Answer:
    """Answer with every rule that keeps a task waiting; if need be, ask the node that knows."""
    answer = await explained(api, request, task_id)
    return answer if isinstance(answer, Answer) else json_answer(OK, answer)


async def explained(api: Api, request: Request, task_id: str) -> msgspec.Struct | Answer:
    """Return every rule that keeps a task waiting, or the answer of the node that knows."""
    await check_own(api, request, task_id)
    try:
        reasons = await api.engine.why(known_form(task_id), request.caller.bounds)
    except NotDispatchingError as error:
        answer = await api.forwarder.ask(error.address, f"/tasks/{task_id}/why", request)
        if answer is None:
            raise
        return answer
    if reasons is None:
        raise not_found()
    return reasons


async def check_own(api: Api, request: Request, task_id: str) -> None:
    """Refuse a task that does not belong to the caller, as if there were none."""
    if request.caller.is_bound:
        request.caller.check_task(await api.engine.get(known_form(task_id)))


def known_form(task_id: str) -> str:
    """Return an id that could be one; any other is not asked for."""
    if _TASK_ID.fullmatch(task_id) is None:
        raise not_found()
    return task_id


def read_query(given: dict[str, str]) -> TaskQuery:
    """Read the filter and the page of a list."""
    check_unknown(given, QUERY_FIELDS)
    return TaskQuery(
        agent_id=submission.wanted(given.get("agentId"), "agentId"),
        project_id=submission.wanted(given.get("projectId"), "projectId"),
        states=_states(given.get("state", "")),
        target=submission.wanted(given.get("target"), "target"),
        slot=submission.wanted(given.get("slot"), "slot"),
        provider=submission.wanted(given.get("provider"), "provider"),
        scope=read_scope(given.get("scope") or None),
        label=read_label(given.get("label") or None),
        created_after=_moment(given, "createdAfter"),
        created_before=_moment(given, "createdBefore"),
        text=read_text(given.get("text") or None),
        before=_cursor(given.get("cursor", "")),
        limit=read_limit(given),
        is_oldest_first=_is_oldest_first(given.get("order", "")),
    )


def read_label(text: str | None) -> tuple[str, str | None] | None:
    """Read a label that is looked for, as `key=value`, or as `key` for any value."""
    if text is None:
        return None
    key, sign, value = text.partition("=")
    if not key or "\0" in text or len(text) > MAX_LABEL_LENGTH:
        raise invalid_field("label", "is written as key=value, or as key for any value")
    return key, value if sign else None


def read_text(text: str | None) -> str | None:
    """Read a text that is looked for; an empty one is not looked for."""
    if text is None:
        return None
    if len(text) > MAX_TEXT_LENGTH or not text.isprintable():
        problem = f"must be 1 to {MAX_TEXT_LENGTH} printable characters"
        raise invalid_field("text", problem)
    return text


def read_scope(text: str | None) -> str | None:
    """Read the budget that tasks are charged to."""
    return None if text is None else parse_scope(text, field="scope")


def _is_oldest_first(text: str) -> bool:
    if text not in ("", *ORDERS):
        raise invalid_field("order", f"must be {' or '.join(ORDERS)}")
    return text == "oldest"


def _moment(given: dict[str, str], field: str) -> float | None:
    text = given.get(field, "")
    seconds = parse_rfc3339(text) if text else None
    if text and seconds is None:
        raise invalid_field(field, "is a time with a zone, as 2026-01-31T12:00:00Z")
    return seconds


def _contents(text: str) -> list[str]:
    """Read which contents of tasks a list leaves out."""
    names = _names(text)
    if not set(names).issubset(CONTENTS):
        allowed = ", ".join(CONTENTS)
        raise invalid_field("omit", f"'{shown(text)}' is not a list of {allowed}")
    return names


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _states(text: str) -> tuple[TaskStatus, ...]:
    try:
        return tuple(dict.fromkeys([TaskStatus(name) for name in _names(text)]))
    except ValueError:
        allowed = ", ".join(status.value for status in TaskStatus)
        raise invalid_field("state", f"'{shown(text)}' is not a list of {allowed}") from None


def _cursor(text: str) -> str | None:
    if text and _TASK_ID.fullmatch(text) is None:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return text or None


# `POST /tasks` and `POST /tasks/batch`: the two routes that take work.
#
# They carry nearly all of the load, so they do little: read, ask the engine, write. What the engine
# acknowledges is on disk. The tasks of a batch are handed over before the first is waited for, so
# that they share a commit.

Outcome = Queued | TurnedAway | UnknownParent


async def submit_unkeyed_task(api: Api, request: Request, _: str) -> Answer:
    """Take one task."""
    body = await request.json_body()
    engine = api.engine
    draft = api.submission_parser.read_task(body, now=engine.now(), bounds=request.caller.bounds)
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


async def submit_unkeyed_batch(api: Api, request: Request, _: str) -> Answer:
    """Take the tasks of a batch, each by itself."""
    body = await request.json_body()
    batch = api.submission_parser.read_batch(
        body, now=api.engine.now(), bounds=request.caller.bounds
    )
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


# Submitting with an `Idempotency-Key`: a request that may be sent again without being done again.
#
# A key belongs to its caller and to one request: to its path and to the very bytes of its body.
# The store decides whether it knows the key, in the transaction that would store the tasks; so a
# request is read here whatever was answered before, and what is wrong with it is an entry like
# any other.

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

_NAME = HEADER.lower().encode()
_REPLAYED = (REPLAYED.lower().encode(), b"true")
_MISMATCH = "this Idempotency-Key was used with another request; send a new key with a new request"
_FULL = "no further Idempotency-Key can be kept now; send the request later, or without a key"


def submit_task(api: Api, request: Request, name: str) -> Awaitable[Answer]:
    """Take one task, once if the request has a key."""
    keys = request.headers(_NAME)
    return _task_once(api, request, keys) if keys else submit_unkeyed_task(api, request, name)


def submit_batch(api: Api, request: Request, name: str) -> Awaitable[Answer]:
    """Take the tasks of a batch, once if the request has a key."""
    keys = request.headers(_NAME)
    return _batch_once(api, request, keys) if keys else submit_unkeyed_batch(api, request, name)


async def _task_once(api: Api, request: Request, keys: list[bytes]) -> Answer:
    body = await request.json_body()
    key = _submit_key(request, keys, b"task", body)
    entry: Draft | InvalidTaskError
    try:
        draft = api.submission_parser.read_task(
            body, now=api.engine.now(), bounds=request.caller.bounds
        )
        (entry,) = await bound(api, request.caller, [traced(api, request, draft)])
    except InvalidTaskError as error:
        entry = error
    answer = _checked(await api.engine.submit_keyed(key, [_draft_or_invalid(entry)]))
    return _marked(_task_answer(answer.entries[0], request.request_id), answer)


async def _batch_once(api: Api, request: Request, keys: list[bytes]) -> Answer:
    body = await request.json_body()
    key = _submit_key(request, keys, b"batch", body)
    try:
        batch = api.submission_parser.read_batch(
            body, now=api.engine.now(), bounds=request.caller.bounds
        )
        entries = await bound(api, request.caller, batch.entries)
        drafts = [_draft_or_invalid(entry) for entry in traced_all(api, request, entries)]
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
        return refusal_answer(_key_refusal(entry), request_id)
    at = exact_moment(entry.created_at)
    return json_answer(ACCEPTED, SubmittedBody(entry.task_id, entry.state, entry.position, at))


def _batch_answer(entries: tuple[SubmitEntry, ...], request_id: bytes) -> Answer:
    first = entries[0]
    if isinstance(first, InvalidEntry) and first.is_whole:
        return refusal_answer(_key_refusal(first), request_id)
    submitted = sum(isinstance(entry, TakenEntry) for entry in entries)
    tasks = [_entry_body(entry) for entry in entries]
    return json_answer(ACCEPTED, BatchBody(tasks=tasks, submitted=submitted))


def _entry_body(entry: SubmitEntry) -> BatchEntryBody:
    if isinstance(entry, TakenEntry):
        return BatchEntryBody(task_id=entry.task_id, state=entry.state, position=entry.position)
    refused = _key_refusal(entry).body
    rejected = entry if isinstance(entry, RejectedEntry) else None
    return BatchEntryBody(
        task_id=None if rejected is None else rejected.task_id,
        state=None if rejected is None else TaskStatus.REJECTED,
        code=refused.code,
        error=refused.error,
        retryable=refused.retryable,
    )


def _key_refusal(entry: RejectedEntry | OrphanEntry | InvalidEntry) -> Refusal:
    if isinstance(entry, RejectedEntry):
        return queue_full(entry.rejected, entry.task_id)
    if isinstance(entry, OrphanEntry):
        return unknown_parent(entry.parent_id)
    details: Details | None = {"field": entry.field} if entry.field else None
    return Refusal(entry.code, entry.message, details=details)


# The routes that work on tasks that ended, or on many at once: retry, bulk cancel, bulk retry.
#
# Without `confirm` a bulk route only counts. With it, the work is bounded in tasks and time; what
# is left is said, and the same request again goes on with it.

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
        return json_answer(OK, BulkCancelBody(matched=await api.bulk.count(wanted)))
    return json_answer(OK, await cancel_matching(api, request, body))


async def cancel_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkCancelBody:
    """Cancel the tasks of the caller's that match, and note it."""
    tally = await api.bulk.cancel(cancel_filter(body, request.caller), limit=body.limit)
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
        return json_answer(OK, BulkRetryBody(matched=await api.bulk.count(wanted)))
    return json_answer(OK, await retry_matching(api, request, body))


async def retry_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkRetryBody:
    """Make a new task of each of the caller's that match, and note it."""

    def again(ended: TaskRecord) -> Draft:
        return _again(api, request.caller, ended)

    wanted = retry_filter(body, request.caller)
    tally = await api.bulk.retry(wanted, again, limit=body.limit)
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
        states=_bulk_states(body.state, allowed) or default,
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


def _bulk_states(names: list[str], allowed: tuple[TaskStatus, ...]) -> tuple[TaskStatus, ...]:
    by_name = {status.value: status for status in allowed}
    for name in names:
        if name not in by_name:
            raise invalid_field("state", f"'{shown(name)}' is none of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _named(text: str | None, field: str) -> str | None:
    """Check a name; an empty one is nobody's, and must not come to mean everybody."""
    return submission.identifier(text, field) if text else text


def _seconds(at: datetime | None, field: str) -> float | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise invalid_field(field, "needs a time zone, as in 2026-01-31T12:00:00Z")
    return at.timestamp()


def _again(api: Api, caller: Caller, ended: TaskRecord) -> Draft:
    draft = api.submission_parser.again(ended, now=api.engine.now())
    least = caller.least_priority
    if least is None or draft.task.priority >= least:
        return draft
    return draft._replace(task=msgspec.structs.replace(draft.task, priority=least))


def _detail(body: TaskFilterBody, answer: msgspec.Struct) -> Detail:
    asked = msgspec.to_builtins(body)
    asked.pop("confirm", None)
    return {"filter": asked, **msgspec.structs.asdict(answer)}
