"""One batch of steps: whatever callers asked for at the same time, in one transaction.

Steps of all kinds share a worksheet, so that each table is read and written once for all of them,
however they are mixed. They are applied in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence

from headgate.core.tasks.submit_keys import KeyRefusal
from headgate.errors import StaleEpochError
from headgate.store import (
    Assigned,
    CancelAnswer,
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    NotAssigned,
    Settled,
    Settlement,
    StaleLease,
)
from headgate.stores import election
from headgate.stores.moves import assigning, submitting
from headgate.stores.moves.assigning import Plan
from headgate.stores.moves.cancelling import Cancellation, cancel
from headgate.stores.moves.keyed_submits import Keys, new_tasks, submit_keyed
from headgate.stores.moves.settling import settle
from headgate.stores.moves.submitting import SubmitAnswer, submit
from headgate.stores.worksheet import Worksheet

Step = NewTask | Settlement | Cancellation | Plan | KeyedSubmit
StepAnswer = (
    SubmitAnswer
    | KeyedAnswer
    | KeyRefusal
    | Settled
    | StaleLease
    | CancelAnswer
    | None
    | list[Assigned | NotAssigned]
    | StaleEpochError
)


def apply_steps(sheet: Worksheet, steps: Sequence[Step]) -> list[StepAnswer]:
    """Apply steps in their order; each has an answer of its own."""
    batch = _sorted(steps)
    _load(sheet, batch)
    dead = assigning.prepare(sheet, batch.plans)
    epochs: dict[int, StaleEpochError | None] = {}
    keys = Keys(sheet, batch.keyed) if batch.keyed else None
    answers = [_apply(sheet, step, dead, epochs, keys) for step in steps]
    sheet.write()
    if keys is not None:
        keys.write()
    return answers


class _Batch:
    """Steps by their kind."""

    __slots__ = ("keyed", "new", "other", "plans")

    def __init__(self) -> None:
        self.new: list[NewTask] = []
        self.keyed: list[KeyedSubmit] = []
        self.other: list[Settlement | Cancellation] = []
        self.plans: list[Plan] = []


def _sorted(steps: Sequence[Step]) -> _Batch:
    batch = _Batch()
    for step in steps:
        if isinstance(step, NewTask):
            batch.new.append(step)
        elif isinstance(step, Plan):
            batch.plans.append(step)
        elif isinstance(step, KeyedSubmit):
            batch.keyed.append(step)
            batch.new += new_tasks([step])
        else:
            batch.other.append(step)
    return batch


def _load(sheet: Worksheet, batch: _Batch) -> None:
    lines = [line for plan in batch.plans for line in plan.assignments]
    wanted = [line.task_id for line in lines]
    wanted += [step.task_id for step in batch.other]
    for new in batch.new:
        wanted += submitting.task_ids(new)
    sheet.load(wanted)
    submitting.prepare(sheet, batch.new)
    rows = sheet.rows(step.task_id for step in batch.other)
    sheet.load(parent for row in rows for parent in row.spec.terms.depends_on)
    sheet.load_books([line.reserve for line in lines if line.reserve is not None], rows)


def _apply(
    sheet: Worksheet,
    step: Step,
    dead: set[str],
    epochs: dict[int, StaleEpochError | None],
    keys: Keys | None,
) -> StepAnswer:
    if isinstance(step, NewTask):
        return submit(sheet, step)
    if isinstance(step, Settlement):
        return settle(sheet, step)
    if isinstance(step, Cancellation):
        return cancel(sheet, step)
    if isinstance(step, KeyedSubmit):
        return submit_keyed(sheet, keys or Keys(sheet, [step]), step)
    stale = _stale(sheet, step.epoch, epochs)
    if stale is not None:
        return stale
    return [assigning.assign(sheet, line, dead=dead) for line in step.assignments]


def _stale(
    sheet: Worksheet, epoch: int, known: dict[int, StaleEpochError | None]
) -> StaleEpochError | None:
    if epoch not in known:
        known[epoch] = None
        try:
            election.check_epoch(sheet.transaction, epoch, sheet.now)
        except StaleEpochError as error:
            known[epoch] = error
    return known[epoch]
