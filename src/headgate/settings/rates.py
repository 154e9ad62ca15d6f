"""The rate limits that settings make, and what each of them is a limit on.

Rule: a name that could mean two things is refused. One that means nothing yet is taken for an agent
type, since agents may come later than their limit; `warnings_of` says so.
"""

from __future__ import annotations

import msgspec

from headgate.core.rate_limits import RateKind, RateLimit, RateUnit
from headgate.core.windows import WINDOW_SECONDS
from headgate.errors import InvalidSettingError
from headgate.settings.messages import key_path
from headgate.settings.sections import RateLimitSettings, Settings
from headgate.settings.slot_checks import slot_label_warnings

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
    """List what has this name: agent types, targets and slots."""
    names: dict[RateKind, set[str | None]] = {
        "agent_type": {agent.type for agent in settings.agents.values()},
        "target": set(settings.targets),
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
