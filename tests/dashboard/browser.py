"""A browser without a screen, on a real service: it keeps cookies, follows links, sends forms."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import process_time
from typing import Any
from urllib.parse import urlencode

from api.asgi_client import Response, answer_of
from config.running import running
from headgate.api.app import App
from headgate.app import Service

HOST_PREFIX = "__Host-"
WAIT_SECONDS = 30.0
"""How long to wait for what happens soon, on a machine that has much else to do."""


class Browser:
    """Opens pages of an application, as one visitor; with `https`, through a proxy that says so."""

    def __init__(self, app: App, *, scheme: str = "http") -> None:
        self.app = app
        self.scheme = scheme
        self.cookies: dict[str, str] = {}
        self.set_cookies: list[str] = []

    async def get(self, url: str, **headers: str) -> Response:
        """Open a page, without following where it leads."""
        return await self._send("GET", url, b"", headers)

    async def region(self, url: str, name: str) -> Response:
        """Fetch the inside of a region, as a page that is open does."""
        return await self.get(url, hx_request="true", hx_target=name)

    async def post(
        self, url: str, fields: dict[str, Any] | None = None, **headers: str
    ) -> Response:
        """Send a form with the secret that the last page gave; `csrf` in `fields` replaces it."""
        secret = f"{HOST_PREFIX if self.scheme == 'https' else ''}headgate_csrf"
        sent = {"csrf": self.cookies.get(secret, ""), **(fields or {})}
        headers.setdefault("content_type", "application/x-www-form-urlencoded")
        return await self._send("POST", url, urlencode(sent, doseq=True).encode(), headers)

    async def act(self, url: str, fields: dict[str, Any] | None = None) -> tuple[Response, str]:
        """Send a form, go where it leads, and return that page and what it says was done."""
        answer = await self.post(url, fields)
        assert answer.status == 303, (answer.status, answer.body[:600])
        page = await self.get(answer.headers["location"])
        said = re.search(r'<p class="flash[^>]*>(.*?)</p>', page.body.decode(), re.DOTALL)
        return page, "" if said is None else text_of(said[1])

    async def _send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> Response:
        if self.cookies:
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if self.scheme == "https":
            headers.setdefault("x_forwarded_proto", "https")
        if method == "POST":
            headers.setdefault("origin", f"{self.scheme}://127.0.0.1:7420")
        return await self._answer(method, url, body, headers)

    async def _answer(
        self, method: str, url: str, body: bytes, headers: dict[str, str]
    ) -> Response:
        sent: list[tuple[bytes, bytes]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    sent.extend(message["headers"])
                await send(message)

            await self.app(scope, receive, noting)

        answer = await answer_of(app, method, url, body, headers=headers)  # type: ignore[arg-type]
        self.set_cookies = [value.decode() for name, value in sent if name == b"set-cookie"]
        for line in self.set_cookies:
            name, _, rest = line.partition("=")
            value = rest.partition(";")[0]
            if name.startswith(HOST_PREFIX) and "; Secure" not in line:
                continue  # A browser ignores such a line, also one that is to drop the cookie.
            if "Max-Age=0" in line:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return answer


async def quickest(browser: Browser, url: str, tries: int = 5) -> tuple[str, float]:
    """Open a page a few times, and return it with the least time of the processor that it took."""
    page, times = "", []
    for _ in range(tries):
        began = process_time()
        page = (await browser.get(url)).body.decode()
        times.append(process_time() - began)
    return page, min(times)


def text_of(markup: str | bytes) -> str:
    """Return what a person reads of a piece of a page."""
    whole = markup.decode() if isinstance(markup, bytes) else markup
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", whole)).split())


def without_form_numbers(body: bytes) -> bytes:
    """Return a page without what its forms have of their own each time that it is drawn."""
    return re.sub(rb'name="once" value="[0-9a-f]+"', b"", body)


@asynccontextmanager
async def serving(
    folder: Path, toml: str = "", options: dict[str, object] | None = None
) -> AsyncIterator[tuple[Service, App]]:
    """Run a service in memory with settings written as in a file, as long as it is needed."""
    async with running(folder, toml, options=options) as one:
        yield one.service, one.app


async def submit(app: App, *, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """Submit a task through the API, and return its id."""
    body = {"agentId": "a", "action": "x", **fields}
    answer = await answer_of(app, "POST", "/tasks", json.dumps(body).encode(), headers=headers)
    assert answer.status == 202, answer.body
    return str(answer.json["taskId"])


async def until(condition: Any, seconds: float = WAIT_SECONDS) -> None:
    """Wait for something that happens soon."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
