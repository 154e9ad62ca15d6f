"""A whole service in this process, on a port of its own, with a provider that bills behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from gateway.billing_upstream import BillingUpstream
from headgate.api.http.server import serve
from headgate.app import Service, build_app, build_service
from headgate.config.loading import Origin, load
from headgate.core.call import CallRecord
from headgate.core.money import MICRO_PER_USD
from headgate.gateway.gateway import Gateway

ANTHROPIC_KEY = "sk-ant-configured-0001"
OPENAI_KEY = "sk-openai-configured-0002"
ENVIRON = {"A_KEY": ANTHROPIC_KEY, "O_KEY": OPENAI_KEY}
PRICES = """
[prices."*"]
input = 1.0
output = 2.0
"""
UPSTREAMS = """
[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
key_env = "A_KEY"
max_inflight = {inflight}

[upstreams.openai]
kind = "openai"
base_url = "{openai_url}"
key_env = "O_KEY"
max_inflight = {inflight}
"""
MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
CODEX = {"user-agent": "codex_cli_rs/0.50.0"}
ANTHROPIC_VERSION = {"anthropic-version": "2023-06-01"}
WAIT_SECONDS = 20.0
LOOK_SECONDS = 0.005


def asking(path: str, prompt: str = "hi", *, is_stream: bool = False, **fields: Any) -> Any:
    """Return the body of a request in the protocol of a path."""
    body: dict[str, Any]
    if path.endswith("/messages"):
        body = {"model": "claude-sonnet-5", "max_tokens": 100, "messages": _turns(prompt)}
    elif path.endswith("/responses"):
        body = {"model": "gpt-5", "input": prompt}
    elif path.endswith("/embeddings"):
        body = {"model": "text-embedding-3-small", "input": prompt}
    elif path.endswith("/chat/completions"):
        body = {"model": "gpt-5", "max_tokens": 100, "messages": _turns(prompt)}
    else:
        body = {"model": "gpt-5", "max_tokens": 100, "prompt": prompt}
    if is_stream:
        body["stream"] = True
    return body | fields


def _turns(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


class GatewayService:
    """A service that runs, its provider, and a client of it."""

    def __init__(
        self, service: Service, upstream: BillingUpstream, client: httpx2.AsyncClient, port: int
    ) -> None:
        assert service.gateway is not None
        assert service.engine.calls is not None
        self.service = service
        self.gateway: Gateway = service.gateway
        self.calls = service.engine.calls
        self.upstream = upstream
        self.client = client
        self.port = port

    async def ask(
        self,
        path: str,
        prompt: str = "hi",
        *,
        headers: Mapping[str, str] | None = None,
        is_stream: bool = False,
        **fields: Any,
    ) -> httpx2.Response:
        """Make a call, and return its whole answer."""
        body = asking(path, prompt, is_stream=is_stream, **fields)
        return await self.client.post(path, json=body, headers=dict(headers or {}))

    def start(self, path: str, prompt: str = "hi", **options: Any) -> asyncio.Task[httpx2.Response]:
        """Begin a call."""
        return asyncio.create_task(self.ask(path, prompt, **options))

    async def record(self, answer: httpx2.Response) -> CallRecord:
        """Return what is kept of the call of an answer, when the store has been told of it."""
        await self.calls.settled(seconds=WAIT_SECONDS)
        found = self.calls.get(answer.headers["x-headgate-call-id"])
        assert found is not None
        return found

    async def record_of_left(self, answer: httpx2.Response) -> CallRecord:
        """Return what is kept of a call whose client has gone, when it has ended."""
        await self.until_idle()
        return await self.record(answer)

    async def latest(self) -> CallRecord:
        """Return the call that has ended last, when the store has been told of it."""
        await self.calls.settled(seconds=WAIT_SECONDS)
        return list(self.calls.latest())[-1]

    async def status(self, scope: str) -> Any:
        """Return where a budget stands, when what has ended is written."""
        await self.calls.settled(seconds=WAIT_SECONDS)
        answer = await self.client.get("/budgets/status", params={"scope": scope})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)

    async def until_waiting(self, count: int = 1) -> None:
        """Wait until so many calls wait."""
        await self.until(lambda: self.waiting == count)

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return sum(one.state.value == "waiting" for one in self.calls.live())

    async def until_idle(self) -> None:
        """Wait until no call is left, and everything is written."""
        await self.until(lambda: not len(self.calls))
        await self.calls.settled(seconds=WAIT_SECONDS)


@asynccontextmanager
async def gateway_service(
    folder: Path,
    text: str = "",
    *,
    upstream: BillingUpstream | None = None,
    environ: Mapping[str, str] = ENVIRON,
    upstreams: str = UPSTREAMS,
    prices: str = PRICES,
    inflight: int = 50,
    store: str = "memory:",
    options: Mapping[str, object] | None = None,
    running: BillingUpstream | None = None,
) -> AsyncIterator[GatewayService]:
    """Start a provider and a service in front of it, and stop both in the end.

    In the texts `{url}` and `{openai_url}` stand for the addresses of the provider. One that is
    `running` is used as it is, and other nodes find this one by its address.
    """
    started = upstream or BillingUpstream()
    async with started if running is None else nullcontext(running) as provider:
        path = folder / "headgate.toml"
        filled = (text + upstreams + prices).replace("{url}", provider.url)
        filled = filled.replace("{openai_url}", provider.openai_url)
        path.write_text(filled.replace("{inflight}", str(inflight)))
        loaded = load(Origin(path=path, options={"store.url": store, **(options or {})}))
        service = build_service(loaded.settings, data=folder, environ=environ, loaded=loaded)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(
                build_app(service),
                host="127.0.0.1",
                port=0,
                on_ready=lambda _, number: port.set_result(number),
                opened=service.engine.opened,
                drain_seconds=0.5,
            )
        )
        if running is not None:
            service.engine.node.address = f"http://127.0.0.1:{await port}"
        await service.engine.start()
        try:
            url = f"http://127.0.0.1:{await port}"
            limits = httpx2.Limits(max_connections=2_000, max_keepalive_connections=100)
            async with httpx2.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:
                yield GatewayService(service, provider, client, await port)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            await service.engine.stop(drain_seconds=0.5)
            if service.gateway is not None:
                await service.gateway.close()


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """Return the error of an answer in the shape of OpenAI or Anthropic."""
    error: dict[str, Any] = msgspec.json.decode(answer.content)["error"]
    return error


def usd(amount: float) -> int:
    """Return dollars in micro-dollars."""
    return round(amount * MICRO_PER_USD)
