"""The budgets that settings make: of scopes, of projects, and of everything together.

Rule: a scope has one budget. Two keys that both set it are refused, never ranked.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from headgate.core.budgets.scopes import ROOT, ROOT_NAME, Scope, mistyped_kind, parse_scope
from headgate.core.budgets.windows import (
    UTC_NAME,
    Window,
    format_window,
    parse_window,
    window_words,
)
from headgate.core.money import (
    MAX_LIMIT_MICRO_USD,
    format_usd,
    to_limit_micro_usd,
    to_limit_tokens,
)
from headgate.core.rate_limits import WINDOW_SECONDS, RateKind, RateLimit, RateUnit
from headgate.errors import InvalidSettingError, Problems
from headgate.storage.zones import zone


def budgets(settings: Settings) -> dict[Scope, Limit]:
    """Return the limit of each scope that has one; the root is that of `global_budget`."""
    found: dict[Scope, Limit] = {}
    keys: dict[Scope, str] = {}
    wrong = Problems(InvalidSettingError)
    for key, scope, limit in _limits(settings):
        if scope in keys:
            problem = f"{keys[scope]} sets the budget of {scope or ROOT_NAME} too; keep one of them"
            wrong.add(InvalidSettingError(key, problem))
        keys[scope] = key
        found[scope] = limit
    wrong.check()
    return found


def _limits(settings: Settings) -> list[tuple[str, Scope, Limit]]:
    written = []
    wrong = Problems(InvalidSettingError)
    for name, budget in settings.budgets.items():
        with wrong.collected():
            written.append(_written(name, budget))
    wrong.check()
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


def scope_of(name: str) -> Scope:
    """Return the scope that a name of `[budgets]` stands for."""
    return ROOT if name == ROOT_NAME else parse_scope(name)


def limit_words(limit: Limit) -> str:
    """Return a limit in words: `$5.00 a day`, `1,000 tokens over any 24 hours`."""
    usd, tokens, window = limit.limit_micro_usd, limit.limit_tokens, limit.window
    amounts = [] if usd is None else [format_usd(usd)]
    amounts += [] if tokens is None else [f"{tokens:,} tokens"]
    words = " and ".join(amounts)
    if window.unit is not None:
        zone_words = "" if window.zone == UTC_NAME else f" ({window.zone})"
        return f"{words} a {window.unit.value}{zone_words}"
    return words if window.hours is None else f"{words} {window_words(format_window(window))}"


def limit_of(name: str, table: Mapping[str, object]) -> Limit | None:
    """Return the limit that a table of `[budgets]` makes; None if it makes none."""
    given = {key: value for key, value in table.items() if value is not None}
    try:
        return _written(name, msgspec.convert(given, BudgetSettings))[2]
    except (InvalidSettingError, msgspec.ValidationError):
        return None


def _tokens(tokens: int, window: Window) -> Limit:
    return Limit(limit_tokens=to_limit_tokens(tokens), window=window)


def _written(name: str, budget: BudgetSettings) -> tuple[str, Scope, Limit]:
    key = key_path("budgets", name)
    with at_key("budgets", name):
        scope = scope_of(name)
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
    resolved = {}
    wrong = Problems(InvalidSettingError)
    for name, limit in settings.rate_limits.items():
        with wrong.collected():
            kind = _kind_of(settings, name, limit)
            resolved[name] = msgspec.structs.replace(limit, kind=kind)
    wrong.check()
    return resolved


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
    return [*limits, *slot_label_warnings(settings), *budget_warnings(settings)]


def budget_warnings(settings: Settings) -> list[str]:
    """Say which budgets limit nothing: of an unknown project, or of a mistyped kind."""
    mistyped = [
        f"{key_path('budgets', scope)}: {problem}"
        for scope in settings.budgets
        if (problem := mistyped_kind(scope))
    ]
    return mistyped + [
        f"{key_path('budgets', scope)}: there is no project {name!r}, so it limits nothing; "
        "add it under [projects], or correct the name"
        for scope in settings.budgets
        for kind, _, name in (scope.partition("/")[0].partition(":"),)
        if kind == "project" and name not in settings.projects
    ]
