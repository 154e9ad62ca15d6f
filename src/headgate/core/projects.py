"""Projects and agents: who has a share, and who does the work."""

from __future__ import annotations

import msgspec

from headgate.core.enums import LenientEnum


class ProjectStatus(LenientEnum):
    """An ACTIVE project is given agents; a DRAINING one too, for what it has, and takes no more."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    ARCHIVED = "archived"


WORKING = (ProjectStatus.ACTIVE, ProjectStatus.DRAINING)


class Standing(LenientEnum):
    """Whether an agent or a target works: PAUSED starts nothing, DRAINING takes nothing new."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of the fleet: a weight, a cap on concurrent work, a token budget for the window.

    `max_concurrent_agents` None means no cap, `budget_limit` None no budget.
    """

    id: str
    name: str = ""
    credit_weight: float = 1.0
    max_concurrent_agents: int | None = 2
    budget_limit: int | None = None
    status: ProjectStatus = ProjectStatus.ACTIVE


class AgentState(LenientEnum):
    """An IDLE agent takes work; a BUSY one only where its free places are counted."""

    IDLE = "idle"
    STARTING = "starting"
    BUSY = "busy"
    PAUSED = "paused"
    ERROR = "error"


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named actor with a lane in each project and `capacity` places for tasks in flight."""

    id: str
    name: str = ""
    agent_type: str = ""
    state: AgentState = AgentState.IDLE
    capacity: int = 1
    accepts_open: bool = True
