"""Every page: served in its frame, with its headers, without anything inline, and light."""

from __future__ import annotations

import gzip
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, submit, without_form_numbers
from headgate.dashboard.dashboard import ROUTES
from headgate.dashboard.page import CONTENT_SECURITY_POLICY
from service.support import running_service

PAGES = (
    "/",
    "/ui/tasks",
    "/ui/calls",
    "/ui/projects",
    "/ui/budgets",
    "/ui/slots",
    "/ui/webhooks",
    "/ui/settings",
    "/ui/settings/audit",
    "/ui/settings/closures",
    "/ui/settings/tokens",
)
MAX_PAGE_BYTES = 150_000
TEMPLATES = sorted(Path(__file__).parents[2].glob("src/headgate/dashboard/templates/*.html"))

# One of each kind that has a page of its own.
THINGS = """
[budgets."session:eval"]
limit_usd = "1"

[budgets."session:eval/workflow:w"]
limit_usd = "1"

[projects.default]
status = "paused"

[[slots]]
name = "spare"
provider = "zai"
key_file = "/nowhere"
enabled = false
base_url = "http://127.0.0.1:9"
"""
THEIR_PAGES = ("/ui/projects/default", "/ui/budgets?scope=session%3Aeval", "/ui/slots/spare")

every_page = pytest.mark.parametrize("path", PAGES)


