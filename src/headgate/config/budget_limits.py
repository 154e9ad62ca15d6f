"""The budgets that settings make: of scopes, of projects, and of everything together.

Rule: a scope has one budget. Two keys that both set it are refused, never ranked.
"""

from __future__ import annotations

import msgspec

from headgate.config.messages import key_path
from headgate.config.settings import (
    BudgetSettings,
    RateLimitSettings,
    Settings,
    upstream_target,
)
from headgate.config.validation import at_dollars, at_key, slot_label_warnings
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import ROOT, Scope, parse_scope
from headgate.core.budgets.windows import Window, parse_window
from headgate.core.money import MAX_LIMIT_MICRO_USD, to_limit_micro_usd, to_limit_tokens
from headgate.core.rate_limits import WINDOW_SECONDS, RateKind, RateLimit, RateUnit
from headgate.errors import InvalidSettingError
from headgate.storage.zones import zone

ROOT_NAME = "root"


def budgets(settings: Settings) -> dict[Scope, Limit]:
    """Return the limit of each scope that has one; the root is that of `global_budget`."""
    found: dict[Scope, Limit] = {}
    keys: dict[Scope, str] = {}
    for key, scope, limit in _limits(settings):
        if scope in keys:
            problem = f"{keys[scope]} sets the budget of {scope or ROOT_NAME} too; keep one of them"
            raise InvalidSettingError(key, problem)
        keys[scope] = key
        found[scope] = limit
    return found


def _limits(settings: Settings) -> list[tuple[str, Scope, Limit]]:
    written = [_written(name, budget) for name, budget in settings.budgets.items()]
    window = settings.scheduler.usage_window
    shares = [
        (
            key_path("projects", name, "budget_limit"),
            parse_scope(f"project:{name}"),
            _tokens(project.budget_limit, window),
        )
        for name, project in settings.projects.items()
        if project.budget_limit is not None
    ]
    total = settings.scheduler.global_budget
    whole = [("scheduler.global_budget", ROOT, _tokens(total, window))] if total else []
    return [*written, *shares, *whole]


def _tokens(tokens: int, window: Window) -> Limit:
    return Limit(limit_tokens=to_limit_tokens(tokens), window=window)


def _written(name: str, budget: BudgetSettings) -> tuple[str, Scope, Limit]:
    key = key_path("budgets", name)
    with at_key("budgets", name):
        scope = ROOT if name == ROOT_NAME else parse_scope(name)
    if budget.limit_usd is None and budget.limit_tokens is None:
        raise InvalidSettingError(key, "limits nothing; write limit_usd, limit_tokens or both")
    with at_key("budgets", name, "window"):
        window = parse_window(budget.window)
        zone(window.zone, field="window")
    usd, tokens = budget.limit_usd, budget.limit_tokens
    with at_dollars(usd, MAX_LIMIT_MICRO_USD, "budgets", name, "limit_usd"):
        limit_micro_usd = None if usd is None else to_limit_micro_usd(usd)
    limit_tokens = None if tokens is None else to_limit_tokens(tokens)
    limit = Limit(limit_micro_usd=limit_micro_usd, limit_tokens=limit_tokens, window=window)
    return key, scope, limit


# The rate limits that settings make, and what each of them is a limit on.
#
# Rule: a name that could mean two things is refused. One that means nothing yet is taken for an
# agent type, since agents may come later than their limit; `warnings_of` says so.

_UNITS: tuple[RateUnit, ...] = ("requests", "tokens")
_KINDS: dict[RateKind, str] = {
    "agent_type": "an agent type",
    "target": "a target",
    "slot": "a slot",
}


def rate_limits(settings: Settings) -> tuple[RateLimit, ...]:
    """Return every limit of loaded settings, as the decision counts it."""
    return tuple(
        RateLimit(
            kind=limit.kind or "agent_type",
            name=name,
            unit=unit,
            most=most,
            window_seconds=window_seconds,
        )
        for name, limit in settings.rate_limits.items()
        for unit in _UNITS
        for window, window_seconds in WINDOW_SECONDS.items()
        if (most := getattr(limit, f"{unit}_{window}")) is not None
    )


def resolved_rate_limits(settings: Settings) -> dict[str, RateLimitSettings]:
    """Return the rate limits, each with the kind of thing that it limits."""
    return {
        name: msgspec.structs.replace(limit, kind=_kind_of(settings, name, limit))
        for name, limit in settings.rate_limits.items()
    }


def _kind_of(settings: Settings, name: str, limit: RateLimitSettings) -> RateKind:
    where = key_path("rate_limits", name)
    if limit == RateLimitSettings(kind=limit.kind):
        problem = "limits nothing; write tokens_per_… or requests_per_…, a minute, hour or day"
        raise InvalidSettingError(where, problem)
    matching = matching_kinds(settings, name)
    if limit.kind is not None:
        if limit.kind != "agent_type" and limit.kind not in matching:
            problem = f"no {limit.kind} has the name {name}; correct one of the two"
            raise InvalidSettingError(key_path("rate_limits", name, "kind"), problem)
        return limit.kind
    if len(matching) > 1:
        both = " and of ".join(_KINDS[kind] for kind in matching)
        problem = f"is the name of {both}; write kind = {' or '.join(map(repr, matching))}"
        raise InvalidSettingError(where, problem.replace("'", '"'))
    return matching[0] if matching else "agent_type"


def matching_kinds(settings: Settings, name: str) -> list[RateKind]:
    """List what has this name: agent types, targets and slots; `upstream:NAME` is a target."""
    names: dict[RateKind, set[str | None]] = {
        "agent_type": {agent.type for agent in settings.agents.values()},
        "target": {*settings.targets, *map(upstream_target, settings.all_upstreams)},
        "slot": {*settings.slots, *(target.slot for target in settings.targets.values())},
    }
    return [kind for kind, known in names.items() if name in known]


def warnings_of(settings: Settings) -> list[str]:
    """List what may be a mistake, and may be meant.

    An agent type need not be declared for its limit to be: the agent may come later.
    """
    limits = [
        f"{key_path('rate_limits', name)}: no agent type, target or slot has this name yet; "
        "it limits agents of that type"
        for name in settings.rate_limits
        if not matching_kinds(settings, name)
    ]
    return [*limits, *slot_label_warnings(settings)]
