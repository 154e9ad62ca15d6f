"""What the tasks of these tests do: they end when a test says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.work import until_there


async def run(order: Mapping[str, Any]) -> object:
    """Wait for a file if the task names one, then fail or answer as the task says."""
    params = order["params"] or {}
    if "until" in params:
        await until_there(Path(params["until"]))
    if "error" in params:
        raise ValueError(params["error"])
    return params.get("answer", {"attempt": order["attempt"]})
