"""Runs of steps as tasks of the engine, and back.

A task is named after its run and its number, and after the generation if a resume began it anew.
Rule: the same order gives the same task, so that submitting it again changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headgate.core.tasks.records import Submission, TaskRecord, Terms
from headgate.core.tasks.task import Task
from headgate.errors import InvalidTaskError
from headgate.executor import Executor
from headgate.executors.callable import CallableExecutor
from headgate.executors.targets import CallableTarget
from headgate.intake import Draft
from headgate.providers.prices import PriceList
from headgate.runs.backend import STATES, StepOrder, StepTask
from headgate.runs.local.step_executors import (
    OWN_PREFIX,
    RUN_LABEL,
    STEP_LABEL,
    CallSteps,
    CommandSteps,
    WrongSteps,
)
from headgate.runs.orders import (
    CallRequest,
    CommandRequest,
    HttpRequest,
    ModelRequest,
    TargetRequest,
    encoded,
)
from headgate.runs.variables import Variables
from headgate.workflow.workflow import CallWork, CommandWork, HttpWork, ModelWork, Step, Workflow

if TYPE_CHECKING:
    from headgate.runs.local.target_steps import TargetSteps

AGENT = "run"
"""The agent of steps that name none."""

PROVISIONAL = "p"
"""How the name of a task ends that went without one of its parents."""

_COMMAND = f"{OWN_PREFIX}command"
_WRONG = f"{OWN_PREFIX}wrong"


class LocalTasks:
    """Makes tasks of the orders of one run; all of them are charged to the same scope."""

    def __init__(
        self, run_id: str, workflow: Workflow, scope: str, targets: TargetSteps | None
    ) -> None:
        self._run_id = run_id
        self._project_id = workflow.name
        self._scopes = (scope,)
        self._targets = targets
        self._terms: dict[tuple[str, int], Terms] = {}

    def draft(self, order: StepOrder, now: float) -> Draft:
        """Return the task of an order; one that no target would take fails when it runs."""
        step, request = order.step, order.request
        labels = {**step.labels, RUN_LABEL: self._run_id, STEP_LABEL: step.id}
        if not isinstance(request, TargetRequest):
            submission = Submission(input=encoded(request), labels=labels)
            return self._made(order, Task(target=_place(step, request)), submission, now)
        if self._targets is None:
            raise ValueError("the workflow has no step for a target")
        try:
            task, terms, submission = self._targets.draft(step, request, now)
        except InvalidTaskError as error:
            line = msgspec.Raw(msgspec.json.encode(str(error)))
            return self._made(
                order, Task(target=_WRONG), Submission(input=line, labels=labels), now
            )
        submission = msgspec.structs.replace(submission, labels=labels)
        made = self._made(order, task, submission, now)
        own = msgspec.structs.replace(made.terms, names_slot=terms.names_slot)
        return made._replace(terms=own)

    def _made(self, order: StepOrder, task: Task, submission: Submission, now: float) -> Draft:
        step = order.step
        own = Task(
            id=task_id(self._run_id, order),
            project_id=self._project_id,
            agent_id=step.agent or AGENT,
            priority=step.priority,
            weight=step.weight,
            created_at=now,
            estimate_tokens=order.tokens,
            scopes=self._scopes,
            target=task.target,
            slot=task.slot,
            provider=task.provider,
        )
        return Draft(own, self._terms_of(step, order.micro_usd), submission)

    def _terms_of(self, step: Step, micro_usd: int) -> Terms:
        key = (step.id, micro_usd)
        terms = self._terms.get(key)
        if terms is None:
            if len(self._terms) >= MAX_TERMS:
                self._terms.clear()
            is_fixed = step.cost_micro_usd is not None
            terms = self._terms[key] = Terms(
                estimate_micro_usd=0 if is_fixed else micro_usd,
                max_attempts=step.retries + 1,
                attempt_seconds=step.timeout_seconds,
                cost_micro_usd=step.cost_micro_usd,
            )
        return terms


MAX_TERMS = 10_000
"""How many terms are kept to be used again; estimates may differ from item to item."""


def task_id(run_id: str, order: StepOrder) -> str:
    """Return the name of a task; names sort by number."""
    mark = PROVISIONAL if order.is_provisional else ""
    name = f"{run_id}-{order.number:07d}"
    return f"{name}-{order.generation}{mark}" if order.generation or mark else name


def step_task(record: TaskRecord, run_id: str) -> StepTask:
    """Return what is known of a task, as whoever conducts the run knows it."""
    task, progress = record.task, record.progress
    number, _, generation = task.id[len(run_id) + 1 :].partition("-")
    return StepTask(
        number=int(number),
        generation=int(generation.removesuffix(PROVISIONAL) or 0),
        task_id=task.id,
        state=STATES[task.status],
        attempt=progress.attempt,
        started_at=progress.started_at,
        completed_at=progress.completed_at,
        error=record.error,
        tokens=progress.used_tokens,
        micro_usd=progress.used_micro_usd,
        assumed_micro_usd=progress.assumed_micro_usd,
        is_provisional=generation.endswith(PROVISIONAL),
    )


def step_executors(
    workflow: Workflow,
    variables: Variables,
    prices: PriceList,
    targets: TargetSteps | None,
    *,
    places: int,
) -> dict[str, Executor]:
    """Return the executors of all steps, by the names that their tasks have them under."""
    found = {} if targets is None else targets.executors(variables.environ)
    found[_WRONG] = WrongSteps()
    for step in workflow.steps:
        name = _place(step, step.work)
        match step.work:
            case CommandWork() if name not in found:
                found[name] = CommandSteps(workflow.folder, variables, prices)
            case CallWork(entry_point=entry_point) if name not in found:
                found[name] = _call(entry_point, f"steps.{step.id}.call", prices, places)
    return found | _requesting(workflow, variables, prices, places)


def _requesting(
    workflow: Workflow, variables: Variables, prices: PriceList, places: int
) -> dict[str, Executor]:
    """Return the executors of steps that are requests; they share their connections."""
    steps = [step for step in workflow.steps if isinstance(step.work, HttpWork | ModelWork)]
    if not steps:
        return {}
    # It brings a client for HTTP along, which a run of commands does without.
    from headgate.runs.local import step_requests  # noqa: PLC0415

    sending = step_requests.Sending(step_requests.Connections(places), variables, prices)
    http = sending.http()
    found: dict[str, Executor] = {}
    for step in steps:
        name = _place(step, step.work)
        if isinstance(step.work, HttpWork):
            found[name] = http
        elif isinstance(step.work, ModelWork) and name not in found:
            found[name] = sending.model(workflow.endpoints[step.work.endpoint])
    return found


def _call(entry_point: str, setting: str, prices: PriceList, places: int) -> CallSteps:
    target = CallableTarget(entry_point=entry_point, threads=places)
    return CallSteps(CallableExecutor(entry_point, target, prices=prices, setting=setting))


def _place(step: Step, work: object) -> str:
    """Return where a step runs. What is asked to pause is paused under this name, and no more."""
    match work:
        case CommandRequest() | CommandWork():
            return _COMMAND
        case HttpRequest() | HttpWork():
            return f"{OWN_PREFIX}http:{step.id}"
        case CallRequest(entry_point=entry_point) | CallWork(entry_point=entry_point):
            return f"{OWN_PREFIX}call:{entry_point}"
        case ModelRequest(endpoint=endpoint) | ModelWork(endpoint=endpoint):
            return f"{OWN_PREFIX}model:{endpoint}"
    return ""
