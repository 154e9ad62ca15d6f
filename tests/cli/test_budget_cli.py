"""`headgate budget` as a person meets it: what it prints, which ledger it asks, what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import msgspec
import pytest

from headgate.budgets.sqlite import SqliteBudgetTracker
from headgate.budgets.status import ScopeStatus
from headgate.budgets.tracker import LedgerTracker
from headgate.cli.budget import NOT_KNOWN, BudgetReport, Parent, budget, journal_row, report_lines
from headgate.cli.main import run
from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.ledger import JournalEntry
from headgate.core.budgets.reservations import Call, Charge, Delta
from headgate.core.budgets.scopes import ROOT, Scope, Tenant
from headgate.core.money import MicroUsd, Tokens

REFERENCE = Path(__file__).parent.parent.parent / "docs/reference/budget-cli.md"
NOW = 1_775_995_200.0
HOUR = 3_600

Scenario = Callable[[LedgerTracker], Awaitable[object]]


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a data directory of its own, and the command its place."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("HEADGATE_BUDGET_URL", raising=False)
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


def test_status_writes_the_keys_of_the_status_and_of_the_rate(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", an_evaluation)
    assert run(["budget", "status", "--session", "eval-2026-04-12", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    fields = [field.name for field in msgspec.structs.fields(ScopeStatus)]
    rate = ["burn_micro_usd_per_hour", "burn_tokens_per_hour", "burn_measured_seconds"]
    assert list(printed) == [*fields, *rate, "exhausted_at"]
    assert printed["spent_micro_usd"] == 32_400_000
    assert [list(child) for child in printed["children"]] == [fields] * 3


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
    assert run(["budget", "status", "session:s/workflow:w", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exhausted_at"] is not None


def test_the_first_budget_that_ends_is_told_at_its_own_rate() -> None:
    faster = BurnRate(micro_usd_per_hour=4_000_000, measured_seconds=HOUR, is_steady=True)
    limits = {"limit_micro_usd": 2_000_000, "remaining_micro_usd": 2_000_000}
    report = BudgetReport(
        status=status_of("session:s/workflow:w", **limits),
        parents=(Parent(status=status_of("session:s", **limits), rate=faster),),
        rate=A_DOLLAR_AN_HOUR,
        now=NOW,
    )
    end = "at 2026-04-12 12:30:00 UTC at that rate, in 30 min, of session:s"
    assert f"Exhausted: {end}" in list(report_lines(report))


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
        "  (root): $0.00 / $100.00 (0.0%)",
        "  session:s: $0.00 / $50.00 (0.0%), 0 / 10 (0.0%) tokens",
    ]


def status_of(scope: str = "session:s", /, **fields: object) -> ScopeStatus:
    empty: dict[str, object] = {
        field.name: None if "limit" in field.name or "remaining" in field.name else 0
        for field in msgspec.structs.fields(ScopeStatus)
    }
    empty |= {"scope": scope, "window": "none", "resets_at": None, "children": ()}
    empty["is_truncated"] = False
    return msgspec.convert(empty | fields, ScopeStatus)


def written(status: ScopeStatus, rate: BurnRate | None = None) -> list[str]:
    report = BudgetReport(status=status, parents=(), rate=rate or BurnRate(), now=NOW)
    return list(report_lines(report))


A_DOLLAR_AN_HOUR = BurnRate(micro_usd_per_hour=1_000_000, measured_seconds=HOUR, is_steady=True)

EXHAUSTED: list[tuple[dict[str, object], str]] = [
    ({}, "never, there is no limit"),
    (
        {"limit_micro_usd": 2_500_000, "remaining_micro_usd": 2_500_000},
        "at 2026-04-12 14:30:00 UTC at that rate, in 2 h 30 min",
    ),
    (
        {"limit_micro_usd": 96_000_000, "remaining_micro_usd": 96_000_000},
        "at 2026-04-16 12:00:00 UTC at that rate, in 4 days",
    ),
    ({"limit_tokens": 5, "remaining_tokens": 5}, "not at that rate"),
    (
        {"limit_micro_usd": 1, "remaining_micro_usd": 10**15, "resets_at": int(NOW) + HOUR},
        "not before room is freed",
    ),
    ({"limit_micro_usd": 1, "remaining_micro_usd": -1}, "now"),
    (
        {"limit_micro_usd": 1, "remaining_micro_usd": 10**15},
        "at some far day at that rate, in 41666666 days",
    ),
]


@pytest.mark.parametrize(("fields", "text"), EXHAUSTED)
def test_the_time_of_exhaustion_is_told(fields: dict[str, object], text: str) -> None:
    assert f"Exhausted: {text}" in written(status_of(**fields), A_DOLLAR_AN_HOUR)


def test_an_end_is_not_told_by_a_burst() -> None:
    status = status_of(limit_micro_usd=5_000_000, remaining_micro_usd=1)
    burst = BurnRate(micro_usd_per_hour=1_000_000, measured_seconds=600)
    assert f"Exhausted: {NOT_KNOWN}" in written(status, burst)


def test_a_window_tells_when_it_frees_room() -> None:
    status = status_of(window="day@Europe/Berlin", resets_at=int(NOW) + HOUR)
    assert written(status)[-1] == (
        "Counted: by the day, by the clock of Europe/Berlin, "
        "next frees room at 2026-04-12 13:00:00 UTC"
    )


def test_tokens_are_told_when_there_are_any() -> None:
    status = status_of(spent_tokens=900, overrun_tokens=100, reserved_tokens=7, limit_tokens=4_000)
    assert "Tokens: 1,000 / 4,000 (25.0%), 7 reserved" in written(status)


def test_a_limit_of_zero_has_no_percentage() -> None:
    assert written(status_of(limit_micro_usd=0))[0] == "Spent: $0.00 / $0.00"


def test_children_are_told_by_kind_with_their_limits_and_the_largest_first() -> None:
    children = (
        status_of("session:s/agent:a", spent_micro_usd=10_000),
        status_of("session:s/agent:b", spent_micro_usd=20_000, limit_micro_usd=40_000),
        status_of("session:s/team:t/workflow:w"),
    )
    assert written(status_of(children=children))[2:] == [
        "Per-agent breakdown:",
        "  b: $0.02 / $0.04 (50.0%)",
        "  a: $0.01",
        "Per-workflow breakdown:",
        "  team:t/workflow:w: $0.00",
    ]


def test_a_long_breakdown_is_cut() -> None:
    children = tuple(status_of(f"session:s/workflow:w{number}") for number in range(60))
    lines = written(status_of(children=children))
    assert lines[-1] == "  and 10 more; --json lists them all"
    assert len(lines) == 2 + 1 + 50 + 1


def test_a_status_that_was_cut_says_so() -> None:
    lines = written(status_of(children=(status_of("session:s/run:1"),), is_truncated=True))
    assert lines[-1] == "Only 10,000 scopes were read; ask for the status of one within to see more"


def test_a_journal_row_names_the_innermost_scopes_and_the_changes() -> None:
    scopes = (ROOT, Scope("session:s"), Scope("team:t"), Scope("session:s/workflow:w"))
    entry = JournalEntry(
        at=NOW,
        reservation_id="call-1",
        call=Call.COMMIT,
        charges=tuple(Charge(scope=scope, bucket_start=0) for scope in scopes),
        delta=Delta(
            spent_micro_usd=MicroUsd(50_000),
            reserved_micro_usd=MicroUsd(-70_000),
            spent_tokens=Tokens(1_500),
            reserved_tokens=Tokens(-2_000),
        ),
    )
    assert journal_row(entry) == (
        "2026-04-12 12:00:00 UTC",
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
            "Adjusted root: $2.00 spent, $0.00 overrun, $999999.00 claimed and not accepted\n"
        )
    assert run(["budget", "adjust", "root", "--usd=-3"]) != 0
    assert "name at most that" in capsys.readouterr().err
    assert run(["budget", "adjust", "root", "--accept", "--usd", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overrun_micro_usd"] == 7_000_000
    assert run(["budget", "adjust", "root", "--reject"]) == 0
    assert "$0.00 claimed" in capsys.readouterr().out
    assert run(["budget", "adjust", "root", "--accept", "--reject"]) != 0
    capsys.readouterr()
    beside = ["--data", str(data_home), "--sqlite-path", str(path)]
    assert run(["budget", "adjust", "root", "--usd", "1", *beside]) == 2
    assert "--data: names a service" in capsys.readouterr().err


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
    entries = json.loads(capsys.readouterr().out)
    assert [entry["call"] for entry in entries] == ["reserve", *("commit", "reserve") * 3]


def test_set_replaces_the_limits_of_a_scope(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--limit-usd", "20", "--limit-tokens", "1000", "--window", "rolling:24h"]
    assert run(["budget", "set", "project:web", *given]) == 0
    assert run(["budget", "set", "project:web", "--limit-usd", "30"]) == 0
    assert run(["budget", "status", "project:web", "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Set the budget of project:web\n")
    status = json.loads(printed[printed.index("{") :])
    assert status["limit_micro_usd"] == 30_000_000
    assert status["limit_tokens"] is None
    assert status["window"] == "none"


def test_a_limit_is_removed_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["budget", "set", "root", "--limit-usd", "20"]) == 0
    assert run(["budget", "set", "root"]) == 2
    assert "--no-limit" in capsys.readouterr().err
    assert run(["budget", "set", "root", "--no-limit"]) == 0
    capsys.readouterr()
    assert run(["budget", "status"]) == 0
    assert capsys.readouterr().out.startswith("Spent: $0.00\n")


async def a_reservation(tracker: LedgerTracker) -> None:
    await tracker.reserve("session:s", "1", reservation_id="call-1", dispatched=True)


class Terminal(io.StringIO):
    """Input that a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "reserved"), [("y\n", 0), ("n\n", 1_000_000), ("\n", 1_000_000)])
