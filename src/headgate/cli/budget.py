"""`headgate budget`: set limits, see what is spent, read the journal, put right what is wrong.

A running service has the budgets, unless `--ledger` names a file or a URL that has them. Rules: a
command that writes says where it wrote; and one that only reads creates no ledger, since a path
with a mistake in it would show that nothing was spent.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import click
import msgspec

from headgate.budgets.connect import SCHEMES, URL_VARIABLE, scheme_of
from headgate.cli.completion import BUDGET
from headgate.cli.connection import (
    Connection,
    connect,
    connection_options,
    default_directory,
    json_option,
)
from headgate.cli.output import (
    clock_time,
    duration,
    length_of,
    print_json,
    print_json_lines,
    print_table,
    tasks_or_calls,
    unknown_name,
)
from headgate.core.budgets.scopes import (
    ROOT_NAME,
    Scope,
    ancestors,
    is_within,
    leaf_kind,
    mistyped_kind,
    parse_scope,
)
from headgate.core.budgets.windows import parse_window, window_words
from headgate.core.money import format_usd, to_limit_micro_usd, to_signed_micro_usd
from headgate.core.text import did_you_mean, nearest, printable
from headgate.errors import (
    CallerError,
    InvalidScopeError,
    InvalidSettingError,
    LedgerUnavailableError,
    NotAllowedError,
    RequestRefusedError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from headgate.api.schema.admin import JournalEntryBody
    from headgate.api.schema.tasks import BudgetStatusBody
    from headgate.budgets.tracker import LedgerTracker
    from headgate.client.sync_client import SyncClient

Result = TypeVar("Result")

NONE = "none"
BUDGET_KEYS = ("limit_usd", "limit_tokens", "window", "reserve")
MOST_ENTRIES = 10_000
PAGE_ENTRIES = 1_000
ANSWER_SECONDS = 30.0
NOT_REACHED = "unreachable"


# Where the budgets are: at a service, or in a ledger that a command opens by itself.


class Where(NamedTuple):
    """What the options say of where the budgets are; without a ledger, a service has them."""

    connection: Connection
    ledger: str | None = None
    option: str = "--ledger"


def where_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Add --ledger and the options of a service to a command, which gets them as `where`."""

    @click.option(
        "--ledger",
        metavar="FILE|URL",
        help="A ledger without a service: budget.db, redis://… or postgresql://…  "
        f"[default: {URL_VARIABLE}, or else the service]",
    )
    @connection_options
    @functools.wraps(command)
    def located(*, ledger: str | None, connection: Connection, **rest: object) -> Result:
        return command(where=_where(ledger, connection), **rest)

    return located


def _where(ledger: str | None, connection: Connection) -> Where:
    is_service_named = any(part is not None for part in connection)
    if ledger is not None:
        if is_service_named:
            problem = "names the budgets beside a service; leave out --url, --token and --data"
            raise InvalidSettingError("--ledger", problem)
        if not ledger.strip():
            # An unset variable of a script, most likely; the service would have other budgets.
            raise InvalidSettingError("--ledger", "is empty; name a ledger, or leave it out")
        return Where(connection, _ledger_url(ledger))
    named = os.environ.get(URL_VARIABLE, "")
    if named and not is_service_named and scheme_of(named) not in SCHEMES["local"]:
        return Where(connection, named, URL_VARIABLE)
    return Where(connection)


def _ledger_url(text: str) -> str:
    """Return the URL of a ledger that is given as one, or as a file."""
    head, colon, _ = text.partition(":")
    is_file = not colon or "/" in head or Path(text).exists()
    return f"sqlite:///{text}" if is_file else text


class Books(Protocol):
    """The budgets of a service, or of a ledger; both say the same of them."""

    place: str

    def set(self, scope: str, change: Mapping[str, Any]) -> None:
        """Change the limits and the window of a scope; None removes one, what is left out stays."""

    def delete(self, scope: str) -> str:
        """Remove all limits of a scope; return what the settings file says of it, if anything."""

    def unknown_project(self, scope: str) -> str:
        """Say that a scope is of a project that does not exist, if that can be told."""

    def status(self, scope: str | None) -> BudgetStatusBody:
        """Return a scope and everything within it."""

    def journal(self, scope: str | None, limit: int) -> Sequence[JournalEntryBody]:
        """Return the latest changes of a scope, newest first."""

    def release(self, reservation_id: str, reason: str) -> None:
        """Give the money of a reservation back."""

    def extend(self, reservation_id: str, seconds: float, reason: str) -> datetime:
        """Keep a reservation for so long, and return until when that is."""

    def adjust(
        self,
        adjustment_id: str,
        scope: str,
        *,
        action: str,
        usd: str | None,
        tokens: int | None,
        reason: str,
    ) -> BudgetStatusBody:
        """Change what is booked in a scope, or decide about what tenants claim there."""


@contextmanager
def opened_books(where: Where, *, creates: bool = False) -> Iterator[Books]:
    """Give the budgets that the options name; `creates` makes a file where there is none."""
    if where.ledger is not None:
        yield LedgerBooks(where, creates=creates)
        return
    try:
        with connect(where.connection) as client:
            yield ServiceBooks(client)
    except ServiceUnavailableError as error:
        if error.code == NOT_REACHED:
            error.args = (f"{error}, {_or_a_ledger()}",)
        raise


