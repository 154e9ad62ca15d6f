"""`GET /events` and `GET /tasks/{id}/events`: what happens to tasks, as server-sent events.

A stream has a place in the feed and no queue of its own, so one that is read slowly keeps nothing
that is not kept anyway. One whose client takes nothing for a while is ended, and so is one that has
fallen out of the ring; both can go on with `Last-Event-ID`. Rule: whoever goes on after an event is
told everything that came after it, or is told `reset` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from enum import Enum
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from headgate.api import submission
from headgate.api.api import Api, Route
from headgate.api.errors import ApiError, invalid_field
from headgate.api.forwarding import EVENT_STREAM
from headgate.api.http.request import Request
from headgate.api.http.response import Response
from headgate.api.shares import Holder, check_room, held
from headgate.api.submission import check_unknown, excerpt
from headgate.api.tasks import own_task
from headgate.core.events import LAST_RANK, EventKind, TaskEvent
from headgate.core.task import TaskStatus
from headgate.core.task_view import exact_moment
from headgate.engine.events import EventFeed, Happening, TaskWatch, event_of, happening_of
from headgate.errors import NotDispatchingError, StoreError
from headgate.storage.store import TaskQuery

OK = 200
NO_CONTENT = 204
HEARTBEAT_SECONDS = 15.0
RETRY_MS = 2_000
MAX_PIECE_BYTES = 16 * 1024
PACE_SECONDS_PER_STREAM = 0.0002
"""With many streams each is written to less often, so that they cost no more than a part."""

STREAMS = "streams of events"
"""What a caller may have too many of."""

QUERY_FIELDS = ("agentId", "projectId", "kind", "state")

_HEADERS = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
_LAST_EVENT_ID = b"last-event-id"
_FIRST_LINE = b"retry: %d\n" % RETRY_MS
_HEARTBEAT = b":\n"
_END = "-end"
_ENCODER = msgspec.json.Encoder()
_KINDS = {kind.value: kind for kind in EventKind if kind is not EventKind.RESET}
_STATES = {status.value: status for status in TaskStatus}

Wants = Callable[[Happening], bool]
Pieces = AsyncGenerator[bytes, None]
Named = TypeVar("Named", bound=Enum)


class _Piece(NamedTuple):
    """Events as they are sent together, and the place after them."""

    text: bytes
    place: int


async def stream_events(api: Api, request: Request, _: str) -> Response:
    """Answer with everything that happens from now on, or after the event that is named."""
    wants = _filter(request)
    check_room(api.shares.streams, request.holder, STREAMS)
    try:
        feed = api.engine.events()
    except NotDispatchingError as error:
        return await _passed_on(api, request, "/events", error)
    return _answer(api, request, _events(api, request, feed, wants))


async def stream_task(api: Api, request: Request, task_id: str) -> Response:
    """Answer with the state of a task, then with what happens to it, until it has ended."""
    record = await own_task(api, request.caller, task_id)
    if record.is_terminal and request.header(_LAST_EVENT_ID).endswith(_END.encode()):
        # A browser asks again after the end of a stream, unless it is told that there is no more.
        return Response(NO_CONTENT, b"")
    check_room(api.shares.streams, request.holder, STREAMS)
    try:
        feed = api.engine.events()
    except NotDispatchingError as error:
        return await _passed_on(api, request, f"/tasks/{task_id}/events", error)
    return _answer(api, request, _task_events(api, request, feed, task_id))


async def _passed_on(api: Api, request: Request, path: str, error: NotDispatchingError) -> Response:
    if request.method == "HEAD":
        raise error
    answer = await api.forwarder.stream(error.address, path, request)
    if answer is None:
        raise error
    return answer if answer.stream is None else _answer(api, request, answer.stream)


def _answer(api: Api, request: Request, pieces: Pieces) -> Response:
    return Response(OK, b"", _HEADERS, EVENT_STREAM, stream=_counted(api, request.holder, pieces))


async def _counted(api: Api, holder: Holder, pieces: Pieces) -> Pieces:
    try:
        # Asked once more: many may be answered before the first of them begins.
        with held(api.shares.streams, holder, STREAMS):
            async for piece in pieces:
                yield piece
    except ApiError:
        yield _FIRST_LINE + b"\n"
    finally:
        await pieces.aclose()


async def _events(api: Api, request: Request, feed: EventFeed, wants: Wants) -> Pieces:
    """Yield the events after a place, until this node dispatches no more."""
    life, place, first = _beginning(feed, request)
    yield first
    with _Clock(api, request) as clock:
        while feed.is_open:
            if feed.life != life:
                life, place = feed.life, feed.next
                yield _reset(feed, place)
            elif place < feed.first:
                return
            piece = _piece(feed, place, wants)
            place = piece.place
            if piece.text:
                clock.note()
                yield piece.text
            if not await clock.is_let_in():
                return
            if clock.is_silent():
                yield _HEARTBEAT + _id_line(feed, place)
            await clock.keep_pace()
            if place == feed.next and life == feed.life:
                await clock.wait(feed.wait())


async def _task_events(api: Api, request: Request, feed: EventFeed, task_id: str) -> Pieces:
    """Yield the state of a task, and what happens to it, until it has ended."""
    watch, clock, rank = feed.watch(task_id), _Clock(api, request), -1
    try:
        yield _FIRST_LINE + b"\n"
        life = ""
        while feed.is_open and rank < LAST_RANK:
            watch.changed.clear()
            if feed.life != life:
                life = feed.life
                await _look(api, feed, watch)
            while watch.news:
                number, happening = watch.news.popleft()
                if not _is_own(request, happening):
                    return
                if happening.rank > rank:
                    rank = happening.rank
                    clock.note()
                    yield _task_line(feed, number, happening)
            if rank == LAST_RANK or not await clock.is_let_in():
                return
            if clock.is_silent():
                yield _HEARTBEAT + b"\n"
            await clock.keep_pace()
            await clock.wait(watch.changed.wait())
    except StoreError:
        # The state cannot be told; the client comes back for it.
        return
    finally:
        clock.leave()
        feed.leave(watch)


async def _look(api: Api, feed: EventFeed, watch: TaskWatch) -> None:
    """Put the present state of a task before what happens to it from now on."""
    number = feed.next - 1
    record = await api.engine.get(watch.task_id)
    if record is not None:
        watch.news.appendleft((number, happening_of(record, api.engine.now())))


class _Clock:
    """What a stream does by the time: heartbeats, its pace, and whether its token is still good."""

    def __init__(self, api: Api, request: Request) -> None:
        self._api = api
        self._request = request
        self._now = asyncio.get_running_loop().time
        self._beat_at = self._now() + HEARTBEAT_SECONDS
        self._check_at = self._beat_at if request.caller.token_id else float("inf")
        self._waiting: asyncio.Timeout | None = None
        api.auth.watch(self._check_now)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End with the stream."""
        self.leave()

    def leave(self) -> None:
        """Look at tokens no more: the stream has ended."""
        self._api.auth.leave(self._check_now)

    def _check_now(self) -> None:
        """Have the token looked up at once: one was changed."""
        if not self._request.caller.token_id:
            return
        self._check_at = self._now()
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self._check_at)

    def note(self) -> None:
        """Note that something is sent, so that no heartbeat is needed for a while."""
        self._beat_at = self._now() + HEARTBEAT_SECONDS

    def is_silent(self) -> bool:
        """Tell whether nothing was sent for long; then something is sent now."""
        if self._now() < self._beat_at:
            return False
        self.note()
        return True

    async def is_let_in(self) -> bool:
        """Tell whether whoever asked may still read; looked up now and then."""
        if self._now() < self._check_at:
            return True
        self._check_at = self._now() + HEARTBEAT_SECONDS
        try:
            await self._api.auth.look_up(self._request, "read")
        except (ApiError, StoreError):
            return False
        return True

    async def keep_pace(self) -> None:
        """Let others have their turn; the more streams there are, the longer."""
        await asyncio.sleep(self._api.shares.streams.taken * PACE_SECONDS_PER_STREAM)

    async def wait(self, signal: Coroutine[Any, Any, object]) -> None:
        """Wait for a signal, or until a heartbeat or a look at the token is due."""
        try:
            async with asyncio.timeout_at(min(self._beat_at, self._check_at)) as self._waiting:
                await signal
        except TimeoutError:
            return
        finally:
            self._waiting = None


