"""Runs on a service that is away, full or forgetful, and processes that end in the middle."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from budgets.fault_proxy import running_proxy
from executors.endpoint import free_port
from headgate import Client, SyncClient
from headgate.errors import NotAllowedError
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.conductor import Conductor
from headgate.workflow.placeholders import parsed_text
from headgate.workflow.remote_journal import Journal, Opened, Sent, SentOrder, Unfinished
from headgate.workflow.remote_tasks import RemoteWatch, Retrying
from headgate.workflow.report import RunState
from headgate.workflow.run_record import RunScope
from headgate.workflow.workflow import ListItems, Step, TargetWork
from service.support import ServiceProcess, running_service, wait_until
from workflow.fake_backend import a_run
from workflow.server_support import (
    SECONDS,
    SETTINGS,
    TaskLog,
    backend_at,
    known,
    opened,
    order,
    step,
    workflow,
)
from workflow.service_proxy import ServiceProxy

NARROW = """
[scheduler]
max_per_agent = 3
max_per_agent_inflight = 2
task_retention_seconds = 0.01
"""
GUARDED = "[auth]\nrequired = true\n[projects.search]\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder: Path = tmp_path_factory.mktemp("service")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with little room, which forgets results at once."""
    folder: Path = tmp_path_factory.mktemp("forgetful")
    (folder / "headgate.toml").write_text(SETTINGS + NARROW)
    with running_service(folder) as process:
        yield process


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service that asks for tokens."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    (folder / "headgate.toml").write_text(SETTINGS + GUARDED)
    with running_service(folder) as process:
        yield process


def tasks_of(service: ServiceProcess, run_id: str) -> Counter[str]:
    """Return what the service has of a run: how many tasks for each action."""
    with SyncClient(service.address) as client:
        tasks = client.iterate_tasks(agent_id="eval")
        return Counter(task.action for task in tasks if task.labels.get("run") == run_id)


def port_of(service: ServiceProcess) -> int:
    port = urlsplit(service.address).port
    assert port is not None
    return port


async def test_answers_that_are_lost_submit_nothing_twice(
    service: ServiceProcess, tmp_path: Path
) -> None:
    proxy = ServiceProxy(port_of(service))
    async with running_proxy(proxy):
        backend = backend_at(proxy.url, tmp_path, run_id="lost-answers")
        async with opened(backend) as told:
            proxy.harm(drop_reply=0.4, cut_request=0.2)
            for first in range(0, 100, 10):
                await backend.submit([order(first + n) for n in range(10)])
            proxy.heal()
            ends = await told.until_ended(100)
        assert proxy.dropped_replies > 0
        assert proxy.cut_requests > 0
    assert {task.state for task in ends.values()} == {TaskState.DONE}
    assert set(tasks_of(service, "lost-answers").values()) == {1}
    assert all(len(told.states(n)) == len(set(told.states(n))) for n in range(100))


async def test_a_process_that_ends_anywhere_leaves_what_the_next_one_needs(
    service: ServiceProcess, tmp_path: Path
) -> None:
    draws = random.Random(7)
    done: dict[int, StepTask] = {}
    proxy = ServiceProxy(port_of(service), seed=7)
    async with running_proxy(proxy):
        for _ in range(8):
            proxy.harm(drop_reply=0.5, cut_request=0.2)
            ended = await _short_life(proxy.url, tmp_path, draws.random() * 0.15, done)
            assert all(ended[n].task_id == task.task_id for n, task in done.items())
            done = ended
        proxy.heal()
        backend = backend_at(proxy.url, tmp_path, run_id="short-lives")
        async with opened(backend) as told:
            before = await known(backend)
            await backend.submit([order(n) for n in range(60) if n not in before])
            waiting = [n for n in range(60) if n not in before or not before[n].state.has_ended]
            await told.until_ended(len(waiting))
            assert {task.state for task in (await known(backend)).values()} == {TaskState.DONE}
            assert len(await known(backend)) == 60
    assert set(tasks_of(service, "short-lives").values()) == {1}


