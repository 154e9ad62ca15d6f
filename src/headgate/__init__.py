"""Headgate decides which AI-agent task runs next, on whose quota, and inside whose budget."""

from headgate.core.budget import BudgetManager
from headgate.core.projects import Agent, AgentState, Project, ProjectStatus
from headgate.core.scheduler import Scheduler
from headgate.core.snapshot import AssignAction, SchedulerState
from headgate.core.tasks import Task, TaskStatus
from headgate.rate_windows import RateLimitWindow

__all__ = [
    "Agent",
    "AgentState",
    "AssignAction",
    "BudgetManager",
    "Project",
    "ProjectStatus",
    "RateLimitWindow",
    "Scheduler",
    "SchedulerState",
    "Task",
    "TaskStatus",
]

__version__ = "0.1.0"
