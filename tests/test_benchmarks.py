"""Benchmarks of processes run to their end, so that they can be run when they are wanted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from service.support import ROOT

FIGURES = (
    "SQLite alone (floor)",
    "SQLite, batches",
    "SQLite, single requests",
    "SQLite, single submits",
    "PostgreSQL alone (floor)",
    "PostgreSQL, batches",
    "PostgreSQL, single requests",
    "sent by the client to first line",
    "createdAt to startedAt",
    "none",
    "500",
    "1,000",
    "2,000",
)
PEERS = (
    *("Dramatiq", "Huey", "Huey on SQLite", "Huey on SQLite, no fsync"),
    *("Taskiq", "SAQ", "Celery"),
)
RUN_FIGURES = (
    "engine, batches over HTTP",
    "a run, concurrency 1,000",
    "a run, concurrency 8",
    "pages of all its processes",
    "allocated by Python",
)


def test_a_quick_benchmark_of_runs_prints_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks", "runs", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in RUN_FIGURES:
        assert re.search(rf"^  {re.escape(name)} +-?[\d,.]+", done.stdout, re.MULTILINE), name


NODE_FIGURES = (
    *(
        "1",
        "2",
        "2, each a domain",
        "submit",
        "plan, for this node",
        "settle, of another node",
        "beat and elect",
    ),
    *("submits of two nodes, of one", "tasks done a second, two nodes"),
    *("start on another node, p50 ms", "error of a share, of all started"),
)


def test_a_quick_benchmark_of_nodes_prints_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks", "nodes", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in NODE_FIGURES:
        assert re.search(rf"^  {re.escape(name)} +[\d,.]+", done.stdout, re.MULTILINE), name


WORKER_FIGURES = (
    *("10", "40", "p99 of a claim, ms", "claims a second", "memory of a worker, 40 to 10"),
    *("processors of a worker that waits, 40 to 10", "processors of a busy worker, 40 to 10"),
    "processors of a claim, 40 to 10",
)


def test_a_quick_benchmark_of_workers_prints_every_figure() -> None:
    command = [sys.executable, "-m", "benchmarks", "workers", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in WORKER_FIGURES:
        assert re.search(rf"^  {re.escape(name)} +[\d,.]+", done.stdout, re.MULTILINE), name


SCALE_FIGURES = (
    *("rounds that a task waited, p50", "p99", "most grants to others while one waits"),
    *("the same as a part of the bound", "projects that got nothing", "largest error of a share"),
    "us a task, to submit, decide and settle",
)


def test_a_quick_benchmark_of_scale_prints_every_figure_and_keeps_the_bounds_of_fairness() -> None:
    command = [sys.executable, "-m", "benchmarks", "scale", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {
        name: re.search(rf"^  {re.escape(name)} +([\d,.e+-]+)", done.stdout, re.MULTILINE)
        for name in SCALE_FIGURES
    }
    figures = {name: figure[1] for name, figure in found.items() if figure}
    assert [name for name in SCALE_FIGURES if name not in figures] == []
    assert figures["projects that got nothing"] == "0"
    assert float(figures["the same as a part of the bound"]) <= 1
    for weight in (1, 2, 3, 5, 8):
        assert re.search(rf"^  weight {weight} +[\d.]+% +[\d.]+%", done.stdout, re.MULTILINE)


KEPT_FIGURES = (
    *("100", "2,000", "2,000, at the cap", "list of failures", "page of tasks"),
    *("tasks deleted a second", "longest submit, ms"),
)


def test_a_quick_benchmark_of_kept_tasks_prints_every_figure_for_both_stores() -> None:
    command = [sys.executable, "-m", "benchmarks", "kept", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in KEPT_FIGURES:
        found = re.findall(rf"^  {re.escape(name)} +[\d,.]+", done.stdout, re.MULTILINE)
        assert len(found) >= 2, name
    assert "file afterwards, MiB" in done.stdout


ESTIMATES = [
    f"{runs} of {limit} means, {held}"
    for runs, limit in ((100, "1,000"), (20, "3,000"))
    for held in ("learned", "the mean", "the maximum")
]


def test_a_quick_benchmark_of_estimates_prints_how_budgets_end_for_each_policy() -> None:
    command = [sys.executable, "-m", "benchmarks", "estimates", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ESTIMATES:
        assert re.search(rf"^  {re.escape(name)} +( +[\d.]+){{4}}$", done.stdout, re.MULTILINE), (
            name
        )


PAGES = (
    *("overview", "tasks", "tasks by a rare label", "tasks by a text that none has"),
    *("a task that waits", "cancel all that wait?", "projects", "budgets", "slots"),
    *("webhooks", "settings"),
)


def test_a_quick_run_prints_every_figure_and_goes_without_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "engine", "--quick"]
    command += ["--peers", str(tmp_path / "no-python")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in FIGURES:
        assert re.search(rf"^  {re.escape(name)} +[\d,.]+", done.stdout, re.MULTILINE), name
    for name in PEERS:
        assert re.search(rf"^  {re.escape(name)} +not installed", done.stdout, re.MULTILINE), name


def test_a_quick_run_over_the_pages_prints_times_weights_and_the_cost_of_browsers() -> None:
    command = [sys.executable, "-m", "benchmarks", "dashboard", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in PAGES:
        found = re.findall(rf"^  {re.escape(name)} +[\d,.]+ +[\d,.]+", done.stdout, re.MULTILINE)
        assert len(found) == 2, name
    assert re.search(r"^  cost: -?[\d.]+% of a core", done.stdout, re.MULTILINE)
    assert "the browsers sent" in done.stdout


GATEWAY_FIGURES = ("the provider alone", "a proxy without books (floor)", "Headgate")
GATEWAY_PEERS = ("TensorZero with limits", "TensorZero", "SMG", "Portkey", "LiteLLM")
GATEWAY_TARGETS = (
    "requests/s at 16 connections, of TensorZero with limits",
    "requests/s at 16 connections, of LiteLLM",
    "added p50 at one connection",
    "added time to the first byte of a stream",
    "50 waiting streams: memory",
    "50 waiting streams: percent of a core",
)


def test_a_quick_run_of_the_gateway_prints_every_figure_and_goes_without_peers(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "benchmarks", "gateway", "--quick"]
    command += ["--gateways", str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in GATEWAY_FIGURES:
        found = re.findall(rf"^  {re.escape(name)}( +-?[\d,.]+){{7}}", done.stdout, re.MULTILINE)
        assert len(found) == 2, done.stdout
    for name in GATEWAY_PEERS:
        found = re.findall(rf"^  {re.escape(name)} +not installed", done.stdout, re.MULTILINE)
        assert len(found) == 2, done.stdout
    for name in GATEWAY_TARGETS:
        assert re.search(rf"^  {re.escape(name)} +", done.stdout, re.MULTILINE), done.stdout
    assert "hg_" not in done.stdout, "the token of the service was printed"
