"""A file that is wrong is refused by one line: its name, the line, the key, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.errors import WorkflowError
from headgate.workflow.parser import read_workflow
from workflow.views import FILE

BEGINNINGS = {
    "S": "steps:\n  - id: a\n    ",
    "C": "steps:\n  - id: a\n    command: [x]\n    ",
    "CONFIG": "config:\n  ",
}
END_OF_CONFIG = "\nsteps:\n  - id: a\n    command: [x]\n"


def written() -> list[tuple[str, str]]:
    """Return the files of the table, and their lines."""
    table = (Path(__file__).parent / "wrong_files.txt").read_text()
    found = []
    for block in table.split("\n\n=== ")[1:]:
        line, _, body = block.rstrip("\n").partition("\n")
        beginning, _, rest = body.partition("\n")
        if beginning in BEGINNINGS:
            end = END_OF_CONFIG if beginning == "CONFIG" else ""
            body = BEGINNINGS[beginning] + rest + end
        found.append((body, line))
    return found


# What cannot be written into a table of texts.
OTHERS: list[tuple[str | bytes, str]] = [
    ("", ": is empty; write steps"),
    ("# nothing\n", ": is empty; write steps"),
    ("---\n...\n", ": is empty; write steps"),
    (
        "\tsteps: 1",
        ":1: is indented with a tab; indent with spaces, not tabs",
    ),
    ("a: 1\n---\nb: 2\n", ":2: has a second document; leave out what follows ---"),
    ("a: 'x\x01'", ":1: has the character U+0001, which YAML does not allow; leave it out"),
    (b"\na: \xff\n", ":2: is not UTF-8; save it as UTF-8"),
    ("a: 1\n".encode("utf-16"), ":1: is not UTF-8; save it as UTF-8"),
    (
        f"{BEGINNINGS['C']}when: {'a' * 2_001}",
        ":4: steps[0].when: has more than 2,000 characters; shorten it",
    ),
    (
        f'{BEGINNINGS["C"]}cwd: "a\\0b"',
        ":4: steps[0].cwd: has a null character; leave it out",
    ),
    (
        f"steps: [{'{id: a, command: [x]}, ' * 10_001}]",
        ":1: steps: has 10,001 steps, at most 10,000 are run; use foreach",
    ),
]
WRONG = [*written(), *OTHERS]


@pytest.mark.parametrize(("text", "line"), WRONG, ids=[line for _, line in WRONG])
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(text: str | bytes, line: str) -> None:
    source = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(WorkflowError) as caught:
        read_workflow(FILE, source)
    assert str(caught.value) == f"eval.yaml{line}"
    assert "\n" not in str(caught.value)


def test_the_table_is_long_and_says_what_to_do() -> None:
    assert len(WRONG) >= 180
    assert [line for _, line in WRONG if not any(mark in line for mark in ";?,")] == [
        line for _, line in WRONG if "must be" in line and not any(mark in line for mark in ";?,")
    ]


def test_an_error_has_its_place_as_fields() -> None:
    with pytest.raises(WorkflowError) as caught:
        read_workflow(Path("in") / "eval.yaml", b"steps:\n  - id: a\n    commnd: [x]\n")
    error = caught.value
    assert (error.file, error.line, error.key) == ("in/eval.yaml", 3, "steps[0].commnd")
    assert error.problem == "is not a key of a step; did you mean command?"


def test_a_value_that_may_be_a_secret_is_not_repeated() -> None:
    text = "config: {endpoints: {x: {kind: openai, url: 'hunter2', key: a}}}\nsteps: []"
    with pytest.raises(WorkflowError) as caught:
        read_workflow(FILE, text.encode())
    assert "hunter2" not in str(caught.value)


def test_a_file_whose_name_is_none_needs_a_name_inside() -> None:
    source = b"steps:\n  - {id: a, command: [x]}\n"
    with pytest.raises(WorkflowError) as caught:
        read_workflow(Path("my eval.yaml"), source)
    line = "my eval.yaml: 'my eval' is no name of a workflow; write name: … into the file"
    assert str(caught.value) == line
    assert read_workflow(Path("my eval.yaml"), source, name="nightly").name == "nightly"
    assert read_workflow(Path("my eval.yaml"), b"name: nightly\n" + source).name == "nightly"
