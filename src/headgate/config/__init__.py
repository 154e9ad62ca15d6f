"""The settings of the service: where they come from, what they may be, what they make."""

from headgate.config.budget_limits import budgets, rate_limits, warnings_of
from headgate.config.loading import load_prices, load_settings
from headgate.config.settings import (
    AgentSettings,
    AuthSettings,
    BudgetSettings,
    DashboardSettings,
    LedgerSettings,
    LogSettings,
    PriceSettings,
    ProjectSettings,
    QuotaSettings,
    RateLimitSettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    SlotSettings,
    StoreSettings,
    TelemetrySettings,
    WebhookSettings,
)
from headgate.config.sources import FILE_NAME, settings_file

__all__ = [
    "FILE_NAME",
    "AgentSettings",
    "AuthSettings",
    "BudgetSettings",
    "DashboardSettings",
    "LedgerSettings",
    "LogSettings",
    "PriceSettings",
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
    "load_prices",
    "load_settings",
    "rate_limits",
    "settings_file",
    "warnings_of",
]
