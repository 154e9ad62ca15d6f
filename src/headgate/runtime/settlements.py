"""From the outcome of an attempt to its settlement, whoever ran it: a node, or a worker.

Rule: what a task does next, what it costs and whom a provider's pause holds is decided here, and
nowhere else.
"""

from __future__ import annotations

import random

import msgspec

from headgate.core.gates import GateClosure
from headgate.core.tasks.outcomes import (
    Failed,
    Finish,
    Limited,
    Outcome,
    RetryPolicy,
    Succeeded,
    TryAgain,
    at_fixed_cost,
    known_usage,
    next_step,
    pause_seconds,
)
from headgate.core.tasks.records import TaskRecord, is_worker, slot_of
from headgate.store import Settlement


class Settlements:
    """Makes settlements by the rules in force; a reload puts others in their place."""

    def __init__(self, *, policy: RetryPolicy, max_result_bytes: int, draws: random.Random) -> None:
        self.policy = policy
        self.max_result_bytes = max_result_bytes
        self._draws = draws

    def reported(self, record: TaskRecord, outcome: Outcome) -> Outcome:
        """Return what an executor or a worker reports, at its cost and with what may be kept."""
        return self._bounded(at_fixed_cost(outcome, record.terms))

    def _bounded(self, outcome: Outcome) -> Outcome:
        if not isinstance(outcome, Succeeded) or outcome.result is None:
            return outcome
        if len(memoryview(outcome.result)) <= self.max_result_bytes:
            return outcome
        error = f"result is larger than {self.max_result_bytes} bytes"
        return Failed(error=error, usage=outcome.usage)

    def make(
        self, record: TaskRecord, outcome: Outcome, now: float, *, node_id: str = ""
    ) -> Settlement:
        """Return the settlement of an attempt; `node_id` is who writes it for another."""
        progress, lease = record.progress, record.lease
        if lease is None:
            problem = f"task {record.task.id} has no lease to settle"
            raise ValueError(problem)
        draw = self._draws.random()
        step = next_step(outcome, progress, record.terms, now=now, draw=draw, policy=self.policy)
        if progress.slot is not None and isinstance(outcome, Limited):
            step = _on_another_slot(step)
        return Settlement(
            task_id=record.task.id,
            lease=lease,
            step=step,
            cost=known_usage(outcome),
            result=outcome.result if isinstance(outcome, Succeeded) else None,
            closure=self._closure(record, outcome, now),
            node_id=node_id,
        )

    def _closure(self, record: TaskRecord, outcome: Outcome, now: float) -> GateClosure | None:
        if not isinstance(outcome, Limited):
            return None
        seconds = pause_seconds(outcome, record.progress.rate_limit_hits + 1, self.policy)
        until = now + seconds
        slot = slot_of(record)
        if slot is not None:
            return GateClosure(kind="slot", name=slot, until=until, why=outcome.error)
        if is_worker(record.progress.node_id):
            # Agents share the target that they pull from, and not the account that they work on.
            name = record.agent_id or ""
            return GateClosure(kind="agent", name=name, until=until, why=outcome.error)
        name = record.task.target or ""
        return GateClosure(kind="target", name=name, until=until, why=outcome.error)


def _on_another_slot(step: Finish | TryAgain) -> Finish | TryAgain:
    """Let a task whose slot was chosen go on at once: only that slot is left alone meanwhile."""
    return step if isinstance(step, Finish) else msgspec.structs.replace(step, not_before=None)
