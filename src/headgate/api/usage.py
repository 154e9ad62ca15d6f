"""`GET /usage`: what tasks used, by project, agent, model or day."""

from __future__ import annotations

import re

from headgate.api.api import Api, Route
from headgate.api.errors import invalid_field
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.schema.tasks import UsageBody, UsageRowBody
from headgate.api.submission import LATEST, check_unknown, excerpt
from headgate.core.lifecycle import parse_rfc3339
from headgate.core.money import plain_usd
from headgate.core.retention import A_DAY_SECONDS
from headgate.core.task_view import exact_moment
from headgate.storage.usage import GROUPINGS, Grouping, UsageReport, UsageSum

OK = 200
REPORT_SECONDS = 30 * A_DAY_SECONDS
USAGE_QUERY = ("by", "since", "until")
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
        tokens=one.tokens,
        usd=plain_usd(one.micro_usd),
        assumed_tokens=one.assumed_tokens,
        assumed_usd=plain_usd(one.assumed_micro_usd),
    )


ROUTES = (
    Route(
        "GET",
        "/usage",
        show_usage,
        "tokens and dollars by project, agent, model or day",
        "read",
        responses={200: UsageBody},
        query=USAGE_QUERY,
        errors=("invalid_field", "unknown_field"),
    ),
)
