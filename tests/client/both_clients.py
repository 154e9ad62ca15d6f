"""The two clients behind one face, so that a test of one is a test of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headgate import Client, SyncClient

Ask = Callable[..., Any]


def ask_sync(url: str, verb: str, /, *args: object, options: dict[str, Any], **given: Any) -> Any:
    """Call a verb of `SyncClient`; what it gives one by one is returned as a list."""
    with SyncClient(url, **options) as client:
        answer = getattr(client, verb)(*args, **given)
        return list(answer) if hasattr(answer, "__next__") else answer


def ask_async(url: str, verb: str, /, *args: object, options: dict[str, Any], **given: Any) -> Any:
    """Call a verb of `Client` in an event loop of its own."""

    async def ask() -> Any:
        async with Client(url, **options) as client:
            answer = getattr(client, verb)(*args, **given)
            if hasattr(answer, "__anext__"):
                return [one async for one in answer]
            assert isinstance(answer, Coroutine)
            return await answer

    return asyncio.run(ask())


class EitherClient:
    """One of the two clients, for one service."""

    def __init__(self, ask: Ask, url: str, **options: Any) -> None:
        self._ask = ask
        self._url = url
        self._options = options

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*args: object, **given: Any) -> Any:
            return self._ask(self._url, verb, *args, options=self._options, **given)

        return call