def _or_a_ledger() -> str:
    """Say the other way to budgets, and where those of runs without a service are."""
    directory = default_directory()
    file = None if directory is None else directory / "budget.db"
    runs = "" if file is None or not file.exists() else f" (runs here use --ledger {file})"
    return f"or a ledger with --ledger FILE{runs}"


class ServiceBooks:
    """The budgets of a running service."""

    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self.place = f"at {client.url}"

    def set(self, scope: str, change: Mapping[str, Any]) -> None:
        self._client.change_budget(scope, **change)

    def reset(self, scope: str) -> None:
        """Let the settings file say the limits of a scope again."""
        self._client.change_budget(scope, reset=BUDGET_KEYS)

    def unknown_project(self, scope: str) -> str:
        kind, _, name = scope.partition("/")[0].partition(":")
        if kind != "project":
            return ""
        try:
            known = [one.id for one in self._client.list_projects().projects]
        except NotAllowedError:
            return ""
        if name in known:
            return ""
        meant = did_you_mean(nearest(name, known), "add it under [projects]")
        return f"there is no project {name!r}, so this budget limits nothing; {meant}"

    def delete(self, scope: str) -> str:
        try:
            self._client.delete_budget(scope)
            return self._file_limit(scope)
        except RequestRefusedError as error:
            if error.code != "not_found":
                raise
            raise _unknown_budget(scope, _limited(self.status(""))) from None

    def _file_limit(self, scope: str) -> str:
        """Return what the settings file says of a budget that was changed beside it."""
        try:
            overrides = self._client.settings(section="budgets").overrides
        except NotAllowedError:
            return ""
        name = scope or ROOT_NAME
        of_file = {
            one.field: one.file_value
            for one in overrides
            if (one.kind, one.name) == ("budgets", name) and one.file_value is not None
        }
        usd, tokens = of_file.get("limitUsd"), of_file.get("limitTokens")
        return _limit_words(None if usd is None else str(usd), tokens)

    def status(self, scope: str | None) -> BudgetStatusBody:
        return self._client.budget_status(scope)

    def journal(self, scope: str | None, limit: int) -> Sequence[JournalEntryBody]:
        found: list[JournalEntryBody] = []
        cursor: str | None = None
        while len(found) < limit:
            page = self._client.budget_journal(
                scope, limit=min(PAGE_ENTRIES, limit - len(found)), cursor=cursor
            )
            found += page.entries
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    def release(self, reservation_id: str, reason: str) -> None:
        self._client.release_any(reservation_id, reason=reason)

    def extend(self, reservation_id: str, seconds: float, reason: str) -> datetime:
        return self._client.extend_any(reservation_id, seconds, reason=reason).lease_until

    def adjust(
        self,
        adjustment_id: str,
        scope: str,
        *,
        action: str,
        usd: str | None,
        tokens: int | None,
        reason: str,
    ) -> BudgetStatusBody:
        if not reason.strip():
            raise InvalidSettingError("--reason", "say why; the audit log of the service keeps it")
        return self._client.adjust_budget(
            adjustment_id, scope, action=action, usd=usd, tokens=tokens, reason=reason
        )


