"""Settings: what is in force without its secrets, reloads, overrides, the audit log, tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, text_of
from dashboard.test_login import LOCKED, token_of
from headgate.dashboard.audit import PAGE_ROWS
from headgate.storage.audit import SIGNAL
from headgate.storage.tokens import Bounds

PAGES = ("/ui/settings", "/ui/settings?all=yes", "/ui/settings/audit", "/ui/settings/tokens")
OTHER_PAGES = ("/", "/ui/tasks", "/ui/projects", "/ui/budgets", "/ui/slots", "/ui/webhooks")
SECRETS = """
[targets.web]
kind = "http"
url = "http://127.0.0.1:9/run?key=canary-1"
headers = { authorization = "Bearer canary-2" }
default = true

[targets.shell]
kind = "command"
command = ["true", "--api-key=canary-3"]
env = { KEY = "canary-4" }

[webhooks]
alerts_url = "https://hooks.example/x?sig=canary-5"

[[slots]]
name = "work"
provider = "zai"
enabled = false
key_file = "/nowhere/key"
base_url = "http://127.0.0.1:9/x?token=canary-6"
headers = { x-secret = "canary-7", x-other = "{env.NAME}" }
wake_body = '{"api_key": "canary-8", "model": "m"}'
"""
PROJECT = "[projects.search]\ncredit_weight = 5\n"


async def settings_text(browser: Browser, path: str = "/ui/settings") -> str:
    return text_of((await browser.get(path)).body)


async def change(app: object, url: str, body: bytes) -> None:
    answer = await answer_of(app, "PATCH", url, body)  # type: ignore[arg-type]
    assert answer.status == 200, answer.body


async def test_no_secret_of_the_settings_is_on_any_page(tmp_path: Path) -> None:
    async with serving(tmp_path, SECRETS) as (_, app):
        browser = Browser(app)
        assert '"x-other":"{env.NAME}"' in await settings_text(browser)
        (tmp_path / "headgate.toml").write_text(SECRETS.replace("canary", "canary-new"))
        _, said = await browser.act("/ui/settings/reload")
        assert said.startswith("Done: Headgate read the file; 7 keys changed")
        for path in (*PAGES, "/ui/slots/work", *OTHER_PAGES):
            page = await browser.get(path)
            assert page.status == 200, path
            assert "canary" not in page.body.decode(), path
        assert "No setting matches" in await settings_text(browser, "/ui/settings?text=canary")


async def test_a_file_that_cannot_be_used_changes_nothing_and_stays_on_the_page(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, PROJECT) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/settings")
        (tmp_path / "headgate.toml").write_text("[projects.search]\ncredit_weight = -1\n")
        page, said = await browser.act("/ui/settings/reload")
        assert said.startswith("Not done: nothing changed, because projects.search")
        assert "✕\ufe0e refused" in text_of(page.body)
        assert "projects.search.credit_weight 5.0 the file" in text_of(page.body)


async def test_an_override_is_ended_and_the_file_holds_again(tmp_path: Path) -> None:
    toml = PROJECT + '[budgets."session:s"]\nlimit_tokens = 5\n'
    async with serving(tmp_path, toml) as (_, app):
        await change(app, "/projects/search", b'{"creditWeight": 7}')
        await change(app, "/budgets?scope=session%3As", b'{"limitTokens": 9}')
        browser = Browser(app)
        page = (await browser.get("/ui/settings")).body.decode()
        forms = re.findall(r'name="(kind|name|field)" value="([^"]*)"', page)
        assert ("name", "session:s") in forms
        for kind, name, field in (
            ("projects", "search", "creditWeight"),
            ("budgets", "session:s", "limitTokens"),
        ):
            fields = {"kind": kind, "name": name, "field": field}
            _, said = await browser.act("/ui/settings/overrides/end", fields)
            assert said.startswith("Done:"), said
        assert "Changed beside the file" not in await settings_text(browser)
        strange = {"kind": "projects", "name": "search", "field": "<i>"}
        _, said = await browser.act("/ui/settings/overrides/end", strange)
        assert said.startswith("Not done: Override:")
        unknown = await browser.post("/ui/settings/overrides/end", {"kind": "scheduler"})
        assert unknown.status == 404


async def test_everything_at_its_default_is_said_to_be_so(tmp_path: Path) -> None:
    async with serving(tmp_path, options={"store.url": None}) as (_, app):
        text = await settings_text(Browser(app), "/ui/settings?section=agents&all=yes")
        assert "No setting matches" in text
        assert (await Browser(app).get("/ui/settings?from=-1")).status == 400
        assert (await Browser(app).get("/ui/settings?section=none")).status == 400


async def test_large_settings_come_in_parts(tmp_path: Path) -> None:
    toml = "".join(f"[agents.a{number:04}]\ncapacity = 2\n" for number in range(300))
    async with serving(tmp_path, toml) as (_, app):
        browser = Browser(app)
        page = await browser.get("/ui/settings?section=agents")
        assert len(page.body) < 150_000
        assert "300 in all" in text_of(page.body)
        rest = await settings_text(browser, "/ui/settings?section=agents&from=200")
    assert "agents.a0299.capacity 2" in rest
    assert "agents.a0199.capacity" not in rest


async def test_the_audit_log_tells_who_changed_what_page_by_page(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECT) as (service, app):
        browser = Browser(app)
        assert "There are no changes yet" in await settings_text(browser, "/ui/settings/audit")
        await change(app, "/projects/search", b'{"creditWeight": 7}')
        text = await settings_text(browser, "/ui/settings/audit")
        assert "local project.patch search projects.search.credit_weight : 5.0 → 7.0" in text
        for number in range(PAGE_ROWS):
            detail: dict[str, object] = {f"<i>{one}": "x" * 9_999 for one in range(9)}
            await service.api.audit.record(SIGNAL, "made.up", f"<script>{number}", detail)
        first = await browser.get("/ui/settings/audit")
        assert len(first.body) < 150_000
        assert "<script>0" not in first.body.decode()
        assert "project.patch" not in first.body.decode()
        older = re.search(r'rel="next" href="([^"]+)"', first.body.decode())
        assert older is not None
        rest = await settings_text(browser, older[1].replace("&amp;", "&"))
        assert "project.patch" in rest
        assert (await browser.get("/ui/settings/audit?cursor=x")).status == 400


async def test_a_token_is_made_and_its_text_is_shown_once(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(service, name="mine")
        await browser.get("/ui/settings/tokens")
        fields = {
            "name": "<b>laptop",
            "permissions": ["read", "submit"],
            "expiresAt": "7",
            "agentId": "a",
        }
        made = await browser.post("/ui/settings/tokens", fields)
        assert made.status == 201
        assert made.headers["cache-control"] == "no-store"
        page = made.body.decode()
        text = re.search(r"hg_[0-9a-f]{12}_[0-9a-f]{48}", page)
        assert text is not None
        assert "<b>laptop" not in page
        assert not any(text[0] in line for line in browser.set_cookies)
        again = (await browser.get("/ui/settings/tokens")).body.decode()
        assert text[0] not in again
        assert "submit, read agent a" in text_of(again)
        assert "mine" in again
        assert "the one you use" in again
        answer = await answer_of(
            app, "GET", "/tasks", headers={"authorization": f"Bearer {text[0]}"}
        )
        assert answer.status == 200
        token_id = text[0].split("_")[1]
        _, said = await browser.act(f"/ui/settings/tokens/{token_id}/revoke")
        assert "<b>laptop" in said
        answer = await answer_of(
            app, "GET", "/tasks", headers={"authorization": f"Bearer {text[0]}"}
        )
        assert answer.status == 401


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "x", "permissions": []}, "Not done: Permissions:"),
        ({"name": "", "permissions": ["read"]}, "Not done: Name:"),
        ({"name": "x", "permissions": ["admin"], "agentId": "a"}, "Not done: Permissions:"),
        (
            {"name": "x", "permissions": ["read"], "projectId": "none"},
            "Not done: Only for the project: unknown",
        ),
        ({"name": "x", "permissions": ["read"], "expiresAt": "9999"}, "Not done: Expires after:"),
    ],
)
async def test_a_token_that_cannot_be_is_refused_on_the_page(
    tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/settings/tokens")
        _, found = await browser.act("/ui/settings/tokens", fields)
    assert found.startswith(said), found


async def test_nobody_makes_a_token_that_may_do_more_than_its_maker(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(service, "read", "admin")
        await browser.get("/ui/settings/tokens")
        fields = {"name": "x", "permissions": ["cancel"]}
        _, said = await browser.act("/ui/settings/tokens", fields)
    assert said.startswith("Not done: Permissions: is more than")


@pytest.mark.parametrize("bounds", [Bounds(), Bounds(agent_id="coder")])
async def test_only_administrators_see_settings(tmp_path: Path, bounds: Bounds) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(
            service, "read", "submit", "cancel", bounds=bounds
        )
        for path in PAGES:
            assert (await browser.get(path)).status == 403
        for action in ("reload", "overrides/end", "tokens", "tokens/00/revoke"):
            assert (await browser.post(f"/ui/settings/{action}")).status == 403


async def test_a_token_that_is_not_there_is_a_page_that_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/settings/tokens")
        assert (await browser.post("/ui/settings/tokens/zz/revoke")).status == 404
