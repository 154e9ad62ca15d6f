"""A run of a step whose turn has come: an order for the backend, or a reason why there is none.

The condition is asked first, then the budgets that refused something, then the texts are filled.
Rule: nothing that a step says can stop the run of the workflow. A text that cannot be filled is the
failure of that one run, in a line that says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headgate.runs.backend import StepOrder
from headgate.runs.filling import Filler, RunView
from headgate.runs.orders import request_of
from headgate.workflow.conditions import holds
from headgate.workflow.costs import estimated
from headgate.workflow.progress import WorkflowProgress
from headgate.workflow.standing import Standing
from headgate.workflow.texts import UnfilledError
from headgate.workflow.workflow import ModelWork, Step, Workflow

MAX_REFUSALS = 64


class NoOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ends without a task; `error` if it failed."""

    standing: Standing
    error: str = ""


class Refusals:
    """What budgets would not hold: an amount that is as large in every way is not asked for.

    A refusal may be about dollars or about tokens; what is smaller in one of them may pass.
    """

    def __init__(self) -> None:
        self._smallest: list[tuple[int, int]] = []

    def add(self, micro_usd: int, tokens: int) -> None:
        """Keep what was refused. Those that are too many are asked for again, which is safe."""
        if not self.cover(micro_usd, tokens) and len(self._smallest) < MAX_REFUSALS:
            self._smallest.append((micro_usd, tokens))

    def cover(self, micro_usd: int, tokens: int) -> bool:
        """Tell whether an amount would be refused again."""
        return any(micro_usd >= dollars and tokens >= count for dollars, count in self._smallest)


class OrderMaker:
    """Makes the orders of one run of a workflow."""

    def __init__(
        self, workflow: Workflow, filler: Filler, refusals: Refusals, progress: WorkflowProgress
    ) -> None:
        self._workflow = workflow
        self._filler = filler
        self._refusals = refusals
        self._progress = progress
        self._provisional: set[str] = set()
        self._same: dict[str, tuple[int, int]] = {}

    def made(self, number: int, generation: int, values: Mapping[Any, Any]) -> StepOrder | NoOrder:
        """Return the order of a run, or how it ends without one."""
        view = self._filler.view(number, values)
        step = view.step
        if step.when is not None and not holds(step.when, view):
            return NoOrder(standing=Standing.UNMET)
        if step.id in self._same and self._refusals.cover(*self._same[step.id]):
            return NoOrder(standing=Standing.UNFUNDED)
        try:
            return self._order(number, generation, step, view)
        except UnfilledError as error:
            return NoOrder(standing=Standing.FAILED, error=str(error))

    def _order(
        self, number: int, generation: int, step: Step, view: RunView
    ) -> StepOrder | NoOrder:
        request = request_of(step.work, view)
        amounts = self._same.get(step.id)
        if amounts is None:
            amounts = estimated(self._workflow, step, request)
            # Only what a model is asked makes a difference from run to run.
            if step.cost_micro_usd is not None or not isinstance(step.work, ModelWork):
                self._same[step.id] = amounts
        if self._refusals.cover(*amounts):
            return NoOrder(standing=Standing.UNFUNDED)
        return StepOrder(
            number=number,
            index=view.index,
            generation=generation,
            step=step,
            request=request,
            micro_usd=amounts[0],
            tokens=amounts[1],
            is_provisional=self._is_provisional(number, step),
        )

    def _is_provisional(self, number: int, step: Step) -> bool:
        """Tell whether what a run builds upon may be begun anew by a resume."""
        if self._progress.goes_without(number) or not self._provisional.isdisjoint(step.depends_on):
            self._provisional.add(step.id)
            return True
        return False
