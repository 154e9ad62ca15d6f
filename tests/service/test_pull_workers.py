"""Real workers of a real service: killed, stopped and continued, while tasks run.

What was acknowledged is done, and recorded once; what a worker says after its lease is refused.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from executors.endpoint import free_port
from service.support import ServiceProcess, environment, running_service, wait_until

SETTINGS = """
[scheduler]
worker_lease_seconds = {lease_seconds}

[agents.a]
target = "pull"

[targets.here]
kind = "callable"
entry_point = "service.work:report_and_run"

[targets.program]
kind = "command"
command = ["sh", "work.sh"]
"""
SCRIPT = """\
echo "0.5 half \x1b way" > "$HEADGATE_PROGRESS"
until [ -e {until} ]; do sleep 0.05; done
"""
LEASE_SECONDS = 2.0
SOON_SECONDS = 60.0


class WorkerProcess:
    """One `headgate worker`, as a user starts it."""

    def __init__(self, service: ServiceProcess, name: str, *options: str) -> None:
        self.log_path = service.folder / f"{name}.log"
        command = [sys.executable, "-m", "headgate", "worker", "--agent", "a"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--url", service.address, *options],
                cwd=service.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """Return what the worker has printed."""
        return self.log_path.read_text(errors="replace")

    def says(self, line: str) -> None:
        """Wait until the worker has said something."""
        wait_until(lambda: line in self.output(), seconds=SOON_SECONDS, what=self.output)

    def end(self) -> None:
        """End the process, in whatever state it is."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "headgate.toml"
    path.write_text(SETTINGS.format(lease_seconds=LEASE_SECONDS))
    return path


@contextmanager
def workers_of(service: ServiceProcess) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []

    def start(name: str, *options: str) -> WorkerProcess:
        options = options or ("--run", "service.work:note_and_run")
        started.append(WorkerProcess(service, name, *options))
        return started[-1]

    try:
        yield start
    finally:
        for worker in started:
            worker.end()


def notes_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def noted(path: Path, *lines: str) -> None:
    """Wait until these lines, and no others, are noted."""
    wait_until(
        lambda: notes_of(path) == list(lines),
        seconds=SOON_SECONDS,
        what=lambda: f"{notes_of(path)} is not {lines}",
    )


def test_a_task_whose_worker_is_killed_or_stands_still_is_run_by_another(
    tmp_path: Path, settings: Path
) -> None:
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        killed, still = tmp_path / "killed", tmp_path / "still"
        first = start("first")
        service.submit(params={"notes": str(killed), "seconds": 30})
        noted(killed, "begins 1")
        first.process.kill()
        second = start("second")
        noted(killed, "begins 1", "begins 2")

        third = start("third")
        two = service.submit(params={"notes": str(still), "seconds": 3})
        noted(still, "begins 1")
        third.process.send_signal(signal.SIGSTOP)
        fourth = start("fourth")
        noted(still, "begins 1", "begins 2")
        third.process.send_signal(signal.SIGCONT)
        done = service.wait_for(two)
        assert (done["state"], done["result"]) == ("done", {"attempt": 2})
        third.says("what runs is stopped")
        assert "stopped 1" in notes_of(still) or "ends 1" in notes_of(still)
        assert service.task(two)["result"] == {"attempt": 2}
        assert second.process.poll() is fourth.process.poll() is None


@pytest.mark.parametrize(
    ("target", "work"),
    [("pull", "function"), ("pull", "command"), ("here", "function"), ("program", "command")],
)
def test_how_far_work_says_it_is_shows_until_it_ends(
    tmp_path: Path, settings: Path, target: str, work: str
) -> None:
    until = tmp_path / "until"
    (tmp_path / "work.sh").write_text(SCRIPT.format(until=until))
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        if work == "function":
            start("first", "--run", "service.work:report_and_run")
        else:
            start("first", "--command", "sh work.sh")
        task_id = service.submit(target=target, params={"until": str(until)})
        wait_until(
            lambda: service.task(task_id).get("progress", {}).get("fraction") == 0.5,
            seconds=SOON_SECONDS,
            what=lambda: str(service.task(task_id)),
        )
        task = service.task(task_id)
        assert task["progress"]["text"] == "half \\x1b way"
        assert service.ask("GET", f"/tasks/{task_id}/why").body["progress"] == task["progress"]
        until.touch()
        assert "progress" not in service.wait_for(task_id)


def test_a_worker_says_why_a_task_failed_and_where_its_function_raised(
    tmp_path: Path, settings: Path
) -> None:
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        worker = start("first", "--run", "service.work:fail")
        task = service.submit(params={"why": "no disk"})
        assert service.wait_for(task)["error"] == "OSError: no disk"
        worker.says(f"headgate worker: task {task} is failed: OSError: no disk\n")
        assert "Traceback" in worker.output()
        assert 'raise OSError(order["params"]["why"])' in worker.output()
        worker.process.send_signal(signal.SIGINT)
        worker.says("has finished 1 task\n")


