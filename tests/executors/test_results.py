"""What is kept as JSON can be read again, wherever that is done."""

from __future__ import annotations

import msgspec
import pytest

from headgate.executors.executor import MAX_DEPTH, as_json, as_json_or_text

READABLE = [
    b"null",
    b' {"a": [1, 2.5e300, "x"]}\n',
    b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
    b"[" + b"[]," * (2 * MAX_DEPTH) + b"[]]",
    b"18446744073709551617",
    b"1e-999",
]
UNREADABLE = [
    b"1e400",
    b'{"a": [-1e999]}',
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"9" * 5_000,
    b"NaN",
    b"1 2",
    b'"\xff"',
    b'{"\xff": 1}',
    b'"\\ud800"',
]


@pytest.mark.parametrize("body", READABLE)
def test_json_is_kept_as_it_came(body: bytes) -> None:
    found = as_json(body)
    assert found is not None
    assert bytes(found) == body.strip()
    assert msgspec.json.encode(msgspec.json.decode(found))


@pytest.mark.parametrize("body", UNREADABLE)
def test_what_no_reader_has_a_value_for_is_a_text(body: bytes) -> None:
    assert as_json(body) is None
    found = as_json_or_text(body)
    assert found is not None
    assert msgspec.json.decode(found) == {"text": body.decode(errors="replace")}
