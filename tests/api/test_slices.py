"""What a request may hold the loop for: slices of work, counted in calls and not in seconds."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from api.asgi_client import answer_of
from config.running import WORK, Running, running
from headgate.api.app import ROUTES
from headgate.api.http import slices
from headgate.api.http.slices import SharedAnswers, in_slices, mapped
from headgate.core.call import CallRecord, CallState
from headgate.core.gates import GateClosure
from headgate.core.text import Steps
from headgate.engine.engine import Engine
from headgate.storage.call_rows import EndedCall
from headgate.storage.writer import asker

NAMES = 120
"""How many projects, agents and targets there are."""
SCOPES = 600
TASKS = 300
LANES = 3_000
TOKENS = 150
CLOSED = 2_000

MOST_CALLS = 8_000
"""How many calls of functions one step of a request may make: some two milliseconds of them.

Rows that are neither sliced nor paged cost dozens of calls each, and there are hundreds.
"""

STREAMS = {"/events", "/tasks/{id}/events"}
"""Routes without an end; what they send goes event by event."""

PAGES = ("/", "/ui/tasks", "/ui/projects", "/ui/budgets", "/ui/slots", "/ui/webhooks",
         "/ui/settings", "/ui/settings/audit")  # fmt: skip

FILE = (
    "[scheduler]\nmax_queue_size = 10000\nmax_per_agent = 10000\n"
    + WORK
    + "".join(f"[projects.p{n}]\n[agents.a{n}]\n" for n in range(NAMES))
    + "".join(
        f'[targets.t{n}]\nkind = "callable"\nentry_point = "config.reload_work:work"\n'
        for n in range(NAMES)
    )
    + '[[slots]]\nname = "s1"\nprovider = "zai"\nkey_env = "NOT_SET"\nenabled = false\n'
)


class Holds:
    """Counts the calls of each step of the loop, and keeps the longest."""

    def __init__(self) -> None:
        self.longest = 0
        self._count = 0

    @contextmanager
    def counted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count while this is open."""
        run = Handle._run

        def step(handle: Handle) -> None:
            self._count = 0
            run(handle)
            self.longest = max(self.longest, self._count)

        def note(_frame: FrameType, event: str, _argument: object) -> None:
            self._count += event in ("call", "c_call")

        with monkeypatch.context() as patched:
            patched.setattr(Handle, "_run", step)
            sys.setprofile(note)
            try:
                yield
            finally:
                sys.setprofile(None)


async def made_calls(engine: Engine) -> str:
    """End calls through the gateway, and return the id of the last one."""
    assert engine.calls is not None
    assert engine.call_store is not None
    records = [
        CallRecord(
            id=engine.calls.new_call_id(),
            project_id=f"p{n % NAMES}",
            agent_id=f"a{n % NAMES}",
            model="m",
            state=CallState.DONE,
            created_at=engine.now(),
        )
        for n in range(TASKS)
    ]
    await engine.call_store.finish([EndedCall(record=record) for record in records])
    return records[-1].id


async def filled(service: Running) -> dict[str, str]:
    """Fill a service with what clients may make, and return a name for each kind of route."""
    await service.ask("POST", "/pause", {})
    tracker = service.app.api.tracker

    async def spend(number: int) -> None:
        scope = f"project:p{number % NAMES}/session:s{number}"
        await tracker.reserve(scope, "0.5", reservation_id=f"r{number}", dispatched=True)
        await tracker.commit(f"r{number}", "0.3", tokens=3)

    for start in range(0, SCOPES, 100):
        await asyncio.gather(*map(spend, range(start, start + 100)))
    task_id = ""
    for start in range(0, TASKS, 50):
        numbers = range(start, start + 50)
        tasks = [
            {"action": "x", "agentId": f"a{n % NAMES}", "projectId": f"p{n % NAMES}",
             "target": f"t{n % NAMES}", "labels": {"n": str(n)}, "scopes": [f"session:q{n}"]}
            for n in numbers
        ]  # fmt: skip
        sent = {"projectId": "default", "tasks": tasks}
        task_id = (await service.ask("POST", "/tasks/batch", sent)).json["tasks"][0]["taskId"]
    state = service.app.api.engine.dispatcher.dispatch_state
    assert state is not None
    for n in range(CLOSED):
        # As tasks do whose budgets have no room.
        closed = GateClosure(kind="scope", name=f"project:p1/session:c{n}", cause="budget")
        state.close(closed, service.app.api.engine.now())
    made: Any = None
    for n in range(TOKENS):
        sent_token = {"name": f"t{n}", "permissions": ["admin", "read"]}
        made = (await service.ask("POST", "/tokens", sent_token)).json
    call_id = await made_calls(service.app.api.engine)
    return {"calls": call_id, "tasks": task_id, "projects": "p1", "agents": "a1", "targets": "t1",
            "slots": "s1", "token": made["token"]}  # fmt: skip


