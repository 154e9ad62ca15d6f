"""Long lists on a page: found by a part of a name, and shown a part at a time.

Rule: where a list goes on, and what it was narrowed to, is in the address; so it can be kept, sent
and fetched anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def named_like(rows: Sequence[Row], text: str, names: Callable[[Row], Sequence[str]]) -> list[Row]:
    """Return the rows that have a name with this text in it, whatever its case."""
    wanted = text.casefold()
    if not wanted:
        return list(rows)
    return [row for row in rows if any(wanted in name.casefold() for name in names(row))]


def part_of(view: View, rows: Sequence[Row], key: str, *, path: str = "") -> Part[Row]:
    """Return the rows that the address asks for, from the number under `key` on.

    Give the `path` of a page whose address has a name in it, as it is to be written.
    """
    query = view.request.query()
    first = number_in(query, key)
    following = first + ROWS
    place = path or view.path
    return Part(
        rows=rows[first:following],
        first=first,
        count=len(rows),
        first_url=address(place, {**query, key: ""}) if first else None,
        next_url=address(place, {**query, key: str(following)}) if following < len(rows) else None,
    )


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
