"""The commands that operate a service: its things, budgets, reload, audit, backup, doctor."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace

from cli.said import Command, Said
from cli.top.test_rows import stats
from headgate import SyncClient
from headgate.api.schema.tasks import StoppedBody
from headgate.cli.main import run
from headgate.cli.stats import held_back
from headgate.storage.data_lock import hold_directory, is_held
from service.support import ECHO_TARGET, ServiceProcess, running_service

SETTINGS = f"""{ECHO_TARGET}
[scheduler]
max_inflight = 5

[projects.evals]

[budgets."project:evals"]
limit_usd = "5"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ServiceProcess]:
    settings = folder / "headgate.toml"
    settings.write_text(SETTINGS)
    data = str(folder / "data")
    with running_service(folder, "--config", str(settings), "--data", data) as process:
        yield process


@pytest.fixture
def headgate(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Said(code, out, err)

    return call


@pytest.fixture
def admin(headgate: Command, service: ServiceProcess, folder: Path) -> Command:
    options = ("--url", service.address, "--data", folder / "data")
    return lambda *arguments: headgate(*arguments, *options)


def test_reload_prints_what_changed(admin: Command, folder: Path) -> None:
    settings = folder / "headgate.toml"
    settings.write_text(SETTINGS.replace("max_inflight = 5", "max_inflight = 6"))
    assert admin("reload", "--json").json["changed"] in (
        [{"key": "scheduler.max_inflight", "from": 5, "to": 6}],
        [],
    )
    settings.write_text("[scheduler]\nmax_inflight = 'x'\n")
    said = admin("reload")
    assert said.code != 0
    assert "scheduler.max_inflight: must be a whole number" in said.err
    settings.write_text(SETTINGS)
    assert admin("reload").code == 0
    assert admin("reload").out == "nothing has changed\n"


def test_reload_warns_of_a_budget_whose_project_does_not_exist(
    admin: Command, folder: Path
) -> None:
    settings = folder / "headgate.toml"
    settings.write_text(f"{SETTINGS}[budgets.'project:eval']\nlimit_usd = '1'\n")
    said = admin("reload")
    settings.write_text(SETTINGS)
    assert admin("reload").err == ""
    warning = "headgate: warning: budgets.\"project:eval\": there is no project 'eval'"
    assert (said.code, said.err[: len(warning)]) == (0, warning)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("submit", "x", "--project", "evalz"), "There is no project evalz; did you mean evals?"),
        (
            ("submit", "x", "--agent", "a", "--target", "ecco"),
            "There is no target ecco; did you mean echo?",
        ),
        (
            ("token", "create", "t", "--project", "evalz"),
            "There is no project evalz; did you mean evals?",
        ),
        (("submit", "x", "--project", "q"), "There is no project q. Projects: evals, default."),
    ],
)
def test_a_request_with_an_unknown_name_is_answered_with_those_that_there_are(
    admin: Command, arguments: tuple[str, ...], line: str
) -> None:
    said = admin(*arguments)
    assert (said.code, said.out, said.err[: len(line) + 10]) == (2, "", f"headgate: {line}")


