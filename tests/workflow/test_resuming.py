"""What a resume may say of its budgets, and whose limits it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate import SyncClient
from headgate.budgets.connect import connect_budget
from headgate.errors import BudgetMismatchError, InvalidSettingError
from headgate.workflow.backend import Money, TaskState
from headgate.workflow.budgets import (
    change_in_ledger,
    check_resume,
    raise_command,
    rest_text,
    said_by,
    scopes_again,
    way_on,
)
from headgate.workflow.placeholders import parsed_text
from headgate.workflow.report import RunReport, RunState, StepSummary
from headgate.workflow.run_record import RunOptions, RunRecord, RunScope, resumed_options
from headgate.workflow.workflow import BudgetScope
from service.support import running_service
from workflow.fake_backend import a_step, a_workflow
from workflow.local_stage import Stage, order, shell, step
from workflow.server_support import SETTINGS, backend_at, opened
from workflow.server_support import order as server_order

CHEAP = step(shell("true"), cost_micro_usd=70_000)
SESSION = BudgetScope(name="session", key=parsed_text("q"), micro_usd=100_000)
ALONE = (RunScope(scope="workflow:eval", micro_usd=5),)
AROUND = (
    RunScope(scope="session:q", micro_usd=7),
    RunScope(scope="session:q/team:red"),
    RunScope(scope="session:q/team:red/workflow:eval", micro_usd=5),
)
DATA = Path("/data")
HERE: dict[str, Any] = {
    "scopes": AROUND,
    "tracker": "sqlite",
    "ledger": "sqlite:////data/budget.db",
}
THERE: dict[str, Any] = {"scopes": AROUND, "server": "http://h:1"}
OWN: dict[str, Any] = {"scopes": ALONE, "tracker": "local"}


def record(**fields: Any) -> RunRecord:
    return RunRecord(id="r", workflow="eval", created_at=0.0, source="", folder="", **fields)


def given(**fields: Any) -> RunOptions:
    return RunOptions(data=DATA, **fields)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HERE, {"session_id": "other"}, "--budget-session-id: the run is part of session q, and"),
    (OWN, {"session_id": "q"}, "--budget-session-id: the run has no session, and"),
    (OWN, {"session_micro_usd": 9}, "--budget-session-limit: the run has no session that it"),
    (
        OWN,
        {"tracker": "redis"},
        "--budget-tracker: the ledger of the run is kept by the run itself",
    ),
    (
        HERE,
        {"tracker": "local"},
        "--budget-tracker: the ledger of the run is kept in sqlite:////da",
    ),
    (OWN, {"redis_url": "redis://h"}, "--budget-redis-url: the ledger of the run is kept by the"),
    (HERE, {"postgres_url": "x"}, "--budget-postgres-url: the ledger of the run is kept in sqlite"),
    (OWN, {"server": "http://h"}, "--server: the run was begun on this machine, and goes on where"),
    (OWN, {"token": "t"}, "--token: the run was begun on this machine"),
    (OWN, {"project": "p"}, "--project: the run was begun on this machine"),
    (
        THERE,
        {"tracker": "local"},
        "--budget-tracker: the service that has the run keeps the ledger",
    ),
    (THERE, {"redis_url": "redis://h"}, "--budget-redis-url: the service that has the run keeps"),
    (THERE, {"config": Path("c.toml")}, "--config: the service has its own settings"),
]


@pytest.mark.parametrize(("fields", "options", "problem"), REFUSED)
def test_an_option_that_a_resume_cannot_change_is_refused(
    fields: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidSettingError, match=f"^{problem}") as caught:
        check_resume(record(**fields), given(**options))
    assert str(caught.value).endswith("leave it out")


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (HERE, {"session_id": "q", "session_micro_usd": 9, "tracker": "sqlite", "micro_usd": 1}),
    (OWN, {"tracker": "local", "concurrency": 3, "config": Path("c.toml")}),
    (THERE, {"server": "http://other", "token": "t", "project": "p", "session_id": "q"}),
    ({**HERE, "tracker": "redis", "ledger": "redis://h"}, {"redis_url": "redis://h"}),
]


@pytest.mark.parametrize(("fields", "options"), TAKEN)
def test_what_a_resume_can_change_or_says_again_is_taken(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    check_resume(record(**fields), given(**options))


def test_amounts_of_the_first_call_are_not_said_again() -> None:
    first = record(**HERE, session_id="q", session_micro_usd=7, micro_usd=5, concurrency=3)
    options = resumed_options(first, given())
    assert (options.session_micro_usd, options.micro_usd, options.concurrency) == (None, None, 3)
    assert scopes_again(first, options) == AROUND
    assert said_by(AROUND, options) == [None, None, None]
    now = given(session_micro_usd=9, micro_usd=8)
    assert [one.micro_usd for one in scopes_again(first, now)] == [9, None, 8]
    assert said_by(AROUND, now) == ["--budget-session-limit", None, "--budget-usd"]


async def test_a_resume_takes_the_limit_that_is_in_force_around_the_workflow(
    tmp_path: Path,
) -> None:
    await resumes_with_a_raised_session(tmp_path, f"sqlite:///{tmp_path}/data/budget.db")


async def test_a_resume_takes_the_limit_that_is_in_force_in_redis(
    tmp_path: Path, valkey_url: str
) -> None:
    await resumes_with_a_raised_session(tmp_path, valkey_url, redis_url=valkey_url)


async def resumes_with_a_raised_session(folder: Path, url: str, **options: Any) -> None:
    stage = Stage(folder, CHEAP, scopes=(SESSION,), micro_usd=500_000, options=options)
    ends = await stage.carried_out(order(CHEAP), order(CHEAP, 1))
    assert sorted(end.state.value for end in ends) == ["done", "rejected"]
    async with connect_budget(url) as tracker:
        await tracker.set_budget("session:q", "0.50")
    (end,) = await stage.carried_out(order(CHEAP, 1, generation=1))
    assert end.state is TaskState.DONE
    assert [one.micro_usd for one in stage.run.record.scopes] == [500_000, 500_000]
    before = stage.options
    stage.options = msgspec.structs.replace(before, session_micro_usd=500_000)
    async with stage.opened():
        pass
    stage.options = msgspec.structs.replace(before, session_micro_usd=600_000)
    problem = (
        r"the limit is \$0.50, and --budget-session-limit says \$0.60; .* `headgate budget set"
    )
    with pytest.raises(BudgetMismatchError, match=rf"{problem} session:q --limit-usd 0.60 --"):
        async with stage.opened():
            pass


async def test_a_session_in_the_ledger_of_the_run_itself_is_raised_by_a_resume(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, CHEAP, scopes=(SESSION,), options={"tracker": "local"})
    ends = await stage.carried_out(order(CHEAP), order(CHEAP, 1))
    assert sorted(end.state.value for end in ends) == ["done", "rejected"]
    stage.options = msgspec.structs.replace(stage.options, session_micro_usd=500_000)
    (end,) = await stage.carried_out(order(CHEAP, 1, generation=1))
    assert end.state is TaskState.DONE


async def test_a_resume_takes_the_limit_that_a_service_has_in_force(tmp_path: Path) -> None:
    scopes = (
        RunScope(scope="session:q", micro_usd=100_000),
        RunScope(scope="session:q/workflow:eval", micro_usd=500_000),
    )
    (tmp_path / "headgate.toml").write_text(SETTINGS)
    with running_service(tmp_path) as service, SyncClient(service.address) as client:
        backend = backend_at(service.address, tmp_path, scopes=scopes)
        async with opened(backend) as told:
            await backend.submit([server_order(n, micro_usd=70_000) for n in (1, 2)])
            ends = await told.until_ended(2)
        assert sorted(end.state.value for end in ends.values()) == ["done", "rejected"]
        client.change_budget("session:q", limit_usd="0.50")
        again = backend_at(service.address, tmp_path, scopes=scopes)
        async with opened(again) as told:
            await again.submit([server_order(3, micro_usd=70_000)])
            assert (await told.until_ended(1))[3].state is TaskState.DONE
            assert (await again.money())[0].limit_micro_usd == 500_000
        said = ["--budget-session-limit", None]
        wrong = backend_at(service.address, tmp_path, scopes=scopes, said_by=said)
        with pytest.raises(BudgetMismatchError) as caught:
            async with opened(wrong):
                pass
        assert "the limit is $0.50, and --budget-session-limit says $0.10" in str(caught.value)
        assert "headgate budget set " in str(caught.value)
        assert f"--url {service.address}" in str(caught.value)


def exhausted(scope: str, words: str = "(scope {}, $0.00 reserved)") -> RunReport:
    money = tuple(Money(scope=one.scope, spent_micro_usd=1, reserved_micro_usd=0) for one in AROUND)
    return RunReport(
        run_id="r",
        workflow="eval",
        state=RunState.EXHAUSTED,
        began_at=0.0,
        money=money,
        exhausted_by=f"Budget exceeded {words.format(scope)}",
    )


SET = "headgate budget set"
WORKFLOW = AROUND[-1].scope
TEAM = AROUND[1].scope
REDIS = {**HERE, "tracker": "redis", "ledger": "redis://u:***@h/0"}
WAYS: list[tuple[dict[str, Any], str, str]] = [
    (HERE, WORKFLOW, "GO --budget-usd USD"),
    (THERE, WORKFLOW, "GO --budget-usd USD"),
    (HERE, "session:q", f"{SET} session:q --limit-usd USD --ledger /data/budget.db && GO"),
    (REDIS, TEAM, f"{SET} {TEAM} --limit-usd USD --ledger 'redis://u:***@h/0' && GO"),
    ({**OWN, "scopes": AROUND}, "session:q", "GO --budget-session-limit USD"),
    ({**OWN, "scopes": AROUND}, TEAM, "GO"),
    (HERE, "root", "GO"),
]


@pytest.mark.parametrize(("fields", "scope", "way"), WAYS)
def test_a_used_up_budget_is_raised_where_it_is_kept(
    fields: dict[str, Any], scope: str, way: str
) -> None:
    assert way_on(record(**fields), exhausted(scope), resume="GO") == way


def test_a_budget_of_a_service_is_raised_there() -> None:
    command = raise_command(record(**THERE), exhausted("session:q"), resume="GO")
    assert command == "headgate budget set session:q --limit-usd USD --url http://h:1"


def test_a_budget_that_frees_room_by_itself_is_not_raised() -> None:
    words = "(scope {}, $0.00 reserved); room is freed at 2027-01-15 00:00:00 UTC"
    assert raise_command(record(**HERE), exhausted("session:q", words), resume="GO") is None
    done = msgspec.structs.replace(exhausted("session:q"), state=RunState.DONE)
    assert raise_command(record(**HERE), done, resume="GO") is None


def test_a_ledger_within_a_run_has_no_command() -> None:
    assert change_in_ledger("local", "") is None
    assert change_in_ledger(None, "") is None


def test_what_the_rest_needs_is_what_the_file_says_or_what_was_booked_so_far() -> None:
    def left(step: str, **fields: Any) -> StepSummary:
        return StepSummary(step=step, total=3, **{"counts": {"done": 1, "not run": 2}, **fields})

    said = msgspec.structs.replace(a_step("said"), cost_micro_usd=70_000)
    workflow = a_workflow(said, a_step("booked"), a_step("new"), a_step("over"))
    steps = (left("said"), left("booked", micro_usd=10_000), left("over", counts={"done": 3}))
    ended = msgspec.structs.replace(exhausted(WORKFLOW), steps=steps)
    known = "the rest is expected to need $0.16: a limit of $0.160001 or more"
    assert rest_text(workflow, ended) == known
    new = left("new", counts={"not run": 3})
    ended = msgspec.structs.replace(ended, steps=(*steps, new))
    unknown = "$0.16 without new of unknown cost"
    assert rest_text(workflow, ended) == known.replace("$0.16:", f"{unknown}:")
    assert rest_text(workflow, msgspec.structs.replace(ended, steps=(new,))) is None
