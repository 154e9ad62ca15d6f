"""A service in front of a provider that bills, and clients that run and wait before it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from clients.client_processes import CLIENTS, Ask, Client, ClientProcess, Mode
from gateway.billing_upstream import BillingUpstream
from service.support import ServiceProcess, wait_until

KEYS = ("sk-canary-one", "sk-canary-two", "sk-canary-three", "sk-canary-four", "sk-canary-line")
WAIT_SECONDS = 90.0
LINE_MODELS = {"anthropic": "claude-opus-4-8", "openai": "gpt-5.1"}
"""The models of the upstreams that take one call at a time."""
POOR = "poor"
"""The project whose budget is used up."""
SETTINGS = """
[[slots]]
name = "anthropic-one"
provider = "anthropic"
base_url = "{url}"
key_env = "CLIENTS_KEY_0"

[[slots]]
name = "anthropic-two"
provider = "anthropic"
base_url = "{url}"
key_env = "CLIENTS_KEY_1"

[[slots]]
name = "openai-one"
provider = "openai"
base_url = "{url}/v1"
key_env = "CLIENTS_KEY_2"

[[slots]]
name = "openai-two"
provider = "openai"
base_url = "{url}/v1"
key_env = "CLIENTS_KEY_3"

[upstreams.line-anthropic]
kind = "anthropic"
base_url = "{url}"
key_env = "CLIENTS_KEY_4"
models = ["claude-opus-4-8"]
max_inflight = 1

[upstreams.line-openai]
kind = "openai"
base_url = "{url}/v1"
key_env = "CLIENTS_KEY_4"
models = ["gpt-5.1"]
max_inflight = 1

[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
slots = ["anthropic-one", "anthropic-two"]

[upstreams.openai]
kind = "openai"
base_url = "{url}/v1"
slots = ["openai-one", "openai-two"]

[projects.search]

[projects.poor]
[budgets."project:poor"]
limit_usd = "0"
"""
PROJECT = """
[projects.{name}]
[budgets."project:{name}"]
limit_usd = "1000.00"
"""


class Going(NamedTuple):
    """A client that runs: its calls are of an agent of this name, and the bill has it as a mark."""

    process: ClientProcess
    name: str


class Stage:
    """The service, the provider behind it, and what both know of a client that runs."""

    def __init__(self, service: ServiceProcess, upstream: BillingUpstream, folder: Path) -> None:
        self.service = service
        self.upstream = upstream
        self.folder = folder
        self._runs = 0

    def start(
        self,
        client: Client,
        prompt: str,
        *,
        mode: Mode = "plain",
        project: str | None = None,
        model: str | None = None,
        is_anonymous: bool = False,
    ) -> Going:
        """Start a client: in a project of its own, or in this one, or without saying who calls."""
        self._runs += 1
        name = f"run-{self._runs}"
        path = "" if is_anonymous else f"/p/{project or client.name}/{name}"
        ask = Ask(
            url=client.base_url(self.service.address, path),
            model=model or client.model,
            prompt=f"{prompt} [[mark {name}]]",
            mode=mode,
            folder=self.folder / f"{name}-{client.name}",
        )
        return Going(ClientProcess(client, ask), name)

    def calls(self, **wanted: str) -> list[dict[str, Any]]:
        """Return the calls that a filter finds, oldest first."""
        found: list[dict[str, Any]] = []
        page: dict[str, str] = {"limit": "100", **wanted}
        while True:
            answer = self.service.ask("GET", f"/calls?{urlencode(page)}")
            assert answer.status == 200, answer
            found += answer.body["calls"]
            if not answer.body.get("nextCursor"):
                return found[::-1]
            page["cursor"] = answer.body["nextCursor"]

    def ended_calls(self, going: Going) -> list[dict[str, Any]]:
        """Return the calls of a client, once the service has ended all of them."""
        self.wait_until(
            lambda: all(
                call["state"] not in {"waiting", "running"}
                for call in self.calls(agentId=going.name)
            )
        )
        return self.calls(agentId=going.name)

    def check_books(self, going: Going) -> list[dict[str, Any]]:
        """Hold what was booked for a client against its bill, to the token; return its calls."""
        calls = self.ended_calls(going)
        charges = self.upstream.charged(mark=going.name)
        assert charges
        assert all(charge.was_told for charge in charges)
        assert booked_tokens(calls) == sum(charge.tokens for charge in charges)
        assert not any(call["usage"].get("assumedTokens") for call in calls)
        return calls

    def wait_until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait until something is so; if it never is, the service says what it said."""
        wait_until(condition, seconds=seconds, what=self.service.output)


def booked_tokens(calls: list[dict[str, Any]]) -> int:
    """Return what was booked for calls together."""
    return sum(call["usage"]["tokens"] for call in calls if call.get("usage"))


class Queue:
    """Clients behind one call that the provider holds until all of them have waited."""

    # Made once all of them wait.
    def __init__(self, stage: Stage, waiters: dict[tuple[str, Mode], Going]) -> None:
        self.waiters = waiters
        self._stage = stage
        self._waiting_since = time.monotonic()

    def release(self) -> None:
        """Let the call before them end once they have waited long enough."""
        left = self._waiting_since + WAIT_SECONDS + 1 - time.monotonic()
        if left > 0:
            threading.Event().wait(left)
        self._stage.upstream.releases.add("line")


def waiting_modes(client: Client) -> tuple[Mode, ...]:
    """Return how a client waits: agents always stream, SDKs do both."""
    return ("plain",) if client.is_agent else ("plain", "stream")


WAITS = [(client, mode) for client in CLIENTS for mode in waiting_modes(client)]


def skip_unless_here(client: Client) -> None:
    """Skip a test of a client that cannot run here."""
    why = client.why_not()
    if why is not None:
        pytest.skip(f"{client.name}: {why}")


def ask_line(address: str, kind: str) -> None:
    """Take the one permit of a queue until it is released."""
    path = "/v1/messages" if kind == "anthropic" else "/v1/chat/completions"
    said = [{"role": "user", "content": "[[until line]] [[mark line]]"}]
    body = {"model": LINE_MODELS[kind], "max_tokens": 100, "messages": said, "stream": True}
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=400)
    try:
        connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json", "x-api-key": "any"}
        )
        connection.getresponse().read()
    finally:
        connection.close()
