"""Budgets of agents, teams and sessions, through the trackers that keep all other budgets.

A call is charged to `agent:<id>`, to the `team:` of its agent, to the `session:`, and to whatever
scopes its task names; each of these may have a limit. Its estimate is held when it has a permit and
before its body runs, so parallel calls cannot all see the same free money.

Rule: what a budget cannot hold does not run, and does not stand in the way of what it can hold. The
modes differ in what becomes of it: `wait` waits while reservations in flight or a window may free
room, `refuse` raises, `downgrade` tries the cheaper model that the caller named before it waits. In
`alert` the limits given here are not kept by the ledger;
passing one is reported, and nothing is held up. Limits that the tracker has from elsewhere refuse
in every mode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from decimal import Decimal
from functools import partial
from typing import Literal, get_args

import msgspec

from headgate.budgets.connect import connect_budget
from headgate.budgets.tracker import (
    DEFAULT_LEASE_SECONDS,
    ActiveReservation,
    Amount,
    BudgetTracker,
    LedgerTracker,
    reserved,
)
from headgate.budgets.waiting import LONGEST_PAUSE_SECONDS
from headgate.core import estimates
from headgate.core.budgets.ledger import Unit
from headgate.core.budgets.scopes import parse_scope
from headgate.core.estimates import Hold, Kind
from headgate.core.money import format_usd, to_limit_micro_usd, to_micro_usd, to_tokens
from headgate.errors import (
    BudgetExceededError,
    CallerError,
    HeadgateError,
    InvalidScopeError,
    InvalidSettingError,
    LedgerUnavailableError,
    PermitTimeoutError,
)
from headgate.inprocess.lanes import Lane
from headgate.inprocess.permits import Grant, Permits, unknown_agent

_log = logging.getLogger(__name__)

Mode = Literal["wait", "refuse", "downgrade", "alert"]
_PROJECT = "calls"
"""All calls of a budget are of one project: their kinds share its bound."""

_WAITING: tuple[Mode, ...] = ("wait", "downgrade")


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a call may cost at most, for which model; `cheaper` is tried where that is refused.

    What is left out is learned from earlier calls; zero is given, and holds nothing. `hold` says
    it for each try instead.
    """

    usd: Amount | None = None
    tokens: int | None = None
    model: str | None = None
    cheaper: Estimate | None = None
    hold: Callable[[], Hold] | None = None

    def __post_init__(self) -> None:
        if self.usd is not None:
            to_micro_usd(self.usd, field="usd")
        if self.tokens is not None:
            to_tokens(self.tokens)

    def given(self) -> tuple[estimates.Estimate | None, estimates.Estimate | None]:
        """Return the amounts that were given, in dollars and in tokens."""
        usd = None if self.usd is None else estimates.given(to_micro_usd(self.usd, field="usd"))
        return usd, None if self.tokens is None else estimates.given(to_tokens(self.tokens))


class BudgetPassed(msgspec.Struct, frozen=True, kw_only=True):
    """A scope has spent its limit; in mode `alert` this is all that happens."""

    scope: str
    limit_micro_usd: int
    spent_micro_usd: int

    def __str__(self) -> str:
        spent, limit = format_usd(self.spent_micro_usd), format_usd(self.limit_micro_usd)
        return f"{self.scope} has spent {spent} of {limit}"


