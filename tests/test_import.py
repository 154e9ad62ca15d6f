"""Importing is cheap, and loads nothing that is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headgate

PUBLIC_NAMES = [
    "Agent",
    "AgentState",
    "AssignAction",
    "BudgetManager",
    "Project",
    "ProjectStatus",
    "RateLimitWindow",
    "Scheduler",
    "SchedulerState",
    "Task",
    "TaskStatus",
]
ROOT = Path(__file__).parent.parent
LIGHT = {"click", "headgate", "markdown_it", "mdurl", "msgspec", "pygments", "rich"}
"""What commands that talk to a service load at most; the rest is for those that serve and run."""
NOT_FOR_DECIDING = {"asyncio", "click", "logging", "random", "rich", "socket", "structlog"}
MOST_IMPORT_SECONDS = 2.0

# Whatever is not named is made to be missing.
PROBE = """
import json, sys, time

class OnlyInstalled:
    def find_spec(self, name, path=None, target=None):
        # What the build of an interpreter was like is in a module of its own.
        is_standard = name in sys.stdlib_module_names or name.startswith("_sysconfigdata")
        if name.partition(".")[0] not in {installed} | sys.stdlib_module_names and not is_standard:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, OnlyInstalled())
before = set(sys.modules)
started = time.perf_counter()
{statement}
seconds = time.perf_counter() - started
loaded = sorted(set(sys.modules) - before)
print(json.dumps({{"loaded": loaded, "seconds": seconds}}), file=sys.stderr)
"""


def probe(statement: str, *, installed: set[str]) -> tuple[set[str], float]:
    """Run a statement in a fresh interpreter; return the packages it loads, and its seconds."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement, installed=installed)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stderr)
    return {name.partition(".")[0] for name in report["loaded"]}, report["seconds"]


def test_deciding_needs_the_standard_library_and_msgspec_only() -> None:
    loaded, _ = probe("from headgate import Scheduler", installed={"headgate", "msgspec"})
    assert {"headgate", "msgspec"} <= loaded
    assert loaded.isdisjoint(NOT_FOR_DECIDING)


def test_importing_headgate_is_quick() -> None:
    seconds = (probe("from headgate import Scheduler", installed=LIGHT)[1] for _ in range(3))
    assert min(seconds) < MOST_IMPORT_SECONDS


@pytest.mark.parametrize("arguments", [["--help"], ["decide", "docs/examples/snapshot.json"]])
def test_a_command_in_a_pipe_does_not_import_rich(arguments: list[str]) -> None:
    statement = f"from headgate.cli.main import run; assert run({arguments}) == 0"
    loaded, _ = probe(statement, installed=LIGHT)
    assert "click" in loaded
    assert "rich" not in loaded


def test_a_list_of_commands_loads_none_of_them() -> None:
    statement = (
        "from headgate.cli.main import COMMANDS, run; assert run(['--help']) == 0; "
        "assert not [name for name in COMMANDS if f'headgate.cli.{name}' in sys.modules]"
    )
    loaded, _ = probe(statement, installed=LIGHT)
    assert loaded.isdisjoint({"asyncio", "http", "rich", "ssl"})


def test_a_client_without_asyncio_does_not_load_it() -> None:
    loaded, _ = probe("from headgate import SyncClient; SyncClient()", installed=LIGHT)
    assert "asyncio" not in loaded


@pytest.mark.parametrize(
    "statement",
    [
        "import headgate.testing.fleet",
        "import asyncio; from headgate import wrap; asyncio.run(wrap(str, 1, agent_id='a'))",
        "from headgate import Client, SyncClient; SyncClient('http://127.0.0.1:1').close()",
        "import headgate.cli.submit",
        "import headgate.cli.watch",
        "from headgate.cli.main import run; assert run(['simulate', '--seconds', '0.1']) == 0",
        "from headgate.cli.output import drawn_table; assert drawn_table('t', ('a',), [('b',)])",
    ],
)
def test_what_only_asks_or_decides_loads_no_heavy_package(statement: str) -> None:
    loaded, _ = probe(statement, installed=LIGHT)
    assert "headgate" in loaded


@pytest.mark.parametrize(
    ("statement", "packages"),
    [
        ("from headgate import PostgresBudgetTracker", {"psycopg", "psycopg_binary"}),
        ("from headgate import RedisBudgetTracker", {"redis"}),
        ("from headgate import SqliteBudgetTracker", {"apsw"}),
        ("from headgate.metrics import BudgetMetrics", {"prometheus_client"}),
    ],
)
def test_a_ledger_needs_its_own_package_alone(statement: str, packages: set[str]) -> None:
    installed = LIGHT | packages | {"typing_extensions"}
    loaded, _ = probe(statement, installed=installed)
    assert packages & loaded


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_the_names_of_the_decision_are_importable_from_the_package(name: str) -> None:
    assert name in headgate.__all__
    assert getattr(headgate, name).__name__ == name


def test_python_m_headgate_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"headgate {headgate.__version__}\n"
