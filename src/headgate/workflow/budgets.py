"""The budgets of a run: its scopes, their limits, and which ledger keeps them.

The scopes nest in the order of the file, the workflow last; tasks are charged to the innermost.
Rule: a limit that others share is created, never replaced. Only the limit of the workflow's own
scope is set anew, and only by somebody who says so when a run is resumed. A resume has created its
limits before: whatever is in force by then holds, unless this very call says an amount.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from headgate.budgets.connect import EXAMPLES, SCHEMES, URL_VARIABLE, scheme_of, sqlite_path
from headgate.core.budgets.ledger import Ledger, Limit, check_created
from headgate.core.budgets.scopes import (
    MAX_PART_LENGTH,
    Scope,
    depth,
    leaf_kind,
    leaf_name,
    parse_scope,
)
from headgate.core.money import MicroUsd, format_usd, plain_usd
from headgate.errors import CallerError, InvalidScopeError, InvalidSettingError, WorkflowError
from headgate.executors.targets import is_free_program
from headgate.providers.http_headers import SECRET_NAME
from headgate.redaction import HIDDEN
from headgate.workflow.backend import Money
from headgate.workflow.placeholders import EnvPlaceholder, Text
from headgate.workflow.report import RunReport, RunState, StepState, StepSummary
from headgate.workflow.run_record import RunOptions, RunRecord, RunScope, Tracker
from headgate.workflow.workflow import CommandWork, Step, Workflow

SESSION = "session"
SHARED_FILE = "budget.db"
"""The ledger that runs of one data directory share; `headgate budget --ledger` names it."""


ChangeCommand = Callable[[str, str], str]
"""Returns the command that sets the limit of a scope to so many dollars."""


class CreatesLimits(Protocol):
    """The part of a ledger that creates limits, or says which would be in force."""

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Return the limit that is in force; see `headgate.core.budgets.ledger.Ledger`."""


class RunLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Which ledger a run uses; `url` is None where its own store keeps it.

    The URL may have a password in it: it is for connecting, and `address` is for everybody else.
    """

    tracker: Tracker
    url: str | None = None

    def __repr__(self) -> str:
        return f"RunLedger({self.tracker!r}, {self.address!r})"

    @property
    def address(self) -> str:
        """Where the ledger is, without a password; empty for the run's own store."""
        return "" if self.url is None else without_password(self.url)