def test_release_asks_a_person_first(
    typed: str,
    reserved: int,
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
    return json.loads(capsys.readouterr().out)["reserved_micro_usd"]


def test_release_in_a_script_needs_the_option(
    data_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(data_home / "headgate" / "budget.db", a_reservation)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run(["budget", "release", "call-1"]) == 2
    assert "--yes: is needed" in capsys.readouterr().err
    assert run(["budget", "release", "call-1", "--yes"]) == 0
    assert capsys.readouterr().out == "Released call-1\n"
    assert reserved_now(capsys) == 0


SET = ["budget", "set", "root", "--limit-usd", "1"]


def test_the_data_directory_is_made_for_its_owner_only(data_home: Path) -> None:
    assert run(SET) == 0
    mode = stat.S_IMODE((data_home / "headgate").stat().st_mode)
    assert mode == 0o700
    assert (data_home / "headgate" / "budget.db").exists()


def test_a_data_home_that_is_not_absolute_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run(SET) == 0
    assert (tmp_path / "home/.local/share/headgate/budget.db").exists()
    assert not (tmp_path / "relative").exists()


PLACES: list[tuple[list[str], str | None]] = [
    (["--sqlite-path", "{}/a.db"], None),
    (["--url", "sqlite:///{}/a.db"], None),
    (["--tracker", "sqlite", "--sqlite-path", "{}/a.db"], None),
    (["--tracker", "sqlite"], "sqlite:///{}/a.db"),
    ([], "sqlite:///{}/a.db"),
    (["--sqlite-path", "{}/a.db"], "sqlite:///{}/b.db"),
]


@pytest.mark.parametrize(("options", "variable"), PLACES)
def test_the_ledger_is_named_by_an_option_or_by_the_environment(
    options: list[str], variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("HEADGATE_BUDGET_URL", variable.format(tmp_path))
    given = [option.format(tmp_path) for option in options]
    assert run([*SET, *given]) == 0
    assert [path.name for path in tmp_path.glob("*.db")] == ["a.db"]
    assert run(["budget", "status", *given]) == 0


READERS = [["status"], ["status", "--json"], ["journal"], ["release", "call-1", "--yes"]]
NO_BOOKS: list[tuple[list[str], str | None, str]] = [
    (["--sqlite-path", "{}/typo.db"], None, "--sqlite-path"),
    (["--url", "sqlite:///{}/typo.db"], None, "--url"),
    ([], "sqlite:///{}/typo.db", "HEADGATE_BUDGET_URL"),
    (["--tracker", "sqlite"], "sqlite:///{}/typo.db", "HEADGATE_BUDGET_URL"),
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
        " headgate budget set creates one\n"
    )
    assert list(tmp_path.glob("*.db*")) == []


def test_without_any_ledger_in_the_data_directory_a_reader_says_what_to_do(
    data_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["budget", "status"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    ledger = data_home / "headgate" / "budget.db"
    assert printed.err == (
        f"headgate: no budget was set yet: there is no ledger at {ledger};"
        " headgate budget set creates one\n"
    )
    assert not ledger.exists()


def test_the_named_tracker_outweighs_another_one_in_the_environment(
    data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_BUDGET_URL", "redis://127.0.0.1:1/0")
    assert run([*SET, "--tracker", "sqlite"]) == 0
    assert (data_home / "headgate" / "budget.db").exists()


BAD: list[tuple[list[str], str]] = [
    (["status", "--tracker", "local"], "--tracker: a local budget lives in the memory"),
    (["status", "--url", "memory:"], "--tracker: a local budget lives in the memory"),
    (["status", "--tracker", "redis"], "--tracker: redis needs --redis-url"),
    (["status", "--tracker", "postgres"], "--tracker: postgres needs --postgres-url"),
    (["status", "--tracker", "redis", "--sqlite-path", "x"], "--sqlite-path: 'sqlite' is not a"),
    (["status", "--url", ""], "--url: is empty; name a ledger"),
    (["status", "--sqlite-path", ""], "--sqlite-path: is empty; name a ledger"),
    (["status", "--redis-url", "foo"], "--redis-url: 'foo' is not a URL of redis; write one as"),
    (["set", "root", "--no-limit", "--window", "day"], "--window: is the time of a limit"),
    (["status", "--redis-url", "postgresql://h/d"], "--redis-url: 'postgresql' is not a URL of"),
    (["status", "--url", "a:", "--redis-url", "b:"], "--url and --redis-url: name one ledger"),
    (["status", "--url", "mysql://u:secret@h/d"], "url: 'mysql' is not a scheme"),
    (["status", "--session", "a b"], "--session: 'session:a b' is not a part"),
    (["status", "session:s", "--session", "s"], "scope: give a scope or --session, not both"),
    (["status", "nonsense"], "scope: 'nonsense' is not a part"),
    (["set", "--limit-usd", "1"], "scope: name one, or root"),
    (["set", "root", "--limit-usd", "free"], "limit_usd: 'free' is not an amount"),
    (["set", "root", "--limit-usd", "-1"], "limit_usd: must not be negative"),
    (["set", "root", "--limit-usd", "1", "--no-limit"], "limit: give --limit-usd"),
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
    ["--redis-url", "redis://127.0.0.1:1/0"],
    ["--postgres-url", "postgresql://user:secret@127.0.0.1:1/db"],
    ["--sqlite-path", "{}"],
]


@pytest.mark.parametrize("options", UNREACHABLE, ids=[options[0] for options in UNREACHABLE])
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
        command = [sys.executable, "-m", "headgate", "budget", "status", "--url", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            silent.settimeout(30)
            connection, _ = silent.accept()
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            with connection:
                assert process.wait(30) == 130
    assert time.monotonic() - begun < 6


def test_a_data_directory_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file" / "data"))
    assert run(["budget", "status"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("headgate: the data directory cannot be made: ")
    assert printed.count("\n") == 1


def commands() -> list[tuple[str, click.Command]]:
    return [("headgate budget", budget)] + [
        (f"headgate budget {name}", command) for name, command in budget.commands.items()
    ]


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_and_option_is_in_the_reference(name: str, command: click.Command) -> None:
    page = REFERENCE.read_text()
    if command is not budget:
        assert f"\n## `{name}`\n" in page
    for parameter in command.params:
        for spelling in parameter.opts if isinstance(parameter, click.Option) else ():
            assert f"`{spelling}`" in page


def test_every_key_of_the_json_is_in_the_reference() -> None:
    report = BudgetReport(status=status_of(), parents=(), rate=BurnRate(), now=NOW)
    page = REFERENCE.read_text()
    assert [key for key in report.as_keys() if f"`{key}`" not in page] == []
