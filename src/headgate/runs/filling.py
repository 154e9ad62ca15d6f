"""What the texts and conditions of a step are filled with, when its turn has come.

A result is fetched when a text needs it, and some are kept for the next text that does. Rule: what
is kept is bounded in bytes; the memory of a run does not grow with what its steps give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from headgate.core.money import MICRO_PER_USD
from headgate.runs.backend import StepTask
from headgate.runs.kept.folder import Run
from headgate.runs.outputs import output_of
from headgate.runs.tally import RunTally
from headgate.workflow.places import ONE_RUN_FIELDS
from headgate.workflow.progress import WorkflowProgress
from headgate.workflow.standing import Standing
from headgate.workflow.step_places import fields_of_steps
from headgate.workflow.workflow import Step, StepItems, Workflow

MAX_CACHE_BYTES = 32 << 20
FETCHED_AT_ONCE = 64

Results = Callable[[Sequence[StepTask]], Awaitable[list[Any]]]
_Key = tuple[str, str | int]
"""A field of a run by its number, or of all runs by the id of their step."""

_T = TypeVar("_T")
_OF_ONE = frozenset(("output", "result"))
_OF_ALL = {"outputs": "output", "results": "result"}
_OF_RESULTS = _OF_ONE.union(_OF_ALL)
_encoder = msgspec.json.Encoder()


class RunView:
    """What one run of a step sees of the others; results are those that were fetched for it."""

    def __init__(self, filler: Filler, number: int, values: Mapping[_Key, Any]) -> None:
        self._filler = filler
        self._number = number
        self._values = values

    @cached_property
    def step(self) -> Step:
        """The step that runs."""
        return self._filler.progress.step(self._number)

    @cached_property
    def index(self) -> int:
        """The number of the item."""
        return self._filler.progress.index(self._number)

    @cached_property
    def item(self) -> Any:  # noqa: ANN401
        """The item; None where there is none."""
        source = self._filler.items.get(self.step.id)
        return None if source is None else source.item(self.index)

    @property
    def run(self) -> dict[str, str]:
        """The id and the name of the run."""
        return self._filler.named

    def field(self, step: str, name: str) -> Any:  # noqa: ANN401
        """Return a field of another step that has ended."""
        number = self._filler.seen_run(self.step, self.index, step)
        if name in _OF_ALL:
            return self._values.get((name, step))
        if name in _OF_ONE:
            return None if number is None else self._values.get((name, number))
        if number is None or name not in ONE_RUN_FIELDS:
            return self._filler.field_of_all(step, name)
        return self._filler.field_of_one(number, name)


class Filler:
    """Makes views for runs of steps, with the results that they refer to."""

    def __init__(
        self,
        run: Run,
        progress: WorkflowProgress,
        tally: RunTally,
        results: Results,
    ) -> None:
        workflow = run.workflow
        self.progress = progress
        self.items = run.items
        self.named = {"id": run.id, "name": workflow.name}
        self._tally = tally
        self._results = results
        self._steps = {step.id: step for step in workflow.steps}
        self._needs = {
            step.id: tuple(one for one in fields_of_steps(step) if one[1] in _OF_RESULTS)
            for step in workflow.steps
        }
        self._sources = {step.id: tuple(self._counterparts(step)) for step in workflow.steps}
        self._cache = _Cache(MAX_CACHE_BYTES)

    def needs_results(self, number: int) -> bool:
        """Tell whether a run refers to the results of others, which have to be fetched."""
        return bool(self._needs[self.progress.step(number).id])

    def view(self, number: int, values: Mapping[_Key, Any] | None = None) -> RunView:
        """Return what a run sees, with the values that `fetch` gave for it."""
        return RunView(self, number, values or {})

    async def fetch(self, numbers: Sequence[int]) -> dict[_Key, Any]:
        """Fetch the results that the texts and conditions of these runs refer to."""
        values: dict[_Key, Any] = {}
        wanted: dict[_Key, str] = {}
        for number in numbers:
            step, index = self.progress.step(number), self.progress.index(number)
            for parent, field in self._needs[step.id]:
                if field in _OF_ALL:
                    values[field, parent] = await self._of_all(parent, field)
                elif (seen := self.seen_run(step, index, parent)) is not None:
                    self._look_up((field, seen), parent, values, wanted)
        for some in _pieces(list(wanted)):
            found = await self._fetched([int(number) for _, number in some])
            for key, result in zip(some, found, strict=True):
                values[key] = self._value(wanted[key], key[0], result)
                self._cache.put(key, values[key])
        return values

    def seen_run(self, step: Step, index: int, other: str) -> int | None:
        """Return the one run of another step that a step sees; None if it sees all of them."""
        runs = self.progress.runs(other)
        if other in self._sources[step.id]:
            return runs[index]
        return runs[0] if self._steps[other].foreach is None else None

    def field_of_one(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return what is known of one run without its result."""
        if name == "status":
            return _status(self.progress.standing(number))
        if name == "error":
            return self._tally.error(number)
        if name == "cost_usd":
            return self._tally.micro_usd(number) / MICRO_PER_USD
        return None

    def field_of_all(self, step: str, name: str) -> Any:  # noqa: ANN401
        """Return what is known of all runs of a step without their results."""
        counts = self.progress.counts(step)
        if name == "status":
            return self.progress.status(step)
        if name == "cost_usd":
            return self._tally.step_micro_usd(step) / MICRO_PER_USD
        if name == "skipped":
            return counts.skipped
        return counts[Standing[name.upper()]] if name in ("done", "failed") else None

    def _look_up(
        self, key: _Key, step: str, values: dict[_Key, Any], wanted: dict[_Key, str]
    ) -> None:
        """Put a value among those that are known, or among those that are to be fetched."""
        if self.progress.standing(int(key[1])) is not Standing.DONE:
            values[key] = None
        elif key in self._cache:
            values[key] = self._cache.get(key)
        else:
            wanted[key] = step

    async def _of_all(self, step: str, field: str) -> list[Any]:
        if (field, step) in self._cache:
            kept: list[Any] = self._cache.get((field, step))
            return kept
        runs = self.progress.runs(step)
        values: list[Any] = [None] * len(runs)
        done = [number for number in runs if self.progress.standing(number) is Standing.DONE]
        for some in _pieces(done):
            for number, result in zip(some, await self._fetched(some), strict=True):
                values[number - runs.start] = self._value(step, _OF_ALL[field], result)
        self._cache.put((field, step), values)
        return values

    async def _fetched(self, numbers: Sequence[int]) -> list[Any]:
        return await self._results([self._tally.kept_task(number) for number in numbers])

    def _value(self, step: str, field: str, result: Any) -> Any:  # noqa: ANN401
        return result if field == "result" else output_of(self._steps[step].work, result)

    def _counterparts(self, step: Step) -> Iterator[str]:
        while isinstance(step.foreach, StepItems):
            yield step.foreach.step
            step = self._steps[step.foreach.step]


class _Cache:
    """The values that were used last, as many as fit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[_Key, tuple[Any, int]] = OrderedDict()

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def get(self, key: _Key) -> Any:  # noqa: ANN401
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: _Key, value: Any) -> None:  # noqa: ANN401
        size = len(_encoder.encode(value))
        self._values[key] = (value, size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self._bytes -= freed


def fields_read(workflow: Workflow) -> frozenset[tuple[str, str]]:
    """Return the fields of steps that some step refers to, by id and name."""
    return frozenset(field for step in workflow.steps for field in fields_of_steps(step))


def _pieces(values: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(values), FETCHED_AT_ONCE):
        yield values[start : start + FETCHED_AT_ONCE]


def _status(standing: Standing) -> str:
    if standing.is_not_run:
        return "not run"
    return "skipped" if standing.is_skipped else standing.name.lower()
