"""Streams of events: what they tell, how they go on, and how they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from api.asgi_client import answer_of
from api.event_stream import EventStream, Open, Sent, opened
from api.fake_app import fake_app
from api.fake_engine import FakeEngine
from api.fake_tokens import FakeTokens
from headgate.api import app as web_app
from headgate.api import events, shares
from headgate.api.app import App
from headgate.api.auth import Authenticator
from headgate.api.callers import Caller
from headgate.api.errors import ApiError
from headgate.api.http import connection, request
from headgate.api.http.server import serve
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus
from headgate.engine.events import EventFeed
from headgate.errors import NotDispatchingError, StoreUnavailableError
from headgate.storage.tokens import Bounds, new_token

Scenario = Callable[[FakeEngine, Open], Awaitable[None]]
Play = Callable[[Scenario], None]
NOW = 1_800_000_000.0
QUEUED, RUNNING, DONE = TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.DONE


def record(
    task_id: str, status: TaskStatus, attempt: int = 0, *, agent: str = "a", project: str = "p"
) -> TaskRecord:
    return TaskRecord(
        task=Task(id=task_id, agent_id=agent, project_id=project, status=status, created_at=NOW),
        progress=Progress(attempt=attempt, started_at=NOW, completed_at=NOW),
    )


def happen(engine: FakeEngine, *records: TaskRecord) -> None:
    engine.records.update((one.task.id, one) for one in records)
    engine.feed.observe(records)


def new_app(engine: FakeEngine) -> App:
    return fake_app(engine)


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[Open]:
    ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            app,
            host="127.0.0.1",
            port=0,
            on_ready=lambda host, port: ready.set_result((host, port)),
            **options,
        )
    )
    host, port = await ready
    streams: list[EventStream] = []

    async def open_stream(path: str, **headers: str) -> EventStream:
        streams.append(await opened(host, port, path, **headers))
        return streams[-1]

    try:
        yield open_stream
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for stream in streams:
            stream.writer.close()
            with suppress(ConnectionError):
                await stream.writer.wait_closed()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Iterator[Play]:
    """Serve an engine for a scenario, on each of the two event loops that there are."""
    with asyncio.Runner(loop_factory=request.param) as runner:

        def run(scenario: Scenario) -> None:
            async def main() -> None:
                engine = FakeEngine()
                async with asyncio.timeout(20), serving(new_app(engine)) as open_stream:
                    await scenario(engine, open_stream)

            runner.run(main())

        yield run


async def next_events(stream: EventStream, count: int) -> list[str]:
    found = []
    for _ in range(count):
        sent = await stream.event()
        assert sent is not None
        found.append(f"{sent.task} {sent.event}")
    return found


def test_a_stream_tells_what_happens_from_now_on(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        happen(engine, record("before", QUEUED))
        stream = await open_stream("/events")
        assert stream.status == 200
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-store"
        first = await stream.block()
        assert first == Sent(engine.feed.event_id(1), "", None)
        happen(engine, record("t", QUEUED), record("t", RUNNING, 1), record("t", DONE, 1))
        sent = [await stream.event() for _ in range(3)]
        assert [one.event for one in sent if one] == [
            "task.queued", "task.running", "task.completed",
        ]  # fmt: skip
        assert sent[2] is not None
        assert sent[2].data == {
            "id": engine.feed.event_id(4),
            "kind": "task.completed",
            "time": "2027-01-15T08:00:00Z",
            "taskId": "t",
            "agentId": "a",
            "projectId": "p",
            "state": "done",
            "attempt": 1,
        }
        assert sent[2].id == sent[2].data["id"]

    play(scenario)


def test_a_client_that_comes_back_gets_everything_after_what_it_had(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream("/events")
        happen(engine, record("t1", QUEUED))
        await next_events(stream, 1)
        stream.writer.close()
        happen(engine, record("t2", QUEUED), record("t3", QUEUED))
        again = await open_stream("/events", Last_Event_ID=stream.last_id)
        assert await next_events(again, 2) == ["t2 task.queued", "t3 task.queued"]

    play(scenario)


@pytest.mark.parametrize("sent", ["ffffffffffff-1", "nonsense", "old"])
def test_one_whose_events_are_gone_is_told_so_and_goes_on(play: Play, sent: str) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        engine.feed = EventFeed(engine.now, size=3)
        engine.feed.open(1)
        old = engine.feed.event_id(0)
        happen(engine, *(record(f"t{n}", QUEUED) for n in range(9)))
        stream = await open_stream("/events", Last_Event_ID=old if sent == "old" else sent)
        reset = await stream.event()
        assert reset is not None
        assert (reset.event, reset.data["kind"]) == ("reset", "reset")
        assert reset.id == engine.feed.event_id(9)
        happen(engine, record("new", QUEUED))
        assert await next_events(stream, 1) == ["new task.queued"]

    play(scenario)


def test_a_new_life_of_the_feed_resets_the_streams_that_are_open(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream("/events")
        await stream.block()
        engine.feed.start_anew(lambda _task_id: True)
        happen(engine, record("t", QUEUED))
        reset = await stream.event()
        assert reset is not None
        assert reset.event == "reset"

    play(scenario)


FILTERS = [
    ("agentId=a", ["t1", "t3"]),
    ("projectId=q", ["t3"]),
    ("agentId=b&projectId=q", []),
    ("kind=task.running", ["t2"]),
    ("kind=task.queued,task.running", ["t1", "t2", "t3"]),
    ("state=queued", ["t1", "t3"]),
]


@pytest.mark.parametrize(("query", "expected"), FILTERS)
def test_a_stream_tells_only_what_was_asked_for(
    play: Play, query: str, expected: list[str]
) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream(f"/events?{query}")
        await stream.block()
        happen(
            engine,
            record("t1", QUEUED),
            record("t2", RUNNING, 1, agent="b"),
            record("t3", QUEUED, project="q"),
        )
        await asyncio.sleep(0.05)
        engine.feed.close()
        assert [sent.task for sent in await stream.rest()] == expected

    play(scenario)


@pytest.mark.parametrize(
    ("query", "code"),
    [("kind=done", "invalid_field"), ("state=x", "invalid_field"), ("agentid=a", "unknown_field")],
)
def test_a_filter_that_means_nothing_is_refused(play: Play, query: str, code: str) -> None:
    async def scenario(_: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream(f"/events?{query}")
        assert stream.status == 400

    play(scenario)


def test_a_silent_stream_has_heartbeats_that_move_the_place_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.05)

    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream("/events?agentId=nobody")
        await stream.block()
        happen(engine, record("t", QUEUED))
        beats = [await stream.block(), await stream.block()]
        assert beats == [Sent(engine.feed.event_id(1), "", None)] * 2

    play(scenario)


def test_the_stream_of_a_task_begins_with_its_state_and_ends_with_it(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        happen(engine, record("t", QUEUED), record("other", QUEUED))
        stream = await open_stream("/tasks/t/events")
        assert await next_events(stream, 1) == ["t task.queued"]
        happen(engine, record("other", RUNNING, 1), record("t", RUNNING, 1), record("t", DONE, 1))
        sent = await stream.rest()
        assert [one.event for one in sent] == ["task.running", "task.completed"]
        assert sent[-1].id.endswith("-end")
        ended = await open_stream("/tasks/t/events")
        assert [one.event for one in await ended.rest()] == ["task.completed"]
        again = await open_stream("/tasks/t/events", Last_Event_ID=sent[-1].id)
        assert again.status == 204

    play(scenario)


def test_what_the_feed_missed_of_a_task_is_read_from_the_store(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        happen(engine, record("t", QUEUED))
        stream = await open_stream("/tasks/t/events")
        assert await next_events(stream, 1) == ["t task.queued"]
        engine.records["t"] = record("t", DONE, 1)
        engine.feed.start_anew(lambda _task_id: True)
        assert [one.event for one in await stream.rest()] == ["task.completed"]

    play(scenario)


def test_a_task_that_is_not_there_has_no_stream(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        assert (await open_stream("/tasks/tsk_x/events")).status == 404
        engine.failure = StoreUnavailableError("gone")
        assert (await open_stream("/tasks/t/events")).status == 503

    play(scenario)


def test_streams_end_when_this_node_dispatches_no_more(play: Play) -> None:
    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        happen(engine, record("t", QUEUED))
        streams = [await open_stream(path) for path in ("/events", "/tasks/t/events")]
        await next_events(streams[1], 1)
        engine.feed.close()
        assert [await stream.rest() for stream in streams] == [[], []]

    play(scenario)


def test_streams_are_counted_and_bounded(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_STREAMS", 2)

    async def scenario(_: FakeEngine, open_stream: Open) -> None:
        streams = [await open_stream("/events") for _ in range(2)]
        for stream in streams:
            await stream.block()
        assert (await open_stream("/events")).status == 429
        streams[0].writer.close()
        async with asyncio.timeout(30):
            while (await open_stream("/events")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    play(scenario)


def test_a_client_that_reads_nothing_is_cut_off_and_keeps_nobody(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TAKE_SECONDS", 0.3)

    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        deaf = await open_stream("/events")
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Otherwise the kernel's buffers grow until they hold all that is ever sent.
        deaf.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        listening = await open_stream("/events")
        await listening.block()
        told = 0
        for n in range(60):
            happen(engine, *(record(f"t{n}-{m}", QUEUED) for m in range(500)))
            told += len(await next_events(listening, 500))
        assert told == 30_000
        await asyncio.sleep(2 * connection.TAKE_SECONDS)
        deaf.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await deaf.rest()

    play(scenario)


def test_open_streams_do_not_delay_a_stop() -> None:
    async def main() -> None:
        engine = FakeEngine()
        happen(engine, record("t", QUEUED))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10), serving(new_app(engine), drain_seconds=8.0) as open_stream:
            streams = [await open_stream(path) for path in ("/events", "/tasks/t/events")]
            for stream in streams:
                await stream.block()
            started = loop.time()
        assert loop.time() - started < 2
        assert [await stream.rest() for stream in streams[:1]] == [[]]

    asyncio.run(main())


def test_a_stream_is_not_subject_to_the_patience_of_answers(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_app, "ANSWER_SECONDS", 0.05)

    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        stream = await open_stream("/events")
        await asyncio.sleep(0.2)
        happen(engine, record("t", QUEUED))
        assert await next_events(stream, 1) == ["t task.queued"]

    play(scenario)


class BoundRequest(request.Request):
    """A request of somebody who acts for agent b alone."""

    __slots__ = ()

    @property
    def caller(self) -> Caller:
        return Caller(name="b", bounds=Bounds(agent_id="b"))

    @caller.setter
    def caller(self, _: Caller) -> None:
        pass


def test_a_bound_caller_hears_only_of_its_own(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "Request", BoundRequest)

    async def scenario(engine: FakeEngine, open_stream: Open) -> None:
        happen(engine, record("foreign", QUEUED), record("own", QUEUED, agent="b"))
        assert (await open_stream("/tasks/foreign/events")).status == 404
        assert (await open_stream("/events?agentId=a")).status == 403
        assert (await open_stream("/metrics")).status == 403
        stream = await open_stream("/events")
        await stream.block()
        happen(engine, record("foreign", RUNNING, 1), record("own", RUNNING, 1, agent="b"))
        assert await next_events(stream, 1) == ["own task.running"]

    play(scenario)


class Revocable:
    """An entrance that lets everybody in, and later nobody."""

    is_revoked = False

    def check_head(self, _: object) -> None:
        pass

    def authenticate(self, *_: object) -> Caller:
        return Caller(name="a", token_id="one")

    async def look_up(self, *_: object) -> Caller:
        if self.is_revoked:
            raise ApiError("unauthorized", "the token was revoked")
        return self.authenticate()

    def watch(self, _: object) -> None:
        pass

    def leave(self, _: object) -> None:
        pass


def test_a_stream_ends_soon_after_its_token_was_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.05)

    async def main() -> None:
        engine = FakeEngine()
        app, auth = new_app(engine), Revocable()
        monkeypatch.setattr(app.api, "auth", auth)
        happen(engine, record("t", QUEUED))
        async with asyncio.timeout(10), serving(app) as open_stream:
            streams = [await open_stream(path) for path in ("/events", "/tasks/t/events")]
            for stream in streams:
                await stream.block()
                await stream.block()
            auth.is_revoked = True
            for stream in streams:
                await stream.rest()

    asyncio.run(main())


def test_an_event_does_not_put_off_the_look_at_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 1.0)

    async def main() -> None:
        engine = FakeEngine()
        app, auth = new_app(engine), Revocable()
        monkeypatch.setattr(app.api, "auth", auth)
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(10), serving(app) as open_stream:
            stream = await open_stream("/events")
            await stream.block()
            opened_at, auth.is_revoked = now(), True
            await asyncio.sleep(0.8)
            happen(engine, record("t", QUEUED))
            await stream.rest()
            assert now() - opened_at < 1.6

    asyncio.run(main())


def test_a_token_that_is_revoked_at_this_node_ends_its_streams_at_once() -> None:
    async def main() -> None:
        engine, tokens = FakeEngine(), FakeTokens()
        app = new_app(engine)
        app.api.tokens, app.api.auth = tokens, Authenticator(tokens)
        happen(engine, record("t", QUEUED))
        made = [new_token(name="t", permissions=("read",), now=tokens.time) for _ in range(2)]
        for new in made:
            await tokens.add(new.kept)
        async with asyncio.timeout(10), serving(app) as open_stream:
            gone, stays = [
                [
                    await open_stream(path, authorization=f"Bearer {new.text}")
                    for path in ("/events", "/tasks/t/events")
                ]
                for new in made
            ]
            for stream in (*gone, *stays):
                await stream.block()
            path = f"/tokens/{made[0].kept.token.id}"
            assert (await answer_of(app, "DELETE", path)).status == 200
            for stream in gone:
                await stream.rest()
            happen(engine, record("t", RUNNING, 1))
            assert await next_events(stays[0], 1) == ["t task.running"]
            assert await next_events(stays[1], 2) == ["t task.queued", "t task.running"]

    asyncio.run(main())


class Following(FakeEngine):
    """A node that does not dispatch, and knows who does."""

    address = ""

    def events(self) -> EventFeed:
        raise NotDispatchingError(self.address)


def forwarding(
    scenario: Callable[[FakeEngine, Following, Open], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        leader, follower = FakeEngine(), Following()
        async with (
            asyncio.timeout(20),
            serving(new_app(leader)) as at_leader,
            serving(new_app(follower)) as at_follower,
        ):
            probe = await at_leader("/events")
            host, port = probe.writer.get_extra_info("peername")[:2]
            follower.address = f"http://{host}:{port}"
            await scenario(leader, follower, at_follower)

    asyncio.run(main())


def test_a_node_that_does_not_dispatch_passes_the_stream_on_as_it_comes() -> None:
    async def scenario(leader: FakeEngine, _: Following, open_stream: Open) -> None:
        stream = await open_stream("/events?agentId=a")
        assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream")
        first = await stream.block()
        assert first is not None
        happen(leader, record("x", QUEUED, agent="b"), record("t1", QUEUED))
        assert await next_events(stream, 1) == ["t1 task.queued"]
        again = await open_stream("/events", Last_Event_ID=first.id)
        assert await next_events(again, 2) == ["x task.queued", "t1 task.queued"]
        leader.feed.close()
        assert await stream.rest() == []

    forwarding(scenario)


def test_the_stream_of_a_task_is_passed_on_too_and_so_is_a_refusal() -> None:
    async def scenario(leader: FakeEngine, follower: Following, open_stream: Open) -> None:
        happen(leader, record("t", QUEUED))
        follower.records["t"] = follower.records["u"] = record("t", QUEUED)
        stream = await open_stream("/tasks/t/events")
        assert await next_events(stream, 1) == ["t task.queued"]
        assert (await open_stream("/tasks/u/events")).status == 404

    forwarding(scenario)


def test_without_a_dispatcher_a_stream_is_refused_with_its_address() -> None:
    async def scenario(_: FakeEngine, follower: Following, open_stream: Open) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            for address in ("", f"http://127.0.0.1:{unused.getsockname()[1]}"):
                follower.address = address
                assert (await open_stream("/events")).status == 503
        assert (await open_stream("/events", x_headgate_forwarded="1")).status == 503

    forwarding(scenario)
