"""A service with tasks that run and wait for as long as a test needs them, and a screen over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cli.top.scene import Terminal, screen
from service.support import ECHO_TARGET, SLOW_TARGET, ServiceProcess

SETTINGS = f"""{ECHO_TARGET}{SLOW_TARGET}
[projects.search]
credit_weight = 2.0

[projects.evals]
credit_weight = 1.0
max_concurrent_agents = 1

[projects.off]
status = "paused"

[agents.tight]
capacity = 1

[budgets."session:eval"]
limit_usd = "50.00"

[[slots]]
name = "work"
provider = "zai"
key_env = "NOT_SET_ANYWHERE"
enabled = false
"""


class Fleet:
    """A service with a few tasks that run and wait until they are cancelled."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        submit = service.submit
        self.running = submit(agentId="tight", projectId="search", target="slow", action="crawl")
        self.waiting = submit(agentId="tight", projectId="search", target="slow", action="crawl")
        self.paused = submit(agentId="judge", projectId="off", target="slow", action="judge")
        service.wait_for(self.running, "running")


def at(fleet: Fleet, body: Callable[[Terminal], Awaitable[None]], **given: Any) -> None:
    """Do something at a screen over the service."""

    async def main() -> None:
        async with screen(fleet.service.address, **given) as terminal:
            await body(terminal)

    asyncio.run(main())
