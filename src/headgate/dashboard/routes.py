"""Everything that the dashboard shows and does, page by page."""

from __future__ import annotations

from headgate.dashboard.page import PageRoute
from headgate.dashboard.pages.budgets import ROUTES as BUDGET_ROUTES
from headgate.dashboard.pages.overview import ROUTES as OVERVIEW_ROUTES
from headgate.dashboard.pages.projects import ROUTES as PROJECT_ROUTES
from headgate.dashboard.pages.settings import ROUTES as SETTINGS_ROUTES
from headgate.dashboard.pages.slots import ROUTES as SLOT_ROUTES
from headgate.dashboard.pages.task import ROUTES as TASK_ROUTES
from headgate.dashboard.pages.tasks import ROUTES as TASKS_ROUTES
from headgate.dashboard.pages.webhooks import ROUTES as WEBHOOK_ROUTES

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
