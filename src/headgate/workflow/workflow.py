"""A workflow as it is after reading: steps that refer to each other, and the budgets around them.

Everything that can be wrong with a file was found when these were made: names exist, nothing goes
in a circle, texts and conditions are parsed. So whoever runs a workflow refuses none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from headgate.core.task import OnParentFailure
from headgate.providers.prices import Price, PriceList
from headgate.workflow.conditions import Condition, condition_references
from headgate.workflow.placeholders import Placeholder, StepPlaceholder, Template, Text, references

CONCURRENCY = 8
TIMEOUT_SECONDS = 3_600.0


class CommandWork(msgspec.Struct, frozen=True, kw_only=True):
    """A program and its arguments; `pass_env` names variables that it gets from ours."""

    command: tuple[Text, ...]
    env: dict[str, Text] = {}
    pass_env: tuple[str, ...] = ()
    stdin: Text | None = None
    cwd: Text | None = None


class HttpWork(msgspec.Struct, frozen=True, kw_only=True):
    """One request; `body` is sent as JSON. Whatever is no 2xx is a failure."""

    url: Text
    method: str = "POST"
    headers: dict[str, Text] = {}
    body: Template | None = None


class CallWork(msgspec.Struct, frozen=True, kw_only=True):
    """A Python function as `package.module:function`; `given` is what it is called with."""

    entry_point: str
    given: Template | None = None


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """A call to a model; `body` is the whole request as the endpoint wants it, model included.

    `model` is as the file writes it, so it may have placeholders; the body has the one that is
    asked.
    """

    endpoint: str
    model: str
    body: Template
    max_tokens: int


class TargetWork(msgspec.Struct, frozen=True, kw_only=True):
    """A task for a target that a configuration names."""

    target: str | None = None
    action: Text | None = None
    params: Template | None = None
    input: Template | None = None
    tab_id: Text | None = None
    selector: Text | None = None
    ref: Text | None = None
    slot: str | None = None
    provider: str | None = None


Work = CommandWork | HttpWork | CallWork | ModelWork | TargetWork


class ListItems(msgspec.Struct, frozen=True, kw_only=True):
    """Items that the file lists."""

    values: tuple[Any, ...]


class FileItems(msgspec.Struct, frozen=True, kw_only=True):
    """Items that are the lines of a JSONL file; `path` is absolute."""

    path: Path


class StepItems(msgspec.Struct, frozen=True, kw_only=True):
    """The items of another step: each run of this one waits for its counterpart there only."""

    step: str


Items = ListItems | FileItems | StepItems


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a step is expected to cost at most; None is not said."""

    micro_usd: int | None = None
    tokens: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step; with `foreach` it runs once for each item.

    `depends_on` also has the steps that its texts and its condition refer to, and the one whose
    items it runs over. `cost_micro_usd` is what it costs for sure: held before and booked after,
    whatever the work says.
    """

    id: str
    line: int
    work: Work
    depends_on: tuple[str, ...] = ()
    foreach: Items | None = None
    when: Condition | None = None
    priority: int = 0
    weight: float = 1.0
    agent: str | None = None
    retries: int = 0
    timeout_seconds: float = TIMEOUT_SECONDS
    cost_micro_usd: int | None = None
    estimate: Estimate | None = None
    on_parent_failure: OnParentFailure = OnParentFailure.FAIL
    labels: dict[str, str] = {}


class BudgetScope(msgspec.Struct, frozen=True, kw_only=True):
    """A budget around the workflow; its scope is `name:key`. Without an amount it only counts.

    `line` is where the file has its key.
    """

    name: str
    key: Text
    micro_usd: int | None = None
    line: int | None = None


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where models are asked: the kind decides the path, the headers and how answers are read."""

    name: str
    kind: Literal["openai", "anthropic"]
    url: Text
    key: Text | None = None
    headers: dict[str, Text] = {}
    line: int | None = None
    """Where it stands in the file, if it does."""


class Workflow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A whole file; `folder` is where relative paths begin. Steps are in the file's order.

    `file` is how errors name it. `endpoints` has those that are always there, too.
    """

    name: str
    folder: Path
    steps: tuple[Step, ...]
    micro_usd: int | None = None
    scopes: tuple[BudgetScope, ...] = ()
    endpoints: dict[str, Endpoint] = {}
    prices: dict[str, Price] = {}
    concurrency: int = CONCURRENCY
    fail_fast: bool = False
    on_exhausted: Literal["stop", "wait"] = "stop"
    file: str = "workflow.yaml"

    @cached_property
    def steps_by_id(self) -> dict[str, Step]:
        """The steps by their ids."""
        return {step.id: step for step in self.steps}

    @cached_property
    def price_list(self) -> PriceList:
        """What models cost: the file's own prices, then those that are published."""
        return PriceList(self.prices)

    def step(self, step_id: str) -> Step:
        """Return a step by its id."""
        return self.steps_by_id[step_id]


# Which placeholders the texts and the condition of a step have, whatever its work is.


def step_placeholders(step: Step) -> Iterator[Placeholder]:
    """Give the placeholders of a step."""
    for name in step.work.__struct_fields__:
        for value in _texts(getattr(step.work, name)):
            yield from references(value)
    yield from condition_references(step.when)


def fields_of_steps(step: Step) -> tuple[tuple[str, str], ...]:
    """Return the fields of other steps that a step refers to, by id and name, each once."""
    found = [one for one in step_placeholders(step) if isinstance(one, StepPlaceholder)]
    return tuple(dict.fromkeys((one.step, one.field) for one in found))


def _texts(value: object) -> Iterator[Text | Template]:
    if isinstance(value, Text | Template):
        yield value
    elif isinstance(value, tuple | dict):
        found = value.values() if isinstance(value, dict) else value
        yield from (one for one in found if isinstance(one, Text))
