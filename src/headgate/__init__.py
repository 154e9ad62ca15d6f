"""Headgate decides which AI-agent task runs next, on whose quota, and inside whose budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headgate.core.budget import BudgetManager
from headgate.core.projects import Agent, AgentState, Project, ProjectStatus
from headgate.core.scheduler import Scheduler
from headgate.core.snapshot import AssignAction, SchedulerState
from headgate.core.tasks import Task, TaskStatus
from headgate.errors import BudgetExceededError
from headgate.rate_windows import RateLimitWindow

if TYPE_CHECKING:
    from headgate.budget_tracker import BudgetTracker, ReservationToken
    from headgate.ledgers.connect import connect_budget
    from headgate.ledgers.local import LocalBudgetTracker
    from headgate.ledgers.postgres import PostgresBudgetTracker as PostgresBudgetTracker
    from headgate.ledgers.redis import RedisBudgetTracker as RedisBudgetTracker
    from headgate.ledgers.sqlite import SqliteBudgetTracker as SqliteBudgetTracker

__all__ = [
    "Agent",
    "AgentState",
    "AssignAction",
    "BudgetExceededError",
    "BudgetManager",
    "BudgetTracker",
    "LocalBudgetTracker",
    "Project",
    "ProjectStatus",
    "RateLimitWindow",
    "ReservationToken",
    "Scheduler",
    "SchedulerState",
    "Task",
    "TaskStatus",
    "connect_budget",
]

__version__ = "0.1.0"

# Loaded when first asked for, so that a program which only decides loads only that. The three that
# need a package of an extra are not in `__all__`: a star import must work on the bare install.
_LAZY = {
    "BudgetTracker": "headgate.budget_tracker",
    "LocalBudgetTracker": "headgate.ledgers.local",
    "PostgresBudgetTracker": "headgate.ledgers.postgres",
    "RedisBudgetTracker": "headgate.ledgers.redis",
    "ReservationToken": "headgate.budget_tracker",
    "SqliteBudgetTracker": "headgate.ledgers.sqlite",
    "connect_budget": "headgate.ledgers.connect",
}

_EXTRAS = {
    "PostgresBudgetTracker": "postgres",
    "RedisBudgetTracker": "redis",
    "SqliteBudgetTracker": "server",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headgate"):
            raise
        message = f"{name} needs the package {error.name}; install headgate[{_EXTRAS[name]}]"
        raise ImportError(message) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
