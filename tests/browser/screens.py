"""Every screen of the dashboard, by name and address."""

from __future__ import annotations

SCREENS = {
    "overview": "/",
    "tasks": "/ui/tasks",
    "projects": "/ui/projects",
    "budgets": "/ui/budgets",
    "slots": "/ui/slots",
    "webhooks": "/ui/webhooks",
    "settings": "/ui/settings",
}
