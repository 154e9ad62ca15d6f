"""The work of tortured tasks: it takes a little time, fails at times, and leaves a trace.

A trace is one line of a file that outlives the process: which task, which attempt. Whether an
attempt fails is drawn from its name, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TRACE_NAME = "executions.log"
FAIL_RATIO = 0.1


class Execution(NamedTuple):
    """One time that an attempt was executed."""

    task_id: str
    attempt: int


class Work(NamedTuple):
    """What an attempt comes to."""

    seconds: float
    fails: bool
    tokens: int
    model: str | None = ""
    """Which model it names; None says nothing of usage at all."""


def work_of(execution: Execution, params: Mapping[str, Any]) -> Work:
    """Draw how long an attempt takes, whether it fails, and what it uses."""
    source = random.Random(f"{execution.task_id}:{execution.attempt}")
    # One in twenty uses more than was estimated.
    most = int(params["tokens"]) * (2 if source.random() < 0.05 else 1)
    return Work(
        seconds=source.uniform(0.0, float(params["seconds"])),
        fails=source.random() < FAIL_RATIO,
        # What names a model has a cost, so that nothing may be learned to cost nothing.
        tokens=source.randint(1 if params.get("model") else 0, most),
        model=params.get("model", ""),
    )


def result_of(execution: Execution, work: Work) -> dict[str, object]:
    """Write a result that tells which attempt made it."""
    result: dict[str, object] = {"attempt": execution.attempt}
    if work.model is not None:
        result["usage"] = {"prompt_tokens": 0, "completion_tokens": work.tokens}
    return result | ({"model": work.model} if work.model else {})


async def run(order: Mapping[str, Any]) -> object:
    """Be the entry point of a target."""
    execution = Execution(order["taskId"], order["attempt"])
    trace = os.open(TRACE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(trace, f"{execution.task_id} {execution.attempt}\n".encode())
    finally:
        os.close(trace)
    work = work_of(execution, order["params"])
    await asyncio.sleep(work.seconds)
    if work.fails:
        problem = "it fails at times"
        raise RuntimeError(problem)
    return result_of(execution, work)


def traced(folder: Path) -> list[Execution]:
    """Read what was executed by a service that worked in a folder."""
    path = folder / TRACE_NAME
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text().splitlines())
    return [Execution(task_id, int(attempt)) for task_id, attempt in lines]
