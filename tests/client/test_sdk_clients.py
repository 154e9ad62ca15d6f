"""SDK clients in one line: a budget and a concurrency, here or at a service."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import anthropic
import httpx2
import openai
import pytest

import headgate
from executors.endpoint import Seen, reply_json, running_endpoint
from gateway.billing_upstream import TEXT as BILLED_TEXT
from gateway.gateway_service import ENVIRON, GatewayService, gateway_service, usd
from headgate import (
    BudgetExceededError,
    LimitReachedError,
    LocalBudgetTracker,
    connect_budget,
)
from headgate.client.sdk_clients import _Service
from headgate.errors import (
    BudgetMismatchError,
    CallerError,
    InvalidFieldError,
    NotAllowedError,
    PermitTimeoutError,
    RequestRefusedError,
    ServiceLimitError,
    ServiceUnavailableError,
)
from headgate.storage.tokens import Bounds, Permission, new_token
from inprocess.sdk import upstream
from inprocess.sdk.scene import COST, PRICES
from inprocess.sdk.upstream import Stream

MAX_TOKENS = 100
TURNS = [{"role": "user", "content": "what is the answer?"}]


class Sdk(NamedTuple):
    """One of the four functions, what it returns, and what its provider answers."""

    name: str
    make: Callable[..., Any]
    kind: type[Any]
    base: str
    model: str
    body: Any
    events: list[bytes]

    async def ask(self, client: Any, **more: Any) -> str:
        """Return the text of an answer."""
        asked = {"model": self.model, "messages": TURNS, "max_tokens": MAX_TOKENS, **more}
        if self.is_async:
            return self._text(await self._calls(client).create(**asked))
        return self._text(await asyncio.to_thread(self._calls(client).create, **asked))

    async def read(self, client: Any, **more: Any) -> str:
        """Return the text of a stream, read as most programs do: each chunk has a choice."""
        asked = {"model": self.model, "messages": TURNS, "max_tokens": MAX_TOKENS, **more}
        if self.is_async:
            stream = await self._calls(client).create(**asked, stream=True)
            return "".join([self._piece(chunk) async for chunk in stream])

        def read() -> str:
            stream = self._calls(client).create(**asked, stream=True)
            return "".join([self._piece(chunk) for chunk in stream])

        return await asyncio.to_thread(read)

    async def close(self, client: Any) -> None:
        """Close the client."""
        if self.is_async:
            await client.close()
        else:
            await asyncio.to_thread(client.close)

    @property
    def is_async(self) -> bool:
        """Whether it is for programs with asyncio."""
        return self.name.startswith("async_")

    def _calls(self, client: Any) -> Any:
        return client.chat.completions if self.model.startswith("gpt") else client.messages

    def _text(self, done: Any) -> str:
        if self.model.startswith("gpt"):
            return str(done.choices[0].message.content)
        return "".join(block.text for block in done.content)

    def _piece(self, chunk: Any) -> str:
        if self.model.startswith("gpt"):
            return chunk.choices[0].delta.content or ""
        return chunk.delta.text if chunk.type == "content_block_delta" else ""


SDKS = [
    Sdk("openai", headgate.openai, openai.OpenAI, "/v1", "gpt-4o", upstream.CHAT,
        upstream.CHAT_STREAM),
    Sdk("async_openai", headgate.async_openai, openai.AsyncOpenAI, "/v1", "gpt-4o", upstream.CHAT,
        upstream.CHAT_STREAM),
    Sdk("anthropic", headgate.anthropic, anthropic.Anthropic, "", "claude-house", upstream.MESSAGE,
        upstream.MESSAGE_STREAM),
    Sdk("async_anthropic", headgate.async_anthropic, anthropic.AsyncAnthropic, "", "claude-house",
        upstream.MESSAGE, upstream.MESSAGE_STREAM),
]  # fmt: skip


@pytest.fixture(params=SDKS, ids=lambda sdk: sdk.name)
def sdk(request: pytest.FixtureRequest) -> Sdk:
    chosen: Sdk = request.param
    return chosen


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADGATE_TOKEN", "HEADGATE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def dollars(micro_usd: int) -> str:
    """Write micro-dollars as dollars."""
    return f"{micro_usd / 1_000_000:.6f}"


async def test_it_is_the_client_of_the_sdk_with_the_options_of_the_sdk(sdk: Sdk) -> None:
    async with running_endpoint(reply_json(sdk.body)) as endpoint:
        client = sdk.make(
            budget_usd=5,
            concurrency=8,
            prices=PRICES,
            api_key="key-1",
            base_url=endpoint.url + sdk.base,
            max_retries=7,
            default_headers={"X-Team": "red"},
        )
        assert type(client) is sdk.kind
        assert client.max_retries == 7
        assert await sdk.ask(client) == upstream.TEXT
        await sdk.close(client)
        seen = endpoint.seen[0]
        assert seen.headers["x-team"] == "red"
        assert "key-1" in seen.headers.get("authorization", "") + seen.headers.get("x-api-key", "")


async def test_a_spent_budget_refuses_the_next_call_before_it_is_sent(sdk: Sdk) -> None:
    async with running_endpoint(reply_json(sdk.body)) as endpoint:
        # Room for one estimate, and not for a second one beside the first one's cost.
        client = sdk.make(
            budget_usd=dollars(1_050), prices=PRICES, api_key="k", base_url=endpoint.url + sdk.base
        )
        assert await sdk.ask(client) == upstream.TEXT
        with pytest.raises(BudgetExceededError) as refused:
            await sdk.ask(client)
        assert isinstance(refused.value, LimitReachedError)
        assert (refused.value.limit, refused.value.spent) == (1_050, COST)
        assert len(endpoint.seen) == 1
        await sdk.close(client)


async def test_a_stream_is_booked_at_what_it_used_and_looks_as_without(sdk: Sdk) -> None:
    async with running_endpoint(Stream(sdk.events)) as endpoint:
        tracker = LocalBudgetTracker()
        client = sdk.make(
            budget_usd=5, tracker=tracker, prices=PRICES, api_key="k",
            base_url=endpoint.url + sdk.base,
        )  # fmt: skip
        assert await sdk.read(client) == upstream.TEXT
        await sdk.close(client)
        status = await tracker.status("session:sdk")
        assert (status.spent_micro_usd, status.reserved_micro_usd) == (COST, 0)
        assert status.limit_micro_usd == 5_000_000


async def test_a_program_that_asks_for_the_usage_of_a_stream_sees_it() -> None:
    async with running_endpoint(Stream(upstream.CHAT_STREAM)) as endpoint:
        client = headgate.async_openai(
            budget_usd=5, prices=PRICES, api_key="k", base_url=f"{endpoint.url}/v1"
        )
        stream = await client.chat.completions.create(
            model="gpt-4o",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        usages = [chunk.usage async for chunk in stream]
        assert usages[-1] is not None
        assert usages[-1].total_tokens == upstream.TOKENS
        await client.close()


async def test_no_more_calls_than_the_concurrency_are_under_way(sdk: Sdk) -> None:
    open_now, most, all_in = 0, 0, asyncio.Event()

    async def answer(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if most == 3:
            all_in.set()
        await all_in.wait()
        # Whoever could come now would have come before those that are answered in their turn.
        for _ in range(20):
            await asyncio.sleep(0)
        open_now -= 1
        writer.write(reply_json(sdk.body))
        await writer.drain()

    async with running_endpoint(answer) as endpoint:
        client = sdk.make(concurrency=3, api_key="k", base_url=endpoint.url + sdk.base)
        texts = await asyncio.gather(*(sdk.ask(client) for _ in range(9)))
        assert texts == [upstream.TEXT] * 9
        assert most == 3
        await sdk.close(client)


async def test_a_ledger_that_others_share_keeps_one_limit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'budget.db'}"
    async with running_endpoint(reply_json(upstream.CHAT)) as endpoint:
        more: dict[str, Any] = {"api_key": "k", "base_url": f"{endpoint.url}/v1", "prices": PRICES}
        sdk = SDKS[1]
        for _ in range(2):
            client = headgate.async_openai(budget_usd=5, tracker=url, scope="session:e", **more)
            await sdk.ask(client)
            await client.close()
        async with headgate.connect_budget(url) as tracker:
            status = await tracker.status("session:e")
            assert (status.spent_micro_usd, status.limit_micro_usd) == (2 * COST, 5_000_000)
        other = headgate.async_openai(budget_usd=6, tracker=url, scope="session:e", **more)
        with pytest.raises(BudgetMismatchError, match=r"\$5\.00"):
            await sdk.ask(other)
        await other.close()


async def test_a_client_of_one_event_loop_after_the_other_keeps_its_budget() -> None:
    def run() -> int:
        client = headgate.async_openai(budget_usd=5, concurrency=2, **more)

        async def ask() -> None:
            await SDKS[1].ask(client)
            await client.close()

        asyncio.run(ask())
        return len(endpoint.seen)

    async with running_endpoint(reply_json(upstream.CHAT)) as endpoint:
        more: dict[str, Any] = {"api_key": "k", "base_url": f"{endpoint.url}/v1", "prices": PRICES}
        assert await asyncio.to_thread(run) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "budget_usd"),
        ({"budget_usd": -1}, "budget_usd"),
        ({"concurrency": 0}, "concurrency"),
        ({"budget_usd": 1, "http_client": None}, "http_client"),
        ({"budget_usd": 1, "token": "hg_1"}, "token"),
        ({"budget_usd": 1, "project_id": "p"}, "project_id"),
        ({"budget_usd": 1, "scope": lambda: "session:a"}, "budget_usd"),
        ({"server": "ftp://host"}, "server"),
        ({"server": "http://host", "tracker": "memory:"}, "tracker"),
        ({"server": "http://host", "base_url": "http://other"}, "base_url"),
        ({"server": "http://host", "max_wait_seconds": 3}, "max_wait_seconds"),
        (
            {"server": "http://host", "concurrency": 2, "max_wait_seconds": 3},
            "max_wait_seconds",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_at_once(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        headgate.openai(**options)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"budget": 5}, "budget: is not an option of headgate.openai; did you mean budget_usd?"),
        (
            {"budget_usd": 5, "concurency": 8},
            "concurency: is not an option of headgate.openai; did you mean concurrency?",
        ),
        (
            {"budget_usd": 5, "timeouts": 8},
            "timeouts: is not an option of headgate.openai; did you mean timeout?",
        ),
        ({"budget_usd": -1}, "budget_usd: must not be negative; write 0 or more dollars"),
        (
            {"server": "http://host", "concurrency": 2, "max_wait_seconds": 3},
            (
                "max_wait_seconds: does not limit the wait at a service; leave it out with server, "
                "the service has the setting gateway.max_wait_seconds"
            ),
        ),
    ],
)
def test_a_wrong_option_is_answered_with_the_nearest_right_one(
    options: dict[str, Any], line: str
) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        headgate.openai(**options)
    assert str(refused.value) == line


async def test_a_client_says_what_it_has_spent(sdk: Sdk) -> None:
    async with running_endpoint(reply_json(sdk.body)) as endpoint:
        more = {"api_key": "k", "base_url": f"{endpoint.url}{sdk.base}", "prices": PRICES}
        client = sdk.make(budget_usd=1, **more)
        assert headgate.spent(client) == 0
        await sdk.ask(client)
        await sdk.ask(client)
        assert headgate.spent(client) == Decimal(2 * COST).scaleb(-6)
        await sdk.close(client)
        assert headgate.spent(client) == Decimal(2 * COST).scaleb(-6)


@pytest.mark.parametrize("client", [None, "text", object(), headgate])
def test_only_a_client_with_a_budget_says_what_it_has_spent(client: object) -> None:
    with pytest.raises(InvalidFieldError, match="client: has no budget; make it with"):
        headgate.spent(client)


async def test_a_model_without_a_price_is_answered_with_the_nearest_and_with_options() -> None:
    client = headgate.async_openai(budget_usd=1, api_key="k")
    with pytest.raises(CallerError) as refused:
        await client.chat.completions.create(
            model="gpt-4o-mni", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
    assert str(refused.value) == (
        "model 'gpt-4o-mni' has no known price; did you mean gpt-4o-mini? Otherwise give "
        "prices=PriceList({'gpt-4o-mni': Price(input=…, output=…)}) with both from "
        "headgate.providers.prices, or estimate_usd=…"
    )
    await client.close()


async def test_no_free_call_slot_is_said_in_the_words_of_the_options() -> None:
    release = asyncio.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        await release.wait()
        return httpx2.Response(200, json=upstream.CHAT)

    client = headgate.async_openai(
        concurrency=1,
        max_wait_seconds=0.2,
        api_key="k",
        transport=httpx2.MockTransport(answer),
    )

    def ask() -> Any:
        return client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )

    first = asyncio.create_task(ask())
    await asyncio.sleep(0)
    with pytest.raises(PermitTimeoutError) as refused:
        await asyncio.create_task(ask())
    line = "no call slot became free within 0.2 s; concurrency = 1; raise it or max_wait_seconds"
    assert str(refused.value) == line
    release.set()
    await first
    await client.close()


async def test_another_limit_is_answered_with_the_whole_command(tmp_path: Path) -> None:
    file = tmp_path / "budget.db"
    async with connect_budget(f"sqlite:///{file}") as tracker:
        await tracker.set_budget("session:sdk", 5)
    client = headgate.async_openai(budget_usd=8, tracker=f"sqlite:///{file}", api_key="k")
    with pytest.raises(BudgetMismatchError) as refused:
        await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        )
    command = f"headgate budget set session:sdk --limit-usd 8.00 --ledger {file}"
    assert f"`{command}`" in str(refused.value)
    await client.close()


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_without_the_sdk_one_line_says_what_to_install(name: str) -> None:
    program = (
        f"import sys; sys.modules['{name}'] = None\nimport headgate\nheadgate.{name}(budget_usd=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: headgate.{name} needs the package {name}; run pip install {name}"


def test_an_sdk_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("openai")
    old.__version__ = "1.99.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openai", old)
    with pytest.raises(ImportError, match=r"needs openai 3 or later, and this is 1\.99\.0"):
        headgate.openai(budget_usd=1)


def test_importing_headgate_loads_no_sdk_and_a_star_hides_none() -> None:
    program = (
        "import sys, headgate; from headgate import *\n"
        "assert not {'openai', 'anthropic', 'httpx2'} & sys.modules.keys()\n"
        "assert 'openai' not in globals()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Through a service.


def at_service(sdk: Sdk, gateway: GatewayService, **options: Any) -> Any:
    """Make a client of a service."""
    return sdk.make(server=f"http://127.0.0.1:{gateway.port}", **options)


async def test_through_a_service_calls_have_its_keys_and_its_books(
    sdk: Sdk, tmp_path: Path
) -> None:
    async with gateway_service(tmp_path) as gateway:
        client = at_service(
            sdk, gateway, budget_usd=5, concurrency=2, scope="session:eval", agent_id="analyst"
        )
        assert await sdk.ask(client) == BILLED_TEXT
        assert await sdk.read(client) == BILLED_TEXT
        await sdk.close(client)
        await gateway.until_idle()
        assert {one.key for one in gateway.upstream.requests} <= set(ENVIRON.values())
        status = await gateway.status("session:eval")
        assert float(status["limitUsd"]) == 5.0
        bill = sum(charge.tokens for charge in gateway.upstream.bill)
        assert status["spentTokens"] + status["overrunTokens"] == bill > 0
        calls = list(gateway.calls.latest())
        assert [one.agent_id for one in calls] == ["analyst"] * 2
        assert all("session:eval" in one.scopes for one in calls)


async def test_a_budget_of_a_service_refuses_with_its_words_and_once(
    sdk: Sdk, tmp_path: Path
) -> None:
    async with gateway_service(tmp_path, '[gateway]\nreserve = "strict"\n') as gateway:
        client = at_service(sdk, gateway, budget_usd=dollars(5_000), scope="session:tiny")
        await sdk.ask(client)
        with pytest.raises(ServiceLimitError, match="session:tiny") as refused:
            await sdk.ask(client, max_tokens=10_000)
        assert isinstance(refused.value, LimitReachedError)
        assert (refused.value.code, refused.value.status) == ("budget_exceeded", 402)
        await sdk.close(client)
        status = await gateway.status("session:tiny")
        assert 0 < usd(float(status["spentUsd"])) <= 5_000
        assert len(list(gateway.calls.latest())) == len(gateway.upstream.bill) + 1


async def test_two_clients_of_a_service_have_two_budgets_unless_they_name_one(
    tmp_path: Path,
) -> None:
    async with gateway_service(tmp_path) as gateway:
        sdk = SDKS[1]
        for _ in range(2):
            client = at_service(sdk, gateway, budget_usd=5)
            await sdk.ask(client)
            await client.close()
        await gateway.calls.settled(seconds=10.0)
        scopes = {one.scopes[-1] for one in gateway.calls.latest()}
        assert len(scopes) == 2
        assert all(one.startswith("session:sdk-") for one in scopes)
        for one in scopes:
            assert float((await gateway.status(one))["limitUsd"]) == 5.0
        named = at_service(sdk, gateway, budget_usd=5, scope="session:one")
        await sdk.ask(named)
        await named.close()
        other = at_service(sdk, gateway, budget_usd=6, scope="session:one")
        with pytest.raises(RequestRefusedError, match=r"\$5\.00"):
            await sdk.ask(other)
        await other.close()


async def test_a_bound_token_has_its_budget_within_its_own(sdk: Sdk, tmp_path: Path) -> None:
    async with gateway_service(tmp_path, "[projects.evals]\n") as gateway:
        client = at_service(sdk, gateway, budget_usd=5, token=await bound_token(gateway))
        assert await sdk.ask(client) == BILLED_TEXT
        await sdk.close(client)
        call = await gateway.latest()
        assert any(one.startswith("project:evals/session:sdk-") for one in call.scopes)
        stranger = at_service(sdk, gateway, budget_usd=5, token="hg_000000000000_no")
        with pytest.raises(NotAllowedError):
            await sdk.ask(stranger)
        await sdk.close(stranger)


async def test_first_calls_at_the_same_time_have_one_budget(sdk: Sdk, tmp_path: Path) -> None:
    # The service needs threads as well while all callers of a client without asyncio hold theirs.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=16))
    async with gateway_service(tmp_path, "[projects.evals]\n") as gateway:
        client = at_service(sdk, gateway, budget_usd=5, token=await bound_token(gateway))
        texts = await asyncio.gather(*(sdk.ask(client) for _ in range(8)))
        assert texts == [BILLED_TEXT] * 8
        await sdk.close(client)
        await gateway.calls.settled(seconds=10.0)
        scopes = {scope for call in gateway.calls.latest() for scope in call.scopes}
        own = scopes - {"project:evals"}
        assert len(own) == 1
        assert own.pop().count("/") == 1


class CountedLock:
    """A lock that says when it was held so many times."""

    def __init__(self, times: int) -> None:
        self._lock = threading.Lock()
        self._left = times
        self.passed = threading.Event()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._left -= 1
        self._lock.release()
        if not self._left:
            self.passed.set()


@pytest.mark.parametrize("is_async", [True, False])
async def test_calls_that_wait_for_a_budget_get_the_error_of_the_one_that_creates_it(
    is_async: bool,
) -> None:
    callers = 5
    lock = CountedLock(callers)

    async def refuse(_request: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(lock.passed.wait, 10.0)
        writer.write(reply_json({}, 400))

    async def create() -> None:
        if is_async:
            await service.create_budget_async()
        else:
            await asyncio.to_thread(service.create_budget)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=16))
    async with running_endpoint(refuse) as endpoint:
        service = _Service(endpoint.url, None, None, 5)
        service._lock = cast("threading.Lock", lock)
        errors = await asyncio.gather(*(create() for _ in range(callers)), return_exceptions=True)
        assert [type(one) for one in errors] == [RequestRefusedError] * callers
        assert len(endpoint.seen) == 1
        with pytest.raises(RequestRefusedError):
            await create()
        assert len(endpoint.seen) == 2


async def test_another_call_creates_the_budget_if_the_first_is_cancelled() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def answer(_request: Seen, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await go_on.wait()
        writer.write(reply_json({}, 400))

    async with running_endpoint(answer) as endpoint:
        service = _Service(endpoint.url, None, None, 5)
        first = asyncio.create_task(service.create_budget_async())
        await asked.wait()
        others = [asyncio.create_task(service.create_budget_async()) for _ in range(3)]
        await asyncio.sleep(0)
        others.pop().cancel()
        first.cancel()
        go_on.set()
        errors = await asyncio.gather(*others, return_exceptions=True)
        assert [type(one) for one in errors] == [RequestRefusedError] * 2
        assert len(endpoint.seen) == 2


async def bound_token(gateway: GatewayService) -> str:
    """Return a token of a service that is for one project."""
    permissions: tuple[Permission, ...] = ("read", "submit")
    bounds = Bounds(project_id="evals")
    new = new_token(
        name=secrets.token_hex(4), permissions=permissions, now=time.time(), bounds=bounds
    )
    await gateway.service.api.tokens.add(new.kept)
    return new.text


async def test_a_client_of_a_named_budget_says_what_others_have_spent(
    sdk: Sdk, tmp_path: Path
) -> None:
    async with gateway_service(tmp_path) as gateway:
        first, second = (at_service(sdk, gateway, budget_usd=5, scope="session:a") for _ in "12")
        assert await asyncio.to_thread(headgate.spent, first) == 0
        await sdk.ask(first)
        await gateway.calls.settled(seconds=10.0)
        spent = await asyncio.to_thread(headgate.spent, first)
        assert spent > 0
        assert await asyncio.to_thread(headgate.spent, second) == spent
        unnamed = at_service(sdk, gateway, budget_usd=5)
        assert await asyncio.to_thread(headgate.spent, unnamed) == 0
        for client in (first, second, unnamed):
            await sdk.close(client)


async def test_a_service_that_is_not_there_is_named(sdk: Sdk) -> None:
    client = sdk.make(server="http://127.0.0.1:1", budget_usd=5, max_retries=0)
    with pytest.raises(ServiceUnavailableError, match="headgate up"):
        await sdk.ask(client)
    await sdk.close(client)


async def test_scopes_of_a_service_may_be_asked_for_each_call(tmp_path: Path) -> None:
    scope = "session:one"
    async with gateway_service(tmp_path) as gateway:
        sdk = SDKS[1]
        client = at_service(sdk, gateway, scope=lambda: scope)
        await sdk.ask(client)
        scope = "session:two"
        await sdk.ask(client)
        await client.close()
        await gateway.calls.settled(seconds=10.0)
        assert [one.scopes[-1] for one in gateway.calls.latest()] == ["session:one", "session:two"]


async def test_a_transport_of_ones_own_is_used() -> None:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=upstream.CHAT)

    client = headgate.async_openai(
        budget_usd=5, prices=PRICES, api_key="k", transport=httpx2.MockTransport(answer)
    )
    assert await SDKS[1].ask(client) == upstream.TEXT
    await client.close()
