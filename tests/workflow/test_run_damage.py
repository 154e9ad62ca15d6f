"""A run of which something was lost or changed is refused: nothing is made up in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.errors import StoreError
from headgate.testing import DEFAULT_START
from headgate.workflow.local_backend import StoreFile
from headgate.workflow.parser import read_workflow
from headgate.workflow.run_folder import JOURNAL, STORE, Run, create_run, open_run
from headgate.workflow.run_list import show_run
from headgate.workflow.run_record import RunOptions

TEXT = b"""\
steps:
  - {id: case, foreach: cases.jsonl, command: ["true", "{item}"]}
"""


def made(folder: Path) -> Run:
    """Make a run of a file with two items."""
    source = folder / "eval.yaml"
    source.write_bytes(TEXT)
    (folder / "cases.jsonl").write_text("1\n2\n")
    return create_run(
        RunOptions(data=folder / "data"),
        source=source,
        text=TEXT,
        workflow=read_workflow(source, TEXT),
        now=DEFAULT_START,
    )


@pytest.mark.parametrize("name", ["workflow.yaml", "items-case.jsonl"])
def test_a_file_that_was_changed_since_the_run_began_is_refused(tmp_path: Path, name: str) -> None:
    run = made(tmp_path)
    before = (run.path / name).read_bytes()
    (run.path / name).write_bytes(before.replace(b"2", b"7") + b"\n")
    advice = f"put it back, or begin anew with headgate run {tmp_path}/eval.yaml"
    with pytest.raises(StoreError) as error:
        open_run(tmp_path / "data", run.id)
    problem = "was changed since the run began"
    assert str(error.value) == f"{run.path / name} {problem}; {advice}"
    (run.path / name).write_bytes(before)
    assert open_run(tmp_path / "data", run.id).items["case"].count == 2


def test_items_that_are_gone_are_not_copied_again(tmp_path: Path) -> None:
    run = made(tmp_path)
    (tmp_path / "cases.jsonl").write_text("7\n8\n")
    (run.path / "items-case.jsonl").unlink()
    with pytest.raises(StoreError, match=r"items-case\.jsonl cannot be read: .*; put it back"):
        open_run(tmp_path / "data", run.id)


def test_a_run_that_had_begun_is_refused_without_its_store(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert open_run(tmp_path / "data", run.id).id == run.id, "it has none yet"
    run.change(has_begun=True)
    for ask in (open_run, show_run):
        with pytest.raises(StoreError) as error:
            ask(tmp_path / "data", run.id)
        problem = f"{run.path / STORE} is gone; what the run did and spent is not known"
        advice = f"begin anew with headgate run {tmp_path}/eval.yaml"
        assert str(error.value) == f"{problem}; {advice}"


def test_a_run_on_a_service_is_refused_without_its_journal(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.change(has_begun=True, server="http://127.0.0.1:7420")
    with pytest.raises(StoreError, match=rf"{JOURNAL} is gone"):
        open_run(tmp_path / "data", run.id)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_store_that_was_deleted_under_a_run_is_told_from_one_that_is_there(
    tmp_path: Path, is_replaced: bool
) -> None:
    path = tmp_path / "run" / STORE
    path.parent.mkdir()
    path.touch()
    file = StoreFile(path)
    file.check()
    file.note()
    file.check()
    path.rename(tmp_path / "kept")
    if is_replaced:
        path.touch()
    with pytest.raises(StoreError, match=rf"{STORE} was deleted or replaced .* what ran is lost"):
        file.check()
    path.unlink(missing_ok=True)
    path.parent.rmdir()
    with pytest.raises(StoreError, match=r"the folder of the run, .*, was deleted"):
        file.check()
