"""Tasks on a real Ray cluster of two nodes: results, bounds, capacity, losses and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from executors.orders import opened, order
from headgate.core.lifecycle import Lost, Outcome, Succeeded
from headgate.executors.build import build_executor
from headgate.executors.executor import Executor, RemoteExecutor, WorkOrder
from headgate.executors.targets import RayTarget
from headgate.testing import VirtualClock
from on_ray.conftest import connected
from service.support import ServiceProcess, family, wait_until

if TYPE_CHECKING:
    from on_ray.conftest import RayCluster

SECONDS = 60.0


def lines(path: Path) -> list[str]:
    """Return what a task did, line by line, without where."""
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_line(path: Path, line: str) -> None:
    wait_until(lambda: line in lines(path), seconds=SECONDS, what=lambda: str(lines(path)))


def wait_for_end(path: Path) -> None:
    """Wait until the process has ended that wrote the first line."""
    pid = int(path.read_text().split()[1])
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), seconds=SECONDS, what=lambda: "it lives")


def reasons(service: ServiceProcess, task_id: str) -> str:
    return str(service.ask("GET", f"/tasks/{task_id}/why").body)


def test_a_function_runs_in_the_cluster_and_its_usage_is_booked(service: ServiceProcess) -> None:
    task = service.wait_for(service.submit(), seconds=SECONDS)
    assert task["state"] == "done"
    assert task["result"]["variable"] == "seen"
    assert task["usage"]["tokens"] == 15


def test_a_command_runs_in_the_cluster(service: ServiceProcess) -> None:
    task_id = service.submit(target="program", params={"number": 7})
    task = service.wait_for(task_id, seconds=SECONDS)
    assert task["state"] == "done"
    assert task["result"]["json"]["params"] == {"number": 7}


def test_as_much_output_of_a_command_is_kept_as_its_result_may_have(
    service: ServiceProcess,
) -> None:
    whole = service.wait_for(service.submit(target="printer"), seconds=SECONDS)["result"]
    assert (len(whole["stdout"]), "stdoutCut" in whole) == (600_000, False)
    cut = service.wait_for(service.submit(target="brief"), seconds=SECONDS)["result"]
    assert 2_000 < len(cut["stdout"]) < 10_000
    assert cut["stdoutCut"] is True


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"action": "fail", "maxAttempts": 1}, "ValueError: no such thing"),
        ({"action": "large", "params": {"bytes": 20_000}}, "larger than 10000 bytes"),
        ({"params": {"seconds": 60}, "timeoutSeconds": 1, "maxAttempts": 1}, "timed out after 1 s"),
    ],
)
def test_a_failure_is_told(service: ServiceProcess, fields: dict[str, object], error: str) -> None:
    task = service.wait_for(service.submit(**fields), seconds=SECONDS)
    assert task["state"] == "failed"
    assert error in task["error"]


def test_a_cancel_stops_what_can_be_asked(service: ServiceProcess, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    params = {"file": str(file), "seconds": 600}
    task_id = service.submit(target="patient", params=params)
    wait_for_line(file, "began")
    service.ask("POST", f"/tasks/{task_id}/cancel")
    assert service.wait_for(task_id, seconds=SECONDS)["state"] == "cancelled"
    assert lines(file) == ["began", "cancelled"]


def test_a_cancel_ends_what_does_not_listen(service: ServiceProcess, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    task_id = service.submit(params={"file": str(file), "seconds": 600})
    wait_for_line(file, "began")
    service.ask("POST", f"/tasks/{task_id}/cancel")
    assert service.wait_for(task_id, seconds=SECONDS)["state"] == "cancelled"
    wait_for_end(file)


def test_no_more_starts_than_the_cluster_has_room_for(
    service: ServiceProcess, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    files = [tmp_path / f"lines-{number}" for number in range(6)]
    tasks = [
        service.submit(
            agentId=f"a{number}",
            params={"file": str(file), "seconds": 600, "release": str(release)},
        )
        for number, file in enumerate(files)
    ]
    # Three processors, and each task needs one.
    wait_until(
        lambda: sum(lines(file) == ["began"] for file in files) == 3,
        seconds=SECONDS,
        what=lambda: str([lines(file) for file in files]),
    )
    states = [service.task(task_id)["state"] for task_id in tasks]
    assert states.count("running") == 3
    waiting = tasks[states.index("queued")]
    # The cluster is asked for its room every half second.
    wait_until(
        lambda: "num_cpus 1" in reasons(service, waiting),
        seconds=SECONDS,
        what=lambda: reasons(service, waiting),
    )
    release.touch()
    for task_id in tasks:
        assert service.wait_for(task_id, seconds=SECONDS)["state"] == "done"


def test_what_no_node_has_is_named(service: ServiceProcess) -> None:
    task_id = service.submit(target="huge")
    wait_until(
        lambda: "no node of the Ray cluster has num_gpus 8" in reasons(service, task_id),
        seconds=SECONDS,
        what=lambda: reasons(service, task_id),
    )
    assert service.task(task_id)["state"] == "queued"


def test_a_lost_node_is_a_loss_and_no_failure(
    service: ServiceProcess, cluster: RayCluster, tmp_path: Path
) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    task_id = service.submit(
        target="second",
        maxAttempts=1,
        params={"file": str(file), "seconds": 600, "release": str(release)},
    )
    wait_for_line(file, "began")
    cluster.kill_second()
    wait_for_end(file)
    # It may be with Ray again at once, where it waits for another such node.
    wait_until(lambda: "attempts" in service.task(task_id), seconds=SECONDS)
    release.touch()
    cluster.add_second()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert task["state"] == "done"
    assert lines(file) == ["began", "began", "ended"]


def test_the_end_of_the_holder_is_a_loss_and_another_takes_what_comes(
    service: ServiceProcess, tmp_path: Path
) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(maxAttempts=1, params=params)
    wait_for_line(file, "began")
    send_to_holder(signal.SIGKILL)
    # Ray ends what a lost owner had under way.
    wait_for_end(file)
    release.touch()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert task["state"] == "done", task.get("error")
    assert lines(file) == ["began", "began", "ended"]


async def test_a_start_finds_another_holder_in_place_of_a_lost_one(
    cluster: RayCluster, tmp_path: Path
) -> None:
    async with opened(target_on(cluster)) as executor:
        assert isinstance(await outcome_of(executor, order_in(tmp_path, attempt=1)), Succeeded)
        send_to_holder(signal.SIGKILL)
        assert isinstance(await outcome_of(executor, order_in(tmp_path, attempt=2)), Succeeded)
    assert lines(tmp_path / "lines") == ["began", "ended"] * 2


async def test_what_a_lost_holder_may_have_begun_is_not_begun_again(
    cluster: RayCluster, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    wait_until(lambda: is_placed(cluster, file), seconds=SECONDS)
    async with opened(target_on(cluster)) as executor:
        first = await outcome_of(executor, order_in(tmp_path, attempt=1, seconds=SECONDS))
        assert isinstance(first, Lost)
        assert first.has_started
        wait_for_end(file)
        assert lines(file) == ["began"]
        assert isinstance(await outcome_of(executor, order_in(tmp_path, attempt=2)), Succeeded)
    assert lines(file) == ["began", "began", "ended"]


async def test_what_was_given_up_does_not_start_later(cluster: RayCluster, tmp_path: Path) -> None:
    async with opened(target_on(cluster)) as executor:
        order = order_in(tmp_path, attempt=1)
        given_up = await executor.execute(msgspec.structs.replace(order, is_resumed=True))
        late = await executor.execute(order)
    for outcome in (given_up, late):
        assert isinstance(outcome, Lost)
        assert outcome.has_started
    assert lines(tmp_path / "lines") == []


WITHOUT_RESOURCES = """
import sys

