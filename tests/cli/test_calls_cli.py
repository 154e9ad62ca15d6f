"""`headgate calls`, and `headgate why` of a call, on a service whose store has some."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cli.said import Command, Said
from headgate.api.schema.calls import CallAmountBody, CallBody, CallTokensBody, CallWhyBody
from headgate.api.schema.tasks import ReasonBody
from headgate.app import STORE_FILE
from headgate.cli.calls import HEADER, lines_of, row_of, waited_seconds
from headgate.cli.main import EXIT_BAD_INPUT, EXIT_UNAVAILABLE, run
from headgate.cli.why import MOST_EXPLAINED, lines_of_call
from headgate.core.call import CallRecord, CallState
from headgate.storage.call_rows import CallStore, EndedCall, first_call_id_at
from headgate.storage.sqlite import SqliteTaskStore
from service.support import ServiceProcess, running_service

NOW = time.time()
UNKNOWN = "call-01m7fs2skb2415wvpawg4jr96h"


def ended(number: int) -> CallRecord:
    """Make a call of two projects in turn, a minute after the one before."""
    at = NOW - 3_600 + 60 * number
    return CallRecord(
        id=first_call_id_at(at),
        project_id=("evals", "search")[number % 2],
        agent_id="codex",
        model="gpt-5" if number else "a\x1b[2Jb",
        upstream="openai",
        state=CallState.FAILED if number == 5 else CallState.DONE,
        created_at=at,
        started_at=at + 2.5,
        ended_at=at + 9.0,
        slot="work",
        key_rule="It is the only one.",
        status=200,
        error="it broke" if number == 5 else None,
        tries=1,
        tokens=12_345,
        micro_usd=1_500_000,
        token_id="tok_1",
    )


CALLS = [ended(number) for number in range(6)]
NEWEST = CALLS[-1].id
BETWEEN = datetime.fromtimestamp(CALLS[2].created_at + 30, UTC).isoformat()
"""A time between the third call and the fourth."""


async def fill(path: Path) -> None:
    store = SqliteTaskStore(path)
    await store.open()
    try:
        await CallStore(store).finish([EndedCall(record=record) for record in CALLS])
    finally:
        await store.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("calls")
    data = folder / "data"
    data.mkdir()
    asyncio.run(fill(data / STORE_FILE))
    with running_service(folder) as process:
        yield process


@pytest.fixture
def headgate(
    service: ServiceProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.setenv("HEADGATE_URL", service.address)
    monkeypatch.setenv("XDG_DATA_HOME", str(service.folder / "nothing"))

    def command(*arguments: str) -> Said:
        capsys.readouterr()
        code = run(list(arguments))
        return Said(code, *capsys.readouterr())

    return command


def ids_in(said: Said) -> list[str]:
    assert said.code == 0, said
    return [line["callId"] for line in said.lines]


def test_a_list_is_a_table_newest_first(headgate: Command) -> None:
    said = headgate("calls")
    title, header, *rows = said.out.splitlines()
    assert (title, header.split()) == ("Calls", list(HEADER))
    assert [row.split()[0] for row in rows] == [call.id for call in reversed(CALLS)]
    assert rows[0].split()[1:] == [
        *("failed", "search", "codex", "gpt-5", "work", "2.5", "s", "12,345", "$1.50"),
    ]
    # What a client calls a model cannot move the cursor.
    assert "\x1b" not in said.out


def test_a_list_is_narrowed_and_cut(headgate: Command) -> None:
    for arguments, expected in (
        (("--project", "evals"), [CALLS[4], CALLS[2], CALLS[0]]),
        (("--state", "failed"), [CALLS[5]]),
        (("--state", "failed", "--state", "waiting"), [CALLS[5]]),
        (("--state", "waiting"), []),
        (("--agent", "codex", "--limit", "2"), [CALLS[5], CALLS[4]]),
        (("--model", "gpt-5", "--upstream", "openai", "--slot", "work", "--all"), CALLS[:0:-1]),
        (("--task", "tsk_1"), []),
        (("--since", BETWEEN), CALLS[:2:-1]),
        (("--until", BETWEEN), [CALLS[2], CALLS[1], CALLS[0]]),
        (("--since", "2h"), CALLS[::-1]),
    ):
        found = ids_in(headgate("calls", "--json", *arguments))
        assert found == [call.id for call in expected], arguments


def test_a_list_that_is_cut_says_so_on_standard_error(headgate: Command) -> None:
    line = "headgate: 2 shown, more exist; --limit N or --all\n"
    for arguments, count, expected in (
        (("--limit", "2"), 2, line),
        (("--limit", str(len(CALLS))), len(CALLS), ""),
        (("--limit", "1000"), len(CALLS), ""),
        (("--all",), len(CALLS), ""),
    ):
        said = headgate("calls", "--json", *arguments)
        assert (len(ids_in(said)), said.err) == (count, expected), arguments
        said = headgate("calls", *arguments)
        assert (len(said.out.splitlines()), said.err) == (2 + count, expected), arguments


def test_without_calls_it_says_so(headgate: Command) -> None:
    assert headgate("calls", "--project", "default").out.startswith("No calls at http://")


@pytest.mark.parametrize("more", [(), ("--json",), ("--all",)])
def test_a_mistyped_project_is_named_beside_the_empty_list(
    headgate: Command, more: tuple[str, ...]
) -> None:
    said = headgate("calls", "--project", "defalt", *more)
    assert said.err == "headgate: there is no project defalt now; did you mean default?\n"
    assert headgate("calls", "--project", "zzz", *more).err == (
        "headgate: there is no project zzz now; headgate project list shows those that there are\n"
    )
    assert headgate("calls", "--project", "default", *more).err == ""
    assert headgate("calls", "--project", "evals", *more).err == "", "it has calls"


@pytest.mark.parametrize("usd", ["0.00", "0.000042", "0.0234", "1.50", "1234.567891"])
def test_amounts_are_written_as_budgets_write_them(usd: str) -> None:
    call = body(usage=CallAmountBody(tokens=5, usd=usd))
    assert row_of(call)[-1] == f"${usd}"
    assert f"5 tokens, ${usd}" in "\n".join(lines_of(call))


def test_one_call_is_shown_with_all_that_is_set(headgate: Command) -> None:
    lines = headgate("calls", "show", NEWEST).out.splitlines()
    shown = dict(line.split("  ", 1) for line in lines)
    shown = {name.strip(): text.strip() for name, text in shown.items()}
    assert shown["call id"] == NEWEST
    assert shown["usage"] == "12,345 tokens, $1.50"
    assert shown["key rule"] == "It is the only one."
    assert shown["waited"] == "2.5 s"
    assert "first byte at" not in shown
    assert headgate("calls", "show", NEWEST, "--json").json["error"] == "it broke"


def test_the_id_of_a_call_alone_shows_it(headgate: Command) -> None:
    assert headgate("calls", NEWEST) == headgate("calls", "show", NEWEST)
    assert headgate("calls", NEWEST, "--json").json["callId"] == NEWEST


def test_why_without_an_id_explains_what_waits(headgate: Command) -> None:
    assert headgate("why") == (0, "Nothing waits.\n", "")
    assert headgate("why", "--json") == (0, "", "")
    assert headgate("project", "pause", "default").code == 0
    task_id = headgate("submit", "draft", "--agent", "writer").out.strip()
    assert headgate("why").out == headgate("why", task_id).out
    assert [line["taskId"] for line in headgate("why", "--json").lines] == [task_id]
    for _ in range(MOST_EXPLAINED):
        headgate("submit", "draft", "--agent", "writer")
    said = headgate("why", "--json")
    assert (len(said.lines), "headgate tasks --state queued" in said.err) == (MOST_EXPLAINED, True)
    # The tests below count what was used.
    assert headgate("cancel", "--agent", "writer", "--yes").code == 0
    assert headgate("project", "resume", "default").code == 0


def test_why_works_for_a_call_as_for_a_task(headgate: Command) -> None:
    said = headgate("why", NEWEST)
    assert said.out.splitlines() == [
        f"{NEWEST} is failed:",
        "  it broke",
        "  key work: It is the only one.",
    ]
    assert headgate("why", NEWEST, "--json").json["state"] == "failed"


@pytest.mark.parametrize("arguments", [("calls", "show"), ("why",)])
@pytest.mark.parametrize("name", [UNKNOWN, "call-"])
def test_a_call_that_is_not_there_is_an_error(
    headgate: Command, arguments: tuple[str, ...], name: str
) -> None:
    said = headgate(*arguments, name)
    assert (said.code, said.out) == (EXIT_BAD_INPUT, "")
    assert "call not found" in said.err


@pytest.mark.parametrize("arguments", [("--state", "queued"), ("--limit", "0"), ("--since", "x")])
def test_a_wrong_option_is_named(headgate: Command, arguments: tuple[str, str]) -> None:
    said = headgate("calls", *arguments)
    assert said.code == EXIT_BAD_INPUT
    assert arguments[0] in said.err


def test_usage_is_summed_up_by_key(headgate: Command) -> None:
    (row,) = headgate("usage", "--by", "slot", "--json").json["rows"]
    today = datetime.now(UTC).date().isoformat()
    for since in ("2h", "1d", today, f"{today}T00:00:00Z"):
        recent = headgate("usage", "--by", "slot", "--since", since, "--json")
        assert recent.json["rows"] == [row]
    wrong = headgate("usage", "--since", "yesterday")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert (row["key"], row["calls"], row["attempts"]) == ("work", len(CALLS), 0)
    assert "calls" in headgate("usage").out.splitlines()[1].split()


def test_without_a_service_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_URL", "http://127.0.0.1:1")
    assert run(["calls"]) == EXIT_UNAVAILABLE
    assert capsys.readouterr().out == ""


def test_why_without_a_service_names_the_command_for_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.client.sync_client.pause_seconds", lambda *_: None)
    assert run(["why", "--url", "http://127.0.0.1:1"]) == EXIT_UNAVAILABLE
    assert "headgate runs show last says why its steps wait" in capsys.readouterr().err


def test_show_takes_the_id_of_a_call_too(headgate: Command) -> None:
    assert headgate("show", NEWEST, "--json").json == headgate("calls", NEWEST, "--json").json
    assert headgate("show", NEWEST).out == headgate("calls", NEWEST).out
    assert "call not found" in headgate("show", UNKNOWN).err


def test_a_call_without_a_known_price_has_no_dollars() -> None:
    usage = CallAmountBody(tokens=5, usd="0")
    call = body(usage=usage, is_unpriced=True)
    assert row_of(call)[-1] == "unpriced"
    lines = "\n".join(lines_of(call))
    assert "5 tokens, unpriced" in lines
    assert "$" not in lines
    assert row_of(body(usage=usage))[-1] == "$0.00"


def test_a_call_says_where_its_reservation_comes_from() -> None:
    lines = lines_of(body(reserved=CallAmountBody(tokens=5, usd="0.10", basis="learned")))
    assert "reserved    5 tokens, $0.10, what such calls usually need" in lines


def body(**fields: object) -> CallBody:
    given: dict[str, object] = {
        "call_id": UNKNOWN,
        "state": CallState.WAITING,
        "project_id": "p",
        "agent_id": "a",
        "model": "m",
        "created_at": datetime.now(UTC) - timedelta(seconds=90),
    }
    return CallBody(**{**given, **fields})  # type: ignore[arg-type]


def test_a_call_that_waits_has_waited_until_now() -> None:
    call = body()
    assert waited_seconds(call, call.created_at + timedelta(seconds=7)) == 7.0
    assert waited_seconds(body(waited_ms=1_500)) == 1.5


def test_tokens_and_assumed_amounts_are_told_apart() -> None:
    reported = CallTokensBody(input_tokens=1_000, cached_tokens=900, output_tokens=0)
    usage = CallAmountBody(tokens=5, usd="0.10", assumed_tokens=5)
    lines = "\n".join(lines_of(body(reported=reported, usage=usage, scopes=("s:1", "s:2"))))
    assert "1,000 in, 900 of them cached, 0 out" in lines
    assert "5 tokens, $0.10 (assumed 5 tokens, $0.00)" in lines
    assert "s:1, s:2" in lines


def test_why_of_a_waiting_call_has_its_reasons_its_place_and_its_time() -> None:
    reason = ReasonBody(detail={"reason": "gate_closed"}, message="upstream openai is down")
    why = CallWhyBody(
        call_id=UNKNOWN,
        state=CallState.WAITING,
        reasons=(reason,),
        position=3,
        expected_seconds=120.0,
    )
    assert lines_of_call(why) == [
        f"{UNKNOWN} is waiting:",
        "  upstream openai is down",
        "  2 calls wait before it for the same agent",
        "  about 2 min to go",
    ]
