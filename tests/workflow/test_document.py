"""YAML from anybody: plain words are texts, sizes are bounded, and nothing is made of a tag."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import WorkflowError
from headgate.workflow import yaml_document as document
from headgate.workflow.parser import read_workflow
from headgate.workflow.yaml_document import MAX_FILE_BYTES, json_value, read_document
from workflow.views import FILE

PLAIN: list[tuple[str, object]] = [
    ("no", "no"),
    ("on", "on"),
    ("y", "y"),
    ("Yes", "Yes"),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("12", 12),
    ("-12", -12),
    ("+5", 5),
    ("010", "010"),
    ("0o17", "0o17"),
    ("0x1f", "0x1f"),
    ("1_000", "1_000"),
    ("1:30", "1:30"),
    ("2024-01-01", "2024-01-01"),
    ("1.50", 1.5),
    (".5", 0.5),
    ("1e3", 1000.0),
    ("1e999", "1e999"),
    (".inf", ".inf"),
    (".nan", ".nan"),
    ("1.2.3", "1.2.3"),
    ("9" * 301, "9" * 301),
    ("'12'", "12"),
    ('"true"', "true"),
    ("''", ""),
    ("=", "="),
]


def value_of(text: str) -> Any:
    return json_value(read_document("f.yaml", text.encode()))


@pytest.mark.parametrize(("text", "value"), PLAIN, ids=[text[:20] for text, _ in PLAIN])
def test_a_plain_word_that_json_does_not_have_is_a_text(text: str, value: object) -> None:
    (found,) = value_of(f"- {text}")
    assert (type(found), found) == (type(value), value)


def test_keys_are_texts_as_they_are_written() -> None:
    assert value_of("{no: 1, 12: 2, true: 3, 'a b': 4}") == {"no": 1, "12": 2, "true": 3, "a b": 4}


def test_aliases_and_merged_keys_are_followed() -> None:
    text = """
base: &base {a: 1, b: [2]}
other: &other {b: 3, c: 4}
one: {<<: *base, a: 9}
both: {<<: [*base, *other]}
same: *base
"""
    assert value_of(text) == {
        "base": {"a": 1, "b": [2]},
        "other": {"b": 3, "c": 4},
        "one": {"a": 9, "b": [2]},
        "both": {"a": 1, "b": [2], "c": 4},
        "same": {"a": 1, "b": [2]},
    }


def test_a_byte_order_mark_and_windows_line_ends_are_passed_over() -> None:
    assert json_value(read_document("f", b"\xef\xbb\xbfa: 1\r\nb:\r\n  - x\r\n")) == {
        "a": 1,
        "b": ["x"],
    }


def bomb(levels: int, width: int) -> str:
    nested = [
        f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * width)}]"
        for level in range(1, levels)
    ]
    return "\n".join(["l0: &l0 [a]", *nested])


def merge_bomb(levels: int, width: int) -> str:
    merged = [
        f"l{level}: &l{level} {{<<: [{', '.join([f'*l{level - 1}'] * width)}]}}"
        for level in range(1, levels)
    ]
    return "\n".join(["l0: &l0 {a: 1}", *merged])


HOSTILE: dict[str, str] = {
    "aliases": bomb(40, 10),
    "merged aliases": merge_bomb(40, 10),
    "long aliases": f"a: &a {'x' * 100_000}\nb: [{'*a, ' * 10_000}]",
    "deep aliases": "steps: [{id: a, command: [x], foreach: [&l0 [a]"
    + "".join(f", &l{level} [*l{level - 1}]" for level in range(1, 900))
    + "]}]",
    "deep lists": "[" * 1_000_000,
    "deep objects": "{a: " * 200_000,
    "deep blocks": "\n".join(" " * depth + "a:" for depth in range(2_000)),
    "deep dashes": "- " * 1_000_000,
    "many values": "[" + "a, " * (5 * 1024 * 1024) + "]",
    "many keys": "\n".join(f"k{number}: 1" for number in range(100_000)),
    "one long word": "a: " + "x" * (MAX_FILE_BYTES - 10),
    "one long line of spaces": "a:" + " " * (MAX_FILE_BYTES - 10) + "b",
    "many comments": "#\n" * (MAX_FILE_BYTES // 2),
    "open quotes": "'" * 1_000_001,
    "question marks": "? " * 1_000_000,
    "colons": ": " * 1_000_000,
    "tags": "!a " * 1_000_000,
    "too large": "#" * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_bounded_time(text: str) -> None:
    began = time.process_time()
    with pytest.raises(WorkflowError) as caught:
        read_workflow(FILE, text.encode())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.process_time() - began < 5


def test_keys_count_as_the_values_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_VALUES", 50_000)
    with pytest.raises(WorkflowError, match="has more than 50,000 values"):
        read_document("f.yaml", HOSTILE["many keys"].encode())


@pytest.mark.parametrize("name", ["aliases", "merged aliases", "long aliases"])
def test_what_would_become_too_much_is_refused(name: str) -> None:
    with pytest.raises(WorkflowError, match="use fewer aliases, or put items into a JSONL file"):
        read_document("f.yaml", HOSTILE[name].encode())


@pytest.mark.parametrize(
    "name", ["deep aliases", "deep lists", "deep objects", "deep blocks", "deep dashes"]
)
def test_what_is_nested_too_deeply_is_refused(name: str) -> None:
    with pytest.raises(WorkflowError, match="is nested more than 40 deep"):
        read_document("f.yaml", HOSTILE[name].encode())


def refusal_of(source: bytes) -> str:
    """Return the line by which a document is refused; empty if it is read."""
    try:
        json_value(read_document("f.yaml", source))
    except WorkflowError as error:
        return str(error)
    return ""


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(source: bytes) -> None:
    assert "\n" not in refusal_of(source)


@given(st.text(alphabet="ab:-[]{},&*!|>'\"#%@? \n\t0.~<", max_size=80))
def test_any_text_of_signs_is_read_or_refused(text: str) -> None:
    assert "\n" not in refusal_of(text.encode())
