"""Calls that wait for room in a budget, without a place.

Room comes from three sides: a call of this process settles below its estimate, a window moves on,
or another process gives something back. The first is told here, the second has a time, the third
can only be looked for now and then.

Rule: nobody spins. Each occasion wakes a bounded number, in order; who is refused again goes to the
end, so that a call that is too large does not keep a smaller one from being tried.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from headgate.errors import BudgetExceededError

WOKEN_AT_ONCE = 16
LOOK_SECONDS = 5.0
SHORTEST_LOOK_SECONDS = 0.25


class Parking:
    """Who waits for money, and what wakes them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._parked: OrderedDict[asyncio.Future[bool], None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._parked)

    async def wait(self, refusal: BudgetExceededError) -> None:
        """Wait until asking again makes sense."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()
        self._parked[future] = None
        self._look_by(loop, refusal)
        try:
            await future
        finally:
            self._parked.pop(future, None)
            if not self._parked and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def wake(self, most: int = WOKEN_AT_ONCE) -> None:
        """Let the first ones ask again."""
        while self._parked and most > 0:
            future, _ = self._parked.popitem(last=False)
            if not future.done():
                future.set_result(True)
                most -= 1

    def wake_all(self) -> None:
        """Let everybody go on: there is nothing to wait for any more."""
        self.wake(len(self._parked))

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