def test_whoever_may_not_list_projects_hears_what_the_service_says(
    admin: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = admin("token", "create", "narrow", "--permission", "submit", "--json").json
    monkeypatch.setenv("HEADGATE_TOKEN", made["token"])
    said = admin("submit", "x", "--project", "evalz")
    assert (said.code, said.err) == (2, "headgate: unknown project 'evalz'\n")


def test_the_service_is_paused_and_resumed(admin: Command) -> None:
    paused = "The service is paused: no task starts. headgate service resume ends this."
    assert admin("service", "pause").out == f"{paused}\n"
    assert admin("stats", "--json").json["paused"] is True
    assert admin("stats").out.splitlines()[0] == paused
    assert admin("service", "resume", "--json").json == {"paused": False}
    assert admin("service", "resume").out == "The service is active.\n"
    assert "paused" not in admin("stats").out


def test_a_new_agent_is_said_to_be_new_with_the_nearest_and_how_to_remove_it(
    admin: Command,
) -> None:
    first = admin("agent", "set", "reviewer", "--capacity", "2")
    assert first.out.startswith("Added agent reviewer at http")
    typo = admin("agent", "set", "reviwer", "--capacity", "3", "--accepts-open")
    assert typo.out.startswith("Added agent reviwer at http")
    remove = "headgate agent set reviwer --reset capacity --reset accepts-open removes it again."
    assert typo.err == f"headgate: reviwer is a new agent; did you mean reviewer? {remove}\n"
    again = admin("agent", "set", "reviwer", "--reset", "capacity", "--reset", "accepts-open")
    assert (again.code, again.err) == (0, "")
    assert admin("agent", "show", "reviwer").code == 2
    assert admin("agent", "set", "reviwer", "--reset", "capacity").code == 2
    known = admin("agent", "set", "reviewer", "--capacity", "4")
    assert known.out.startswith("Changed agent reviewer at http")
    assert known.err == ""
    admin("agent", "set", "reviewer", "--reset", "capacity")


def test_how_to_remove_an_agent_can_be_pasted_into_a_shell(admin: Command) -> None:
    name = "the reviewer's"
    said = admin("agent", "set", name, "--capacity", "2").err
    command = said.partition("headgate agent")[2].partition(" removes it again")[0]
    assert shlex.split(command) == ["set", name, "--reset", "capacity"]
    admin("agent", "set", name, "--reset", "capacity")


def test_stats_name_few_of_many_that_are_paused() -> None:
    stopped = [StoppedBody(kind="agent", name=f"a{n}", status="paused") for n in range(13)]
    (line,) = held_back(replace(stats(done=0), stopped=stopped))
    assert line.startswith("Paused: agent a0, agent a1, ")
    assert line.endswith(", agent a9 and 3 more.")


THINGS = [("project", "evals"), ("agent", "coder"), ("target", "echo")]


@pytest.mark.parametrize(("noun", "name"), THINGS)
def test_one_thing_is_paused_drained_and_resumed(admin: Command, noun: str, name: str) -> None:
    if noun == "agent":
        assert admin("agent", "set", name, "--capacity", "2").code == 0
    title = f"{noun.capitalize()} {name}"
    assert admin(noun, "pause", name).out == (
        f"{title} is paused: none of its waiting tasks start; running ones go on. "
        f"headgate {noun} resume {name} ends this.\n"
    )
    assert admin(noun, "show", name, "--json").json["status"] == "paused"
    assert admin("stats").out.splitlines()[0] == f"Paused: {noun} {name}."
    drained = f"{title} drains: it accepts no new tasks and finishes those it has.\n"
    assert admin(noun, "drain", name).out == drained
    assert admin("stats").out.splitlines()[0] == f"Draining: {noun} {name}."
    assert admin(noun, "resume", name).out == f"{title} is active.\n"
    assert "status" in admin(noun, "show", name).out
    assert name in admin(noun, "list").out
    assert name in [one["id"] for one in admin(noun, "list", "--json").lines]


@pytest.mark.parametrize("verb", ["show", "pause", "resume", "drain"])
@pytest.mark.parametrize(
    ("noun", "name", "line"),
    [
        (
            "project",
            "evalz",
            (
                "There is no project evalz; did you mean evals? Projects: evals, default. Add one "
                "as [projects.evalz] in the settings file, then run headgate reload."
            ),
        ),
        (
            "target",
            "ecco",
            (
                "There is no target ecco; did you mean echo? Targets: pull, gateway, echo. Add "
                "one as [targets.ecco] in the settings file, then run headgate reload."
            ),
        ),
    ],
)
def test_an_unknown_name_is_answered_with_those_that_there_are(
    admin: Command, noun: str, name: str, line: str, verb: str
) -> None:
    assert admin(noun, verb, name) == Said(2, "", f"headgate: {line}\n")


def test_an_agent_that_nobody_knows_is_not_paused_by_mistake(admin: Command) -> None:
    admin("agent", "set", "coder", "--capacity", "2")
    refused = admin("agent", "pause", "kodar")
    assert (refused.code, refused.out) == (2, "")
    assert "There is no agent kodar;" in refused.err
    assert "headgate agent set kodar --capacity N" in refused.err


def test_a_project_and_an_agent_are_changed_until_the_file_says_otherwise(admin: Command) -> None:
    changed = admin("project", "set", "evals", "--weight", "3", "--max-agents", "4", "--json").json
    assert (changed["creditWeight"], changed["maxConcurrentAgents"]) == (3.0, 4)
    free = admin("project", "set", "evals", "--max-agents", "none", "--reset", "weight", "--json")
    assert (free.json["creditWeight"], free.json["maxConcurrentAgents"]) == (1.0, None)
    assert admin("project", "set", "evals").err.startswith("headgate: options: say what to change")
    assert "neither a number nor none" in admin("project", "set", "evals", "--max-agents", "x").err
    agent = admin("agent", "set", "coder", "--capacity", "5", "--accepts-open", "--json").json
    assert (agent["capacity"], agent["acceptsOpen"]) == (5, True)
    said = admin("agent", "set", "coder", "--reset", "capacity", "--reset", "accepts-open").out
    assert said.startswith("Changed agent coder at http://")


def test_a_model_is_shown_with_its_route(admin: Command) -> None:
    shown = admin("model", "show", "gpt-5", "--json").json
    assert shown["route"] == ["anthropic/gpt-5", "openai/gpt-5"]
    assert admin("model", "list").out.split()[-2:] == ["anthropic/*,", "openai/*"]


def test_closures_lists_what_is_closed_and_resume_opens_it(admin: Command) -> None:
    assert admin("closures").out == "Nothing is closed.\n"
    admin("target", "pause", "echo")
    table = admin("closures").out
    assert "operator" in table
    assert "paused by an administrator" in table
    assert admin("closures", "--json").json["kind"] == "target"
    assert "1 closure keeps tasks waiting; headgate closures lists them." in admin("stats").out
    assert admin("target", "resume", "echo").out == "Target echo is active.\n"
    assert admin("closures").out == "Nothing is closed.\n"
    opened = admin("budget", "resume", "project:evals").out
    assert opened.startswith("Budget project:evals is open until it has no room")
    unknown = admin("budget", "resume", "project:nobody")
    assert (unknown.code, unknown.out) == (2, "")
    assert unknown.err.startswith("headgate: There is no budget project:nobody.")
    refused = admin("slot", "resume", "nowhere")
    assert (refused.code, "There is no slot nowhere." in refused.err) == (2, True), refused


def test_budgets_of_a_service_are_set_listed_shown_and_deleted(
    admin: Command, service: ServiceProcess
) -> None:
    at = f"at {service.address}"
    said = admin("budget", "set", "--session", "eval-1", "--limit-usd", "20", "--window", "day")
    assert said.out == f"Set budget session:eval-1 to $20.00, counted by the day of UTC, {at}\n"
    rows = {one["scope"]: one for one in admin("budget", "list", "--json").lines}
    assert rows["session:eval-1"]["limitUsd"] == "20.00"
    assert rows["project:evals"]["limitUsd"] == "5.00"
    assert "session:eval-1" in admin("budget", "list").out
    status = admin("budget", "status", "--session", "eval-1").out.splitlines()
    assert status[0] == "Spent: $0.00 / $20.00 (0.0%)"
    assert "more room at" in status[-1]
    assert admin("budget", "delete", "session:eval-1").out.startswith(
        f"Deleted budget session:eval-1 {at}: "
    )
    assert "session:eval-1" not in admin("budget", "list").out
    gone = admin("budget", "delete", "session:eval-1")
    assert (gone.code, gone.out) == (2, "")
    assert "Budgets: project:evals." in gone.err


def test_a_budget_is_not_listed_around_itself_for_whom_nothing_else_may_be_seen(
    admin: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = admin("token", "create", "evals", "--project", "evals", "--json").json
    monkeypatch.setenv("HEADGATE_TOKEN", made["token"])

    def around(*scope: str) -> list[str]:
        _, _, listed = admin("budget", "status", *scope).out.partition("Budgets around it:\n")
        return [line.strip().partition(": ")[0] for line in listed.splitlines()]

    assert around() == around("project:evals") == []
    assert around("project:evals/session:a") == ["project:evals"]


def test_reservations_of_a_service_are_extended_released_and_adjusted(
    admin: Command, service: ServiceProcess
) -> None:
    with SyncClient(service.address) as client:
        client.reserve("call-1", "project:evals", usd="1.50")
    (entry, *_) = admin("budget", "journal", "project:evals", "--json").lines
    name = entry["reservationId"]
    extended = admin("budget", "extend", name, "--for", "2h", "--utc").out
    assert extended.startswith(f"Extended {name} until ")
    assert extended.endswith(f" UTC, at {service.address}\n")
    released = admin("budget", "release", name, "--yes", "--reason", "not billed")
    assert released.out == f"Released {name} at {service.address}\n"
    assert admin("budget", "release", "never", "--yes").code == 2
    adjust = ["budget", "adjust", "project:evals", "--usd", "2"]
    assert admin(*adjust).err.startswith("headgate: --reason: say why")
    said = admin(*adjust, "--reason", "an invoice").out
    assert said.startswith(f"Adjusted project:evals at {service.address}: $2.00 spent")
    assert admin("budget", "adjust", "project:evals", "--usd=-2", "--reason", "back").code == 0
    actions = [one["action"] for one in admin("audit", "--limit", "4", "--json").lines]
    assert actions == ["budget.adjust", "budget.adjust", "budget.release", "budget.extend"]


def test_a_typo_in_a_budget_is_a_warning_at_submit(admin: Command, service: ServiceProcess) -> None:
    admin("budget", "set", "session:nightly", "--limit-usd", "5")
    line = (
        "headgate: warning: Budget 'session:nightly2' is not defined, so nothing limits it; "
        "did you mean session:nightly?\n"
    )
    said = admin("submit", "read", "--agent", "a", "--scope", "session:nightly2")
    assert (said.code, said.err) == (0, line)
    task = '{"agentId": "a", "action": "read", "scopes": ["session:nightly2"]}'
    many = subprocess.run(
        [sys.executable, "-m", "headgate", "submit", "-", "--json", "--url", service.address],
        input=f"{task}\n{task}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert many.stderr.count(line) == 1
    admin("budget", "delete", "session:nightly")


def test_audit_prints_who_changed_what(admin: Command) -> None:
    admin("agent", "set", "coder", "--capacity", "2")
    admin("agent", "pause", "coder")
    admin("agent", "resume", "coder")
    printed = admin("audit", "--limit", "2", "--json").out
    entries = [json.loads(line) for line in printed.splitlines()]
    assert [one["action"] for one in entries] == ["agent.patch", "agent.patch"]
    line = admin("audit", "--limit", "1").out.splitlines()[-1]
    assert "agent.patch" in line
    assert 'agents.coder.status: "paused" → "active"' in line


def test_a_backup_of_a_running_service_can_be_restored(
    headgate: Command, service: ServiceProcess, folder: Path, tmp_path: Path
) -> None:
    task = service.submit()
    service.wait_for(task)
    copy = tmp_path / "copy.db"
    assert headgate("backup", copy, "--data", folder / "data").code == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.db"]
    again = headgate("backup", copy, "--data", folder / "data")
    assert (again.code, "give --force" in again.err) == (2, True)
    assert headgate("backup", copy, "--force", "--data", folder / "data").code == 0
    held = headgate("restore", copy, "--force", "--data", folder / "data")
    assert (held.code, "is in use by process" in held.err) == (1, True)
    elsewhere = tmp_path / "other"
    assert headgate("restore", copy, "--data", elsewhere).code == 0
    with running_service(tmp_path, "--data", str(elsewhere)) as other:
        assert other.task(task)["state"] == "done"


def test_a_restore_keeps_what_was_there_before(headgate: Command, tmp_path: Path) -> None:
    data = tmp_path / "data"
    copy = tmp_path / "copy.db"
    found(copy)
    done = headgate("restore", copy, "--data", data)
    assert done.code == 0
    assert done.out.endswith(f"Start the service with headgate up --data {data}.\n")
    assert headgate("restore", copy, "--data", data).code == 2
    said = headgate("restore", copy, "--force", "--data", data, "--json").json
    assert Path(said["aside"]).exists()
    assert stat.S_IMODE((data / "headgate.db").stat().st_mode) == 0o600


def found(path: Path, *, version: int = 1) -> None:
    with apsw.Connection(str(path)) as connection:
        connection.execute("CREATE TABLE headgate_schema (part TEXT, version INTEGER)")
        connection.execute("INSERT INTO headgate_schema VALUES ('tasks', ?)", (version,))
    connection.close()


def crashed(data: Path) -> None:
    """Leave a store as a killed process does: what was written last is in the log alone."""
    data.mkdir()
    store, kept = data / "headgate.db", data.parent / "kept"
    kept.mkdir()
    connection = apsw.Connection(str(store))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE written (x); INSERT INTO written VALUES ('last')")
    for side in ("", "-wal", "-shm"):
        shutil.copyfile(f"{store}{side}", kept / f"headgate.db{side}")
    connection.close()
    for path in kept.iterdir():
        path.replace(data / path.name)


def written_in(store: Path) -> list[str]:
    with apsw.Connection(str(store)) as connection:
        rows = [row[0] for row in connection.execute("SELECT x FROM written")]
    connection.close()
    return rows


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("broken", ["shutil.copyfile", "os.link", "pathlib.Path.replace"])
def test_a_restore_that_fails_leaves_the_store_as_it_was(
    headgate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    found(copy)
    crashed(data)
    with monkeypatch.context() as patched:
        patched.setattr(broken, no_space)
        if broken == "os.link":
            # Where a file cannot have two names it is copied, which fails here as well.
            patched.setattr("shutil.copy2", no_space)
        said = headgate("restore", copy, "--force", "--data", data)
    store = data / "headgate.db"
    assert said.code == 1
    assert said.err == f"headgate: {store} cannot be written: No space left on device\n"
    assert written_in(store) == ["last"]
    assert [path.name for path in data.glob("*before*")] == []
    assert [path.name for path in data.glob("*unfinished*")] == []


KILLED = """
import os, pathlib, sys
pathlib.Path.replace = lambda *_: os._exit(9)
from headgate.cli.main import run
run(sys.argv[1:])
"""


def test_a_restore_that_is_killed_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    found(copy)
    crashed(data)
    command = ["restore", str(copy), "--force", "--data", str(data)]
    assert subprocess.run([sys.executable, "-c", KILLED, *command], check=False).returncode == 9
    assert written_in(data / "headgate.db") == ["last"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_a_log_had_is_set_aside_with_its_store(
    headgate: Command, tmp_path: Path, is_damaged: bool
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    found(copy)
    crashed(data)
    store = data / "headgate.db"
    if is_damaged:
        for side in ("", "-wal"):
            Path(f"{store}{side}").write_bytes(b"\xff" * 4096)
    said = headgate("restore", copy, "--force", "--data", data, "--json")
    aside = Path(said.json["aside"])
    if is_damaged:
        assert aside.read_bytes() == b"\xff" * 4096
    else:
        assert written_in(aside) == ["last"]
    with apsw.Connection(str(store)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").get == "headgate_schema"
    connection.close()


def test_what_is_no_copy_of_a_store_is_not_restored(headgate: Command, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("text", "other", "newer", "missing", "torn")}
    files["text"].write_text("not a database at all, but long enough to look like a file")
    with apsw.Connection(str(files["other"])) as connection:
        connection.execute("CREATE TABLE something (x)")
    connection.close()
    found(files["newer"], version=10_000)
    found(files["torn"])
    files["torn"].write_bytes(files["torn"].read_bytes()[:5_000] + b"\xff" * 3_000)
    told = {}
    for name, path in files.items():
        said = headgate("restore", path, "--data", tmp_path / "data")
        assert said.code in (1, 2), path
        assert said.err.count("\n") == 1, said.err
        told[name] = said.err
    assert not (tmp_path / "data" / "headgate.db").exists()
    assert "install a newer headgate" in told["newer"]


def test_a_store_in_postgresql_is_for_its_own_tools(headgate: Command, tmp_path: Path) -> None:
    said = headgate("backup", tmp_path / "x", "--store", "postgresql://h/d")
    assert (said.code, "use pg_dump" in said.err) == (2, True)
    assert headgate("backup", tmp_path / "x", "--store", "memory:").code == 2
    assert headgate("backup", tmp_path / "x", "--data", tmp_path / "none").code == 2


def verdicts(said: Said) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in said.json["checks"]}


def test_doctor_finds_a_service_well(
    headgate: Command, service: ServiceProcess, folder: Path
) -> None:
    config = folder / "headgate.toml"
    said = headgate("doctor", "--config", config, "--data", folder / "data", "--json")
    assert said.code == 0, said.out
    assert set(verdicts(said).values()) == {"ok"}
    assert any(f"process {service.pid} uses it" == one["found"] for one in said.json["checks"])


def test_doctor_asks_a_running_service_for_its_variables(
    headgate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is one that the system chose, and the data directory has it."""
    config, data = tmp_path / "headgate.toml", tmp_path / "data"
    target = '[targets.{0}]\nkind = "command"\ncommand = ["true"]\nenv = {{ K = "{{env.{1}}}" }}\n'
    config.write_text(target.format("one", "ONLY_THERE"))
    monkeypatch.setenv("ONLY_THERE", "a-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-…")
    with running_service(tmp_path, "--config", str(config)):
        monkeypatch.delenv("ONLY_THERE")
        monkeypatch.delenv("OPENAI_API_KEY")
        said = headgate("doctor", "--config", config, "--data", data, "--json")
        found = {one["check"]: one["found"] for one in said.json["checks"]}
        assert found["target one"].startswith("ONLY_THERE is set where the service runs;")
        assert "does not hold just a key" in found["upstream openai"]
        assert headgate("project", "list", "--data", data).code == 0
    said = headgate("doctor", "--config", config, "--data", data, "--json")
    found = {one["check"]: one["found"] for one in said.json["checks"]}
    assert found["target one"] == "ONLY_THERE is not set in this shell"


def test_doctor_says_what_would_keep_a_service_from_its_work(
    headgate: Command, tmp_path: Path
) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text(
        """
[targets.gone]
kind = "command"
command = ["no-such-program-anywhere"]
[targets.keyless]
kind = "http"
url = "http://127.0.0.1:1/"
headers = { authorization = "Bearer {env.NO_SUCH_KEY}" }
[targets.away]
kind = "http"
url = "http://127.0.0.1:1/"
[targets.unwritten]
kind = "callable"
entry_point = "no_such_module:work"
[rate_limits.nobody]
requests_per_minute = 5
[ledger]
url = "redis://127.0.0.1:1/0"
"""
    )
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    (data / "token").write_text("x")
    (data / "token").chmod(0o644)
    said = headgate("doctor", "--config", config, "--data", data, "--json")
    assert said.code == 1
    found = verdicts(said)
    assert {name for name, verdict in found.items() if verdict == "fail"} == {
        "target gone",
        "target keyless",
        "target unwritten",
        "token",
        "ledger",
    }
    assert (found["directory"], found["target away"]) == ("warn", "warn")
    table = headgate("doctor", "--config", config, "--data", data).out
    assert "no-such-program-anywhere cannot be run" in table


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a command as another user")
def test_doctor_says_which_secrets_the_user_of_a_command_could_read(headgate: Command) -> None:
    target = '[targets.it]\nkind = "command"\ncommand = ["true"]\nrun_as = "nobody"\n'
    # The folder of a test is for its user alone.
    with tempfile.TemporaryDirectory() as made:
        config, data = Path(made) / "headgate.toml", Path(made) / "data"
        Path(made).chmod(0o755)
        config.write_text(target)
        data.mkdir()
        (data / "token").write_text("x")
        (data / "token").chmod(0o600)
        config.chmod(0o600)
        data.chmod(0o700)
        said = headgate("doctor", "--config", config, "--data", data, "--json")
        assert verdicts(said)["run_as it"] == "ok"
        config.chmod(0o644)
        data.chmod(0o744)
        said = headgate("doctor", "--config", config, "--data", data, "--json")
        assert verdicts(said)["run_as it"] == "fail"
        [line] = [one for one in said.json["checks"] if one["check"] == "run_as it"]
        assert line["found"] == f"the user nobody may read {data}, {config}"
        config.write_text(target.replace("nobody", "no-such-user"))
        refused = headgate("config", "check", "--config", config)
        assert refused.code != 0
        assert "targets.it.run_as: there is no user 'no-such-user'" in refused.err + refused.out


def test_doctor_says_first_which_service_it_looks_at(
    headgate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_URL", "http://127.0.0.1:9")
    first = headgate("doctor", "--data", tmp_path, "--json").json["checks"][0]
    assert (first["check"], first["verdict"]) == ("service", "warn")
    assert first["found"] == (
        f"{tmp_path} and http://127.0.0.1:7420 are checked; HEADGATE_URL names another"
    )
    monkeypatch.setenv("HEADGATE_URL", "http://127.0.0.1:7420/")
    again = headgate("doctor", "--data", tmp_path, "--json").json["checks"][0]
    assert (again["check"], again["verdict"]) == ("service", "ok")


def test_a_service_whose_database_is_elsewhere_is_found_by_its_data_directory(
    headgate: Command, tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'elsewhere' / 'tasks.db'}"
    with running_service(tmp_path, "--store", store) as service:
        for directory in (tmp_path / "data", tmp_path / "elsewhere"):
            said = headgate("budget", "list", "--data", directory)
            assert said.code == 0
            assert f"There are no budgets at {service.address}." in said.err


def test_doctor_names_settings_that_cannot_be_used(headgate: Command, tmp_path: Path) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text("[scheduler]\nmax_inflight = -1\n")
    said = headgate("doctor", "--config", config, "--data", tmp_path, "--json")
    assert (said.code, verdicts(said)) == (1, {"settings": "fail"})


def test_doctor_warns_of_a_budget_whose_project_does_not_exist(
    headgate: Command, tmp_path: Path
) -> None:
    config = tmp_path / "headgate.toml"
    config.write_text("[projects.search]\n[budgets.'project:serch']\nlimit_usd = '1'\n")
    checks = headgate("doctor", "--config", config, "--data", tmp_path, "--json").json["checks"]
    found = [one for one in checks if one["check"] == "settings" and one["verdict"] == "warn"]
    assert [one["found"] for one in found] == ['budgets."project:serch"']
    assert "there is no project 'serch'" in found[0]["advice"]


@pytest.mark.parametrize("content", [b"\xff" * 4096, b"SQLite format 3\x00" + b"\xff" * 8176])
def test_doctor_says_what_to_do_about_a_store_that_is_damaged(
    headgate: Command, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "headgate.db").write_bytes(content)
    said = headgate("doctor", "--data", tmp_path, "--json")
    store = next(one for one in said.json["checks"] if one["check"] == "store")
    assert (said.code, store["verdict"]) == (1, "fail")
    assert "headgate restore" in store["advice"]


def test_doctor_refuses_a_store_of_a_newer_program(headgate: Command, tmp_path: Path) -> None:
    found(tmp_path / "headgate.db", version=10_000)
    said = headgate("doctor", "--data", tmp_path, "--json")
    assert verdicts(said)["store"] == "fail"


def test_doctor_asks_postgresql_for_its_version_and_clock(
    headgate: Command, postgres_url: str, tmp_path: Path
) -> None:
    said = headgate("doctor", "--store", postgres_url, "--data", tmp_path, "--json")
    assert (verdicts(said)["store"], verdicts(said)["clock"]) == ("warn", "ok")
    said = headgate("doctor", "--store", "postgresql://127.0.0.1:1/x", "--data", tmp_path, "--json")
    assert verdicts(said)["store"] == "fail"


def test_looking_whether_a_directory_is_held_does_not_change_it(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with hold_directory(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_a_budget_of_the_file_is_deleted_beside_it_and_reset(
    headgate: Command, service: ServiceProcess, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_URL", service.address)
    config = ("config", "show", "--config", folder / "headgate.toml", "--json")
    key = 'budgets."project:evals".limit_usd'
    assert json.loads(headgate(*config).out)[key]["value"] == "5"
    at = ("--url", service.address)
    deleted = headgate("budget", "delete", "project:evals", *at)
    assert deleted.out.splitlines()[1] == (
        "The settings file has $5.00; this overrides it. "
        "headgate budget reset project:evals brings it back"
    )
    assert headgate("budget", "list", *at).out == ""
    assert json.loads(headgate(*config).out)[key] == {"value": None, "origin": "override of 5"}
    reset = headgate("budget", "reset", "project:evals", *at)
    assert reset.out == (
        "Reset budget project:evals: the settings file gives it $5.00, at " + service.address + "\n"
    )
    assert "$5.00" in headgate("budget", "list", *at).out


def test_a_raised_limit_keeps_its_window(headgate: Command, service: ServiceProcess) -> None:
    at = ("--url", service.address)
    given = ("--limit-usd", "6", "--window", "day")
    assert headgate("budget", "set", "project:evals", *given, *at).code == 0
    raised = headgate("budget", "set", "project:evals", "--limit-usd", "7", *at)
    assert raised.out.splitlines() == [
        f"Set budget project:evals to $7.00, counted by the day of UTC, at {service.address}",
        "Before: $6.00, counted by the day of UTC",
    ]
    headgate("budget", "reset", "project:evals", *at)


def test_a_budget_is_made_strict(headgate: Command, service: ServiceProcess) -> None:
    at = ("--url", service.address)
    said = headgate("budget", "set", "project:evals", "--reserve", "strict", *at)
    assert said.out.splitlines()[1] == "Calls reserve the most that they can cost"
    with SyncClient(service.address) as client:
        (found,) = (one for one in client.list_budgets().budgets if one.scope == "project:evals")
        assert (found.reserve, found.overridden) == ("strict", ["reserve"])
    headgate("budget", "reset", "project:evals", *at)
    refused = headgate("budget", "set", "s:1", "--reserve", "strict", "--ledger", "budget.db")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--reserve: is for calls through a service" in refused.err


def test_a_raised_limit_keeps_the_window_that_a_client_set(
    headgate: Command, service: ServiceProcess
) -> None:
    with SyncClient(service.address) as client:
        client.create_budget("session:own", limit_usd="1", limit_tokens=9, window="week")
    raised = headgate("budget", "set", "session:own", "--limit-usd", "2", "--url", service.address)
    assert raised.out.startswith("Set budget session:own to $2.00 and 9 tokens, counted by the w")


def test_a_budget_of_a_project_that_does_not_exist_is_refused(
    headgate: Command, service: ServiceProcess
) -> None:
    at = ("--url", service.address)
    line = (
        "headgate: scope: there is no project 'eval'; did you mean evals? Projects: evals, default."
        " Add it as [projects.eval] in the settings file, then headgate reload\n"
    )
    said = headgate("budget", "set", "project:eval", "--limit-usd", "5", *at)
    assert (said.code, said.out, said.err) == (2, "", line)
    within = headgate("budget", "set", "project:eval/session:a", "--limit-tokens", "5", *at)
    assert (within.code, within.err) == (2, line)
    assert "project:eval " not in headgate("budget", "list", *at).out
    said = headgate("budget", "status", "project:eval", *at)
    warning = "there is no project 'eval', so this budget limits nothing; did you mean evals?"
    assert (said.code, said.err) == (0, f"headgate: warning: {warning}\n")
