"""A drawing is shared by those who may see the same, and by nobody else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dashboard.browser import Browser, serving
from dashboard.test_login import LOCKED, token_of
from headgate.api.api import Api
from headgate.api.callers import Caller
from headgate.api.http.request import Request
from headgate.dashboard.dashboard import ROUTES, Rendering, drawing_key
from headgate.dashboard.page import Page, PageRoute, View
from headgate.storage.tokens import Bounds

ONE = Caller(name="anna", token_id="1", permissions=frozenset({"read"}))
BY_PATH = {(route.method, route.path): route for route in ROUTES}
OVERVIEW, TOKENS = BY_PATH["GET", "/"], BY_PATH["GET", "/ui/settings/tokens"]


def key_of(api: Api, caller: Caller, *, route: PageRoute = OVERVIEW, **fields: Any) -> object:
    scope = {
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "query_string": fields.pop("query", b""),
        "headers": [(b"host", fields.pop("host", b"localhost"))],
    }
    known: dict[str, Any] = {"mode": "on", "now": 0.0, **fields}
    view = View(api=api, request=Request(scope, None), caller=caller, **known)
    return drawing_key(route, view)


async def test_two_tokens_with_equal_rights_share_a_drawing(tmp_path: Path) -> None:
    other = msgspec.structs.replace(ONE, name="ben", token_id="2", expires_at=9.0)
    async with serving(tmp_path) as (_, app):
        assert key_of(app.api, ONE) == key_of(app.api, other)
        # Its region marks the token that it is looked at with.
        assert key_of(app.api, ONE, route=TOKENS) != key_of(app.api, other, route=TOKENS)


@pytest.mark.parametrize(
    ("caller", "fields"),
    [
        ({"bounds": Bounds(project_id="p")}, {}),
        ({"bounds": Bounds(agent_id="p")}, {}),
        ({"bounds": Bounds(least_priority=5)}, {}),
        ({"permissions": frozenset({"read", "admin"})}, {}),
        ({}, {"mode": "read-only"}),
        ({}, {"theme": "dark"}),
        ({}, {"needs_login": True}),
        ({}, {"query": b"find=x"}),
        ({}, {"host": b"elsewhere"}),
    ],
)
async def test_whatever_a_region_depends_on_keeps_drawings_apart(
    caller: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        other = msgspec.structs.replace(ONE, **caller)
        assert key_of(app.api, ONE) != key_of(app.api, other, **fields)


async def test_a_region_that_many_ask_for_at_once_is_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = [], Rendering.region

    async def counted(self: Rendering, view: View, page: Page, name: str) -> str | None:
        drawn.append(name)
        return await draw(self, view, page, name)

    monkeypatch.setattr(Rendering, "region", counted)
    async with serving(tmp_path) as (_, app):
        asking = (Browser(app).region("/", "state-now") for _ in range(3))
        answers = await asyncio.gather(*asking)
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert drawn == ["state-now"]


async def test_no_region_is_older_than_the_page_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, draw = [], Rendering.region

    async def counted(self: Rendering, view: View, page: Page, name: str) -> str | None:
        drawn.append(page)
        return await draw(self, view, page, name)

    monkeypatch.setattr(Rendering, "region", counted)
    # Nothing that was made is old until the end of this test.
    monkeypatch.setattr("headgate.dashboard.page.FRESH_SECONDS", 3_600.0)
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        for _ in range(2):
            await browser.region("/", "state-now")
        await browser.get("/ui/projects")
        await browser.region("/", "state-now")
        assert len(drawn) == 1
        await browser.get("/")
        await browser.region("/", "state-now")
    assert len(drawn) == 2
    assert drawn[0] is not drawn[1]


async def test_a_whole_page_that_comes_for_a_region_names_its_own_visitor(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        for name in ("anna-token", "ben-token"):
            browser = Browser(app)
            browser.cookies["headgate_token"] = await token_of(service, "read", name=name)
            page = (await browser.region("/", "nothing-of-this-name")).body.decode()
            assert [one for one in ("anna-token", "ben-token") if one in page] == [name]


async def test_no_region_but_one_names_the_token_that_it_is_drawn_for(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        browser.cookies["headgate_token"] = await token_of(service, name="a-name-of-its-own")
        paths = [one.path for one in ROUTES if one.page is not None and "{" not in one.path]
        named, looked_at = set(), 0
        for path in paths:
            page = await browser.get(path)
            regions = _regions_of(page.body.decode())
            looked_at += len(regions)
            for region in regions:
                if b"a-name-of-its-own" in (await browser.region(path, region)).body:
                    named.add(path)
    assert looked_at > len(paths) / 2
    assert named <= {"/ui/settings/tokens", "/ui/settings/audit"}


def _regions_of(page: str) -> list[str]:
    return re.findall(r'id="([\w-]+)"[^>]* hx-get="', page)
