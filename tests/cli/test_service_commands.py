"""The commands of a running service, as a person and as a script meet them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cli.said import Command, Said
from headgate.cli import budget, calls, runs, slot, token, webhooks
from headgate.cli.main import COMMANDS, cli, run
from headgate.cli.output import drawn_table, fitting_columns
from headgate.cli.task_view import HEADER, SPARE
from service.support import ECHO_TARGET, SLOW_TARGET, ServiceProcess, running_service, wait_until

SETTINGS = f"""{ECHO_TARGET}{SLOW_TARGET}
[scheduler]
max_queue_size = 40
max_per_agent = 20
retry_base_seconds = 0.1

[agents.tight]
capacity = 1

[targets.broken]
kind = "command"
command = ["sh", "-c", "echo no such page >&2; exit 3"]

[projects.off]
status = "paused"
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "headgate.toml").write_text(SETTINGS)
    with running_service(folder) as process:
        yield process


@pytest.fixture
def headgate(
    service: ServiceProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    monkeypatch.setenv("HEADGATE_URL", service.address)
    monkeypatch.setenv("XDG_DATA_HOME", str(service.folder / "nothing"))

    def command(*arguments: str) -> Said:
        capsys.readouterr()
        code = run(list(arguments))
        return Said(code, *capsys.readouterr())

    return command


def started(service: ServiceProcess, *arguments: str) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "headgate", *arguments],
        env={**os.environ, "HEADGATE_URL": service.address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def submitted(headgate: Command, *arguments: str) -> str:
    said = headgate("submit", "read", "--agent", "a", *arguments)
    assert said.code == 0, said
    return said.out.strip()


def test_submit_prints_the_id_and_nothing_else(headgate: Command) -> None:
    said = headgate("submit", "read", "--agent", "a")
    assert said.out.startswith("tsk_")
    assert said.out.count("\n") == 1
    assert said.err == ""
    assert headgate("submit", "read", "--agent", "a", "--json").json["state"] == "queued"


def test_every_option_of_submit_reaches_the_task(headgate: Command, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"prompt": [1]}')
    parent = submitted(headgate)
    task = submitted(
        headgate,
        *("--project", "off", "--target", "echo", "--param", "name=10", "--param", "x:=10"),
        *("--params", '{"y": null}', "--input", f"@{tmp_path / 'in.json'}", "--priority", "-5"),
        *(
            "--deadline",
            "1h",
            "--not-before",
            "2030-01-01T00:00:00Z",
            "--deadline",
            "2099-01-01T00:00:00Z",
        ),
        *("--estimate-usd", "0.25", "--estimate-tokens", "10", "--weight", "2", "--scope", "run:r"),
        *("--on-exhausted", "reject", "--depends-on", parent, "--on-parent-failure", "run"),
        *("--label", "k=v=w", "--max-attempts", "3", "--callback-url", "https://example.com/x"),
        *("--tab-id", "t", "--selector", "#s", "--ref", "e1", "--attempt-timeout", "2m"),
    )
    shown = headgate("show", task, "--json").json
    assert shown["params"] == {"name": "10", "x": 10, "y": None}
    assert shown["input"] == {"prompt": [1]}
    assert shown["estimate"] == {"tokens": 10, "usd": 0.25}
    assert shown["labels"] == {"k": "v=w"}
    assert shown["notBefore"] == "2030-01-01T00:00:00Z"
    given = ("priority", "weight", "onExhausted", "onParentFailure", "maxAttempts", "tabId", "ref")
    assert [shown[name] for name in given] == [-5, 2.0, "reject", "run", 3, "t", "e1"]
    assert shown["timeoutSeconds"] == 120.0
    assert "run:r" in shown["scopes"]
    assert shown["dependsOn"] == [parent]


def test_submit_and_wait_prints_the_result_and_tells_of_the_way(headgate: Command) -> None:
    said = headgate("submit", "read", "--agent", "a", "--param", "n:=1", "--wait")
    assert said.code == 0
    assert said.json == {"echo": {"action": "read", "params": {"n": 1}}}
    assert said.err.splitlines()[-1].split()[1] == "done"


def test_a_task_that_fails_makes_a_script_fail(headgate: Command) -> None:
    said = headgate("submit", "read", "--agent", "a", "--target", "broken", "--wait")
    assert said.code == 1
    assert "no such page" in said.err.splitlines()[-1]
    said = headgate("submit", "x", "--agent", "a", "--target", "broken", "--wait", "--json")
    assert (said.code, said.json["state"]) == (1, "failed")


def test_a_task_that_waits_says_why_on_the_way(headgate: Command) -> None:
    said = headgate(
        "submit", "x", "--agent", "a", "--project", "off", "--wait", "--wait-timeout", "3s"
    )
    assert said.code == 5
    task = said.err.split()[0]
    assert said.err.splitlines().count(f"{task} waits: project off is paused") == 1
    assert headgate("cancel", task).code == 0


def test_waiting_can_be_limited_and_leaves_the_task_alone(headgate: Command) -> None:
    said = headgate(
        "submit", "x", "--agent", "a", "--target", "slow", "--wait", "--wait-timeout", "0.2s"
    )
    assert said.code == 5
    task = said.err.split()[0]
    assert headgate("show", task, "--json").json["state"] == "running"
    assert headgate("cancel", task).code == 0


def test_ctrl_c_while_waiting_leaves_the_task_running_and_says_so(
    service: ServiceProcess, headgate: Command
) -> None:
    slow = ("submit", "x", "--agent", "c", "--target", "slow", "--wait")
    with started(service, *slow) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "running" not in line:
            line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    task = line.split()[0]
    assert (process.returncode, out) == (130, "")
    assert err == f"headgate: {task} goes on; headgate cancel {task} stops it\n"
    assert headgate("show", task, "--json").json["state"] == "running"
    headgate("cancel", task)


def test_tasks_are_listed_filtered_and_counted(headgate: Command) -> None:
    tasks = [headgate("submit", "x", "--agent", "lists").out.strip() for _ in range(5)]
    said = headgate("tasks", "--agent", "lists", "--limit", "2", "--json")
    assert [task["taskId"] for task in said.lines] == tasks[:2:-1]
    assert said.err == "headgate: 2 shown, more exist; --limit N or --all\n"
    assert headgate("tasks", "--agent", "lists", "--limit", "5").err == ""
    everything = headgate("tasks", "--agent", "lists", "--all", "--json").lines
    assert [task["taskId"] for task in everything] == tasks[::-1]
    table = headgate("tasks", "--agent", "lists").out.splitlines()
    assert table[1].split()[:2] == ["task", "state"]
    assert len(table) == 7
    assert headgate("tasks", "--agent", "nobody").out.startswith("No tasks at http://")


@pytest.mark.parametrize(
    ("option", "name", "line"),
    [
        ("--project", "of", "there is no project of now; did you mean off?"),
        ("--target", "slwo", "there is no target slwo now; did you mean slow?"),
        (
            "--agent",
            "nobody",
            "there is no agent nobody now; headgate agent list shows those that there are",
        ),
    ],
)
def test_a_filter_that_names_nothing_is_answered_with_the_nearest_name(
    headgate: Command, option: str, name: str, line: str
) -> None:
    for more in ((), ("--json",), ("--all",)):
        said = headgate("tasks", option, name, *more)
        assert (said.code, said.err) == (0, f"headgate: {line}\n")
    assert headgate("tasks", "--project", "off", "--label", "no=one").err == ""


def test_why_tells_reasons_with_times(headgate: Command) -> None:
    task = submitted(headgate, "--project", "off", "--not-before", "12m")
    lines = headgate("why", task).out.splitlines()
    assert lines[0] == f"{task} is queued:"
    assert lines[1] == "  project off is paused"
    assert "(in 12 min)" in lines[2]
    reasons = headgate("why", task, "--json").json["reasons"]
    assert reasons[0]["detail"]["reason"] == "project_paused"
    done = submitted(headgate, "--wait")
    assert done
    assert headgate("cancel", task).out == f"{task} cancelled\n"
    assert "waits for nothing" in headgate("why", task).out


def test_why_names_who_has_what_is_waited_for(headgate: Command) -> None:
    holder = headgate("submit", "x", "--agent", "tight", "--target", "slow").out.strip()
    task = headgate("submit", "x", "--agent", "tight").out.strip()
    assert f"    held by {holder}\n" in headgate("why", task).out
    headgate("cancel", holder)


def test_show_prints_what_is_set(headgate: Command) -> None:
    task = headgate("submit", "x", "--agent", "a", "--wait", "--json").json["taskId"]
    shown = headgate("show", task).out
    assert "state" in shown
    assert '"echo": {' in shown
    assert "not before" not in shown


def test_what_becomes_of_one_task_does_not_keep_the_next_from_it(headgate: Command) -> None:
    task = submitted(headgate, "--project", "off")
    said = headgate("cancel", "nope", task, "--json")
    assert said.code == 1
    assert said.lines == [
        {"taskId": "nope", "code": "not_found", "error": "task not found"},
        {"status": "cancelled", "taskId": task},
    ]
    assert headgate("cancel", "nope").code == 2
    assert headgate("show", "nope").err == "headgate: task not found\n"


def test_all_tasks_that_match_are_counted_before_they_are_cancelled(
    headgate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        submitted(headgate, "--project", "off", "--label", "run=7")
    which = ("cancel", "--label", "run=7", "--state", "queued")
    said = headgate(*which)
    assert said.code == 2
    assert "cancel 3 tasks? Nobody can answer here; give --yes" in said.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert headgate(*which).code == 130
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "y")
    said = headgate(*which)
    assert (said.code, said.out) == (0, "Cancelled 3 of 3 tasks\n")
    assert headgate(*which, "--yes", "--json").json == {
        "matched": 0,
        "cancelled": 0,
        "skipped": 0,
        "remaining": 0,
    }


def test_a_task_that_ended_is_retried_as_a_new_one(headgate: Command) -> None:
    task = submitted(headgate, "--project", "off", "--label", "run=8")
    headgate("cancel", task)
    again = headgate("retry", task, "--json").json
    assert again["taskId"] != task
    headgate("cancel", again["taskId"])
    assert headgate("retry", "--label", "run=8", "--yes").code == 0


def test_stats_are_tables_or_json(headgate: Command) -> None:
    assert "in flight" in headgate("stats").out
    assert headgate("stats", "--json").json["config"]["maxQueueSize"] == 40


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit",),
        ("submit", "x", "--agent", "a", "--param", "novalue"),
        ("submit", "x", "--agent", "a", "--param", ":=1"),
        ("submit", "x", "--agent", "a", "--params", "[1]"),
        ("submit", "x", "--agent", "a", "--input", "text"),
        ("submit", "x", "--agent", "a", "--input", "@/no/such/file"),
        ("submit", "x", "--agent", "a", "--deadline", "soon"),
        ("submit", "x", "--agent", "a", "--deadline", "2001-01-01T00:00:00Z"),
        ("submit", "x", "--agent", "a", "--estimate-usd", "much"),
        ("submit", "x", "--agent", "a", "--target", "nowhere"),
        ("submit", "-", "--wait"),
        ("submit", "-", "--idempotency-key", "k"),
        ("tasks", "--limit", "0"),
        ("tasks", "--state", "tired"),
        ("watch", "tsk_1", "--agent", "a"),
        ("cancel",),
        ("cancel", "tsk_1", "--agent", "a"),
        ("retry", "--state", "running"),
        ("completion", "tcsh"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(headgate: Command, arguments: tuple[str, ...]) -> None:
    said = headgate(*arguments)
    assert said.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    assert "internal" not in said.err


def submit_lines(service: ServiceProcess, text: str, *arguments: str) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "submit", "-", *arguments],
        env={**os.environ, "HEADGATE_URL": service.address},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


LINES = """\
{"action": "x", "agentId": "l"}
nonsense

{"action": "x"}
{"agentId": "l"}
{"action": "x", "projectId": "default", "agentId": null}
[1]
"""


def test_each_line_gets_a_result_with_its_number(service: ServiceProcess) -> None:
    said = submit_lines(service, LINES, "--json", "--label", "run=1")
    assert said.code == 1
    assert [(line["line"], line.get("code")) for line in said.lines] == [
        (1, None),
        (2, "bad_json"),
        (4, "missing_field"),
        (5, "missing_field"),
        (6, None),
        (7, "bad_json"),
    ]
    assert service.task(said.lines[0]["taskId"])["labels"] == {"run": "1"}
    assert said.err == "headgate: 2 of 6 submitted\n"


def test_without_json_the_ids_are_printed_and_what_is_wrong_is_told_apart(
    service: ServiceProcess,
) -> None:
    said = submit_lines(service, LINES, "--agent", "l")
    assert len(said.out.split()) == 3
    assert "headgate: line 2: the line is not JSON" in said.err


def test_a_line_with_an_unknown_field_is_refused_with_the_nearest_one(
    service: ServiceProcess,
) -> None:
    lines = (
        '{"agentId": "a", "action": "y", "bogus": 1}\n'
        '{"agentId": "a", "action": "y", "bogus": null}\n'
        '{"agentId": "a", "action": "y", "maxAttempt": 1}\n'
    )
    said = submit_lines(service, lines, "--json")
    assert said.code == 2
    first, second, third = said.lines
    assert (first["line"], first["code"]) == (1, "unknown_field")
    assert first["error"].startswith("unknown field 'bogus'; a task has action, agentId, ")
    assert "taskId" in second
    assert third["error"] == "unknown field 'maxAttempt'; did you mean maxAttempts?"
    assert said.err == "headgate: 1 of 3 submitted\n"


def test_patience_waits_until_there_is_room_for_every_line(
    service: ServiceProcess, headgate: Command
) -> None:
    held = [
        headgate("submit", "x", "--agent", "tight", "--target", "slow").out.strip()
        for _ in range(20)
    ]
    one = json.dumps({"action": "x", "agentId": "tight"}) + "\n"
    said = submit_lines(service, one * 3, "--json")
    assert said.code == 1
    assert {line["code"] for line in said.lines[1:]} == {"queue_full"}
    with started(service, "submit", "-", "--patient", "--json") as patient:
        assert patient.stdin is not None
        assert patient.stdout is not None
        assert patient.stderr is not None
        patient.stdin.write(one * 3)
        patient.stdin.close()
        assert "waiting: rejected" in patient.stderr.readline()
        headgate("cancel", *held)
        lines = [json.loads(line) for line in patient.stdout]
        assert patient.wait(20) == 0
    assert [line["state"] for line in lines] == ["queued"] * 3


def test_a_reader_that_goes_away_is_no_failure(service: ServiceProcess, headgate: Command) -> None:
    for _ in range(5):
        headgate("submit", "x", "--agent", "pipe", "--param", f"text={'y' * 20_000}")
    with started(service, "tasks", "--agent", "pipe", "--all", "--json") as listing:
        assert listing.stdout is not None
        listing.stdout.readline()
        listing.stdout.close()
        assert listing.wait(20) == 0
        assert listing.stderr is not None
        assert listing.stderr.read() == ""


def test_a_table_in_a_narrow_terminal_has_ids_that_can_be_copied(headgate: Command) -> None:
    from rich.console import Console  # noqa: PLC0415

    task = headgate("submit", "x", "--agent", "narrow").out.strip()
    rows = [(task, "done", "a", "default", "x" * 30, "3.2 s ago", "0.1 s", "e" * 60)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(drawn_table("Tasks", HEADER, rows, whole=("task",)))
    assert task in console.export_text()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, "task state created"),
        (80, "task state agent created"),
        (100, "task state agent created error"),
        (120, "task state agent action created error"),
        (200, "task state agent project action created took error"),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_one_line_for_each_task(
    width: int, columns: str
) -> None:
    from rich.console import Console  # noqa: PLC0415

    task = "tsk_01m7fs2skb2415wvpawg4jr96h"
    rows = [
        (task, "done", "coder-1", "default", "run", "12 min ago", "3.2 s", ""),
        (
            task,
            "failed",
            "claude-code-worker-2",
            "evals",
            "chat/completions",
            "3 h ago",
            "",
            "e" * 60,
        ),
    ]
    console = Console(width=width, record=True, file=io.StringIO())
    header, shown = fitting_columns(HEADER, rows, SPARE, width)
    assert header == columns.split()
    console.print(drawn_table("Tasks", header, shown, whole=("task",)))
    lines = console.export_text().splitlines()
    assert sum(line.startswith("│") for line in lines) == len(rows)
    assert max(map(len, lines)) <= width


CALL = "call-01m7tay1v0z3yz2zm6vcfypw6n"
AGENT_SCOPE = "project:reviews/agent:pr-123"
MESSAGE = "msg_01m7fs2skb2415wvpawg4jr96h"
SECRETS = "submit, read, cancel, admin"

LISTS = [
    (
        (calls.HEADER, calls.SPARE),
        (
            CALL,
            "running",
            "reviews",
            "pr-123",
            "claude-sonnet-4-5",
            "work",
            "0.1 s",
            "4,120",
            "$0.61",
        ),
        (CALL, "running", "claude-sonnet-4-5", "$0.61"),
    ),
    (
        (budget.LIST_HEADER, budget.LIST_SPARE),
        (AGENT_SCOPE, "$0.612", "$0.000244", "$5.00", "$4.38", "day", "2030-01-31 00:00:00 UTC"),
        (AGENT_SCOPE, "$0.612", "$5.00", "$4.38", "day"),
    ),
    (
        (budget.LIST_HEADER, budget.LIST_SPARE),
        (f"session:{'s' * 60}", "$0.612", "$0.000244", "$5.00", "$4.38", "day", "18:00:00 UTC"),
        ("$0.612", "$5.00"),
    ),
    (
        (token.HEADER, token.SPARE),
        ("640b5c4e398a", "pr-123", SECRETS, "agent pr-123", "good", "3 h ago", "in 21 h"),
        ("640b5c4e398a", "pr-123", "agent pr-123", "good", "in 21 h"),
    ),
    (
        (webhooks.HEADER, webhooks.SPARE),
        (MESSAGE, "task.completed", "dead", "12", "https://example.com/hook", "3 h ago", "x" * 60),
        (MESSAGE, "dead", "https://example.com/hook"),
    ),
    (
        (runs.HEADER, runs.SPARE),
        (
            "20300131-0800-ab12",
            "nightly",
            "exhausted",
            "3 h ago",
            "8 min",
            "12 of 40",
            "$0.20",
            "x" * 60,
        ),
        ("20300131-0800-ab12", "nightly", "exhausted", "12 of 40", "$0.20"),
    ),
    (
        (slot.HEADER, slot.SPARE),
        ("work", "exhausted", "100%", "4 h 12 min", "4 h 12 min: on reset", "12 min ago", "2 poll"),
        ("work", "exhausted", "100%", "4 h 12 min", "2 poll"),
    ),
]


@pytest.mark.parametrize(("columns", "row", "whole"), LISTS)
def test_in_80_columns_a_list_shows_what_matters_on_one_line(
    columns: tuple[tuple[str, ...], tuple[str, ...]], row: tuple[str, ...], whole: tuple[str, ...]
) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(drawn_table("List", *fitting_columns(columns[0], [row], columns[1], 80)))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    first = next(line for line in lines if line.startswith("│"))
    assert all(f"│ {cell} " in first for cell in whole)


def test_a_name_that_is_wider_than_the_terminal_goes_on_in_the_next_line() -> None:
    from rich.console import Console  # noqa: PLC0415

    scope = f"session:{'s' * 80}"
    row = (scope, "$0.612", "", "$5.00", "$4.38", "", "")
    console = Console(width=80, record=True, file=io.StringIO())
    table = fitting_columns(budget.LIST_HEADER, [row], budget.LIST_SPARE, 80)
    console.print(drawn_table("Budgets", *table))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    assert "".join(line.split("│")[1].strip() for line in lines) == scope


def test_watch_tells_of_one_task_until_it_has_ended(headgate: Command) -> None:
    task = headgate("submit", "x", "--agent", "a").out.strip()
    said = headgate("watch", task, "--json")
    assert said.code == 0
    assert said.lines[-1]["kind"] == "task.completed"
    assert {line["taskId"] for line in said.lines} == {task}
    assert "completed" in headgate("watch", task).out


def test_watch_follows_all_tasks_of_an_agent(service: ServiceProcess, headgate: Command) -> None:
    found: list[Any] = []
    with started(service, "watch", "--agent", "seen", "--json") as watching:
        assert watching.stdout is not None
        output = watching.stdout
        os.set_blocking(output.fileno(), False)

        def has_seen() -> bool:
            headgate("submit", "x", "--agent", "seen")
            headgate("submit", "x", "--agent", "unseen")
            found.extend(json.loads(line) for line in output.readlines())
            return any(event["kind"] == "task.completed" for event in found)

        wait_until(has_seen, seconds=20)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 130
    assert {event["agentId"] for event in found} == {"seen"}


def test_every_command_says_in_the_list_what_its_own_help_says() -> None:
    context = cli.make_context("headgate", ["--help"], resilient_parsing=True)
    for name, summary in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        help_text = (command.help or "").replace("\n", " ")
        assert help_text.startswith(summary.removesuffix(".")), name


def leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that does something, with its whole name."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for one in command.list_commands(context):
        inner = command.get_command(context, one)
        assert inner is not None
        yield from leaves(f"{name} {one}", inner)


def test_every_command_has_examples_and_can_write_json() -> None:
    # A worker runs until it is stopped.
    silent = {"headgate worker"}
    for name, command in leaves("headgate", cli):
        assert "Examples:" in (command.epilog or ""), name
        options = {opt for parameter in command.params for opt in parameter.opts}
        assert "--json" in options or name in silent, name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert f"_HEADGATE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_the_shell_completes_commands_and_options() -> None:
    def completed(words: str, index: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", "from headgate.cli.main import main; main()"],
            env={
                **os.environ,
                "_HEADGATE_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(index),
            },
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "plain,submit" in completed("headgate sub", 1)
    assert "plain,--priority" in completed("headgate submit --prio", 2)
