"""Waiting for room in a budget: first come, first served, in one process.

Room comes from three sides: a reservation of this process is settled, a window moves on, or another
process gives something back. The first is told here at once, the second has a time, and the third
can only be asked for, with a pause that grows.

Rule: those who wait in a scope stand in a line, and one of them asks at a time. Who waits for
reservations in flight keeps those behind it waiting, otherwise smaller calls would take every room
before it is large enough. Who waits for a window lets others pass, otherwise one large call would
stop all others until tomorrow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from itertools import count
from math import inf
from typing import TypeVar
from weakref import WeakKeyDictionary

from headgate.core.budgets.scopes import ROOT_NAME, Scope
from headgate.errors import BudgetExceededError, utc_time

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
TOLD_AFTER_SECONDS = 30.0
MAX_WAITERS = 10_000

Result = TypeVar("Result")
_Key = tuple[str, str]
"""A scope, and the kind of work that waits there for its like; empty where calls wait for room."""

_log = logging.getLogger("headgate.budgets")


class BudgetQueue:
    """Everybody who waits for the budgets of one tracker, on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.chances = 0
        """How often room may have come."""
        self.lines: dict[_Key, _Line] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in self.lines.values())

    def waiter(self, scopes: Iterable[Scope], kind: str = "") -> BudgetWaiter:
        """Return one who comes now, and is charged to these scopes; it leaves when it is served."""
        return BudgetWaiter(self, next(self._numbers), tuple(scopes), kind)

    def freed(self, scopes: Iterable[Scope]) -> None:
        """Let those who wait in these scopes ask again: something was settled there."""
        self.chances += 1
        if self.lines:
            freed = frozenset(scopes)
            for line in [line for (scope, _), line in self.lines.items() if scope in freed]:
                line.wake()

    async def reserve(
        self,
        scopes: Iterable[Scope],
        ask: Callable[[], Awaitable[Result]],
        *,
        kind: str = "",
        max_wait_seconds: float | None,
    ) -> Result:
        """Ask when it is one's turn, until it is granted, cannot be, or has waited long enough.

        `kind` is that of work whose amount may be worked out by the ledger.
        """
        loop = asyncio.get_running_loop()
        deadline = None if max_wait_seconds is None else loop.time() + max_wait_seconds
        waiter = self.waiter(scopes, kind)
        refusal: BudgetExceededError | None = None
        is_late = False
        try:
            while True:
                if refusal is not None or waiter.is_behind:
                    try:
                        async with asyncio.timeout_at(deadline):
                            await waiter.wait(refusal)
                    except TimeoutError:
                        if refusal is not None:
                            raise refusal from None
                        is_late = True
                waiter.asks()
                try:
                    return await ask()
                except BudgetExceededError as error:
                    if is_late or not error.may_clear:
                        raise
                    refusal = error
        finally:
            waiter.leave()


class BudgetWaiter:
    """One who wants money. It asks, and whenever it is refused it waits for its next turn."""

    def __init__(
        self, queue: BudgetQueue, number: int, scopes: tuple[Scope, ...], kind: str
    ) -> None:
        self.number = number
        self.since = queue.clock()
        self.turn: asyncio.Future[None] | None = None
        self.is_in_line = False
        self.not_before: float | None = None
        self._queue = queue
        self._scopes = scopes
        self._kind = kind
        self._line: _Line | None = None
        self._chance = queue.chances

    @property
    def is_behind(self) -> bool:
        """Whether somebody who came earlier waits for room in one of its scopes."""
        return self._line_ahead() is not None

    def asks(self) -> None:
        """Note that it asks now: room that comes from here on is a reason to ask again."""
        self._chance = self._queue.chances

    async def wait(self, refusal: BudgetExceededError | None) -> None:
        """Wait until asking makes sense: after a refusal, or behind those who came earlier."""
        line = self._line_for(refusal)
        if line is None:
            return
        self.not_before = None if refusal is None else self._window_time(refusal)
        self.turn = asyncio.get_running_loop().create_future()
        has_chance = refusal is not None and self._chance != self._queue.chances
        line.enter(self, has_chance=has_chance)
        await self.turn

    def leave(self) -> None:
        """Go: with the money, or without it for good."""
        line, self._line = self._line, None
        if line is not None:
            line.leave(self)

    def _line_for(self, refusal: BudgetExceededError | None) -> _Line | None:
        if refusal is None:
            ahead = self._line_ahead()
            if ahead is None or ahead is self._line:
                return ahead
        else:
            key = (refusal.scope, refusal.kind)
            found = self._queue.lines.get(key)
            if found is None:
                found = self._queue.lines[key] = _Line(self._queue, key)
            ahead = found
        if ahead is not self._line:
            if refusal is not None and len(self._queue) >= MAX_WAITERS:
                raise refusal
            self.leave()
            # Leaving may have ended the line that it goes to.
            self._line = self._queue.lines.setdefault(ahead.key, ahead)
        return self._line

    def _line_ahead(self) -> _Line | None:
        if not self._queue.lines:
            return None
        kinds = ("", self._kind) if self._kind else ("",)
        for scope in self._scopes:
            for kind in kinds:
                line = self._queue.lines.get((scope, kind))
                if line is not None and line.is_held_before(self.number):
                    return line
        return None

    def _window_time(self, refusal: BudgetExceededError) -> float | None:
        """Return when a window frees room, if reservations in flight cannot."""
        could_be_released = refusal.spent + refusal.overrun + refusal.requested <= refusal.limit
        # What may shrink may do with less than it asked for.
        may_do_with_less = bool(self._kind) and refusal.reserved > 0
        return None if could_be_released or may_do_with_less else refusal.resets_at


