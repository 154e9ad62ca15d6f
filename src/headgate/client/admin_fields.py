"""What a program says of a change to something that is configured.

What is left out stays as it is, and None takes the value away, which leaves the default.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TypedDict

from headgate.bodies.admin import ProjectStatusText, StandingText

Amount = str | int | float | Decimal
"""Dollars; a text or a `Decimal` is exact."""


class ProjectChange(TypedDict, total=False):
    """A change of a project."""

    credit_weight: float | None
    max_concurrent_agents: int | None
    budget_limit: int | None
    status: ProjectStatusText | None


class AgentChange(TypedDict, total=False):
    """A change of an agent."""

    type: str | None
    capacity: int | None
    accepts_open: bool | None
    status: StandingText | None


class TargetChange(TypedDict, total=False):
    """A change of a target."""

    status: StandingText | None


class BudgetChange(TypedDict, total=False):
    """A change of what a scope may use."""

    limit_usd: Amount | None
    limit_tokens: int | None
    window: str | None
