"""The clients themselves: proxies, plain threads, and the loop that these share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

import headgate
from headgate import connect_budget
from headgate.errors import BudgetExceededError
from headgate.inprocess.permits import SharedResource
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk import (
    GovernedTransport,
    Governor,
    LoopThread,
    async_client,
    sync_client,
)
from headgate.inprocess.sdk.clients import proxies_of
from inprocess.sdk import upstream
from inprocess.sdk.scene import PRICES, SCOPE, scene
from inprocess.sdk.upstream import whole

BODY = {"model": "gpt-4o", "messages": [], "max_tokens": 10}
URL = "http://provider.test/v1/chat/completions"


@pytest.mark.parametrize(
    ("named", "proxies"),
    [
        ({}, {}),
        ({"no": "example.com"}, {}),
        ({"https": "http://proxy:1"}, {"https://": "http://proxy:1"}),
        ({"all": "proxy:1"}, {"all://": "http://proxy:1"}),
        ({"https": "http://proxy:1", "no": "*"}, {}),
        (
            {"https": "http://p:1", "no": "localhost, .b.com,10.0.0.1,::1,[::2],10.0.0.0/8,,c.com"},
            {
                "https://": "http://p:1",
                "all://localhost": None,
                "all://*.b.com": None,
                "all://10.0.0.1": None,
                "all://[::1]": None,
                "all://[::2]": None,
                "all://*c.com": None,
            },
        ),
    ],
)
def test_the_proxies_that_an_environment_names(
    named: dict[str, str], proxies: dict[str, str | None]
) -> None:
    assert proxies_of(named) == proxies


async def test_a_call_goes_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(whole(upstream.CHAT)) as made:
        monkeypatch.setenv("http_proxy", made.endpoint.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with made.async_client() as client:
            await client.post(URL, json=BODY)
        with made.sync_client() as plain:
            await asyncio.to_thread(lambda: plain.post(URL, json=BODY))
        assert [seen.path for seen in made.endpoint.seen] == [URL, URL]
        assert await made.booked() == (2 * 70, 2 * upstream.TOKENS)


async def test_addresses_that_are_reached_directly_are_governed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene(whole(upstream.CHAT)) as made:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with made.async_client() as client:
            await client.post(f"{made.endpoint.url}/v1/chat/completions", json=BODY)
        assert await made.booked() == (70, upstream.TOKENS)


def answering(request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, json=upstream.CHAT)


def test_threads_without_any_loop_share_permits_and_a_budget() -> None:
    together = [0, 0]
    lock = threading.Lock()

    def counting(request: httpx2.Request) -> httpx2.Response:
        with lock:
            together[0] += 1
            together[1] = max(together)
        answer = answering(request)
        with lock:
            together[0] -= 1
        return answer

    resource = SharedResource("llm", 2)
    client = sync_client(
        scheduler=LoadScheduler(None, resource),
        tracker="memory:",
        scope=SCOPE,
        prices=PRICES,
        transport=httpx2.MockTransport(counting),
    )
    with client, ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda _: client.post(URL, json=BODY).status_code, range(40)))
    assert done == [200] * 40
    assert together[1] <= 2
    assert resource.free == 2


def test_a_budget_at_a_url_is_kept_between_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/budget.db"

    def client() -> httpx2.Client:
        return sync_client(
            tracker=url, scope=SCOPE, prices=PRICES, transport=httpx2.MockTransport(answering)
        )

    async def prepare() -> None:
        async with connect_budget(url) as tracker:
            await tracker.set_budget(SCOPE, limit_usd="0.0002")

    asyncio.run(prepare())
    for _ in range(2):
        with client() as one:
            one.post(URL, json=BODY)
    with client() as one, pytest.raises(BudgetExceededError) as refused:
        one.post(URL, json=BODY)
    assert refused.value.spent == 140


async def test_a_sync_client_says_that_it_cannot_wait_for_its_own_loop() -> None:
    client = sync_client(
        scheduler=LoadScheduler(None, SharedResource("llm", 1)),
        transport=httpx2.MockTransport(answering),
        loop=asyncio.get_running_loop(),
    )
    with pytest.raises(RuntimeError, match="async client"):
        client.post(URL, json=BODY)


def test_what_nobody_waits_for_any_more_is_cancelled() -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        LoopThread().run(work, timeout=0.01)
    assert cancelled.wait(10)


async def test_a_transport_of_the_wrong_kind_leaks_nothing() -> None:
    class Wrong(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, _request: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(200, stream=httpx2.SyncByteStream())

    resource = SharedResource("llm", 1)
    client = async_client(scheduler=LoadScheduler(None, resource), transport=Wrong())
    with pytest.raises(TypeError, match="async"):
        await client.post(URL, json=BODY)
    assert resource.free == 1


async def test_a_thread_that_is_interrupted_while_it_waits_leaves_nothing_behind() -> None:
    resource = SharedResource("llm", 1)
    scheduler = LoadScheduler(None, resource)

    class Interrupted(LoopThread):
        def run(self, work: Any, timeout: float | None = None) -> Any:
            if timeout is not None:
                return super().run(work, timeout)
            try:
                return super().run(work, 0.05)
            except TimeoutError:
                raise KeyboardInterrupt from None

    transport = GovernedTransport(
        httpx2.MockTransport(answering),
        Governor(scheduler=scheduler),
        Interrupted(asyncio.get_running_loop()),
    )

    def ask() -> None:
        with httpx2.Client(transport=transport) as client:
            client.post(URL, json=BODY)

    async with scheduler.acquire("other"):
        await asyncio.to_thread(_interrupted, ask)
        assert scheduler.queued == 0
    assert resource.free == 1


def _interrupted(ask: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        ask()


async def test_a_ledger_that_a_client_opened_is_closed_with_it() -> None:
    client = async_client(
        tracker="memory:",
        scope=SCOPE,
        prices=PRICES,
        transport=httpx2.MockTransport(answering),
    )
    async with client:
        await client.post(URL, json=BODY)
    assert client.is_closed


def test_the_package_gives_the_clients_when_they_are_asked_for() -> None:
    assert headgate.sdk.async_client is async_client
    assert "sdk" in dir(headgate)
