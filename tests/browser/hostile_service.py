"""A service where every name and text that somebody may choose was chosen by somebody hostile.

Rule: a text runs a script if it is taken for markup, for a template or for an attribute, turns the
direction of what stands beside it, or is so long that a page would break of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from browser.live_service import started
from browser.screens import find_places
from service.support import ServiceProcess

SCRIPT = "\"'><script>window.ran.push('script')</script><img src=x onerror=window.ran.push('img')>"
NAME = "</td><svg onload=window.ran.push('name')>{{7*7}}\"'"
"""Short enough for tokens, whose names end at 64 characters, and for the keys of labels."""
SLOT_NAME = "\"'><svg onload=ran.push(1)>{{7*7}}"[:32]
LONG = "w" * 100
MARKS = "\u202e\u202c\u2066\u200b\x1b"
BACKWARDS = "\u202egnp.exe\u202c \u2066\u200b\x1b[31m"
MEGABYTE = 1_000_000
SCOPE = f"session:{LONG[:50]}/workflow:{LONG[:50]}"
PROJECT = LONG
"""Of names of projects and scopes only the length is free: letters, digits and a few signs."""

SETTINGS = f"""
[auth]
required = true

[scheduler]
drain_seconds = 0
tick_seconds = 1
max_inflight = 100

[webhooks]
allow = ["127.0.0.0/8"]

[targets.{json.dumps(NAME)}]
kind = "callable"
entry_point = "browser.work:run"
default = true

[targets.{json.dumps(LONG)}]
kind = "command"
command = ["echo", {json.dumps(SCRIPT)}, {json.dumps(LONG * 20)}]

[projects.{PROJECT}]
credit_weight = 3

[budgets.{json.dumps(SCOPE)}]
limit_tokens = 1000
window = "day"

[upstreams.hostile]
kind = "openai"
base_url = "{{provider}}"
key_env = "MODEL_KEY_OF_TESTS"

[[slots]]
name = {json.dumps(SLOT_NAME)}
provider = "zai"
base_url = "{{provider}}"
key_file = "{{key}}"
poll_interval_minutes = 1
"""


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Answer with a refusal and a text, whatever was asked."""
        self.rfile.read(int(self.headers.get("content-length", 0)))
        content = (SCRIPT + BACKWARDS + LONG * 50).encode()
        self.send_response(410)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST  # noqa: N815 - the name that the base class looks for

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


class Hostile(NamedTuple):
    """The service, and what stands for the places in the addresses of its screens."""

    service: ServiceProcess
    places: dict[str, str]
    answered: str


@contextmanager
def hostile_service(folder: Path) -> Iterator[Hostile]:
    """Run the service, and fill everything that it can show."""
    with _refusing_server() as address, started(folder, SETTINGS, address) as service:
        answered = _fill(service, address)
        yield Hostile(service, find_places(service, waiting="", scope=SCOPE), answered)


@contextmanager
def _refusing_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _fill(service: ServiceProcess, address: str) -> str:
    """Submit tasks, make tokens, have a slot refused; return the task with a long answer."""
    wish = {"name": NAME, "permissions": ["admin", "read", "submit", "cancel"]}
    service.token = service.ask("POST", "/tokens", wish).body["token"]
    fields = _task_fields(address)
    failed = service.submit(**fields, params={"error": SCRIPT + BACKWARDS + "A" * (MEGABYTE // 2)})
    long = SCRIPT + BACKWARDS + "long " * (MEGABYTE // 6)
    answered = service.submit(**fields, params={"answer": long})
    for task in (failed, answered):
        service.wait_for(task, "failed", "done")
    service.submit(**fields, estimate={"tokens": 900, "usd": "0.5"}, scopes=[SCOPE], slot=SLOT_NAME)
    bound = {
        "name": f"{NAME} bound",
        "permissions": ["read"],
        "projectId": PROJECT,
        "agentId": NAME,
    }
    paused = {"status": "paused", "creditWeight": 2}
    for status, method, path, body in (
        (201, "POST", "/tokens", bound),
        (409, "POST", f"/slots/{quote(SLOT_NAME, safe='')}/warm", None),
        (200, "PATCH", f"/projects/{PROJECT}", paused),
        (502, "POST", f"/p/default/{quote(NAME, safe='')}/v1/chat/completions", _call()),
    ):
        answer = service.ask(method, path, body)
        assert answer.status == status, answer
    service.submit(**fields, estimate={"tokens": 900}, scopes=[SCOPE])
    return answered


def _call() -> dict[str, Any]:
    return {"model": SCRIPT, "messages": [{"role": "user", "content": SCRIPT}]}


def _task_fields(address: str) -> dict[str, Any]:
    return {
        "agentId": NAME,
        "projectId": PROJECT,
        "action": SCRIPT,
        "selector": SCRIPT,
        "ref": NAME,
        "tabId": NAME,
        "labels": {NAME: SCRIPT, "javascript:alert(1)": "javascript:window.ran.push('label')"},
        "input": {SCRIPT: SCRIPT + BACKWARDS},
        "callbackUrl": f"{address}/{quote(SCRIPT, safe='')}{LONG}?x=%3Cscript%3Eran",
    }
