"""Long lists on a page: found by a part of a name, and shown a part at a time.

Rule: where a list goes on, and what it was narrowed to, is in the address; so it can be kept, sent
and fetched anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from headgate.dashboard.page import View
from headgate.web.refusals import invalid_field

FIND = "find"
ROWS = 25
MAX_FIND_LENGTH = 200
_MAX_DIGITS = 6

Row = TypeVar("Row")


class Part(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """Some rows of a list: which they are of how many, and where the others are."""

    rows: Sequence[Row]
    first: int
    count: int
    first_url: str | None = None
    next_url: str | None = None


def looked_for(view: View) -> str:
    """Return the part of a name that a page is narrowed to; empty is all."""
    return view.request.query().get(FIND, "").strip()[:MAX_FIND_LENGTH]


def part_of(view: View, rows: Sequence[Row], key: str, *, path: str = "") -> Part[Row]:
    """Return the rows that the address asks for, from the number under `key` on.

    Give the `path` of a page whose address has a name in it, as it is to be written.
    """
    first = first_of(view, key)
    return part_at(view, rows[first : first + ROWS], key, count=len(rows), path=path)


def part_at(view: View, rows: Sequence[Row], key: str, *, count: int, path: str = "") -> Part[Row]:
    """Return rows that were taken out of a longer list already, at what the address asks for."""
    query, first = view.request.query(), first_of(view, key)
    following = first + ROWS
    place = path or view.path
    return Part(
        rows=rows,
        first=first,
        count=count,
        first_url=address(place, {**query, key: ""}) if first else None,
        next_url=address(place, {**query, key: str(following)}) if following < count else None,
    )


def first_of(view: View, key: str) -> int:
    """Return how many rows the address of a page passes over."""
    return number_in(view.request.query(), key)


def number_in(query: Mapping[str, str], key: str) -> int:
    """Return how many rows an address passes over."""
    text = query.get(key) or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > _MAX_DIGITS:
        raise invalid_field(key, "must be the number of a row")
    return int(text)


def address(path: str, query: Mapping[str, str]) -> str:
    """Return a path with a query; what is empty is left out of it."""
    given = {name: value for name, value in query.items() if value}
    return f"{path}?{urlencode(given)}" if given else path