class _Line:
    """Those who wait in one scope, by when they came; one of them asks at a time.

    Work of a kind of which too much is in flight has a line of its own: it waits for its like, and
    not for room.
    """

    def __init__(self, queue: BudgetQueue, key: _Key) -> None:
        self.key = key
        self.waiters: list[BudgetWaiter] = []
        self._queue = queue
        self._asking: BudgetWaiter | None = None
        self._has_chance = False
        self._pause = FIRST_PAUSE_SECONDS
        self._next_window = inf
        self._timer: asyncio.TimerHandle | None = None
        self._is_told = False

    def is_held_before(self, number: int) -> bool:
        """Whether somebody with a smaller number waits for reservations in flight, or asks."""
        for waiter in self.waiters:
            if waiter.number >= number:
                return False
            if self._is_ready(waiter):
                return True
        return False

    def enter(self, waiter: BudgetWaiter, *, has_chance: bool) -> None:
        """Take somebody in, or back after a refusal."""
        if not waiter.is_in_line:
            waiter.is_in_line = True
            insort(self.waiters, waiter, key=lambda one: one.number)
        if self._asking is waiter:
            self._asking = None
        if has_chance or self._has_chance or not self._is_ready(waiter):
            self._try_next()
        if waiter.not_before is not None and waiter.not_before < self._next_window:
            self._next_window = waiter.not_before
            self._arm()
        elif self._timer is None:
            self._arm()

    def leave(self, waiter: BudgetWaiter) -> None:
        """Let somebody go, and the next one ask: what it leaves may do for another."""
        if waiter.is_in_line:
            waiter.is_in_line = False
            self.waiters.remove(waiter)
        if self._asking is waiter:
            self._asking = None
        if self.waiters:
            self.wake()
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue.lines.get(self.key) is self:
            del self._queue.lines[self.key]

    def wake(self) -> None:
        """Let the first one ask: room may have come."""
        self._try_next()
        if self._pause > FIRST_PAUSE_SECONDS:
            self._pause = FIRST_PAUSE_SECONDS
            self._arm()

    def _try_next(self) -> None:
        self._has_chance = self._asking is not None
        if self._asking is not None:
            return
        for waiter in self.waiters:
            if self._is_ready(waiter) and waiter.turn is not None and not waiter.turn.done():
                self._asking = waiter
                waiter.turn.set_result(None)
                return

    def _is_ready(self, waiter: BudgetWaiter) -> bool:
        return waiter.not_before is None or waiter.not_before <= self._queue.clock()

    def _arm(self) -> None:
        """Ask again after a pause, or when a window moves on if that is earlier."""
        if self._timer is not None:
            self._timer.cancel()
        until_window = max(self._next_window - self._queue.clock(), FIRST_PAUSE_SECONDS)
        pause = min(self._pause, until_window)
        self._timer = asyncio.get_running_loop().call_later(pause, self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._tell()
        self._try_next()
        now = self._queue.clock()
        times = (one.not_before for one in self.waiters if one.not_before is not None)
        self._next_window = min((one for one in times if one > now), default=inf)
        self._arm()

    def _tell(self) -> None:
        """Say once that calls wait for long: a program that hangs must say why."""
        if self._is_told or not self.waiters:
            return
        first = self.waiters[0]
        if self._queue.clock() - first.since < TOLD_AFTER_SECONDS:
            return
        self._is_told = True
        until = "" if first.not_before is None else f" until {utc_time(first.not_before)}"
        scope, kind = self.key
        if kind:
            line = "%d calls wait for the first of their kind (%s); give estimates to run them all"
            _log.warning(line, len(self.waiters), kind)
            return
        line = "%d calls wait for room in the budget %s%s; raise its limit, or set max_wait_seconds"
        _log.warning(line, len(self.waiters), scope or ROOT_NAME, until)


_PerLoop = WeakKeyDictionary[asyncio.AbstractEventLoop, BudgetQueue]
_queues: WeakKeyDictionary[object, _PerLoop] = WeakKeyDictionary()


def queue_of(tracker: object, clock: Callable[[], float] = time.time) -> BudgetQueue:
    """Return the queue of a tracker on this event loop."""
    loop = asyncio.get_running_loop()
    try:
        per_loop = _queues.setdefault(tracker, WeakKeyDictionary())
        return per_loop.setdefault(loop, BudgetQueue(clock))
    except TypeError:
        # One that cannot be referred to weakly has no queue: its calls wait each for themselves.
        return BudgetQueue(clock)


def tell_freed(tracker: object, scopes: Iterable[Scope]) -> None:
    """Tell those who wait for a tracker on this event loop that something was settled."""
    with suppress(TypeError):
        per_loop = _queues.get(tracker)
        queue = None if per_loop is None else per_loop.get(asyncio.get_running_loop())
        if queue is not None:
            queue.freed(scopes)
