"""What tasks do on a Ray cluster in the tests: they leave a line where they were, and wait."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import headgate
from headgate.core.lifecycle import Succeeded
from headgate.executors.ray import tell
from headgate.executors.ray_cluster import Holder


def note(params: Mapping[str, Any], what: str) -> None:
    """Add a line to the file that a task names."""
    with Path(params["file"]).open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


def run(order: Mapping[str, Any]) -> dict[str, object]:
    """Do what the action says, as a plain function."""
    params = order["params"] or {}
    if "file" in params:
        note(params, "began")
    if order["action"] == "fail":
        raise ValueError("no such thing")
    if order["action"] == "large":
        return {"text": "x" * int(params["bytes"])}
    if "reports" in params:
        for number in range(int(params["reports"])):
            headgate.report_progress(number / 1_000, f"file {number}")
    ends_at = time.monotonic() + float(params.get("seconds", 0.0))
    release = params.get("release")
    while time.monotonic() < ends_at and not (release and Path(release).exists()):
        time.sleep(0.02)
        if "again" in params and Path(params["again"]).exists():
            headgate.report_progress(0.9, "nearly there")
    if "file" in params:
        note(params, "ended")
    return {
        "attempt": order["attempt"],
        "variable": os.environ.get("RAY_TEST_VARIABLE"),
        "usage": {"input_tokens": 10, "output_tokens": 5},
    }


async def run_async(order: Mapping[str, Any]) -> dict[str, object]:
    """Wait, and leave a line if it is cancelled."""
    params = order["params"]
    note(params, "began")
    try:
        await asyncio.sleep(float(params["seconds"]))
    except asyncio.CancelledError:
        note(params, "cancelled")
        raise
    note(params, "ended")
    return {}


class DyingHolder(Holder):
    """Starts an attempt, and ends when the work has begun and nobody knows of it yet."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    async def start(
        self, attempt_id: str, target: str, work: bytes, options: dict[str, Any]
    ) -> None:
        """Start it, and do not come back."""
        await super().start(attempt_id, target, work, options)
        while not self._file.exists():  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.02)
        os._exit(1)


class OlderHolder:
    """What the first version of the holder has in common with all that came after it."""

    def __init__(self) -> None:
        self._outcomes: dict[str, bytes] = {}

    async def keep(self, attempt_id: str) -> None:
        """Have an attempt here that has ended."""
        self._outcomes[attempt_id] = tell(Succeeded(result=msgspec.Raw(b'"kept"')))

    async def outcome(self, attempt_id: str) -> bytes | None:
        """Return what came of an attempt."""
        return self._outcomes.get(attempt_id)
