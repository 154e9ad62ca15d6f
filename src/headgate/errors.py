"""Every error that Headgate raises, as one tree.

    HeadgateError
    ├── CallerError                      the input is wrong: fix it and call again
    │   ├── InvalidFieldError            one named field has a value that cannot be used
    │   │   ├── InvalidSnapshotError     a snapshot that no decision can be made from
    │   │   ├── InvalidSettingError      a setting outside its range, or two that exclude each other
    │   │   ├── InvalidScopeError        a budget scope that is not a path of `kind:name` parts
    │   │   ├── InvalidAmountError       an amount of money or tokens that cannot be booked
    │   │   └── InvalidTaskError         a submitted task that cannot be taken as it is
    │   ├── StaleWorkerError             a worker has lost its lease, or was never known
    │   ├── BudgetMismatchError          a budget exists already, with another limit
    │   ├── NameTakenError               a token has this name already
    │   ├── SlotNotFoundError            no slot of this name is configured
    │   ├── WorkflowError                a workflow file, or items of it, that cannot be run
    │   └── IllegalMoveError             a state machine was asked for a move that it does not have
    │       ├── IllegalTransitionError   of a task
    │       └── IllegalSettlementError   of a reservation
    ├── LimitReachedError                the request is fine, but there is no room for it now
    │   ├── BudgetExceededError          a budget cannot hold the amount
    │   ├── WindowOpenError              a slot was to be woken whose window is open
    │   ├── SlotUnavailableError         a slot sends nothing now: disabled, paused, exhausted
    │   ├── TooManyWaitingError          as many tasks wait in this process as may wait
    │   ├── PermitTimeoutError           a TimeoutError too: there was no permit in time
    │   └── SchedulerClosedError         an in-process scheduler was shut down
    ├── StoreError                       what keeps tasks or money gave no answer, or a wrong one
    │   ├── StoreUnavailableError        nothing was changed; trying again may help
    │   │   ├── LedgerUnavailableError   nothing was granted either
    │   │   │   └── StoreFullError       the disk is full
    │   │   └── NotTakingWorkError       this node was told to take no work
    │   ├── UnfitValueError              a value that the database cannot take; nothing was changed
    │   ├── StaleEpochError              another node dispatches now
    │   └── DirectoryInUseError          another process has the data directory
    └── ServiceError                     a service was asked over HTTP and did not do it
        ├── RequestRefusedError          a CallerError too: the request is wrong
        │   ├── TaskDeletedError         the task has ended and is not kept any more
        │   └── NotAllowedError          the token is missing, unknown, or not for this
        ├── ServiceLimitError            a LimitReachedError too: there is no room for it now
        ├── ServiceUnavailableError      it was not reached, or cannot answer now
        └── WaitTimeoutError             what was waited for has not happened in time

Errors carry fields for programs and one line for people; the line says what to do next. They pass
from process to process with their fields, so a worker of a pool may raise them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

# A moment as people read it: Unix seconds by the calendar of UTC.
#
# Rule: whatever is said of a time in a message is said in these words, so that it reads the same in
# a terminal, on a page and in an error.

FAR = "a time in the far future"


def utc_time(seconds: float) -> str:
    """Return a time to the second; one that no calendar reaches is far away."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return FAR


MICRO_PER_USD = 1_000_000


class HeadgateError(Exception):
    """The base of everything that Headgate raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited way calls __init__ with the line for people, which fits few of its children.
        return _restored, (type(self), self.args, dict(vars(self)))


def _restored(
    kind: type[HeadgateError], args: tuple[object, ...], fields: dict[str, object]
) -> HeadgateError:
    error = kind.__new__(kind)
    # Given to __new__ they would be lost where it is that of OSError, as of a timeout.
    error.args = args
    vars(error).update(fields)
    return error


class CallerError(HeadgateError, ValueError):
    """The caller's input is wrong; trying again unchanged cannot help.

    `others` are further errors of the same file.
    """

    others: tuple[CallerError, ...] = ()


class InvalidFieldError(CallerError):
    """One named field of an input has a value that cannot be used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class InvalidSnapshotError(InvalidFieldError):
    """A scheduler snapshot holds a value from which no decision can be made."""


