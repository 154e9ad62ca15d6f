"""Tasks on a real Ray cluster of two nodes: results, bounds, capacity, losses and restarts."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headgate.executors.build import build_executor
from headgate.executors.executor import RemoteExecutor
from headgate.executors.targets import RayTarget
from headgate.testing import VirtualClock
from service.support import ServiceProcess, family, wait_until

if TYPE_CHECKING:
    from on_ray.conftest import RayCluster

SECONDS = 60.0


def lines(path: Path) -> list[str]:
    """Return what a task did, line by line, without where."""
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_line(path: Path, line: str) -> None:
    wait_until(lambda: line in lines(path), seconds=SECONDS, what=lambda: str(lines(path)))


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
    pid = int(file.read_text().split()[1])
    service.ask("POST", f"/tasks/{task_id}/cancel")
    assert service.wait_for(task_id, seconds=SECONDS)["state"] == "cancelled"
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), seconds=SECONDS, what=lambda: "it lives")


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
    assert "num_cpus 1" in reasons(service, waiting)
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
    # It may be with Ray again at once, where it waits for another such node.
    wait_until(lambda: "attempts" in service.task(task_id), seconds=SECONDS)
    release.touch()
    cluster.add_second()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert task["state"] == "done"
    assert lines(file) == ["began", "began", "ended"]


def test_an_end_of_the_holder_is_a_loss_and_another_takes_what_comes(
    service: ServiceProcess, cluster: RayCluster, tmp_path: Path
) -> None:
    assert cluster.address
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(maxAttempts=1, params=params)
    wait_for_line(file, "began")
    for pid in holders():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: service.task(task_id)["attempt"] == 2, seconds=SECONDS)
    release.touch()
    task = service.wait_for(task_id, seconds=SECONDS)
    assert (task["state"], task["attempt"]) == ("done", 2), task.get("error")


def test_the_end_of_the_driver_ends_no_work(service: ServiceProcess, tmp_path: Path) -> None:
    file, release = tmp_path / "lines", tmp_path / "release"
    params = {"file": str(file), "seconds": 600, "release": str(release)}
    task_id = service.submit(params=params)
    wait_for_line(file, "began")
    for pid in drivers(service):
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


def holders() -> list[int]:
    """Return the processes of the holder in the cluster of these tests."""
    found = []
    for pid in family(os.getpid()):
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Holder"):
                found.append(pid)
    return found


def drivers(service: ServiceProcess) -> list[int]:
    """Return the processes that speak with the cluster for a service."""
    found = []
    for pid in service.pids[1:]:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"ray_cluster" in command:
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
    assert room is not None
    assert room.free == 0
    assert "Ray at 127.0.0.1:1 cannot be reached" in room.why