async def _short_life(
    url: str, folder: Path, seconds: float, done: dict[int, StepTask]
) -> dict[int, StepTask]:
    """Be a process that is gone after a while, and return what it knew to have ended."""
    backend = backend_at(url, folder, run_id="short-lives")
    async with opened(backend) as told:
        before = await known(backend)
        assert all(before[n].state is TaskState.DONE for n in done)
        try:
            async with asyncio.timeout(seconds):
                for first in range(0, 60, 6):
                    numbers = [n for n in range(first, first + 6) if n not in before]
                    await backend.submit([order(n) for n in numbers])
        except TimeoutError:
            pass
        return {**{n: one for n, one in before.items() if one.state.has_ended}, **told.ends()}


async def test_a_service_that_restarts_is_waited_for_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "service"
    folder.mkdir()
    (folder / "headgate.toml").write_text(SETTINGS)
    notes = step(target="notes", retries=3)
    with running_service(folder, port=free_port()) as process:
        backend = backend_at(process.address, tmp_path, notes, run_id="restarted")
        async with opened(backend) as told:
            params = {"notes": str(tmp_path / "notes"), "seconds": 0.2}
            await backend.submit([order(n, of=notes, params=params) for n in range(20)])
            task = await told.until(0, TaskState.RUNNING)
            await asyncio.to_thread(process.kill)
            submitting = asyncio.create_task(backend.submit([order(20)]))
            await asyncio.to_thread(wait_until, lambda: backend.trouble, seconds=10)
            assert "does not answer" in await backend.why(task)
            assert not await backend.is_stuck()
            money = await backend.money()
            await asyncio.to_thread(process.start)
            await submitting
            ends = await told.until_ended(21)
            assert backend.trouble == ""
            assert money == []
    assert {one.state for one in ends.values()} == {TaskState.DONE}


async def test_a_full_queue_is_waited_out_and_said(
    forgetful: ServiceProcess, tmp_path: Path
) -> None:
    notes = step(target="notes")
    params = {"notes": str(tmp_path / "notes"), "seconds": 0.05}
    backend = backend_at(forgetful.address, tmp_path, notes, run_id="full")
    unanswered = StepTask(number=1, generation=0, task_id="", state=TaskState.QUEUED)
    whys: set[str] = set()
    async with opened(backend) as told:
        orders = [order(n, of=notes, params=params) for n in range(25)]
        submitting = asyncio.create_task(backend.submit(orders))
        while not submitting.done():
            whys.add(await backend.why(unanswered))
            await asyncio.sleep(0.01)
        ends = await told.until_ended(25)
    assert {task.state for task in ends.values()} == {TaskState.DONE}
    assert any("takes no more tasks now" in why for why in whys)
    lines = (tmp_path / "notes").read_text().splitlines()
    assert lines.count("begins 1") == 25


async def test_a_task_that_is_gone_after_a_break_is_not_begun_anew_by_itself(
    forgetful: ServiceProcess, tmp_path: Path
) -> None:
    notes = step(target="notes")
    params = {"notes": str(tmp_path / "notes"), "seconds": 0.1}
    backend = backend_at(forgetful.address, tmp_path, notes, run_id="gone")
    async with opened(backend) as told:
        await backend.submit([order(1, of=notes, params=params)])
        task = await told.until(1, TaskState.QUEUED)
    path = f"/tasks/{task.task_id}"
    wait_until(lambda: forgetful.ask("GET", path).status == 410, seconds=10)
    again = backend_at(forgetful.address, tmp_path, notes, run_id="gone")
    async with opened(again):
        end = (await known(again))[1]
    assert end.state is TaskState.FAILED
    assert "nobody knows whether it was done" in (end.error or "")
    assert (tmp_path / "notes").read_text() == "begins 1\nends 1\n"


