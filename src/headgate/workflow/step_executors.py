"""Executors of steps that say themselves what is done: commands and functions.

The request of a step is the input of its task. Rule: variables are put in here and live as long as
the attempt; what cannot be filled or started has surely cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headgate.api.submission import Draft, SubmissionParser
from headgate.app import SlotKeys, build_executors, build_intake
from headgate.config import Settings, rate_limits
from headgate.config.loading import Origin, load
from headgate.core.lifecycle import NOTHING_USED, Failed, Outcome
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import Standing
from headgate.errors import InvalidSettingError, InvalidTaskError
from headgate.executors.callable import CallableExecutor
from headgate.executors.command import PASSED_ON, Child, Children, variables_of
from headgate.executors.executor import Executor, WorkOrder
from headgate.executors.targets import MAX_OUTPUT_BYTES, PullTarget, has_slot
from headgate.providers.prices import PriceList
from headgate.workflow import step_requests
from headgate.workflow.placeholders import EnvPlaceholder
from headgate.workflow.step_requests import CallRequest, CommandRequest, TargetRequest, Variables
from headgate.workflow.workflow import Step, TargetWork, Workflow

OWN_PREFIX = "step:"
"""How the names begin under which steps run that need no target."""

STEP_LABEL = "step"
RUN_LABEL = "run"
"""The labels under which a task tells what it belongs to; a step cannot take them."""

KILL_GRACE_SECONDS = 5.0

AnyRequest = TypeVar("AnyRequest")


class CommandSteps:
    """Runs the commands of all steps."""

    def __init__(self, folder: Path, variables: Variables, prices: PriceList) -> None:
        self._folder = folder
        self._variables = variables
        self._children = Children(prices=prices, hidden=variables)
        environ = variables.environ
        self._passed_on = {name: environ[name] for name in PASSED_ON if name in environ}

    async def open(self) -> None:
        """See whether children can be made to end with the run."""
        await self._children.open()

    async def close(self) -> None:
        """Do nothing: the children of different steps share nothing."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Run the command; a cancellation ends its whole group before it goes on."""
        try:
            child = self._child(request_of(order, CommandRequest), order)
        except InvalidSettingError as error:
            return self._children.not_started(str(error), is_transient=False)
        return await self._children.run(child)

    def _child(self, request: CommandRequest, order: WorkOrder) -> Child:
        setting = setting_of(order)
        fill = self._variables.filled
        cwd = "" if request.cwd is None else fill(request.cwd, f"{setting}.cwd")
        own = {name: fill(text, f"{setting}.env.{name}") for name, text in request.env.items()}
        return Child(
            command=tuple([fill(part, f"{setting}.command") for part in request.command]),
            environ=self._passed_on | self._passed(request, setting) | own | variables_of(order),
            cwd=str(self._folder / cwd),
            stdin=(request.stdin or "").encode(errors="replace"),
            max_output_bytes=MAX_OUTPUT_BYTES,
            kill_grace_seconds=KILL_GRACE_SECONDS,
        )

    def _passed(self, request: CommandRequest, setting: str) -> dict[str, str]:
        environ = self._variables.environ
        return {
            name: self._variables.filled((EnvPlaceholder(name=name),), f"{setting}.pass_env")
            for name in request.pass_env
            if name in environ
        }


class CallSteps:
    """Calls one Python function with what the step gives it, and with nothing of its task.

    A mapping is given as keyword arguments, any other value as one argument.
    """

    def __init__(self, executor: CallableExecutor) -> None:
        self._executor = executor

    async def open(self) -> None:
        """Import the function, or raise `InvalidSettingError`."""
        await self._executor.open()

    async def close(self) -> None:
        """Do nothing: a thread that is left ends by itself."""
        await self._executor.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Call the function with what the step gives it."""
        given = request_of(order, CallRequest).given
        if given is msgspec.UNSET:
            return await self._executor.call()
        if isinstance(given, dict):
            return await self._executor.call(**given)
        return await self._executor.call(given)


class WrongSteps:
    """Fails what could not even be asked for, with the words for it."""

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Say what is wrong; trying again cannot help."""
        given = order.submission.input
        error = "the step cannot be asked for" if given is None else msgspec.json.decode(given)
        return Failed(error=str(error), usage=NOTHING_USED)


def setting_of(order: WorkOrder) -> str:
    """Return what errors call the step of an order."""
    return f"steps.{order.submission.labels.get(STEP_LABEL, '')}"


