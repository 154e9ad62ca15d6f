"""Addresses as people write them: a slash at the end, an old client, a token that may not look."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath

import pytest

from api.asgi_client import scope_of
from dashboard.browser import Browser, serving, submit, text_of
from dashboard.test_login import LOCKED, token_of
from dashboard.test_slots_page import with_slots
from headgate.api.callers import LOCAL
from headgate.api.http.request import Request
from headgate.dashboard.page import View
from headgate.storage.tokens import Permission

HELD = '[projects.default]\nstatus = "paused"\n'
OWN_PAGES: tuple[tuple[Permission, str], ...] = (
    ("admin", "/ui/settings"),
    ("admin", "/ui/settings/tokens"),
    ("admin", "/ui/webhooks"),
    ("cancel", "/ui/tasks/cancel?text=x"),
    ("submit", "/ui/tasks/retry?text=x"),
)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("/ui/tasks/", "/ui/tasks"),
        ("/ui/tasks/?state=queued&project=a%2Fb", "/ui/tasks?state=queued&project=a%2Fb"),
        ("/ui/settings/tokens//", "/ui/settings/tokens"),
        ("/ui/slots/a%2Fb/", "/ui/slots/a%2Fb"),
    ],
)
async def test_a_slash_at_the_end_leads_to_the_page(given: str, place: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        answer = await Browser(app).get(given)
    assert (answer.status, answer.headers["location"]) == (308, place)


def as_opened(address: str) -> str:
    """Return what a browser asks for: it resolves dots, also those that are escaped."""
    return normpath(re.sub("%2e", ".", address, flags=re.IGNORECASE))


@pytest.mark.parametrize("name", [".", "..", "~.."])
async def test_a_name_of_dots_has_a_page_and_switches_as_others_have(
    name: str, tmp_path: Path
) -> None:
    async with with_slots(tmp_path, name, before=HELD) as (_, app, _provider):
        await submit(app, agentId=name)
        browser = Browser(app)
        (link, *_) = re.findall(r'href="(/ui/slots/[^"]*)"', await page_of(browser, "/ui/slots"))
        assert f"Slot {name} " in text_of(await page_of(browser, as_opened(link)))
        agents = await page_of(browser, "/ui/projects")
        (switch, *_) = re.findall(r'action="(/ui/agents/[^"]*)"', agents)
        _, said = await browser.act(as_opened(switch), {"status": "paused"})
        assert f"agent {name} is paused" in said


@pytest.mark.parametrize(
    "url",
    [
        "/ui/projects?projects_from=100",
        "/ui/projects?agents_from=100",
        "/ui/projects?lanes_from=100",
        "/ui/projects/default?lanes_from=100",
        "/ui/budgets?from=100",
        "/ui/settings/tokens?from=100",
        "/ui/settings?all=yes&from=9000",
    ],
)
async def test_an_address_beyond_the_end_of_a_list_says_so(url: str, tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (service, app):
        await submit(app)
        await token_of(service)
        text = text_of((await Browser(app).get(url)).body)
    assert "This page is past the last one." in text
    assert "Back to the first" in text


async def page_of(browser: Browser, url: str) -> str:
    """Return a page as it is written."""
    return (await browser.get(url)).body.decode()


async def test_a_form_is_not_sent_on_and_an_api_address_stays_exact(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        assert (await browser.post("/ui/budgets/limit/")).status == 404
        assert (await browser.get("/stats/")).status == 404


async def test_a_client_that_names_no_host_is_given_an_address_that_works(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        for server, address in (
            (("127.0.0.1", 7431), "http://127.0.0.1:7431"),
            (("::1", 7431), "http://[::1]:7431"),
            (None, "http://localhost"),
        ):
            scope = {**scope_of("GET", "/", {}), "headers": [], "server": server}

            async def receive() -> dict[str, str]:
                return {"type": "http.disconnect"}

            view = View(
                api=app.api, request=Request(scope, receive), caller=LOCAL, mode="on", now=0.0
            )
            assert view.address == address


@pytest.mark.parametrize(("permission", "url"), OWN_PAGES)
async def test_every_page_needs_read_beside_its_own_permission(
    permission: Permission, url: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        await submit(app, headers={"authorization": f"Bearer {await token_of(service)}"})
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(service, permission)
        answer = await browser.get(url)
        assert answer.status == 403
        assert "needs the permission read" in text_of(answer.body)
        browser.cookies["headgate_token"] = await token_of(service, permission, "read")
        assert (await browser.get(url)).status == 200


async def test_an_action_needs_read_too(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await browser.get("/ui/login")
        browser.cookies["headgate_token"] = await token_of(service, "admin")
        answer = await browser.post("/ui/scheduler/pause")
        assert (answer.status, app.api.is_paused) == (403, False)
