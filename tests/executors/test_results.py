"""What is kept as JSON can be read again, wherever that is done."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.text import Steps, at_once
from headgate.executors.executor import MAX_DEPTH, as_json, as_json_or_text
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_steps

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
    found = at_once(as_json_or_text(body))
    assert found is not None
    assert msgspec.json.decode(found) == {"text": body.decode(errors="replace")}


@given(st.binary(max_size=200).map(lambda body: b"<" + body * 300))
def test_a_text_is_the_same_however_it_is_sliced(body: bytes) -> None:
    found = at_once(as_json_or_text(body))
    assert found is not None
    assert msgspec.json.decode(found) == {"text": body.decode(errors="replace")}


MIB = 1 << 20
COSTLY = {
    "empty lists": b"[" + b"[]," * (MIB // 3) + b"[]]",
    "objects": b'{"x": [' + b'{"usage": 1},' * (MIB // 13) + b"1]}",
    "no text": b"\xff" * MIB,
    "quotes": b'["' + b'\\"' * (MIB // 2) + b'"]',
    "numbers": b"[" + b"1e300," * (MIB // 6) + b"1]",
    "lines": b'"usage"' + b"\n" * MIB,
    "events": b'data:"usage"\n' * (MIB // 13),
}


def longest_slice(steps: Steps[object]) -> float:
    """Return the time of this thread's processor that the longest slice of work took."""
    took = [0.0]
    before = time.thread_time()
    for _ in steps:
        now = time.thread_time()
        took.append(now - before)
        before = now
    return max(*took, time.thread_time() - before)


@pytest.mark.parametrize("name", COSTLY)
def test_no_answer_is_judged_for_longer_than_a_slice(name: str) -> None:
    body = COSTLY[name]
    assert longest_slice(as_json_or_text(body)) < 0.03
    assert longest_slice(usage_steps(body, PriceList())) < 0.03
