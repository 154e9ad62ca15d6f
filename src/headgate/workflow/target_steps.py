"""Steps for targets of a configuration: the settings file that `headgate up` reads, used here.

Rule: a task that a service would refuse is refused here in the same words, by the same code; and
what only a service can do (workers that pull, what an administrator resumes) is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headgate.api.submission import SubmissionParser
from headgate.config import Settings, rate_limits
from headgate.config.loading import Origin, load
from headgate.config.slot_keys import SlotKeys
from headgate.core.dispatch_state import DispatchSettings
from headgate.core.snapshot import Standing
from headgate.core.task import Draft
from headgate.errors import InvalidSettingError, InvalidTaskError
from headgate.executors.build import build_executors
from headgate.executors.executor import Executor
from headgate.executors.targets import (
    PullTarget,
    free_failures,
    free_targets,
    has_slot,
    target_estimates,
)
from headgate.executors.templates import ObserveSlot
from headgate.workflow.placeholders import EnvPlaceholder, Text
from headgate.workflow.step_executors import OWN_PREFIX
from headgate.workflow.step_requests import TargetRequest
from headgate.workflow.workflow import Endpoint, Step, TargetWork, Workflow


class TargetSteps:
    """The targets that the steps of a workflow use, and the tasks that they become."""

    def __init__(self, settings: Settings, workflow: Workflow, agent_id: str) -> None:
        self._settings = settings
        self._parser = SubmissionParser.from_settings(settings)
        self._agent_id = agent_id
        self._names = [
            self._checked(step, step.work)
            for step in workflow.steps
            if isinstance(step.work, TargetWork)
        ]
        self._slots = self._slots_of(workflow)
        self._prices = workflow.price_list

    @property
    def slot_settings(self) -> Settings | None:
        """The settings with the slots that the steps may use and no others; None without any."""
        if not self._slots:
            return None
        return msgspec.structs.replace(self._settings, slots=self._slots)

    def applied_to(self, dispatch: DispatchSettings) -> DispatchSettings:
        """Return how to decide, with what the settings say of targets, slots and estimates."""
        scheduler, targets = self._settings.scheduler, self._settings.all_targets
        return msgspec.structs.replace(
            dispatch,
            rate_limits=rate_limits(self._settings),
            free_targets=free_targets(targets),
            target_estimates=target_estimates(targets),
            estimate_quantile=scheduler.estimate_quantile,
            reserve=scheduler.reserve,
        )

    @property
    def free_failures(self) -> frozenset[str]:
        """The targets whose failures cost nothing unless they report figures."""
        return free_failures(self._settings.all_targets)

    def slot_of(self, endpoint: Endpoint) -> str | None:
        """Return the slot of the run whose key an endpoint of models uses; None if there is none.

        What such a model answers tells the quota of the slot.
        """
        for name, slot in self._slots.items():
            key = Text(parts=(EnvPlaceholder(name=slot.key_env or ""),))
            if slot.provider == endpoint.kind and endpoint.key == key:
                return name
        return None

    def executors(
        self, environ: Mapping[str, str], observe_slot: ObserveSlot | None = None
    ) -> dict[str, Executor]:
        """Return the executors of the targets that steps use."""
        targets = {name: self._settings.targets[name] for name in self._names}
        slot_keys = SlotKeys(self._settings, environ)
        return build_executors(
            targets, environ, slot_keys, prices=self._prices, observe_slot=observe_slot
        )

    def draft(self, step: Step, request: TargetRequest, now: float) -> Draft:
        """Return the task of a step as the service would take it, or raise `InvalidTaskError`."""
        body = _body(step, request, self._agent_id)
        return self._parser.read_task(body, now=now, is_trusted=True)

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
