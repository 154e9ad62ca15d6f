"""Putting the dashboard on the application of a service, unless it is switched off."""

from __future__ import annotations

from headgate.dashboard.dashboard import Dashboard
from headgate.settings.sections import DashboardMode
from headgate.web.app import App


def attach_dashboard(app: App, mode: DashboardMode) -> None:
    """Serve the pages at `/` and below `/ui`; what is off is not there at all."""
    if mode == "off":
        return
    app.serve_pages(Dashboard(app.api, mode))
