"""Items: every line is checked before the run, none is kept, and a resume sees the same ones."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import StoreError, WorkflowError
from headgate.workflow.expansion import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    Expansion,
    LineItems,
    load_items,
)
from headgate.workflow.parser import read_workflow
from headgate.workflow.workflow import Workflow

CASES = """
steps:
  - {id: case, foreach: cases.jsonl, command: [x]}
  - {id: judge, foreach: {step: verdict}, command: [x]}
  - {id: verdict, foreach: {step: case}, command: [x]}
  - {id: again, foreach: {file: cases.jsonl}, command: [x]}
  - {id: listed, foreach: [a, {b: 1}], command: [x]}
  - {id: once, command: [x]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def workflow_in(folder: Path, text: str = CASES) -> Workflow:
    return read_workflow(folder / "eval.yaml", text.encode())


def test_items_are_those_of_the_file_of_a_list_or_of_another_step(folder: Path) -> None:
    (folder / "cases.jsonl").write_text('{"n": 1}\n\n  [2]  \r\n"three"')
    items = load_items(workflow_in(folder), copies=None)
    assert set(items) == {"case", "judge", "verdict", "again", "listed"}
    for name in ("case", "judge", "verdict", "again"):
        assert [items[name].item(index) for index in range(items[name].count)] == [
            {"n": 1},
            [2],
            "three",
        ]
    assert [items["listed"].item(index) for index in range(2)] == ["a", {"b": 1}]


def test_a_resume_sees_the_items_that_the_run_began_with(folder: Path) -> None:
    cases = folder / "cases.jsonl"
    cases.write_text("1\n2\n")
    load_items(workflow_in(folder), copies=folder / "run")
    cases.unlink()
    items = load_items(workflow_in(folder), copies=folder / "run")
    assert [items["again"].item(index) for index in range(items["case"].count)] == [1, 2]
    assert [path.name for path in (folder / "run").iterdir()] == ["items-case.jsonl"]


def test_a_copy_that_was_not_finished_is_made_anew(folder: Path) -> None:
    (folder / "cases.jsonl").write_text("1\n")
    (folder / "run/items-case.part").write_text("[[[")
    assert load_items(workflow_in(folder), copies=folder / "run")["case"].count == 1


WRONG = [
    (b"1\n{", "cases.jsonl:2: is not JSON: Input data was truncated; write one value a line"),
    (b"1 2\n", "cases.jsonl:1: is not JSON: JSON is malformed: trailing characters (byte"),
    (b'"\xff"\n', "cases.jsonl:1: is not JSON: "),
    (b"NaN\n", "cases.jsonl:1: is not JSON: "),
    (b"[" * 100_000, "cases.jsonl:1: is nested deeper than 200 levels; write it more simply"),
    (
        b"[" * 201 + b"]" * 201,
        "cases.jsonl:1: is nested deeper than 200 levels; write it more simply",
    ),
    (
        b'\n"' + b"x" * MAX_LINE_BYTES + b'"',
        "cases.jsonl:2: has more than 1,048,576 bytes; shorten it",
    ),
]


@pytest.mark.parametrize("copies", ["run", None])
@pytest.mark.parametrize(("content", "line"), WRONG, ids=[line for _, line in WRONG])
def test_a_line_that_is_wrong_is_named_and_leaves_nothing_behind(
    content: bytes, line: str, copies: str | None, folder: Path
) -> None:
    (folder / "cases.jsonl").write_bytes(content)
    with pytest.raises(WorkflowError) as caught:
        load_items(workflow_in(folder), copies=None if copies is None else folder / copies)
    assert str(caught.value).startswith(f"{folder}/{line}")
    assert list((folder / "run").iterdir()) == []


def test_a_file_that_is_not_there_is_the_fault_of_the_step(folder: Path) -> None:
    with pytest.raises(WorkflowError) as caught:
        load_items(workflow_in(folder), copies=None)
    assert str(caught.value) == (
        f"{folder}/eval.yaml:3: steps[0].foreach: {folder}/cases.jsonl cannot be read: "
        "No such file or directory; name a JSONL file"
    )


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "cases.jsonl")
    with pytest.raises(WorkflowError, match="is not a file; write the items into one"):
        load_items(workflow_in(folder), copies=folder / "run")


def test_a_file_that_is_too_large_is_refused_unread(folder: Path) -> None:
    with (folder / "cases.jsonl").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(WorkflowError, match="has more than 1,073,741,824 bytes; split it"):
        load_items(workflow_in(folder), copies=None)


def test_an_item_of_a_file_that_was_changed_meanwhile_is_not_made_up(folder: Path) -> None:
    path = folder / "cases.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}\n')
    items = LineItems(path)
    with path.open("r+") as file:
        file.truncate(12)
    assert items.item(0) == {"a": 1}
    with pytest.raises(StoreError, match="was changed after it was read; start a new run"):
        items.item(1)


def test_of_a_file_only_the_places_of_its_lines_are_kept(folder: Path) -> None:
    path = folder / "cases.jsonl"
    path.write_bytes((b'{"question": "' + b"x" * 500 + b'", "n": 17}\n') * 50_000)
    tracemalloc.start()
    try:
        items = LineItems(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert items.count == 50_000
    assert items.item(49_999)["n"] == 17
    assert peak < 50_000 * 40


def test_more_runs_than_there_may_be_are_refused_before_the_run(folder: Path) -> None:
    (folder / "cases.jsonl").write_bytes(b"1\n" * 400_000)
    with pytest.raises(WorkflowError) as caught:
        load_items(workflow_in(folder), copies=None)
    assert str(caught.value) == (
        f"{folder}/eval.yaml:5: steps[2].foreach: with this step the workflow has more than "
        "1,000,000 runs; split it"
    )


def listed(*counts: int | None) -> Workflow:
    """Return a workflow whose steps have so many items; None is a step without."""
    steps = [
        f"  - {{id: s{number}, command: [x]"
        + ("}" if count is None else f", foreach: {list(range(count))}}}")
        for number, count in enumerate(counts)
    ]
    return read_workflow(Path("eval.yaml"), "\n".join(["steps:", *steps]).encode())


def test_runs_are_numbered_in_the_order_of_the_file() -> None:
    workflow = listed(None, 3, 0, None)
    expansion = Expansion(workflow, load_items(workflow, copies=None))
    assert [expansion.name_of(number) for number in range(expansion.total)] == [
        "s0",
        "s1[0]",
        "s1[1]",
        "s1[2]",
        "s3",
    ]
    assert expansion.runs_of("s1") == range(1, 4)
    assert expansion.runs_of("s2") == range(4, 4)
    assert expansion.runs_of("s3").start == 4
    for number in (-1, 5):
        with pytest.raises(IndexError):
            expansion.run_of(number)


@given(st.lists(st.none() | st.integers(0, 5), min_size=1, max_size=8))
def test_a_number_and_its_run_belong_to_each_other(counts: list[int | None]) -> None:
    workflow = listed(*counts)
    expansion = Expansion(workflow, load_items(workflow, copies=None))
    assert expansion.total == sum(1 if count is None else count for count in counts)
    seen = [
        (step.id, index)
        for step in workflow.steps
        for index in range(len(expansion.runs_of(step.id)))
    ]
    for number, (step_id, index) in enumerate(seen):
        run = expansion.run_of(number)
        assert (run.step.id, run.index) == (step_id, index)
        assert expansion.runs_of(step_id)[index] == number
        assert workflow.steps[expansion.position_of(number)].id == step_id