async def test_a_batch_without_an_answer_is_not_sent_again_when_its_key_may_be_forgotten(
    service: ServiceProcess, tmp_path: Path
) -> None:
    await _written(tmp_path / "old.jsonl", service.address, sent_at=time.time() - 90_000)
    backend = backend_at(service.address, tmp_path, run_id="old")
    async with opened(backend):
        end = (await known(backend))[1]
    assert end.state is TaskState.FAILED
    assert "no answer came" in (end.error or "")
    assert not tasks_of(service, "old")


async def test_a_batch_without_an_answer_is_not_sent_to_another_service(
    service: ServiceProcess, tmp_path: Path
) -> None:
    await _written(tmp_path / "moved.jsonl", "http://127.0.0.1:1", sent_at=time.time())
    backend = backend_at(service.address, tmp_path, run_id="moved")
    async with opened(backend):
        assert (await known(backend))[1].state is TaskState.FAILED
        await backend.submit([order(1, generation=1)])
    assert tasks_of(service, "moved") == {"n1": 1}


async def test_a_batch_that_was_never_sent_is_sent_by_the_next_process(
    service: ServiceProcess, tmp_path: Path
) -> None:
    await _written(tmp_path / "unsent.jsonl", service.address, sent_at=time.time())
    for _ in range(2):
        backend = backend_at(service.address, tmp_path, run_id="unsent")
        async with opened(backend):
            assert list(await known(backend)) == [1]
    assert tasks_of(service, "unsent") == {"n1": 1}


async def _written(path: Path, server: str, *, sent_at: float) -> None:
    body = {"agentId": "eval", "tasks": [{"action": "n1", "labels": {"run": path.stem}}]}
    sent = Sent(
        key=f"{path.stem}-1-0",
        at=sent_at,
        orders=(SentOrder(number=1, generation=0),),
        body=msgspec.Raw(msgspec.json.encode(body)),
    )
    journal = Journal(path)
    journal.open()
    await journal.write(Opened(server=server, keys=path.stem), sent)
    await journal.close()


def made_token(service: ServiceProcess, name: str, *permissions: str, **bounds: str) -> str:
    first = (service.folder / "data" / "token").read_text().strip()
    with SyncClient(service.address, token=first) as client:
        return client.create_token(name, permissions, **bounds).token  # type: ignore[arg-type]


async def test_a_run_with_a_bound_token_is_charged_within_its_budget(
    guarded: ServiceProcess, tmp_path: Path
) -> None:
    token = made_token(guarded, "bound", "submit", "read", "cancel", project_id="search")
    scopes = (
        RunScope(scope="session:s", micro_usd=1_000_000),
        RunScope(scope="session:s/workflow:eval"),
    )
    backend = backend_at(guarded.address, tmp_path, scopes=scopes, token=token)
    async with opened(backend) as told:
        await backend.submit([order(1, micro_usd=70_000), order(2, target="nowhere")])
        ends = await told.until_ended(2)
        money = await backend.money()
    assert [ends[n].state for n in (1, 2)] == [TaskState.DONE, TaskState.FAILED]
    assert "unknown target 'nowhere'" in (ends[2].error or "")
    assert [one.scope for one in money] == [
        "project:search/session:s",
        "project:search/session:s/workflow:eval",
    ]
    assert (money[0].limit_micro_usd, money[1].spent_micro_usd) == (1_000_000, 70_000)


async def test_a_token_of_an_agent_submits_as_that_agent(
    guarded: ServiceProcess, tmp_path: Path
) -> None:
    token = made_token(guarded, "agent", "submit", "read", agent_id="coder-1")
    backend = backend_at(guarded.address, tmp_path, token=token)
    async with opened(backend) as told:
        await backend.submit([order(1)])
        await told.until(1, TaskState.DONE)
        assert [one.scope for one in await backend.money()] == ["agent:coder-1/workflow:eval"]


