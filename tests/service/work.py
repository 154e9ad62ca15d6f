"""Functions that services of the tests have as targets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

FOREVER_SECONDS = 3_600.0


async def run(order: Mapping[str, Any]) -> object:
    """Take as long as the task says."""
    params = order["params"] or {}
    await asyncio.sleep(params.get("seconds", 0.0))
    return {"attempt": order["attempt"]}


async def hang_at_first(order: Mapping[str, Any]) -> object:
    """Never come to an end the first time."""
    await asyncio.sleep(FOREVER_SECONDS if order["attempt"] == 1 else 0.0)
    return {"attempt": order["attempt"]}
