"""Whoever looks up a message of a page in its guide finds it there, as the page has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/how-to/use-the-dashboard.md").read_text()
ROWS = re.findall(r"^\| \*(.+?)\*.* \|", GUIDE, re.MULTILINE)
SOURCES = [
    path.read_text()
    for folder in ("dashboard", "api")
    for path in (ROOT / "src/headgate" / folder).rglob("*")
    if path.suffix in (".py", ".html")
]
# A long text is written as several, one a line.
SAID = re.sub(r'"\n\s+f?"', "", "\n".join(SOURCES)).lower()


def test_the_guide_has_messages() -> None:
    assert len(ROWS) >= 6


@pytest.mark.parametrize("message", ROWS)
def test_the_guide_quotes_a_message_as_a_page_says_it(message: str) -> None:
    assert message.lower() in SAID
