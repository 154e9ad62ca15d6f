"""A dashboard that is read-only, or off, and one that nobody has used yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.screens import NAVIGATION
from browser.watching import Watch
from service.support import ServiceProcess, running_service

ACTIONS = "main form[method=post], main details.confirm"


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    """Open a page for a service that asks for no token."""
    with browser.new_context() as context:
        one = context.new_page()
        watch.look_at(one)
        yield one


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Run a service as a newcomer starts it."""
    with running_service(tmp_path_factory.mktemp("fresh")) as service:
        yield service


@pytest.mark.parametrize("path", [*NAVIGATION.values()], ids=[*NAVIGATION])
def test_an_empty_screen_tells_a_newcomer_what_to_do(
    page: Page, fresh: ServiceProcess, path: str
) -> None:
    page.goto(f"{fresh.address}{path}")
    expect(page.locator("h1")).to_be_attached()
    if path not in ("/ui/settings", "/ui/projects"):
        expect(page.locator(".empty code", has_text="headgate").first).to_be_visible()
    expect(page.get_by_role("button", name="Log out")).to_have_count(0)


def test_the_first_task_appears_on_the_page_that_told_how_to_submit_it(
    page: Page, fresh: ServiceProcess
) -> None:
    page.goto(fresh.address)
    expect(page.get_by_text("Nothing has been submitted yet")).to_be_visible()
    fresh.wait_for(fresh.submit())
    expect(page.get_by_text("Nothing has been submitted yet")).to_have_count(0)


def test_a_read_only_dashboard_draws_no_action_and_refuses_each(
    page: Page, watch: Watch, tmp_path: Path
) -> None:
    watch.expect("status of 403")
    with running_service(tmp_path, "--dashboard", "read-only") as service:
        task = service.submit()
        service.wait_for(task)
        for path in (*NAVIGATION.values(), f"/ui/tasks/{task}", "/ui/projects/default"):
            page.goto(f"{service.address}{path}")
            expect(page.get_by_text("read-only", exact=True)).to_be_visible()
            assert page.locator(ACTIONS).count() == 0, path
        secret = {one["name"]: one["value"] for one in page.context.cookies()}["headgate_csrf"]
        page.evaluate(
            """([action, secret]) => {
              const form = document.createElement("form");
              form.method = "post";
              form.action = action;
              const field = document.createElement("input");
              field.name = "csrf";
              field.value = secret;
              form.append(field);
              document.body.append(form);
              form.submit();
            }""",
            [f"/ui/tasks/{task}/retry", secret],
        )
        expect(page.get_by_role("heading", level=1)).to_contain_text("read-only")
        assert len(service.ask("GET", "/tasks").body["tasks"]) == 1
        page.goto("about:blank")


def test_a_dashboard_that_is_off_is_not_there(page: Page, watch: Watch, tmp_path: Path) -> None:
    watch.expect("status of 404")
    with running_service(tmp_path, "--dashboard", "off") as service:
        for path in NAVIGATION.values():
            answer = page.goto(f"{service.address}{path}")
            assert answer is not None
            assert answer.status == 404
        assert service.is_ready()
