"""Functions that tests name as entry points."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import threading
from typing import Any

import msgspec

from executors.orders import CHAT
from headgate.core.lifecycle import Limited, Succeeded
from headgate.executors.executor import OrderView

WHO = contextvars.ContextVar("WHO", default="nobody")
RELEASED = threading.Event()
ENTERED = threading.Semaphore(0)
not_a_function = 5


async def doubled(order: OrderView) -> object:
    return {"doubled": order["input"] * 2}


def doubled_plainly(order: OrderView) -> object:
    return {"doubled": order["input"] * 2, "thread": threading.current_thread().name}


async def seen(order: OrderView) -> object:
    return dict(order)


async def nothing(order: OrderView) -> None:
    return None


async def chat(order: OrderView) -> object:
    return CHAT


async def paused(order: OrderView) -> object:
    return Limited(retry_after_seconds=3.0)


async def large(order: OrderView) -> object:
    return "x" * 1_000


def error_in(order: OrderView) -> BaseException:
    kind, message = order["input"]
    error: BaseException = getattr(builtins, kind)(message)
    return error


async def failing(order: OrderView) -> object:
    raise error_in(order)


async def returning_no_json(order: OrderView) -> object:
    return Succeeded(result=msgspec.Raw(b"}} not json"))


def failing_plainly(order: OrderView) -> object:
    raise error_in(order)


async def cancelling_itself(order: OrderView) -> object:
    raise asyncio.CancelledError("by itself")


async def waiting(order: OrderView) -> object:
    ENTERED.release()
    await asyncio.Event().wait()
    return None


def stuck(order: OrderView) -> object:
    ENTERED.release()
    RELEASED.wait(60)
    return "late"


def who(order: OrderView) -> object:
    return WHO.get()


async def unwritable(order: OrderView) -> object:
    return {"a": object()}


async def endless(order: OrderView) -> object:
    loop: list[object] = []
    loop.append(loop)
    return loop


class Model:
    """What the client of a provider returns."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Return it as plain values."""
        return {"mode": mode, **CHAT}


async def modelled(order: OrderView) -> object:
    return Model()


class Tool:
    """An object with methods that do the work."""

    async def __call__(self, order: OrderView) -> object:
        return ["called", order["attempt"]]

    async def method(self, order: OrderView) -> object:
        return ["method", order["attempt"]]


tool = Tool()