class LedgerBooks:
    """The budgets of a ledger that no service has."""

    def __init__(self, where: Where, *, creates: bool) -> None:
        assert where.ledger is not None  # noqa: S101 - whoever makes one has looked
        url = where.ledger
        if scheme_of(url) in SCHEMES["local"]:
            problem = "memory: is a ledger inside one process, so there is nothing to see or set"
            raise InvalidSettingError(where.option, f"{problem}; name a file, Redis or PostgreSQL")
        self._url = url
        self.place = f"in {_shown(url)}"
        if not creates and scheme_of(url) in SCHEMES["sqlite"]:
            _check_file(where.option, url)

    def set(self, scope: str, change: Mapping[str, Any]) -> None:
        async def merged(tracker: LedgerTracker) -> None:
            status = await _status_of(tracker, scope)
            kept: dict[str, Any] = {
                "limit_usd": status.limit_usd,
                "limit_tokens": status.limit_tokens,
                "window": status.window,
            }
            await tracker.set_budget(scope, **{**kept, **change})

        self._ask(merged)

    def unknown_project(self, scope: str) -> str:  # noqa: ARG002 - a ledger knows of no projects
        return ""

    def delete(self, scope: str) -> str:
        if not _has_limit(self.status(scope)):
            raise _unknown_budget(scope, _limited(self.status("")))
        self._ask(lambda tracker: tracker.set_budget(scope))
        return ""

    def status(self, scope: str | None) -> BudgetStatusBody:
        return self._ask(lambda tracker: _status_of(tracker, scope or ""))

    def journal(self, scope: str | None, limit: int) -> Sequence[JournalEntryBody]:
        async def read(tracker: LedgerTracker) -> Sequence[JournalEntryBody]:
            from headgate.api.budget_report import journal_body  # noqa: PLC0415

            entries = await tracker.journal(scope or "", limit=limit)
            return [journal_body(one, [charge.scope for charge in one.charges]) for one in entries]

        return self._ask(read)

    def release(self, reservation_id: str, reason: str) -> None:  # noqa: ARG002 - nobody keeps it
        self._ask(lambda tracker: tracker.release(reservation_id))

    def extend(self, reservation_id: str, seconds: float, reason: str) -> datetime:  # noqa: ARG002
        token = self._ask(lambda tracker: tracker.extend(reservation_id, seconds))
        return datetime.fromtimestamp(token.lease_until, UTC)

    def adjust(
        self,
        adjustment_id: str,
        scope: str,
        *,
        action: str,
        usd: str | None,
        tokens: int | None,
        reason: str,  # noqa: ARG002 - nobody keeps it
    ) -> BudgetStatusBody:
        from headgate.core.budgets.ledger import Adjustment  # noqa: PLC0415

        async def change(tracker: LedgerTracker) -> BudgetStatusBody:
            given = f"adjust:{adjustment_id}"
            await tracker.adjust(
                scope, usd, tokens=tokens, call=Adjustment(action), adjustment_id=given
            )
            return await _status_of(tracker, scope)

        return self._ask(change)

    def _ask(self, question: Callable[[LedgerTracker], Awaitable[Result]]) -> Result:
        """Open the ledger, ask it one question, and close it."""
        import asyncio  # noqa: PLC0415  slow to load, and not needed to print a command's help

        from headgate.budgets.connect import connect_budget  # noqa: PLC0415

        tracker = connect_budget(self._url)

        async def answered() -> Result:
            try:
                async with asyncio.timeout(ANSWER_SECONDS), tracker:
                    return await question(tracker)
            except TimeoutError:
                problem = f"the ledger did not answer within {ANSWER_SECONDS:g} seconds"
                raise LedgerUnavailableError(problem) from None

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            answer = _apart(lambda: asyncio.run(answered()))
        for warning in caught:
            click.echo(f"headgate: warning: {warning.message}", err=True)
        return answer


async def _status_of(tracker: LedgerTracker, scope: str) -> BudgetStatusBody:
    """Return a scope as a service would show it."""
    from headgate.api.budget_report import BudgetReport, status_steps  # noqa: PLC0415
    from headgate.core.budgets.burn_rate import BURN_SECONDS, burn_rates  # noqa: PLC0415
    from headgate.core.text import at_once  # noqa: PLC0415

    status = await tracker.status(scope)
    now = tracker.ledger.now()
    entries = await tracker.journal(scope, since=now - 2 * BURN_SECONDS, limit=MOST_ENTRIES)
    rates = burn_rates(entries, now=now, most=MOST_ENTRIES)
    report = BudgetReport(status=status, rates=rates, waiting={}, now=now)
    return at_once(status_steps(report, status))


def _apart(work: Callable[[], Result]) -> Result:
    """Run in a thread that the process need not wait for: Ctrl-C ends it though a ledger hangs."""
    from concurrent.futures import Future  # noqa: PLC0415  as slow as asyncio, which brings it
    from threading import Thread  # noqa: PLC0415

    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller raises it
            answer.set_exception(error)

    Thread(target=run, name="headgate-budget", daemon=True).start()
    return answer.result()


def _shown(url: str) -> str:
    """Return the name of a ledger without a password: a path, or a URL."""
    from headgate.budgets.connect import sqlite_path  # noqa: PLC0415  slow to load, as asyncio
    from headgate.workflow.budgets import without_password  # noqa: PLC0415

    return str(sqlite_path(url)) if scheme_of(url) in SCHEMES["sqlite"] else without_password(url)


def _check_file(option: str, url: str) -> None:
    from headgate.budgets.connect import sqlite_path  # noqa: PLC0415  slow to load, as asyncio

    path = sqlite_path(url)
    try:
        path.stat()
    except FileNotFoundError:
        problem = f"there is no ledger at {path}; headgate budget set --ledger {path} creates one"
        raise InvalidSettingError(option, problem) from None
    except OSError:
        # Whatever else is wrong with the path, the ledger has the words for it.
        return


def _unknown_budget(scope: str, known: Sequence[BudgetStatusBody]) -> CallerError:
    names = [one.scope or ROOT_NAME for one in known]
    advice = f"Add one with headgate budget set {scope or ROOT_NAME} --limit-usd DOLLARS."
    return unknown_name("budget", scope or ROOT_NAME, names, advice)


# A budget in words: what was spent of what, how fast, and until when it lasts.