def test_a_task_goes_on_while_the_service_is_killed_and_is_recorded_once(
    tmp_path: Path, settings: Path
) -> None:
    # The lease outlasts the restart, however busy the machine is.
    settings.write_text(SETTINGS.format(lease_seconds=SOON_SECONDS))
    port = free_port()
    with (
        running_service(tmp_path, "--config", str(settings), port=port) as service,
        workers_of(service) as start,
    ):
        notes = tmp_path / "notes"
        worker = start("worker")
        task_id = service.submit(params={"notes": str(notes), "seconds": 0.6})
        noted(notes, "begins 1")
        service.kill()
        service.start()
        done = service.wait_for(task_id)
        assert (done["state"], done["attempt"], done["result"]) == ("done", 1, {"attempt": 1})
        noted(notes, "begins 1", "ends 1")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(SOON_SECONDS) == 0


def test_ctrl_c_finishes_what_runs_and_a_second_one_gives_it_back(
    tmp_path: Path, settings: Path
) -> None:
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        notes = tmp_path / "notes"
        worker = start("worker")
        task_id = service.submit(params={"notes": str(notes), "seconds": 0.5})
        noted(notes, "begins 1")
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(SOON_SECONDS) == 0
        assert service.task(task_id)["state"] == "done"

        notes.unlink()
        hasty = start("hasty")
        task_id = service.submit(params={"notes": str(notes), "seconds": 60})
        noted(notes, "begins 1")
        hasty.process.send_signal(signal.SIGINT)
        hasty.says("again gives it back")
        hasty.process.send_signal(signal.SIGINT)
        assert hasty.process.wait(SOON_SECONDS) == 0
        assert service.wait_for(task_id, "queued")["attempt"] == 1
        (reason,) = service.ask("GET", f"/tasks/{task_id}/why").body["reasons"]
        assert reason["message"].startswith("no worker of agent a is connected, since ")


def test_tasks_of_a_killed_worker_are_lost_and_run_again_though_they_may_not_fail(
    tmp_path: Path, settings: Path
) -> None:
    """A spot machine goes without a word, with all that it has."""
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        run = ("--run", "service.work:note_and_run", "--capacity", "3")
        notes = [tmp_path / f"notes-{number}" for number in range(3)]
        spot = start("spot", *run)
        tasks = [
            service.submit(params={"notes": str(path), "seconds": 5}, maxAttempts=1)
            for path in notes
        ]
        for path in notes:
            noted(path, "begins 1")
        spot.process.kill()
        start("other", *run)
        for task_id, path in zip(tasks, notes, strict=True):
            done = service.wait_for(task_id)
            assert (done["state"], done["attempt"], done["result"]) == ("done", 2, {"attempt": 2})
            noted(path, "begins 1", "begins 2", "ends 2")


def test_sigterm_hands_back_what_does_not_end_within_the_grace_period(
    tmp_path: Path, settings: Path
) -> None:
    # The lease is long: what comes back sooner was handed back, and not missed.
    settings.write_text(SETTINGS.format(lease_seconds=600))
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        notes, run = tmp_path / "notes", ("--run", "service.work:note_and_run")
        leaving = start("leaving", *run, "--drain-seconds", "1")
        task_id = service.submit(params={"notes": str(notes), "seconds": 90}, maxAttempts=1)
        noted(notes, "begins 1")
        behind = service.submit(params={"notes": str(tmp_path / "behind")})
        leaving.process.send_signal(signal.SIGTERM)
        leaving.says("finishes what runs within 1 seconds, and hands back the rest")
        assert leaving.process.wait(SOON_SECONDS) == 0
        assert "1 tasks still run; they are stopped and handed back" in leaving.output()
        noted(notes, "begins 1", "stopped 1")
        assert service.task(task_id)["state"] == "queued"
        assert service.task(behind)["attempt"] == 0
        start("other", *run, "--capacity", "2")
        noted(notes, "begins 1", "stopped 1", "begins 2")
        assert service.wait_for(behind)["state"] == "done"


def test_a_cancel_reaches_the_command_of_a_worker(tmp_path: Path, settings: Path) -> None:
    with (
        running_service(tmp_path, "--config", str(settings)) as service,
        workers_of(service) as start,
    ):
        start("worker", "--command", f"{sys.executable} -c 'import time; time.sleep(60)'")
        task_id = service.submit()
        service.wait_for(task_id, "running")
        assert service.ask("POST", f"/tasks/{task_id}/cancel").status in (200, 202)
        assert service.wait_for(task_id)["state"] == "cancelled"