class Changed:
    def find_spec(self, name, path=None, target=None):
        if name == "headgate.executors.ray_cluster":
            import ray._private.state
            del ray._private.state.available_resources_per_node

sys.meta_path.insert(0, Changed())
"""


async def test_a_cluster_that_cannot_say_its_room_has_none_and_says_why(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As in a version of Ray that has this elsewhere.
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_RESOURCES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    async with opened(target_on(cluster)) as executor:
        assert isinstance(executor, RemoteExecutor)
        room = await executor.room()
    assert room.free == 0
    assert f"the free capacity of Ray at {cluster.address} is unknown: ImportError" in room.why


async def test_what_was_begun_at_an_older_holder_is_found_there(
    cluster: RayCluster, tmp_path: Path
) -> None:
    from headgate.executors.ray_cluster import NAMESPACE, OLDER_HOLDERS  # noqa: PLC0415
    from on_ray.work import OlderHolder  # noqa: PLC0415

    made = order_in(tmp_path, attempt=1)
    with connected(cluster) as ray:
        options = {"name": OLDER_HOLDERS[0], "namespace": NAMESPACE, "lifetime": "detached"}
        holder = ray.remote(OlderHolder).options(num_cpus=0, **options).remote()
        ray.get(holder.keep.remote(f"{made.task_id}.1"))
        async with opened(target_on(cluster)) as executor:
            assert isinstance(executor, RemoteExecutor)
            found = await executor.execute(msgspec.structs.replace(made, is_resumed=True))
            assert isinstance(found, Succeeded)
            assert found.result == msgspec.Raw(b'"kept"')
            # It has no reports, so nobody asks it for the room.
            assert (await executor.room()).free > 0
            ray.kill(holder)
            # What is known nowhere is lost, and an older holder that is gone keeps nobody waiting.
            order = msgspec.structs.replace(order_in(tmp_path, attempt=2), is_resumed=True)
            assert isinstance(await executor.execute(order), Lost)


async def test_what_was_given_up_ends_when_the_cluster_answers(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.executors.ray.LOST_SECONDS", 1.0)
    file = tmp_path / "lines"
    async with opened(target_on(cluster)) as executor:
        attempt = order_in(tmp_path, attempt=1, seconds=600.0)
        running = asyncio.create_task(executor.execute(attempt))
        await asyncio.to_thread(wait_for_line, file, "began")
        send_to_holder(signal.SIGSTOP)
        try:
            for pid in processes(os.getpid(), b"ray_cluster"):
                os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(3 * SECONDS):
                outcome = await running
        finally:
            send_to_holder(signal.SIGCONT)
        assert isinstance(outcome, Lost)
        assert outcome.has_started
        await asyncio.to_thread(wait_for_end, file)
    assert lines(file) == ["began"]


def test_two_targets_at_one_cluster_share_its_room(service: ServiceProcess, tmp_path: Path) -> None:
    release = tmp_path / "release"
    params = {"seconds": 600, "release": str(release)}
    tasks = [
        service.submit(agentId=f"{target}{n}", target=target, params=params)
        for n in range(6)
        for target in ("function", "twin")
    ]
    running: list[int] = []

    def states() -> int:
        running.append([service.task(task_id)["state"] for task_id in tasks].count("running"))
        return running[-1]

    wait_until(lambda: states() >= 3, seconds=SECONDS, what=lambda: str(running))
    # Whoever waits is told why at the next answer of the cluster, so that is behind all starts.
    waiting = [one for one in tasks if service.task(one)["state"] == "queued"]
    wait_until(
        lambda: all("num_cpus 1" in reasons(service, one) for one in waiting), seconds=SECONDS
    )
    states()
    release.touch()
    for task_id in tasks:
        assert service.wait_for(task_id, seconds=SECONDS)["state"] == "done"
    assert max(running) == 3


async def test_a_holder_that_stays_away_leaves_no_room_and_starts_nothing(
    cluster: RayCluster, tmp_path: Path
) -> None:
    from headgate.executors.ray_cluster import HOLDER  # noqa: PLC0415

    why = f"Ray at {cluster.address} cannot be reached: its actor {HOLDER} did not answer"
    async with opened(target_on(cluster)) as executor:
        assert isinstance(executor, RemoteExecutor)
        assert isinstance(await outcome_of(executor, order_in(tmp_path, attempt=1)), Succeeded)
        send_to_holder(signal.SIGSTOP)
        try:
            order = order_in(tmp_path, attempt=2)
            outcome, room = await asyncio.gather(executor.execute(order), executor.room())
        finally:
            send_to_holder(signal.SIGCONT)
        assert isinstance(outcome, Lost)
        assert not outcome.has_started
        assert outcome.retry_seconds
        assert why in str(outcome.error)
        assert room.free == 0
        assert why in room.why
        assert isinstance(await outcome_of(executor, order_in(tmp_path, attempt=3)), Succeeded)
    assert lines(tmp_path / "lines") == ["began", "ended"] * 2


def test_the_end_of_the_driver_ends_no_work(service: ServiceProcess, tmp_path: Path) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(params=params)
    wait_for_line(file, "began")
    for pid in processes(service.pid, b"ray_cluster"):
        os.kill(pid, signal.SIGKILL)
    release.touch()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert (task["state"], task["result"]["attempt"]) == ("done", 1)
    assert lines(file) == ["began", "ended"]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_service_that_comes_back_goes_on(
    service: ServiceProcess, tmp_path: Path, end: str
) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(params=params)
    wait_for_line(file, "began")
    service.kill() if end == "kill" else service.stop()
    service.start()
    assert service.task(task_id)["state"] == "running"
    release.touch()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert (task["state"], task["result"]["attempt"]) == ("done", 1)
    assert lines(file) == ["began", "ended"]


def wait_for_progress(service: ServiceProcess, task_id: str, fraction: float) -> None:
    wait_until(
        lambda: service.task(task_id).get("progress", {}).get("fraction") == fraction,
        seconds=SECONDS,
        what=lambda: str(service.task(task_id)),
    )


def test_the_latest_report_shows_and_goes_on_after_a_restart(
    service: ServiceProcess, tmp_path: Path
) -> None:
    release, again = tmp_path / "release", tmp_path / "again"
    params = {"seconds": 600, "release": str(release), "again": str(again), "reports": 500}
    task_id = service.submit(params=params)
    # Of many within a second the last one arrives, too.
    wait_for_progress(service, task_id, 0.499)
    assert service.task(task_id)["progress"]["text"] == "file 499"
    service.kill()
    service.start()
    assert service.task(task_id)["progress"]["fraction"] == 0.499
    again.touch()
    wait_for_progress(service, task_id, 0.9)
    release.touch()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert (task["state"], task["result"]["attempt"]) == ("done", 1)
    assert "progress" not in task


def test_a_command_reports_progress(service: ServiceProcess, tmp_path: Path) -> None:
    task_id = service.submit(target="reporter")
    wait_for_progress(service, task_id, 0.4)
    assert service.task(task_id)["progress"]["text"] == "12 of 30 files"
    (tmp_path / "release").touch()
    assert service.wait_for(task_id, seconds=SECONDS)["state"] == "done"


def test_work_that_ended_meanwhile_is_collected(service: ServiceProcess, tmp_path: Path) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(params=params)
    wait_for_line(file, "began")
    service.kill()
    release.touch()
    wait_for_line(file, "ended")
    service.start()
    assert service.wait_for(task_id, seconds=SECONDS)["state"] == "done"
    assert lines(file) == ["began", "ended"]


def target_on(cluster: RayCluster) -> RayTarget:
    """Return a target for an executor without a service."""
    cluster.add_second()
    return RayTarget(address=cluster.address, entry_point="on_ray.work:run")


def order_in(folder: Path, *, attempt: int, seconds: float = 0.0) -> WorkOrder:
    """Return an attempt at the one task of a test."""
    made = order("work", params={"file": str(folder / "lines"), "seconds": seconds})
    return msgspec.structs.replace(made, task_id=folder.name, attempt=attempt)


async def outcome_of(executor: Executor, order: WorkOrder) -> Outcome:
    """Try until it could begin, as an engine does: a slow machine takes long for a new holder."""
    async with asyncio.timeout(3 * SECONDS):
        while True:
            outcome = await executor.execute(order)
            if not isinstance(outcome, Lost) or outcome.has_started:
                return outcome


def is_placed(cluster: RayCluster, file: Path) -> bool:
    """Replace the holder by one that dies; False if somebody else was faster, or Ray lost it.

    Ray may place it on the node that an earlier test killed and that is not yet known as lost.
    """
    from headgate.executors.ray_cluster import HOLDER, NAMESPACE  # noqa: PLC0415
    from on_ray.work import DyingHolder  # noqa: PLC0415

    options = {"name": HOLDER, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    with connected(cluster) as ray:
        with suppress(ValueError):
            ray.kill(ray.get_actor(HOLDER, namespace=NAMESPACE))
        try:
            holder = ray.remote(DyingHolder).options(**options).remote(str(file))
        except ValueError:
            return False
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return bool(ray.get(holder.__ray_ready__.remote(), timeout=SECONDS))
        return False


def send_to_holder(number: signal.Signals) -> None:
    """Send a signal to the process of the holder in the cluster of these tests."""
    for pid in processes(os.getpid(), b"ray::Holder"):
        os.kill(pid, number)


def processes(parent: int, word: bytes) -> list[int]:
    """Return those below a process whose command line has a word; there must be one."""
    found = []
    for pid in family(parent)[1:]:
        # It may have ended meanwhile.
        with suppress(OSError):
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    assert found
    return found


async def test_a_cluster_that_cannot_be_reached_leaves_no_room_and_says_why() -> None:
    target = RayTarget(address="127.0.0.1:1", entry_point="a:b")
    executor = build_executor("x", target, environ={}, clock=VirtualClock())
    assert isinstance(executor, RemoteExecutor)
    await executor.open()
    try:
        room = await executor.room()
    finally:
        await executor.close()
    assert room.free == 0
    assert "Ray at 127.0.0.1:1 cannot be reached" in room.why
