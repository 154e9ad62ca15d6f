"""How the runs of all steps are numbered: each step has a range, in the order of the file.

Rule: nothing is kept for a run, only where the numbers of each step begin. A step with `foreach`
has as many runs as items, which may be none; any other has one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate

import msgspec

from headgate.workflow.items import ItemSource
from headgate.workflow.workflow import Step, Workflow


class StepRun(msgspec.Struct, frozen=True):
    """One run of a step: which step it is, and the number of its item."""

    step: Step
    index: int


class Expansion:
    """The numbers of the runs of a workflow, from 0 to `total` - 1."""

    def __init__(self, workflow: Workflow, items: Mapping[str, ItemSource]) -> None:
        self._steps = workflow.steps
        counts = [items[step.id].count if step.foreach else 1 for step in workflow.steps]
        self._starts = array("L", accumulate(counts, initial=0))
        self._positions = {step.id: position for position, step in enumerate(workflow.steps)}
        self.total = self._starts[-1]

    def run_of(self, number: int) -> StepRun:
        """Return the step and the index of a run."""
        position = self.position_of(number)
        return StepRun(self._steps[position], number - self._starts[position])

    def position_of(self, number: int) -> int:
        """Return where in the file the step of a run stands, from 0."""
        if not 0 <= number < self.total:
            raise IndexError(number)
        # Steps without runs begin where the next one does, and the last of those has the run.
        return bisect_right(self._starts, number) - 1

    def runs_of(self, step_id: str) -> range:
        """Return the numbers of all runs of a step."""
        position = self._positions[step_id]
        return range(self._starts[position], self._starts[position + 1])

    def name_of(self, number: int) -> str:
        """Return a run as people read it: the id of its step, with `[index]` if it has items."""
        run = self.run_of(number)
        return f"{run.step.id}[{run.index}]" if run.step.foreach else run.step.id
