"""Headgate decides which AI-agent task runs next, on whose quota, and inside whose budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.budget_tracker import BudgetTracker, ReservationToken
    from headgate.client.async_client import Client
    from headgate.client.sync_client import SyncClient
    from headgate.core.gates import GateClosure
    from headgate.core.projects import Agent, AgentState, Project, ProjectStatus
    from headgate.core.scheduler import Scheduler
    from headgate.core.share_ratios import BudgetManager
    from headgate.core.snapshot import AssignAction, LanePolicy, SchedulerState
    from headgate.core.tasks.task import Task, TaskStatus
    from headgate.errors import BudgetExceededError
    from headgate.inprocess.budget import Budget, Estimate
    from headgate.inprocess.convenience import configure, current_scheduler, governed, wrap
    from headgate.inprocess.grants import Grant, current_grant
    from headgate.inprocess.resource import SharedResource
    from headgate.inprocess.scheduler import LoadScheduler
    from headgate.inprocess.several import acquire_all
    from headgate.ledgers.connect import connect_budget
    from headgate.ledgers.local import LocalBudgetTracker
    from headgate.ledgers.postgres import PostgresBudgetTracker as PostgresBudgetTracker
    from headgate.ledgers.redis import RedisBudgetTracker as RedisBudgetTracker
    from headgate.ledgers.sqlite import SqliteBudgetTracker as SqliteBudgetTracker
    from headgate.rate_windows import RateLimitWindow, SlidingRateLimitWindow

__all__ = [
    "Agent",
    "AgentState",
    "AssignAction",
    "Budget",
    "BudgetExceededError",
    "BudgetManager",
    "BudgetTracker",
    "Client",
    "Estimate",
    "GateClosure",
    "Grant",
    "LanePolicy",
    "LoadScheduler",
    "LocalBudgetTracker",
    "Project",
    "ProjectStatus",
    "RateLimitWindow",
    "ReservationToken",
    "Scheduler",
    "SchedulerState",
    "SharedResource",
    "SlidingRateLimitWindow",
    "SyncClient",
    "Task",
    "TaskStatus",
    "acquire_all",
    "configure",
    "connect_budget",
    "current_grant",
    "current_scheduler",
    "governed",
    "wrap",
]

__version__ = "0.1.0"

# Loaded when first asked for, so that a command starts fast and a program loads what it uses. The
# three that need a package of an extra are not in `__all__`: a star import must work without.
_MODULES = {
    "Agent": "headgate.core.projects",
    "AgentState": "headgate.core.projects",
    "AssignAction": "headgate.core.snapshot",
    "Budget": "headgate.inprocess.budget",
    "BudgetExceededError": "headgate.errors",
    "BudgetManager": "headgate.core.share_ratios",
    "BudgetTracker": "headgate.budget_tracker",
    "Client": "headgate.client.async_client",
    "Estimate": "headgate.inprocess.budget",
    "GateClosure": "headgate.core.gates",
    "Grant": "headgate.inprocess.grants",
    "LanePolicy": "headgate.core.snapshot",
    "LoadScheduler": "headgate.inprocess.scheduler",
    "LocalBudgetTracker": "headgate.ledgers.local",
    "PostgresBudgetTracker": "headgate.ledgers.postgres",
    "Project": "headgate.core.projects",
    "ProjectStatus": "headgate.core.projects",
    "RateLimitWindow": "headgate.rate_windows",
    "RedisBudgetTracker": "headgate.ledgers.redis",
    "ReservationToken": "headgate.budget_tracker",
    "Scheduler": "headgate.core.scheduler",
    "SchedulerState": "headgate.core.snapshot",
    "SharedResource": "headgate.inprocess.resource",
    "SlidingRateLimitWindow": "headgate.rate_windows",
    "SqliteBudgetTracker": "headgate.ledgers.sqlite",
    "SyncClient": "headgate.client.sync_client",
    "Task": "headgate.core.tasks.task",
    "TaskStatus": "headgate.core.tasks.task",
    "acquire_all": "headgate.inprocess.several",
    "configure": "headgate.inprocess.convenience",
    "connect_budget": "headgate.ledgers.connect",
    "current_grant": "headgate.inprocess.grants",
    "current_scheduler": "headgate.inprocess.convenience",
    "governed": "headgate.inprocess.convenience",
    "wrap": "headgate.inprocess.convenience",
}

_EXTRAS = {
    "PostgresBudgetTracker": "postgres",
    "RedisBudgetTracker": "redis",
    "SqliteBudgetTracker": "server",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS or error.name is None or error.name.startswith("headgate"):
            raise
        message = f"{name} needs the package {error.name}; install headgate[{_EXTRAS[name]}]"
        raise ImportError(message) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
