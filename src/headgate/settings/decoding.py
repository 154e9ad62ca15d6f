"""From merged sources to checked settings.

Rule: every refusal names the key as the file writes it. Tables are decoded one by one for that,
because a decoder of the whole does not say under which name it failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from headgate.executors.targets import ECHO, Target
from headgate.settings.budgets import budgets
from headgate.settings.checks import check, check_names
from headgate.settings.messages import refusal, table_expected
from headgate.settings.rates import resolved_rate_limits
from headgate.settings.sections import (
    DEFAULT_PROJECT,
    AgentSettings,
    AuthSettings,
    BudgetSettings,
    DashboardSettings,
    LedgerSettings,
    LogSettings,
    ProjectSettings,
    RateLimitSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    StoreSettings,
    TelemetrySettings,
    WebhookSettings,
)
from headgate.settings.slots import QuotaSettings, SlotSettings
from headgate.settings.sources import Merged, Table, merge

ECHO_NAME = "echo"

Section = TypeVar("Section", bound=msgspec.Struct)


def load_settings(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]
) -> Settings:
    """Read and check all settings: the file, variables over it, options over those.

    Options are named by their key, as in `server.port`; None was not given.
    """
    return decode(merge(path, environ, overrides))


def decode(merged: Merged) -> Settings:
    """Decode merged sources, and check them."""
    tables = merged.tables
    settings = Settings(
        scheduler=_one(tables, "scheduler", SchedulerSettings),
        rate_limits=_many(tables, "rate_limits", RateLimitSettings),
        targets=_many(tables, "targets", Target) or {ECHO_NAME: ECHO},
        projects=_many(tables, "projects", ProjectSettings),
        agents=_many(tables, "agents", AgentSettings),
        budgets=_many(tables, "budgets", BudgetSettings),
        quota=_one(tables, "quota", QuotaSettings),
        slots=_many(tables, "slots", SlotSettings),
        server=_one(tables, "server", ServerSettings),
        auth=_one(tables, "auth", AuthSettings),
        webhooks=_one(tables, "webhooks", WebhookSettings),
        store=_one(tables, "store", StoreSettings),
        ledger=_one(tables, "ledger", LedgerSettings),
        log=_one(tables, "log", LogSettings),
        telemetry=_one(tables, "telemetry", TelemetrySettings),
        dashboard=_one(tables, "dashboard", DashboardSettings),
    )
    settings.projects.setdefault(DEFAULT_PROJECT, ProjectSettings())
    check(settings)
    budgets(settings)
    return msgspec.structs.replace(settings, rate_limits=resolved_rate_limits(settings))


def _one(tables: Mapping[str, Table], section: str, kind: type[Section]) -> Section:
    return cast("Section", _decoded(tables[section], kind, (section,)))


def _many(tables: Mapping[str, Table], section: str, kind: Any) -> dict[str, Any]:  # noqa: ANN401
    check_names(section, tables[section])
    return {name: _decoded(table, kind, (section, name)) for name, table in tables[section].items()}


def _decoded(table: object, kind: Any, parts: tuple[str, ...]) -> Any:  # noqa: ANN401
    if not isinstance(table, dict):
        raise table_expected(parts, table)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, table, parts) from None