async def test_a_token_that_may_not_set_limits_is_told_so(
    guarded: ServiceProcess, tmp_path: Path
) -> None:
    token = made_token(guarded, "reader", "read")
    scopes = (RunScope(scope="workflow:guarded", micro_usd=5_000_000),)
    backend = backend_at(guarded.address, tmp_path, scopes=scopes, token=token)
    with pytest.raises(NotAllowedError, match=r"workflow:guarded: this token may not set its"):
        async with opened(backend):
            pass


async def test_without_a_token_nothing_begins(guarded: ServiceProcess, tmp_path: Path) -> None:
    with pytest.raises(NotAllowedError):
        async with opened(backend_at(guarded.address, tmp_path)):
            pass


async def test_a_token_that_is_revoked_ends_the_run_and_not_its_tasks(
    guarded: ServiceProcess, tmp_path: Path
) -> None:
    token = made_token(guarded, "short", "submit", "read")
    slow = step(target="slow")
    backend = backend_at(guarded.address, tmp_path, slow, token=token, run_id="revoked")
    async with opened(backend) as told:
        await backend.submit([order(1, of=slow)])
        await told.until(1, TaskState.RUNNING)
        _revoke(guarded, token)
        end = await told.until(1, TaskState.FAILED)
        assert "cannot be asked about it any more" in (end.error or "")
        assert "1 task of this run" in backend.remains
        with pytest.raises(NotAllowedError):
            await backend.submit([order(2)])
    token = made_token(guarded, "another", "submit", "read", "cancel")
    again = backend_at(guarded.address, tmp_path, slow, token=token, run_id="revoked")
    async with opened(again) as told:
        task = (await known(again))[1]
        assert task.state is TaskState.RUNNING
        await again.cancel([task])
        await told.until(1, TaskState.CANCELLED)


def _revoke(service: ServiceProcess, token: str) -> None:
    first = (service.folder / "data" / "token").read_text().strip()
    with SyncClient(service.address, token=first) as client:
        client.revoke_token(token.split("_")[1])


async def test_whoever_interrupts_may_cancel_what_the_service_has(
    service: ServiceProcess, tmp_path: Path
) -> None:
    slow = step(target="slow")
    backend = backend_at(service.address, tmp_path, slow, run_id="interrupted")
    async with opened(backend) as told:
        await backend.submit([order(n, of=slow) for n in range(5)])
        await told.until(0, TaskState.RUNNING)
        tasks = [task async for task in backend.known()]
        closing = asyncio.create_task(backend.close(drain_seconds=600))
        await asyncio.sleep(0)
        await backend.cancel(tasks)
        await closing
        assert backend.remains == ""
        assert {task.state for task in told.ends().values()} == {TaskState.CANCELLED}


class Interrupted:
    """A run of three slow steps through a proxy, which somebody interrupts."""

    def __init__(
        self, service: ServiceProcess, proxy: ServiceProxy, folder: Path, **options: Any
    ) -> None:
        work = TargetWork(target="slow", action=parsed_text("sleep"))
        slow = Step(id="slow", line=3, work=work, foreach=ListItems(values=(1, 2, 3)))
        self._service = service
        self._run_id = folder.name
        self.backend = backend_at(proxy.url, folder, slow, run_id=self._run_id, **options)
        run = a_run(folder, workflow(slow))
        run.change(id=self._run_id, server=proxy.url)
        self.conductor = Conductor(run, self.backend)
        self._conducting = asyncio.create_task(self.conductor.run())

    async def until(self, *states: str) -> None:
        """Wait until the service has the three tasks, in no other states than these."""

        def is_so() -> bool:
            found = states_of(self._service, self._run_id)
            return len(found) == 3 and {*found} <= {*states}

        await asyncio.to_thread(wait_until, is_so, seconds=SECONDS)

    async def interrupt_twice(self) -> None:
        """Interrupt; and again, when the first time has been acted upon."""
        self.conductor.interrupt()
        # A whole exchange with the service takes longer than a few rounds of the event loop.
        await self.backend.money()
        self.conductor.interrupt()

    async def end(self) -> None:
        """Wait for the end of the run."""
        async with asyncio.timeout(SECONDS):
            report = await self._conducting
        assert report.state is RunState.INTERRUPTED