class Elements(HTMLParser):
    """Collects what a page loads, links to, and has inline."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.inline: list[str] = []
        self.forms: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "style" or "style" in given or any(name.startswith("on") for name in given):
            self.inline.append(f"{tag} {given}")
        if tag == "script" and "src" not in given:
            self.inline.append("script")
        self.loaded += [given[name] for name in ("src",) if name in given]
        if tag == "link":
            self.loaded.append(given["href"])
        if tag == "a":
            self.links.append(given.get("href", ""))
        if tag == "form" and given.get("method", "").lower() == "post":
            self.forms.append(given.get("action", ""))
        if "id" in given:
            self.ids.append(given["id"])


def elements_of(body: bytes) -> Elements:
    found = Elements()
    found.feed(body.decode())
    return found


@every_page
async def test_every_page_has_its_headers_and_names_itself_in_the_navigation(
    path: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        answer = await Browser(app).get(path)
    assert answer.status == 200, answer.body
    assert answer.body.count(b'aria-current="page"') == 1
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cache-control"] == "no-store"


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert "data:" not in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; script-src 'self'; style-src")
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY


@every_page
async def test_no_page_has_anything_inline_or_from_another_host(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        await submit(app)
        found = elements_of((await Browser(app).get(path)).body)
    assert found.inline == []
    assert all(url.startswith("/ui/static/") for url in found.loaded)
    assert all(url.startswith(("/", "#", "?")) and url[:2] != "//" for url in found.links)
    assert all(url.startswith("/ui/") for url in found.forms)
    assert len(found.ids) == len(set(found.ids))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_no_template_has_anything_inline_or_marked_as_safe(template: Path) -> None:
    text = template.read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", text)
    assert not re.search(r"\|\s*safe\b|autoescape", text)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_every_form_that_changes_something_carries_the_secret(template: Path) -> None:
    text = template.read_text()
    for form in re.findall(r"<form[^>]*method=\"post\".*?</form>", text, re.DOTALL):
        assert "csrf()" in form


@every_page
async def test_a_page_with_all_that_it_loads_is_light(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        for _ in range(60):
            await submit(app, agentId="a" * 60, params={"prompt": "p" * 500})
        page = await Browser(app).get(path)
        whole = len(page.body)
        for url in set(elements_of(page.body).loaded):
            file = await answer_of(app, "GET", url, headers={"accept_encoding": "gzip, br"})
            assert file.status == 200, url
            whole += len(file.body)
    assert whole < MAX_PAGE_BYTES


async def test_the_pages_are_not_in_the_description_of_the_api(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        described = await answer_of(app, "GET", "/openapi.json")
    assert not [path for path in described.json["paths"] if path == "/" or path.startswith("/ui")]


async def test_without_the_dashboard_nothing_is_at_its_addresses(tmp_path: Path) -> None:
    async with serving(tmp_path, '[dashboard]\nmode = "off"\n') as (_, app):
        for path in (*PAGES, "/ui/static/headgate.css", "/ui/login", "/ui/live"):
            answer = await answer_of(app, "GET", path)
            assert (answer.status, answer.problem["code"]) == (404, "not_found")


async def test_a_read_only_dashboard_says_so_and_refuses_every_action(tmp_path: Path) -> None:
    async with serving(tmp_path, f'{THINGS}[dashboard]\nmode = "read-only"\n') as (_, app):
        task = await submit(app)
        browser = Browser(app)
        page = await browser.get("/")
        assert b"read-only" in page.body
        for path in (*PAGES, *THEIR_PAGES, f"/ui/tasks/{task}"):
            answer = await browser.get(path)
            assert answer.status == 200, path
            assert set(elements_of(answer.body).forms) <= {"/ui/theme", "/ui/logout"}, path
        for route in (one for one in ROUTES if one.action is not None):
            answer = await browser.post(route.path.replace("{id}", "x"))
            assert answer.status == 403, route.path
            assert b"read-only" in answer.body


async def test_every_region_comes_without_the_page_around_it(tmp_path: Path) -> None:
    async with serving(tmp_path, THINGS) as (_, app):
        task = await submit(app)
        browser = Browser(app)
        found = 0
        for path in (*PAGES, *THEIR_PAGES, f"/ui/tasks/{task}", "/ui/slots/spare/log"):
            page = (await browser.get(path)).body.decode()
            for region in re.findall(r'<[^>]* id="([\w-]+)"[^>]* hx-get=', page):
                found += 1
                inside = await browser.region(path, region)
                assert inside.body.strip(), (path, region)
                assert b"<html" not in inside.body, (path, region)
                assert b"<nav" not in inside.body, (path, region)
        assert found > 20


@pytest.mark.parametrize("path", ["/ui", "/ui/"])
async def test_the_folder_of_the_pages_leads_to_the_first(path: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        answer = await Browser(app).get(path)
    assert (answer.status, answer.headers["location"]) == (303, "/")


async def test_a_page_is_asked_for_its_head_alone_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        answer = await answer_of(app, "HEAD", "/ui/tasks")
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY


@pytest.mark.parametrize(("mode", "status"), [("read-only", 200), ("off", 404)])
def test_the_option_of_up_goes_before_the_file(mode: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "headgate.toml").write_text('[dashboard]\nmode = "on"\n')
    given = ("--config", str(tmp_path / "headgate.toml"), "--dashboard", mode)
    with running_service(tmp_path, *given) as service:
        answer = httpx2.get(service.address + "/")
    assert answer.status_code == status
    assert ("read-only</span>" in answer.text) == (mode == "read-only")


async def test_a_large_page_is_compressed_for_those_who_take_that(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/")
        plain = await browser.get("/ui/tasks")
        small = await browser.get("/ui/tasks", accept_encoding="gzip, br")
        region = await browser.get(
            "/", hx_request="true", hx_target="state-now", accept_encoding="gzip"
        )
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == small.headers["vary"] == "accept-encoding"
    assert small.headers["content-encoding"] == region.headers["content-encoding"] == "gzip"
    unpacked = gzip.decompress(small.body)
    assert without_form_numbers(unpacked) == without_form_numbers(plain.body)
    assert len(small.body) < len(plain.body) / 2


async def test_the_theme_is_changed_on_a_page_whose_name_has_a_slash(tmp_path: Path) -> None:
    url = "/ui/slots/a%2Fb?lines=5"
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        page = (await browser.get(url)).body.decode()
        assert f'name="next" value="{url}"' in page
        answer = await browser.post("/ui/theme", {"next": url, "theme": "dark"})
    assert answer.headers["location"] == url
