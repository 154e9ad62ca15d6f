"""A provider on loopback, a budget, a resource of one permit, and the four clients of two SDKs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai

from executors.endpoint import Answer, Endpoint, running_endpoint
from headgate.budgets.local import LocalBudgetTracker
from headgate.inprocess.permits import SharedResource
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk import async_client, sync_client
from headgate.providers.prices import Price, PriceList
from inprocess.sdk import upstream

SCOPE = "session:s1"
PROMPT = "what is the answer?"
MAX_TOKENS = 100
MOST_STEPS = 1_000_000
# A token of input costs one micro-dollar, one of output ten.
PRICE = Price(input=1, output=10)
PRICES = PriceList({"gpt-4o": PRICE, "gpt-4o-mini": PRICE, "claude-house": PRICE})
COST = upstream.INPUT_TOKENS + 10 * upstream.OUTPUT_TOKENS


class Scene:
    """What a test has, and the ledger that it looks at afterwards."""

    def __init__(self, endpoint: Endpoint, fields: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.tracker = LocalBudgetTracker()
        self.resource = SharedResource("llm", 1)
        self.scheduler = LoadScheduler(None, self.resource)
        self.unsettled: list[Exception] = []
        self.fields: dict[str, Any] = {
            "scheduler": self.scheduler,
            "agent_id": "analyst",
            "tracker": self.tracker,
            "scope": SCOPE,
            "prices": PRICES,
            "on_unsettled": self.unsettled.append,
        } | fields

    def async_client(self) -> httpx2.AsyncClient:
        return async_client(**self.fields)

    def sync_client(self) -> httpx2.Client:
        return sync_client(**self.fields, loop=asyncio.get_running_loop())

    async def booked(self) -> tuple[int, int]:
        """Return the micro-dollars and tokens that were booked; nothing may be held any more."""
        await until(lambda: not self.resource.in_use and not self.scheduler.queued)
        status = await self.tracker.status(SCOPE)
        assert (status.reserved_micro_usd, status.reserved_tokens) == (0, 0)
        assert self.resource.free == self.resource.capacity
        return (
            status.spent_micro_usd + status.overrun_micro_usd,
            status.spent_tokens + status.overrun_tokens,
        )

    async def reserved(self) -> tuple[int, int]:
        status = await self.tracker.status(SCOPE)
        return status.reserved_micro_usd, status.reserved_tokens


async def until(is_so: Callable[[], bool]) -> None:
    """Let everything else go on until something is so."""
    for _ in range(MOST_STEPS):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be so")


@asynccontextmanager
async def scene(answer: Answer | None = None, **fields: Any) -> AsyncIterator[Scene]:
    """Run a provider that gives this answer, with a budget of a dollar."""
    async with running_endpoint(answer) as endpoint:
        made = Scene(endpoint, fields)
        await made.tracker.set_budget(SCOPE, limit_usd=1)
        yield made
        assert made.unsettled == []


async def openai_async(scene: Scene, *, stream: bool = False, retries: int = 0, **more: Any) -> str:
    async with openai.AsyncOpenAI(
        api_key="key",
        base_url=f"{scene.endpoint.url}/v1",
        http_client=scene.async_client(),
        max_retries=retries,
    ) as sdk:
        asked = {**_openai_fields(), **more}
        if not stream:
            done = await sdk.chat.completions.create(**asked)
            return str(done.choices[0].message.content)
        text = ""
        async for chunk in await sdk.chat.completions.create(**asked, stream=True):
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        return text


async def openai_sync(scene: Scene, *, stream: bool = False, retries: int = 0, **more: Any) -> str:
    http_client = scene.sync_client()

    def ask() -> str:
        with openai.OpenAI(
            api_key="key",
            base_url=f"{scene.endpoint.url}/v1",
            http_client=http_client,
            max_retries=retries,
        ) as sdk:
            asked = {**_openai_fields(), **more}
            if not stream:
                return str(sdk.chat.completions.create(**asked).choices[0].message.content)
            chunks = sdk.chat.completions.create(**asked, stream=True)
            return "".join(
                (chunk.choices[0].delta.content or "") if chunk.choices else "" for chunk in chunks
            )

    return await asyncio.to_thread(ask)


async def anthropic_async(
    scene: Scene, *, stream: bool = False, retries: int = 0, **more: Any
) -> str:
    async with anthropic.AsyncAnthropic(
        api_key="key",
        base_url=scene.endpoint.url,
        http_client=scene.async_client(),
        max_retries=retries,
    ) as sdk:
        asked = {**_anthropic_fields(), **more}
        if not stream:
            return _text(await sdk.messages.create(**asked))
        async with sdk.messages.stream(**asked) as events:
            return "".join([piece async for piece in events.text_stream])


async def anthropic_sync(
    scene: Scene, *, stream: bool = False, retries: int = 0, **more: Any
) -> str:
    http_client = scene.sync_client()

    def ask() -> str:
        with anthropic.Anthropic(
            api_key="key",
            base_url=scene.endpoint.url,
            http_client=http_client,
            max_retries=retries,
        ) as sdk:
            asked = {**_anthropic_fields(), **more}
            if not stream:
                return _text(sdk.messages.create(**asked))
            with sdk.messages.stream(**asked) as events:
                return "".join(events.text_stream)

    return await asyncio.to_thread(ask)


class Sdk(NamedTuple):
    """One SDK client, and what its provider answers."""

    name: str
    ask: Callable[..., Awaitable[str]]
    model: str
    body: dict[str, Any]
    events: list[bytes]


SDKS = [
    Sdk("AsyncOpenAI", openai_async, "gpt-4o", upstream.CHAT, upstream.CHAT_STREAM),
    Sdk("OpenAI", openai_sync, "gpt-4o", upstream.CHAT, upstream.CHAT_STREAM),
    Sdk(
        "AsyncAnthropic",
        anthropic_async,
        "claude-house",
        upstream.MESSAGE,
        upstream.MESSAGE_STREAM,
    ),
    Sdk("Anthropic", anthropic_sync, "claude-house", upstream.MESSAGE, upstream.MESSAGE_STREAM),
]


def _openai_fields() -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "gpt-4o", "messages": messages, "max_tokens": MAX_TOKENS}


def _anthropic_fields() -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": "claude-house", "messages": messages, "max_tokens": MAX_TOKENS}


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content)
