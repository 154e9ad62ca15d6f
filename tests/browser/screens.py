"""Every screen of the dashboard: its address, and what a person does there before it is looked at.

Rule: whatever has to hold for all screens is tested over this list, and drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote
from uuid import uuid4

from playwright.sync_api import Page

from service.support import ServiceProcess, wait_until

FOUND_SECONDS = 40.0
NAVIGATION = {
    "overview": "/",
    "tasks": "/ui/tasks",
    "calls": "/ui/calls",
    "projects": "/ui/projects",
    "budgets": "/ui/budgets",
    "slots": "/ui/slots",
    "webhooks": "/ui/webhooks",
    "settings": "/ui/settings",
}
"""The pages that the head of every page leads to, in its order."""


def make_token(page: Page) -> None:
    """Make a token, whose text is shown this once."""
    page.get_by_label("Name").fill(f"somebody new {uuid4().hex}")
    page.get_by_role("button", name="Create the token").click()
    page.locator(".made code").wait_for()


def ask_first(page: Page) -> None:
    """Open the question that comes before a task is cancelled."""
    page.locator("summary", has_text="Cancel").click()
    page.get_by_role("button", name="Cancel the task").wait_for()


def open_keys(page: Page) -> None:
    """Open the list of keys."""
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()


class Screen(NamedTuple):
    """An address with places in braces, and what makes it another screen than that page."""

    path: str
    prepare: Callable[[Page], None] | None = None
    status: int = 200
    is_let_in: bool = True

    def visit(self, page: Page, places: dict[str, str], address: str) -> None:
        """Come to the screen as a person does."""
        answer = page.goto(address + self.path.format(**places))
        assert answer is not None
        assert answer.status == self.status, page.locator("main").inner_text()
        if self.prepare is not None:
            self.prepare(page)


SCREENS = {
    **{name: Screen(path) for name, path in NAVIGATION.items()},
    "task-done": Screen("/ui/tasks/{done}"),
    "task-failed": Screen("/ui/tasks/{failed}"),
    "task-waits": Screen("/ui/tasks/{waiting}"),
    "confirm": Screen("/ui/tasks/{waiting}", ask_first),
    "bulk-cancel": Screen("/ui/tasks/cancel?state=queued"),
    "bulk-retry": Screen("/ui/tasks/retry?state=failed"),
    "call": Screen("/ui/calls/{call}"),
    "project": Screen("/ui/projects/{project}"),
    "budget": Screen("/ui/budgets?scope={scope}"),
    "slot": Screen("/ui/slots/{slot}"),
    "slot-log": Screen("/ui/slots/{slot}/log"),
    "webhook": Screen("/ui/webhooks/{webhook}"),
    "audit": Screen("/ui/settings/audit"),
    "tokens": Screen("/ui/settings/tokens"),
    "token-made": Screen("/ui/settings/tokens", make_token),
    "keys": Screen("/", open_keys),
    "not-found": Screen("/ui/tasks/none", status=404),
    "login": Screen("/ui/login", is_let_in=False),
}


def find_places(service: ServiceProcess, *, waiting: str, scope: str) -> dict[str, str]:
    """Return what stands in the addresses: a task in each state, and one of everything else.

    What was just asked for may still be under way, as a webhook that is given up.
    """
    found = {
        "done": _first(service, "tasks", "taskId", "limit=1&state=done"),
        "failed": _first(service, "tasks", "taskId", "limit=1&state=failed"),
        "waiting": _first(service, "tasks", "taskId", f"limit=1&state=queued&{waiting}"),
        "call": _first(service, "calls", "callId"),
        "project": _first(service, "projects", "id"),
        "scope": scope,
        "slot": _first(service, "slots", "name"),
        "webhook": _first(service, "webhooks", "id", "limit=1&state=dead"),
    }
    return {name: quote(value, safe="") for name, value in found.items()}


def _first(service: ServiceProcess, kind: str, key: str, query: str = "") -> str:
    def rows() -> list[dict[str, Any]]:
        return list(service.ask("GET", f"/{kind}?{query}").body[kind])

    wait_until(rows, seconds=FOUND_SECONDS, what=lambda: f"there are no {kind} with {query}")
    return str(rows()[0][key])