class Budget:
    """Whose money the calls of a scheduler are, and what happens where it does not suffice.

    `tracker` is one that is open, or a URL: a ledger at a URL is opened at the first call and
    closed with the last scheduler that used it. `limits` are dollars by scope, as
    `{"agent:analyst": "5.00"}`; they are set at the first call. `teams` maps agents to teams.

    A call that gives no estimate holds what its like have cost before, otherwise `default`. Where
    neither is known it is a probe: it holds a tenth of the smallest limit, and is alone of its kind
    until it has reported its cost. The kind is the model, the type of the call, or else the agent.
    """

    def __init__(
        self,
        tracker: BudgetTracker | str = "memory:",
        *,
        mode: Mode = "wait",
        session: str | None = None,
        teams: Mapping[str, str] | None = None,
        limits: Mapping[str, Amount] | None = None,
        default: Estimate | None = None,
        on_alert: Callable[[BudgetPassed], None] | None = None,
        not_charged_on: tuple[type[BaseException], ...] = (),
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if mode not in get_args(Mode):
            choices = ", ".join(get_args(Mode))
            raise InvalidSettingError("mode", f"must be one of {choices}, not {mode!r}")
        if mode == "alert" and on_alert is None:
            raise InvalidSettingError("on_alert", "is who is told in mode alert; give a function")
        self.mode: Mode = mode
        self._own: LedgerTracker | None = None
        if isinstance(tracker, str):
            tracker = self._own = connect_budget(tracker)
        self._tracker: BudgetTracker = tracker
        self._session = () if session is None else (parse_scope(f"session:{session}"),)
        self._teams = {agent: parse_scope(f"team:{team}") for agent, team in (teams or {}).items()}
        self._limits = {
            parse_scope(scope, field="limits"): to_limit_micro_usd(limit, field="limits")
            for scope, limit in (limits or {}).items()
        }
        self._default = default
        self._estimates = estimates.Estimates()
        self._on_alert = on_alert
        self._passed: set[str] = set()
        self._not_charged_on = not_charged_on
        self._lease_seconds = lease_seconds
        self.waiters = BudgetWaiters(clock)
        self._opening: asyncio.Lock | None = None
        self._is_open = False
        self._users: set[object] = set()

    @property
    def tracker(self) -> BudgetTracker:
        """The tracker, for balances and further limits; see `open`."""
        return self._tracker

    @property
    def is_open(self) -> bool:
        """Whether the ledger is connected and its limits set."""
        return self._is_open

    async def open(self) -> BudgetTracker:
        """Connect the ledger and set the limits, if that was not done; return the tracker."""
        if not self._is_open:
            self._opening = self._opening or asyncio.Lock()
            async with self._opening:
                if not self._is_open:
                    await self._open()
        return self._tracker

    async def close(self) -> None:
        """Close a ledger that was opened here; the next call opens it again."""
        if self._is_open and self._own is not None:
            await self._own.__aexit__(None, None, None)
        self._is_open, self._opening = False, None

    def join(self, user: object) -> None:
        """Count one who uses this ledger, until it leaves."""
        self._users.add(user)

    async def leave(self, user: object) -> None:
        """Close what was opened here, if nobody else uses it."""
        self._users.discard(user)
        if not self._users:
            await self.close()

    def check_agent(self, agent_id: str) -> None:
        """Refuse an agent that has no scope of its own, before it gets a permit."""
        if "/" in agent_id:
            problem = f"{agent_id!r} has a slash, which divides scopes; budgets need another name"
            raise InvalidScopeError("agent_id", problem)
        parse_scope(f"agent:{agent_id}", field="agent_id")

    async def reserve_for(self, grant: Grant, estimate: Estimate | None) -> None:
        """Hold the estimate for a grant, or that of a cheaper model, or raise the refusal."""
        wanted: Estimate | None = self.estimate_of(grant, estimate)
        tracker = await self.open()
        scope, *also = self.scopes_of(grant.agent_id, grant.task.scopes)
        refusal: BudgetExceededError | None = None
        while wanted is not None:
            try:
                hold = wanted.hold or partial(self._hold, grant, wanted)
                holding = self._holding(tracker, scope, also, hold)
                grant.attach(holding, await holding.__aenter__(), wanted.model)
            except BudgetExceededError as error:
                refusal = refusal or error
                wanted = wanted.cheaper if self.mode == "downgrade" else None
            else:
                return
        if refusal is not None:
            raise refusal

    def estimate_of(self, grant: Grant, estimate: Estimate | None) -> Estimate:
        """Return what is said of what a call may cost; it may be nothing."""
        if estimate is not None:
            return estimate
        if grant.task.estimate_tokens is not None:
            return Estimate(tokens=grant.task.estimate_tokens)
        if self._default is not None and self._default.cheaper is not None:
            return self._default
        return Estimate()

    def learn(self, grant: Grant, error: BaseException | None) -> None:
        """Learn what a call cost; one that was a probe, and says nothing, has cost nothing."""
        held = grant.held
        if held is None or held.hold is None or held.is_assumed:
            return
        probed, is_done = held.hold.probed, error is None
        sample = estimates.Sample(
            micro_usd=held.reported_micro_usd,
            tokens=held.reported_tokens,
            held_micro_usd=held.micro_usd,
            held_tokens=held.tokens,
            is_done=is_done and not held.is_given_back,
            probed=probed,
        )
        self._estimates.feed(_kind_of(grant, grant.model), sample)
        if is_done and probed and held.reported_micro_usd is None and not held.is_given_back:
            micro_usd = 0 if Unit.MICRO_USD in probed else held.micro_usd
            held.charge(_dollars(micro_usd), tokens=0 if Unit.TOKENS in probed else held.tokens)

    def _hold(self, grant: Grant, wanted: Estimate) -> Hold:
        """Return what a call is to hold: given, learned, by default, or as a probe."""
        usd, tokens = wanted.given()
        default = Estimate() if self._default is None else self._default
        default_usd, default_tokens = default.given()
        return self._estimates.hold(
            _kind_of(grant, wanted.model),
            micro_usd=usd,
            tokens=tokens,
            default_micro_usd=default_usd and estimates.configured(default_usd.amount),
            default_tokens=default_tokens and estimates.configured(default_tokens.amount),
        )

    def scopes_of(self, agent_id: str, further: Iterable[str]) -> tuple[str, ...]:
        """Return every scope that a call of an agent is charged to; the agent's own comes first."""
        own = parse_scope(f"agent:{agent_id}", field="agent_id")
        team = (self._teams[agent_id],) if agent_id in self._teams else ()
        return (own, *team, *self._session, *further)

    async def notify(self, agent_id: str, further: Iterable[str]) -> None:
        """In mode `alert`, notify of each limit that a call has passed, once.

        The call is over and paid by now: what goes wrong in notifying is logged, not raised.
        """
        if self.mode != "alert" or self._on_alert is None:
            return
        for scope in self.scopes_of(agent_id, further):
            limit = self._limits.get(parse_scope(scope))
            if limit is None:
                continue
            try:
                spent = to_micro_usd(await self._tracker.get_spent(scope))
            except HeadgateError as error:
                _log.warning("what %s has spent is not known, so nobody was told: %s", scope, error)
                continue
            if spent < limit:
                self._passed.discard(scope)
            elif scope not in self._passed:
                self._passed.add(scope)
                self._notify(
                    BudgetPassed(scope=scope, limit_micro_usd=limit, spent_micro_usd=spent)
                )

    def _notify(self, passed: BudgetPassed) -> None:
        try:
            if self._on_alert is not None:
                self._on_alert(passed)
        except Exception:  # noqa: BLE001  it is somebody else's function, and the call is over
            _log.exception("on_alert failed; it was told that %s", passed)

    async def _open(self) -> None:
        if self._own is not None:
            await self._own.__aenter__()
        if self.mode != "alert":
            for scope, limit in self._limits.items():
                await self._tracker.set_budget(scope, limit_usd=_dollars(limit))
        self._is_open = True

    def _holding(
        self, tracker: BudgetTracker, scope: str, also: list[str], hold: Callable[[], Hold]
    ) -> AbstractAsyncContextManager[ActiveReservation]:
        return reserved(
            tracker,
            scope,
            hold=hold,
            also=also,
            lease_seconds=self._lease_seconds,
            not_charged_on=self._not_charged_on,
            # Who waits for money keeps no permit, so the scheduler waits.
            on_exhausted="reject",
        )


def _kind_of(grant: Grant, model: str | None) -> Kind:
    return Kind(_PROJECT, model or grant.task.target or grant.agent_id)


def _dollars(micro_usd: int) -> Decimal:
    return Decimal(micro_usd).scaleb(-6)


# The money for a permit: held once the permit is there, and in bounded time.
#
# Rule: who does not get the money keeps no permit. A ledger that does not answer is waited for
# until the caller's deadline, or for so long as a settlement may take; the permit goes to the next
# then, and whatever the ledger holds all the same is given back without anybody waiting for it.

LEDGER_SECONDS = 10.0
LEAST_LEDGER_SECONDS = 1.0
"""What the ledger has also where less is left: a permit that came in time is not lost to that."""


class Patience:
    """How long somebody waits in all, for permits and money."""

    __slots__ = ("_loop", "deadline", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.timeout = timeout
        self.deadline = None if timeout is None else self._loop.time() + timeout

    def left(self) -> float | None:
        """Return the seconds that are left, None without a limit."""
        return None if self.deadline is None else max(self.deadline - self._loop.time(), 0.0)

    def ledger_seconds(self) -> float:
        """Return how long a ledger may take."""
        left = self.left()
        return (
            LEDGER_SECONDS if left is None else max(min(left, LEDGER_SECONDS), LEAST_LEDGER_SECONDS)
        )

    def whole(self, error: PermitTimeoutError) -> PermitTimeoutError:
        """Return the error of one wait as that of all of them: it names the time in all."""
        if self.timeout is None or error.timeout == self.timeout:
            return error
        return PermitTimeoutError(
            error.resource, error.agent_id, self.timeout, agents_most=error.agents_most
        )


class BudgetReserver:
    """Money for the permits of one scheduler; `on_idle` hears when nothing is under way."""

    def __init__(self, permits: Permits, budget: Budget, on_idle: Callable[[], None]) -> None:
        self.budget = budget
        self._permits = permits
        self._on_idle = on_idle
        self._unfinished: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be given back."""
        return bool(self._unfinished)

    async def reserve(
        self, grant: Grant, estimate: Estimate | None, patience: Patience
    ) -> BudgetExceededError | None:
        """Hold the money for a grant, or free its permit; return a refusal that waiting may end."""
        self.budget.join(self)
        holding = asyncio.create_task(self.budget.reserve_for(grant, estimate))
        try:
            await asyncio.wait({holding}, timeout=patience.ledger_seconds())
        except asyncio.CancelledError:
            self._abandon(grant, holding)
            raise
        if not holding.done():
            self._abandon(grant, holding)
            raise self._timed_out(grant, patience)
        return self._outcome(grant, holding)

    async def wait_for_room(
        self, lane: Lane, refusal: BudgetExceededError, patience: Patience
    ) -> None:
        """Wait until asking again makes sense, counted among those who wait."""
        self._permits.begin_budget_wait(lane)
        try:
            async with asyncio.timeout_at(patience.deadline):
                await self.budget.waiters.wait(refusal)
        except TimeoutError:
            resource, timeout = self._permits.resource.name, patience.timeout or 0.0
            raise PermitTimeoutError(resource, lane.agent_id, timeout) from refusal
        finally:
            self._permits.end_budget_wait(lane)
        if not lane.is_known:
            self.budget.waiters.tried()
            raise unknown_agent(lane.agent_id)

    def _outcome(self, grant: Grant, holding: asyncio.Task[None]) -> BudgetExceededError | None:
        try:
            holding.result()
        except BudgetExceededError as refusal:
            self._permits.refuse(grant)
            if self.budget.mode not in _WAITING or not refusal.may_clear:
                raise
            return refusal
        except CallerError:
            # A task that cannot be booked would come to everybody who asks after this one.
            self._permits.refuse(grant)
            raise
        except BaseException:
            self._permits.hand_back(grant)
            raise
        return None

    def _abandon(self, grant: Grant, holding: asyncio.Task[None]) -> None:
        holding.cancel()
        task = asyncio.create_task(self._give_back(grant, holding))
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        self._permits.hand_back(grant)

    async def _give_back(self, grant: Grant, holding: asyncio.Task[None]) -> None:
        await asyncio.wait({holding})
        if not holding.cancelled() and holding.exception() is None:
            grant.not_charged()
            with suppress(HeadgateError):
                await grant.settle(None)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        self.budget.waiters.wake()
        self._on_idle()

    def _timed_out(self, grant: Grant, patience: Patience) -> HeadgateError:
        left = patience.left()
        if left is None or left > 0:
            problem = f"the ledger did not answer within {LEDGER_SECONDS:g} seconds"
            return LedgerUnavailableError(problem)
        resource, timeout = self._permits.resource.name, patience.timeout or 0.0
        return PermitTimeoutError(resource, grant.agent_id, timeout)


# Calls that wait for room in a budget, without a permit.
#
# Room comes from three sides: a call of this process settles below its estimate, a window moves
# on, or another process gives something back. The first is known here, the second has a time, the
# third can only be polled for.
#
# Rule: nobody spins. A chance lets a bounded number try, in order and few at once, each of
# them once; who is refused again goes to the end, so a call that is too large does not keep a
# smaller one from being tried. Who is woken asks for a permit like a newcomer: with the age of its
# first asking, a call that nobody can pay would go before those that can be paid, again and
# again.

TRYING_AT_ONCE = 16
MOST_TRIED = 256
LEAST_POLL_SECONDS = 0.25


class BudgetWaiters:
    """Who waits for money, and what wakes them; `chances` counts how often room may have come."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.chances = 0
        self._clock = clock
        self._waiting: OrderedDict[asyncio.Future[bool], int] = OrderedDict()
        self._trying = 0
        self._left = 0
        self._pause = LEAST_POLL_SECONDS
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, refusal: BudgetExceededError) -> None:
        """Wait until asking again makes sense; who returns tells with `tried` how that ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._waiting[future] = self.chances
        self._poll_by(loop, refusal)
        try:
            await future
        except BaseException:
            # Woken and cancelled at the same moment: the next one may try instead.
            if future.done() and not future.cancelled():
                self.tried()
            raise
        finally:
            self._waiting.pop(future, None)
            if not self._waiting and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def wake(self) -> None:
        """Let those who wait try, a few at once, until all have been tried or enough were."""
        self._pause = LEAST_POLL_SECONDS
        self._let_try()

    def _let_try(self) -> None:
        self.chances += 1
        self._left = MOST_TRIED
        while self._trying < TRYING_AT_ONCE and self._left and self._wake_next():
            self._left -= 1

    def tried(self) -> None:
        """Let the next one try, because one that was woken has its answer."""
        self._trying -= 1
        if self._trying < TRYING_AT_ONCE and self._left and self._wake_next():
            self._left -= 1

    def wake_all(self) -> None:
        """Let everybody go on: there is nothing to wait for any more."""
        self.chances += 1
        while self._wake_next():
            pass

    def _wake_next(self) -> bool:
        """Wake the first that has not been tried on this chance; say whether there was one."""
        while self._waiting:
            future, since = next(iter(self._waiting.items()))
            if since >= self.chances:
                return False
            del self._waiting[future]
            if not future.done():
                future.set_result(True)
                self._trying += 1
                return True
        return False

    def _poll_by(self, loop: asyncio.AbstractEventLoop, refusal: BudgetExceededError) -> None:
        pause = self._pause
        if refusal.resets_at is not None:
            pause = min(max(refusal.resets_at - self._clock(), LEAST_POLL_SECONDS), pause)
        if self._timer is None or self._timer.when() > loop.time() + pause:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(pause, self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._let_try()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._poll)
