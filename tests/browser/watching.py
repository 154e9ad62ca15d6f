"""What may not happen on any page: an error in the console, a broken policy, a foreign request.

Rule: a page that a test opens is watched from its first byte to the end of the test, and the test
fails for whatever was noted. A test that provokes a refusal says which one it expects.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, Request, Response

LOOPBACK = "127.0.0.1"
LOCAL_SCHEMES = ("data", "blob", "about")
CONSOLE_FAULTS = ("error", "warning")
SERVER_FAULT = 500

# Chromium writes a violation to the console as well, except where only a report is asked for.
TELL_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => {
  console.error(`policy broken: ${event.violatedDirective} by ${event.blockedURI}`);
});
window.ran = [];
"""


class Watch:
    """Notes what goes wrong on the pages of one test."""

    def __init__(self) -> None:
        self._faults: list[str] = []
        self._expected: list[str] = []

    def look_at(self, page: Page) -> None:
        """Watch a page from now on."""
        page.add_init_script(TELL_VIOLATIONS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._faults.append(f"script failed: {error}"))
        page.on("request", self._on_request)
        page.on("response", self._on_response)

    def expect(self, part: str) -> None:
        """Say what a test provokes on purpose, as it stands in the console."""
        self._expected.append(part)

    @property
    def faults(self) -> list[str]:
        """Whatever was noted and not expected."""
        return [one for one in self._faults if not any(part in one for part in self._expected)]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in CONSOLE_FAULTS:
            self._faults.append(f"console: {message.text} at {message.location.get('url', '')}")

    def _on_request(self, request: Request) -> None:
        place = urlsplit(request.url)
        if place.scheme not in LOCAL_SCHEMES and place.hostname != LOOPBACK:
            self._faults.append(f"a request to another host: {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= SERVER_FAULT:
            self._faults.append(f"the service answered {response.status} to {response.url}")
