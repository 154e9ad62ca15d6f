"""The command itself against a service: killed again and again, out of money, interrupted."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headgate import SyncClient
from service.support import SLOW_TARGET, ServiceProcess, environment, running_service, wait_until

KILLS = 4
CASES = 30
SETTINGS = f"""{SLOW_TARGET}
[targets.notes]
kind = "callable"
entry_point = "workflow.step_notes:note"
"""
WORKFLOW = """
config:
  budget_usd: 100
steps:
  - id: case
    foreach: {cases}
    target: notes
    action: note
    params: {{number: "{{item}}", path: "{path}"}}
    cost_usd: 0.01
  - id: check
    foreach: {{step: case}}
    target: notes
    action: note
    params: {{number: "{{steps.case.output.number}}", path: "{path}.second"}}
    cost_usd: 0.01
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder: Path = tmp_path_factory.mktemp("service")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "headgate", "run", *arguments, "--data", str(folder), "--json"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def test_a_run_that_is_killed_again_and_again_does_each_step_once(
    service: ServiceProcess, tmp_path: Path
) -> None:
    file, draws = tmp_path / "killed.yaml", random.Random(3)
    cases = msgspec.json.encode(list(range(CASES))).decode()
    file.write_text(WORKFLOW.format(cases=cases, path=tmp_path / "notes"))
    process = command(tmp_path, str(file), "--server", service.address)
    for _ in range(KILLS):
        wanted = journal_lines(tmp_path) + draws.randrange(1, 2 * CASES // KILLS)
        wait_until(
            lambda: process.poll() is not None or journal_lines(tmp_path) >= wanted,  # noqa: B023
            seconds=30,
        )
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = command(tmp_path, "--resume", "last")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    for name in ("notes", "notes.second"):
        lines = (tmp_path / name).read_text().split()
        assert sorted(map(int, lines)) == list(range(CASES))
    assert len(set(labelled(service).values())) == 1
    with SyncClient(service.address) as client:
        assert client.budget_status("workflow:killed").spent_usd == f"{CASES * 0.02:.2f}"
    assert msgspec.json.decode(output)["state"] == "done"


def test_a_budget_that_is_used_up_ends_the_run_until_it_is_raised(
    service: ServiceProcess, tmp_path: Path
) -> None:
    file = tmp_path / "short.yaml"
    text = WORKFLOW.format(cases=[1, 2, 3], path=tmp_path / "notes")
    file.write_text(text.replace("budget_usd: 100", "budget_usd: 0.02"))
    process = command(tmp_path, str(file), "--server", service.address)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 6, output.decode()
    process = command(tmp_path, "--resume", "last", "--budget-usd", "1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output.decode()
    with SyncClient(service.address) as client:
        assert client.budget_status("workflow:short").spent_usd == "0.06"


def test_a_second_interrupt_cancels_what_the_service_has(
    service: ServiceProcess, tmp_path: Path
) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("steps:\n  - id: wait\n    target: slow\n    action: sleep\n")
    process = command(tmp_path, str(file), "--server", service.address)
    wait_until(lambda: states_of(service, "slow") == ["running"], seconds=30)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output.decode()
    assert states_of(service, "slow") == ["cancelled"]


def states_of(service: ServiceProcess, agent_id: str) -> list[str]:
    """Return the states of all tasks of an agent."""
    with SyncClient(service.address) as client:
        return [task.state.value for task in client.iterate_tasks(agent_id=agent_id)]


def journal_lines(folder: Path) -> int:
    """Return how many lines the journals of runs have."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/journal.jsonl"))


def labelled(service: ServiceProcess) -> Counter[tuple[str, str]]:
    """Return how many tasks the service has of each step and item."""
    with SyncClient(service.address) as client:
        tasks = list(client.iterate_tasks(agent_id="killed"))
    return Counter((task.labels["step"], str(task.params["number"])) for task in tasks)
