"""The routes of tasks: submit, show, list, cancel, why, retry, and many at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime
from hashlib import blake2b
from typing import cast

import msgspec
from msgspec.structs import replace

from headgate.api import submission
from headgate.api.api import Api, Route, actor_of
from headgate.api.budgets import check_own_scopes, undefined_budgets
from headgate.api.bulk import MAX_TASKS
from headgate.api.callers import Caller
from headgate.api.errors import (
    ApiError,
    api_error_of,
    invalid_field,
    not_found,
    queue_full,
    task_deleted,
    unknown_parent,
)
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, error_response, json_response
from headgate.api.http.slices import in_slices, mapped
from headgate.api.schema.admin import BulkCancelBody, BulkRetryBody, TaskFilterBody
from headgate.api.schema.tasks import (
    BatchEntryBody,
    CancelledBody,
    Details,
    ReasonBody,
    SlotRoomBody,
    SubmittedBatchBody,
    SubmittedBody,
    TaskListBody,
    WhyBody,
)
from headgate.api.submission import BatchBody, TaskBody, check_unknown, excerpt, read_body
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
from headgate.core.task import TERMINAL, Draft, TaskRecord, TaskStatus, read_traceparent
from headgate.core.task_view import (
    CONTENTS,
    TaskSnapshot,
    exact_moment,
    moment,
    snapshot_of,
    whole_snapshot_of,
)
from headgate.core.why import TaskReason
from headgate.engine.engine import SlotRoom
from headgate.errors import HeadgateError, InvalidTaskError, NotDispatchingError, StoreError
from headgate.storage.audit import AuditEntry, Detail
from headgate.storage.queries import BulkFilter
from headgate.storage.store import KeyedAnswer, Queued, TaskQuery, TurnedAway
from headgate.storage.submit import SubmitAnswer, entry_of

OK = 200
ACCEPTED = 202


# `POST /tasks` and `POST /tasks/batch`: receive, parse, admit.
#
# They carry nearly all of the load, so they do little: read, ask the engine, write. What the engine
# acknowledges is on disk. The tasks of a batch are handed over before the first is waited for, so
# that they share a commit.
#
# A request with an `Idempotency-Key` may be sent again without being done again. A key belongs to
# its caller and to one request: to its path and to the very bytes of its body. The store decides
# whether it knows the key, in the transaction that would store the tasks; so a request is parsed
# here whatever was answered before, and what is wrong with it is an entry like any other.

KEY_HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

_KEY_HEADER = KEY_HEADER.lower().encode()
_TRACEPARENT = b"traceparent"
_REPLAYED = (REPLAYED.lower().encode(), b"true")
_MISMATCH = "this Idempotency-Key was used with another request; send a new key with a new request"
_FULL = "no further Idempotency-Key can be kept now; send the request later, or without a key"

Parsed = Draft | InvalidTaskError
Submitted = SubmitEntry | HeadgateError
"""What became of a task: taken, turned away, invalid, or not stored."""


async def submit_task(api: Api, request: Request, _: str) -> Response:
    """Take one task, and only once if the request has a key."""
    body = await request.json_body()
    key = _idempotency_key(request, b"task", body)
    parsed = await _parse_task(api, request, body)
    if key is not None:
        answer = await _submit_once(api, key, [_draft_or_invalid(parsed)])
        (entry,) = await _warned(api, request.caller, [parsed], answer.entries)
        return _marked(_task_answer(entry, request.request_id), answer)
    if isinstance(parsed, InvalidTaskError):
        raise parsed
    outcome = await api.engine.submit(parsed.task, parsed.terms, parsed.submission)
    (entry,) = await _warned(api, request.caller, [parsed], [entry_of(outcome)])
    return _task_answer(entry, request.request_id)


async def submit_batch(api: Api, request: Request, _: str) -> Response:
    """Take the tasks of a batch, each by itself, and only once if the request has a key."""
    body = await request.json_body()
    key = _idempotency_key(request, b"batch", body)
    if key is None:
        parsed = await _parse_batch(api, request, body)
        entries = await _warned(api, request.caller, parsed, await _submit_each(api, parsed))
        return _batch_answer(entries, request.request_id)
    try:
        parsed = await _parse_batch(api, request, body)
        drafts = [_draft_or_invalid(one) for one in parsed]
    except InvalidTaskError as error:
        parsed, drafts = [error], [_invalid(error, is_whole=True)]
    answer = await _submit_once(api, key, drafts)
    entries = await _warned(api, request.caller, parsed, answer.entries)
    return _marked(_batch_answer(entries, request.request_id), answer)


async def _warned(
    api: Api, caller: Caller, parsed: Sequence[Parsed], entries: Sequence[Submitted]
) -> list[Submitted]:
    """Return what became of tasks, each with a warning about budgets that are not defined."""
    warned: list[Submitted] = []
    for one, entry in zip(parsed, entries, strict=True):
        further = caller.further(one.task.scopes) if isinstance(one, Draft) else []
        if further and isinstance(entry, TakenEntry):
            lines = [entry.warning] if entry.warning else []
            lines += await undefined_budgets(api, caller, further)
            entry = replace(entry, warning=" ".join(lines))  # noqa: PLW2901
        warned.append(entry)
    return warned


def _idempotency_key(request: Request, kind: bytes, body: bytes) -> SubmitKey | None:
    keys = request.headers(_KEY_HEADER)
    if not keys:
        return None
    if len(keys) != 1 or not is_key(keys[0].decode("latin-1")):
        problem = f"field '{KEY_HEADER}': must be one key of {KEY_RULE}"
        raise ApiError("invalid_field", problem, details={"field": KEY_HEADER})
    digest = blake2b(body, digest_size=20, person=kind).hexdigest()
    return SubmitKey(owner=request.caller.token_id, name=keys[0].decode(), digest=digest)


async def _parse_task(api: Api, request: Request, body: bytes) -> Parsed:
    try:
        steps = api.submission_parser.task_steps(
            body,
            now=api.engine.now(),
            bounds=request.caller.bounds,
            is_trusted=request.caller.is_trusted,
        )
        draft = await in_slices(steps)
    except InvalidTaskError as error:
        return error
    await _check_scopes(api, request.caller, [draft])
    (parsed,) = await _checked_parents(api, request.caller, _traced(api, request, [draft]))
    return parsed


async def _parse_batch(api: Api, request: Request, body: bytes) -> list[Parsed]:
    """Return the tasks of a batch; raise `InvalidTaskError` if it is wrong as a whole."""
    steps = api.submission_parser.batch_steps(
        body,
        now=api.engine.now(),
        bounds=request.caller.bounds,
        is_trusted=request.caller.is_trusted,
    )
    batch = await in_slices(steps)
    await _check_scopes(api, request.caller, batch.entries)
    return await _checked_parents(api, request.caller, _traced(api, request, batch.entries))


async def _check_scopes(api: Api, caller: Caller, entries: Sequence[Parsed]) -> None:
    """Refuse tasks whose caller would charge more scopes than a tenant may."""
    if caller.is_trusted:
        return
    drafts = [entry for entry in entries if isinstance(entry, Draft)]
    further = {one for draft in drafts for one in caller.further(draft.task.scopes)}
    if further:
        await check_own_scopes(api, caller, list(further))


def _traced(api: Api, request: Request, entries: Sequence[Parsed]) -> Sequence[Parsed]:
    """Return tasks that go on in the trace of their request; or in a new one, if spans are made."""
    sent = request.header(_TRACEPARENT)
    traceparent = read_traceparent(sent.decode("latin-1")) if sent else None
    if api.telemetry is not None:
        traceparent = api.telemetry.submitted(traceparent)
    if traceparent is None:
        return entries
    return [
        entry._replace(submission=replace(entry.submission, traceparent=traceparent))
        if isinstance(entry, Draft)
        else entry
        for entry in entries
    ]


async def _checked_parents(api: Api, caller: Caller, entries: Sequence[Parsed]) -> list[Parsed]:
    """Return tasks, or why their caller may not submit them: parents of others are not found."""
    if not caller.is_bound:
        return list(entries)
    drafts = [entry for entry in entries if isinstance(entry, Draft)]
    parents = {parent_id for draft in drafts for parent_id in draft.terms.depends_on}
    if not parents:
        return list(entries)
    own = await api.engine.within(sorted(parents), caller.bounds)
    return [_with_own_parents(entry, own) for entry in entries]


def _with_own_parents(entry: Parsed, own: frozenset[str]) -> Parsed:
    if isinstance(entry, Draft):
        for parent_id in entry.terms.depends_on:
            if parent_id not in own:
                refused = unknown_parent(parent_id)
                return InvalidTaskError(refused.body.code, "dependsOn", refused.body.error)
    return entry


async def _submit_once(
    api: Api, key: SubmitKey, drafts: Sequence[Draft | InvalidEntry]
) -> KeyedAnswer:
    answer = await api.engine.submit_keyed(key, drafts)
    if isinstance(answer, KeyedAnswer):
        return answer
    if answer is KeyRefusal.MISMATCH:
        raise ApiError("idempotency_mismatch", _MISMATCH, details={"field": KEY_HEADER})
    raise ApiError("idempotency_full", _FULL)


def _draft_or_invalid(entry: Parsed) -> Draft | InvalidEntry:
    return entry if isinstance(entry, Draft) else _invalid(entry)


def _invalid(error: InvalidTaskError, *, is_whole: bool = False) -> InvalidEntry:
    return InvalidEntry(code=error.code, field=error.field, message=str(error), is_whole=is_whole)


async def _submit_each(api: Api, entries: Sequence[Parsed]) -> list[Submitted]:
    """Submit all tasks before the first is waited for, and return what became of each."""
    futures = [_submitted(api, entry) for entry in entries]
    ends = await asyncio.gather(*futures, return_exceptions=True)
    outcomes: list[Submitted] = []
    for end in ends:
        if isinstance(end, HeadgateError):
            outcomes.append(end)
        elif isinstance(end, BaseException):
            raise end
        else:
            outcomes.append(entry_of(end))
    outages = [outcome for outcome in outcomes if isinstance(outcome, StoreError)]
    if outages and all(isinstance(outcome, HeadgateError) for outcome in outcomes):
        # Nothing could be stored, so the batch fails as a whole: a client sends it again.
        raise outages[0]
    return outcomes


def _submitted(api: Api, entry: Parsed) -> asyncio.Future[SubmitAnswer]:
    error: HeadgateError
    if isinstance(entry, Draft):
        try:
            return api.engine.submit(*entry)
        except HeadgateError as problem:
            error = problem
    else:
        error = entry
    future: asyncio.Future[SubmitAnswer] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    return future


def _task_answer(entry: Submitted, request_id: bytes) -> Response:
    if not isinstance(entry, TakenEntry):
        return error_response(_refusal(entry), request_id)
    at = exact_moment(entry.created_at)
    taken = SubmittedBody(entry.task_id, entry.state, entry.position, at, entry.warning)
    return json_response(ACCEPTED, taken)


def _batch_answer(entries: Sequence[Submitted], request_id: bytes) -> Response:
    first = entries[0]
    if isinstance(first, InvalidEntry) and first.is_whole:
        return error_response(_refusal(first), request_id)
    submitted = sum(isinstance(entry, TakenEntry) for entry in entries)
    tasks = [_entry_body(entry) for entry in entries]
    return json_response(ACCEPTED, SubmittedBatchBody(tasks=tasks, submitted=submitted))


def _entry_body(entry: Submitted) -> BatchEntryBody:
    if isinstance(entry, TakenEntry):
        return BatchEntryBody(
            task_id=entry.task_id,
            state=entry.state,
            position=entry.position,
            warning=entry.warning or None,
        )
    refused = _refusal(entry).body
    rejected = entry if isinstance(entry, RejectedEntry) else None
    return BatchEntryBody(
        task_id=None if rejected is None else rejected.task_id,
        state=None if rejected is None or not rejected.task_id else TaskStatus.REJECTED,
        code=refused.code,
        error=refused.error,
        retryable=refused.retryable,
    )


def _refusal(entry: RejectedEntry | OrphanEntry | InvalidEntry | HeadgateError) -> ApiError:
    if isinstance(entry, HeadgateError):
        return api_error_of(entry)
    if isinstance(entry, RejectedEntry):
        return queue_full(entry.rejected, entry.task_id)
    if isinstance(entry, OrphanEntry):
        return unknown_parent(entry.parent_id)
    details: Details | None = {"field": entry.field} if entry.field else None
    return ApiError(entry.code, entry.message, details=details)


def _marked(response: Response, answer: KeyedAnswer) -> Response:
    if not answer.is_replay:
        return response
    return response._replace(headers=(*response.headers, _REPLAYED))


# The routes of tasks that exist.

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


async def show_task(api: Api, request: Request, task_id: str) -> Response:
    """Answer with everything that is known of a task."""
    async with api.shares.making.turn(request.holder):
        record = await own_task(api, request.caller, task_id)
        return json_response(OK, whole_snapshot_of(record))


async def list_tasks(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of tasks, newest first unless asked otherwise."""
    given = request.query()
    left_out = dict.fromkeys(_contents(given.get("omit", "")))
    query = request.caller.narrowed(read_query(given))

    def shown(record: TaskRecord) -> msgspec.Raw:
        # Encoded one by one: all at once, a page of megabytes would hold the loop.
        own = snapshot_of(request.caller.shown(record))
        return msgspec.Raw(msgspec.json.encode(replace(own, **left_out)))

    async with api.shares.making.turn(request.holder):
        page = await api.engine.find(query)
        tasks = cast("list[TaskSnapshot]", await mapped(page.records, shown))
        return json_response(
            OK, TaskListBody(tasks=tasks, count=len(tasks), next_cursor=page.next_before)
        )


