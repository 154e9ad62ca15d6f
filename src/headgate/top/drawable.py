"""Texts of others as a terminal draws them: on as many cells as were counted for them.

Rule: what no reader sees is written out, and so is a mark that only changes how the character
before it looks. Terminals do not agree how wide the two are, and a line would be shifted by it.
"""

from __future__ import annotations

from headgate.core.texts.printable import printable, printable_lines

_VARIATIONS = range(0xFE00, 0xFE10)
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_WRITTEN_OUT = {mark: ascii(chr(mark))[1:-1] for mark in (*_VARIATIONS, *_SKIN_TONES)}


def drawable(text: str) -> str:
    """Return a text as one line."""
    return printable(text).translate(_WRITTEN_OUT)


def drawable_lines(text: str) -> str:
    """Return a text with its lines and tabs."""
    return printable_lines(text).translate(_WRITTEN_OUT)
