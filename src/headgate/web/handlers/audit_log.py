"""`GET /audit`: who changed what, newest first."""

from __future__ import annotations

import re

import msgspec

from headgate.audit import AuditRow
from headgate.bodies.admin import AuditEntryBody, AuditListBody
from headgate.intake.bodies import check_unknown
from headgate.task_snapshot import exact_moment
from headgate.web.api import Api
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request, read_limit
from headgate.web.refusals import Refusal, invalid_field

OK = 200
QUERY_FIELDS = ("limit", "cursor")

_NUMBER = re.compile(r"[0-9]{1,18}")


async def list_audit(api: Api, request: Request, _: str) -> Answer:
    """Answer with one page of changes."""
    given = request.query()
    check_unknown(given, QUERY_FIELDS)
    return json_answer(OK, await audit_list(api, given))


async def audit_list(api: Api, given: dict[str, str]) -> AuditListBody:
    """Return one page of changes; `given` may have its `limit` and `cursor`."""
    if api.audit is None:
        raise Refusal("not_found", "this service keeps no audit log")
    page = await api.audit.page(before=read_number(given, "cursor"), limit=read_limit(given))
    entries = [_body(row) for row in page.rows]
    cursor = None if page.next_before is None else str(page.next_before)
    return AuditListBody(entries=entries, count=len(entries), next_cursor=cursor)


def read_number(given: dict[str, str], field: str) -> int | None:
    """Read where a page begins; None is the beginning."""
    text = given.get(field, "")
    if not text:
        return None
    if _NUMBER.fullmatch(text) is None:
        raise invalid_field(field, "must be a number")
    return int(text)


def _body(row: AuditRow) -> AuditEntryBody:
    fields = msgspec.structs.asdict(row) | {"at": exact_moment(row.at)}
    return AuditEntryBody(**fields)
