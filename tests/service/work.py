"""Functions that services of the tests have as targets."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headgate

FOREVER_SECONDS = 3_600.0
LOOK_SECONDS = 0.02


async def run(order: Mapping[str, Any]) -> object:
    """Take as long as the task says, or until the file is there that it names."""
    params = order["params"] or {}
    await asyncio.sleep(params.get("seconds", 0.0))
    if "until" in params:
        await until_there(Path(params["until"]))
    return {"attempt": order["attempt"]}


async def until_there(path: Path) -> None:
    """Wait for a file that another process makes."""
    while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(LOOK_SECONDS)


async def hang_at_first(order: Mapping[str, Any]) -> object:
    """Never come to an end the first time."""
    await asyncio.sleep(FOREVER_SECONDS if order["attempt"] == 1 else 0.0)
    return {"attempt": order["attempt"]}


async def note_and_run(order: Mapping[str, Any]) -> object:
    """Note in a file when an attempt begins and when it ends, and take as long as the task says."""
    params = order["params"] or {}
    attempt, path = order["attempt"], Path(params["notes"])
    _note(path, f"begins {attempt}")
    try:
        await asyncio.sleep(params.get("seconds", 0.0))
    except asyncio.CancelledError:
        _note(path, f"stopped {attempt}")
        raise
    _note(path, f"ends {attempt}")
    return {"attempt": attempt}


async def report_and_run(order: Mapping[str, Any]) -> object:
    """Say how far it is, on the loop and on a thread, until the file is there that is named."""
    headgate.report_progress(0.25, "begun")
    await asyncio.to_thread(headgate.report_progress, 0.5, "half \x1b way")
    await until_there(Path(order["params"]["until"]))
    return {"attempt": order["attempt"]}


def fail(order: Mapping[str, Any]) -> object:
    """Raise what the task says."""
    raise OSError(order["params"]["why"])


def _note(path: Path, line: str) -> None:
    with path.open("a") as notes:
        notes.write(f"{line}\n")


async def hold_loop(order: Mapping[str, Any]) -> object:
    """Wait for a file, then keep the loop and every other thread from going on, the first time.

    A call into C that does not let go of the interpreter does this, as one that parses a large body
    does; this one needs no processor.
    """
    params = order["params"]
    await until_there(Path(params["when"]))
    if order["attempt"] == 1:
        ctypes.PyDLL(None).usleep(int(params["seconds"] * 1e6))
    return {"attempt": order["attempt"]}
