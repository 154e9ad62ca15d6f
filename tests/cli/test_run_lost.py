"""Runs that lose something from under them, through the command line: ledger, store, folder."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from budgets.servers import running_valkey
from headgate.storage.sqlite import ReadOnlyReader
from run_commands import EXIT_DONE, EXIT_FAILED, Commands, ended, no_process_left

STEPS = """\
config: {budget_usd: 5.00, concurrency: 2}
steps:
  - id: case
    foreach: [1, 2]
    command: ["sh", "-c", "echo {index} >> began; until [ -e goes-on ]; do sleep 0.02; done"]
    cost_usd: 0.40
"""


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "one.yaml").write_text(STEPS)
    return Commands(tmp_path)


def until_both_run(commands: Commands, process: subprocess.Popen[str]) -> None:
    """Wait until both steps are under way."""
    while process.poll() is None:
        began = commands.folder / "began"
        if began.exists() and len(began.read_text().split()) == 2:
            return
    pytest.fail("".join(process.communicate()))


def until_told(process: subprocess.Popen[str], words: str) -> str:
    """Read what a run tells until it says these words."""
    assert process.stderr is not None
    told = ""
    for line in process.stderr:
        told += line
        if words in line:
            return told
    raise AssertionError(told)


def test_a_run_whose_money_is_not_booked_is_not_done_and_says_how_to_book_it(
    commands: Commands,
) -> None:
    with running_valkey() as server:
        ledger = ("--budget-tracker", "redis", "--budget-redis-url", server.url)
        session = ("--budget-session-id", "x", "--budget-session-limit", "1.00")
        where = ("--data", str(commands.data))
        process = commands.start("run", "one.yaml", *ledger, *session, *where)
        with no_process_left(process):
            until_both_run(commands, process)
            server.kill()
            (commands.folder / "goes-on").touch()
            until_told(process, "not booked; the end waits 30 s for it, or until Ctrl-C")
            process.send_signal(signal.SIGINT)
            end = ended(process)
        assert end.code == EXIT_FAILED, end
        assert "one has ended, but is not booked: 2 of 2 done, $0.80" in end.stdout
        assert "$0.80 of it is not in the ledger yet (Redis is unavailable" in end.stdout
        assert re.search(r"session:x: .* of \$1\.00 \(as of [0-9:]+ \w+\)", end.stdout)
        resume = f"headgate run --resume {commands.ids()[0]} --data {commands.data}"
        assert f"; {resume} books it" in end.stdout
        assert f"to go on: {resume}" in end.stdout
        server.start()
        again = commands.run("--resume", "last")
        assert (again.code, again.json["state"]) == (EXIT_DONE, "done")
        assert [one["spent_micro_usd"] for one in again.json["money"]] == [800_000] * 2
        assert (commands.folder / "began").read_text().split() in (["0", "1"], ["1", "0"])


def test_a_resume_without_the_store_of_the_run_runs_nothing_again(commands: Commands) -> None:
    process = commands.start_run("one.yaml")
    with no_process_left(process):
        until_both_run(commands, process)
        process.kill()
        process.communicate()
    (run_id,) = commands.ids()
    (commands.folder / "goes-on").touch()
    for path in (commands.data / "runs" / run_id).glob("headgate.db*"):
        path.unlink()
    end = commands.run("--resume", "last")
    assert (end.code, end.stdout) == (EXIT_FAILED, "")
    (line,) = end.stderr.splitlines()
    assert "headgate.db is gone; what the run did and spent is not known; begin anew" in line
    assert len((commands.folder / "began").read_text().split()) == 2


@pytest.mark.parametrize("lost", ["the folder", "the store"])
def test_a_run_whose_folder_is_deleted_ends_and_says_that_it_is_lost(
    commands: Commands, lost: str
) -> None:
    process = commands.start_run("one.yaml")
    with no_process_left(process):
        until_both_run(commands, process)
        (path,) = (commands.data / "runs").iterdir()
        if lost == "the folder":
            shutil.rmtree(path)
        else:
            (path / "headgate.db").unlink()
        (commands.folder / "goes-on").touch()
        end = ended(process)
    assert end.code == EXIT_FAILED, end
    assert "was deleted or replaced while the run went on; what ran is lost" in end.stderr
    assert "to go on" not in end.stderr
    assert path.exists() == (lost == "the store")


def test_a_run_that_has_ended_can_be_read_where_nothing_can_be_written(commands: Commands) -> None:
    (commands.folder / "goes-on").touch()
    assert commands.run("one.yaml").code == EXIT_DONE
    (path,) = (commands.data / "runs").iterdir()
    store = path / "headgate.db"
    before = sorted(path.iterdir())
    reader = ReadOnlyReader(store)
    (count,) = reader.begin().read("SELECT count(*) FROM tasks")
    assert (count, sorted(path.iterdir())) == ((2,), before), "nothing was made to read it"
    reader.rollback()
    reader.close()


def test_the_json_of_a_run_says_that_everything_is_booked(commands: Commands) -> None:
    (commands.folder / "goes-on").touch()
    told = json.loads(commands.run("one.yaml").stdout)
    assert (told["unbooked_micro_usd"], told["trouble"]) == (0, "")
