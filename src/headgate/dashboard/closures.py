"""The closures: what keeps tasks from starting, who closed it, and the button that opens it."""

from __future__ import annotations

from typing import Any

from headgate.api.admin import MAX_CLOSURES, opened
from headgate.api.slots import OPENED, known_closures, shown_closures
from headgate.core.task_view import closure_body
from headgate.dashboard.lists import CLOSURES
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.errors import InvalidFieldError

NOUNS = {kind: noun for noun, kind in OPENED.items()}


async def show(view: View, _: str) -> Page:
    """Show everything that is closed, by kind and name."""
    found = shown_closures(await known_closures(view.api))
    context: dict[str, Any] = {
        "closures": [(NOUNS[one.kind], closure_body(one)) for one in found[:MAX_CLOSURES]],
        "more": max(0, len(found) - MAX_CLOSURES),
        "can_act": view.can("admin"),
    }
    return Page(template="closures.html", title="Closures", context=context)


async def reopen(view: View, _: str, form: Form) -> Done:
    """Open one of them before its time."""
    noun, name = form.get("kind"), form.get("name")
    if noun not in OPENED:
        raise InvalidFieldError("kind", f"must be one of {', '.join(OPENED)}")
    await opened(view.api, view.request, OPENED[noun], name)
    said = f"{noun} {name or '(root)'} is open, until what closed it closes it again."
    return Done(to=CLOSURES, said=said)


ROUTES: tuple[PageRoute, ...] = (
    page_route(CLOSURES, show, needs="admin"),
    action_route(f"{CLOSURES}/open", reopen),
)
