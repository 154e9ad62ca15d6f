"""The budgets of a run: its scopes, their limits, and which books they are kept in.

The scopes nest in the order of the file, the workflow last; tasks are charged to the innermost.
Rule: a limit that others share is founded, never replaced. Only the limit of the workflow's own
scope is set anew, and only by somebody who says so when a run is resumed. A resume has founded its
limits before: whatever is in force by then holds, unless this very call says an amount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from headgate.core.budgets.accounts import Limit, check_founded
from headgate.core.budgets.scopes import MAX_PART_LENGTH, Scope, depth, leaf_kind, parse_scope
from headgate.core.money import MicroUsd, plain_usd
from headgate.errors import (
    CallerError,
    InvalidScopeError,
    InvalidSettingError,
    WorkflowError,
)
from headgate.http_headers import SECRET_NAME
from headgate.ledger import Ledger
from headgate.ledgers.schemes import EXAMPLES, SCHEMES, URL_VARIABLE, scheme_of
from headgate.redaction import HIDDEN
from headgate.runs.backend import Money
from headgate.runs.kept.record import RunRecord, RunScope
from headgate.runs.options import RunOptions, Tracker
from headgate.workflow.texts import EnvPlace, Text
from headgate.workflow.workflow import Workflow

SESSION = "session"
SHARED_FILE = "budget.db"
"""The books that runs of one data directory share; `headgate budget` asks the same file."""


ChangeCommand = Callable[[str, str], str]
"""Returns the command that sets the limit of a scope to so many dollars."""


class FoundsLimits(Protocol):
    """The part of a ledger that founds limits, or says which would be in force."""

    async def found_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Return the limit that is in force; see `headgate.ledger.Ledger`."""


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps the books of a run; `url` is None where its own store does.

    The URL may have a password in it: it is for connecting, and `address` is for everybody else.
    """

    tracker: Tracker
    url: str | None = None

    def __repr__(self) -> str:
        return f"Books({self.tracker!r}, {self.address!r})"

    @property
    def address(self) -> str:
        """Where the books are, without a password; empty for the run's own store."""
        return "" if self.url is None else _without_password(self.url)


