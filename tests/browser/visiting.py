"""What tests do to come to a page, and what they hold in their hands there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, ViewportSize, expect

from browser.watching import Watch
from service.support import ServiceProcess

WAIT_MS = 40_000
"""How long anything is waited for: only a failure takes so long, on a busy machine too."""
WIDE: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}

Visitor = Callable[..., Page]


def log_in(page: Page, service: ServiceProcess, path: str = "/") -> None:
    """Log in as a person does, and come to a page."""
    page.goto(f"{service.address}{path}")
    page.get_by_label("Token").fill(service.token)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{service.address}{path}")


def login_of(browser: Browser, service: ServiceProcess) -> Any:
    """Log in through the form once, and return the cookies that this leaves."""
    with browser.new_context() as context:
        log_in(context.new_page(), service)
        return context.storage_state()


@contextmanager
def visits_to(
    service: ServiceProcess, browser: Browser, login: Any, watch: Watch
) -> Iterator[Visitor]:
    """Give what opens pages of a service, each watched and in a browser of its own.

    They are logged in unless told otherwise, and closed in the end.
    """
    with ExitStack() as stack:

        def open_page(path: str | None = "/", *, is_let_in: bool = True, **options: Any) -> Page:
            state = login if is_let_in else None
            given = {"viewport": WIDE, "storage_state": state, "reduced_motion": "reduce"}
            context = stack.enter_context(browser.new_context(**{**given, **options}))
            context.set_default_timeout(WAIT_MS)
            page = context.new_page()
            watch.look_at(page)
            if path is not None:
                page.goto(f"{service.address}{path}")
            return page

        yield open_page


def was_done(page: Page, part: str = "") -> None:
    """See that the page says once that something was done."""
    said = page.locator("main > .flash")
    expect(said).to_contain_text("Done:")
    expect(said).to_contain_text(part)
