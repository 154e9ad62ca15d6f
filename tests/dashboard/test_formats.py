"""Texts as pages show them."""

from __future__ import annotations

import pytest

from headgate.dashboard import formats


def test_long_texts_are_cut_and_strange_ones_written_out() -> None:
    assert formats.line("a" * 300) == "a" * 200 + "…"
    assert formats.line("a\nb\u202e") == "a\\nb\\u202e"
    assert formats.block("a\nb\u202e" + "x" * 9_000) == "a\nb\\u202e" + "x" * 3_996 + "…"
    assert len(formats.line("\x00" * 1_000_000)) < 1_000


@pytest.mark.parametrize(
    ("whole", "shown"),
    [
        ("tsk_01hxyzabcdefghijkl", "tsk_01hx…ghijkl"),
        ("tsk_01hxabcdefg", "tsk_01hxabcdefg"),
        ("", ""),
    ],
)
def test_an_id_is_known_by_its_beginning_and_its_end(whole: str, shown: str) -> None:
    assert formats.short_id(whole) == shown
