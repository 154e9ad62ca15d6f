"""`/ui/live`: tells open pages that something changed, so that they fetch their regions anew.

A stream sends no figures, only the name of what changed: `tasks`, `slots`, and `changed` for
anything at all. It looks once a second, together with all others, so that their pages ask for the
same drawing; with many of them it looks less often. Rule: a page that hears nothing is not old: at
least every `REFRESH_SECONDS` it is told `changed`, and so it is at the first look, for what changed
since it was drawn, and at the one after a change, since books are settled just after a task ended.
No caller has so many streams that none are left for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from math import ceil

import msgspec

from headgate.dashboard.page import View
from headgate.dashboard.recent import FRESH_SECONDS, until_full_second
from headgate.errors import NotDispatchingError, StoreError
from headgate.web.answers import Answer
from headgate.web.forwarding import EVENT_STREAM
from headgate.web.refusals import Refusal
from headgate.web.requests import Request

OK = 200
LOOK_SECONDS = FRESH_SECONDS
STREAMS_PER_LOOK_SECOND = 16
REFRESH_SECONDS = 10.0
BLIND_SECONDS = 3.0
"""How often a page looks again on a node that does not see what happens to tasks."""

CHECK_SECONDS = 15.0
MAX_STREAMS = 200
MAX_STREAMS_PER_CALLER = 100
"""How many pages one token has open; without tokens, one address. A team may share a token, and may
not take more than half of what there is."""

_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_BEGINNING = b"retry: 2000\n\n"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream has told of: the place in the feed, the slots, the switches."""

    tasks: object = None
    slots: object = None
    rules: object = None


class Live:
    """All streams of a node."""

    def __init__(self) -> None:
        self.streams = 0
        self.by_caller: Counter[str] = Counter()

    async def stream(self, view: View, _: str) -> Answer:
        """Answer with what changes from now on."""
        if self.streams >= MAX_STREAMS:
            raise Refusal("limit_reached", f"there are {MAX_STREAMS} open pages; close some")
        if self._has_enough(view):
            line = f"you have {MAX_STREAMS_PER_CALLER} open pages; close some"
            raise Refusal("limit_reached", line)
        return Answer(OK, b"", _HEADERS, EVENT_STREAM, stream=self._events(view))

    def _has_enough(self, view: View) -> bool:
        return self.by_caller[_caller_of(view)] >= MAX_STREAMS_PER_CALLER

    async def _events(self, view: View) -> AsyncGenerator[bytes, None]:
        # Many may have been answered before the first of them began.
        if self._has_enough(view) or self.streams >= MAX_STREAMS:
            return
        clock, caller = asyncio.get_running_loop().time, _caller_of(view)
        self.streams += 1
        self.by_caller[caller] += 1
        try:
            yield _BEGINNING
            seen, told_at, checked_at, is_settling = look(view), clock(), clock(), True
            while True:
                await asyncio.sleep(self.until_look(clock()))
                now_seen = look(view)
                changed = changes(seen, now_seen)
                patience = BLIND_SECONDS if now_seen.tasks is None else REFRESH_SECONDS
                is_due = is_settling or clock() - told_at >= patience
                names = changed or (["changed"] if is_due else [])
                is_settling = bool(changed)
                if clock() - checked_at >= CHECK_SECONDS:
                    checked_at = clock()
                    if not await _is_let_in(view.request, view):
                        return
                if names:
                    seen, told_at = now_seen, clock()
                    yield b"".join(b"event: %b\ndata:\n\n" % name.encode() for name in names)
        finally:
            self.streams -= 1
            self.by_caller[caller] -= 1
            self.by_caller += Counter()  # Drops those that have none.

    def until_look(self, now: float) -> float:
        """Return how long to wait, so that all streams look at the same moments."""
        steps = max(1, ceil(self.streams / STREAMS_PER_LOOK_SECOND))
        return until_full_second(now, LOOK_SECONDS * steps)


def look(view: View) -> Seen:
    """Return how things stand, without asking the store."""
    api = view.api
    try:
        feed = api.engine.events()
        tasks: object = (feed.life, feed.next)
    except (NotDispatchingError, StoreError):
        tasks = None
    slots = () if api.slots is None else api.slots.statuses()
    settings = None if api.administration is None else id(api.administration.settings)
    return Seen(
        tasks=tasks,
        slots=tuple(status.row for status in slots),
        rules=(api.is_paused, settings, api.engine.health().problem),
    )


def changes(before: Seen, after: Seen) -> list[str]:
    """Return the names of the events that tell of a difference."""
    names = [name for name in ("tasks", "slots") if getattr(before, name) != getattr(after, name)]
    return [*names, "changed"] if before != after else []


def _caller_of(view: View) -> str:
    return view.request.caller.token_id or f"at {view.request.peer}"


async def _is_let_in(request: Request, view: View) -> bool:
    """Tell whether the token of a stream is still good; without one there is nothing to ask."""
    if not request.caller.token_id:
        return True
    try:
        await view.api.entrance.look_up(request, "read")
    except (Refusal, StoreError):
        return False
    return True
