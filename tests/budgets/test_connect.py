"""One door to every budget: which URL opens which ledger, and what a wrong one says."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headgate.budgets.connect import KNOWN_URLS, connect_budget
from headgate.budgets.tracker import LedgerTracker
from headgate.errors import InvalidSettingError
from headgate.extras import EXTRAS

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

TRACKERS = [
    ("memory:", "LocalBudgetTracker"),
    ("sqlite:///budget.db", "SqliteBudgetTracker"),
    ("sqlite:////tmp/budget.db", "SqliteBudgetTracker"),
    ("redis://127.0.0.1:6379/0", "RedisBudgetTracker"),
    ("rediss://127.0.0.1:6379/0", "RedisBudgetTracker"),
    ("unix:///tmp/redis.sock", "RedisBudgetTracker"),
    ("redis+sentinel://127.0.0.1,127.0.0.2/service/0", "RedisBudgetTracker"),
    ("rediss+sentinel://127.0.0.1:26379/service", "RedisBudgetTracker"),
    ("redis+cluster://127.0.0.1:6379,127.0.0.2", "RedisBudgetTracker"),
    ("rediss+cluster://127.0.0.1", "RedisBudgetTracker"),
    ("postgresql://127.0.0.1/budget", "PostgresBudgetTracker"),
    ("postgres://127.0.0.1/budget", "PostgresBudgetTracker"),
    ("POSTGRESQL://127.0.0.1/budget", "PostgresBudgetTracker"),
]


@pytest.mark.parametrize(("url", "tracker"), TRACKERS)
def test_the_scheme_chooses_the_tracker(url: str, tracker: str) -> None:
    assert type(connect_budget(url)).__name__ == tracker


def test_every_form_of_url_that_is_told_is_known() -> None:
    for url in KNOWN_URLS:
        assert isinstance(connect_budget(url), LedgerTracker)


@pytest.mark.parametrize("url", ["", "budget.db", "mysql://user:secret@host/db", "http://x", ":"])
def test_an_unknown_scheme_is_one_line_without_the_password(url: str) -> None:
    with pytest.raises(InvalidSettingError, match="is not a scheme that keeps budgets") as caught:
        connect_budget(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite:", "sqlite:///", "sqlite:budget.db", "sqlite://budget.db"])
def test_a_sqlite_url_needs_a_path(url: str) -> None:
    with pytest.raises(InvalidSettingError, match="a path follows sqlite:///"):
        connect_budget(url)


@pytest.mark.parametrize("url", ["memory", "memory:foo", "memory://"])
def test_a_ledger_in_memory_has_no_place(url: str) -> None:
    with pytest.raises(InvalidSettingError, match="write memory:"):
        connect_budget(url)


@pytest.mark.parametrize("url", [None, 5, b"memory:", Path("budget.db")])
def test_a_url_is_a_text(url: Any) -> None:
    with pytest.raises(InvalidSettingError, match="url: must be a string and not"):
        connect_budget(url)


def test_a_sqlite_url_has_no_options() -> None:
    with pytest.raises(InvalidSettingError, match="no options"):
        connect_budget("sqlite:///budget.db?mode=ro")


URLS_BY_PACKAGE = [
    ("redis", "redis://127.0.0.1"),
    ("psycopg", "postgresql://127.0.0.1/db"),
]


@pytest.mark.parametrize(("package", "url"), URLS_BY_PACKAGE)
def test_a_missing_package_is_one_line_that_names_the_extra(package: str, url: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
from headgate.errors import InvalidSettingError
from headgate.budgets.connect import connect_budget
try:
    connect_budget({url!r})
except InvalidSettingError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"url: needs the package {package}, which is not installed; "
        f"run pip install 'headgate[{EXTRAS[package]}]'\n"
    )


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_the_extra_that_is_named_brings_the_package(package: str, extra: str) -> None:
    requirements = PROJECT["optional-dependencies"][extra]
    assert any(package in requirement.lower() for requirement in requirements)


def test_no_backend_is_loaded_before_its_url_is_asked_for() -> None:
    code = "import sys, headgate.budgets.connect as c; c.connect_budget('memory:')"
    check = f"sys.exit(bool(set({list(EXTRAS)!r}) & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)
