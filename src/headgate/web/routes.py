"""The table of routes: everything that the service answers to, subject by subject."""

from __future__ import annotations

from headgate.web.api import Route
from headgate.web.status import show_alive, show_ready, show_stats
from headgate.web.submitting import submit_batch, submit_task
from headgate.web.tasks import cancel_task, explain_task, list_tasks, show_task

ROUTES = (
    Route("POST", "/tasks", submit_task, "submit a task", "submit"),
    Route("GET", "/tasks", list_tasks, "list tasks, newest first", "read"),
    Route("POST", "/tasks/batch", submit_batch, "submit 1 to 50 tasks", "submit"),
    Route("GET", "/tasks/{id}", show_task, "show a task", "read"),
    Route("POST", "/tasks/{id}/cancel", cancel_task, "cancel a task", "cancel"),
    Route("GET", "/tasks/{id}/why", explain_task, "say why a task waits", "read"),
    Route("GET", "/scheduler/stats", show_stats, "counts and limits", "read"),
    Route("GET", "/livez", show_alive, "say that the process serves", None),
    Route("GET", "/readyz", show_ready, "say whether this node takes and runs tasks", None),
)
