"""`headgate budget`: set limits, see what is spent, read the journal, put right what is wrong."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from headgate.budgets.connect import EXAMPLES, SCHEMES, URL_VARIABLE, scheme_of
from headgate.budgets.status import ScopeStatus
from headgate.cli.connection import Connection, connect, data_directory
from headgate.cli.output import print_json, print_table
from headgate.core.budgets.burn_rate import BurnRate, burn_rate, exhausted_at, last_read_at
from headgate.core.budgets.ledger import MAX_ACCOUNTS, Adjustment, JournalEntry
from headgate.core.budgets.reservations import Delta
from headgate.core.budgets.scopes import Scope, ancestors, is_within, leaf_kind, parse_scope
from headgate.core.budgets.windows import window_words
from headgate.core.money import format_usd, plain_usd
from headgate.errors import InvalidScopeError, InvalidSettingError, LedgerUnavailableError, utc_time

if TYPE_CHECKING:
    from headgate.budgets.tracker import LedgerTracker


# A budget in words: what was spent of what, how fast, and until when it lasts.

ROWS_SHOWN = 50
NOT_KNOWN = "not known, there is no steady spending to go by"
JOURNAL_HEADER = (
    *("at", "call", "reservation", "scope"),
    *("spent", "reserved", "overrun", "unaccepted", "tokens"),
)


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """A budget around a scope, and how fast everything in it spends."""

    status: ScopeStatus
    rate: BurnRate


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scope with everything within it, the budgets around it, and how fast it spends."""

    status: ScopeStatus
    parents: tuple[Parent, ...]
    rate: BurnRate
    now: float

    @property
    def exhausted_at(self) -> float | None:
        """When the first of the budgets that bind the scope is used up, None if none is."""
        return min((when for when, _ in self._ends()), default=None)

    @property
    def exhausted_first(self) -> Scope | None:
        """The scope whose budget is used up first, the innermost of several."""
        return min(self._ends(), key=lambda end: end[0], default=(0.0, None))[1]

    def _ends(self) -> Iterator[tuple[float, Scope]]:
        own = Parent(status=self.status, rate=self.rate)
        for one in (own, *reversed(self.parents)):
            when = _end(one.status, one.rate, self.now)
            if when is not None:
                yield when, one.status.scope

    def as_keys(self) -> dict[str, object]:
        """Give the keys of the status, and after them those of the rate."""
        return {
            **msgspec.structs.asdict(self.status),
            "burn_micro_usd_per_hour": self.rate.micro_usd_per_hour,
            "burn_tokens_per_hour": self.rate.tokens_per_hour,
            "burn_measured_seconds": self.rate.measured_seconds,
            "exhausted_at": self.exhausted_at,
        }


def report_lines(report: BudgetReport) -> Iterator[str]:
    """Write a report for people."""
    status = report.status
    yield f"Spent: {_spent(status)}"
    yield f"Reserved: {format_usd(status.reserved_micro_usd)}"
    if status.overrun_micro_usd:
        overrun = format_usd(status.overrun_micro_usd)
        yield f"Overrun: {overrun} of what was spent was never reserved"
    if status.unaccepted_micro_usd or status.unaccepted_tokens:
        yield f"Unaccepted: {_unaccepted(status)}, claimed beyond a limit; it does not count"
    if _used_tokens(status) or status.reserved_tokens or status.limit_tokens is not None:
        yield f"Tokens: {_tokens(status)}, {status.reserved_tokens:,} reserved"
    if report.rate.measured_seconds:
        yield f"Burn rate: {_rate_line(report.rate)}"
    if report.rate.measured_seconds or report.exhausted_at is not None:
        yield f"Exhausted: {_exhausted(report)}"
    if status.window != "none":
        resets = (
            "" if status.resets_at is None else f", next frees room at {utc_time(status.resets_at)}"
        )
        yield f"Counted: {window_words(status.window)}{resets}"
    yield from _breakdown(status)
    if status.is_truncated:
        most = f"{MAX_ACCOUNTS:,} scopes"
        yield f"Only {most} were read; ask for the status of one within to see more"
    if report.parents:
        yield "Budgets around it:"
        yield from (f"  {one.scope or '(root)'}: {_used(one)}" for one in _statuses(report))


def has_limit(status: ScopeStatus) -> bool:
    """Whether anything limits the scope itself."""
    return status.limit_micro_usd is not None or status.limit_tokens is not None


def journal_row(entry: JournalEntry) -> tuple[str, ...]:
    """Give the cells of one change; the same amounts weigh on every ancestor."""
    delta = entry.delta
    return (
        utc_time(entry.at),
        entry.call.value,
        entry.reservation_id,
        ", ".join(_innermost([charge.scope for charge in entry.charges])),
        _change(delta.spent_micro_usd),
        _change(delta.reserved_micro_usd),
        _change(delta.overrun_micro_usd),
        _change(delta.unaccepted_micro_usd),
        _token_change(delta),
    )