ROWS_SHOWN = 50
FAR = datetime.max.replace(tzinfo=UTC)
MOST_ROWS = 1_000
NOT_KNOWN = "not known; nothing is spent steadily enough to tell"
LIST_HEADER = ("scope", "spent", "reserved", "limit", "left", "window", "resets")
LIST_SPARE = ("reserved", "resets", "window", "left")
JOURNAL_HEADER = (
    *("at", "call", "reservation", "scope"),
    *("spent", "reserved", "overrun", "unaccepted", "tokens"),
)
JOURNAL_SPARE = ("unaccepted", "overrun", "tokens", "reserved", "call")


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scope with everything within it, and the limited budgets around it, outermost first."""

    status: BudgetStatusBody
    parents: tuple[BudgetStatusBody, ...] = ()

    @property
    def binding(self) -> list[BudgetStatusBody]:
        """The budgets that bind the scope, innermost first."""
        return [one for one in (self.status, *reversed(self.parents)) if _has_limit(one)]

    @property
    def exhausted_first(self) -> BudgetStatusBody | None:
        """The budget that is used up first, the innermost of several; None if none is."""
        ending = [one for one in self.binding if one.exhausted_at is not None]
        return min(ending, key=lambda one: one.exhausted_at or FAR, default=None)


def report_lines(report: BudgetReport, now: datetime | None = None) -> Iterator[str]:
    """Write a report for people."""
    status, now = report.status, now or datetime.now(UTC)
    yield f"Spent: {_spent(status)}"
    yield f"Reserved: ${status.reserved_usd}"
    if _micro(status.overrun_usd):
        yield f"Overrun: ${status.overrun_usd} of what was spent was never reserved"
    if _unaccepted(status):
        yield f"Unaccepted: {_unaccepted(status)}, claimed beyond a limit; it does not count"
    if _used_tokens(status) or status.reserved_tokens or status.limit_tokens is not None:
        yield f"Tokens: {_tokens(status)}, {status.reserved_tokens:,} reserved"
    if status.burn_measured_seconds:
        yield f"Burn rate: {_rate_line(status)}"
    if status.burn_measured_seconds or report.exhausted_first is not None:
        yield f"Exhausted: {_exhausted(report, now)}"
    if status.window != "none":
        room = "" if status.resets_at is None else f"; more room at {clock_time(status.resets_at)}"
        yield f"Counted: {window_words(status.window)}{room}"
    if status.counted_since is not None:
        yield _not_counted(status.counted_since)
    if status.waiting:
        yield f"Waiting: {tasks_or_calls(status.waiting)}, for room in this budget"
    yield from _breakdown(status)
    if status.is_truncated:
        yield "Some scopes are missing: there are too many. Ask for the status of one within."
    if report.parents:
        yield "Budgets around it:"
        yield from (f"  {one.scope or ROOT_NAME}: {_used(one)}" for one in report.parents)


def list_row(status: BudgetStatusBody) -> tuple[str, ...]:
    """Return one line of a list of budgets."""
    limits = _limit_words(status.limit_usd, status.limit_tokens)
    left = _limit_words(status.remaining_usd, status.remaining_tokens)
    reserved = [f"${status.reserved_usd}"] if _micro(status.reserved_usd) else []
    reserved += [f"{status.reserved_tokens:,} tokens"] if status.reserved_tokens else []
    return (
        status.scope or ROOT_NAME,
        _limit_words(format_usd(_spent_micro(status)).removeprefix("$"), _used_tokens(status))
        if status.limit_tokens is not None
        else format_usd(_spent_micro(status)),
        " and ".join(reserved),
        limits,
        left,
        "" if status.window == "none" else status.window,
        "" if status.resets_at is None else clock_time(status.resets_at),
    )


def journal_row(entry: JournalEntryBody) -> tuple[str, ...]:
    """Give the cells of one change; the same amounts weigh on every ancestor."""
    return (
        clock_time(entry.at),
        entry.call,
        entry.reservation_id,
        ", ".join(_innermost([Scope(one) for one in entry.scopes])),
        _change(entry.spent_usd),
        _change(entry.reserved_usd),
        _change(entry.overrun_usd),
        _change(entry.unaccepted_usd),
        _token_change(entry),
    )


def _micro(usd: str | None) -> int:
    return 0 if usd is None else to_signed_micro_usd(usd, field="usd")


def _has_limit(status: BudgetStatusBody) -> bool:
    return status.limit_usd is not None or status.limit_tokens is not None


def _limited(status: BudgetStatusBody) -> list[BudgetStatusBody]:
    """Return the scope and those within it that have a limit, the outermost first."""
    found = [status] if _has_limit(status) else []
    for child in status.children:
        found += _limited(child)
    return found


def _not_counted(since: datetime) -> str:
    line = f"Not counted: what was spent before {clock_time(since)}"
    return f"{line}; the journal no longer says when that was"


def _limit_words(usd: str | None, tokens: int | None) -> str:
    parts = [] if usd is None else [format_usd(_micro(usd))]
    parts += [] if tokens is None else [f"{tokens:,} tokens"]
    return " and ".join(parts)


def _spent_micro(status: BudgetStatusBody) -> int:
    return _micro(status.spent_usd) + _micro(status.overrun_usd)


def _spent(status: BudgetStatusBody) -> str:
    spent = _spent_micro(status)
    if status.limit_usd is None:
        return format_usd(spent)
    limit = _micro(status.limit_usd)
    return f"{format_usd(spent)} / {format_usd(limit)}{_percent(spent, limit)}"


def _unaccepted(status: BudgetStatusBody) -> str:
    tokens = f"{status.unaccepted_tokens:,} tokens" if status.unaccepted_tokens else ""
    usd = format_usd(_micro(status.unaccepted_usd)) if _micro(status.unaccepted_usd) else ""
    return " and ".join(part for part in (usd, tokens) if part)


def _used(status: BudgetStatusBody) -> str:
    """Name the dollars, and the tokens where they are limited."""
    tokens = "" if status.limit_tokens is None else f", {_tokens(status)} tokens"
    return f"{_spent(status)}{tokens}"


def _tokens(status: BudgetStatusBody) -> str:
    used, limit = _used_tokens(status), status.limit_tokens
    of_limit = "" if limit is None else f" / {limit:,}{_percent(used, limit)}"
    return f"{used:,}{of_limit}"


def _used_tokens(status: BudgetStatusBody) -> int:
    return status.spent_tokens + status.overrun_tokens


def _percent(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


def _rate_line(status: BudgetStatusBody) -> str:
    minutes = max(1, round((status.burn_measured_seconds or 0) / 60))
    per_hour = status.burn_tokens_per_hour
    tokens = f", {per_hour:,} tokens" if per_hour else ""
    usd = format_usd(_micro(status.burn_usd_per_hour))
    return f"{usd}{tokens} an hour, over the last {minutes} min"


def _exhausted(report: BudgetReport, now: datetime) -> str:
    binding = report.binding
    if not binding:
        return "never, there is no limit"
    first = report.exhausted_first
    if first is None or first.exhausted_at is None:
        if not any(one.burn_is_steady for one in binding):
            return NOT_KNOWN
        frees_room = any(one.resets_at is not None for one in binding)
        return "not before the budget resets" if frees_room else "not at that rate"
    of = "" if first.scope == report.status.scope else f", of {first.scope or ROOT_NAME}"
    if first.exhausted_at <= now:
        return f"now{of}"
    length = length_of((first.exhausted_at - now).total_seconds())
    return f"at {clock_time(first.exhausted_at)} at that rate, in {length}{of}"


def _breakdown(status: BudgetStatusBody) -> Iterator[str]:
    by_kind: dict[str, list[BudgetStatusBody]] = {}
    for child in status.children:
        by_kind.setdefault(leaf_kind(Scope(child.scope)), []).append(child)
    for kind, children in by_kind.items():
        yield f"Per-{kind} breakdown:"
        children.sort(key=lambda one: (-_spent_micro(one), one.scope))
        for child in children[:ROWS_SHOWN]:
            yield f"  {_name_within(child.scope, status.scope)}: {_used(child)}"
        if len(children) > ROWS_SHOWN:
            yield f"  and {len(children) - ROWS_SHOWN} more; --json lists them all"


def _name_within(scope: str, outer: str) -> str:
    """Give the bare name of a child, the path of what lies deeper."""
    path = scope.removeprefix(outer).removeprefix("/")
    return path if "/" in path else path.partition(":")[2]


def _innermost(scopes: Sequence[Scope]) -> list[str]:
    """Leave out the scopes that another one of them lies within."""
    inner = [
        scope
        for scope in scopes
        if not any(other != scope and is_within(other, scope) for other in scopes)
    ]
    return [scope or ROOT_NAME for scope in inner]


def _change(usd: str) -> str:
    micro_usd = _micro(usd)
    return f"{'+' if micro_usd > 0 else ''}{format_usd(micro_usd)}" if micro_usd else ""


def _token_change(entry: JournalEntryBody) -> str:
    parts = {
        "spent": entry.spent_tokens,
        "reserved": entry.reserved_tokens,
        "overrun": entry.overrun_tokens,
        "unaccepted": entry.unaccepted_tokens,
    }
    return ", ".join(f"{amount:+,} {name}" for name, amount in parts.items() if amount)


# The commands.

_scope_argument = click.argument("scope", required=False, type=BUDGET)
_session_option = click.option("--session", metavar="NAME", help="Short for session:NAME.")
_reason_option = click.option("--reason", default="", help="Why; the service's audit log keeps it.")


@click.group()
def budget() -> None:
    """Set budgets, see what is spent, correct what is booked.

    The budgets are those of the running service, or of --ledger. SCOPE is a path such as
    project:web or session:eval-1/workflow:w1; root is everything together, and "" in JSON.
    """


@budget.command(
    "set",
    epilog="""\b