def run_scopes(
    workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> tuple[RunScope, ...]:
    """Return the scopes of a run from the outermost to the workflow's own, each as a whole path."""
    parts = _session_option(workflow, options)
    for index, scope in enumerate(workflow.scopes):
        if scope.name != SESSION or options.session_id is None:
            said = _Said(f"config.budget_scopes[{index}].key", workflow.file, scope.line)
            part = _part(scope.name, _filled(scope.key, environ, said), said)
            limit = _session_limit(scope.name, scope.micro_usd, options)
            parts.append((part, limit, said.key))
    own = workflow.micro_usd if options.micro_usd is None else options.micro_usd
    parts.append((f"workflow:{workflow.name}", own, "name"))
    return _nested(parts)


def choose_books(
    scopes: Sequence[RunScope], options: RunOptions, environ: Mapping[str, str]
) -> Books:
    """Return what keeps the books of a new run.

    Scopes around the workflow are shared by nature, so their books are shared unless told
    otherwise; a workflow alone keeps its own.
    """
    option, url = _named_url(options, environ)
    tracker = options.tracker
    if url is not None:
        return Books(tracker=_tracker_of(option, url, tracker), url=url)
    if tracker in ("redis", "postgres"):
        problem = f"{tracker} needs --budget-{tracker}-url or {URL_VARIABLE}"
        raise InvalidSettingError("--budget-tracker", problem)
    if tracker == "sqlite" or (tracker is None and len(scopes) > 1):
        return Books(tracker="sqlite", url=f"sqlite:///{options.data.absolute() / SHARED_FILE}")
    return Books(tracker="local")


def books_again(record: RunRecord, options: RunOptions, environ: Mapping[str, str]) -> Books:
    """Return the books of a run that is there, or say that those which are named are others.

    What was spent is known to the first books only, so a run never goes on with others.
    """
    if record.tracker in (None, "local"):
        return Books(tracker="local")
    kept = msgspec.structs.replace(options, tracker=record.tracker)
    option, url = _named_url(kept, environ)
    if url is None:
        if HIDDEN in record.books:
            problem = f"the address {record.books} was kept without its password"
            advice = f"give --budget-{record.tracker}-url or set {URL_VARIABLE}"
            raise InvalidSettingError("--budget-tracker", f"{problem}; {advice}")
        return Books(tracker=record.tracker, url=record.books)
    books = Books(tracker=_tracker_of(option, url, record.tracker), url=url)
    if books.address != record.books:
        problem = f"names {books.address}, and the books of the run are at {record.books}"
        raise InvalidSettingError(option, f"{problem}; name these, or leave it out")
    return books


def limits_of(scopes: Sequence[RunScope]) -> dict[Scope, Limit]:
    """Return the limits that a run says its scopes have."""
    return {
        Scope(one.scope): Limit(limit_micro_usd=MicroUsd(one.micro_usd))
        for one in scopes
        if one.micro_usd is not None
    }


def with_own_limit(scopes: Sequence[RunScope], micro_usd: int | None) -> tuple[RunScope, ...]:
    """Return the scopes with another limit of the workflow's own; None leaves it as it is."""
    own = scopes[-1]
    if micro_usd is None or micro_usd == own.micro_usd:
        return tuple(scopes)
    return (*scopes[:-1], msgspec.structs.replace(own, micro_usd=micro_usd))


def scopes_again(record: RunRecord, options: RunOptions) -> tuple[RunScope, ...]:
    """Return the scopes of a run that is resumed, with the amounts that are said now."""
    scopes = with_own_limit(record.scopes, options.micro_usd)
    if options.session_micro_usd is None:
        return scopes
    return tuple(
        msgspec.structs.replace(one, micro_usd=options.session_micro_usd)
        if _is_session(one, scopes)
        else one
        for one in scopes
    )


def said_by(scopes: Sequence[RunScope], options: RunOptions) -> list[str | None]:
    """Return for each scope the option that says its amount in this call; None is no option."""
    own = None if options.micro_usd is None else "--budget-usd"
    session = None if options.session_micro_usd is None else "--budget-session-limit"
    return [
        *(session if _is_session(one, scopes) else None for one in scopes[:-1]),
        own,
    ]


async def found_limits(
    ledger: FoundsLimits,
    scopes: Sequence[RunScope],
    options: RunOptions,
    *,
    change: ChangeCommand | None = None,
    is_resumed: bool = False,
) -> tuple[RunScope, ...]:
    """Set the limits that are not there, and return the scopes with those that are in force.

    One that differs raises `BudgetMismatchError`, with how to `change` it. A window is a
    difference, too: a file says what is spent at most, not how much a day. Whoever wants such a
    budget leaves the amount out of the file. A resume compares only what options say now.
    """
    in_force: list[RunScope] = []
    for one, option in zip(scopes, said_by(scopes, options), strict=True):
        for scope, limit in limits_of([one]).items():
            found = await ledger.found_limit(scope, limit)
            source = option or (None if is_resumed else "the file")
            if source is not None:
                how = change(scope, plain_usd(one.micro_usd or 0)) if change else ""
                check_founded(scope, in_force=found, wanted=limit, source=source, change=how)
            in_force.append(msgspec.structs.replace(one, micro_usd=found.limit_micro_usd))
        if one.micro_usd is None:
            in_force.append(one)
    return tuple(in_force)


async def money_of(ledger: Ledger, scopes: Sequence[RunScope]) -> list[Money]:
    """Return how the scopes of a run stand, outermost first."""
    return [await _money(ledger, Scope(one.scope)) for one in scopes]


async def _money(ledger: Ledger, scope: Scope) -> Money:
    account = (await ledger.accounts(scope, most=1))[0]
    balance, limit = account.balance, account.limit
    return Money(
        scope=scope,
        spent_micro_usd=balance.spent_micro_usd + balance.overrun_micro_usd,
        reserved_micro_usd=balance.reserved_micro_usd,
        limit_micro_usd=None if limit is None else limit.limit_micro_usd,
    )


class _Said(NamedTuple):
    """Where something is said: an option, or a key in a line of the file."""

    key: str
    file: str = ""
    line: int | None = None

    def refused(self, problem: str) -> CallerError:
        """Return the error that names this place."""
        if not self.file:
            return InvalidSettingError(self.key, problem)
        return WorkflowError(self.file, problem, line=self.line, key=self.key)


_Part = tuple[str, int | None, str]
"""A part of a path, the limit up to there, and the field that says so."""


def _session_option(workflow: Workflow, options: RunOptions) -> list[_Part]:
    in_file = [scope for scope in workflow.scopes if scope.name == SESSION]
    if options.session_id is None:
        if options.session_micro_usd is not None and not in_file:
            problem = "there is no session that it could limit; give --budget-session-id too"
            raise InvalidSettingError("--budget-session-limit", problem)
        return []
    written = in_file[0].micro_usd if in_file else None
    limit = _session_limit(SESSION, written, options)
    said = _Said("--budget-session-id")
    return [(_part(SESSION, options.session_id, said), limit, said.key)]


def _session_limit(name: str, written: int | None, options: RunOptions) -> int | None:
    is_said = name == SESSION and options.session_micro_usd is not None
    return options.session_micro_usd if is_said else written


def _part(kind: str, name: str, said: _Said) -> str:
    """Return one part of a path: a name with a slash would put the limit on another scope."""
    part = f"{kind}:{name}"
    try:
        is_one = depth(parse_scope(part)) == 1
    except InvalidScopeError:
        is_one = False
    if not is_one:
        problem = f"{name[:60]!r} is no name of a scope; write letters, digits and . _ @ + -"
        problem += f", at most {MAX_PART_LENGTH - len(kind) - 1} of them"
        raise said.refused(problem)
    return part


def _is_session(one: RunScope, scopes: Sequence[RunScope]) -> bool:
    return one is not scopes[-1] and leaf_kind(Scope(one.scope)) == SESSION


def _nested(parts: Sequence[_Part]) -> tuple[RunScope, ...]:
    path, scopes = "", []
    for part, micro_usd, field in parts:
        path = parse_scope(f"{path}/{part}" if path else part, field=field)
        scopes.append(RunScope(scope=path, micro_usd=micro_usd))
    return tuple(scopes)


def _filled(key: Text, environ: Mapping[str, str], said: _Said) -> str:
    return "".join(
        _variable(part.name, environ, said) if isinstance(part, EnvPlace) else str(part)
        for part in key.parts
    )


def _variable(name: str, environ: Mapping[str, str], said: _Said) -> str:
    value = environ.get(name, "")
    if not value:
        problem = f"the environment variable {name} is not set; set it, or write the key itself"
        raise said.refused(problem)
    return value


def _named_url(options: RunOptions, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the URL that is named and what names it; one of the environment only if it fits."""
    given = {
        "--budget-redis-url": options.redis_url,
        "--budget-postgres-url": options.postgres_url,
    }
    said = {option: url for option, url in given.items() if url is not None}
    if len(said) > 1:
        raise InvalidSettingError(" and ".join(said), "name one ledger; leave out the other")
    for option, url in said.items():
        if not url.strip():
            raise InvalidSettingError(option, "is empty; name a ledger, or leave the option out")
        return option, url
    named = environ.get(URL_VARIABLE, "")
    if named and (options.tracker is None or scheme_of(named) in SCHEMES[options.tracker]):
        return URL_VARIABLE, None if scheme_of(named) in SCHEMES["local"] else named
    return "", None


def _tracker_of(option: str, url: str, tracker: Tracker | None) -> Tracker:
    """Return the kind of ledger that a URL is of, or say that it is not what was asked for."""
    scheme = scheme_of(url)
    named = option.removeprefix("--budget-").removesuffix("-url")
    wanted = tracker or named
    found = next((kind for kind, schemes in SCHEMES.items() if scheme in schemes), None)
    if found is None or (wanted in SCHEMES and wanted != found):
        kind = wanted if wanted in EXAMPLES else "redis"
        of_kind = f"of {wanted}" if wanted in SCHEMES else "that keeps budgets"
        problem = f"{scheme[:20]!r} is not a URL {of_kind}; write one as {EXAMPLES[kind]}"
        raise InvalidSettingError(option, problem)
    return cast("Tracker", found)


def _without_password(url: str) -> str:
    """Return a URL that tells these books from all others, with nothing secret in it."""
    if scheme_of(url) in SCHEMES["sqlite"]:
        return url
    scheme, sign, rest = url.partition("://")
    # What is before the last @ may be a password with any character in it.
    user, at, place = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    host, mark, query = place.partition("?")
    shown = "&".join(map(_shown_parameter, query.split("&")))
    return f"{scheme}{sign}{name}{colon}{HIDDEN if colon else ''}{at}{host}{mark}{shown}"


def _shown_parameter(parameter: str) -> str:
    name, sign, _ = parameter.partition("=")
    return f"{name}{sign}{HIDDEN}" if sign and SECRET_NAME.search(name) else parameter