class InvalidSettingError(InvalidFieldError):
    """A setting is outside its range, or contradicts another one.

    `source` is where its value was given, where that is known: a file and a line, or an option.
    """

    def __init__(
        self, field: str, problem: str, *, source: str = "", line: int | None = None
    ) -> None:
        super().__init__(field, problem)
        self.source, self.line = source, line
        if source:
            self.args = (f"{field}: {problem} ({source})",)


MAX_PROBLEMS = 20

Wrong = TypeVar("Wrong", bound=CallerError)


class Problems(Generic[Wrong]):
    """Collects what is wrong with parts of a file that can be read one without the other."""

    def __init__(self, kind: type[Wrong]) -> None:
        self._kind = kind
        self._found: list[Wrong] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the error of the body, with others that came with it."""
        try:
            yield
        except self._kind as error:
            self.add(error)

    def add(self, error: Wrong) -> None:
        """Collect an error, with others that came with it."""
        self._found += [error, *(one for one in error.others if isinstance(one, self._kind))]
        error.others = ()

    @property
    def found(self) -> tuple[Wrong, ...]:
        """What was found, in the order of the file where lines are known."""
        return tuple(sorted(self._found, key=lambda error: getattr(error, "line", None) or 0))

    def check(self) -> None:
        """Raise what was collected: one error with all the others."""
        if not self._found:
            return
        first, *others = self.found[:MAX_PROBLEMS]
        first.others = tuple(others)
        raise first from None


class MissingPackageError(InvalidSettingError):
    """A setting needs a package that is not installed."""


class InvalidScopeError(InvalidFieldError):
    """A budget scope is not a path of `kind:name` parts."""


class InvalidAmountError(InvalidFieldError):
    """An amount of money or tokens cannot be booked."""


class InvalidTaskError(InvalidFieldError):
    """A submitted task cannot be taken as it is; `code` is one that programs can rely on.

    Its line is the whole message: clients compare some of them.
    """

    def __init__(self, code: str, field: str, message: str) -> None:
        super().__init__(field, message)
        self.args = (message,)
        self.code = code


class SlotNotFoundError(CallerError):
    """No slot of this name is configured."""

    def __init__(self, name: str) -> None:
        advice = "`headgate slot list` lists the slots"
        super().__init__(f"there is no slot {name[:64]!r}; {advice}")
        self.name = name


class WorkflowError(CallerError):
    """A workflow file cannot be run as it is written, or a file of items that it names.

    `line` counts from 1, and `key` is the path of the value, as `steps[3].when`; either may be
    missing.
    """

    def __init__(self, file: str, problem: str, *, line: int | None = None, key: str = "") -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {key}: {problem}" if key else f"{place}: {problem}")
        self.file = file
        self.line = line
        self.key = key
        self.problem = problem


class BudgetMismatchError(CallerError):
    """A budget exists already, with another limit; both are in words, such as `$50.00`."""

    def __init__(self, *, scope: str, existing: str, wanted: str, source: str, change: str) -> None:
        line = f"{scope or _ROOT}: the limit is {existing}, and {source} says {wanted}"
        super().__init__(f"{line}; use the same limit, or change it with `{change}`")
        self.scope, self.existing, self.wanted = scope, existing, wanted


class NameTakenError(CallerError):
    """A token of this name is good already."""

    def __init__(self, *, name: str, token_id: str) -> None:
        line = f"the token {token_id} has the name {name!r} already; choose a different name"
        super().__init__(f"{line}, or revoke it with headgate token revoke {token_id}")
        self.name, self.token_id = name, token_id


class AdjustmentError(InvalidFieldError):
    """An operator wants to take, accept or reject more than there is; nothing was changed."""

    def __init__(self, *, scope: str, call: str, unit: str, wanted: int, there: int) -> None:
        field = "usd" if unit == "micro_usd" else "tokens"
        what = "booked" if call == "adjust" else "claimed and not accepted"
        line = f"is {_exact(wanted, unit)}, and {scope or _ROOT} has {_exact(there, unit)} {what}"
        super().__init__(field, f"{line} in its window; give at most that amount")
        self.scope, self.unit, self.wanted, self.there = scope, unit, wanted, there


class IllegalMoveError(CallerError):
    """A state machine was asked for a move that its table does not have."""

    def __init__(
        self,
        subject: str,
        current: str,
        wanted: str,
        allowed: tuple[str, ...],
        *,
        advice: str = "",
    ) -> None:
        legal = ", ".join(allowed) if allowed else "nothing, it is final"
        line = f"{subject} is {current} and cannot become {wanted}; "
        super().__init__(line + (advice or f"it may become {legal}"))
        self.advice = advice
        self.subject = subject
        self.current = current
        self.wanted = wanted
        self.allowed = allowed


class IllegalTransitionError(IllegalMoveError):
    """A task cannot make this move; see the transition table in `headgate.core.task`."""


class IllegalSettlementError(IllegalMoveError):
    """A reservation cannot make this move; `headgate.core.budgets.reservations` has the table."""


class LimitReachedError(HeadgateError):
    """The request is fine, but there is no room for it now."""


class BudgetExceededError(LimitReachedError):
    """A budget has no room for the amount, and no scope has reserved anything.

    `unit` says whether the amounts are in micro-dollars or in tokens. `resets_at` is the Unix time
    at which the window next frees room. `may_clear` says whether waiting can help. `kind` is set
    if nobody knows yet what work of that kind costs; `live` calls of that kind run now. If
    `is_overfull`, the scope has no limit, but a ledger cannot count more.
    """

    def __init__(
        self,
        *,
        scope: str,
        unit: str,
        limit: int,
        spent: int,
        reserved: int,
        overrun: int,
        requested: int,
        resets_at: float | None,
        may_clear: bool,
        kind: str = "",
        live: int = 0,
        is_overfull: bool = False,
    ) -> None:
        used, left = spent + overrun, max(0, limit - spent - overrun - reserved)
        line = f"Budget exceeded: spent {_in_full(used, unit)} of {_in_full(limit, unit)} limit"
        line += f"; {_exact(requested, unit)} needed, {_exact(left, unit)} left"
        details = f"scope {scope or _ROOT}, {_exact(reserved, unit)} reserved"
        self._advice = _advice(resets_at, may_clear=may_clear)
        if is_overfull:
            most = _exact(limit, unit)
            line = f"Budget exceeded: no more than {most} can be reserved at once"
            self._advice = "settle or release what is reserved, then try again"
        self._line = f"{line} ({details})"
        text = f"{self._line}; {self._advice}"
        super().__init__(f"{first_of_kind(live, unit)} ({details})" if kind else text)
        self.scope = scope
        self.unit = unit
        self.limit = limit
        self.spent = spent
        self.reserved = reserved
        self.overrun = overrun
        self.requested = requested
        self.resets_at = resets_at
        self.may_clear = may_clear
        self.kind = kind
        self.live = live
        self.is_overfull = is_overfull

    def of_call(self, *, most_wait_seconds: float | None = None) -> str:
        """Say it of a call; with `most_wait_seconds` the budget resets later than it may wait."""
        if self.kind or self.is_overfull or most_wait_seconds is None or self.resets_at is None:
            return str(self)
        # A difference of two times is a little more or less than the setting.
        seconds = round(most_wait_seconds, 3)
        longest = f"{seconds:g} s" if seconds % 3_600 else f"{seconds / 3_600:g} h"
        setting = f"gateway.max_wait_seconds = {seconds:g}"
        advice = f"it resets at {utc_time(self.resets_at)}, and a call waits at most {longest}"
        return f"{self._line}; {advice} ({setting}), so wait for the reset or {_RAISE}"

    @property
    def outline(self) -> str:
        """The same without any figure, for those who may not read them."""
        if self.kind:
            return first_of_kind(self.live, self.unit)
        return _outline(self.scope or _ROOT, self._advice)


_ROOT = "root"
_RAISE = "raise the limit"
_LOWER = "lower max_tokens or the estimate"
_LONGEST_EXCEEDED = 2_000
_EXCEEDED = re.compile(r"Budget exceeded: .+? \(scope (\S+), [^)]*\); (.*)", re.DOTALL)


def without_figures(error: str, may_read: Callable[[str], bool]) -> str:
    """Return the error of a task for a tenant, without the figures of budgets it may not read."""
    # No line of ours is longer; the error of a task may quote whatever a process has printed.
    found = _EXCEEDED.fullmatch(error) if len(error) <= _LONGEST_EXCEEDED else None
    if found is None:
        return error
    scope, advice = found.groups()
    may_read_it = may_read("" if scope == _ROOT else scope)
    return to_tenant(error if may_read_it else _outline(scope, advice))


def to_tenant(line: str) -> str:
    """Return a line about a budget without room for whoever cannot change the limit."""
    return line.replace(_RAISE, "ask an operator for a higher limit")


def to_step(line: str, estimated_by: str) -> str:
    """Return a line about a budget without room, with what says the cost of a workflow's step."""
    return line.replace(_LOWER, f"lower {estimated_by}")


