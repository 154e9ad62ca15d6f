"""`headgate config` as a person meets it: what it prints, what it refuses, what it hides."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headgate.cli.main import run
from headgate.config import SchedulerSettings
from headgate.config.example import example

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a working directory of its own, without a file."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(here: Path, text: str) -> None:
    (here / "headgate.toml").write_text(text)


def test_check_says_ok_and_counts_what_there_is(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    projects = "\n".join(f"[projects.p{number}]" for number in range(7))
    write(here, f"{projects}\n[scheduler]\nglobal_budget = 5\n[agents.a]\ntype = 'claude'")
    assert run(["config", "check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "headgate.toml: ok",
        "  settings     number  names",
        "  projects     8       p0, p1, p2, p3, p4, p5 and 2 more",
        "  agents       1       a",
        "  targets      1       echo",
        "  budgets      1       root",
        "  prices       0",
        "  rate limits  0",
        "  slots        0",
        "  upstreams    2       anthropic, openai",
        "  models       0",
    ]


def test_check_without_a_file_checks_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check"]) == 0
    assert capsys.readouterr().out.startswith("no headgate.toml here, all defaults: ok\n")


def test_check_writes_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, "[rate_limits.claude]\ntokens_per_day = 5")
    assert run(["config", "check", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("warnings")[0].startswith("rate_limits.claude: no agent type")
    assert printed == {
        "file": "headgate.toml",
        "ok": True,
        "projects": ["default"],
        "agents": [],
        "targets": ["echo"],
        "budgets": [],
        "prices": [],
        "rate_limits": ["claude"],
        "slots": [],
        "upstreams": ["anthropic", "openai"],
        "models": [],
        "problems": [],
    }


UNKNOWN = "scheduler.max_inflght: is not a setting; did you mean max_inflight?"
WRONG = [
    (
        "[scheduler]\nmax_inflght = 5",
        UNKNOWN + " (headgate.toml, line 2)",
    ),
    (
        "[scheduler",
        "headgate.toml, line 1, column 11: Expected ']' at the end of a table declaration",
    ),
    (
        '[agents."\\u001b[31m"]',
        'agents."\\u001b[31m": a name has 1 to 128 characters, all of them printable',
    ),
]


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize(("text", "line"), WRONG)
def test_a_wrong_file_is_one_line_and_exit_code_two(
    command: str, text: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, text)
    assert run(["config", command, "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"headgate: {line}\n"


MANY = """\
[schedular]
max_inflight = 4
[server]
port = "x"
prt = 7421
[projects.a]
credit_weight = -1
budget_limt = 5
[[slots]]
name = "work"
provider = "zai"
key_env = "KEY"
[[slots]]
name = "work"
provider = "zai"
key_env = "KEY"
"""


def test_all_errors_of_a_file_are_told_at_once_in_its_order(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, MANY)
    assert run(["config", "check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = ["schedular", "server.port", "server.prt"]
    keys += ["projects.a.credit_weight", "projects.a.budget_limt", "slots[1].name"]
    assert [line.removeprefix("headgate: ").partition(": ")[0] for line in lines] == keys
    assert [line.rpartition("line ")[2] for line in lines] == [f"{n})" for n in (1, 4, 5, 7, 8, 14)]
    assert run(["up"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == len(lines)


DOUBTFUL = """\
[server]
port = "x"
[agents.a]
target = "ecco"
[agents.b]
target = "nowhere"
[budgets."project:a"]
window = "dy"
limit_usd = 5
[budgets.root]
[upstreams.openai]
kind = "openai"
slots = ["one"]
[models.small]
route = ["nobody/x", "openai/y"]
"""


def test_what_does_not_go_together_is_told_beside_wrong_values(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, DOUBTFUL)
    assert run(["config", "check"]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = ["server.port", "agents.a.target", "agents.b.target", 'budgets."project:a".window']
    keys += ["budgets.root", "upstreams.openai.slots[0]", "models.small.route[0]"]
    assert [line.removeprefix("headgate: ").partition(": ")[0] for line in lines] == keys
    assert "there is no target 'ecco'; did you mean echo?" in lines[1]


def test_what_depends_on_a_table_that_cannot_be_read_is_not_judged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot = '[[slots]]\nname = "one"\nprovider = 5\nkey_env = "KEY"\n'
    write(here, f'{slot}[upstreams.openai]\nkind = "openai"\nslots = ["one"]\n')
    assert run(["config", "check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headgate: slots.one.provider: must be ")


def test_check_refuses_what_the_executor_of_a_target_would(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, '[targets.a]\nkind = "command"\ncommand = ["run", "{taskId}"]')
    assert run(["config", "check"]) == 2
    line = "headgate: targets.a.command: {taskId} is not filled in a command"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize("name", ["HEADGATE_PORT", "HEADGATE_SERVER_PORT"])
def test_a_variable_that_was_meant_for_a_setting_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "8080")
    for other in ("HEADGATE_OF_MY_OWN", "HEADGATE_URL", "HEADGATE_TOKEN", "HEADGATE_LOG_LEVEL"):
        monkeypatch.setenv(other, "info")
    assert run(["config", "check", "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert warnings == [f"{name} has no effect; did you mean HEADGATE_SERVER__PORT?"]


def test_a_wrong_variable_is_one_line_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADGATE_SERVER__PROT", "5")
    assert run(["config", "check"]) == 2
    line = "HEADGATE_SERVER__PROT: is not a setting; did you mean port?"
    assert capsys.readouterr().err == f"headgate: {line}\n"


def test_a_named_file_that_is_missing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", "--config", "no.toml"]) == 2
    line = "no.toml: cannot be read: No such file or directory; name a file with --config"
    assert capsys.readouterr().err == f"headgate: {line}\n"


def test_a_variable_that_a_target_lacks_keeps_the_service_from_starting(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADGATE_TEST_TOKEN", raising=False)
    target = '[targets.a]\nkind = "command"\ncommand = ["run"]\nenv = { K = "{env.%s}" }'
    write(here, target % "HEADGATE_TEST_TOKEN")
    assert run(["config", "check"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "headgate: targets.a: the service does not start without HEADGATE_TEST_TOKEN in its "
        "environment; set it where you start it\n"
    )
    assert said.out.startswith("headgate.toml: headgate up would not start here\n")
    assert run(["config", "check", "--file-only"]) == 0
    assert capsys.readouterr().err == ""
    assert run(["config", "check", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False
    monkeypatch.setenv("HEADGATE_TEST_TOKEN", "any")
    assert run(["config", "check"]) == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[store]\nurl = "mysql://h/d"', "store.url: 'mysql' is not a scheme"),
        ('[store]\nurl = "postgresql://h/d?no=1"', "url: is not a PostgreSQL URL"),
        ('[ledger]\nurl = "redis://h/first"', "url: the database, "),
        ('[ledger]\nurl = "redis+sentinel://h:26379"', "url: the name of the service follows"),
        ('[ledger]\nurl = "redis+cluster://h:p"', "url: the host and the port cannot be read"),
        ('[ledger]\nurl = "redis+other://h"', "ledger.url: 'redis+other' is not a scheme for it"),
        (
            '[upstreams.a]\nkind = "openai"\nslots = ["nowhere"]',
            "upstreams.a.slots[0]: no [[slots]] has the name 'nowhere'",
        ),
        (
            '[targets.a]\nkind = "callable"\nentry_point = "nowhere:run"',
            "targets.a.entry_point: nowhere cannot be imported",
        ),
    ],
)
def test_check_refuses_what_up_would_refuse(
    text: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, text)
    assert run(["config", "check"]) == 2
    assert capsys.readouterr().err.startswith(f"headgate: {line}")


def test_check_contacts_nobody(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        place = f"127.0.0.1:{server.getsockname()[1]}"
        write(
            here,
            f"""
            [store]
            url = "postgresql://{place}/tasks"
            [ledger]
            url = "redis+sentinel://{place}/service/0"
            [upstreams.near]
            kind = "openai"
            base_url = "http://{place}"
            [targets.near]
            kind = "http"
            url = "http://{place}"
            """,
        )
        assert run(["config", "check"]) == 0
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.name for path in here.iterdir()] == ["headgate.toml"]


def test_check_takes_the_file_as_an_argument(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "other.toml").write_text("[projects.a]")
    assert run(["config", "check", "other.toml"]) == 0
    assert capsys.readouterr().out.startswith("other.toml: ok\n")
    assert run(["config", "check", "other.toml", "--config", "other.toml"]) == 2
    assert "name the file once" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["-"]])
@pytest.mark.parametrize(
    ("text", "code", "out", "err"),
    [
        ("[projects.a]", 0, "standard input: ok\n", ""),
        (
            "[projects",
            2,
            "",
            (
                "headgate: standard input, line 1, column 10: "
                "Expected ']' at the end of a table declaration\n"
            ),
        ),
    ],
)
def test_check_reads_what_is_piped_into_it(
    arguments: list[str], text: str, code: int, out: str, err: str, here: Path
) -> None:
    write(here, "this is not read")
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "config", "check", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, err)
    assert done.stdout.startswith(out)


def test_with_nothing_on_its_input_check_reads_the_file_here(here: Path) -> None:
    write(here, "[projects.a]")
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "config", "check"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("headgate.toml: ok\n")


def test_show_has_every_key_with_its_origin(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_SCHEDULER__MAX_INFLIGHT", "5")
    write(here, "[server]\nport = 8080")
    assert run(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["server.port"] == {"value": 8080, "origin": "headgate.toml"}
    assert shown["scheduler.max_inflight"] == {
        "value": 5,
        "origin": "HEADGATE_SCHEDULER__MAX_INFLIGHT",
    }
    assert shown["server.host"] == {"value": "127.0.0.1", "origin": "default"}
    assert {f"scheduler.{name}" for name in SchedulerSettings.__struct_fields__} <= set(shown)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_show_hides_secrets(
    arguments: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        here,
        """
        [store]
        url = "postgresql://headgate:hunter2@db/tasks?sslpassword=hunter2"
        [targets.a]
        kind = "http"
        url = "http://h/?token=hunter2"
        headers = { Authorization = "Bearer hunter2", Other = "Bearer {env.TOKEN}" }
        """,
    )
    assert run(["config", "show", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert "postgresql://***@db/tasks" in printed
    assert "Bearer {env.TOKEN}" in printed


def test_show_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["key", "value", "from"]
    assert ["scheduler.strategy", "fair-fifo", "default"] in lines


def test_example_prints_a_file_that_check_accepts(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "example"]) == 0
    printed = capsys.readouterr().out
    assert printed == example() == (DOCS / "examples/headgate.toml").read_text()
    write(here, printed)
    assert run(["config", "check"]) == 0


def test_example_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "example", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == tomllib.loads(example())


def test_a_budget_of_a_project_that_is_not_configured_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headgate.toml"
    budget = '[budgets."{}"]\nlimit_usd = "1"\n'
    scopes = ("project:alpha/session:s", "project:alhpa", "session:s")
    file.write_text("[projects.alpha]\n" + "".join(map(budget.format, scopes)))
    assert run(["config", "check", "--config", str(file)]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert "there is no project 'alhpa'" in warning


def test_a_setting_is_explained_with_its_range_and_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["config", "explain", "scheduler.max_wait_ticks"]) == 0
    section, key, meaning = capsys.readouterr().out.splitlines()
    assert section == "[scheduler]"
    assert key == "  max_wait_ticks: a whole number from 1 to 1,000,000,000,000,000; default: 1000"
    assert meaning.startswith("    A lane goes first")


def test_every_setting_is_explained_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "explain", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 150
    assert all(line["meaning"] for line in lines)
    assert {"[scheduler]", "[[slots]]", 'kind = "http"'} <= {line["section"] for line in lines}


def test_a_section_is_explained_whole_and_an_unknown_word_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["config", "explain", "dashboard"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "[dashboard]"
    assert run(["config", "explain", "max_wait_tick"]) == 0
    assert run(["config", "explain", "queue_shear"]) == 2
    assert "did you mean queue_share?" in capsys.readouterr().err


def test_a_word_that_is_a_section_and_a_key_is_explained_as_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["config", "explain", "slots", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = {(one["section"], one["key"]) for one in found}
    assert {("[[slots]]", "provider"), ("[upstreams.NAME]", "slots")} <= shown
    assert {section for section, _ in shown} == {"[[slots]]", "[upstreams.NAME]"}
