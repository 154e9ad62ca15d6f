"""What the tasks of these tests do: they end when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.02


async def run(order: Mapping[str, Any]) -> object:
    """Wait for a file if the task names one, then fail or answer as the task says."""
    params = order["params"] or {}
    if "until" in params:
        await _wait_for(Path(params["until"]))
    if "error" in params:
        raise ValueError(params["error"])
    return params.get("answer", {"attempt": order["attempt"]})


async def _wait_for(path: Path) -> None:
    while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(LOOK_SECONDS)
