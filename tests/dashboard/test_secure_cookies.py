"""Over HTTPS every cookie has a name that nobody can set or read without it."""

from __future__ import annotations

from pathlib import Path

from dashboard.browser import Browser, serving, text_of
from dashboard.test_login import LOCKED, token_of
from headgate.app import Service

PREFIX = "__Host-"


async def logged_in(browser: Browser, service: Service) -> None:
    await browser.get("/ui/login")
    answer = await browser.post("/ui/login", {"token": await token_of(service)})
    assert answer.status == 303, text_of(answer.body)


def assert_is_of_this_host_alone(line: str) -> None:
    """Check what a browser asks of a cookie with the prefix; it ignores one that has less."""
    parts = line.split("; ")
    assert parts[0].startswith(PREFIX), line
    assert {"Secure", "Path=/", "SameSite=Strict"} <= set(parts), line
    assert "Domain" not in line


async def test_every_cookie_is_kept_and_dropped_for_this_host_and_https_alone(
    tmp_path: Path,
) -> None:
    lines = []
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app, scheme="https")
        await browser.get("/ui/login")
        lines += browser.set_cookies
        await logged_in(browser, service)
        lines += browser.set_cookies
        for path, fields in (
            ("/ui/scheduler/pause", {"back": "/ui/projects"}),
            ("/ui/theme", {"theme": "dark"}),
            ("/ui/theme", {"theme": ""}),
        ):
            assert (await browser.post(path, fields)).status == 303
            lines += browser.set_cookies
        page = await browser.get("/ui/projects")
        assert "Done: everything is paused" in text_of(page.body)
        lines += browser.set_cookies
        assert (await browser.post("/ui/logout")).status == 303
        lines += browser.set_cookies
        assert list(browser.cookies) == [f"{PREFIX}headgate_csrf"]
    assert len(lines) == 7
    for line in lines:
        assert_is_of_this_host_alone(line)


async def test_what_was_kept_without_https_counts_for_nothing_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app)
        await logged_in(browser, service)
        await browser.post("/ui/theme", {"theme": "dark"})
        planted = browser.cookies["headgate_csrf"]
        browser.scheme = "https"
        assert (await browser.get("/")).status == 303
        login = await browser.get("/ui/login")
        assert "data-theme=" not in login.body.decode()
        assert planted not in login.body.decode()
        fields = {"token": await token_of(service), "csrf": planted}
        assert (await browser.post("/ui/login", fields)).status == 403
        await logged_in(browser, service)
        assert (await browser.get("/")).status == 200


async def test_whoever_used_https_before_logs_in_without_it_and_both_logins_last(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        browser = Browser(app, scheme="https")
        await logged_in(browser, service)
        browser.scheme = "http"
        assert (await browser.get("/")).status == 303
        await logged_in(browser, service)
        for browser.scheme in ("https", "http"):
            assert (await browser.get("/")).status == 200


async def test_scripts_are_told_for_which_lines_to_keep_the_theme(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        for scheme, name in (("https", f"{PREFIX}headgate_theme"), ("http", "headgate_theme")):
            page = await Browser(app, scheme=scheme).get("/")
            assert f' data-theme-cookie="{name}"' in page.body.decode()
