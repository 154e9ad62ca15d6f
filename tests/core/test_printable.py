"""Texts that their reader cannot be moved or misled by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.text import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "one_line", "lines"),
    [
        ("plain", "plain", "plain"),
        ("ünïcödé 漢字 🙂", "ünïcödé 漢字 🙂", "ünïcödé 漢字 🙂"),
        ("a\nb\tc", "a\\nb\\tc", "a\nb\tc"),
        ("\x1b[2J", "\\x1b[2J", "\\x1b[2J"),
        ("abc\u202edef", "abc\\u202edef", "abc\\u202edef"),
        ("a\u2066b\u200fc", "a\\u2066b\\u200fc", "a\\u2066b\\u200fc"),
        ("\r\n", "\\r\\n", "\\r\n"),
        ("\ud800", "\\ud800", "\\ud800"),
    ],
)
def test_what_moves_or_turns_a_text_is_written_out(text: str, one_line: str, lines: str) -> None:
    assert printable(text) == one_line
    assert printable_lines(text) == lines


@given(st.text())
def test_what_comes_out_is_printable_whatever_goes_in(text: str) -> None:
    assert printable(text).isprintable()
    assert all(one.isprintable() or one in "\n\t" for one in printable_lines(text))
