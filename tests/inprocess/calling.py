"""Running calls of `wrap` in tests: in virtual time, or in a loop that has threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import headgate
from headgate import Grant, LoadScheduler
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")


def run(scenario: Callable[[LoadScheduler], Awaitable[T]], **options: Any) -> T:
    """Run a scenario in virtual time, under a scheduler with these options."""

    async def main(loop: SimulatedLoop) -> T:
        return await scenario(headgate.configure(**options))

    return simulate(main).result


def really(scenario: Callable[[LoadScheduler], Awaitable[T]], **options: Any) -> T:
    """Run a scenario in a loop that has threads."""

    async def main() -> T:
        async with asyncio.timeout(10):
            return await scenario(headgate.configure(**options))

    return asyncio.run(main())


def granted() -> Grant:
    grant = headgate.current_grant()
    assert grant is not None
    return grant


async def nothing() -> None:
    return None