def to_call(line: str, field: str, *, reserved_tokens: int | None) -> str:
    """Return a line about a budget without room for a request that says no length of its answer."""
    advice = f"set {field}"
    if reserved_tokens is not None:
        advice += f": the request sets none, so {reserved_tokens:,} tokens are reserved"
    return line.replace(_LOWER, advice)


def _outline(scope: str, advice: str) -> str:
    return f"Budget exceeded: the limit of scope {scope} has no room for it; {advice}"


def first_of_kind(live: int, unit: str) -> str:
    """Say why work waits that is the first of its kind, or one of the first."""
    which = "the cost of this kind of work is unknown until the first one ends"
    if live != 1:
        which = f"few costs of this kind of work are known yet, and {live} attempts are in flight"
    key = "estimate_usd" if unit == "micro_usd" else "estimate_tokens"
    return f"{which}; set `{key}` on the target to run more at once"


def _exact(amount: int, unit: str) -> str:
    if unit != "micro_usd":
        return f"{amount} tokens"
    dollars, rest = divmod(abs(amount), MICRO_PER_USD)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}${dollars}.{decimals}"


def _in_full(amount: int, unit: str) -> str:
    """Return an amount with four decimals of a dollar, or with all where it has more."""
    if unit != "micro_usd" or amount % 100:
        return _exact(amount, unit)
    dollars, rest = divmod(amount, MICRO_PER_USD)
    return f"${dollars}.{rest // 100:04d}"


