"""A store that does not answer who asks: every page comes soon, with a status of its own."""

from __future__ import annotations

import asyncio

import pytest

from api.fake_tokens import Door, FakeTokens
from dashboard.browser import Browser, text_of
from headgate.dashboard.dashboard import Dashboard
from headgate.errors import StoreUnavailableError
from headgate.storage.tokens import KeptToken

TOKEN = "headgate_token"
LOG_IN = 'href="/ui/login"'


@pytest.fixture
def door() -> Door:
    """Give an application that asks for tokens, and has pages."""
    door = Door(needs_token=True)
    door.client.app.serve_pages(Dashboard(door.client.app.api, "on"))
    return door


async def visitor_of(door: Door) -> Browser:
    """Give a browser that has a secret for forms, and a token that was never looked up."""
    browser = Browser(door.client.app)
    await browser.get("/ui/login")
    browser.cookies[TOKEN] = door.token()
    return browser


@pytest.fixture
def hanging(door: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Give the same with a store that never says who has a token."""
    monkeypatch.setattr("headgate.dashboard.dashboard.PAGE_SECONDS", 0.01)
    never = asyncio.Event()

    async def get(_: FakeTokens, __: str) -> KeptToken | None:
        await never.wait()
        return None

    monkeypatch.setattr(FakeTokens, "get", get)
    return door


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/ui/tasks", 503),
        ("/ui/login", 503),
        ("/ui/nope", 404),
        ("/ui/scheduler/pause", 405),
    ],
)
async def test_a_page_waits_no_longer_for_its_visitor_than_for_its_figures(
    path: str, status: int, hanging: Door
) -> None:
    browser = await visitor_of(hanging)
    async with asyncio.timeout(30.0):
        answer = await browser.get(path)
    assert answer.status == status
    assert LOG_IN not in answer.body.decode(), "the token that is kept may be a good one"


async def test_a_login_that_cannot_be_checked_says_so_and_may_be_sent_again(hanging: Door) -> None:
    browser = Browser(hanging.client.app)
    await browser.get("/ui/login")
    async with asyncio.timeout(30.0):
        answer = await browser.post("/ui/login", {"token": hanging.token()})
    assert answer.status == 503
    assert "The store did not answer in time" in text_of(answer.body)
    assert TOKEN not in browser.cookies
    assert LOG_IN in answer.body.decode()


@pytest.mark.parametrize(("path", "status"), [("/ui/tasks", 503), ("/ui/nope", 404)])
async def test_a_store_that_fails_does_not_tell_a_visitor_to_log_in_again(
    path: str, status: int, door: Door
) -> None:
    browser = await visitor_of(door)
    door.tokens.failure = StoreUnavailableError("it is away")
    answer = await browser.get(path)
    assert answer.status == status
    assert LOG_IN not in answer.body.decode()
    assert ("You stay logged in." in text_of(answer.body)) is (status == 503)


async def test_whose_token_is_no_good_is_told_to_log_in_where_nothing_is(door: Door) -> None:
    for kept in ("", "hg_no-token", door.token("submit")):
        browser = Browser(door.client.app)
        if kept:
            browser.cookies[TOKEN] = kept
        answer = await browser.get("/ui/nope")
        assert answer.status == 404
        assert LOG_IN in answer.body.decode(), kept
