"""The engine of a run in this process: what it runs on, what it may use, how it is set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.projects import Project
from headgate.core.tasks.admission import QueueLimits
from headgate.databases.child import ChildStarter
from headgate.runs.kept.folder import Run
from headgate.runs.local.tasks import AGENT
from headgate.runs.options import RunOptions
from headgate.runtime.engine import EngineSettings
from headgate.settings import StoreSettings, settings_file
from headgate.workflow.workflow import TargetWork, Workflow

if TYPE_CHECKING:
    from headgate.runs.local.target_steps import TargetSteps

RESULTS_KEPT_SECONDS = 100 * 365 * 86_400.0
WRITTEN_APART = 1_000
"""From how many runs of steps on a process of its own writes: starting one takes a moment."""


def targets_of(
    run: Run, workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> TargetSteps | None:
    """Return the targets of a workflow, and have the record name their file for a resume."""
    targets = named_targets(workflow, options, environ)
    path = None if targets is None else settings_file(options.config)
    if path is not None and run.record.config is None:
        run.change(config=str(path.absolute()))
    return targets


def named_targets(
    workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> TargetSteps | None:
    """Return the targets that the steps of a workflow name; None if they name none."""
    if not any(isinstance(step.work, TargetWork) for step in workflow.steps):
        return None
    # It brings the service along, which most runs do without.
    from headgate.runs.local.target_steps import target_steps  # noqa: PLC0415

    return target_steps(workflow, settings_file(options.config), environ, agent_id=AGENT)


def search(folder: Path) -> None:
    """Have functions beside a workflow found when its steps call them."""
    # Behind everything else: a file beside the workflow must not hide a module of ours.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def starter_of(run: Run) -> ChildStarter | None:
    """Return what starts the process that writes, where the run is long enough to be worth one."""
    if run.record.total < WRITTEN_APART or not StoreSettings().writes_in_process:
        return None
    modules = ("headgate.stores.wire.sqlite_workplace",)
    return ChildStarter(inherited=() if run.lock is None else (run.lock,), modules=modules)


def engine_settings(
    workflow: Workflow,
    targets: TargetSteps | None,
    places: int,
    budgets: dict[Scope, Limit],
) -> EngineSettings:
    """Return how the engine of a run works: nothing is turned away, and no result expires."""
    return EngineSettings(
        desk=DeskSettings(
            projects=(Project(id=workflow.name, max_concurrent_agents=None),),
            rate_limits=() if targets is None else targets.rate_limits,
            max_inflight=places,
            max_per_agent_inflight=places,
            # There is one project, and nobody that it would have to be fair to.
            counts_free_work=False,
        ),
        limits=QueueLimits(max_queue=None, max_per_agent=None),
        budgets=budgets,
        places=places,
        result_ttl_seconds=RESULTS_KEPT_SECONDS,
    )