def _beginning(feed: EventFeed, request: Request) -> tuple[str, int, bytes]:
    """Return the life and the place at which a stream begins, and what it says first."""
    sent = request.header(_LAST_EVENT_ID).decode("latin-1")
    place = feed.position_after(sent) if sent else feed.next
    if place is None:
        return feed.life, feed.next, _FIRST_LINE + _reset(feed, feed.next)
    return feed.life, place, _FIRST_LINE + _id_line(feed, place)


def _id_line(feed: EventFeed, place: int) -> bytes:
    """Return what moves the place of a client on, and is no event to it."""
    return b"id: %b\n\n" % feed.event_id(place - 1).encode()


def _reset(feed: EventFeed, place: int) -> bytes:
    event_id = feed.event_id(place - 1)
    return _line(TaskEvent(id=event_id, kind=EventKind.RESET, time=exact_moment(feed.now())))


def _piece(feed: EventFeed, place: int, wants: Wants) -> _Piece:
    lines: list[bytes] = []
    size = 0
    for happening in feed.since(place):
        if wants(happening):
            line = happening.rendered or _rendered(feed, place, happening)
            lines.append(line)
            size += len(line)
        place += 1
        if size >= MAX_PIECE_BYTES:
            break
    return _Piece(b"".join(lines), place)


