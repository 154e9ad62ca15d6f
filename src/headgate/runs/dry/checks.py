"""What a run in this process would miss before it begins, looked for without beginning one.

Rule: what ends a run before its first step ends its rehearsal, too, in the same words. Functions
are imported for that, as a run would import them; nothing is called, started or sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.errors import InvalidSettingError
from headgate.executors.callable import CallableExecutor
from headgate.providers.prices import PriceList
from headgate.runs.checking import check_steps, in_file
from headgate.runs.local.engine import named_targets, search
from headgate.runs.local.step_executors import CallSteps
from headgate.runs.local.tasks import step_executors
from headgate.runs.options import RunOptions
from headgate.runs.variables import Variables
from headgate.workflow.workflow import Workflow


async def check_here(workflow: Workflow, options: RunOptions, environ: Mapping[str, str]) -> None:
    """Raise what a run of a workflow would raise before anything runs."""
    try:
        await _check(workflow, options, environ)
    except InvalidSettingError as error:
        raise in_file(error, workflow) from error


async def _check(workflow: Workflow, options: RunOptions, environ: Mapping[str, str]) -> None:
    variables = Variables(environ)
    check_steps(workflow, variables)
    targets = named_targets(workflow, options, environ)
    search(workflow.folder)
    executors = step_executors(workflow, variables, PriceList(workflow.prices), targets, places=1)
    for executor in executors.values():
        if isinstance(executor, CallSteps | CallableExecutor):
            await executor.open()