Examples:
  headgate budget set project:web --limit-usd 20 --window day
  headgate budget set --session eval-1 --limit-usd 50 --window week@Europe/Berlin
  headgate budget set root --limit-tokens 1000000 --ledger budget.db
""",
)
@_scope_argument
@_session_option
@click.option(
    "--limit-usd",
    metavar="DOLLARS",
    help="The most dollars that may be spent; none removes the limit.",
)
@click.option(
    "--limit-tokens", metavar="N", help="The most tokens that may be used; none removes the limit."
)
@click.option(
    "--window",
    help="When the budget starts anew: none, day, week, month, week@Europe/Berlin or rolling:24h.",
)
@click.option(
    "--reserve",
    type=click.Choice(["strict", "expected", NONE]),
    help="What a call reserves in it: the most that it can cost, or what such calls usually cost.",
)
@where_options
@json_option
def set_limits(
    *,
    where: Where,
    scope: str | None,
    session: str | None,
    limit_usd: str | None,
    limit_tokens: str | None,
    window: str | None,
    reserve: str | None,
    as_json: bool,
) -> None:
    """Set the limits and the window of a scope; an option that you leave out changes nothing.

    A limit stops new work, not running work. Earlier spending inside a new window counts.
    """
    name = _named(scope, session)
    change = _change_of(limit_usd, limit_tokens, window, reserve)
    if reserve is not None and where.ledger is not None:
        raise InvalidSettingError("--reserve", "is for calls through a service; leave it out")
    with opened_books(where, creates=True) as books:
        before = _own(books, name)
        if before is not None and not _has_limit(before) and not _gives_amount(change):
            raise InvalidSettingError("limit", _NO_LIMIT_GIVEN)
        books.set(name, change)
        # What is in force is told, and not what was typed.
        status = books.status(name) if as_json else _own(books, name)
        place = books.place
    problem = mistyped_kind(name)
    if problem and _gives_amount(change) and (before is None or not _is_used(before)):
        click.echo(printable(f"headgate: warning: {problem}"), err=True)
    if as_json:
        print_json(status)
        return
    if status is None or not _has_limit(status):
        click.echo(printable(f"Budget {name or ROOT_NAME} has no limit now, {place}"))
        return
    limits = _budget_words(status)
    click.echo(printable(f"Set budget {name or ROOT_NAME} to {limits}, {place}"))
    if reserve is not None:
        click.echo(f"Calls reserve {_RESERVED[reserve]}")
    if before is None:
        return
    if _has_limit(before) and _budget_words(before) != limits:
        click.echo(f"Before: {_budget_words(before)}")
    if before.window != status.window and (_spent_micro(before) or _used_tokens(before)):
        click.echo(f"Counted in it so far: {_spent_words(status)}")
    if status.counted_since is not None:
        click.echo(_not_counted(status.counted_since))


_RESERVED = {
    "strict": "the most that they can cost",
    "expected": "what such calls usually cost",
    NONE: "what their project says",
}
_NO_LIMIT_GIVEN = "give --limit-usd, --limit-tokens or both; headgate budget delete removes them"


def _change_of(
    limit_usd: str | None, limit_tokens: str | None, window: str | None, reserve: str | None
) -> dict[str, Any]:
    """Read what is to change; `none` removes a limit, or the window."""
    change: dict[str, Any] = {}
    if limit_usd is not None:
        if limit_usd != NONE:
            to_limit_micro_usd(limit_usd, field="--limit-usd")
        change["limit_usd"] = None if limit_usd == NONE else limit_usd
    if limit_tokens is not None:
        if limit_tokens != NONE and not limit_tokens.isdecimal():
            raise InvalidSettingError(
                "--limit-tokens", f"{limit_tokens[:60]!r} is not a whole number of tokens"
            )
        change["limit_tokens"] = None if limit_tokens == NONE else int(limit_tokens)
    if window is not None:
        parse_window(window)
        change["window"] = window
    if reserve is not None:
        change["reserve"] = None if reserve == NONE else reserve
    if not change or not (_gives_amount(change) or window is not None or len(change) == 1):
        raise InvalidSettingError("limit", _NO_LIMIT_GIVEN)
    return change


def _gives_amount(change: Mapping[str, Any]) -> bool:
    return any(change.get(key) is not None for key in ("limit_usd", "limit_tokens"))


def _budget_words(status: BudgetStatusBody) -> str:
    limits = _limit_words(status.limit_usd, status.limit_tokens)
    counted = "" if status.window == NONE else f", counted {window_words(status.window)}"
    return f"{limits}{counted}"


def _spent_words(status: BudgetStatusBody) -> str:
    tokens = "" if status.limit_tokens is None else f" and {_used_tokens(status):,} tokens"
    return f"{format_usd(_spent_micro(status))}{tokens}"


def _unused(books: Books, status: BudgetStatusBody) -> str:
    """Say that a scope is one that nothing is known of; it may be a typing error."""
    if not status.scope or _has_limit(status) or _is_used(status):
        return ""
    unknown = books.unknown_project(status.scope)
    if unknown:
        return unknown
    known = [one.scope for one in _limited(_own(books, "") or status)]
    near = nearest(status.scope, known)
    meant = f"; {did_you_mean(near)}" if near else ""
    return f"nothing was charged to {status.scope}, and it has no budget{meant}"


def _is_used(status: BudgetStatusBody) -> bool:
    """Tell whether something was charged to a scope, or may have been."""
    amounts = (_spent_micro(status), _micro(status.reserved_usd), _used_tokens(status))
    return any(amounts) or bool(status.children)


def _own(books: Books, scope: str) -> BudgetStatusBody | None:
    try:
        return books.status(scope)
    except NotAllowedError:
        # A token that may change budgets need not be one that may read them.
        return None


def _outer(books: Books, scope: Scope) -> BudgetStatusBody | None:
    """Return a scope around another; a token that may see only its own has that instead of root."""
    status = _own(books, scope)
    return status if status is not None and status.scope == scope else None


@budget.command(
    "list",
    epilog="""\b
