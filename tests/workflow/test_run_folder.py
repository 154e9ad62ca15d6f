"""What is kept of a run: made whole or not at all, found again, and driven by one process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headgate.errors import InvalidSettingError, StoreError, WorkflowError
from headgate.testing import DEFAULT_START
from headgate.workflow import run_folder
from headgate.workflow.parser import read_workflow
from headgate.workflow.report import RunState
from headgate.workflow.run_folder import (
    Run,
    create_run,
    is_driven,
    open_run,
    read_record,
    run_folders,
)
from headgate.workflow.run_record import RunOptions, RunScope, new_run_id, resumed_options

TEXT = b"""\
name: eval
steps:
  - id: case
    foreach: cases.jsonl
    command: ["true", "{item}"]
  - id: again
    foreach: {step: case}
    command: ["true"]
"""


def made(folder: Path, *, now: float = DEFAULT_START, **options: Any) -> Run:
    """Make a run of a file with two items, in a folder of its own."""
    source = folder / "eval.yaml"
    source.write_bytes(TEXT)
    if not (folder / "cases.jsonl").exists():
        (folder / "cases.jsonl").write_text("1\n2\n")
    return create_run(
        RunOptions(data=folder / "data", **options),
        source=source,
        text=TEXT,
        workflow=read_workflow(source, TEXT),
        now=now,
        scopes=(RunScope(scope="workflow:eval", micro_usd=5),),
    )


def test_a_new_run_has_everything_that_a_resume_needs(tmp_path: Path) -> None:
    run = made(tmp_path, concurrency=3)
    (tmp_path / "cases.jsonl").write_text("changed\n")
    (tmp_path / "eval.yaml").unlink()
    again = open_run(tmp_path / "data", run.id)
    assert again.record == run.record
    assert again.workflow == run.workflow
    assert [again.items["again"].item(index) for index in range(2)] == [1, 2]
    assert (again.record.total, again.record.concurrency) == (4, 3)


def test_only_its_owner_can_read_a_run(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()}
    assert modes == dict.fromkeys(("run.json", "workflow.yaml", "items-case.jsonl"), 0o600)


def test_a_run_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text("1\n{\n")
    with pytest.raises(WorkflowError):
        made(tmp_path)
    assert list((tmp_path / "data" / "runs").iterdir()) == []


def test_what_a_crash_left_of_a_run_is_not_listed_and_goes_in_time(tmp_path: Path) -> None:
    left = tmp_path / "data" / "runs" / ".unfinished-1-1"
    left.mkdir(parents=True)
    (left / "run.json").write_text("{}")
    run = made(tmp_path)
    assert run_folders(tmp_path / "data") == [run.path]
    assert left.exists()
    os.utime(left, (0, 0))
    made(tmp_path)
    assert not left.exists()


def test_two_runs_of_one_second_have_two_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["same", "same", "other"])
    monkeypatch.setattr(run_folder, "new_run_id", lambda _now: next(ids))
    assert [made(tmp_path).id, made(tmp_path).id] == ["same", "other"]
    assert read_record(tmp_path / "data" / "runs" / "other").id == "other"


def test_ids_sort_by_time() -> None:
    assert new_run_id(DEFAULT_START).startswith("20260101-000000-")
    assert new_run_id(DEFAULT_START) < new_run_id(DEFAULT_START + 1)


def test_a_run_is_found_by_its_id_a_beginning_or_as_the_last(tmp_path: Path) -> None:
    first, second = made(tmp_path), made(tmp_path, now=DEFAULT_START + 60)
    data = tmp_path / "data"
    assert open_run(data, first.id).id == first.id
    assert open_run(data, second.id[:15]).id == second.id
    assert open_run(data, "last").id == second.id


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("2025", "RUN: there is no run '2025' in {data}; `headgate runs` lists the runs"),
        ("", "RUN: there is no run '' in {data}; `headgate runs` lists the runs"),
        ("../x", "RUN: there is no run '../x' in {data}; `headgate runs` lists the runs"),
    ],
)
def test_a_name_of_no_run_is_an_error_that_says_where_to_look(
    tmp_path: Path, name: str, line: str
) -> None:
    made(tmp_path)
    with pytest.raises(InvalidSettingError) as error:
        open_run(tmp_path / "data", name)
    assert str(error.value) == line.format(data=tmp_path / "data")


def test_a_beginning_of_several_runs_is_an_error_that_names_them(tmp_path: Path) -> None:
    made(tmp_path)
    made(tmp_path, now=DEFAULT_START + 60)
    with pytest.raises(InvalidSettingError, match=r"begins 2 runs .*; give more of the id"):
        open_run(tmp_path / "data", "2026")


def test_runs_of_one_second_are_listed_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    runs = [made(tmp_path) for _ in range(5)]
    for number, run in enumerate(runs):
        # Clocks of file systems may be coarse; what they say of the file decides.
        os.utime(run.path / "workflow.yaml", ns=(0, 1_000_000 * number))
    assert run_folders(tmp_path / "data") == [run.path for run in reversed(runs)]
    assert open_run(tmp_path / "data", "last").id == runs[-1].id


def test_without_any_run_there_is_no_last(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match="there is no run 'last'"):
        open_run(tmp_path, "last")


def test_a_changed_state_is_on_disk_at_once(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.change(state=RunState.EXHAUSTED, exhausted_by="the session")
    record = open_run(tmp_path / "data", "last").record
    assert (record.state, record.exhausted_by) == (RunState.EXHAUSTED, "the session")


def test_a_damaged_record_says_where_it_is(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.path / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run\.json is damaged"):
        open_run(tmp_path / "data", "last")


def test_a_record_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.change(format=99)
    with pytest.raises(StoreError, match="was written by a newer headgate; install that one"):
        open_run(tmp_path / "data", "last")


HOLD = """
import sys, pathlib
from headgate.storage.data_lock import hold_directory
with hold_directory(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_drives_a_run(tmp_path: Path) -> None:
    run = made(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == b"held\n"
        assert is_driven(run.path)
        line = f"run {run.id} is under way in process {child.pid}; wait for it, or stop it first"
        with pytest.raises(StoreError, match=line), run.held():
            pass
        child.communicate()
    with run.held(), run.held():
        assert run.lock is not None
        assert is_driven(run.path)
    assert not is_driven(run.path)


def test_no_secret_gets_into_the_record(tmp_path: Path) -> None:
    run = made(
        tmp_path,
        redis_url="redis://:hunter2@host/0",
        token="hunter2",
        server="http://user:hunter2@host:7420",
    )
    for path in run.path.iterdir():
        assert b"hunter2" not in path.read_bytes()


def test_a_resume_does_what_was_said_before_unless_it_says_otherwise(tmp_path: Path) -> None:
    run = made(tmp_path, concurrency=3, session_id="s", config=tmp_path / "h.toml")
    options = RunOptions(data=tmp_path / "data", concurrency=5)
    resumed = resumed_options(run.record, options)
    assert (resumed.concurrency, resumed.tracker) == (5, "local")
    assert resumed.config == tmp_path / "h.toml"


def test_a_resume_says_no_session_again_since_its_scopes_are_kept(tmp_path: Path) -> None:
    run = made(tmp_path, session_id="s")
    resumed = resumed_options(run.record, RunOptions(data=tmp_path / "data"))
    assert resumed.session_id is None
