"""A browser that is none: tabs over HTTP, with one small shop to look at.

`python3 tabs.py serve NAME` serves on a free port until it is told to quit, or nobody has asked
anything for half a minute. `python3 tabs.py address NAME` waits until it does, and writes where as
JSON.
"""

import json
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

IDLE_SECONDS = 30.0
PAGES: dict[str, Any] = {
    "shop.example/search?q=lamp": {
        "title": "2 lamps",
        "links": [
            {"selector": "#desk-lamp", "to": "shop.example/desk-lamp"},
            {"selector": "#floor-lamp", "to": "shop.example/floor-lamp"},
        ],
    },
    "shop.example/search?q=candle": {"title": "no candles", "links": []},
    "shop.example/desk-lamp": {
        "title": "Desk lamp",
        "links": [{"selector": "#buy", "to": "shop.example/basket"}],
        "texts": {".price": {"text": "$34.50", "value": 34.5}},
    },
    "shop.example/floor-lamp": {
        "title": "Floor lamp",
        "links": [{"selector": "#buy", "to": "shop.example/basket"}],
        "texts": {".price": {"text": "$89.00", "value": 89.0}},
    },
    "shop.example/basket": {"title": "Your basket: 1 article", "links": []},
}

tabs: dict[str, str] = {}
"""The page that each tab shows."""


class Browser(HTTPServer):
    """Serves one request after the other, until it is told to quit or left alone."""

    is_over = False
    timeout = IDLE_SECONDS

    def handle_timeout(self) -> None:
        """End: nobody asks any more."""
        self.is_over = True


class Actions(BaseHTTPRequestHandler):
    """One action a request: what it gives, or why it could not be done."""

    def do_POST(self) -> None:
        """Take an action, and answer as JSON."""
        length = int(self.headers.get("Content-Length") or 0)
        given = json.loads(self.rfile.read(length) or b"null") or {}
        try:
            status, answer = 200, self._act(self.path.strip("/").split("/"), given)
        except (KeyError, StopIteration, ValueError):
            status, answer = 404, {"error": f"there is no {given or self.path}"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing: nobody reads it."""

    def _act(self, path: list[str], given: dict[str, str]) -> Any:
        if path == ["quit"] and isinstance(self.server, Browser):
            self.server.is_over = True
            return {"closed": len(tabs)}
        if path == ["tabs"]:
            tab = f"tab-{len(tabs) + 1}"
            tabs[tab] = "about:blank"
            return {"tab": tab}
        _, tab, action = path
        if action == "read":
            return PAGES[tabs[tab]]["texts"][given["selector"]]
        tabs[tab] = given["url"] if action == "navigate" else followed(tabs[tab], given)
        return {"url": tabs[tab], **PAGES[tabs[tab]]}


def followed(url: str, given: dict[str, str]) -> str:
    """Return where a link of a page leads."""
    links = PAGES[url]["links"]
    return next(link["to"] for link in links if link["selector"] == given["selector"])


def note_of(name: str) -> Path:
    """Return where a browser notes its address."""
    return Path(tempfile.gettempdir()) / f"tabs-{name}.json"


def serve(name: str) -> None:
    """Serve on a free port until it is over."""
    with Browser(("127.0.0.1", 0), Actions) as browser:
        note, draft = note_of(name), note_of(f"{name}-draft")
        draft.write_text(json.dumps({"url": f"http://127.0.0.1:{browser.server_port}"}))
        draft.rename(note)
        try:
            while not browser.is_over:
                browser.handle_request()
        finally:
            note.unlink()


def address(name: str) -> None:
    """Wait for a browser, and write where it serves."""
    while not note_of(name).exists():
        time.sleep(0.05)
    print(note_of(name).read_text())


if __name__ == "__main__":
    {"serve": serve, "address": address}[sys.argv[1]](sys.argv[2])
