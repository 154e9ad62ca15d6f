"""What a screen asks of a service, and when, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from cli.top.scene import serving
from client.scripted_server import response, scripted
from config.running import WORK, Running, running
from headgate import Client
from headgate.cli.top import service_state
from headgate.cli.top.banner import total_parts
from headgate.cli.top.service_state import ConnectionState, Question, Topic
from headgate.cli.top.watcher import (
    LISTEN_AGAIN_SECONDS,
    REFUSED_SECONDS,
    TOO_MANY_SECONDS,
    ScreenContent,
    Watcher,
)
from headgate.engine.history import Step

STATS = Question(Topic.STATS)
PROJECTS = Question(Topic.PROJECTS)
MONEY = Question(Topic.BUDGETS)


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A watcher of a service, and the clock of both loops."""

    def __init__(self, service: Running, client: Client) -> None:
        self.service = service
        self.url = client.url
        self.clock = Clock()
        self.watcher = Watcher(client, pause_seconds=0.0, clock=self.clock)

    async def asked(self, *, after_seconds: float = 0.0) -> list[Question]:
        """Return what is asked after a while, until nothing is due."""
        self.clock.now += after_seconds
        questions = []
        while (question := await self.watcher.ask_once()) is not None:
            questions.append(question)
        return questions


@asynccontextmanager
async def scene(folder: Path, *, token: str | None = None) -> AsyncIterator[Scene]:
    async with (
        running(folder, WORK) as service,
        serving(service.app) as port,
        Client(f"http://127.0.0.1:{port}", token=token, retries=0) as client,
    ):
        yield Scene(service, client)