async def cancel_task(api: Api, request: Request, task_id: str) -> Response:
    """Cancel a task, and say whether it has stopped already."""
    body = await cancelled(api, request, task_id)
    return json_response(OK if body.status == "cancelled" else ACCEPTED, body)


async def cancelled(api: Api, request: Request, task_id: str) -> CancelledBody:
    """Cancel a task of the caller's; one that has ended otherwise is refused."""
    await check_own(api, request, task_id)
    entry = AuditEntry(actor=actor_of(request), action="task.cancel", subject=task_id)
    record = await api.engine.cancel(known_form(task_id), entry)
    if record is None:
        raise await missing_task(api, task_id)
    state = record.task.status
    if state in TERMINAL and state is not TaskStatus.CANCELLED:
        raise ApiError("conflict", f"task is already {state.value}")
    status = "cancelled" if state is TaskStatus.CANCELLED else "cancelling"
    return CancelledBody(status=status, task_id=task_id)


async def explain_task(api: Api, request: Request, task_id: str) -> Response:
    """Answer with every rule that keeps a task waiting; if need be, ask the node that knows."""
    answer = await explained(api, request, task_id)
    return answer if isinstance(answer, Response) else json_response(OK, answer)


async def explained(api: Api, request: Request, task_id: str) -> WhyBody | Response:
    """Return every rule that keeps a task waiting, or the answer of the node that knows."""
    await check_own(api, request, task_id)
    try:
        why = await api.engine.why(known_form(task_id), request.caller.bounds)
    except NotDispatchingError as error:
        answer = await api.forwarder.ask(error.address, f"/tasks/{task_id}/why", request)
        if answer is None:
            raise
        return answer
    if why is None:
        raise await missing_task(api, task_id)
    fields = msgspec.structs.asdict(why) | {
        "reasons": tuple(reason_body(one) for one in why.reasons),
        "slot": None if why.slot is None else _slot_room(why.slot),
        "slots": tuple(_slot_room(one) for one in why.slots),
    }
    return WhyBody(**fields)


