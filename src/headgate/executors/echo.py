"""The built-in target: it gives back what it was given, so that a first task can be done."""

from __future__ import annotations

from headgate.core.tasks.records import Submission
from headgate.executors.order_view import OrderView


async def echo(order: OrderView) -> dict[str, Submission]:
    """Return the task as its client wrote it."""
    return {"echo": order.work_order.submission}