Examples:
  headgate budget list
  headgate budget list --json | jq -r .scope
  headgate budget list --ledger redis://127.0.0.1:6379/0
""",
)
@where_options
@json_option
def list_budgets(*, where: Where, as_json: bool) -> None:
    """List all budgets with a limit: what is spent, reserved and left.

    Reserved money belongs to calls and tasks in flight. A service also reserves a little money
    ahead for the next calls, and returns it a second after the last call.
    """
    with opened_books(where) as books:
        found, place = _limited(books.status(None)), books.place
    if as_json:
        print_json_lines([msgspec.structs.replace(one, children=[]) for one in found])
    elif found:
        rows = [list_row(one) for one in found[:MOST_ROWS]]
        print_table("Budgets", LIST_HEADER, rows, spare=LIST_SPARE)
        if len(found) > MOST_ROWS:
            click.echo(f"and {len(found) - MOST_ROWS:,} more; --json lists them all")
    else:
        advice = "Add one with headgate budget set SCOPE --limit-usd DOLLARS."
        click.echo(printable(f"headgate: There are no budgets {place}. {advice}"), err=True)


@budget.command(
    epilog="""\b
Examples:
  headgate budget status
  headgate budget status --session eval-2026-04-12
  headgate budget status session:eval-1/workflow:w1 --json
