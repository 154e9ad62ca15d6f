"""What tasks and calls used, and what is learned from it.

`GET /usage` sums up tokens and dollars by project, agent, model, slot or day. `GET /estimates`
lists the known costs of each kind of work.
"""

from __future__ import annotations

import re

from headgate.api.api import Api, Route
from headgate.api.callers import Caller
from headgate.api.errors import ApiError, invalid_field
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.schema.tasks import (
    EstimatesBody,
    KindBody,
    LearnedBody,
    UsageBody,
    UsageRowBody,
)
from headgate.api.submission import LATEST, check_unknown, excerpt, parse_filter_name
from headgate.core.estimates import Reserve, Sketch
from headgate.core.lifecycle import parse_rfc3339
from headgate.core.money import MICRO_PER_USD, plain_usd
from headgate.core.retention import A_DAY_SECONDS
from headgate.core.task_view import exact_moment
from headgate.storage.usage import (
    GROUPINGS,
    MAX_KINDS_READ,
    Grouping,
    KnownKind,
    UsageReport,
    UsageSum,
)

OK = 200
REPORT_SECONDS = 30 * A_DAY_SECONDS
USAGE_QUERY = ("by", "since", "until")
ESTIMATES_QUERY = ("projectId",)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


async def show_usage(api: Api, request: Request, _: str) -> Response:
    """Answer with sums, of what belongs to the caller."""
    query = request.query()
    check_unknown(query, USAGE_QUERY)
    now = api.usage.now()
    since = _moment("since", query.get("since", ""), now - REPORT_SECONDS)
    until = _moment("until", query.get("until", ""), now + 1.0)
    if until < since:
        raise invalid_field("until", "is before since")
    report = await api.usage.report(
        _grouping(query.get("by", "")), since=since, until=until, bounds=request.caller.bounds
    )
    return json_response(OK, _body(report))


def _grouping(text: str) -> Grouping:
    if text and text not in GROUPINGS:
        raise invalid_field("by", f"'{excerpt(text)}' is not one of {', '.join(GROUPINGS)}")
    return next(one for one in GROUPINGS if one == (text or "project"))


def _moment(field: str, text: str, default: float) -> float:
    if not text:
        return default
    seconds = parse_rfc3339(f"{text}T00:00:00Z" if _DATE.fullmatch(text) else text)
    if seconds is None or not 0 <= seconds <= LATEST:
        raise invalid_field(field, "must be a day or an RFC 3339 time, as in 2030-01-31T12:00:00Z")
    return seconds


def _body(report: UsageReport) -> UsageBody:
    return UsageBody(
        by=report.by,
        since=exact_moment(report.since),
        until=exact_moment(report.until),
        rows=[_row(one) for one in report.rows],
        total=_row(report.total),
    )


def _row(one: UsageSum) -> UsageRowBody:
    return UsageRowBody(
        key=one.key,
        tasks=one.tasks,
        attempts=one.attempts,
        calls=one.calls,
        tokens=one.tokens,
        usd=plain_usd(one.micro_usd),
        assumed_tokens=one.assumed_tokens,
        assumed_usd=plain_usd(one.assumed_micro_usd),
    )


async def show_estimates(api: Api, request: Request, _: str) -> Response:
    """Answer with what is known of the cost of work, of the projects that are the caller's."""
    query = request.query()
    check_unknown(query, ESTIMATES_QUERY)
    project_id = parse_filter_name(query.get("projectId"), "projectId")
    return json_response(OK, await estimates_body(api, request.caller, project_id))


async def estimates_body(
    api: Api, caller: Caller, project_id: str | None = None, *, most: int = MAX_KINDS_READ
) -> EstimatesBody:
    """Return what is known of the cost of work; whoever is bound to a project sees its own."""
    if caller.agent_id is not None:
        raise ApiError("forbidden", "estimates are of whole projects; use a token without an agent")
    own = caller.project_id
    if own is not None and project_id not in (None, own):
        raise ApiError("forbidden", f"this token is for project {own} alone")
    scheduler = api.config.settings.scheduler
    found = await api.usage.kinds(own or project_id, most=most + 1)
    held = (scheduler.estimate_quantile, scheduler.reserve)
    return EstimatesBody(
        quantile=scheduler.estimate_quantile,
        reserve=scheduler.reserve.value,
        kinds=[_kind(one, *held) for one in found[:most]],
        is_truncated=len(found) > most,
    )


def _kind(one: KnownKind, quantile: float, reserve: Reserve) -> KindBody:
    project_id, target, action = one.kind
    return KindBody(
        project_id=project_id,
        target=target,
        action=action,
        last_fed=exact_moment(one.fed_at),
        usd=_learned(one.learned.micro_usd, quantile, reserve, per=MICRO_PER_USD),
        tokens=_learned(one.learned.tokens, quantile, reserve),
    )


def _learned(sketch: Sketch, quantile: float, reserve: Reserve, *, per: int = 1) -> LearnedBody:
    if not sketch.count:
        return LearnedBody(samples=0, silent=sketch.is_silent)
    return LearnedBody(
        samples=sketch.count,
        usual=sketch.quantile(quantile) / per,
        largest=sketch.largest / per,
        holds=sketch.amount(quantile, reserve) / per,
    )


ROUTES = (
    Route(
        "GET",
        "/usage",
        show_usage,
        "show tokens and dollars by project, agent, model, slot or day",
        "read",
        responses={200: UsageBody},
        query=USAGE_QUERY,
        errors=("invalid_field", "unknown_field"),
    ),
    Route(
        "GET",
        "/estimates",
        show_estimates,
        "show the known costs of each kind of work",
        "read",
        responses={200: EstimatesBody},
        query=ESTIMATES_QUERY,
        errors=("invalid_field", "unknown_field", "forbidden"),
    ),
)
