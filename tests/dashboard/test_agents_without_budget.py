"""A token for an agent whose name is no part of a scope: it has no budget, and pages say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, submit, text_of
from dashboard.test_login import LOCKED, token_of
from headgate.storage.tokens import Bounds

NAMES = ("Lead Reviewer", "a/b", "ü", ".hidden")
every_name = pytest.mark.parametrize("name", NAMES)


@every_name
async def test_the_overview_and_the_budgets_open_and_say_so(name: str, tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        admin = {"authorization": f"Bearer {await token_of(service)}"}
        await submit(app, headers=admin, agentId=name)
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(
            service, "read", bounds=Bounds(agent_id=name)
        )
        for path in ("/", "/ui/budgets"):
            page = await browser.get(path)
            assert page.status == 200, path
            text = text_of(page.body)
            assert "no budget of its own" in text, path
            assert "The ledger does not answer" not in text
            assert "Spent" not in text


@every_name
async def test_over_the_api_its_budget_is_empty_and_its_journal_too(
    name: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        own = await token_of(service, "read", bounds=Bounds(agent_id=name))
        headers = {"authorization": f"Bearer {own}"}
        status = await answer_of(app, "GET", "/budgets/status", headers=headers)
        assert (status.status, status.json["scope"]) == (200, f"agent:{name}")
        assert (status.json["spentUsd"], "children" in status.json) == ("0.00", False)
        journal = await answer_of(app, "GET", "/budgets/journal", headers=headers)
        assert (journal.status, journal.json["entries"]) == (200, [])
        named = await answer_of(app, "GET", "/budgets/status?scope=project:x", headers=headers)
        assert named.status == 403


@every_name
async def test_making_such_a_token_says_that_it_has_no_budget(name: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        wanted = {"name": "t", "permissions": ["read"], "agentId": name}
        made = (await answer_of(app, "POST", "/tokens", json.dumps(wanted).encode())).json
        assert "no budget of its own" in made["note"]
        plain = {**wanted, "name": "plain", "agentId": "writer"}
        assert (
            "note" not in (await answer_of(app, "POST", "/tokens", json.dumps(plain).encode())).json
        )
        browser = Browser(app)
        await browser.get("/ui/settings/tokens")
        fields = {"name": "u", "permissions": "read", "agentId": name, "expiresAt": ""}
        page = await browser.post("/ui/settings/tokens", fields)
        assert page.status == 201
        assert "no budget of its own" in text_of(page.body)