def _advice(resets_at: float | None, *, may_clear: bool) -> str:
    if not may_clear:
        return f"waiting does not help, {_RAISE} or {_LOWER}"
    if resets_at is None:
        return f"reservations in flight may free room, try again later or {_RAISE}"
    return f"room is freed at {utc_time(resets_at)}, wait for it or {_RAISE}"


class WindowOpenError(LimitReachedError):
    """A slot was to be woken whose window is open; `resets_at` is when it ends, in Unix seconds."""

    def __init__(self, name: str, resets_at: float | None) -> None:
        until = "" if resets_at is None else f" until {utc_time(resets_at)}"
        super().__init__(f"slot {name}: the window is open{until}; a wake can open it after that")
        self.name = name
        self.resets_at = resets_at


class SlotUnavailableError(LimitReachedError):
    """A slot sends nothing now; `reason` says why and what to do."""

    def __init__(self, name: str, reason: str, *, until: float | None = None) -> None:
        lasts = "" if until is None else f", until {utc_time(until)}"
        super().__init__(f"slot {name}: {reason}{lasts}")
        self.name = name
        self.reason = reason
        self.until = until


class TooManyWaitingError(LimitReachedError):
    """As many tasks wait in this process as may wait; nothing was queued."""

    def __init__(self, resource: str, most: int) -> None:
        advice = "wait for some to finish, or raise max_waiters"
        super().__init__(f"{most} tasks wait for {resource!r}, which is the maximum; {advice}")
        self.resource = resource
        self.most = most


class PermitTimeoutError(LimitReachedError, TimeoutError):
    """There was no permit in time; nothing is queued any more.

    `agents_most` is given where the agent itself had as many permits as it may have, `concurrency`
    where an SDK client was made with one, whose user knows of no resource.
    """

    def __init__(
        self,
        resource: str,
        agent_id: str,
        timeout: float,
        *,
        agents_most: int | None = None,
        concurrency: int | None = None,
    ) -> None:
        advice = "wait longer, or give the resource more permits"
        if agents_most is not None:
            advice = f"the agent uses all its {agents_most} permits; raise its capacity"
        line = f"{agent_id!r} got no permit of {resource!r} within {timeout:g} seconds"
        if concurrency is not None:
            line = f"no call slot became free within {timeout:g} s; concurrency = {concurrency}"
            advice = "raise it or max_wait_seconds"
        super().__init__(f"{line}; {advice}")
        self.resource = resource
        self.agent_id = agent_id
        self.timeout = timeout
        self.agents_most = agents_most


