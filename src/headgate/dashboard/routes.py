"""Everything that the dashboard shows and does, page by page."""

from __future__ import annotations

from headgate.dashboard.budgets import ROUTES as BUDGET_ROUTES
from headgate.dashboard.overview import ROUTES as OVERVIEW_ROUTES
from headgate.dashboard.page import PageRoute
from headgate.dashboard.projects import ROUTES as PROJECT_ROUTES
from headgate.dashboard.settings_page import ROUTES as SETTINGS_ROUTES
from headgate.dashboard.slots import ROUTES as SLOT_ROUTES
from headgate.dashboard.task import ROUTES as TASK_ROUTES
from headgate.dashboard.tasks import ROUTES as TASKS_ROUTES
from headgate.dashboard.webhooks import ROUTES as WEBHOOK_ROUTES

ROUTES: tuple[PageRoute, ...] = (
    *OVERVIEW_ROUTES,
    *TASKS_ROUTES,
    *TASK_ROUTES,
    *PROJECT_ROUTES,
    *BUDGET_ROUTES,
    *SLOT_ROUTES,
    *WEBHOOK_ROUTES,
    *SETTINGS_ROUTES,
)