def states_of(service: ServiceProcess, run_id: str) -> list[str]:
    with SyncClient(service.address) as client:
        return [task.state.value for task in client.iterate_tasks(label=f"run={run_id}")]


async def test_a_second_interrupt_cancels_tasks_whose_answer_is_on_its_way(
    service: ServiceProcess, tmp_path: Path
) -> None:
    proxy = ServiceProxy(port_of(service))
    proxy.hold()
    async with running_proxy(proxy):
        run = Interrupted(service, proxy, tmp_path)
        await run.until("queued", "running")
        await run.interrupt_twice()
        await run.backend.money()
        proxy.release()
        await run.end()
        await run.until("cancelled")
    assert run.backend.remains == ""


async def test_a_second_interrupt_cancels_tasks_whose_answer_is_lost(
    service: ServiceProcess, tmp_path: Path
) -> None:
    proxy = ServiceProxy(port_of(service))
    proxy.harm(drop_reply=1.0)
    async with running_proxy(proxy):
        run = Interrupted(service, proxy, tmp_path)
        await run.until("queued", "running")
        await run.interrupt_twice()
        await run.end()
        await run.until("cancelled")
    assert run.backend.remains == ""


async def test_a_second_interrupt_cancels_tasks_whose_answer_takes_too_long_and_says_so(
    service: ServiceProcess, tmp_path: Path
) -> None:
    proxy = ServiceProxy(port_of(service))
    proxy.hold()
    async with running_proxy(proxy):
        run = Interrupted(service, proxy, tmp_path, leave_seconds=0.5)
        await run.until("queued", "running")
        await run.interrupt_twice()
        await run.end()
        await run.until("cancelled")
    assert "3 tasks of this run" in run.backend.remains


async def test_a_cancel_that_is_lost_is_sent_again(service: ServiceProcess, tmp_path: Path) -> None:
    proxy = ServiceProxy(port_of(service), marker=b"/cancel HTTP")
    async with running_proxy(proxy):
        run = Interrupted(service, proxy, tmp_path)
        await run.until("queued", "running")
        proxy.harm(cut_request=1.0)
        await run.interrupt_twice()
        await asyncio.to_thread(wait_until, lambda: proxy.cut_requests >= 3, seconds=SECONDS)
        proxy.heal()
        await run.end()
        await run.until("cancelled")
    assert run.backend.remains == ""


async def test_a_service_that_answers_no_cancel_keeps_nobody_and_the_way_to_cancel_is_said(
    service: ServiceProcess, tmp_path: Path
) -> None:
    proxy = ServiceProxy(port_of(service), marker=b"/cancel HTTP")
    async with running_proxy(proxy):
        run = Interrupted(service, proxy, tmp_path, leave_seconds=0.5)
        await run.until("queued", "running")
        proxy.harm(cut_request=1.0)
        await run.interrupt_twice()
        await run.end()
    command = f"`headgate cancel --label run={tmp_path.name} --yes --url {proxy.url}`"
    assert f"the service goes on with 3 tasks of this run; {command}" in run.backend.remains


async def test_a_task_that_is_looked_at_twice_ends_once(
    service: ServiceProcess, tmp_path: Path
) -> None:
    task_id = service.submit(target="echo")
    service.wait_for(task_id, "done")
    queued = StepTask(number=1, generation=0, task_id=task_id, state=TaskState.QUEUED)
    journal, told = Journal(tmp_path / "twice.jsonl"), TaskLog()
    async with Client(service.address) as client:
        watch = RemoteWatch(client, Retrying(), journal)
        watch.listener = told
        first = asyncio.create_task(watch.look_at([Unfinished(queued, is_needed=True)]))
        for _ in range(3):
            await asyncio.sleep(0)
        await watch.look_at([Unfinished(queued, is_needed=True)])
        await first
    await journal.close()
    assert told.states(1) == [TaskState.DONE]