def on(folder: Path, body: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with scene(folder) as found:
            await body(found)

    asyncio.run(main())


def test_only_what_is_shown_is_asked_for_and_money_is_always(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        one.watcher.show(ScreenContent(topics=(Topic.PROJECTS,), waiting=("t",)))
        assert await one.asked() == [STATS, PROJECTS, MONEY]
        assert one.watcher.service.slots is None

    on(tmp_path, body)


def test_budgets_are_asked_for_less_often_where_only_their_total_is_seen(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        one.watcher.show(ScreenContent(topics=(Topic.PROJECTS,)))
        assert MONEY in await one.asked()
        assert MONEY not in await one.asked(after_seconds=9.0)
        assert MONEY in await one.asked(after_seconds=1.1)
        one.watcher.show(ScreenContent(topics=(Topic.BUDGETS,)))
        assert await one.asked(after_seconds=5.1) == [STATS, MONEY]

    on(tmp_path, body)


def test_without_events_it_is_asked_every_two_seconds(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        assert await one.asked() == [STATS, MONEY]
        assert await one.asked(after_seconds=1.9) == []
        assert await one.asked(after_seconds=0.2) == [STATS]
        assert one.watcher.service.contact is ConnectionState.POLLING

    on(tmp_path, body)


def test_while_nothing_is_heard_it_is_asked_seldom_and_at_an_event_soon(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        listening = asyncio.create_task(one.watcher.listen_once())
        await asyncio.sleep(0)
        one.clock.now += 1.0
        assert await one.asked() == [STATS, MONEY]
        assert one.watcher.service.contact is ConnectionState.LIVE
        assert await one.asked(after_seconds=9.0) == []
        assert await one.asked(after_seconds=1.1) == [STATS, MONEY]
        one.clock.now += 3.0
        await one.service.submit()
        async with asyncio.timeout(10):
            while not await one.asked():  # noqa: ASYNC110 - an event has no other sign
                await asyncio.sleep(0.01)
        listening.cancel()

    on(tmp_path, body)


def test_a_stream_that_tells_too_much_is_closed_for_a_minute(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        listening = asyncio.create_task(one.watcher.listen_once())
        async with asyncio.timeout(20):
            while not listening.done():
                await one.service.submit()
                await asyncio.sleep(0)
        assert listening.result() == TOO_MANY_SECONDS
        assert not one.watcher.is_listening

    on(tmp_path, body)


def test_without_a_stream_another_is_tried_after_a_while() -> None:
    async def main() -> None:
        async with Client("http://127.0.0.1:1", retries=0) as client:
            assert await Watcher(client).listen_once() == LISTEN_AGAIN_SECONDS

    asyncio.run(main())


def test_a_service_that_is_away_is_asked_one_thing_less_and_less_often() -> None:
    async def main() -> None:
        async with Client("http://127.0.0.1:1", retries=0) as client:
            clock = Clock()
            watcher = Watcher(client, clock=clock)
            watcher.show(ScreenContent(topics=tuple(Topic)))
            asked_at = []
            for _ in range(600):
                if await watcher.ask_once() is not None:
                    asked_at.append(clock.now - 1_000.0)
                clock.now += 0.5
            assert watcher.service.contact is ConnectionState.LOST
            assert asked_at[:5] == [0.0, 1.0, 3.0, 7.0, 15.0]
            assert all(later - sooner >= 10.0 for sooner, later in pairwise(asked_at[5:]))

    asyncio.run(main())


def test_a_service_that_was_silent_is_found_again_within_seconds(tmp_path: Path) -> None:
    async def main() -> None:
        clock = Clock()

        async def fall_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            clock.now += 10.0
            writer.close()

        silent = await asyncio.start_server(fall_silent, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        async with Client(f"http://127.0.0.1:{port}", retries=0) as client:
            watcher = Watcher(client, clock=clock)
            async with silent:
                await watcher.ask_once()
            contacts = [watcher.service.contact]
            async with running(tmp_path, WORK) as service, serving(service.app, port):
                clock.now += 10.0
                await watcher.ask_once()
            contacts.append(watcher.service.contact)
        assert contacts == [ConnectionState.LOST, ConnectionState.POLLING]

    asyncio.run(main())


def test_what_is_refused_is_asked_once_a_minute(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            token_fields = {"name": "sender", "permissions": ["submit"]}
            token = (await one.service.ask("POST", "/tokens", token_fields)).json["token"]
            async with Client(one.url, token=token, retries=0) as client:
                one.watcher = Watcher(client, clock=one.clock)
                one.watcher.show(ScreenContent(topics=(Topic.PROJECTS,)))
                assert PROJECTS in await one.asked()
                assert "permission read" in one.watcher.service.problems[Topic.PROJECTS]
                assert await one.asked(after_seconds=30.0) == []
                assert PROJECTS in await one.asked(after_seconds=REFUSED_SECONDS)

    asyncio.run(main())


def test_a_token_that_is_over_is_not_said_to_be_live(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            token_fields = {"name": "reader", "permissions": ["read"]}
            made = (await one.service.ask("POST", "/tokens", token_fields)).json
            async with Client(one.url, token=made["token"], retries=0) as client:
                one.watcher = Watcher(client, clock=one.clock)
                await one.asked()
                before = one.watcher.service.contact
                await one.service.ask("DELETE", f"/tokens/{made['id']}")
                await one.asked(after_seconds=10.0)
                after = one.watcher.service.contact
                assert (before, after) == (ConnectionState.POLLING, ConnectionState.REFUSED)
                assert one.watcher.service.problems[Topic.STATS] == "the token was revoked"

    asyncio.run(main())


def test_once_a_token_is_over_the_last_reasons_stay_and_are_asked_for_once_a_minute(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with scene(tmp_path) as one:
            content = await held_tasks(one, 2)
            token_fields = {"name": "reader", "permissions": ["read"]}
            made = (await one.service.ask("POST", "/tokens", token_fields)).json
            async with Client(one.url, token=made["token"], retries=0) as client:
                one.watcher = Watcher(client, clock=one.clock)
                one.watcher.show(content)
                await one.asked()
                reasons = dict(one.watcher.service.reasons)
                await one.service.ask("DELETE", f"/tokens/{made['id']}")
                await one.asked(after_seconds=11.0)
                assert one.watcher.service.reasons == reasons
                assert await one.asked(after_seconds=11.0) == []

    asyncio.run(main())


def test_the_wait_is_that_of_the_last_minutes_also_where_there_are_no_pages(tmp_path: Path) -> None:
    async def main() -> None:
        off = f'{WORK}\n[dashboard]\nmode = "off"\n'
        async with running(tmp_path, off) as service, serving(service.app) as port:
            await service.ended(await service.submit())
            now = service.service.engine.feed.now()
            service.service.engine.history.hour.append(
                Step(at=now, started=2, wait_seconds=166.0, waits={60: 2})
            )
            async with Client(f"http://127.0.0.1:{port}", retries=0) as client:
                watcher = Watcher(client)
                await watcher.ask_once()
        shown = "".join(text for text, _ in total_parts(watcher.service, width=200))
        assert shown.endswith("wait 1 min 23 s")

    asyncio.run(main())


def test_another_text_to_look_for_is_asked_at_once_and_shows_nothing_before(
    tmp_path: Path,
) -> None:
    async def body(one: Scene) -> None:
        await one.service.submit(notBefore="2099-01-01T00:00:00Z", labels={"who": "needle"})
        await one.service.submit(notBefore="2099-01-01T00:00:00Z")
        waiting = ScreenContent(topics=(Topic.WAITING,))
        one.watcher.show(waiting)
        await one.asked()
        page = one.watcher.service.waiting
        assert page is not None
        assert len(page.tasks) == 2
        one.watcher.show(ScreenContent(topics=(Topic.WAITING,), wanted="needle"))
        assert one.watcher.service.waiting is None
        assert await one.asked() == [Question(Topic.WAITING)]
        page = one.watcher.service.waiting
        assert page is not None
        assert len(page.tasks) == 1

    on(tmp_path, body)


@pytest.mark.parametrize("topic", [Topic.RUNNING, Topic.WAITING])
def test_tasks_are_asked_for_without_what_clients_sent_and_got(topic: Topic) -> None:
    async def asked(url: str) -> None:
        async with Client(url, retries=0) as client:
            one = Watcher(client, pause_seconds=0.0, clock=Clock())
            one.show(ScreenContent(topics=(topic,)))
            await one.ask_once()
            assert await one.ask_once() == Question(topic)

    # Of the totals, which are asked for first, nothing is known here.
    page = response(200, json.dumps({"tasks": [], "count": 0}))
    with scripted(response(404), page) as server:
        asyncio.run(asked(server.url))
    assert "omit=params%2Cinput%2Cresult" in server.requests[1].split()[1]


def test_a_text_to_look_for_goes_first_also_while_nothing_happens(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        listening = asyncio.create_task(one.watcher.listen_once())
        await asyncio.sleep(0)
        one.clock.now += 1.0
        one.watcher.show(ScreenContent(topics=(Topic.WAITING,)))
        await one.asked(after_seconds=60.0)
        one.clock.now += 60.0
        one.watcher.show(ScreenContent(topics=(Topic.WAITING,), wanted="needle"))
        assert await one.watcher.ask_once() == Question(Topic.WAITING)
        listening.cancel()

    on(tmp_path, body)


def test_rows_without_a_reason_share_a_turn(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        content = await held_tasks(one, 18)
        turns = 0
        while set(one.watcher.service.reasons) != set(content.waiting):
            await one.watcher.ask_turn()
            turns += 1
        assert turns <= 3

    on(tmp_path, body)


def test_reasons_outlive_a_look_at_another_pane_and_not_a_long_one(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        content = await held_tasks(one, 3)
        await one.asked()
        reasons = dict(one.watcher.service.reasons)
        assert len(reasons) == 3
        one.watcher.show(ScreenContent(topics=(Topic.SLOTS,)))
        await one.asked(after_seconds=10.0)
        assert one.watcher.service.reasons == reasons
        one.watcher.show(content)
        assert not any(asked.topic is Topic.WHY for asked in await one.asked(after_seconds=-1.0))
        one.watcher.show(ScreenContent(topics=(Topic.SLOTS,)))
        await one.asked(after_seconds=61.0)
        assert one.watcher.service.reasons == {}

    on(tmp_path, body)


def test_what_an_action_answered_is_in_the_picture_at_once(tmp_path: Path) -> None:
    async def body(one: Scene) -> None:
        content = await held_tasks(one, 2)
        gone, left = content.waiting
        one.watcher.show(ScreenContent(topics=(Topic.PROJECTS,)))
        await one.asked()
        one.watcher.note_gone(gone)
        page = one.watcher.service.waiting
        assert page is not None
        assert [task.task_id for task in page.tasks] == [left]
        assert one.watcher.service.projects is not None
        default = one.watcher.service.projects.projects[0]
        one.watcher.note_status(default.id, "paused")
        assert one.watcher.service.projects.projects[0].status == "paused"
        assert Question(Topic.PROJECTS) in await one.asked()

    on(tmp_path, body)


async def held_tasks(one: Scene, number: int) -> ScreenContent:
    """Submit tasks that wait, look at them, and return the interest that sees all of their rows."""
    held = [await one.service.submit(notBefore="2099-01-01T00:00:00Z") for _ in range(number)]
    one.watcher.show(ScreenContent(topics=(Topic.WAITING,)))
    await one.asked()
    content = ScreenContent(topics=(Topic.WAITING,), waiting=tuple(held))
    one.watcher.show(content)
    return content


def test_those_that_wait_longest_are_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_state, "MAX_TASKS", 2)

    async def body(one: Scene) -> None:
        held = [await one.service.submit(notBefore="2099-01-01T00:00:00Z") for _ in range(3)]
        one.watcher.show(ScreenContent(topics=(Topic.WAITING,)))
        await one.asked()
        page = one.watcher.service.waiting
        assert page is not None
        assert [task.task_id for task in page.tasks] == held[:2]

    on(tmp_path, body)