def _rendered(feed: EventFeed, number: int, happening: Happening) -> bytes:
    """Write an event once for all streams."""
    happening.rendered = _line(event_of(happening, feed.event_id(number)))
    return happening.rendered


def _task_line(feed: EventFeed, number: int, happening: Happening) -> bytes:
    is_last = happening.rank == LAST_RANK
    return _line(event_of(happening, feed.event_id(number) + (_END if is_last else "")))


def _line(event: TaskEvent) -> bytes:
    name = event.kind.value.encode()
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), name, _ENCODER.encode(event))


def _is_own(request: Request, happening: Happening) -> bool:
    return request.caller.owns(agent_id=happening.agent_id, project_id=happening.project_id)


def _filter(request: Request) -> Wants:
    """Return which events are wanted, and may be read."""
    given = request.query()
    check_unknown(given, QUERY_FIELDS)
    query = request.caller.narrowed(
        TaskQuery(
            agent_id=submission.parse_filter_name(given.get("agentId"), "agentId"),
            project_id=submission.parse_filter_name(given.get("projectId"), "projectId"),
        )
    )
    kinds = _named(given, "kind", _KINDS)
    states = _named(given, "state", _STATES)

    def wants(happening: Happening) -> bool:
        return (
            (query.agent_id is None or happening.agent_id == query.agent_id)
            and (query.project_id is None or happening.project_id == query.project_id)
            and (not kinds or happening.kind in kinds)
            and (not states or happening.status in states)
        )

    return wants


def _named(given: dict[str, str], field: str, known: dict[str, Named]) -> frozenset[Named]:
    names = [name.strip() for name in given.get(field, "").split(",") if name.strip()]
    if all(name in known for name in names):
        return frozenset(known[name] for name in names)
    raise invalid_field(field, f"'{excerpt(given[field])}' is not a list of {', '.join(known)}")


ROUTES = (
    Route(
        "GET",
        "/tasks/{id}/events",
        stream_task,
        "stream the events of a task, until it has ended",
        "read",
        responses={OK: EVENT_STREAM.decode(), NO_CONTENT: ""},
        errors=("limit_reached", "not_dispatching"),
        headers=("Last-Event-ID",),
    ),
    Route(
        "GET",
        "/events",
        stream_events,
        "stream the events of tasks as they happen",
        "read",
        responses={OK: EVENT_STREAM.decode()},
        query=QUERY_FIELDS,
        errors=("invalid_field", "unknown_field", "limit_reached", "not_dispatching"),
        headers=("Last-Event-ID",),
    ),
)
