"""Filing: a delivery is written in the transaction of what it tells of.

Rule: a task with a receiver has one delivery, under an id that is made from its own, so whichever
step ended it, and however often that step is run, the receiver is told of one end.
"""

from __future__ import annotations

from headgate.databases.transaction import Row
from headgate.deliveries import TASK_EVENTS, Delivery, DeliveryState, host_of, message_id
from headgate.stores.task_rows import TaskRow


def row_for_end(row: TaskRow, url: str, now: float) -> Row:
    """Return the row of the delivery that tells of the end of a task."""
    delivery = Delivery(
        id=message_id(row.id),
        event=TASK_EVENTS[row.status.value],
        url=url,
        task_id=row.id,
        created_at=now,
        due_at=now,
    )
    return new_row(delivery)


def new_row(delivery: Delivery) -> Row:
    """Return the row of a delivery that nobody has tried."""
    return (
        delivery.id,
        delivery.task_id,
        delivery.event,
        delivery.url,
        host_of(delivery.url),
        DeliveryState.PENDING.value,
        0,
        delivery.created_at,
        delivery.due_at,
        None,
        None,
        None,
        None,
    )
