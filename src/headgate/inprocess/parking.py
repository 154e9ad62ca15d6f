"""Calls that wait for room in a budget, without a place.

Room comes from three sides: a call of this process settles below its estimate, a window moves on,
or another process gives something back. The first is told here, the second has a time, the third
can only be looked for now and then.

Rule: nobody spins. An occasion lets a bounded number try, in order and few at once, each of them
once; who is refused again goes to the end, so a call that is too large does not keep a smaller one
from being tried. Who is woken asks for a place like a newcomer: with the age of its first asking, a
call that nobody can pay would go before those that can be paid, again and again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from headgate.errors import BudgetExceededError

TRYING_AT_ONCE = 16
MOST_TRIED = 256
LOOK_SECONDS = 5.0
SHORTEST_LOOK_SECONDS = 0.25


class Parking:
    """Who waits for money, and what wakes them; `occasions` counts how often room may have come."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.occasions = 0
        self._clock = clock
        self._parked: OrderedDict[asyncio.Future[bool], int] = OrderedDict()
        self._trying = 0
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._parked)

    async def wait(self, refusal: BudgetExceededError) -> None:
        """Wait until asking again makes sense; who returns tells with `tried` how that ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._parked[future] = self.occasions
        self._look_by(loop, refusal)
        try:
            await future
        except BaseException:
            # Woken and cancelled at the same moment: the next one may try instead.
            if future.done() and not future.cancelled():
                self.tried()
            raise
        finally:
            self._parked.pop(future, None)
            if not self._parked and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def wake(self) -> None:
        """Let those who wait try, a few at once, until all have been tried or enough were."""
        self.occasions += 1
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
        self.occasions += 1
        while self._wake_next():
            pass

    def _wake_next(self) -> bool:
        """Wake the first that has not been tried on this occasion; say whether there was one."""
        while self._parked:
            future, since = next(iter(self._parked.items()))
            if since >= self.occasions:
                return False
            del self._parked[future]
            if not future.done():
                future.set_result(True)
                self._trying += 1
                return True
        return False

    def _look_by(self, loop: asyncio.AbstractEventLoop, refusal: BudgetExceededError) -> None:
        pause = LOOK_SECONDS
        if refusal.resets_at is not None:
            pause = min(max(refusal.resets_at - self._clock(), SHORTEST_LOOK_SECONDS), pause)
        if self._timer is None or self._timer.when() > loop.time() + pause:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(pause, self._look)

    def _look(self) -> None:
        self._timer = None
        self.wake()
        if self._parked:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