def _slot_room(room: SlotRoom) -> SlotRoomBody:
    return SlotRoomBody(**msgspec.structs.asdict(room))


_TIMES = ("until", "since", "resets_at")


def reason_body(reason: TaskReason) -> ReasonBody:
    """Return a reason as clients see it: with times where the decision has Unix seconds."""
    detail: dict[str, object] = msgspec.to_builtins(reason.detail)
    for name in _TIMES:
        seconds = detail.get(name)
        if isinstance(seconds, (int, float)):
            detail[name] = _reached(seconds)
    fields = msgspec.structs.asdict(reason) | {"detail": detail, "until": _reached(reason.until)}
    return ReasonBody(**fields)


def _reached(seconds: float | None) -> datetime | None:
    """Return a time; None where there is none, or no calendar reaches it."""
    try:
        return moment(seconds)
    except (OverflowError, OSError, ValueError):
        return None


async def own_task(api: Api, caller: Caller, task_id: str) -> TaskRecord:
    """Return a task that is there and belongs to the caller; one that was deleted says so."""
    record = await api.engine.get(known_form(task_id))
    if record is None:
        raise await missing_task(api, task_id)
    return caller.check_task(record)


async def missing_task(api: Api, task_id: str) -> ApiError:
    """Return the error for a task that is not there: it was deleted, or it never was.

    Whose a deleted task was nobody knows any more, so everybody gets the same answer.
    """
    cut = await api.engine.deleted_by(task_id)
    return not_found() if cut is None else task_deleted(task_id, cut)