def _spent(status: ScopeStatus) -> str:
    spent = status.spent_micro_usd + status.overrun_micro_usd
    limit = status.limit_micro_usd
    if limit is None:
        return format_usd(spent)
    return f"{format_usd(spent)} / {format_usd(limit)}{_percent(spent, limit)}"


def _unaccepted(status: ScopeStatus) -> str:
    tokens = f"{status.unaccepted_tokens:,} tokens" if status.unaccepted_tokens else ""
    usd = format_usd(status.unaccepted_micro_usd) if status.unaccepted_micro_usd else ""
    return " and ".join(part for part in (usd, tokens) if part)


def _used(status: ScopeStatus) -> str:
    """Name the dollars, and the tokens where they are limited."""
    tokens = "" if status.limit_tokens is None else f", {_tokens(status)} tokens"
    return f"{_spent(status)}{tokens}"


def _tokens(status: ScopeStatus) -> str:
    used, limit = _used_tokens(status), status.limit_tokens
    of_limit = "" if limit is None else f" / {limit:,}{_percent(used, limit)}"
    return f"{used:,}{of_limit}"


def _used_tokens(status: ScopeStatus) -> int:
    return status.spent_tokens + status.overrun_tokens


def _percent(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


def _rate_line(rate: BurnRate) -> str:
    minutes = max(1, round(rate.measured_seconds / 60))
    tokens = f", {rate.tokens_per_hour:,} tokens" if rate.tokens_per_hour else ""
    return f"{format_usd(rate.micro_usd_per_hour)}{tokens} an hour, over the last {minutes} min"


def _exhausted(report: BudgetReport) -> str:
    when = report.exhausted_at
    binding = [one for one in (report.status, *_statuses(report)) if has_limit(one)]
    if not binding:
        return "never, there is no limit"
    if when is None:
        if not _has_pace(report):
            return NOT_KNOWN
        frees_room = any(one.resets_at is not None for one in binding)
        return "not before room is freed" if frees_room else "not at that rate"
    first = report.exhausted_first
    of = "" if first == report.status.scope else f", of {first or '(root)'}"
    if when <= report.now:
        return f"now{of}"
    return f"at {utc_time(when)} at that rate, in {_span(when - report.now)}{of}"


def _has_pace(report: BudgetReport) -> bool:
    """Whether any of the budgets that bind the scope has a rate that an end can be told by."""
    own = Parent(status=report.status, rate=report.rate)
    return any(one.rate.is_steady for one in (own, *report.parents) if has_limit(one.status))


def _statuses(report: BudgetReport) -> list[ScopeStatus]:
    return [one.status for one in report.parents]


def _end(status: ScopeStatus, rate: BurnRate, now: float) -> float | None:
    return exhausted_at(
        rate,
        remaining_micro_usd=status.remaining_micro_usd,
        remaining_tokens=status.remaining_tokens,
        now=now,
        resets_at=status.resets_at,
    )


def _breakdown(status: ScopeStatus) -> Iterator[str]:
    by_kind: dict[str, list[ScopeStatus]] = {}
    for child in status.children:
        by_kind.setdefault(leaf_kind(child.scope), []).append(child)
    for kind, children in by_kind.items():
        yield f"Per-{kind} breakdown:"
        children.sort(key=lambda one: (-one.spent_micro_usd - one.overrun_micro_usd, one.scope))
        for child in children[:ROWS_SHOWN]:
            yield f"  {_name_within(child.scope, status.scope)}: {_used(child)}"
        if len(children) > ROWS_SHOWN:
            yield f"  and {len(children) - ROWS_SHOWN} more; --json lists them all"


def _name_within(scope: Scope, outer: Scope) -> str:
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
    return [scope or "(root)" for scope in inner]


def _change(micro_usd: int) -> str:
    if not micro_usd:
        return ""
    return f"{'+' if micro_usd > 0 else ''}{format_usd(micro_usd)}"


def _token_change(delta: Delta) -> str:
    parts = {
        "spent": delta.spent_tokens,
        "reserved": delta.reserved_tokens,
        "overrun": delta.overrun_tokens,
        "unaccepted": delta.unaccepted_tokens,
    }
    return ", ".join(f"{amount:+,} {name}" for name, amount in parts.items() if amount)


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"  # noqa: PLR2004


# Which ledger a command asks: the options that say so, and the default when none does.
#
# Rules: two options that contradict each other are refused, never ranked; and a command that only
# reads creates no ledger, since a path with a mistake in it would show that nothing was spent.

Result = TypeVar("Result")

ANSWER_SECONDS = 30.0
NOTHING = ""
"""What names the ledger that is asked when nobody names one."""

_OPTIONS = (
    click.option("--tracker", type=click.Choice(list(SCHEMES)), help="What keeps the ledger."),
    click.option("--url", help=f"Where the ledger is.  [default: {URL_VARIABLE}, else SQLite]"),
    click.option("--redis-url", help="The same, for Redis or Valkey."),
    click.option("--postgres-url", help="The same, for PostgreSQL."),
    click.option("--sqlite-path", help="The same, for an SQLite file."),
)


class LedgerOptions:
    """The options of a command that say where the ledger is."""

    def __init__(
        self,
        tracker: str | None,
        url: str | None,
        redis_url: str | None,
        postgres_url: str | None,
        sqlite_path: str | None,
    ) -> None:
        self.tracker = tracker
        sqlite_url = f"sqlite:///{sqlite_path}" if sqlite_path else sqlite_path
        self.urls = {
            "--url": url,
            "--redis-url": redis_url,
            "--postgres-url": postgres_url,
            "--sqlite-path": sqlite_url,
        }

    @property
    def service(self) -> str | None:
        """The address of a service that is to do it, None if a ledger is named."""
        url = self.urls["--url"]
        return url if url and scheme_of(url) in ("http", "https") else None

    def url(self, *, creates: bool) -> str:
        """Return the URL of the ledger, or say what is wrong with the options.

        Unless it may be created, a file has to be there.
        """
        option, url = self._named()
        self._check(option, url)
        if not creates and scheme_of(url) in SCHEMES["sqlite"]:
            _check_file(option, url)
        return url

    def _named(self) -> tuple[str, str]:
        """Return the URL, and what names it: an option, the environment, or nothing."""
        given = {option: url for option, url in self.urls.items() if url is not None}
        if len(given) > 1:
            raise InvalidSettingError(" and ".join(given), "name one ledger; leave out the others")
        if not given:
            return self._default()
        option, url = next(iter(given.items()))
        if not url.strip():
            # An unset variable of a script, most likely; the default would be another ledger.
            raise InvalidSettingError(option, "is empty; name a ledger, or leave the option out")
        return option, url

    def _default(self) -> tuple[str, str]:
        named = os.environ.get(URL_VARIABLE, "")
        if named and (self.tracker is None or scheme_of(named) in SCHEMES[self.tracker]):
            return URL_VARIABLE, named
        if self.tracker == "local":
            return NOTHING, "memory:"
        if self.tracker in (None, "sqlite"):
            return NOTHING, f"sqlite:///{data_directory() / 'budget.db'}"
        raise InvalidSettingError("--tracker", f"{self.tracker} needs --{self.tracker}-url")

    def _check(self, option: str, url: str) -> None:
        scheme = scheme_of(url)
        if scheme in SCHEMES["local"]:
            problem = "a local budget lives in the memory of one process, so a command has nothing"
            advice = "to see or to set; use sqlite, redis or postgres"
            raise InvalidSettingError("--tracker", f"{problem} {advice}")
        kind = option.removeprefix("--").partition("-")[0]
        if kind in EXAMPLES and scheme not in SCHEMES[kind]:
            advice = f"write one as {EXAMPLES[kind]}"
            raise InvalidSettingError(option, f"{scheme[:20]!r} is not a URL of {kind}; {advice}")
        if self.tracker is not None and scheme not in SCHEMES[self.tracker]:
            problem = f"{scheme[:20]!r} is not a URL of {self.tracker}"
            raise InvalidSettingError(option, f"{problem}; give one, or leave out --tracker")


def ledger_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give a command the options that name a ledger, as one argument `ledger`."""

    def run(
        *,
        tracker: str | None,
        url: str | None,
        redis_url: str | None,
        postgres_url: str | None,
        sqlite_path: str | None,
        **others: object,
    ) -> Result:
        ledger = LedgerOptions(tracker, url, redis_url, postgres_url, sqlite_path)
        return command(ledger=ledger, **others)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    decorated: Callable[..., Result] = run
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


def ask(
    ledger: LedgerOptions,
    question: Callable[[LedgerTracker], Awaitable[Result]],
    *,
    creates: bool = False,
) -> Result:
    """Open the ledger, ask it one question, and close it; `creates` makes one where none is."""
    import asyncio  # noqa: PLC0415  slow to load, and not needed to print a command's help

    from headgate.budgets.connect import connect_budget  # noqa: PLC0415

    tracker = connect_budget(ledger.url(creates=creates))

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


def _check_file(option: str, url: str) -> None:
    from headgate.budgets.connect import sqlite_path  # noqa: PLC0415  slow to load, as asyncio

    path = sqlite_path(url)
    try:
        path.stat()
    except FileNotFoundError:
        _refuse_to_create(option, path)
    except OSError:
        # Whatever else is wrong with the path, the ledger has the words for it.
        return


def _refuse_to_create(option: str, path: Path) -> None:
    problem = f"there is no ledger at {path}; headgate budget set creates one"
    if option != NOTHING:
        raise InvalidSettingError(option, problem)
    line = f"no budget was set yet: {problem}"
    raise LedgerUnavailableError(line)


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
@ledger_options
def set_limits(
    *,
    ledger: LedgerOptions,
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
        ledger,
        lambda tracker: tracker.set_budget(name, limit_usd, limit_tokens, window),
        creates=True,
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
@ledger_options
def status(*, ledger: LedgerOptions, scope: str | None, session: str | None, as_json: bool) -> None:
    """Print what a scope has spent of its budget, and what lies within it."""
    name = _scope(scope, session) or ""
    report = ask(ledger, lambda tracker: _report(tracker, name))
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
@ledger_options
def journal(
    *, ledger: LedgerOptions, scope: str | None, session: str | None, limit: int, as_json: bool
) -> None:
    """Print the latest changes of a scope, newest first."""
    name = _scope(scope, session) or ""

    async def read(tracker: LedgerTracker) -> Sequence[JournalEntry]:
        return await tracker.journal(name, limit=limit)

    entries = ask(ledger, read)
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
@ledger_options
def release(*, ledger: LedgerOptions, reservation_id: str, yes: bool) -> None:
    """Give the money of a reservation back.

    This says that nothing was charged for it; what was charged is to be committed instead.
    """
    if not yes and not _is_confirmed(reservation_id):
        click.echo("Nothing was released")
        return
    ask(ledger, lambda tracker: tracker.release(reservation_id))
    click.echo(f"Released {reservation_id}")


@budget.command(
    epilog="""\b
Examples:
  headgate budget adjust root --usd=-999001 --reason "an agent's typing error"
  headgate budget adjust root --accept --url http://127.0.0.1:7420 --reason "seen on the invoice"
  headgate budget adjust root --reject --data ./data --reason "not on the invoice"
  headgate budget adjust project:web --reject --usd 12.50
"""
)
@click.argument("scope")
@click.option("--usd", metavar="DOLLARS", help="What to add; a negative amount is taken away.")
@click.option("--tokens", type=int, help="The same, in tokens.")
@click.option("--accept", is_flag=True, help="Count what tenants claim, all or so much.")
@click.option("--reject", is_flag=True, help="Drop what tenants claim, all or so much.")
@click.option("--reason", default="", help="Why, for the audit log of a service.")
@click.option("--id", "adjustment_id", help="A name of your own: the same again changes nothing.")
@click.option("--token", help="Who asks a service.  [default: HEADGATE_TOKEN]")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A service's data directory: its address and token are there.",
)
@_json_option
@ledger_options
def adjust(
    *,
    ledger: LedgerOptions,
    scope: str,
    usd: str | None,
    tokens: int | None,
    accept: bool,
    reject: bool,
    reason: str,
    adjustment_id: str | None,
    token: str | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Change what is booked in one scope, or decide about what tenants claim there.

    Never more is taken away than is booked. With --url http://… or --data a service does it, and
    notes who did and why.
    """
    from headgate.budgets.tracker import new_reservation_id  # noqa: PLC0415  slow to load

    name = _scope(scope, None) or ""
    if accept and reject:
        raise InvalidSettingError("--accept and --reject", "choose one of them")
    call = Adjustment.ACCEPT if accept else Adjustment.REJECT if reject else Adjustment.ADJUST
    chosen_id = adjustment_id or new_reservation_id()
    service = ledger.service
    if data is not None and service is None and any(ledger.urls.values()):
        raise InvalidSettingError("--data", "names a service; leave out the ledger beside it")
    if service is not None or data is not None:
        with connect(Connection(service, token, data)) as client:
            body = client.adjust_budget(
                chosen_id, name, action=call.value, usd=usd, tokens=tokens, reason=reason
            )
        if as_json:
            print_json(body)
        else:
            _tell(name, body.spent_usd, body.overrun_usd, body.unaccepted_usd or "0.00")
        return

    async def change(tracker: LedgerTracker) -> ScopeStatus:
        given = f"adjust:{chosen_id}"
        return await tracker.adjust(name, usd, tokens=tokens, call=call, adjustment_id=given)

    changed = ask(ledger, change)
    if as_json:
        print_json(changed)
        return
    amounts = (changed.spent_micro_usd, changed.overrun_micro_usd, changed.unaccepted_micro_usd)
    _tell(name, *map(plain_usd, amounts))


def _tell(scope: str, spent: str, overrun: str, claimed: str) -> None:
    line = f"Adjusted {scope or ROOT_NAME}: ${spent} spent, ${overrun} overrun"
    click.echo(f"{line}, ${claimed} claimed and not accepted")


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
