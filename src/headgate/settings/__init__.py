"""The settings of the service: where they come from, what they may be, what they make."""

from headgate.settings.budgets import budgets
from headgate.settings.decoding import load_settings
from headgate.settings.rates import rate_limits, warnings_of
from headgate.settings.sections import (
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
from headgate.settings.sources import FILE_NAME, settings_file

__all__ = [
    "FILE_NAME",
    "AgentSettings",
    "AuthSettings",
    "BudgetSettings",
    "DashboardSettings",
    "LedgerSettings",
    "LogSettings",
    "ProjectSettings",
    "QuotaSettings",
    "RateLimitSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SlotSettings",
    "StoreSettings",
    "TelemetrySettings",
    "WebhookSettings",
    "budgets",
    "load_settings",
    "rate_limits",
    "settings_file",
    "warnings_of",
]