async def check_own(api: Api, request: Request, task_id: str) -> None:
    """Refuse a task that does not belong to the caller, as if there were none."""
    if request.caller.is_bound:
        await own_task(api, request.caller, task_id)


def known_form(task_id: str) -> str:
    """Return an id that could be one; any other is not asked for."""
    if _TASK_ID.fullmatch(task_id) is None:
        raise not_found()
    return task_id


def read_query(given: dict[str, str]) -> TaskQuery:
    """Read the filter and the page of a list."""
    check_unknown(given, QUERY_FIELDS)
    return TaskQuery(
        agent_id=submission.parse_filter_name(given.get("agentId"), "agentId"),
        project_id=submission.parse_filter_name(given.get("projectId"), "projectId"),
        states=_states(given.get("state", "")),
        target=submission.parse_filter_name(given.get("target"), "target"),
        slot=submission.parse_filter_name(given.get("slot"), "slot"),
        provider=submission.parse_filter_name(given.get("provider"), "provider"),
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
        raise invalid_field("omit", f"'{excerpt(text)}' is not a list of {allowed}")
    return names


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _states(text: str) -> tuple[TaskStatus, ...]:
    try:
        return tuple(dict.fromkeys([TaskStatus(name) for name in _names(text)]))
    except ValueError:
        allowed = ", ".join(status.value for status in TaskStatus)
        raise invalid_field("state", f"'{excerpt(text)}' is not a list of {allowed}") from None


def _cursor(text: str) -> str | None:
    if text and _TASK_ID.fullmatch(text) is None:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return text or None


# The routes that work on tasks that ended, or on many at once: retry, bulk cancel, bulk retry.
#
# Without `confirm` a bulk route only counts. With it, the work is bounded in tasks and time; what
# is left is said, and the same request again goes on with it.

LIVE = tuple(status for status in TaskStatus if status not in TERMINAL)
ENDED = tuple(status for status in TaskStatus if status in TERMINAL)
RETRIED = (TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.REJECTED)
"""What a bulk retry means that names no states: whatever did not succeed."""


async def retry_task(api: Api, request: Request, task_id: str) -> Response:
    """Make a new task of one that ended; the old one stays as it is."""
    return json_response(ACCEPTED, await retried(api, request, task_id))


async def retried(api: Api, request: Request, task_id: str) -> SubmittedBody:
    """Submit again what a task of the caller's did that has ended."""
    ended = await own_task(api, request.caller, task_id)
    if not ended.is_terminal:
        line = f"task is {ended.task.status.value}; only one that has ended is retried"
        raise ApiError("conflict", line)
    draft = _again(api, request.caller, ended)
    answer = await api.engine.submit(*draft)
    if isinstance(answer, TurnedAway):
        raise queue_full(answer.rejected, answer.kept_id)
    if not isinstance(answer, Queued):
        raise ApiError("conflict", "the task cannot be retried")
    task = answer.record.task
    created_at = exact_moment(task.created_at)
    return SubmittedBody(task.id, task.status, answer.position, created_at, answer.warning)


async def cancel_tasks(api: Api, request: Request, _: str) -> Response:
    """Count the tasks that match, or cancel them."""
    body = read_body(await request.json_body(), TaskFilterBody)
    if not body.confirm:
        wanted = cancel_filter(body, request.caller)
        return json_response(OK, BulkCancelBody(matched=await api.bulk.count(wanted)))
    return json_response(OK, await cancel_matching(api, request, body))


async def cancel_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkCancelBody:
    """Cancel the tasks of the caller's that match, and note it."""
    result = await api.bulk.cancel(cancel_filter(body, request.caller), limit=body.limit)
    answer = BulkCancelBody(
        matched=result.matched,
        cancelled=result.done,
        skipped=result.skipped,
        remaining=result.remaining,
    )
    await api.record(request, "tasks.cancel", "", _detail(body, answer))
    return answer


async def retry_tasks(api: Api, request: Request, _: str) -> Response:
    """Count the tasks that match, or make a new one of each."""
    body = read_body(await request.json_body(), TaskFilterBody)
    if not body.confirm:
        wanted = retry_filter(body, request.caller)
        return json_response(OK, BulkRetryBody(matched=await api.bulk.count(wanted)))
    return json_response(OK, await retry_matching(api, request, body))


async def retry_matching(api: Api, request: Request, body: TaskFilterBody) -> BulkRetryBody:
    """Make a new task of each of the caller's that match, and note it."""

    def again(ended: TaskRecord) -> Draft:
        return _again(api, request.caller, ended)

    wanted = retry_filter(body, request.caller)
    result = await api.bulk.retry(wanted, again, limit=body.limit)
    answer = BulkRetryBody(
        matched=result.matched,
        retried=result.done,
        skipped=result.skipped,
        remaining=result.remaining,
    )
    await api.record(request, "tasks.retry", "", _detail(body, answer))
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
            raise invalid_field("state", f"'{excerpt(name)}' is none of {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _named(text: str | None, field: str) -> str | None:
    """Check a name; an empty one is nobody's, and must not come to mean everybody."""
    return submission.parse_identifier(text, field) if text else text


def _seconds(at: datetime | None, field: str) -> float | None:
    if at is None:
        return None
    if at.tzinfo is None:
        raise invalid_field(field, "needs a time zone, as in 2026-01-31T12:00:00Z")
    return at.timestamp()


def _again(api: Api, caller: Caller, ended: TaskRecord) -> Draft:
    return api.submission_parser.again(
        ended, now=api.engine.now(), bounds=caller.bounds, is_trusted=caller.is_trusted
    )


def _detail(body: TaskFilterBody, answer: msgspec.Struct) -> Detail:
    asked = msgspec.to_builtins(body)
    asked.pop("confirm", None)
    return {"filter": asked, **msgspec.structs.asdict(answer)}


RETRY_ERRORS = (
    "conflict",
    "forbidden",
    "draining",
    "unknown_project",
    "unknown_target",
    "unknown_slot",
    "unknown_provider",
    "queue_full",
    "store_full",
)

SUBMIT_ERRORS = (
    "unknown_project",
    "unknown_target",
    "unknown_slot",
    "unknown_provider",
    "unknown_parent",
    "draining",
    "idempotency_mismatch",
    "limit_reached",
    "queue_full",
    "store_full",
    "idempotency_full",
)

ROUTES = (
    Route(
        "POST",
        "/tasks",
        submit_task,
        "submit a task",
        "submit",
        body=TaskBody,
        responses={202: SubmittedBody},
        errors=SUBMIT_ERRORS,
        headers=("Idempotency-Key",),
    ),
    Route(
        "GET",
        "/tasks",
        list_tasks,
        "list tasks, newest or oldest first",
        "read",
        responses={200: TaskListBody},
        query=QUERY_FIELDS,
    ),
    Route(
        "POST",
        "/tasks/batch",
        submit_batch,
        "submit 1 to 50 tasks",
        "submit",
        body=BatchBody,
        responses={202: SubmittedBatchBody},
        errors=(*SUBMIT_ERRORS, "batch_empty", "batch_too_large"),
        headers=("Idempotency-Key",),
    ),
    Route("GET", "/tasks/{id}", show_task, "show a task", "read", responses={200: TaskSnapshot}),
    Route(
        "POST",
        "/tasks/{id}/cancel",
        cancel_task,
        "cancel a task",
        "cancel",
        responses={200: CancelledBody, 202: CancelledBody},
        errors=("conflict",),
    ),
    Route(
        "GET",
        "/tasks/{id}/why",
        explain_task,
        "say why a task waits",
        "read",
        responses={200: WhyBody},
        errors=("not_dispatching",),
    ),
    Route(
        "POST",
        "/tasks/cancel",
        cancel_tasks,
        "count the tasks that match, or cancel them",
        "cancel",
        body=TaskFilterBody,
        responses={200: BulkCancelBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/tasks/retry",
        retry_tasks,
        "count the tasks that match, or try them again",
        "submit",
        body=TaskFilterBody,
        responses={200: BulkRetryBody},
        errors=("not_found",),
    ),
    Route(
        "POST",
        "/tasks/{id}/retry",
        retry_task,
        "make a new task of one that ended",
        "submit",
        responses={202: SubmittedBody},
        errors=("missing_field", *RETRY_ERRORS),
    ),
)
