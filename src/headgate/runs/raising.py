"""How the limit of a budget is changed where it is kept: a command to be pasted.

Rule: nothing secret is in it. An address was kept without its password, and a token is a variable.
"""

from __future__ import annotations

import shlex
from urllib.parse import quote

from headgate.core.budgets.scopes import Scope, leaf_kind
from headgate.ledgers.connect import sqlite_path
from headgate.runs.backend import Money
from headgate.runs.budgets import SESSION, ChangeCommand
from headgate.runs.kept.record import RunRecord
from headgate.runs.options import Tracker
from headgate.runs.report import RunReport, RunState

AMOUNT = "USD"
"""What stands where somebody has to say how much."""

_PLACES = {"sqlite": "--sqlite-path", "redis": "--redis-url", "postgres": "--postgres-url"}
_HEADER = '${HEADGATE_TOKEN:+-H"Authorization: Bearer $HEADGATE_TOKEN"}'
"""The header for a token if there is one: a service that asks for none refuses an empty one."""

_BY_ITSELF = ("room is freed at", "; more in ")
"""What refusals say of a budget that frees room when its window moves on."""


def change_in_books(tracker: Tracker | None, address: str) -> ChangeCommand | None:
    """Return what changes limits in books outside a run; None for those within it."""
    option = None if tracker is None else _PLACES.get(tracker)
    if option is None:
        return None
    place = str(sqlite_path(address)) if tracker == "sqlite" else address
    where = f"{option} {shlex.quote(place)}"
    return lambda scope, usd: f"headgate budget set {scope} --limit-usd {usd} {where}"


def change_at_service(url: str) -> ChangeCommand:
    """Return what changes limits in the books of a service; it needs a token of an administrator.

    `headgate budget` would change books of this machine, which the service never looks at.
    """

    def command(scope: str, usd: str) -> str:
        place = shlex.quote(f"{url.rstrip('/')}/budgets?scope={quote(scope, safe=':/')}")
        body = shlex.quote(f'{{"limitUsd": "{usd}"}}')
        return f"curl -fsS -X PATCH {place} {_HEADER} -d {body}"

    return command


def raise_command(record: RunRecord, report: RunReport, *, resume: str) -> str | None:
    """Return what raises the budget that ended a run; None if none did, or nobody can say.

    A budget with a window frees room by itself, and setting its limit would end the window.
    """
    short = short_scope(report)
    if short is None or any(words in (report.exhausted_by or "") for words in _BY_ITSELF):
        return None
    if short.scope == report.money[-1].scope:
        return f"{resume} --budget-usd {AMOUNT}"
    if record.server is not None:
        change: ChangeCommand | None = change_at_service(record.server)
    else:
        change = change_in_books(record.tracker, record.books)
    if change is not None:
        return change(short.scope, AMOUNT)
    is_session = leaf_kind(Scope(short.scope)) == SESSION
    return f"{resume} --budget-session-limit {AMOUNT}" if is_session else None


def way_on(record: RunRecord, report: RunReport, *, resume: str) -> str:
    """Return what goes on with a run: after what raises its budget, where that has ended it."""
    command = raise_command(record, report, resume=resume)
    if command is None:
        return resume
    return command if command.startswith(resume) else f"{command} && {resume}"


def short_scope(report: RunReport) -> Money | None:
    """Return the scope of a run that would not hold the next step, by the words of the refusal."""
    words = report.exhausted_by or ""
    if report.state is not RunState.EXHAUSTED:
        return None
    for one in reversed(report.money):
        if f"(scope {one.scope}," in words or words.startswith(f"{one.scope}: "):
            return one
    return None
