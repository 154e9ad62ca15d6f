"""The routes of workers: claim, heartbeat, complete and fail.

Rule: a worker acts for one agent. A token that is bound to the agent may do so with `submit`; one
that is bound to nobody needs `admin`, because it could take the work of anybody.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import msgspec

from headgate.api import submission
from headgate.api.api import Api, Route
from headgate.api.callers import Caller
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import in_slices
from headgate.api.schema.workers import (
    BeatBody,
    ClaimBody,
    ClaimedBody,
    CompleteBody,
    FailBody,
    GatewayBody,
    HeartbeatBody,
    RunningBody,
    SettledTaskBody,
    UsedBody,
)
from headgate.api.shares import held
from headgate.api.submission import read_body
from headgate.api.tasks import known_form, own_task
from headgate.core.lifecycle import (
    MAX_MODEL_LENGTH,
    MAX_PAUSE_SECONDS,
    UNKNOWN_USAGE,
    Failed,
    Limited,
    Outcome,
    Succeeded,
    Usage,
)
from headgate.core.money import to_micro_usd, to_tokens
from headgate.core.task import ProgressReport
from headgate.core.task_view import snapshot_of
from headgate.engine.workers import MAX_WAIT_SECONDS, Claim, Report
from headgate.errors import InvalidAmountError, InvalidFieldError, StaleWorkerError
from headgate.executors.executor import shortened
from headgate.providers.usage import usage_of, usage_steps
from headgate.storage.store import StaleLease

OK = 200
MAX_CAPACITY = 1_000

_WORKER_ID = re.compile(r"worker-[0-9a-f]{32}")


async def claim(api: Api, request: Request, agent_id: str) -> Response:
    """Answer with what a worker is to run, at once or when there is something."""
    body = read_body(await request.json_body(), ClaimBody)
    submission.parse_agent_id(agent_id)
    _check_caller(request.caller, agent_id)
    _check_range("capacity", body.capacity, MAX_CAPACITY)
    _check_range("waitSeconds", body.wait_seconds, MAX_WAIT_SECONDS)
    workers = api.engine.workers
    asked = Claim(
        agent_id=agent_id,
        worker_id=None if body.worker_id is None else _worker_id(body.worker_id),
        capacity=body.capacity,
        running=_running(body.running),
        reports=_reports(body.running),
        wait_seconds=body.wait_seconds,
    )
    with held(api.shares.claims, request.holder, "claims"):
        worker_id, orders = await workers.claim(asked)
    gateway = {}
    for record in orders.tasks:
        access = await workers.access(record)
        if access is not None:
            gateway[record.task.id] = GatewayBody(
                base_url=access.base_url, token=access.token, protocols=access.protocols
            )
    claimed = ClaimedBody(
        worker_id=worker_id,
        lease_seconds=workers.lease_seconds,
        tasks=tuple([snapshot_of(record) for record in orders.tasks]),
        cancelled=orders.cancelled,
        lost=orders.lost,
        gateway=gateway or msgspec.UNSET,
        waited_seconds=orders.waited_seconds or msgspec.UNSET,
    )
    return json_response(OK, claimed)


async def heartbeat(api: Api, request: Request, agent_id: str) -> Response:
    """Renew the lease of a worker, and say what it is to stop."""
    body = read_body(await request.json_body(), HeartbeatBody)
    _check_caller(request.caller, agent_id)
    workers = api.engine.workers
    worker_id, running = _worker_id(body.worker_id), _running(body.running)
    orders = await workers.beat(worker_id, agent_id, running, _reports(body.running))
    beat = BeatBody(
        lease_seconds=workers.lease_seconds, cancelled=orders.cancelled, lost=orders.lost
    )
    return json_response(OK, beat)


async def complete(api: Api, request: Request, task_id: str) -> Response:
    """Take the result of an attempt."""
    body = read_body(await request.json_body(), CompleteBody)
    result = await in_slices(submission.parse_json_value(body.result, "result"))
    if result and body.usage is None:
        usage = await in_slices(usage_steps(result, api.prices))
    else:
        usage = _usage(api, body.usage)
    outcome = Succeeded(result=result, usage=usage)
    return await _settle(api, request, task_id, body, outcome)


async def fail(api: Api, request: Request, task_id: str) -> Response:
    """Take the failure of an attempt."""
    body = read_body(await request.json_body(), FailBody)
    error = shortened(body.error) or "the worker failed and did not say why"
    outcome: Outcome = Failed(
        error=error,
        is_transient=body.retryable,
        usage=_usage(api, body.usage),
        is_cut=body.cut_off,
    )
    pause = body.retry_after_seconds
    if pause is not None:
        _check_range("retryAfterSeconds", pause, MAX_PAUSE_SECONDS)
        outcome = Limited(retry_after_seconds=pause, error=error)
    return await _settle(api, request, task_id, body, outcome)


async def _settle(
    api: Api, request: Request, task_id: str, body: CompleteBody | FailBody, outcome: Outcome
) -> Response:
    record = await own_task(api, request.caller, task_id)
    _check_caller(request.caller, record.agent_id or record.task.agent_id or "")
    report = Report(
        record=record,
        worker_id=_worker_id(body.worker_id),
        attempt=body.attempt,
        outcome=outcome,
        tenant=request.caller.tenant,
    )
    answer = await api.engine.workers.settle(report)
    if isinstance(answer, StaleLease):
        line = f"attempt {body.attempt} at the task is not this worker's any more; drop it"
        raise ApiError("stale_lease", line, task_id=task_id)
    return json_response(OK, SettledTaskBody(task_id=task_id, state=answer.task.status))


def _check_caller(caller: Caller, agent_id: str) -> None:
    caller.check_agent(agent_id)
    if caller.project_id is not None:
        line = "a worker takes tasks of all projects; use a token that is bound to no project"
        raise ApiError("forbidden", line)
    if caller.agent_id is None and not caller.may("admin"):
        line = "a worker needs a token that is bound to its agent, or one with admin"
        raise ApiError("forbidden", line, details={"needs": "admin"})


def _worker_id(text: str) -> str:
    if _WORKER_ID.fullmatch(text) is None:
        raise StaleWorkerError(text)
    return text


def _running(given: Sequence[RunningBody]) -> dict[str, int]:
    if len(given) > MAX_CAPACITY:
        raise InvalidFieldError("running", f"has more than {MAX_CAPACITY} entries")
    return {known_form(one.task_id): one.attempt for one in given}


def _reports(given: Sequence[RunningBody]) -> dict[str, ProgressReport]:
    return {
        one.task_id: ProgressReport(fraction=one.progress.fraction, text=one.progress.text)
        for one in given
        if one.progress is not None
    }


def _check_range(field: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidFieldError(field, f"must be from 0 to {most:g}")


def _usage(api: Api, used: UsedBody | None) -> Usage:
    """Return what was used; tokens of a known model are priced where no amount is given."""
    if used is None:
        return UNKNOWN_USAGE
    if used.model is not None and len(used.model) > MAX_MODEL_LENGTH:
        problem = f"has {len(used.model):,} characters, at most {MAX_MODEL_LENGTH} are kept"
        raise InvalidFieldError("usage.model", problem)
    found = UNKNOWN_USAGE
    if used.input_tokens is not None or used.output_tokens is not None:
        counts = {"input_tokens": used.input_tokens or 0, "output_tokens": used.output_tokens or 0}
        said = msgspec.json.encode({"model": used.model, "usage": counts})
        found = usage_of(said, api.prices)
    try:
        tokens = found.tokens if used.tokens is None else to_tokens(used.tokens)
        micro_usd = found.micro_usd if used.usd is None else to_micro_usd(used.usd)
    except InvalidAmountError as error:
        field = "usage.usd" if error.field == "amount_usd" else "usage.tokens"
        raise InvalidFieldError(field, error.problem) from None
    # What a worker says is its own word, also where the price list makes dollars of it.
    return Usage(tokens=tokens, micro_usd=micro_usd, model=used.model)


ROUTES = (
    Route(
        "POST",
        "/agents/{id}/claim",
        claim,
        "offer capacity for tasks, and get those that are assigned to it",
        "submit",
        body=ClaimBody,
        responses={200: ClaimedBody},
        errors=("stale_worker", "limit_reached"),
    ),
    Route(
        "POST",
        "/agents/{id}/heartbeat",
        heartbeat,
        "renew the lease of a worker",
        "submit",
        body=HeartbeatBody,
        responses={200: BeatBody},
        errors=("stale_worker",),
    ),
    Route(
        "POST",
        "/tasks/{id}/complete",
        complete,
        "report the result of a task",
        "submit",
        body=CompleteBody,
        responses={200: SettledTaskBody},
        errors=("stale_worker", "stale_lease"),
    ),
    Route(
        "POST",
        "/tasks/{id}/fail",
        fail,
        "report that a task failed",
        "submit",
        body=FailBody,
        responses={200: SettledTaskBody},
        errors=("stale_worker", "stale_lease"),
    ),
)
