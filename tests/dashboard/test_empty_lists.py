"""Where a list is empty, a page says so; it draws no table without rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving
from dashboard.test_login import logged_in, token_of

PAGES = (
    "/",
    "/ui/tasks",
    "/ui/tasks?state=failed",
    "/ui/calls",
    "/ui/calls?state=done",
    "/ui/projects",
    "/ui/projects?find=zzz",
    "/ui/projects/default",
    "/ui/budgets",
    "/ui/budgets?find=zzz",
    "/ui/budgets?scope=session%3Anew",
    "/ui/slots",
    "/ui/webhooks",
    "/ui/webhooks?state=dead",
    "/ui/settings",
    "/ui/settings?text=zzz",
    "/ui/settings/closures",
    "/ui/settings/audit",
    "/ui/settings/tokens",
)
NO_ROWS = re.compile(r"<tbody>\s*</tbody>")


@pytest.mark.parametrize("path", PAGES)
async def test_a_service_that_has_done_nothing_draws_no_empty_table(
    tmp_path: Path, path: str
) -> None:
    async with serving(tmp_path, "[auth]\nrequired = true\n") as (service, app):
        browser = Browser(app)
        await logged_in(browser, await token_of(service))
        page = await browser.get(path)
        assert page.status == 200
        assert NO_ROWS.search(page.body.decode()) is None
