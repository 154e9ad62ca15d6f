"""Long lists on a page: found by a part of a name, and shown a part at a time.

Rule: where a list goes on, and what it was narrowed to, is in the address; so it can be kept, sent
and fetched anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from headgate.api.errors import invalid_field
from headgate.core.budgets.scopes import Scope
from headgate.dashboard.page import View

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


# The addresses of things that have a page, and which of them a visitor may open.
#
# Rule: no link is drawn that leads to a refusal, and none that a browser leads elsewhere.

BUDGETS = "/ui/budgets"
PROJECTS = "/ui/projects"
SLOTS = "/ui/slots"

_DOTS = re.compile(r"~*\.\.?")
"""What a browser takes for a folder, escaped or not, and what such a name is written as instead."""


def written_name(name: str) -> str:
    """Return a name as one part of a path, whatever is in it."""
    return quote(f"~{name}" if _DOTS.fullmatch(name) else name, safe="")


def read_name(part: str) -> str:
    """Return the name that a part of a path was written for."""
    return part.removeprefix("~") if _DOTS.fullmatch(part) else part


def scope_href(scope: str) -> str:
    """Return the address of the page of a budget."""
    return f"{BUDGETS}?scope={quote(scope, safe='')}"


def project_href(name: str) -> str:
    """Return the address of the page of a project."""
    return f"{PROJECTS}/{written_name(name)}"


CLOSURES = "/ui/settings/closures"
"""The page of what is closed, which others lead to."""


def slot_href(name: str) -> str:
    """Return the address of the page of a slot."""
    return f"{SLOTS}/{written_name(name)}"


def may_open(view: View, href: str) -> bool:
    """Tell whether a link to a budget, a slot or a project leads somewhere.

    Of what only administrators may open, nobody else is told in the first place.
    """
    parts = urlsplit(href)
    if parts.path.startswith(f"{PROJECTS}/"):
        # Projects are not shown to whoever acts for an agent, be it within one of them.
        return view.caller.agent_id is None
    if parts.path == BUDGETS and parts.query.startswith("scope="):
        scope = Scope(unquote(parts.query.removeprefix("scope=")))
        return not view.caller.is_bound or view.caller.bounds.may_charge(scope)
    return True
