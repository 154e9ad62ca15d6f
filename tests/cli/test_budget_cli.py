"""`headgate budget` as a person meets it: what it prints, which ledger it asks, what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.said import in_zone
from headgate.api.schema.admin import JournalEntryBody
from headgate.api.schema.tasks import BudgetStatusBody
from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.budgets.tracker import LedgerTracker
from headgate.cli.budget import ANSWER_SECONDS, NOT_KNOWN, BudgetReport, journal_row, report_lines
from headgate.cli.main import run
from headgate.core.budgets.scopes import Tenant

NOW = datetime(2026, 4, 12, 12, tzinfo=UTC)
HOUR = 3_600

Scenario = Callable[[LedgerTracker], Awaitable[object]]


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a data directory of its own, and name the ledger in it."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("HEADGATE_URL", "HEADGATE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "data" / "headgate").mkdir(parents=True)
    ledger = tmp_path / "data" / "headgate" / "budget.db"
    monkeypatch.setenv("HEADGATE_BUDGET_URL", f"sqlite:///{ledger}")
    return tmp_path / "data"


def prepare(path: Path, scenario: Scenario) -> None:
    """Run a scenario on the ledger of a file."""

    async def main() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        async with SqliteBudgetTracker(path) as tracker:
            await scenario(tracker)

    asyncio.run(main())


async def an_evaluation(tracker: LedgerTracker) -> None:
    session = "session:eval-2026-04-12"
    await tracker.set_budget(session, "50.00")
    for name, cost in (("001", "4.50"), ("002", "4.20"), ("003", "23.70")):
        token = await tracker.reserve(f"{session}/workflow:scenario-{name}", cost)
        await tracker.commit(token, cost)
    await tracker.reserve(f"{session}/workflow:scenario-001", "1.20")


def test_status_writes_what_a_service_would_answer(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "status", "--session", "eval-2026-04-12", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = {field.encode_name for field in msgspec.structs.fields(BudgetStatusBody)}
    assert set(printed) <= names
    assert (printed["spentUsd"], printed["limitUsd"]) == ("32.40", "50.00")
    assert sorted(child["spentUsd"] for child in printed["children"]) == ["23.70", "4.20", "4.50"]


def test_status_works_while_the_budget_is_exhausted(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def exhausted(tracker: LedgerTracker) -> None:
        await tracker.set_budget("session:s", "1")
        await tracker.commit(await tracker.reserve("session:s", "1"), "1.25")

    prepare(data_home / "headgate" / "budget.db", exhausted)
    assert run(["budget", "status", "--session", "s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Spent: $1.25 / $1.00 (125.0%)"
    assert "Overrun: $0.25 of what was spent was never reserved" in lines
    assert "Exhausted: now" in lines


def test_a_child_is_exhausted_with_the_budget_around_it(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def exhausted(tracker: LedgerTracker) -> None:
        await tracker.set_budget("session:s", "1")
        await tracker.commit(await tracker.reserve("session:s/workflow:w", "1"), "1")

    prepare(data_home / "headgate" / "budget.db", exhausted)
    assert run(["budget", "status", "session:s/workflow:w"]) == 0
    assert "Exhausted: now, of session:s" in capsys.readouterr().out.splitlines()
    assert run(["budget", "status", "session:s/workflow:quiet"]) == 0
    assert "Exhausted: now, of session:s" in capsys.readouterr().out.splitlines()


def test_the_first_budget_that_ends_is_told_at_its_own_rate() -> None:
    limits = {"limit_usd": "2.00", "remaining_usd": "2.00", "burn_is_steady": True}
    report = BudgetReport(
        status=status_of("session:s/workflow:w", **limits, **RATE, exhausted_at=later(HOUR)),
        parents=(status_of("session:s", **limits, exhausted_at=later(HOUR / 2)),),
    )
    assert "Exhausted: at 2026-04-12 12:30:00 UTC at that rate, in 30 min, of session:s" in lines(
        report
    )


def test_a_child_shows_the_budgets_around_it(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["budget", "set", "root", "--limit-usd", "100"]) == 0
    assert run(["budget", "set", "session:s", "--limit-usd", "50", "--limit-tokens", "10"]) == 0
    capsys.readouterr()
    assert run(["budget", "status", "session:s/workflow:w"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Spent: $0.00",
        "Reserved: $0.00",
        "Budgets around it:",
        "  root: $0.00 / $100.00 (0.0%)",
        "  session:s: $0.00 / $50.00 (0.0%), 0 / 10 (0.0%) tokens",
    ]


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def status_of(scope: str = "session:s", /, **fields: Any) -> BudgetStatusBody:
    empty: dict[str, Any] = {
        "scope": scope,
        "window": "none",
        **dict.fromkeys(("spent_usd", "reserved_usd", "overrun_usd"), "0.00"),
        **dict.fromkeys(("spent_tokens", "reserved_tokens", "overrun_tokens"), 0),
    }
    return BudgetStatusBody(**empty | fields)


def lines(report: BudgetReport) -> list[str]:
    with in_zone("UTC"):
        return list(report_lines(report, NOW))


def written(status: BudgetStatusBody) -> list[str]:
    return lines(BudgetReport(status=status))


RATE: dict[str, Any] = {"burn_usd_per_hour": "1.00", "burn_measured_seconds": HOUR}
STEADY = RATE | {"burn_is_steady": True}

EXHAUSTED: list[tuple[dict[str, Any], str]] = [
    ({}, "never, there is no limit"),
    (
        {"limit_usd": "2.50", "exhausted_at": later(2.5 * HOUR)},
        "at 2026-04-12 14:30:00 UTC at that rate, in 2 h",
    ),
    (
        {"limit_usd": "96.00", "exhausted_at": later(96 * HOUR)},
        "at 2026-04-16 12:00:00 UTC at that rate, in 4 days",
    ),
    ({"limit_tokens": 5, "remaining_tokens": 5}, "not at that rate"),
    ({"limit_usd": "1.00", "resets_at": later(HOUR)}, "not before the budget resets"),
    ({"limit_usd": "1.00", "exhausted_at": later(0)}, "now"),
]


@pytest.mark.parametrize(("fields", "text"), EXHAUSTED)
def test_the_time_of_exhaustion_is_told(fields: dict[str, Any], text: str) -> None:
    assert f"Exhausted: {text}" in written(status_of(**STEADY, **fields))


def test_an_end_is_not_told_by_a_burst() -> None:
    assert f"Exhausted: {NOT_KNOWN}" in written(status_of(limit_usd="5.00", **RATE))


def test_a_window_tells_when_there_is_more_room() -> None:
    status = status_of(window="day@Europe/Berlin", resets_at=later(HOUR))
    assert written(status)[-1] == (
        "Counted: by the day, by the clock of Europe/Berlin; more room at 2026-04-12 13:00:00 UTC"
    )


def test_tokens_are_told_when_there_are_any() -> None:
    status = status_of(spent_tokens=900, overrun_tokens=100, reserved_tokens=7, limit_tokens=4_000)
    assert "Tokens: 1,000 / 4,000 (25.0%), 7 reserved" in written(status)


@pytest.mark.parametrize(("waiting", "text"), [(1, "1 task or call"), (2, "2 tasks or calls")])
def test_what_waits_for_a_budget_may_be_a_call(waiting: int, text: str) -> None:
    assert f"Waiting: {text}, for room in this budget" in written(status_of(waiting=waiting))


def test_a_limit_of_zero_has_no_percentage() -> None:
    assert written(status_of(limit_usd="0.00"))[0] == "Spent: $0.00 / $0.00"


def test_children_are_told_by_kind_with_their_limits_and_the_largest_first() -> None:
    children = [
        status_of("session:s/agent:a", spent_usd="0.01"),
        status_of("session:s/agent:b", spent_usd="0.02", limit_usd="0.04"),
        status_of("session:s/team:t/workflow:w"),
    ]
    assert written(status_of(children=children))[2:] == [
        "Per-agent breakdown:",
        "  b: $0.02 / $0.04 (50.0%)",
        "  a: $0.01",
        "Per-workflow breakdown:",
        "  team:t/workflow:w: $0.00",
    ]


def test_a_long_breakdown_is_cut() -> None:
    children = [status_of(f"session:s/workflow:w{number}") for number in range(60)]
    told = written(status_of(children=children))
    assert told[-1] == "  and 10 more; --json lists them all"
    assert len(told) == 2 + 1 + 50 + 1


def test_a_status_that_was_cut_says_so() -> None:
    told = written(status_of(children=[status_of("session:s/run:1")], is_truncated=True))
    assert told[-1].startswith("Some scopes are missing")


def test_a_journal_row_names_the_innermost_scopes_and_the_changes() -> None:
    entry = JournalEntryBody(
        at=NOW,
        reservation_id="call-1",
        call="commit",
        scopes=["", "session:s", "team:t", "session:s/workflow:w"],
        spent_usd="0.05",
        reserved_usd="-0.07",
        overrun_usd="0.00",
        unaccepted_usd="0.00",
        spent_tokens=1_500,
        reserved_tokens=-2_000,
        overrun_tokens=0,
        unaccepted_tokens=0,
    )
    with in_zone("Europe/Berlin"):
        assert journal_row(entry) == (
            "2026-04-12 14:00:00 CEST",
            "commit",
            "call-1",
            "team:t, session:s/workflow:w",
            "+$0.05",
            "-$0.07",
            "",
            "",
            "+1,500 spent, -2,000 reserved",
        )


def test_a_wrong_booking_is_undone_once_and_never_below_nothing(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data_home / "headgate" / "budget.db"

    async def a_lie(tracker: LedgerTracker) -> None:
        token = await tracker.reserve("project:alpha", "1")
        await tracker.commit(token, "1000000", tenant=Tenant(project_id="alpha"))
        token = await tracker.reserve("project:beta", "1")
        await tracker.commit(token, "999001")

    prepare(path, a_lie)
    assert run(["budget", "status"]) == 0
    assert "Unaccepted: $999999.00" in capsys.readouterr().out
    undo = ["budget", "adjust", "root", "--usd=-999000", "--id", "typo", "--reason", "a typo"]
    for _ in range(2):
        assert run(undo) == 0
        out = capsys.readouterr().out
        assert out == (
            f"Adjusted root in {path}: $2.00 spent, $0.00 overrun, "
            "$999999.00 claimed and not accepted\n"
        )
    assert run(["budget", "adjust", "root", "--usd=-3"]) != 0
    assert "give at most that amount" in capsys.readouterr().err
    assert run(["budget", "adjust", "root", "--accept", "--usd", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overrunUsd"] == "7.00"
    assert run(["budget", "adjust", "root", "--reject"]) == 0
    assert "$0.00 claimed" in capsys.readouterr().out
    for decision in ("--accept", "--reject"):
        assert run(["budget", "adjust", "root", decision]) == 0
        said = "Nothing is claimed and not accepted in root; nothing was changed\n"
        assert capsys.readouterr().out == said
    assert run(["budget", "adjust", "root", "--accept", "--reject"]) != 0
    capsys.readouterr()
    beside = ["--data", str(data_home), "--ledger", str(path)]
    assert run(["budget", "adjust", "root", "--usd", "1", *beside]) == 2
    assert "--ledger: names the budgets beside a service" in capsys.readouterr().err


def test_the_journal_is_a_table_newest_first(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "journal", "--session", "eval-2026-04-12", "--limit", "2"]) == 0
    title, header, newest, older = capsys.readouterr().out.splitlines()
    assert title == "Journal of session:eval-2026-04-12: the latest 2 changes"
    assert header.split() == [
        *("at", "call", "reservation", "scope"),
        *("spent", "reserved", "overrun", "unaccepted", "tokens"),
    ]
    assert "reserve" in newest
    assert "+$1.20" in newest
    assert "commit" in older
    assert "+$23.70" in older


def test_the_journal_writes_json(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "journal", "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["call"] for entry in entries] == ["reserve", *("commit", "reserve") * 3]


def test_set_replaces_the_limits_of_a_scope_and_says_where(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--limit-usd", "20", "--limit-tokens", "1000", "--window", "rolling:24h"]
    assert run(["budget", "set", "project:web", *given]) == 0
    ledger = data_home / "headgate" / "budget.db"
    assert capsys.readouterr().out == (
        "Set budget project:web to $20.00 and 1,000 tokens, counted over any 24 hours, "
        f"in {ledger}\n"
    )
    assert run(["budget", "set", "project:web", "--limit-usd", "30"]) == 0
    words = "1,000 tokens, counted over any 24 hours"
    assert capsys.readouterr().out.splitlines() == [
        f"Set budget project:web to $30.00 and {words}, in {ledger}",
        f"Before: $20.00 and {words}",
    ]
    given = ["--limit-tokens", "none", "--window", "none"]
    assert run(["budget", "set", "project:web", *given, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["limitUsd"], status["window"]) == ("30.00", "none")
    assert "limitTokens" not in status


def test_a_new_window_says_what_counts_in_it(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "set", "--session", "eval-2026-04-12", "--window", "day"]) == 0
    _, before, counted = capsys.readouterr().out.splitlines()
    assert before == "Before: $50.00"
    assert counted == "Counted in it so far: $32.40"


def test_a_scope_that_nothing_is_known_of_may_be_a_typing_error(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "status", "--session", "eval-2026-04-13"]) == 0
    assert capsys.readouterr().err == (
        "headgate: warning: nothing was charged to session:eval-2026-04-13, and it has no "
        "budget; did you mean session:eval-2026-04-12?\n"
    )


@pytest.mark.parametrize(
    ("scope", "warning"),
    [
        ("projects:evals", "'projects'; did you mean project:evals?"),
        ("Proyect:evals", "'proyect'; did you mean project:evals?"),
        ("project:evals/agnt:pr-1", "'agnt'; did you mean project:evals/agent:pr-1?"),
        ("Project:evals/team:red", ""),
        ("customer:evals", ""),
    ],
)
def test_a_mistyped_kind_of_a_budget_is_warned_of(
    scope: str, warning: str, data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = str(data_home / "budget.db")
    assert run(["budget", "set", scope, "--limit-usd", "5", "--ledger", ledger]) == 0
    line = f"headgate: warning: Headgate itself charges no scope of kind {warning}\n"
    assert capsys.readouterr().err == (line if warning else "")


def test_a_kind_that_was_charged_is_not_mistyped(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def a_charge(tracker: LedgerTracker) -> None:
        await tracker.adjust("sessions:a", "1.00")

    path = data_home / "headgate" / "budget.db"
    prepare(path, a_charge)
    assert run(["budget", "set", "sessions:a", "--limit-usd", "5", "--ledger", str(path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_budget_is_listed_and_deleted(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "list"]) == 0
    title, header, row = capsys.readouterr().out.splitlines()
    assert title == "Budgets"
    assert header.split() == ["scope", "spent", "reserved", "limit", "left", "window", "resets"]
    assert row.split() == ["session:eval-2026-04-12", "$32.40", "$1.20", "$50.00", "$16.40"]
    assert run(["budget", "set", "root"]) == 2
    assert "headgate budget delete" in capsys.readouterr().err
    assert run(["budget", "delete", "--session", "eval-2026-04-12"]) == 0
    ledger = data_home / "headgate" / "budget.db"
    assert capsys.readouterr().out == (
        f"Deleted budget session:eval-2026-04-12 in {ledger}: the scope has no limit now; "
        "what was spent stays in the journal\n"
    )
    assert run(["budget", "list", "--json"]) == 0
    assert capsys.readouterr().out == ""
    assert run(["budget", "status", "--session", "eval-2026-04-12"]) == 0
    assert capsys.readouterr().out.startswith("Spent: $32.40\n")


def test_a_budget_that_is_not_there_is_answered_with_those_that_are(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "delete", "--session", "eval-2026-04-13"]) == 2
    assert capsys.readouterr().err == (
        "headgate: There is no budget session:eval-2026-04-13; did you mean "
        "session:eval-2026-04-12? Budgets: session:eval-2026-04-12. Add one with "
        "headgate budget set session:eval-2026-04-13 --limit-usd DOLLARS.\n"
    )


def test_a_reservation_is_extended(data_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(data_home / "headgate" / "budget.db", a_reservation)
    assert run(["budget", "extend", "call-1", "--for", "2h", "--json"]) == 0
    until = datetime.fromisoformat(json.loads(capsys.readouterr().out)["leaseUntil"])
    assert until > datetime.now(UTC) + timedelta(hours=1)
    assert run(["budget", "extend", "call-1", "--for", "3h", "--utc"]) == 0
    assert capsys.readouterr().out.startswith("Extended call-1 until ")


async def a_reservation(tracker: LedgerTracker) -> None:
    await tracker.reserve("session:s", "1", reservation_id="call-1", dispatched=True)


class Terminal(io.StringIO):
    """Input that a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "reserved"), [("y\n", "0.00"), ("n\n", "1.00"), ("\n", "1.00")])