@pytest.mark.timeout(240)
async def test_no_route_holds_the_loop_for_all_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every step of sliced work is a step of the loop, so that it can be counted.
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    too_long: dict[str, int] = {}
    async with running(tmp_path, FILE, store=f"sqlite:///{tmp_path}/headgate.db") as service:
        names = await filled(service)
        token = f"Bearer {names['token']}"
        paths = [route.path for route in ROUTES if route.method == "GET"]
        for path in [one for one in paths if one not in STREAMS] + list(PAGES):
            url = path.replace("{id}", names.get(path.split("/")[1], "none"))
            # What is made once, such as a compiled template, is made before.
            limit = "?limit=1000" if "limit" in _query_of(path) else ""
            for is_counted in (False, True):
                holds = Holds()
                with holds.counted(monkeypatch):
                    asked = answer_of(service.app, "GET", url + limit,
                                      headers={"authorization": token})  # fmt: skip
                    answer = await asyncio.create_task(asked)
                assert answer.status == 200 or path == "/webhooks/{id}", (url, answer.body)
                if is_counted and holds.longest > MOST_CALLS:
                    too_long[url] = holds.longest
    assert too_long == {}


async def test_counts_of_thousands_of_lanes_do_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant makes a lane for each agent that it names."""
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    async with running(tmp_path, FILE, store=f"sqlite:///{tmp_path}/headgate.db") as service:
        await service.ask("POST", "/pause", {})
        for start in range(0, LANES, 50):
            tasks = [{"action": "x", "agentId": f"lane{n}"} for n in range(start, start + 50)]
            await service.ask("POST", "/tasks/batch", {"projectId": "p1", "tasks": tasks})
        bound = {"name": "p1", "permissions": ["read"], "projectId": "p1"}
        token = (await service.ask("POST", "/tokens", bound)).json["token"]
        for is_counted in (False, True):
            holds = Holds()
            with holds.counted(monkeypatch):
                headers = {"authorization": f"Bearer {token}"}
                asked = answer_of(service.app, "GET", "/scheduler/stats", headers=headers)
                answer = await asyncio.create_task(asked)
            assert answer.status == 200, answer.body
            assert not is_counted or holds.longest < MOST_CALLS


def _query_of(path: str) -> tuple[str, ...]:
    return next((one.query for one in ROUTES if (one.method, one.path) == ("GET", path)), ())


async def test_others_have_their_turn_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    seen: list[str] = []

    def work() -> Steps[str]:
        for name in "abc":
            seen.append(name)
            yield
        return "done"

    async def other() -> None:
        while "c" not in seen:
            seen.append("-")
            await asyncio.sleep(0)

    waiting = asyncio.create_task(other())
    assert await in_slices(work()) == "done"
    await waiting
    assert re.fullmatch("a-+b-+c-*", "".join(seen))
    assert await mapped([1, 2], str) == ["1", "2"]


async def test_much_work_of_one_caller_keeps_that_of_another_waiting_for_one_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)
    done: list[str] = []

    def work(who: str, pieces: int) -> Steps[None]:
        for _ in range(pieces):
            yield
            done.append(who)

    async def ask(who: str, pieces: int) -> None:
        asker.set(who)
        await in_slices(work(who, pieces))

    hostile = [asyncio.create_task(ask("hostile", 50)) for _ in range(60)]
    await asyncio.sleep(0)
    await asyncio.create_task(ask("honest", 20))
    assert done.count("hostile") <= done.count("honest") + 2
    await asyncio.gather(*hostile)
    assert done.count("hostile") == 3_000


async def test_work_that_goes_away_while_it_waits_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "SLICE_SECONDS", 0.0)

    def work() -> Steps[str]:
        for _ in range(5):
            yield
        return "done"

    first = asyncio.create_task(in_slices(work()))
    rest = [asyncio.create_task(in_slices(work())) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.gather(*rest) == ["done"] * 3
    assert await in_slices(work()) == "done"


class Maker:
    """Makes answers, one after the other, when it is told to."""

    def __init__(self) -> None:
        self.began = 0
        self.goes_on = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.began += 1
        number = self.began
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_hundreds_that_ask_at_once_share_the_next_answer() -> None:
    answers, make = SharedAnswers[int](), Maker()
    first = asyncio.create_task(answers.get("a", make))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(answers.get("a", make)) for _ in range(300)]
    await asyncio.sleep(0)
    make.goes_on.set()
    assert await first == 1
    # None is older than its question: the first had begun before the others asked.
    assert await asyncio.gather(*rest) == [2] * 300
    assert await answers.get("a", make) == 3
    assert answers._made == {}


async def test_one_that_goes_away_leaves_the_answer_to_the_others() -> None:
    answers, make = SharedAnswers[int](), Maker()
    first = asyncio.create_task(answers.get("a", make))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(answers.get("a", make)) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    rest[0].cancel()
    make.goes_on.set()
    assert await asyncio.gather(*rest[1:]) == [2, 2]
    make.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        await answers.get("a", make)
    assert answers._made == {}