class SchedulerClosedError(LimitReachedError):
    """An in-process scheduler was shut down; it grants nothing any more."""

    def __init__(self, resource: str) -> None:
        super().__init__(f"the scheduler of {resource!r} was shut down; make another")
        self.resource = resource


class StoreError(HeadgateError):
    """What keeps tasks or money did not answer, or answered wrongly."""


class StoreUnavailableError(StoreError):
    """The store could not be asked; trying again may help."""


class UnfitValueError(StoreError):
    """A value that the database cannot take, as it is; trying again does not help."""


class NotTakingWorkError(StoreUnavailableError):
    """This node was told to take no work; unlike a driver's, its line may be shown to anybody."""


class NotDispatchingError(StoreError):
    """Only the node that dispatches can answer; `address` is where it serves, if it does."""

    def __init__(self, address: str) -> None:
        where = f"ask the node at {address}" if address else "none is elected now, try again"
        super().__init__(f"this node does not dispatch; {where}")
        self.address = address


class StaleWorkerError(CallerError):
    """A worker is not known, or not any more; what it runs is not its own."""

    def __init__(self, worker_id: str) -> None:
        advice = "stop its tasks, and claim without a worker id"
        super().__init__(f"worker {worker_id[:64]!r} is not known any more; {advice}")
        self.worker_id = worker_id


class StaleEpochError(StoreError):
    """A dispatcher wrote under an epoch that is over; another node dispatches now."""


class DirectoryInUseError(StoreError):
    """Another process has the data directory; one at a time may use it."""

    def __init__(self, directory: str, *, pid: int | None = None, address: str = "") -> None:
        process = "another process" if pid is None else f"process {pid}"
        place = f", which serves {address}" if address else ""
        advice = "stop it, or name another directory with --data"
        super().__init__(f"{directory} is in use by {process}{place}; {advice}")
        self.directory = directory
        self.pid = pid
        self.address = address


class LedgerUnavailableError(StoreUnavailableError):
    """The ledger could not be asked; nothing was granted, and trying again may help."""


class StoreFullError(LedgerUnavailableError):
    """The disk of the store is full; what adds nothing may still work, and room may come back."""


class ServiceError(HeadgateError):
    """A service was asked over HTTP and did not do it.

    `code` is one that programs can rely on, `status` the HTTP status, 0 where nothing answered.
    `request_id` is what the service's log knows the request by.
    """

    def __init__(
        self,
        line: str,
        *,
        code: str,
        status: int = 0,
        request_id: str = "",
        details: dict[str, Any] | None = None,
        task_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(line)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.details = details or {}
        self.task_id = task_id
        self.retry_after_seconds = retry_after_seconds


class RequestRefusedError(ServiceError, CallerError):
    """The service does not take the request as it is; trying again unchanged cannot help."""


class TaskDeletedError(RequestRefusedError):
    """The task ended and was deleted; `setting` did it, and `cut` is up to when tasks are gone."""

    @property
    def setting(self) -> str:
        """The setting of the service that deleted it, such as `scheduler.max_ended_tasks`."""
        return str(self.details.get("setting", ""))

    @property
    def cut(self) -> str:
        """The time of submission, in RFC 3339, up to which ended tasks are gone."""
        return str(self.details.get("cut", ""))


class NotAllowedError(RequestRefusedError):
    """The token is missing, unknown or over, or does not allow this."""


class ServiceLimitError(ServiceError, LimitReachedError):
    """The service has no room for the request now; `retry_after_seconds` is when to ask again."""


class ServiceUnavailableError(ServiceError):
    """The service was not reached, or cannot answer now; trying again may help."""


class WaitTimeoutError(ServiceError, TimeoutError):
    """What was waited for has not happened in time; the task goes on."""
