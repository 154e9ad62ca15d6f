"""What an action said: shown once, on the page that it leads to, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.asgi_client import Response, scope_of
from dashboard.browser import Browser, serving, submit, text_of
from headgate.api.http.request import Request
from headgate.dashboard.session import MAX_WAITING, Cookies

HELD = '[projects.default]\nstatus = "paused"\n[projects.other]\n'
DONE = '<p class="flash good"'
MAX_COOKIE_BYTES = 4_096
"""A browser keeps no longer one; what is said in it would never be seen."""


def has_message(answer: Response) -> bool:
    return DONE in answer.body.decode()


async def paused(browser: Browser, *, back: str) -> str:
    """Pause everything, and return where the form leads, without going there."""
    await browser.get("/ui/projects")
    answer = await browser.post("/ui/scheduler/pause", {"back": back})
    assert answer.status == 303
    return answer.headers["location"]


async def test_a_message_waits_for_its_own_page_whatever_else_is_opened_first(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        to = await paused(browser, back="/ui/projects")
        for other in ("/", "/ui/tasks", "/ui/projects/default", "/ui/projects?find=o"):
            assert not has_message(await browser.get(other)), other
        page = await browser.get(to)
        assert "Done: everything is paused; running tasks continue." in text_of(page.body)
        assert not has_message(await browser.get(to))


async def test_a_message_for_a_page_below_another_is_not_shown_above_it(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        to = await paused(browser, back="/ui/projects/default")
        assert not has_message(await browser.get("/ui/projects"))
        assert has_message(await browser.get(to))


async def test_an_address_is_the_same_however_it_is_written(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        await paused(browser, back="/ui/projects?find=it's (ä)")
        assert has_message(await browser.get("/ui/projects?find=it%27s%20(%C3%A4)"))


async def test_a_page_that_is_refused_shows_what_was_done_before(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        to = await paused(browser, back="/ui/projects/gone")
        page = await browser.get(to)
        assert page.status == 404
        assert has_message(page)
        assert not has_message(await browser.get(to))


async def test_a_region_leaves_the_message_for_its_page(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        await submit(app)
        browser = Browser(app)
        to = await paused(browser, back="/ui/projects")
        assert not has_message(await browser.region(to, "switch"))
        assert has_message(await browser.get(to))


async def test_a_message_is_kept_from_scripts(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects")
        await browser.post("/ui/scheduler/pause")
        kept = browser.set_cookies[0].split("; ")
        assert {"HttpOnly", "SameSite=Strict", "Max-Age=60", "Path=/"} <= set(kept)
        name = kept[0].partition("=")[0]
        await browser.get("/ui/projects")
        dropped = browser.set_cookies[0].split("; ")
        assert dropped[0] == f"{name}="
        assert {"Max-Age=0", "Path=/"} <= set(dropped)


async def test_of_messages_that_nobody_looks_at_the_oldest_give_way(tmp_path: Path) -> None:
    """A browser keeps some 180 cookies of a host, and then forgets the login."""
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        browser.cookies["headgate_said_\u00e4"] = "not one of ours, and no name that can be sent"
        waiting = [await paused(browser, back=f"/ui/projects?find={n}") for n in range(20)]
        said = [name for name in browser.cookies if re.fullmatch("headgate_said_[0-9a-f]+", name)]
        assert len(said) == MAX_WAITING
        for to in waiting[:-MAX_WAITING]:
            assert not has_message(await browser.get(to)), to
        for to in waiting[-MAX_WAITING:]:
            assert has_message(await browser.get(to)), to


async def test_a_message_of_one_browser_says_nothing_in_another(tmp_path: Path) -> None:
    """Another service of the host can set cookies, and cannot know under which name."""
    async with serving(tmp_path, HELD) as (_, app):
        neighbour, browser = Browser(app), Browser(app)
        to = await paused(neighbour, back="/ui/projects")
        await browser.get("/")
        planted = {name: text for name, text in neighbour.cookies.items() if "said" in name}
        assert planted
        browser.cookies.update(planted)
        assert not has_message(await browser.get(to))


@pytest.mark.parametrize(
    ("back", "to"),
    [
        ("/ui/projects?", "/ui/projects"),
        ("/ui/projects/", "/ui/projects"),
        ("/ui/projects/./default/", "/ui/projects/default"),
        ("/ui/projects/x/%2E%2e/default?", "/ui/projects/default"),
        ("/ui/projects/../tasks?state=queued", "/ui/tasks?state=queued"),
        ("/ui/projects/..", "/"),
        ("/ui/projects/../..", "/"),
        ("/ui/projects?find=../x", "/ui/projects?find=../x"),
        ("/ui/projects/a%2Fb?find=a%2Fb#rows", "/ui/projects/a%2Fb?find=a%2Fb#rows"),
    ],
)
async def test_an_action_leads_where_its_message_waits(back: str, to: str, tmp_path: Path) -> None:
    """A browser resolves steps up, and some addresses lead on to others."""
    async with serving(tmp_path, HELD) as (_, app):
        browser = Browser(app)
        assert await paused(browser, back=back) == to
        assert has_message(await browser.get(to.partition("#")[0]))


def cookies_with(headers: dict[str, str]) -> Cookies:
    return Cookies(Request(scope_of("GET", "/", headers), None))


def test_the_longest_message_in_any_script_is_one_that_a_browser_keeps() -> None:
    for text in ("plain ", "a;b=c, ", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{GRINNING FACE}", "ä"):
        https = {"x_forwarded_proto": "https"}
        ((_, header),) = cookies_with(https).say(text * 500, at="/", is_error=True)
        pair = header.decode().partition(";")[0]
        assert len(pair) < MAX_COOKIE_BYTES
        shown, is_error = cookies_with({**https, "cookie": pair}).said(at="/")
        assert is_error
        assert (text * 500).startswith(shown)
        assert len(shown) >= 200
