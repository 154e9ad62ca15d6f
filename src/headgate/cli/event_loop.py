"""The event loop of commands that run an engine, and what makes their interpreter fit for it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Any


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest loop that is installed; None is the usual one."""
    try:
        import uvloop  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    factory: Any = uvloop.new_event_loop
    return factory  # type: ignore[no-any-return]


def tune_interpreter() -> None:
    """Have threads change more often, and what is loaded not be searched for garbage."""
    # The writer's thread asks for its turn after every statement. With the default it waits five
    # milliseconds for it whenever the event loop is busy.
    sys.setswitchinterval(0.001)
    # A backlog of many small objects makes full collections long, and none of it is garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
