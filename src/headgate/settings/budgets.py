"""The budgets that settings make: of scopes, of projects, and of everything together.

Rule: a scope has one budget. Two keys that both set it are refused, never ranked.
"""

from __future__ import annotations

from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import ROOT, Scope, parse_scope
from headgate.core.budgets.windows import Window, parse_window
from headgate.core.money import to_limit_micro_usd, to_limit_tokens
from headgate.errors import InvalidSettingError
from headgate.settings.checks import at_key
from headgate.settings.messages import key_path
from headgate.settings.sections import BudgetSettings, Settings
from headgate.settings.zones import zone_of

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
        zone_of(window.zone, field="window")
    usd, tokens = budget.limit_usd, budget.limit_tokens
    with at_key("budgets", name, "limit_usd"):
        limit_micro_usd = None if usd is None else to_limit_micro_usd(usd)
    limit_tokens = None if tokens is None else to_limit_tokens(tokens)
    limit = Limit(limit_micro_usd=limit_micro_usd, limit_tokens=limit_tokens, window=window)
    return key, scope, limit
