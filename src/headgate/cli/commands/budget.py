"""`headgate budget`: set limits, see what is spent, read the journal, give money back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from headgate.cli.budget_report import (
    JOURNAL_HEADER,
    BudgetReport,
    Parent,
    has_limit,
    journal_row,
    report_lines,
)
from headgate.cli.output import print_json, print_table
from headgate.cli.places.ledger import Place, ask, with_place
from headgate.core.budgets.accounts import JournalEntry
from headgate.core.budgets.burn_rate import BurnRate, burn_rate, last_read_at
from headgate.core.budgets.scopes import ancestors, parse_scope
from headgate.errors import InvalidScopeError, InvalidSettingError

if TYPE_CHECKING:
    from headgate.tracker import LedgerTracker

ROOT_NAME = "root"
MOST_ENTRIES = 10_000

_scope_argument = click.argument("scope", required=False)
_session_option = click.option("--session", metavar="NAME", help="Short for session:NAME.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")


@click.group()
def budget() -> None:
    """Set budgets and see what is spent, across all who share a ledger.

    A SCOPE is a path such as session:eval-1/workflow:w1; root is all of them together.
    """


@budget.command(
    "set",
    epilog="""\b
Examples:
  headgate budget set --session eval-1 --limit-usd 50
  headgate budget set project:web --limit-usd 20 --window day@Europe/Berlin
  headgate budget set root --no-limit
""",
)
@_scope_argument
@_session_option
@click.option("--limit-usd", metavar="DOLLARS", help="The most that may be spent.")
@click.option("--limit-tokens", type=int, help="The most tokens that may be used.")
@click.option("--window", help="none, day, week, month, week@Europe/Berlin or rolling:24h.")
@click.option("--no-limit", is_flag=True, help="Remove the limits of the scope.")
@with_place
def set_limits(
    *,
    place: Place,
    scope: str | None,
    session: str | None,
    limit_usd: str | None,
    limit_tokens: int | None,
    window: str | None,
    no_limit: bool,
) -> None:
    """Set the limits of a scope; those that are not given are removed.

    A limit stops new reservations and nothing else.
    """
    name = _scope(scope, session)
    if name is None:
        raise InvalidScopeError("scope", "name one, or root for everything together")
    if no_limit != (limit_usd is None and limit_tokens is None):
        problem = "give --limit-usd, --limit-tokens or both, or else --no-limit"
        raise InvalidSettingError("limit", problem)
    if no_limit and window is not None:
        raise InvalidSettingError("--window", "is the time of a limit; leave it out, or set one")
    ask(
        place,
        lambda tracker: tracker.set_budget(name, limit_usd, limit_tokens, window),
        founds=True,
    )
    click.echo(f"Set the budget of {name or ROOT_NAME}")


@budget.command(
    epilog="""\b
Examples:
  headgate budget status --session eval-2026-04-12
  headgate budget status session:eval-1/workflow:w1 --json
  headgate budget status --redis-url redis://127.0.0.1:6379/0
"""
)
@_scope_argument
@_session_option
@_json_option
@with_place
def status(*, place: Place, scope: str | None, session: str | None, as_json: bool) -> None:
    """Print what a scope has spent of its budget, and what lies within it."""
    name = _scope(scope, session) or ""
    report = ask(place, lambda tracker: _report(tracker, name))
    if as_json:
        print_json(report.as_keys())
    else:
        click.echo("\n".join(report_lines(report)))


@budget.command(
    epilog="""\b
Examples:
  headgate budget journal --session eval-1
  headgate budget journal --limit 1000 --json
"""
)
@_scope_argument
@_session_option
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1, MOST_ENTRIES))
@_json_option
@with_place
def journal(
    *, place: Place, scope: str | None, session: str | None, limit: int, as_json: bool
) -> None:
    """Print the latest changes of a scope, newest first."""
    name = _scope(scope, session) or ""

    async def read(tracker: LedgerTracker) -> Sequence[JournalEntry]:
        return await tracker.journal(name, limit=limit)

    entries = ask(place, read)
    if as_json:
        print_json(entries)
        return
    title = f"Journal of {name or ROOT_NAME}: the latest {len(entries)} changes"
    print_table(title, JOURNAL_HEADER, [journal_row(entry) for entry in entries])


@budget.command(
    epilog="""\b
Examples:
  headgate budget release 4f6d2b0c --yes
"""
)
@click.argument("reservation_id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_place
def release(*, place: Place, reservation_id: str, yes: bool) -> None:
    """Give the money of a reservation back.

    This says that nothing was charged for it; what was charged is to be committed instead.
    """
    if not yes and not _is_confirmed(reservation_id):
        click.echo("Nothing was released")
        return
    ask(place, lambda tracker: tracker.release(reservation_id))
    click.echo(f"Released {reservation_id}")


def _scope(scope: str | None, session: str | None) -> str | None:
    """Return the scope that was named, None if none was."""
    if scope is not None and session is not None:
        raise InvalidScopeError("scope", "give a scope or --session, not both")
    if session is not None:
        return parse_scope(f"session:{session}", field="--session")
    if scope is None:
        return None
    return "" if scope == ROOT_NAME else parse_scope(scope)


async def _report(tracker: LedgerTracker, scope: str) -> BudgetReport:
    status = await tracker.status(scope)
    around = [await tracker.status(name) for name in ancestors(status.scope)[:-1]]
    now = tracker.ledger.now()
    parents = [
        Parent(status=one, rate=await _rate(tracker, one.scope, now))
        for one in around
        if has_limit(one)
    ]
    return BudgetReport(
        status=status,
        rate=await _rate(tracker, scope, now),
        parents=tuple(parents),
        now=now,
    )


async def _rate(tracker: LedgerTracker, scope: str, now: float) -> BurnRate:
    entries = await tracker.journal(scope, limit=MOST_ENTRIES)
    return burn_rate(entries, now=now, cut_at=last_read_at(entries, MOST_ENTRIES))


def _is_confirmed(reservation_id: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidSettingError("--yes", "is needed where nobody can be asked")
    click.echo("A release says that the provider charged nothing for this reservation.")
    return click.confirm(f"Release {reservation_id}?")
