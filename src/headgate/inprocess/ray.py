"""Functions and actors of somebody's own Ray program that hold money and a permit while they run.

`governed` decorates what `ray.remote` is given. All calls with the same budget and concurrency
share one *governor*, an actor of the cluster with the ordinary scheduler and budget in it. So what
calls have cost before is known to all of them, and no two workers see the same free money.

Rule: whoever dies with a permit gives it back. A worker renews what it holds, and what is not
renewed is booked at its estimate and freed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

import msgspec

from headgate.budgets.tracker import Amount
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

NAMESPACE = "headgate"
DEFAULT_CONCURRENCY = 8
LEASE_SECONDS = 30.0
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
    it is there (`project:<name>`), and `limit_usd` sets its limit. At most `concurrency` calls of
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


@contextmanager
def _held(terms: Terms) -> Iterator[Charge]:
    governor, key, cost = _governor(terms), uuid.uuid4().hex, Charge()
    ray.get(governor.acquire.remote(key, terms))
    token = _charge.set(cost)
    _renewals.add(governor, key)
    error = True
    try:
        yield cost
        error = False
    finally:
        _renewals.drop(key)
        _charge.reset(token)
        ray.get(governor.release.remote(key, cost.usd, cost.tokens, has_failed=error))


@asynccontextmanager
async def _held_async(terms: Terms) -> AsyncIterator[Charge]:
    governor, key, cost = _governor(terms), uuid.uuid4().hex, Charge()
    await governor.acquire.remote(key, terms)
    token = _charge.set(cost)
    _renewals.add(governor, key)
    error = True
    try:
        yield cost
        error = False
    finally:
        _renewals.drop(key)
        _charge.reset(token)
        await governor.release.remote(key, cost.usd, cost.tokens, has_failed=error)


def _governor(terms: Terms) -> Any:  # noqa: ANN401  a handle of Ray
    actor = ray.remote(Governor).options(
        name=terms.governor,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=MAX_WAITERS,
    )
    return actor.remote(terms.budget, terms.concurrency)


class _Renewals:
    """The permits that this process holds, and a thread that renews them while there are any."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, governor: Any, key: str) -> None:  # noqa: ANN401  a handle of Ray
        with self._lock:
            self._held[key] = governor
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="headgate-ray")
                self._thread.start()

    def drop(self, key: str) -> None:
        with self._lock:
            self._held.pop(key, None)

    def _run(self) -> None:
        while True:
            time.sleep(LEASE_SECONDS / 4)
            with self._lock:
                held = list(self._held.items())
                if not held:
                    self._thread = None
                    return
            for key, governor in held:
                governor.renew.remote(key)


_renewals = _Renewals()


# The governor, an actor of the cluster.


class Governor:
    """Gives permits and money to calls anywhere in a cluster."""

    def __init__(self, budget: str, concurrency: int) -> None:
        self._budget = Budget(budget)
        self._scheduler = LoadScheduler(
            None,
            SharedResource("calls", concurrency),
            max_waiters=MAX_WAITERS,
            budget=self._budget,
        )
        self._held: dict[str, tuple[Grant, float]] = {}
        self._limits: dict[str, str] = {}
        self._sweeping: asyncio.Task[None] | None = None

    async def acquire(self, key: str, terms: Terms) -> None:
        """Wait for a permit and for money, and keep both under a key."""
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        scope = f"project:{terms.project}"
        if terms.limit_usd is not None and self._limits.get(scope) != terms.limit_usd:
            tracker = await self._budget.open()
            await tracker.set_budget(scope, terms.limit_usd)
            self._limits[scope] = terms.limit_usd
        task = Task(agent_id=terms.project, target=terms.kind, scopes=(scope,))
        grant = await self._scheduler.acquire(
            terms.project, task=task, timeout=terms.timeout_seconds, estimate=terms.estimate
        )
        self._held[key] = grant, time.monotonic()

    async def renew(self, key: str) -> None:
        """Hear that the holder of a key lives."""
        found = self._held.get(key)
        if found is not None:
            self._held[key] = found[0], time.monotonic()

    async def release(
        self, key: str, usd: float | None, tokens: int | None, *, has_failed: bool
    ) -> None:
        """Book what a call cost, and free its permit."""
        found = self._held.pop(key, None)
        if found is not None:
            await self._end(found[0], usd, tokens, has_failed=has_failed)

    async def in_use(self) -> int:
        """Return how many permits are taken."""
        return len(self._held)

    async def _end(
        self, grant: Grant, usd: float | None, tokens: int | None, *, has_failed: bool
    ) -> None:
        if usd is not None:
            grant.charge(usd, tokens=tokens)
        error = HeadgateError("the call failed") if has_failed else None
        await self._scheduler.release(grant, error=error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 4)
            late = time.monotonic() - LEASE_SECONDS
            gone = [key for key, (_, heard_at) in self._held.items() if heard_at < late]
            for key in gone:
                await self.release(key, None, None, has_failed=True)
