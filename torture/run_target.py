"""The target of tortured runs on a service: the work of a step, in the process of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torture.run_step import draw_seconds, leave_mark


async def work(order: Mapping[str, Any]) -> object:
    """Be the entry point of the target."""
    params = order["params"]
    before, after = draw_seconds()
    await asyncio.sleep(before)
    leave_mark(params["name"], params["marks"])
    await asyncio.sleep(after)
    return {"name": params["name"]}