"""
)
@_scope_argument
@_session_option
@where_options
@json_option
def status(*, where: Where, scope: str | None, session: str | None, as_json: bool) -> None:
    """Show how much of its budget a scope has spent, how fast, and the scopes inside it."""
    name = _scope(scope, session)
    with opened_books(where) as books:
        found = books.status(name)
        if as_json:
            print_json(found)
            return
        parents = [_outer(books, outer) for outer in ancestors(Scope(found.scope))[:-1]]
        unknown = _unused(books, found)
    if unknown:
        click.echo(f"headgate: warning: {unknown}", err=True)
    around = tuple(one for one in parents if one is not None and _has_limit(one))
    click.echo("\n".join(report_lines(BudgetReport(status=found, parents=around))))


@budget.command(
    epilog="""\b
Examples:
  headgate budget delete project:web
  headgate budget delete --session eval-1 --ledger budget.db
"""
)
@_scope_argument
@_session_option
@where_options
@json_option
def delete(*, where: Where, scope: str | None, session: str | None, as_json: bool) -> None:
    """Delete the limits of a scope; what was spent stays in the journal.

    A budget of the settings file stays deleted until headgate budget reset, or until the file
    changes that budget.
    """
    name = _named(scope, session)
    with opened_books(where) as books:
        of_file = books.delete(name)
        place = books.place
    if as_json:
        print_json({"scope": name, "deleted": True})
        return
    line = f"Deleted budget {name or ROOT_NAME} {place}: the scope has no limit now;"
    click.echo(printable(f"{line} what was spent stays in the journal"))
    if of_file:
        line = f"The settings file has {of_file}; this overrides it."
        click.echo(printable(f"{line} headgate budget reset {name or ROOT_NAME} brings it back"))


@budget.command(
    epilog="""\b
Examples:
  headgate budget reset project:web
"""
)
@click.argument("scope", type=BUDGET)
@connection_options
@json_option
def reset(*, scope: str, connection: Connection, as_json: bool) -> None:
    """Reset a budget to its values in the settings file, after set or delete."""
    name = _scope(scope, None) or ""
    with connect(connection) as client:
        books = ServiceBooks(client)
        books.reset(name)
        status = books.status(name)
    if as_json:
        print_json(status)
        return
    limits = _budget_words(status) if _has_limit(status) else "no limit"
    line = f"Reset budget {name or ROOT_NAME}: the settings file gives it {limits}, {books.place}"
    click.echo(printable(line))


@budget.command(
    epilog="""\b
Examples:
  headgate budget journal --session eval-1
  headgate budget journal --limit 1000 --json | jq -r .reservationId
"""
)
@_scope_argument
@_session_option
@click.option(
    "--limit",
    metavar="N",
    default=50,
    show_default=True,
    type=click.IntRange(1, MOST_ENTRIES),
    help="How many changes to show.",
)
@where_options
@json_option
def journal(
    *, where: Where, scope: str | None, session: str | None, limit: int, as_json: bool
) -> None:
    """Show the latest changes of a scope, newest first."""
    name = _scope(scope, session)
    with opened_books(where) as books:
        entries = books.journal(name, limit)
    if as_json:
        print_json_lines(entries)
        return
    title = f"Journal of {name or ROOT_NAME}: the latest {len(entries)} changes"
    rows = [journal_row(entry) for entry in entries]
    print_table(title, JOURNAL_HEADER, rows, spare=JOURNAL_SPARE)


@budget.command(
    epilog="""\b
Examples:
  headgate budget release 4f6d2b0c --yes --reason "the provider billed nothing"
"""
)
@click.argument("reservation_id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@_reason_option
@where_options
@json_option
def release(*, where: Where, reservation_id: str, yes: bool, reason: str, as_json: bool) -> None:
    """Release a reservation: give its money back to the budget.

    Do this only if the provider charged nothing. headgate budget journal shows the ID.
    """
    if not yes and not _is_confirmed(reservation_id):
        click.echo("Nothing was released")
        return
    with opened_books(where) as books:
        books.release(reservation_id, reason)
        place = books.place
    if as_json:
        print_json({"id": reservation_id, "state": "released"})
    else:
        click.echo(printable(f"Released {reservation_id} {place}"))


@budget.command(
    epilog="""\b
