"""What `headgate run` shows to Prometheus: a file that is always whole, and a port on loopback."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from executors.endpoint import free_port
from headgate.workflow.backend import Money
from headgate.workflow.report import RunReport, RunState, StepSummary
from headgate.workflow.run_metrics import MAX_STEPS, OTHER, RunMetrics
from reference_pages import part
from run_commands import Commands, ended, no_process_left

WORKFLOW = """
config: {budget_usd: 1.00}
steps:
  - id: case
    foreach: [1, 2, 3]
    command: [sh, -c, "test {item} -ne 3"]
    cost_usd: 0.07
  - id: gate
    on_parent_failure: run
    depends_on: case
    command: [cat, gate]
"""
WAIT_SECONDS = 30.0
Found = TypeVar("Found")
Samples = dict[tuple[str, ...], float]


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    os.mkfifo(tmp_path / "gate")
    return Commands(tmp_path)


def samples(text: str) -> Samples:
    """Return every value by its name and its labels, except that of the workflow."""
    return {
        (one.name, *(value for name, value in sorted(one.labels.items()) if name != "workflow")):
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }  # fmt: skip


def eventually(find: Callable[[], Found | None]) -> Found:
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        if (found := find()) is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


def opened_gate(commands: Commands) -> None:
    """Let the step go on that waits."""
    (commands.folder / "gate").write_text("through")


def when_cases_ended(text: str) -> Samples | None:
    found = samples(text)
    return found if found.get(("headgate_run_steps", "failed", "case")) == 1.0 else None


EXPECTED = {
    ("headgate_run_steps", "done", "case"): 2.0,
    ("headgate_run_steps", "failed", "case"): 1.0,
    ("headgate_run_attempts_total", "case"): 3.0,
    ("headgate_run_cost_usd_total", "case"): 0.21,
    ("headgate_run_budget_limit_usd", "workflow:w"): 1.0,
}


def test_the_file_is_whole_at_every_moment_and_has_the_end(commands: Commands) -> None:
    path = commands.folder / "run.prom"
    process = commands.start_run("w.yaml", "--metrics-file", str(path))

    def looked() -> Samples | None:
        return when_cases_ended(path.read_text()) if path.exists() else None

    with no_process_left(process):
        during = eventually(looked)
        assert during[("headgate_run_state", "running")] == 1.0
        opened_gate(commands)
        end = ended(process)
    after = samples(path.read_text())
    for found in (during, after):
        assert EXPECTED.items() <= found.items()
    assert (end.code, after[("headgate_run_state", "failed")]) == (1, 1.0)
    assert after[("headgate_run_state", "running")] == 0.0
    assert after[("headgate_run_steps", "done", "gate")] == 1.0
    assert after[("headgate_run_budget_spent_usd", "workflow:w")] == pytest.approx(0.21)
    assert after[("headgate_run_budget_remaining_usd", "workflow:w")] == pytest.approx(0.79)
    assert after[("headgate_run_seconds",)] == pytest.approx(end.json["seconds"])
    assert [one.name for one in path.parent.iterdir() if "prom" in one.name] == ["run.prom"]


def test_the_port_answers_on_loopback_while_the_run_goes_on(commands: Commands) -> None:
    port = free_port()
    process = commands.start_run("w.yaml", "--metrics-port", str(port))

    def fetched() -> Samples | None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert answer.headers["content-type"].startswith("text/plain")
                return when_cases_ended(answer.read().decode())
        except URLError:
            return None

    with no_process_left(process):
        assert EXPECTED.items() <= eventually(fetched).items()
        opened_gate(commands)
        end = ended(process)
    assert end.code == 1, end.stderr
    assert f"metrics at http://127.0.0.1:{port}/metrics" in end.stderr
    assert fetched() is None


REFUSED = [
    (("--metrics-file", "no/such/folder/m.prom"),
     "--metrics-file: no/such/folder/m.prom cannot be written: No such file or directory; name a"),
    (("--metrics-file", "."), "--metrics-file: . cannot be written: Is a directory; name a"),
    (("--metrics-port", "{taken}"), "--metrics-port: 127.0.0.1:{taken} cannot be opened: "),
    (("--metrics-port", "70000"), "--metrics-port: 70000 is not in the range 0<=x<=65535"),
    (("--metrics-port", "0", "--dry-run"), "--metrics-port: is for a run; leave out --dry-run"),
    (("--metrics-file", "m.prom", "--dry-run"), "--metrics-file: is for a run; leave out --dry-"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_what_cannot_be_shown_is_refused_before_anything_runs(
    commands: Commands, options: tuple[str, ...], line: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        given = [option.replace("{taken}", taken) for option in options]
        refused = commands.run("w.yaml", *given)
    assert refused.code == 2
    assert line.replace("{taken}", taken) in refused.stderr
    assert commands.ids() == []


def report_of(steps: int) -> RunReport:
    summaries = [
        StepSummary(step=f"s{number}", total=2, counts={"done": 1, "running": 1}, attempts=3,
                    tokens=5, micro_usd=10, assumed_micro_usd=4)
        for number in range(steps)
    ]  # fmt: skip
    money = Money(scope="session:q", spent_micro_usd=7, reserved_micro_usd=3, limit_micro_usd=None)
    return RunReport(run_id="r", workflow='w"\n', state=RunState.DONE, began_at=1.0, ended_at=9.0,
                     steps=tuple(summaries), money=(money,), trouble="away")  # fmt: skip


def test_steps_beyond_the_most_share_a_label(tmp_path: Path) -> None:
    metrics = RunMetrics(file=tmp_path / "m", port=None)
    metrics.show(report_of(MAX_STEPS + 5))
    found = samples((tmp_path / "m").read_text())
    assert found[("headgate_run_attempts_total", "s0")] == 3.0
    assert found[("headgate_run_attempts_total", OTHER)] == 15.0
    assert found[("headgate_run_steps", "running", OTHER)] == 5.0
    assert len([name for name, *_ in found if name == "headgate_run_tokens_total"]) == MAX_STEPS + 1


def test_a_file_that_cannot_be_written_later_is_said_once(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    told: list[str] = []
    metrics = RunMetrics(file=folder / "m", port=None, tell=told.append)
    folder.rmdir()
    metrics.show(report_of(1))
    metrics.show(report_of(1))
    assert told == [f"headgate: {folder}/m cannot be written: No such file or directory"]


def test_the_page_has_every_metric_of_a_run(tmp_path: Path) -> None:
    metrics = RunMetrics(file=tmp_path / "m", port=None)
    metrics.show(report_of(1))
    page = part("run-metrics")
    text = (tmp_path / "m").read_text()
    names = {one.name for family in text_string_to_metric_families(text) for one in family.samples}
    assert {name for name in names if f"| `{name}` |" not in page} == set()
