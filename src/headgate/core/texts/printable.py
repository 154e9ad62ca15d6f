"""Texts that nobody but their reader acts upon: what moves a cursor or turns a line is written out.

A name or an error may come from anybody. Shown as it is, a control character could move the cursor
of a terminal, and a mark of direction could make a line read as another.
"""

from __future__ import annotations

_KEPT_IN_LINES = ("\n", "\t")


def printable(text: str) -> str:
    """Return a text as one line, with everything written out that its reader would not see."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def printable_lines(text: str) -> str:
    """Return a text with its lines and tabs, and all else written out as on one line."""
    return "".join(
        one if one.isprintable() or one in _KEPT_IN_LINES else ascii(one)[1:-1] for one in text
    )
