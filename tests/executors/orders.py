"""Work orders for the tests of executors, and executors that are open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from headgate.core.lifecycle import Failed, Limited, Outcome, Succeeded
from headgate.core.task import NO_JSON, Submission
from headgate.executors.build import build_executor
from headgate.executors.executor import Executor, WorkOrder
from headgate.executors.targets import Target
from headgate.providers.prices import Price, PriceList
from headgate.testing import VirtualClock

PRICES = PriceList({"mine": Price(input=1, output=2)})
CHAT = {"model": "mine", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}
"""A body that says that fifteen tokens and twenty micro-dollars were used."""


def raw(value: object) -> msgspec.Raw:
    """Write a value as JSON that is kept unread."""
    return msgspec.Raw(msgspec.json.encode(value))


def order(
    action: str = "click", *, params: object = None, given: object = None, **fields: Any
) -> WorkOrder:
    """Make an order; `given` is its input, and further fields are those of a submission."""
    submission = Submission(
        action=action,
        params=NO_JSON if params is None else raw(params),
        input=NO_JSON if given is None else raw(given),
        **fields,
    )
    return WorkOrder(
        task_id="t-1", attempt=2, project_id="search", agent_id="coder", submission=submission
    )


@asynccontextmanager
async def opened(
    target: Target, *, environ: Mapping[str, str] | None = None, clock: VirtualClock | None = None
) -> AsyncIterator[Executor]:
    """Open the executor of a target that is called `it`."""
    executor = build_executor(
        "it", target, environ=environ or {}, clock=clock or VirtualClock(), prices=PRICES
    )
    await executor.open()
    try:
        yield executor
    finally:
        await executor.close()


def result_of(outcome: Outcome) -> Any:
    """Return the decoded result of a task that must have succeeded."""
    assert isinstance(outcome, Succeeded), outcome
    return None if outcome.result is None else msgspec.json.decode(outcome.result)


def failure_of(outcome: Outcome) -> Failed:
    """Return the failure of a task that must have failed."""
    assert isinstance(outcome, Failed), outcome
    return outcome


def pause_of(outcome: Outcome) -> Limited:
    """Return the pause that a target must have asked for."""
    assert isinstance(outcome, Limited), outcome
    return outcome