Examples:
  headgate budget extend 4f6d2b0c --for 10m
"""
)
@click.argument("reservation_id", metavar="ID")
@click.option(
    "--for", "seconds", metavar="TIME", type=duration, required=True, help="How long: 10m, 2h."
)
@_reason_option
@where_options
@json_option
def extend(
    *, where: Where, reservation_id: str, seconds: float, reason: str, as_json: bool
) -> None:
    """Extend the lease of a reservation, counted from now; it never ends sooner than before.

    headgate budget journal shows the ID.
    """
    with opened_books(where) as books:
        until = books.extend(reservation_id, seconds, reason)
        place = books.place
    if as_json:
        print_json({"id": reservation_id, "leaseUntil": until})
    else:
        click.echo(printable(f"Extended {reservation_id} until {clock_time(until)}, {place}"))


@budget.command(
    epilog="""\b
Examples:
  headgate budget adjust root --usd=-999001 --reason "an agent's typing error"
  headgate budget adjust root --accept --reason "it is on the invoice"
  headgate budget adjust project:web --reject --usd 12.50 --reason "it is not on the invoice"
"""
)
@click.argument("scope", type=BUDGET)
@click.option(
    "--usd", metavar="DOLLARS", help="The dollars to add; a negative amount is subtracted."
)
@click.option(
    "--tokens", type=int, metavar="N", help="The tokens to add; a negative amount is subtracted."
)
@click.option(
    "--accept", is_flag=True, help="Accept tenants' claims: all, or only --usd or --tokens."
)
@click.option(
    "--reject", is_flag=True, help="Reject tenants' claims: all, or only --usd or --tokens."
)
@_reason_option
@click.option("--id", "adjustment_id", help="Your own id; a repeated id changes nothing.")
@where_options
@json_option
def adjust(
    *,
    where: Where,
    scope: str,
    usd: str | None,
    tokens: int | None,
    accept: bool,
    reject: bool,
    reason: str,
    adjustment_id: str | None,
    as_json: bool,
) -> None:
    """Adjust the booked amounts of one scope, or accept or reject its tenants' claims.

    The command never subtracts more than is booked. A service writes who did it and why to its
    audit log.
    """
    from headgate.budgets.tracker import new_reservation_id  # noqa: PLC0415  slow to load

    name = _scope(scope, None) or ""
    if accept and reject:
        raise InvalidSettingError("--accept and --reject", "choose one of them")
    # Where nothing is claimed, that is said; with a name of one's own it may have been done before.
    decides = (accept or reject) and usd is None and tokens is None
    decides = decides and adjustment_id is None and not as_json
    with opened_books(where) as books:
        before = _own(books, name) if decides else None
        if before is not None and not _unaccepted(before):
            line = f"Nothing is claimed and not accepted in {name or ROOT_NAME}"
            click.echo(f"{line}; nothing was changed")
            return
        changed = books.adjust(
            adjustment_id or new_reservation_id(),
            name,
            action="accept" if accept else "reject" if reject else "adjust",
            usd=usd,
            tokens=tokens,
            reason=reason,
        )
        place = books.place
    if as_json:
        print_json(changed)
        return
    line = f"Adjusted {name or ROOT_NAME} {place}: ${changed.spent_usd} spent,"
    claimed = changed.unaccepted_usd or "0.00"
    click.echo(f"{line} ${changed.overrun_usd} overrun, ${claimed} claimed and not accepted")


@budget.command(
    epilog="""\b
Examples:
  headgate budget resume project:web
"""
)
@click.argument("scope", type=BUDGET)
@connection_options
@json_option
def resume(*, scope: str, connection: Connection, as_json: bool) -> None:
    """Open a closed budget now, instead of when it resets.

    headgate closures lists closed budgets. A budget that still has no room closes again.
    """
    name = _scope(scope, None) or ""
    with connect(connection) as client:
        try:
            answer: Any = client.open("budget", name)
        except RequestRefusedError as error:
            if error.code != "not_found":
                raise
            raise _unknown_budget(name, _limited(client.budget_status(""))) from None
    if as_json:
        print_json(answer)
    else:
        line = f"Budget {name or ROOT_NAME} is open until it has no room; see headgate closures"
        click.echo(printable(line))


def _named(scope: str | None, session: str | None) -> str:
    name = _scope(scope, session)
    if name is None:
        raise InvalidScopeError("scope", "name one, or root for everything together")
    return name


def _scope(scope: str | None, session: str | None) -> str | None:
    """Return the scope that was named, None if none was."""
    if scope is not None and session is not None:
        raise InvalidScopeError("scope", "give a scope or --session, not both")
    if session is not None:
        return parse_scope(f"session:{session}", field="--session")
    if scope is None:
        return None
    return "" if scope == ROOT_NAME else parse_scope(scope)


def _is_confirmed(reservation_id: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidSettingError("--yes", "is needed where nobody can be asked")
    click.echo("Release it only if the provider charged nothing for this reservation.")
    return click.confirm(f"Release {reservation_id}?")
