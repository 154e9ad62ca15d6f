"""What visitors with less than all see: nothing of others, and no link that leads to a refusal."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, submit, text_of
from dashboard.test_login import token_of
from dashboard.test_webhooks_page import ALLOWED, NOWHERE, end
from headgate.api.auth import AuthRules
from headgate.dashboard.lists import scope_href
from headgate.storage.tokens import UNBOUND, Bounds, Permission
from headgate.storage.unit_of_work import message_id

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
    "of an agent in a project": Bounds(project_id="default", agent_id="a"),
}
ARE_TOLD: dict[Permission, bool] = {"admin": True, "read": False}


@pytest.mark.parametrize("kind", KINDS)
async def test_no_link_of_a_page_is_refused(kind: str, tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS) as (service, app):
        task = await submit(app, callbackUrl="https://hooks.example/x?sig=SECRETSIG")
        token = await token_of(service, "read", bounds=KINDS[kind])
        app.api.auth.rules = AuthRules(needs_token=True)
        browser = Browser(app)
        browser.cookies["headgate_token"] = token
        own = scope_href(KINDS[kind].own_name)
        seen = ("/", "/ui/tasks", f"/ui/tasks/{task}", "/ui/calls", "/ui/budgets", own, "/ui/slots")
        for path in seen:
            page = await browser.get(path)
            assert page.status == 200, path
            for href in set(re.findall(r'<a [^>]*href="(/[^"]*)"', page.body.decode())):
                answer = await browser.get(html.unescape(href))
                assert answer.status not in (403, 404), (path, href)


async def test_the_overview_of_an_agent_names_no_project(tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS) as (service, app):
        app.api.auth.rules = AuthRules(needs_token=True)
        for kind, is_told in (("reader", True), ("of an agent", False), ("of a project", False)):
            browser = Browser(app)
            browser.cookies["headgate_token"] = await token_of(
                service, "read", bounds=KINDS[kind], name=kind
            )
            assert ("secretproj" in text_of((await browser.get("/")).body)) is is_told, kind


async def test_webhooks_and_changes_are_told_to_administrators_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, SETTINGS + ALLOWED) as (service, app):
        task = await submit(app, callbackUrl=NOWHERE)
        assert (await answer_of(app, "POST", f"/tasks/{task}/cancel")).status == 200
        await end(service, message_id(task), has_arrived=False, error="answered 410: receiver-said")
        own = scope_href("project:default")
        changed = await answer_of(app, "PATCH", own.removeprefix("/ui"), b'{"limitUsd": "1"}')
        assert changed.status == 200
        app.api.auth.rules = AuthRules(needs_token=True)
        for permission, is_told in ARE_TOLD.items():
            browser = Browser(app)
            browser.cookies["headgate_token"] = await token_of(
                service, "read", permission, name=permission
            )
            for path, words in (
                ("/", "1 webhook was given up"),
                (f"/ui/tasks/{task}", "receiver-said"),
                (own, "changed"),
            ):
                text = text_of((await browser.get(path)).body)
                assert (words in text) is is_told, (permission, path)


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