def test_release_asks_a_person_first(
    typed: str,
    reserved: str,
    data_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(data_home / "headgate" / "budget.db", a_reservation)
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert run(["budget", "release", "call-1"]) == 0
    assert "the provider charged nothing" in capsys.readouterr().out
    assert reserved_now(capsys) == reserved


def reserved_now(capsys: pytest.CaptureFixture[str]) -> object:
    assert run(["budget", "status", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["reservedUsd"]


def test_release_in_a_script_needs_the_option(
    data_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", a_reservation)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run(["budget", "release", "call-1"]) == 2
    assert "--yes: is needed" in capsys.readouterr().err
    assert run(["budget", "release", "call-1", "--yes"]) == 0
    ledger = data_home / "headgate" / "budget.db"
    assert capsys.readouterr().out == f"Released call-1 in {ledger}\n"
    assert reserved_now(capsys) == "0.00"


SET = ["budget", "set", "root", "--limit-usd", "1"]


PLACES: list[tuple[list[str], str | None]] = [
    (["--ledger", "{}/a.db"], None),
    (["--ledger", "sqlite:///{}/a.db"], None),
    ([], "sqlite:///{}/a.db"),
    (["--ledger", "{}/a.db"], "sqlite:///{}/b.db"),
]


@pytest.mark.parametrize(("options", "variable"), PLACES)
def test_the_ledger_is_named_by_an_option_or_by_the_environment(
    options: list[str],
    variable: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HEADGATE_BUDGET_URL")
    if variable is not None:
        monkeypatch.setenv("HEADGATE_BUDGET_URL", variable.format(tmp_path))
    given = [option.format(tmp_path) for option in options]
    assert run([*SET, *given]) == 0
    assert capsys.readouterr().out.endswith(f", in {tmp_path}/a.db\n")
    assert [path.name for path in tmp_path.glob("*.db")] == ["a.db"]
    assert run(["budget", "status", *given]) == 0


READERS = [["status"], ["status", "--json"], ["list"], ["journal"], ["release", "call-1", "--yes"]]
NO_BOOKS: list[tuple[list[str], str | None, str]] = [
    (["--ledger", "{}/typo.db"], None, "--ledger"),
    (["--ledger", "sqlite:///{}/typo.db"], None, "--ledger"),
    ([], "sqlite:///{}/typo.db", "HEADGATE_BUDGET_URL"),
]


@pytest.mark.parametrize("command", READERS, ids=[" ".join(command) for command in READERS])
@pytest.mark.parametrize(("options", "variable", "name"), NO_BOOKS)
def test_a_command_that_reads_creates_no_ledger(
    command: list[str],
    options: list[str],
    variable: str | None,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if variable is not None:
        monkeypatch.setenv("HEADGATE_BUDGET_URL", variable.format(tmp_path))
    assert run(["budget", *command, *(option.format(tmp_path) for option in options)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"headgate: {name}: there is no ledger at {tmp_path}/typo.db;"
        f" headgate budget set --ledger {tmp_path}/typo.db creates one\n"
    )
    assert list(tmp_path.glob("*.db*")) == []


@pytest.mark.parametrize("has_run", [True, False])
def test_without_a_service_and_a_ledger_both_ways_are_told(
    has_run: bool,
    data_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HEADGATE_BUDGET_URL")
    monkeypatch.setattr("headgate.client.sync_client.pause_seconds", lambda *_: None)
    ledger = data_home / "headgate" / "budget.db"
    if has_run:
        prepare(ledger, an_evaluation)
    assert run(["budget", "status", "--url", "http://127.0.0.1:1"]) == 3
    runs = f" (runs here use --ledger {ledger})" if has_run else ""
    assert capsys.readouterr().err == (
        "headgate: no service answers at http://127.0.0.1:1: Connection refused; start one with "
        "headgate up, or name another with --data, --url or HEADGATE_URL, or a ledger with "
        f"--ledger FILE{runs}\n"
    )


BAD: list[tuple[list[str], str]] = [
    (["status", "--ledger", "memory:"], "--ledger: memory: is a ledger inside one process"),
    (["status", "--ledger", ""], "--ledger: is empty; name a ledger"),
    (["status", "--ledger", "x.db", "--url", "http://h"], "--ledger: names the budgets beside a"),
    (["status", "--ledger", "mysql://u:secret@h/d"], "url: 'mysql' is not a scheme"),
    (["status", "--session", "a b"], "--session: 'session:a b' is not a part"),
    (["status", "session:s", "--session", "s"], "scope: give a scope or --session, not both"),
    (["status", "nonsense"], "scope: 'nonsense' is a name without its kind"),
    (
        ["set", "trial", "--limit-usd", "4"],
        "scope: 'trial' is a name without its kind; write kind:name, as in project:trial",
    ),
    (["set", "--limit-usd", "1"], "scope: name one, or root"),
    (["set", "root", "--limit-usd", "free"], "--limit-usd: 'free' is not an amount"),
    (["set", "root", "--limit-usd", "-1"], "--limit-usd: must not be negative"),
    (["set", "root"], "limit: give --limit-usd"),
    (["set", "root", "--window", "day"], "limit: give --limit-usd"),
    (["set", "root", "--limit-tokens", "few"], "--limit-tokens: 'few' is not a whole number"),
    (["remove", "root"], "there is no command remove; did you mean delete?"),
    (["extend", "call-1"], "--for is missing"),
    (["set", "root", "--limit-usd", "1", "--window", "year"], "window: 'year' is no window"),
    (["set", "root", "--limit-usd", "1", "--window", "day@Mars/X"], "window: 'Mars/X' is not a"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["budget", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"headgate: {line}")
    assert printed.err.count("\n") == 1
    assert "secret" not in printed.err


def test_a_release_of_what_was_never_made_is_one_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(SET) == 0
    assert run(["budget", "release", "never-made", "--yes"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("headgate: reservation never-made is unknown")
    assert printed.count("\n") == 1


UNREACHABLE = [
    ["--ledger", "redis://127.0.0.1:1/0"],
    ["--ledger", "postgresql://user:secret@127.0.0.1:1/db"],
    ["--ledger", "{}"],
]


@pytest.mark.parametrize("options", UNREACHABLE, ids=["redis", "postgresql", "a folder"])
def test_an_unreachable_ledger_is_one_line_and_exit_code_one(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["budget", "status", *(option.format(tmp_path) for option in options)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("headgate: ")
    assert printed.err.count("\n") == 1
    assert "secret" not in printed.err


def test_an_interrupt_ends_a_command_that_a_silent_server_keeps_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://user@127.0.0.1:{silent.getsockname()[1]}/db"
        command = [sys.executable, "-m", "headgate", "budget", "status", "--ledger", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            silent.settimeout(30)
            connection, _ = silent.accept()
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            with connection:
                assert process.wait(30) == 130
    # Nobody waited until the command gives up by itself.
    assert time.monotonic() - begun < ANSWER_SECONDS - 5
