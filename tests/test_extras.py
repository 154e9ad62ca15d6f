"""A package that an extra brings and that is not here is one line that says what to install.

Whatever command misses it: none ends in an internal error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from headgate.extras import EXTRAS

PROBE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from headgate.__main__ import main
main()
"""
POSTGRES = "postgresql://127.0.0.1:1/tasks"
REDIS = "redis://127.0.0.1:1/0"
WORKFLOW = 'name: one\nsteps:\n  - id: echo\n    command: ["echo", "hi"]\n    cost_usd: 0.01\n'
CLUSTER = '[targets.train]\nkind = "ray"\nentry_point = "jobs.training:run"\n'
SLOTS = '[[slots]]\nname = "a"\nprovider = "zai"\nkey_env = "A_KEY"\n'


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def said_without(
    folder: Path, *command: str, missing: Iterable[str] = EXTRAS, **variables: str
) -> Said:
    """Run a command in an interpreter that lacks packages, by default those of all extras."""
    (folder / "one.yaml").write_text(WORKFLOW)
    (folder / "slots.toml").write_text(SLOTS)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(missing=set(missing)), *command],
        cwd=folder,
        env={**os.environ, "XDG_DATA_HOME": str(folder / "share"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def needs(setting: str, package: str) -> str:
    extra = EXTRAS[package]
    return (
        f"{setting}: needs the package {package}, which is not installed; "
        f"run pip install 'headgate[{extra}]'"
    )


IN_POSTGRES = {"HEADGATE_STORE__URL": POSTGRES}
IN_REDIS = {"HEADGATE_LEDGER__URL": REDIS}
TRACED = {"HEADGATE_TELEMETRY__OTEL": "true"}
STORE = needs("store.url", "psycopg")
LEDGER = needs("url", "redis")
TRACES = needs("telemetry.otel", "opentelemetry")

REFUSED = [
    (["up", "--port", "0"], IN_POSTGRES, STORE),
    (["up", "--port", "0"], IN_REDIS, LEDGER),
    (["up", "--port", "0"], TRACED, TRACES),
    (["config", "check"], IN_POSTGRES, STORE),
    (["config", "check"], IN_REDIS, LEDGER),
    (["config", "check"], TRACED, TRACES),
    (["token", "create", "ci", "--offline"], IN_POSTGRES, STORE),
    (["slot", "run", "--config", "slots.toml"], IN_POSTGRES, STORE),
    (["budget", "status", "--ledger", REDIS], {}, LEDGER),
    (["budget", "status", "--ledger", POSTGRES], {}, needs("url", "psycopg")),
    (["budget", "set", "session:a", "--limit-usd", "1", "--ledger", REDIS], {}, LEDGER),
    (["run", "one.yaml", "--budget-redis-url", REDIS], {}, LEDGER),
    (["run", "one.yaml", "--budget-postgres-url", POSTGRES], {}, needs("url", "psycopg")),
    (["run", "one.yaml", "--dry-run", "--budget-redis-url", REDIS], {}, LEDGER),
]


@pytest.mark.parametrize(("command", "variables", "line"), REFUSED)
def test_a_command_that_needs_an_extra_says_what_to_install(
    tmp_path: Path, command: list[str], variables: dict[str, str], line: str
) -> None:
    said = said_without(tmp_path, *command, **variables)
    assert line in said.err
    assert "internal error" not in said.err
    assert "Traceback" not in said.err
    assert said.code == 2


@pytest.mark.parametrize(
    ("variables", "line"), [(IN_POSTGRES, STORE), (IN_REDIS, LEDGER), (TRACED, TRACES)]
)
def test_the_doctor_finds_that_an_extra_is_missing(
    tmp_path: Path, variables: dict[str, str], line: str
) -> None:
    said = said_without(tmp_path, "doctor", "--json", **variables)
    assert line in said.out
    assert (said.code, said.err) == (1, "")


@pytest.mark.parametrize(
    ("command", "code"), [(["up", "--port", "0"], 2), (["config", "check"], 2), (["doctor"], 1)]
)
def test_a_target_on_ray_without_the_package_says_what_to_install(
    tmp_path: Path, command: list[str], code: int
) -> None:
    (tmp_path / "headgate.toml").write_text(CLUSTER)
    said = said_without(tmp_path, *command)
    assert needs("targets.train.kind", "ray") in said.out + said.err
    assert said.code == code


@pytest.mark.parametrize("command", [["backup", "copy.db"], ["restore", "copy.db"]])
def test_a_command_that_does_nothing_with_a_server_needs_no_extra(
    tmp_path: Path, command: list[str]
) -> None:
    said = said_without(tmp_path, *command, **IN_POSTGRES)
    assert said.err.startswith("headgate: store.url: the tasks are in PostgreSQL")
    assert said.code == 2


@pytest.mark.parametrize(
    "command",
    [
        ["run", "one.yaml"],
        ["run", "one.yaml", "--dry-run"],
        ["runs"],
        ["config", "check"],
        ["config", "show"],
        ["config", "example"],
        ["init"],
        ["doctor"],
        ["--help"],
    ],
)
def test_without_extras_a_command_that_needs_none_works(tmp_path: Path, command: list[str]) -> None:
    said = said_without(tmp_path, *command)
    assert said.code == 0, said.err


def test_a_package_of_the_installation_itself_is_named_too(tmp_path: Path) -> None:
    said = said_without(tmp_path, "run", "one.yaml", missing=("yaml",))
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "headgate: this needs the package yaml, which is not installed; "
        "run pip install --force-reinstall headgate\n"
    )
