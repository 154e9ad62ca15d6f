"""The dashboard behind a proxy that ends TLS: the way in and out, live pages, forms, cookies."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.visiting import WAIT_MS, WIDE, was_done
from browser.watching import Watch
from executors.endpoint import free_port
from service.support import Gate, ServiceProcess, running_service
from service.tls_proxy import NAME, TlsProxy, running_proxy

CSRF = "0" * 32
SETTINGS = """
[auth]
required = true
allowed_hosts = ["{name}"]
allowed_origins = {origins}

[targets.work]
kind = "callable"
entry_point = "browser.work:run"
default = true
"""


class Site(NamedTuple):
    """A service and the proxy through which people reach it."""

    proxy: TlsProxy
    service: ServiceProcess

    def url(self, path: str = "/") -> str:
        """Return the address of a page as people see it."""
        return f"{self.proxy.address}{path}"

    @property
    def plain_address(self) -> str:
        """The address of the service itself under the same name, without TLS."""
        return f"http://{NAME}:{urlsplit(self.service.address).port}"

    def log_in(self, page: Page, address: str = "") -> None:
        """Send the first token through the login."""
        page.goto(f"{address or self.proxy.address}/ui/login")
        page.get_by_label("Token").fill(self.service.token)
        page.get_by_role("button", name="Log in").click()


@contextmanager
def site_in(
    folder: Path, *pages: Page, host: str | None = None, may_be_origin: bool = False
) -> Iterator[Site]:
    """Run a proxy, which may name another host, and behind it a service that knows its name.

    Pages are closed before: what one still loads when the site ends would be a fault of its.
    """
    port = free_port()
    with running_proxy(f"http://127.0.0.1:{port}", folder, host=host) as proxy:
        origins = [proxy.address] if may_be_origin else []
        (folder / "headgate.toml").write_text(SETTINGS.format(name=NAME, origins=origins))
        with running_service(folder, port=port) as service:
            service.token = (folder / "data/token").read_text().strip()
            yield Site(proxy, service)
            for page in pages:
                page.close()


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    """Give a fresh visitor who trusts the certificate of the proxy."""
    watch.expect(f"a request to another host: https://{NAME}:")
    with browser.new_context(ignore_https_errors=True, viewport=WIDE) as context:
        context.set_default_timeout(WAIT_MS)
        one = context.new_page()
        watch.look_at(one)
        yield one


def test_the_dashboard_is_used_through_https_as_it_is_without(
    page: Page, gate: Gate, tmp_path: Path
) -> None:
    leads: list[str] = []
    page.on("response", lambda answer: leads.append(answer.headers.get("location", "")))
    with site_in(tmp_path, page) as site:
        site.log_in(page)
        expect(page).to_have_url(site.url())
        cookies = {one["name"]: one for one in page.context.cookies()}
        for name in ("__Host-headgate_token", "__Host-headgate_csrf"):
            assert (cookies[name]["secure"], cookies[name]["sameSite"]) == (True, "Strict")
        page.goto(site.url("/ui/tasks"))
        task = site.service.submit(agentId="came-while-the-page-was-open", params=gate.params)
        expect(page.locator("#rows")).to_contain_text("came-while-the-page-was-open")
        expect(page.locator("#live-state")).to_be_hidden()
        page.goto(site.url(f"/ui/tasks/{task}"))
        assert f"{site.proxy.address}/tasks" in page.content(), "commands to paste have the address"
        assert "http://" not in page.content().replace("http://www.w3.org", "")
        page.get_by_text("Cancel", exact=True).first.click()
        page.get_by_role("button", name="Cancel").last.click()
        was_done(page)
        page.get_by_role("button", name="Log out").click()
        expect(page).to_have_url(site.url("/ui/login"))
        page.goto(site.url("/ui/slots"))
        expect(page.get_by_label("Token")).to_be_visible()
    assert {lead for lead in leads if not lead.startswith("/")} <= {""}


def use(page: Page, site: Site, address: str) -> None:
    """Log in at one of two addresses, do something there, and choose the dark theme."""
    site.log_in(page, address)
    expect(page).to_have_url(f"{address}/")
    page.goto(f"{address}/ui/projects/default")
    form = page.locator("form[action$='/change']", has=page.get_by_label("Weight"))
    form.get_by_label("Weight").fill("2")
    form.get_by_role("button").click()
    was_done(page)
    page.reload()
    expect(page.locator("main > .flash")).to_have_count(0)
    assert is_dark(page) is False
    page.get_by_role("button", name="Change between light and dark").click()
    page.reload()
    assert is_dark(page)


def is_dark(page: Page) -> bool:
    """Tell whether the service has drawn a page in the dark theme that somebody chose."""
    return bool(page.evaluate("document.documentElement.dataset.theme === 'dark'"))


@pytest.mark.parametrize("first", ["https", "http"])
def test_a_name_is_used_with_https_and_without_and_neither_knows_of_the_other(
    first: str, page: Page, watch: Watch, tmp_path: Path
) -> None:
    watch.expect(f"a request to another host: http://{NAME}:")
    with site_in(tmp_path, page) as site:
        addresses = [site.proxy.address, site.plain_address]
        for address in addresses if first == "https" else reversed(addresses):
            use(page, site, address)
        for address in addresses:
            page.goto(f"{address}/ui/tasks")
            expect(page.get_by_role("button", name="Log out")).to_be_visible()
        kept = {one["name"]: one["secure"] for one in page.context.cookies()}
        names = ["headgate_csrf", "headgate_theme", "headgate_token"]
        assert kept == {**dict.fromkeys(names, False), **{f"__Host-{one}": True for one in names}}
        page.goto(site.url())
        page.get_by_role("button", name="Log out").click()
        expect(page).to_have_url(site.url("/ui/login"))
        page.goto(f"{site.plain_address}/")
        expect(page.get_by_role("button", name="Log out")).to_be_visible()
        page.goto(site.url())
        expect(page.get_by_label("Token")).to_be_visible()


def sent_from(origin: str, site: Site) -> tuple[int, str]:
    """Send the login as a page of some origin would, with a secret that is right."""
    fields = urlencode({"token": site.service.token, "csrf": CSRF})
    headers = {
        "Host": urlsplit(site.proxy.address).netloc,
        "Origin": origin,
        "Cookie": f"__Host-headgate_csrf={CSRF}",
        "Content-Type": "application/x-www-form-urlencoded",
    }
    trusting = ssl.create_default_context(cafile=site.proxy.certificate)
    connection = http.client.HTTPSConnection("127.0.0.1", site.proxy.port, context=trusting)
    try:
        connection.request("POST", "/ui/login", fields, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_form_is_taken_from_the_https_origin_alone(tmp_path: Path) -> None:
    with site_in(tmp_path) as site:
        assert sent_from(site.proxy.address, site)[0] == 303
        for foreign in (
            "https://evil.example",
            f"https://{NAME}",
            f"https://{NAME}:{site.proxy.port + 1}",
            f"https://evil.{NAME}:{site.proxy.port}",
            f"http://{NAME}:{site.proxy.port}",
            "null",
        ):
            assert sent_from(foreign, site)[0] == 403, foreign


def test_a_proxy_that_names_the_service_itself_is_told_of_with_what_to_do(
    page: Page, watch: Watch, tmp_path: Path
) -> None:
    watch.expect("status of 403")
    with site_in(tmp_path, page, host="127.0.0.1") as site:
        site.log_in(page)
        told = page.locator("body")
        expect(told).to_contain_text("have it pass the Host header on")
        expect(told).to_contain_text("auth.allowed_origins")


def test_an_origin_that_is_allowed_makes_up_for_a_host_that_is_not_passed_on(
    page: Page, tmp_path: Path
) -> None:
    with site_in(tmp_path, page, host="127.0.0.1", may_be_origin=True) as site:
        site.log_in(page)
        expect(page).to_have_url(site.url())
        page.get_by_role("button", name="Log out").click()
        expect(page).to_have_url(site.url("/ui/login"))


def test_a_proxy_that_names_another_host_is_told_of_with_what_to_do(
    page: Page, watch: Watch, tmp_path: Path
) -> None:
    watch.expect("status of 421")
    with site_in(tmp_path, page, host="backend.internal") as site:
        page.goto(site.url())
        told = page.locator("body")
        expect(told).to_contain_text("The Host header names no host of this service")
        expect(told).to_contain_text("have it pass the Host header on")
        expect(told).to_contain_text("auth.allowed_hosts")
