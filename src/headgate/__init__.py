"""Headgate decides which AI-agent task runs next, on whose quota, and inside whose budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headgate.budgets.connect import connect_budget
    from headgate.budgets.local import LocalBudgetTracker
    from headgate.budgets.postgres import PostgresBudgetTracker as PostgresBudgetTracker
    from headgate.budgets.redis import RedisBudgetTracker as RedisBudgetTracker
    from headgate.budgets.sqlite import SqliteBudgetTracker
    from headgate.budgets.tracker import BudgetTracker, ReservationToken
    from headgate.client.client import Client
    from headgate.client.local_slots import SlotReporter
    from headgate.client.sdk_clients import anthropic as anthropic
    from headgate.client.sdk_clients import async_anthropic as async_anthropic
    from headgate.client.sdk_clients import async_openai as async_openai
    from headgate.client.sdk_clients import openai as openai
    from headgate.client.sdk_clients import spent as spent
    from headgate.client.sync_client import SyncClient
    from headgate.core.fair_share import BudgetManager
    from headgate.core.gates import GateClosure
    from headgate.core.scheduler import Scheduler
    from headgate.core.snapshot import (
        Agent,
        AgentState,
        AssignAction,
        LanePolicy,
        Project,
        ProjectStatus,
        SchedulerState,
    )
    from headgate.core.task import Task, TaskStatus
    from headgate.errors import BudgetExceededError, LimitReachedError
    from headgate.executors.executor import report_progress
    from headgate.inprocess import ray as ray
    from headgate.inprocess import sdk as sdk
    from headgate.inprocess.budget import Budget, Estimate
    from headgate.inprocess.calls import configure, current_scheduler, governed, wrap
    from headgate.inprocess.permits import Grant, SharedResource, current_grant
    from headgate.inprocess.rate_windows import RateLimitWindow, SlidingRateLimitWindow
    from headgate.inprocess.scheduler import LoadScheduler, acquire_all

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
    "LimitReachedError",
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
    "SlotReporter",
    "SqliteBudgetTracker",
    "SyncClient",
    "Task",
    "TaskStatus",
    "acquire_all",
    "configure",
    "connect_budget",
    "current_grant",
    "current_scheduler",
    "governed",
    "report_progress",
    "wrap",
]

__version__ = "0.1.0"

# Loaded when first asked for, so that a command starts fast and a program loads what it uses. The
# two that need a package of an extra are not in `__all__`: a star import must work without. Nor
# are `openai` and `anthropic`, which would hide the packages of these names, and `spent`.
_MODULES = {
    "Agent": "headgate.core.snapshot",
    "AgentState": "headgate.core.snapshot",
    "AssignAction": "headgate.core.snapshot",
    "Budget": "headgate.inprocess.budget",
    "BudgetExceededError": "headgate.errors",
    "BudgetManager": "headgate.core.fair_share",
    "BudgetTracker": "headgate.budgets.tracker",
    "Client": "headgate.client.client",
    "Estimate": "headgate.inprocess.budget",
    "GateClosure": "headgate.core.gates",
    "Grant": "headgate.inprocess.permits",
    "LanePolicy": "headgate.core.snapshot",
    "LimitReachedError": "headgate.errors",
    "LoadScheduler": "headgate.inprocess.scheduler",
    "LocalBudgetTracker": "headgate.budgets.local",
    "PostgresBudgetTracker": "headgate.budgets.postgres",
    "Project": "headgate.core.snapshot",
    "ProjectStatus": "headgate.core.snapshot",
    "RateLimitWindow": "headgate.inprocess.rate_windows",
    "RedisBudgetTracker": "headgate.budgets.redis",
    "ReservationToken": "headgate.budgets.tracker",
    "Scheduler": "headgate.core.scheduler",
    "SchedulerState": "headgate.core.snapshot",
    "SharedResource": "headgate.inprocess.permits",
    "SlidingRateLimitWindow": "headgate.inprocess.rate_windows",
    "SlotReporter": "headgate.client.local_slots",
    "SqliteBudgetTracker": "headgate.budgets.sqlite",
    "SyncClient": "headgate.client.sync_client",
    "Task": "headgate.core.task",
    "TaskStatus": "headgate.core.task",
    "acquire_all": "headgate.inprocess.scheduler",
    "anthropic": "headgate.client.sdk_clients",
    "async_anthropic": "headgate.client.sdk_clients",
    "async_openai": "headgate.client.sdk_clients",
    "configure": "headgate.inprocess.calls",
    "connect_budget": "headgate.budgets.connect",
    "current_grant": "headgate.inprocess.permits",
    "current_scheduler": "headgate.inprocess.calls",
    "governed": "headgate.inprocess.calls",
    "openai": "headgate.client.sdk_clients",
    "report_progress": "headgate.executors.executor",
    "spent": "headgate.client.sdk_clients",
    "wrap": "headgate.inprocess.calls",
}

_PACKAGES = {"ray": "headgate.inprocess.ray", "sdk": "headgate.inprocess.sdk"}

_EXTRAS = {"PostgresBudgetTracker": "postgres", "RedisBudgetTracker": "redis"}


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(_PACKAGES[name])
    module = _MODULES.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRAS or error.name is None or error.name.startswith("headgate"):
            raise
        extra = _EXTRAS[name]
        message = f"{name} needs the package {error.name}; run pip install 'headgate[{extra}]'"
        raise ImportError(message) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
