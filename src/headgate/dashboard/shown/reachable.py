"""The addresses of things that have a page, and which of them a visitor may open.

Rule: no link is drawn that leads to a refusal, and none that a browser leads elsewhere.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote, urlsplit

from headgate.core.budgets.scopes import Scope
from headgate.dashboard.page import View

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
