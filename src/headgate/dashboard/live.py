"""`/ui/live`: tells open pages that something changed, so that they fetch their regions anew.

A stream sends no numbers, only the name of what changed: `tasks`, `slots`, and `changed` for
anything at all. It looks once a second, together with all others, so that their pages ask for the
same drawing; with many of them it looks less often. Rule: a page that hears nothing is not old: it
is told `changed` at the first look after `REFRESH_SECONDS`, and so at its first looks, for what
changed since it was drawn, and at the one after a change, since money is settled just after a task
ended. A page that hears nothing for longer takes its stream for lost, and asks for another.
A stream ends at once when its token is revoked at this node, and soon when that is done at another.
No caller has so many streams that none are left for others; one too many is told `refused` and why,
in a stream that ends, since a browser does not tell a page the status of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from math import ceil

import msgspec

from headgate.api.errors import ApiError
from headgate.api.forwarding import EVENT_STREAM
from headgate.api.http.response import Response
from headgate.api.shares import check_room
from headgate.dashboard.page import FRESH_SECONDS, View, until_full_second
from headgate.errors import NotDispatchingError, StoreError

OK = 200
LOOK_SECONDS = FRESH_SECONDS
STREAMS_PER_LOOK_SECOND = 8
MOST_LOOK_SECONDS = 10.0
REFRESH_SECONDS = 10.0
FIRST_LOOKS = 5
"""At so many looks a page is told of a change after it was opened, or after a form: what that set
going, as a webhook that is sent again, comes to its end by itself."""

BLIND_SECONDS = 3.0
"""How often a page looks again on a node that does not see what happens to tasks."""

CHECK_SECONDS = 15.0
PAGES = "open pages"
"""What a caller may have too many of."""

_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_BEGINNING = b"retry: 2000\n\n"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream has told of: the place in the feed, the calls, the slots, the switches."""

    tasks: object = None
    calls: object = None
    slots: object = None
    rules: object = None


async def stream(view: View, _: str) -> Response:
    """Answer with what changes from now on, or with the reason why nothing is told."""
    return Response(OK, b"", _HEADERS, EVENT_STREAM, stream=_events(view))


async def _events(view: View) -> AsyncGenerator[bytes, None]:
    # Asked here, not before the answer: many may be answered before the first of them begins.
    pages, holder = view.api.shares.pages, view.request.holder
    try:
        check_room(pages, holder, PAGES)
    except ApiError as api_error:
        yield b"event: refused\ndata: %b\n\n" % str(api_error).encode()
        return
    clock = asyncio.get_running_loop().time
    tokens, auth = asyncio.Event(), view.api.auth
    pages.take(holder.key)
    auth.watch(tokens.set)
    try:
        yield _BEGINNING
        seen, told_at, checked_at = look(view), clock(), clock()
        settling = FIRST_LOOKS
        while True:
            are_changed = await _is_set_within(tokens, until_look(clock(), pages.taken))
            if are_changed or clock() - checked_at >= CHECK_SECONDS:
                checked_at = clock()
                if not await _is_let_in(view):
                    return
            if are_changed:
                continue
            now_seen = look(view)
            changed = changes(seen, now_seen)
            patience = BLIND_SECONDS if now_seen.tasks is None else REFRESH_SECONDS
            is_due = settling > 0 or clock() - told_at >= patience
            names = changed or (["changed"] if is_due else [])
            settling = max(settling - 1, int(bool(changed)))
            if names:
                seen, told_at = now_seen, clock()
                yield b"".join(b"event: %b\ndata:\n\n" % name.encode() for name in names)
    finally:
        auth.leave(tokens.set)
        pages.give_back(holder.key)


def until_look(now: float, pages: int) -> float:
    """Return how long to wait, so that all streams look at the same moments."""
    steps = max(1, ceil(pages / STREAMS_PER_LOOK_SECOND))
    return until_full_second(now, min(LOOK_SECONDS * steps, MOST_LOOK_SECONDS))


def look(view: View) -> Seen:
    """Return how things stand, without asking the store."""
    api = view.api
    try:
        feed = api.engine.events()
        tasks: object = (feed.life, feed.next)
    except (NotDispatchingError, StoreError):
        tasks = None
    return Seen(
        tasks=tasks,
        calls=_calls(view),
        slots=tuple(status.row for status in api.slots.statuses()),
        rules=(api.is_paused, id(api.config.settings), api.engine.health().problem),
    )


def _calls(view: View) -> object:
    """Return what is another number whenever a call comes, starts or ends."""
    engine = view.api.engine
    state = engine.dispatcher.dispatch_state
    live = 0 if engine.calls is None else len(engine.calls)
    return live, view.api.metrics.calls.ended, 0 if state is None else state.waiting_calls


def changes(before: Seen, after: Seen) -> list[str]:
    """Return the names of the events that tell of a difference."""
    names = [name for name in ("tasks", "slots") if getattr(before, name) != getattr(after, name)]
    return [*names, "changed"] if before != after else []


async def _is_set_within(signal: asyncio.Event, seconds: float) -> bool:
    """Wait for a signal and take it back; False if it has not come in time."""
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return False
    signal.clear()
    return True


async def _is_let_in(view: View) -> bool:
    """Tell whether the token of a stream is still good; without one there is nothing to ask."""
    if not view.request.caller.token_id:
        return True
    try:
        await view.api.auth.look_up(view.request, "read")
    except (ApiError, StoreError):
        return False
    return True
