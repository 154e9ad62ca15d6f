"""Submissions of callers who act for one agent or project alone.

Rule: what a caller is bound to is filled in where a task does not say it, and whoever says
something else is refused; nothing is changed silently.
"""

from __future__ import annotations

from headgate.core.budgets.scopes import Scope
from headgate.core.tasks.task import Task
from headgate.errors import InvalidTaskError
from headgate.intake.bodies import BatchBody, TaskBody
from headgate.tokens import Bounds


def bind(body: TaskBody | BatchBody, bounds: Bounds) -> None:
    """Fill in whom a task or a batch is for, or raise `InvalidTaskError`."""
    body.agent_id = _own("agentId", body.agent_id, bounds.agent_id)
    body.project_id = _own("projectId", body.project_id, bounds.project_id)
    if isinstance(body, TaskBody) and bounds.least_priority is not None:
        body.priority = _priority(body.priority, bounds.least_priority)


def check_scopes(task: Task, bounds: Bounds) -> None:
    """Refuse further budgets, after that of its project, that are not the caller's own."""
    if not bounds.is_bound:
        return
    for scope in task.scopes[1:]:
        if not bounds.may_charge(Scope(scope)):
            raise _forbidden("scopes", f"the token is not for the budget '{scope}'")


def _own(field: str, given: str | None, bound: str | None) -> str | None:
    if bound is None or not given or given == bound:
        return bound or given
    raise _forbidden(field, f"the token is for '{bound}' only")


def _priority(given: int | None, least: int) -> int:
    if given is None:
        return max(0, least)
    if given < least:
        raise _forbidden("priority", f"the token is for {least} and higher; lower goes first")
    return given


def _forbidden(field: str, problem: str) -> InvalidTaskError:
    return InvalidTaskError("forbidden", field, f"field '{field}': {problem}")
