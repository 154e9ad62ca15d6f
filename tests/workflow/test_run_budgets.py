"""The scopes of a run, and which ledger keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidFieldError, InvalidSettingError, WorkflowError
from headgate.workflow.budgets import (
    RunLedger,
    choose_ledger,
    recorded_ledger,
    run_scopes,
    with_own_limit,
)
from headgate.workflow.placeholders import parsed_text
from headgate.workflow.run_record import RunOptions, RunRecord, RunScope
from headgate.workflow.workflow import BudgetScope, Workflow

SESSION = BudgetScope(name="session", key=parsed_text("{env.SESSION}"), micro_usd=50, line=7)
TEAM = BudgetScope(name="team", key=parsed_text("red"))
ENVIRON = {"SESSION": "s1"}
REDIS = "redis://user:hunter22@host:6379/0"
DATA = Path("/data")
FILE = Workflow(name="eval", folder=DATA, steps=(), scopes=(SESSION,), file="eval.yaml")


def options(**fields: Any) -> RunOptions:
    return RunOptions(data=DATA, **fields)


def scopes_of(*scopes: BudgetScope, micro_usd: int | None = 5, **fields: Any) -> list[Any]:
    workflow = Workflow(name="eval", folder=DATA, steps=(), micro_usd=micro_usd, scopes=scopes)
    found = run_scopes(workflow, options(**fields), ENVIRON)
    return [(one.scope, one.micro_usd) for one in found]


def test_a_workflow_alone_has_a_scope_of_its_own() -> None:
    assert scopes_of() == [("workflow:eval", 5)]
    assert scopes_of(micro_usd=None) == [("workflow:eval", None)]
    assert scopes_of(micro_usd=9) == [("workflow:eval", 9)]


def test_scopes_nest_in_the_order_of_the_file_with_the_workflow_last() -> None:
    assert scopes_of(SESSION, TEAM) == [
        ("session:s1", 50),
        ("session:s1/team:red", None),
        ("session:s1/team:red/workflow:eval", 5),
    ]


def test_a_session_on_the_command_line_is_outermost_and_replaces_that_of_the_file() -> None:
    named = scopes_of(TEAM, SESSION, session_id="s2", session_micro_usd=7)
    assert named[0] == ("session:s2", 7)
    assert [scope for scope, _ in named][-1] == "session:s2/team:red/workflow:eval"
    assert scopes_of(TEAM, session_id="s2")[0] == ("session:s2", None)
    assert scopes_of(SESSION, session_id="s2")[0] == ("session:s2", 50)
    assert scopes_of(SESSION, session_micro_usd=7)[0] == ("session:s1", 7)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"session_micro_usd": 7}, "--budget-session-limit: there is no session that it could limit"),
    ({"session_id": "a b"}, "--budget-session-id: 'a b' is no name of a scope; write letters, d"),
    ({"session_id": ""}, "--budget-session-id: '' is no name of a scope"),
    ({"session_id": "q/team:z"}, "--budget-session-id: 'q/team:z' is no name of a scope"),
    ({"session_id": "x" * 121}, "--budget-session-id: 'x{60}' is no name .* at most 120 of them"),
]


@pytest.mark.parametrize(("fields", "problem"), WRONG)
def test_a_session_that_is_none_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"^{problem}"):
        scopes_of(TEAM, **fields)


@pytest.mark.parametrize("environ", [{}, {"SESSION": ""}])
def test_a_variable_that_is_not_set_is_named(environ: dict[str, str]) -> None:
    workflow = msgspec.structs.replace(FILE, scopes=(TEAM, SESSION))
    with pytest.raises(WorkflowError) as caught:
        run_scopes(workflow, options(), environ)
    assert str(caught.value).startswith("eval.yaml:7: config.budget_scopes[1].key: the environ")
    assert "variable SESSION is not set" in str(caught.value)


@pytest.mark.parametrize("key", ["x/workflow:y", "x/y", "a b", "*", "x" * 121])
def test_a_key_from_the_environment_is_one_part_of_the_path(key: str) -> None:
    with pytest.raises(WorkflowError, match=r"^eval.yaml:7: config.budget_scopes\[0\].key: ") as no:
        run_scopes(FILE, options(), {"SESSION": key})
    assert "is no name of a scope" in str(no.value)


ALONE = [RunScope(scope="workflow:eval")]
AROUND = [RunScope(scope="session:s"), RunScope(scope="session:s/workflow:eval")]
URL = "HEADGATE_BUDGET_URL"
CHOICES: list[tuple[dict[str, Any], dict[str, str], list[RunScope], str, str | None]] = [
    ({}, {}, ALONE, "local", None),
    ({}, {}, AROUND, "sqlite", "sqlite:////data/budget.db"),
    ({"tracker": "local"}, {}, AROUND, "local", None),
    ({"tracker": "local"}, {URL: REDIS}, AROUND, "local", None),
    ({"tracker": "sqlite"}, {}, ALONE, "sqlite", "sqlite:////data/budget.db"),
    ({"tracker": "sqlite"}, {URL: "sqlite:///x.db"}, ALONE, "sqlite", "sqlite:///x.db"),
    ({"tracker": "sqlite"}, {URL: REDIS}, ALONE, "sqlite", "sqlite:////data/budget.db"),
    ({}, {URL: REDIS}, ALONE, "redis", REDIS),
    ({}, {URL: "postgresql://h/d"}, ALONE, "postgres", "postgresql://h/d"),
    ({"tracker": "redis"}, {URL: REDIS}, ALONE, "redis", REDIS),
    ({"redis_url": REDIS}, {URL: "postgresql://h/d"}, ALONE, "redis", REDIS),
    ({"postgres_url": "postgres://h/d"}, {}, ALONE, "postgres", "postgres://h/d"),
]


@pytest.mark.parametrize(("fields", "environ", "scopes", "tracker", "url"), CHOICES)
def test_the_ledger_is_chosen_by_options_then_the_environment_then_what_is_shared(
    fields: dict[str, Any],
    environ: dict[str, str],
    scopes: list[RunScope],
    tracker: str,
    url: str | None,
) -> None:
    ledger = choose_ledger(scopes, options(**fields), environ)
    assert (ledger.tracker, ledger.url) == (tracker, url)


REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"tracker": "redis"}, {}, "--budget-tracker: redis needs --budget-redis-url or HEADGATE_"),
    ({"tracker": "postgres"}, {URL: REDIS}, "--budget-tracker: postgres needs --budget-postgres"),
    ({"redis_url": "postgres://h/d"}, {}, "--budget-redis-url: 'postgres' is not a URL of redis"),
    ({"redis_url": " "}, {}, "--budget-redis-url: is empty"),
    ({"redis_url": REDIS, "postgres_url": "x"}, {}, "--budget-redis-url and --budget-postgres-url"),
    ({"redis_url": REDIS, "tracker": "sqlite"}, {}, "--budget-redis-url: 'redis' is not a URL of"),
    ({}, {URL: "ftp://host"}, "HEADGATE_BUDGET_URL: 'ftp' is not a URL that keeps budgets"),
]


@pytest.mark.parametrize(("fields", "environ", "problem"), REFUSED)
def test_options_that_contradict_each_other_are_refused(
    fields: dict[str, Any], environ: dict[str, str], problem: str
) -> None:
    with pytest.raises(InvalidSettingError, match=f"^{problem}"):
        choose_ledger(AROUND, options(**fields), environ)


def record(**fields: Any) -> RunRecord:
    return RunRecord(id="r", workflow="eval", created_at=0.0, source="", folder="", **fields)


ADDRESSES: list[tuple[str, str]] = [
    (REDIS, "redis://user:***@host:6379/0"),
    ("redis://:hunter22@host/0", "redis://:***@host/0"),
    ("redis://us:hunter/22@x@host/0", "redis://us:***@host/0"),
    ("redis://user@host/0?db=3", "redis://user@host/0?db=3"),
    ("redis://host?db=3&password=hunter22", "redis://host?db=3&password=***"),
    ("redis+cluster://:hunter22@h1,h2:7000", "redis+cluster://:***@h1,h2:7000"),
    (
        "redis+sentinel://u:hunter22@h1:1,h2:2/m/0?sentinel_password=hunter22",
        "redis+sentinel://u:***@h1:1,h2:2/m/0?sentinel_password=***",
    ),
    ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    (
        "postgresql://host/d?options=-csearch_path%3Da",
        "postgresql://host/d?options=-csearch_path%3Da",
    ),
    ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db"),
]


@pytest.mark.parametrize(("url", "address"), ADDRESSES)
def test_an_address_of_a_ledger_has_all_but_the_password(url: str, address: str) -> None:
    ledger = RunLedger(tracker="redis", url=url)
    assert ledger.address == address
    assert "hunter" not in repr(ledger)


@given(password=st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S")), min_size=8))
def test_no_password_is_shown_whatever_is_in_it(password: str) -> None:
    ledger = RunLedger(tracker="redis", url=f"redis://user:{password}@host:6379/0?db=1")
    assert ledger.address == "redis://user:***@host:6379/0?db=1"


def test_a_resume_goes_on_with_the_ledger_that_it_was_begun_with() -> None:
    known = record(tracker="redis", ledger=RunLedger(tracker="redis", url=REDIS).address)
    assert recorded_ledger(known, options(redis_url=REDIS), {}).url == REDIS
    assert recorded_ledger(known, options(), {URL: REDIS}).url == REDIS
    assert recorded_ledger(record(tracker="local"), options(), {URL: REDIS}).url is None
    plain = "redis://host:6379/0"
    assert recorded_ledger(record(tracker="redis", ledger=plain), options(), {}).url == plain
    file = record(tracker="sqlite", ledger="sqlite:////data/budget.db")
    assert recorded_ledger(file, options(), {URL: REDIS}).url == "sqlite:////data/budget.db"


def test_a_resume_with_another_ledger_is_refused() -> None:
    known = record(tracker="redis", ledger=RunLedger(tracker="redis", url=REDIS).address)
    with pytest.raises(
        InvalidSettingError, match="kept without its password; give --budget-redis-url"
    ):
        recorded_ledger(known, options(), {})
    for other in ("redis://user:hunter22@elsewhere:6379/0", f"{REDIS}?db=1"):
        with pytest.raises(InvalidSettingError, match=r"^--budget-redis-url: names red") as caught:
            recorded_ledger(known, options(redis_url=other), {})
        assert "hunter22" not in str(caught.value)


def test_only_the_limit_of_the_workflow_is_changed_by_a_resume() -> None:
    assert with_own_limit(AROUND, None) == tuple(AROUND)
    raised = with_own_limit(AROUND, 9)
    assert [one.micro_usd for one in raised] == [None, 9]