def request_of(order: WorkOrder, kind: type[AnyRequest]) -> AnyRequest:
    """Return what a step asks for."""
    given = order.submission.input
    request = None if given is None else step_requests.decoded(given)
    if not isinstance(request, kind):
        problem = f"task {order.task_id} has no request of a {kind.__name__}"
        raise TypeError(problem)
    return request


# Steps for targets of a configuration: the settings file that `headgate up` reads, used here.
#
# Rule: a task that a service would refuse is refused here in the same words, by the same code; and
# what only a service can do (workers that pull, what an administrator resumes) is refused at once.


class TargetSteps:
    """The targets that the steps of a workflow use, and the tasks that they become."""

    def __init__(self, settings: Settings, workflow: Workflow, agent_id: str) -> None:
        self._settings = settings
        self._intake: SubmissionParser = build_intake(settings)
        self._agent_id = agent_id
        self._names = [
            self._checked(step, step.work)
            for step in workflow.steps
            if isinstance(step.work, TargetWork)
        ]
        self._slots = self._slots_of(workflow)

    @property
    def slot_settings(self) -> Settings | None:
        """The settings with the slots that the steps may use and no others; None without any."""
        if not self._slots:
            return None
        return msgspec.structs.replace(self._settings, slots=self._slots)

    @property
    def rate_limits(self) -> tuple[RateLimit, ...]:
        """How fast targets and slots may be used."""
        return rate_limits(self._settings)

    def executors(self, environ: Mapping[str, str]) -> dict[str, Executor]:
        """Return the executors of the targets that steps use."""
        targets = {name: self._settings.targets[name] for name in self._names}
        return build_executors(targets, environ, SlotKeys(self._settings, environ))

    def draft(self, step: Step, request: TargetRequest, now: float) -> Draft:
        """Return the task of a step as the service would take it, or raise `InvalidTaskError`."""
        return self._intake.read_task(_body(step, request, self._agent_id), now=now)

    def _checked(self, step: Step, work: TargetWork) -> str:
        """Return the target of a step, or say why it cannot be used here."""
        setting = f"steps.{step.id}.target"
        sample = TargetRequest(
            target=work.target, action="a", slot=work.slot, provider=work.provider
        )
        try:
            name = self.draft(step, sample, 0.0).task.target or ""
        except InvalidTaskError as error:
            problem = f"{error}; name one of the settings file (--config)"
            raise InvalidSettingError(setting, problem) from None
        target = self._settings.all_targets[name]
        if isinstance(target, PullTarget):
            problem = f"workers pull what is for {name!r} from a service; run it with --server"
            raise InvalidSettingError(setting, problem)
        if target.status is Standing.PAUSED:
            problem = f"target {name!r} is paused in the settings, and nobody would resume it"
            raise InvalidSettingError(setting, f"{problem}; set its status to active")
        if name.startswith(OWN_PREFIX):
            problem = f"a name that begins with {OWN_PREFIX} is taken; give the target another"
            raise InvalidSettingError(setting, problem)
        return name

    def _slots_of(self, workflow: Workflow) -> dict[str, Any]:
        slots, providers = set[str | None](), set[str | None]()
        for name in self._names:
            target = self._settings.targets[name]
            if has_slot(target):
                slots.add(target.slot)
                providers.add(target.provider)
        for step in workflow.steps:
            if isinstance(step.work, TargetWork):
                slots.add(step.work.slot)
                providers.add(step.work.provider)
        return {
            name: slot
            for name, slot in self._settings.slots.items()
            if name in slots or slot.provider in providers
        }


def target_steps(
    workflow: Workflow, path: Path | None, environ: Mapping[str, str], *, agent_id: str
) -> TargetSteps:
    """Return the targets of a workflow by a settings file, or without one by the defaults."""
    settings = load(Origin(path=path, environ=environ)).settings
    return TargetSteps(settings, workflow, agent_id)


def _body(step: Step, request: TargetRequest, agent_id: str) -> bytes:
    said = {
        "agentId": step.agent or agent_id,
        "target": request.target,
        "action": request.action,
        "params": request.params,
        "input": request.input,
        "tabId": request.tab_id,
        "selector": request.selector,
        "ref": request.ref,
        "slot": request.slot,
        "provider": request.provider,
    }
    return msgspec.json.encode({name: value for name, value in said.items() if value is not None})
