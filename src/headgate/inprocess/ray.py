"""Functions and actors of somebody's own Ray program that hold money and a permit while they run.

`governed` decorates what `ray.remote` is given. All calls with the same budget and concurrency
share one *governor*, an actor of the cluster with the ordinary scheduler and budget in it. So what
calls have cost before is known to all of them, and no two workers see the same free money.

Rule: whoever dies gives back what it has. A worker renews each call from the moment when it asks.
A call that is not renewed loses its place. If its function may have begun, its estimate is booked.

Rule: the end of a governor costs no result. Calls that wait ask the next one, and calls that run
make themselves known there. What the lost one held is booked when its lease in the ledger ends.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import msgspec
import structlog

from headgate.budgets.connect import ledger_address
from headgate.budgets.tracker import Amount, LedgerTracker
from headgate.core.lifecycle import Usage
from headgate.core.money import to_usd_float
from headgate.core.task import Task
from headgate.errors import HeadgateError, InvalidSettingError
from headgate.extras import naming_extras
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.permits import Grant, SharedResource
from headgate.inprocess.scheduler import LoadScheduler

with naming_extras("headgate.ray"):
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

log = structlog.get_logger("headgate.ray")

NAMESPACE = "headgate"
DEFAULT_CONCURRENCY = 8
LEASE_SECONDS = 30.0
GOVERNOR_SECONDS = 60.0
"""How long a call waits for a governor that answers."""
RETRY_SECONDS = 0.5
MAX_WAITERS = 100_000

UsageOf = Callable[[Any], Usage | None]


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Which governor a call asks, and what it says there."""

    budget: str
    project: str
    concurrency: int
    limit_usd: str | None
    kind: str
    estimate: Estimate | None = None
    timeout_seconds: float | None = None

    @property
    def governor(self) -> str:
        """The name of the actor; an address may have a password in it."""
        text = f"{self.budget}\n{self.concurrency}"
        return f"headgate-governor-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Charge:
    """What the call under way has cost, as it says itself."""

    def __init__(self) -> None:
        self.usd: float | None = None
        self.tokens: int | None = None


_charge: ContextVar[Charge | None] = ContextVar("headgate_ray_charge", default=None)


def charge(usd: Amount, *, tokens: int | None = None) -> None:
    """Report what the call under way cost in all; a later report replaces it."""
    current = _charge.get()
    if current is None:
        raise InvalidSettingError("charge", "is for what runs inside a governed function")
    current.usd, current.tokens = float(Decimal(str(usd))), tokens


