"""Projects, agents, targets and budgets as administrators see them: in force, and from where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headgate.administration.situation import Situation
from headgate.bodies.admin import AgentBody, BudgetBody, ProjectBody, TargetBody
from headgate.core.budgets.scopes import ROOT
from headgate.core.budgets.windows import format_window
from headgate.core.money import plain_usd
from headgate.core.shares import Share
from headgate.settings import AgentSettings, budgets
from headgate.settings.budgets import ROOT_NAME
from headgate.settings.overrides import PATCHABLE, OverrideKind
from headgate.settings.sections import DEFAULT_PROJECT
from headgate.store import LaneCount

MAX_AGENTS = 10_000


class Count(NamedTuple):
    """What waits and what is in flight."""

    queued: int = 0
    inflight: int = 0


Counts = dict[str, Count]
NOTHING = Count()


def counts_by(lanes: Iterable[LaneCount], column: str) -> Counts:
    """Sum up what lanes have, by their project or their agent."""
    counts: Counts = {}
    for lane in lanes:
        if lane.queued or lane.inflight:
            name = getattr(lane, column)
            known = counts.get(name, NOTHING)
            counts[name] = Count(known.queued + lane.queued, known.inflight + lane.inflight)
    return counts


def project_body(
    situation: Situation, name: str, counts: Counts, share: Share | None = None
) -> ProjectBody:
    """Return a project that there is, with its share where that is known."""
    settings = situation.settings.projects[name]
    project = settings.to_project(name)
    count = counts.get(name, NOTHING)
    return ProjectBody(
        id=name,
        name=settings.name,
        credit_weight=settings.credit_weight,
        max_concurrent_agents=project.max_concurrent_agents,
        budget_limit=settings.budget_limit,
        status=settings.status.value,
        queued=count.queued,
        inflight=count.inflight,
        configured=_is_configured(situation, "projects", name) or name == DEFAULT_PROJECT,
        overridden=overridden_fields(situation, "projects", name),
        target_share=None if share is None else round(share.target, 6),
        actual_share=None if share is None else round(share.actual, 6),
        deficit=None if share is None else round(share.deficit, 6),
        tokens=None if share is None else share.tokens,
    )


def agents_shown(situation: Situation, counts: Counts) -> list[str]:
    """Return the agents that are configured or have tasks, as many as are shown."""
    busy = sorted(name for name in counts if name)
    return list(dict.fromkeys((*situation.settings.agents, *busy)))[:MAX_AGENTS]


def agent_body(situation: Situation, name: str, counts: Counts) -> AgentBody:
    """Return an agent, also one that nobody has declared."""
    settings = situation.settings.agents.get(name) or AgentSettings(accepts_open=False)
    agent = settings.to_agent(name, situation.settings.scheduler)
    count = counts.get(name, NOTHING)
    return AgentBody(
        id=name,
        type=settings.type,
        capacity=agent.capacity,
        accepts_open=agent.accepts_open,
        status=settings.status.value,
        queued=count.queued,
        inflight=count.inflight,
        configured=_is_configured(situation, "agents", name),
        overridden=overridden_fields(situation, "agents", name),
    )


def target_body(situation: Situation, name: str) -> TargetBody:
    """Return a target that there is, without anything that may be a secret."""
    target = situation.settings.all_targets[name]
    return TargetBody(
        id=name,
        kind=str(type(target).__struct_config__.tag),
        status=target.status.value,
        default=name == situation.settings.default_target,
        slot=target.slot,
        provider=target.provider,
        headers=sorted(getattr(target, "headers", {})),
        env=sorted(getattr(target, "env", {})),
        configured=("targets", name) not in situation.left,
        overridden=overridden_fields(situation, "targets", name),
    )


def budget_bodies(situation: Situation) -> list[BudgetBody]:
    """Return what every scope with a limit may use."""
    return [
        BudgetBody(
            scope=scope,
            limit_usd=_usd(limit.limit_micro_usd),
            limit_tokens=limit.limit_tokens,
            window=format_window(limit.window),
            overridden=overridden_fields(
                situation, "budgets", ROOT_NAME if scope == ROOT else scope
            ),
        )
        for scope, limit in budgets(situation.settings).items()
    ]


def _usd(micro_usd: int | None) -> str | None:
    return None if micro_usd is None else plain_usd(micro_usd)


def _is_configured(situation: Situation, kind: str, name: str) -> bool:
    return name in situation.tables.get(kind, {}) and (kind, name) not in situation.left


def overridden_fields(situation: Situation, kind: OverrideKind, name: str) -> list[str]:
    """Return what is not as the file says, by the names that the API has for it."""
    fields = {key: field for field, key in PATCHABLE[kind].items()}
    return [fields[key] for key in situation.overridden(kind, name)]
