"""Forms that were sent: a second click is answered as the first was, and does nothing more.

Every page that is sent has a number of its own in its forms. While a service is slow people click
again, and a browser sends a form again when its answer is reloaded; retrying a task twice is paid
twice. Rule: the same form with the same number and the same fields is carried out once; one that
failed may be sent again. A page that answers a form shows what nobody may see again, so it is not
kept: only that it was shown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from headgate.dashboard.page import Done, Page

ONCE_FIELD = "once"
MAX_KEPT = 1_000
KEPT_SECONDS = 3_600.0

_SHOWN = "this form was sent before, and what it made was shown then; look for it in the list."

Deed = Callable[[], Awaitable[Done | Page]]
Doing = asyncio.Task[Done | Page]


class SentForms:
    """What came of the forms of the last hour, by caller, address, number and fields."""

    def __init__(self, ticks: Callable[[], float] | None = None) -> None:
        self._ticks = ticks
        self._kept: OrderedDict[object, tuple[Doing | Done, float]] = OrderedDict()

    async def once(self, key: object, do: Deed, *, again: str) -> Done | Page:
        """Carry a form out, or return what came of it; `again` is where a page is not shown twice.

        It is done in a task of its own: who clicks again has left the first request.
        """
        now = (self._ticks or asyncio.get_running_loop().time)()
        self._forget_before(now)
        kept, _ = self._kept.get(key, (None, now))
        if kept is None:
            doing = asyncio.create_task(_done(do))
            doing.add_done_callback(lambda ended: self._ended(key, ended, again))
            self._kept[key] = (doing, now + KEPT_SECONDS)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return await asyncio.shield(doing)
        return kept if isinstance(kept, Done) else _told(await asyncio.shield(kept), again)

    def _forget_before(self, now: float) -> None:
        while self._kept and now >= next(iter(self._kept.values()))[1]:
            self._kept.popitem(last=False)

    def _ended(self, key: object, doing: Doing, again: str) -> None:
        kept, kept_until = self._kept.get(key, (None, 0.0))
        has_failed = doing.cancelled() or doing.exception() is not None
        if kept is not doing:
            return
        if has_failed:
            del self._kept[key]
        else:
            self._kept[key] = (_told(doing.result(), again), kept_until)


async def _done(do: Deed) -> Done | Page:
    return await do()


def _told(done: Done | Page, again: str) -> Done:
    """Return what is told to whoever sends a form once more."""
    return done if isinstance(done, Done) else Done(to=again, said=_SHOWN, is_error=True)