def governed(
    *,
    budget: str,
    project: str = "default",
    limit_usd: Amount | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    estimate: Estimate | None = None,
    usage_of: UsageOf | None = None,
    timeout_seconds: float | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function, or a method of an actor, that Ray runs.

    `budget` is the address of a ledger that the nodes of the cluster reach, `project` whose budget
    it is there (`project:<name>`), and `limit_usd` its limit, which is set if it has none;
    `BudgetMismatchError` if it has another. At most `concurrency` calls of
    one governor run at a time in the whole cluster. A call says what it cost with `charge`, or
    `usage_of` reads it from what it returns; otherwise what was held is booked.
    """
    if concurrency < 1:
        raise InvalidSettingError("concurrency", f"must be at least 1, not {concurrency}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            problem = "is for functions that return; a generator cannot be governed on Ray"
            raise InvalidSettingError("governed", problem)
        terms = Terms(
            budget=budget,
            project=project,
            concurrency=concurrency,
            limit_usd=None if limit_usd is None else str(limit_usd),
            kind=function.__qualname__,
            estimate=estimate,
            timeout_seconds=timeout_seconds,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with _held(terms) as cost:
                return _read(function(*args, **kwargs), usage_of, cost)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            async with _held_async(terms) as cost:
                return _read(await function(*args, **kwargs), usage_of, cost)

        return call_async if inspect.iscoroutinefunction(function) else call

    return decorate


def _read(result: Any, usage_of: UsageOf | None, cost: Charge) -> Any:  # noqa: ANN401
    usage = None if usage_of is None else usage_of(result)
    if usage is not None and usage.micro_usd is not None:
        cost.usd, cost.tokens = to_usd_float(usage.micro_usd), usage.tokens
    return result


# In a worker of the cluster.
#
# Ray's references are waited for in two ways. So the steps of a call are a generator of what to
# wait for, a reference or seconds, and `_at_once` and `_awaited` do the waiting.

Steps = Generator[Any, Any, None]


def _at_once(steps: Steps) -> None:
    with suppress(StopIteration):
        step = next(steps)
        while True:
            try:
                if isinstance(step, float):
                    time.sleep(step)
                answer = None if isinstance(step, float) else ray.get(step)
            except BaseException as error:  # noqa: BLE001  the steps decide
                step = steps.throw(error)
            else:
                step = steps.send(answer)


async def _awaited(steps: Steps) -> None:
    with suppress(StopIteration):
        step = next(steps)
        while True:
            try:
                answer = await (asyncio.sleep(step) if isinstance(step, float) else step)
            except BaseException as error:  # noqa: BLE001  the steps decide
                step = steps.throw(error)
            else:
                step = steps.send(answer)


@contextmanager
def _held(terms: Terms) -> Iterator[Charge]:
    call = GovernedCall(terms)
    _at_once(call.ask())
    token = _charge.set(call.cost)
    error = True
    try:
        yield call.cost
        error = False
    finally:
        _charge.reset(token)
        _at_once(call.end(has_failed=error))


@asynccontextmanager
async def _held_async(terms: Terms) -> AsyncIterator[Charge]:
    call = GovernedCall(terms)
    await _awaited(call.ask())
    token = _charge.set(call.cost)
    error = True
    try:
        yield call.cost
        error = False
    finally:
        _charge.reset(token)
        await _awaited(call.end(has_failed=error))


class GovernedCall:
    """One call of a governed function, from asking for its permit to what it has cost."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._key = uuid.uuid4().hex
        self._governor: Any = None
        self._has_begun = False
        self.cost = Charge()

    def ask(self) -> Steps:
        """Wait for the permit and the money; whoever gives up leaves nothing behind."""
        lost_at: float | None = None
        try:
            while not self._has_begun:
                try:
                    self._governor = self._governor or _governor(self._terms)
                    _renewals.add(self)
                    yield self._governor.acquire.remote(self._key, self._terms)
                    # The governor may have taken this worker for dead meanwhile.
                    self._has_begun = yield self._governor.begin.remote(self._key)
                    lost_at = None
                except (RayActorError, ValueError) as error:
                    # Ray says ValueError of a name whose actor has just ended.
                    if isinstance(error, RayTaskError) or getattr(
                        error, "actor_init_failed", False
                    ):
                        raise
                    lost_at = lost_at or time.monotonic()
                    if time.monotonic() - lost_at > GOVERNOR_SECONDS:
                        raise
                    self._governor = None
                    yield RETRY_SECONDS
        except BaseException:
            _renewals.drop(self)
            if self._governor is not None:
                with suppress(RayError):
                    self._governor.abandon.remote(self._key)
            raise

    def end(self, *, has_failed: bool) -> Steps:
        """Book what the call has cost, and free its permit.

        The work is done and paid for, so no trouble here may replace its result. What cannot be
        booked now is booked at its estimate, when the lease of the reservation ends.
        """
        _renewals.drop(self)
        usd, tokens = self.cost.usd, self.cost.tokens
        try:
            yield self._governor.release.remote(self._key, usd, tokens, has_failed=has_failed)
        except RayError as error:
            problem = f"{type(error).__name__}: {error}"
            log.warning("the cost of a governed call could not be booked", problem=problem)

    def renew(self) -> Any:  # noqa: ANN401  a reference of Ray, None without a governor
        """Tell the governor that this process lives."""
        governor = self._governor
        if governor is None:
            return None
        return governor.renew.remote(self._key, self._terms, has_begun=self._has_begun)

    def find_governor(self) -> None:
        """Turn to the governor that is there now; one that runs was known to the lost one only."""
        if self._has_begun:
            with suppress(RayError, ValueError):
                self._governor = _governor(self._terms)


def _governor(terms: Terms) -> Any:  # noqa: ANN401  a handle of Ray
    actor = ray.remote(Governor).options(
        name=terms.governor,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=MAX_WAITERS,
        max_restarts=-1,
    )
    return actor.remote(terms.budget, terms.concurrency)


class _Renewals:
    """The calls of this process, and a thread that renews them while there are any."""

    def __init__(self) -> None:
        self._calls: set[GovernedCall] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, call: GovernedCall) -> None:
        with self._lock:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="headgate-ray")
                self._thread.start()

    def drop(self, call: GovernedCall) -> None:
        with self._lock:
            self._calls.discard(call)

    def _run(self) -> None:
        pause = LEASE_SECONDS / 4
        while True:
            time.sleep(pause)
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                # Under the lock: a renewal that came after the release would be a call of its own.
                sent = {call: call.renew() for call in self._calls}
            lost = [call for call, renewal in sent.items() if not _has_arrived(renewal)]
            for call in lost:
                call.find_governor()
            pause = RETRY_SECONDS if lost else LEASE_SECONDS / 4


def _has_arrived(renewal: Any) -> bool:  # noqa: ANN401  a reference of Ray
    """Tell whether a renewal has arrived; a governor that takes its time is not lost."""
    if renewal is None:
        return True
    try:
        ray.get(renewal, timeout=LEASE_SECONDS / 8)
    except RayActorError:
        return False
    except RayError:
        return True
    return True


_renewals = _Renewals()


# The governor, an actor of the cluster.


