"""A work order as programs outside see it: a mapping with the names of the HTTP API.

Rule: JSON is decoded when somebody asks for it, and once. Most functions read one field or none,
and tens of thousands of orders may pass in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from headgate.executor import WorkOrder

_READERS: dict[str, Callable[[WorkOrder], object]] = {
    "taskId": lambda order: order.task_id,
    "attempt": lambda order: order.attempt,
    "projectId": lambda order: order.project_id,
    "agentId": lambda order: order.agent_id,
    "action": lambda order: order.submission.action,
    "tabId": lambda order: order.submission.tab_id,
    "ref": lambda order: order.submission.ref,
    "selector": lambda order: order.submission.selector,
    "params": lambda order: _decoded(order.submission.params),
    "input": lambda order: _decoded(order.submission.input),
    "labels": lambda order: dict(order.submission.labels),
    "deadline": lambda order: order.deadline,
    "traceparent": lambda order: order.traceparent,
    "slot": lambda order: order.slot,
}


class OrderView(Mapping[str, Any]):
    """One attempt at one task; `deadline` is in Unix seconds, and what was not given is None."""

    __slots__ = ("_read", "work_order")

    def __init__(self, work_order: WorkOrder) -> None:
        self.work_order = work_order
        self._read: dict[str, object] | None = None

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  each name has a type of its own
        if self._read is None:
            self._read = {}
        if key not in self._read:
            self._read[key] = _READERS[key](self.work_order)
        return self._read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_READERS)

    def __len__(self) -> int:
        return len(_READERS)

    def __repr__(self) -> str:
        return f"OrderView({self.work_order.task_id!r}, attempt={self.work_order.attempt})"


def order_json(order: WorkOrder) -> bytes:
    """Write the same names as JSON, with what the client wrote as it was written."""
    submission = order.submission
    return msgspec.json.encode(
        {
            "taskId": order.task_id,
            "attempt": order.attempt,
            "projectId": order.project_id,
            "agentId": order.agent_id,
            "action": submission.action,
            "tabId": submission.tab_id,
            "ref": submission.ref,
            "selector": submission.selector,
            "params": submission.params,
            "input": submission.input,
            "labels": submission.labels,
            "deadline": order.deadline,
            "traceparent": order.traceparent,
            "slot": order.slot,
        }
    )


def _decoded(json: msgspec.Raw | None) -> object:
    return None if json is None else msgspec.json.decode(json)
