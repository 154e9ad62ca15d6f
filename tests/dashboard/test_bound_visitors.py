"""What visitors with less than all see: nothing of others, and no link that leads to a refusal."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, submit, text_of
from dashboard.test_login import token_of
from headgate.tokens import UNBOUND, Bounds
from headgate.web.entrance import EntranceRules

SETTINGS = """
[projects.default]
status = "paused"
[projects.secretproj]
status = "paused"
[budgets.root]
limit_usd = "0.0"
[budgets."project:default"]
limit_usd = "0.0"
"""
KINDS = {
    "reader": UNBOUND,
    "of an agent": Bounds(agent_id="a"),
    "of a project": Bounds(project_id="default"),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_no_link_of_a_page_is_refused(kind: str, tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS) as (service, app):
        task = await submit(app, callbackUrl="https://hooks.example/x?sig=SECRETSIG")
        token = await token_of(service, "read", bounds=KINDS[kind])
        app.api.entrance.rules = EntranceRules(needs_token=True)
        browser = Browser(app)
        browser.cookies["headgate_token"] = token
        for path in ("/", "/ui/tasks", f"/ui/tasks/{task}", "/ui/budgets", "/ui/slots"):
            page = await browser.get(path)
            assert page.status == 200, path
            for href in set(re.findall(r'<a [^>]*href="(/[^"]*)"', page.body.decode())):
                answer = await browser.get(html.unescape(href))
                assert answer.status not in (403, 404), (path, href)


async def test_the_overview_of_an_agent_names_no_project(tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS) as (service, app):
        app.api.entrance.rules = EntranceRules(needs_token=True)
        for kind, is_told in (("reader", True), ("of an agent", False), ("of a project", False)):
            browser = Browser(app)
            browser.cookies["headgate_token"] = await token_of(
                service, "read", bounds=KINDS[kind], name=kind
            )
            assert ("secretproj" in text_of((await browser.get("/")).body)) is is_told, kind


async def test_the_page_of_a_task_hides_the_query_of_its_webhook(tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS) as (_, app):
        task = await submit(app, callbackUrl="https://hooks.example/x?sig=SECRETSIG")
        facts = text_of((await Browser(app).get(f"/ui/tasks/{task}")).body)
    assert "Webhook to https://hooks.example/x" in facts
    assert "ebhook to https://hooks.example/x?sig=SECRETSIG" not in facts
    assert "To https://hooks.example/x?sig=SECRETSIG" not in facts


async def test_a_region_has_the_address_that_its_visitor_came_by(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        for host in ("127.0.0.1:7420", "localhost:7420"):
            region = await browser.get("/", hx_request="true", hx_target="state-now", host=host)
            assert f"http://{host}" in region.body.decode()