class _Call:
    """What the governor knows of one call: its permit and money, once it has them."""

    def __init__(self, acquiring: asyncio.Task[Grant], *, has_begun: bool) -> None:
        self.acquiring = acquiring
        self.has_begun = has_begun
        self.heard_at = time.monotonic()


class Governor:
    """Gives permits and money to calls anywhere in a cluster."""

    def __init__(self, budget: str, concurrency: int) -> None:
        self._address = ledger_address(budget)
        self._budget = Budget(budget)
        self._scheduler = LoadScheduler(
            None,
            SharedResource("calls", concurrency),
            max_waiters=MAX_WAITERS,
            budget=self._budget,
        )
        self._calls: dict[str, _Call] = {}
        self._limits: set[tuple[str, str]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        # One that Ray has started again first hears of the calls that its predecessor let begin.
        self._opens_at = time.monotonic() + (LEASE_SECONDS / 2 if _is_restarted() else 0.0)

    async def acquire(self, key: str, terms: Terms) -> None:
        """Wait for a permit and for money, and keep both under a key, until the call begins."""
        call = self._calls.get(key)
        if call is None:
            call = self._take_up(key, self._acquired(terms), has_begun=False)
        await asyncio.wait([call.acquiring])
        if call.acquiring.cancelled():
            return
        error = call.acquiring.exception()
        if error is not None:
            self._calls.pop(key, None)
            raise error

    async def begin(self, key: str) -> bool:
        """Note that the caller has heard of its permit; False if it has lost it again."""
        call = self._calls.get(key)
        if call is None or not call.acquiring.done():
            return False
        call.has_begun, call.heard_at = True, time.monotonic()
        return True

    async def renew(self, key: str, terms: Terms, *, has_begun: bool) -> None:
        """Hear that a caller lives. One that another governor let begin takes a permit here."""
        call = self._calls.get(key)
        if call is not None:
            call.heard_at = time.monotonic()
        elif has_begun:
            # Its money is held already, and booked when the lease of that ends.
            self._take_up(key, self._permit(terms), has_begun=True)

    async def release(
        self, key: str, usd: float | None, tokens: int | None, *, has_failed: bool
    ) -> None:
        """Book what a call cost, and free its permit."""
        grant = await self._let_go(key)
        if grant is not None:
            if usd is not None:
                grant.charge(usd, tokens=tokens)
            error = HeadgateError("the call failed") if has_failed else None
            await self._scheduler.release(grant, error=error)

    async def abandon(self, key: str) -> None:
        """Forget a call that has not begun: it costs nothing."""
        grant = await self._let_go(key)
        if grant is not None:
            grant.not_charged()
            await self._scheduler.release(grant)

    async def in_use(self) -> int:
        """Return how many permits are taken."""
        return self._scheduler.resource.in_use

    def _take_up(
        self, key: str, acquiring: Coroutine[Any, Any, Grant], *, has_begun: bool
    ) -> _Call:
        loop = asyncio.get_running_loop()
        if self._sweeping is None:
            self._sweeping = loop.create_task(self._sweep())
        call = self._calls[key] = _Call(loop.create_task(acquiring), has_begun=has_begun)
        return call

    async def _acquired(self, terms: Terms) -> Grant:
        await asyncio.sleep(max(0.0, self._opens_at - time.monotonic()))
        scope = f"project:{terms.project}"
        limit = terms.limit_usd
        if limit is not None and (scope, limit) not in self._limits:
            tracker = await self._budget.open()
            assert isinstance(tracker, LedgerTracker)  # noqa: S101  it has an address
            await tracker.create_budget(scope, limit, source="limit_usd", ledger=self._address)
            self._limits.add((scope, limit))
        task = Task(agent_id=terms.project, target=terms.kind, scopes=(scope,))
        return await self._scheduler.acquire(
            terms.project, task=task, timeout=terms.timeout_seconds, estimate=terms.estimate
        )

    async def _permit(self, terms: Terms) -> Grant:
        return await self._scheduler.acquire_permit(terms.project)

    async def _let_go(self, key: str) -> Grant | None:
        """Forget a call, and return what it has; None while it waits, which ends here."""
        call = self._calls.pop(key, None)
        if call is None:
            return None
        call.acquiring.cancel()
        await asyncio.wait([call.acquiring])
        if call.acquiring.cancelled() or call.acquiring.exception() is not None:
            return None
        return call.acquiring.result()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            late = time.monotonic() - LEASE_SECONDS
            gone = [(key, call) for key, call in self._calls.items() if call.heard_at < late]
            for key, call in gone:
                try:
                    if call.has_begun:
                        await self.release(key, None, None, has_failed=True)
                    else:
                        await self.abandon(key)
                except HeadgateError as error:
                    log.warning("a lost governed call could not be booked", problem=str(error))


def _is_restarted() -> bool:
    """Tell whether Ray has started this actor again."""
    context = ray.get_runtime_context()
    return context.get_actor_id() is not None and bool(context.was_current_actor_reconstructed)
