"""Steps of a run carried out by a real service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from executors.endpoint import free_port
from headgate import SyncClient
from headgate.errors import BudgetMismatchError, RequestRefusedError, ServiceUnavailableError
from headgate.workflow.backend import TaskState
from headgate.workflow.run_record import RunScope
from service.support import ServiceProcess, running_service
from workflow.server_support import RUN, SETTINGS, backend_at, known, opened, order, step


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder: Path = tmp_path_factory.mktemp("service")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


async def test_a_step_is_taken_runs_and_ends_with_its_result(
    service: ServiceProcess, tmp_path: Path
) -> None:
    backend = backend_at(service.address, tmp_path)
    async with opened(backend) as told:
        await backend.submit([order(1, params={"about": "gates"})])
        end = await told.until(1, TaskState.DONE)
        assert told.states(1)[0] is TaskState.QUEUED
        assert len(told.states(1)) == len(set(told.states(1)))
        (result,) = await backend.results([end])
        assert result["echo"]["params"] == {"about": "gates"}
        assert backend.remains == ""
    task = service.task(end.task_id)
    assert task["labels"] == {"run": RUN, "workflow": "eval", "step": "a"}
    assert task["scopes"] == ["project:default", "workflow:eval"]
    assert (task["agentId"], task["maxAttempts"]) == ("eval", 1)


async def test_more_than_a_batch_and_more_than_the_queue_holds_is_taken_in_the_end(
    service: ServiceProcess, tmp_path: Path
) -> None:
    backend = backend_at(service.address, tmp_path)
    async with opened(backend) as told:
        await backend.submit([order(number) for number in range(230)])
        ends = await told.until_ended(230)
    assert {task.state for task in ends.values()} == {TaskState.DONE}
    again = backend_at(service.address, tmp_path)
    async with opened(again):
        assert len(await known(again)) == 230
        (result,) = await again.results([ends[7]])
    assert result["echo"]["action"] == "n7"


async def test_at_no_moment_is_a_task_unknown(service: ServiceProcess, tmp_path: Path) -> None:
    backend = backend_at(service.address, tmp_path)
    counts: set[int] = set()
    async with opened(backend) as told:
        await backend.submit([order(number) for number in range(30)])
        while len(told.ends()) < 30:
            counts.add(len([task async for task in backend.known()]))
            await asyncio.sleep(0)
    assert counts == {30}


async def test_a_failed_step_tells_its_error(service: ServiceProcess, tmp_path: Path) -> None:
    broken = step(target="broken", retries=1)
    backend = backend_at(service.address, tmp_path, broken)
    async with opened(backend) as told:
        await backend.submit([order(1, of=broken)])
        end = await told.until(1, TaskState.FAILED)
    assert end.attempt == 2
    assert end.error


async def test_an_attempt_that_takes_too_long_is_stopped(
    service: ServiceProcess, tmp_path: Path
) -> None:
    slow = step(target="slow", timeout_seconds=0.2)
    backend = backend_at(service.address, tmp_path, slow)
    async with opened(backend) as told:
        await backend.submit([order(1, of=slow)])
        end = await told.until(1, TaskState.FAILED)
    assert "timed out" in (end.error or "")


async def test_an_unknown_target_is_refused_before_anything_runs(
    service: ServiceProcess, tmp_path: Path
) -> None:
    backend = backend_at(service.address, tmp_path, step(target="nowhere"))
    with pytest.raises(RequestRefusedError, match="only what its configuration names: broken"):
        async with opened(backend):
            pass
    assert not (tmp_path / f"{RUN}.jsonl").exists()


async def test_what_the_service_refuses_has_failed_and_the_others_run(
    service: ServiceProcess, tmp_path: Path
) -> None:
    backend = backend_at(service.address, tmp_path)
    async with opened(backend) as told:
        await backend.submit([order(1, params=[1]), order(2, target="gone"), order(3)])
        ends = await told.until_ended(3)
    assert [ends[number].state.value for number in (1, 2, 3)] == ["failed", "failed", "done"]
    assert ends[1].error == "field 'params': must be an object"
    assert "only what its configuration names" in (ends[2].error or "")


async def test_a_request_that_is_too_large_fails_alone(
    service: ServiceProcess, tmp_path: Path
) -> None:
    backend = backend_at(service.address, tmp_path)
    async with opened(backend) as told:
        large = [order(n, input="x" * 400_000) for n in (1, 2, 3)]
        await backend.submit([*large, order(4, input="x" * 1_200_000), order(5)])
        ends = await told.until_ended(5)
    assert ends[4].state is TaskState.FAILED
    assert "1048576 bytes" in (ends[4].error or "")
    assert [ends[n].state for n in (1, 2, 3, 5)] == [TaskState.DONE] * 4


async def test_a_budget_that_does_not_hold_a_step_rejects_it(
    service: ServiceProcess, tmp_path: Path
) -> None:
    scopes = (
        RunScope(scope="session:s1", micro_usd=1_000_000),
        RunScope(scope="session:s1/workflow:eval", micro_usd=140_000),
    )
    backend = backend_at(service.address, tmp_path, scopes=scopes)
    async with opened(backend) as told:
        await backend.submit([order(n, micro_usd=70_000) for n in (1, 2, 3)])
        ends = await told.until_ended(3)
        outer, inner = await backend.money()
        assert not await backend.is_stuck()
    states = sorted(task.state.value for task in ends.values())
    assert states == ["done", "done", "rejected"]
    refused = next(task for task in ends.values() if task.state is TaskState.REJECTED)
    assert "$0.00 left (scope" in (refused.error or "")
    assert (outer.scope, outer.spent_micro_usd) == ("session:s1", 140_000)
    assert (inner.limit_micro_usd, inner.reserved_micro_usd) == (140_000, 0)
    assert sum(task.micro_usd for task in ends.values()) == 140_000


async def test_a_limit_that_differs_is_named_with_the_one_that_is_there(
    service: ServiceProcess, tmp_path: Path
) -> None:
    for run_id in ("one", "two"):
        scopes = (RunScope(scope="workflow:limits", micro_usd=50_000_000),)
        async with opened(backend_at(service.address, tmp_path, scopes=scopes, run_id=run_id)):
            pass
    other = (RunScope(scope="workflow:limits", micro_usd=40_000_000),)
    backend = backend_at(service.address, tmp_path, scopes=other, run_id="three")
    with pytest.raises(BudgetMismatchError, match=r"\$50\.00, and the file says \$40\.00"):
        async with opened(backend):
            pass
    raised = backend_at(service.address, tmp_path, scopes=other, run_id="four", sets_own_limit=True)
    async with opened(raised):
        assert (await raised.money())[0].limit_micro_usd == 40_000_000


async def test_a_step_that_waits_for_a_window_says_why_and_the_run_is_stuck(
    service: ServiceProcess, tmp_path: Path
) -> None:
    with SyncClient(service.address) as client:
        client.change_budget("workflow:daily", limit_usd="0.10", window="day")
    scopes = (RunScope(scope="workflow:daily"),)
    backend = backend_at(service.address, tmp_path, scopes=scopes)
    async with opened(backend) as told:
        await backend.submit([order(1, micro_usd=70_000)])
        await told.until(1, TaskState.DONE)
        assert not await backend.is_stuck()
        await backend.submit([order(2, micro_usd=70_000)])
        task = await told.until(2, TaskState.QUEUED)
        while not (why := await backend.why(task)):
            pass
        assert "workflow:daily" in why
        assert await backend.is_stuck()
        await backend.cancel([task])
        await told.until(2, TaskState.CANCELLED)


async def test_a_cancel_stops_what_runs_and_what_waits(
    service: ServiceProcess, tmp_path: Path
) -> None:
    slow = step(target="slow")
    backend = backend_at(service.address, tmp_path, slow)
    async with opened(backend) as told:
        await backend.submit([order(n, of=slow) for n in range(30)])
        await told.until(0, TaskState.RUNNING)
        assert not await backend.is_stuck()
        assert "30 tasks" in backend.remains
        assert f"headgate cancel --label run={RUN} --yes" in backend.remains
        tasks = [task async for task in backend.known()]
        await backend.cancel(tasks)
        ends = await told.until_ended(30)
        await backend.cancel(tasks)
    assert {task.state for task in ends.values()} == {TaskState.CANCELLED}


async def test_a_service_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    backend = backend_at(f"http://127.0.0.1:{free_port()}", tmp_path)
    with pytest.raises(ServiceUnavailableError, match="no service answers"):
        async with opened(backend):
            pass
