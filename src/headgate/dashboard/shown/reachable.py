"""The addresses of things that have a page, and which of them a visitor may open.

Rule: no link is drawn that leads to a refusal.
"""

from __future__ import annotations

from urllib.parse import quote, unquote, urlsplit

from headgate.core.budgets.scopes import Scope
from headgate.dashboard.page import View

BUDGETS = "/ui/budgets"
PROJECTS = "/ui/projects"
SLOTS = "/ui/slots"

_FOR_ADMINISTRATORS = ("/ui/webhooks", "/ui/settings")


def scope_href(scope: str) -> str:
    """Return the address of the page of a budget."""
    return f"{BUDGETS}?scope={quote(scope, safe='')}"


def project_href(name: str) -> str:
    """Return the address of the page of a project."""
    return f"{PROJECTS}/{quote(name, safe='')}"


def slot_href(name: str) -> str:
    """Return the address of the page of a slot, whatever is in its name."""
    return f"{SLOTS}/{quote(name, safe='')}"


def may_open(view: View, href: str) -> bool:
    """Tell whether a link to one of the pages leads somewhere."""
    parts = urlsplit(href)
    if parts.path.startswith(_FOR_ADMINISTRATORS):
        return view.may("admin")
    if parts.path == BUDGETS and parts.query.startswith("scope="):
        scope = Scope(unquote(parts.query.removeprefix("scope=")))
        return not view.caller.is_bound or view.caller.bounds.may_charge(scope)
    return True