def run_scopes(
    workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> tuple[RunScope, ...]:
    """Return the scopes of a run from the outermost to the workflow's own, each as a whole path."""
    parts = _session_option(workflow, options)
    for index, scope in enumerate(workflow.scopes):
        if scope.name != SESSION or options.session_id is None:
            said = _Source(f"config.budget_scopes[{index}].key", workflow.file, scope.line)
            part = _part(scope.name, _filled(scope.key, environ, said), said)
            limit = _session_limit(scope.name, scope.micro_usd, options)
            parts.append((part, limit, said.key))
    own = workflow.micro_usd if options.micro_usd is None else options.micro_usd
    parts.append((f"workflow:{workflow.name}", own, "name"))
    return _nested(parts)


def choose_ledger(
    scopes: Sequence[RunScope], options: RunOptions, environ: Mapping[str, str]
) -> RunLedger:
    """Return the ledger of a new run.

    Scopes around the workflow are shared by nature, so their ledger is shared unless told
    otherwise; a workflow alone keeps its own.
    """
    option, url = _named_url(options, environ)
    tracker = options.tracker
    if url is not None:
        return RunLedger(tracker=_tracker_of(option, url, tracker), url=url)
    if tracker in ("redis", "postgres"):
        problem = f"{tracker} needs --budget-{tracker}-url or {URL_VARIABLE}"
        raise InvalidSettingError("--budget-tracker", problem)
    if tracker == "sqlite" or (tracker is None and len(scopes) > 1):
        return RunLedger(tracker="sqlite", url=f"sqlite:///{options.data.absolute() / SHARED_FILE}")
    return RunLedger(tracker="local")


def recorded_ledger(
    record: RunRecord, options: RunOptions, environ: Mapping[str, str]
) -> RunLedger:
    """Return the ledger of a run that is there, or say that the one which is named is another.

    What was spent is known to the first ledger only, so a run never goes on with another.
    """
    if record.tracker in (None, "local"):
        return RunLedger(tracker="local")
    kept = msgspec.structs.replace(options, tracker=record.tracker)
    option, url = _named_url(kept, environ)
    if url is None:
        if HIDDEN in record.ledger:
            problem = f"the address {record.ledger} was kept without its password"
            advice = f"give --budget-{record.tracker}-url or set {URL_VARIABLE}"
            raise InvalidSettingError("--budget-tracker", f"{problem}; {advice}")
        return RunLedger(tracker=record.tracker, url=record.ledger)
    ledger = RunLedger(tracker=_tracker_of(option, url, record.tracker), url=url)
    if ledger.address != record.ledger:
        problem = f"names {ledger.address}, and the ledger of the run is at {record.ledger}"
        raise InvalidSettingError(option, f"{problem}; name this one, or leave it out")
    return ledger


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


async def create_limits(
    ledger: CreatesLimits,
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
            found = await ledger.create_limit(scope, limit)
            source = option or (None if is_resumed else "the file")
            if source is not None:
                how = change(scope, plain_usd(one.micro_usd or 0)) if change else ""
                check_created(scope, in_force=found, wanted=limit, source=source, change=how)
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


class _Source(NamedTuple):
    """Where something is said: an option, or a key in a line of the file."""

    key: str
    file: str = ""
    line: int | None = None

    def refused(self, problem: str) -> CallerError:
        """Return the error that names this source."""
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
    said = _Source("--budget-session-id")
    return [(_part(SESSION, options.session_id, said), limit, said.key)]


def _session_limit(name: str, written: int | None, options: RunOptions) -> int | None:
    is_said = name == SESSION and options.session_micro_usd is not None
    return options.session_micro_usd if is_said else written


def _part(kind: str, name: str, said: _Source) -> str:
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


def _filled(key: Text, environ: Mapping[str, str], said: _Source) -> str:
    return "".join(
        _variable(part.name, environ, said) if isinstance(part, EnvPlaceholder) else str(part)
        for part in key.parts
    )


def _variable(name: str, environ: Mapping[str, str], said: _Source) -> str:
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


def without_password(url: str) -> str:
    """Return a URL that tells this ledger from all others, with nothing secret in it."""
    if scheme_of(url) in SCHEMES["sqlite"]:
        return url
    scheme, sign, rest = url.partition("://")
    # What is before the last @ may be a password with any character in it.
    user, at, host_and_query = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    host, mark, query = host_and_query.partition("?")
    shown = "&".join(map(_shown_parameter, query.split("&")))
    return f"{scheme}{sign}{name}{colon}{HIDDEN if colon else ''}{at}{host}{mark}{shown}"


def _shown_parameter(parameter: str) -> str:
    name, sign, _ = parameter.partition("=")
    return f"{name}{sign}{HIDDEN}" if sign and SECRET_NAME.search(name) else parameter


# How the limit of a budget is changed where it is kept: a command to be pasted.
#
# Rule: nothing secret is in it. An address was kept without its password, and a token is where the
# command looks for it.

AMOUNT = "USD"
"""What stands where somebody has to say how much."""

_BY_ITSELF = ("room is freed at", "; more in ")
"""What refusals say of a budget that frees room when its window moves on."""


def change_in_ledger(tracker: Tracker | None, address: str) -> ChangeCommand | None:
    """Return what changes limits in a ledger outside a run; None for one within it."""
    if tracker is None or tracker == "local":
        return None
    location = str(sqlite_path(address)) if tracker == "sqlite" else address
    where = f"--ledger {shlex.quote(location)}"
    return lambda scope, usd: f"headgate budget set {scope} --limit-usd {usd} {where}"


def change_at_service(url: str) -> ChangeCommand:
    """Return what changes limits in the ledger of a service; it needs a token of an operator."""
    where = f"--url {shlex.quote(url.rstrip('/'))}"
    return lambda scope, usd: f"headgate budget set {scope} --limit-usd {usd} {where}"


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
        change = change_in_ledger(record.tracker, record.ledger)
    if change is not None:
        return change(short.scope, AMOUNT)
    is_session = leaf_kind(Scope(short.scope)) == SESSION
    return f"{resume} --budget-session-limit {AMOUNT}" if is_session else None


def rest_text(workflow: Workflow, report: RunReport) -> str | None:
    """Say what the rest of a run needs whose budget is used up; None if nobody can say.

    A step needs what its file says, otherwise what its runs cost on average so far.
    """
    short = short_scope(report)
    if short is None or any(words in (report.exhausted_by or "") for words in _BY_ITSELF):
        return None
    needed, unknown = 0, []
    for summary in report.steps:
        one = _one_run_micro_usd(workflow.steps_by_id[summary.step], summary)
        left = summary.total - sum(summary.counts.get(state.value, 0) for state in _OVER)
        if left and one is None:
            unknown.append(summary.step)
        needed += left * (one or 0)
    if not needed:
        return None
    amount = format_usd(needed)
    if unknown:
        steps = unknown[0] if len(unknown) == 1 else f"{len(unknown):,} steps"
        amount += f" without {steps} of unknown cost"
    least = format_usd(short.spent_micro_usd + short.reserved_micro_usd + needed)
    return f"the rest is expected to need {amount}: a limit of {least} or more"


_OVER = (StepState.DONE, StepState.SKIPPED)


def _one_run_micro_usd(step: Step, summary: StepSummary) -> int | None:
    """Return what one more run of a step is expected to cost."""
    said = None if step.estimate is None else step.estimate.micro_usd
    said = said if step.cost_micro_usd is None else step.cost_micro_usd
    if said is not None:
        return said
    if isinstance(step.work, CommandWork):
        program = step.work.command[0].parts
        if len(program) == 1 and isinstance(program[0], str) and is_free_program(program[0]):
            return 0
    done = summary.counts.get(StepState.DONE.value, 0)
    return None if not done or summary.unpriced else -(-summary.micro_usd // done)


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


# What a resume may say: options that a run cannot change any more are refused, one line each.
#
# Rule: no option is passed over in silence. Saying again what the run was begun with is fine.


def check_resume(record: RunRecord, given: RunOptions) -> None:
    """Refuse options that say something else than what a run was begun with."""
    _check_place(record, given)
    _check_session(record, given)
    if record.server is None:
        _check_ledger(record, given)


def _check_place(record: RunRecord, given: RunOptions) -> None:
    if record.server is None:
        here = "the run was begun on this machine, and goes on where it was begun; leave it out"
        service = {"--server": given.server, "--token": given.token, "--project": given.project}
        _refuse(service, here)
        return
    ledgers = {
        "--budget-tracker": given.tracker,
        "--budget-redis-url": given.redis_url,
        "--budget-postgres-url": given.postgres_url,
    }
    _refuse(ledgers, "the service that has the run keeps the ledger; leave it out")
    _refuse({"--config": given.config}, "the service has its own settings; leave it out")


def _check_session(record: RunRecord, given: RunOptions) -> None:
    around = [Scope(one.scope) for one in record.scopes[:-1]]
    names = [leaf_name(scope) for scope in around if leaf_kind(scope) == SESSION]
    if given.session_id is not None and given.session_id not in names:
        whose = f"the run is part of session {names[0]}" if names else "the run has no session"
        problem = f"{whose}, and what it has spent is booked there; leave it out"
        raise InvalidSettingError("--budget-session-id", problem)
    if given.session_micro_usd is not None and not names:
        problem = "the run has no session that it could limit; leave it out"
        raise InvalidSettingError("--budget-session-limit", problem)


def _check_ledger(record: RunRecord, given: RunOptions) -> None:
    tracker = record.tracker or "local"
    whose = "by the run itself" if tracker == "local" else f"in {record.ledger}"
    kept = f"the ledger of the run is kept {whose}, and only it knows what was spent"
    if given.tracker not in (None, tracker):
        raise InvalidSettingError("--budget-tracker", f"{kept}; leave it out")
    for kind, url in {"redis": given.redis_url, "postgres": given.postgres_url}.items():
        if kind != tracker:
            _refuse({f"--budget-{kind}-url": url}, f"{kept}; leave it out")


def _refuse(options: Mapping[str, object], problem: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise InvalidSettingError(option, problem)
