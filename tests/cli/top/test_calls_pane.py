"""The pane of calls, over a service with a gateway and a provider behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cli.top.scene import screen
from gateway.gateway_service import CHAT, gateway_service


def test_the_pane_shows_what_waits_at_an_upstream_and_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = gateway.start(CHAT, "[[until go]]")
            await gateway.until(lambda: len(gateway.calls) == 1)
            second = gateway.start(CHAT, "[[until go]]")
            await gateway.until_waiting()
            url = f"http://127.0.0.1:{gateway.port}"
            async with asyncio.timeout(30), screen(url, size=(140, 24)) as terminal:
                await terminal.press("7")
                text = await terminal.sees("openai", "1 of 1 calls in flight")
                assert "[7 Calls 2]" in text
                gateway.upstream.releases.add("go")
                await asyncio.gather(first, second)

    asyncio.run(scenario())
