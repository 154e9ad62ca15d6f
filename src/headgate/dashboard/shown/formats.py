"""Texts as pages show them, and the filters by which templates write figures and texts.

Rule: a text that somebody else wrote is shown, never obeyed. What a browser would act upon is
written out, and what is long is cut.
"""

from __future__ import annotations

from headgate.core.texts import figures as figure_texts
from headgate.core.texts.printable import printable, printable_lines

MAX_TEXT_LENGTH = 4_000
MAX_LINE_LENGTH = 200
ELLIPSIS = "…"
ID_BEGINNING, ID_END = 8, 6


def line(text: object, most: int = MAX_LINE_LENGTH) -> str:
    """Return a text as one line: control and direction characters written out, the end cut off."""
    whole = str(text)
    shown = printable(whole[:most])
    return shown if len(whole) <= most else shown + ELLIPSIS


def block(text: object, most: int = MAX_TEXT_LENGTH) -> str:
    """Return a text with its lines; all other control characters are written out."""
    whole = str(text)
    shown = printable_lines(whole[:most])
    return shown if len(whole) <= most else shown + ELLIPSIS


def capital(text: str) -> str:
    """Return a text with a capital letter at its beginning, as a sentence has it."""
    return f"{text[:1].upper()}{text[1:]}"


def short_id(whole: str) -> str:
    """Return the beginning and the end of an id, which is where ids differ."""
    short = f"{whole[:ID_BEGINNING]}{ELLIPSIS}{whole[-ID_END:]}"
    return short if len(short) < len(whole) else whole


FILTERS = {
    "line": line,
    "block": block,
    "capital": capital,
    "short_id": short_id,
    "usd": figure_texts.usd,
    "column_usd": figure_texts.column_usd,
    "exact_usd": figure_texts.exact_usd,
    "dollars": figure_texts.dollars,
    "count": figure_texts.count,
    "duration": figure_texts.duration,
    "percent": figure_texts.percent,
    "iso": figure_texts.iso,
    "clock": figure_texts.clock,
}
