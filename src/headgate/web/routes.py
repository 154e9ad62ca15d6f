"""The table of routes: everything that the service answers to, subject by subject."""

from __future__ import annotations

from headgate.bodies.tasks import BatchBody as SubmittedBatchBody
from headgate.bodies.tasks import (
    CancelledBody,
    ReadyBody,
    StatsBody,
    SubmittedBody,
    TaskListBody,
    WhyBody,
)
from headgate.intake.bodies import BatchBody, TaskBody
from headgate.task_snapshot import TaskSnapshot
from headgate.web.api import Route
from headgate.web.handlers.admin_routes import ADMIN_ROUTES, BULK_ROUTES
from headgate.web.handlers.budget_figures import ROUTES as BUDGET_FIGURE_ROUTES
from headgate.web.handlers.budgets import ROUTES as BUDGET_ROUTES
from headgate.web.handlers.events import ROUTES as EVENT_ROUTES
from headgate.web.handlers.keyed_submitting import submit_batch, submit_task
from headgate.web.handlers.lanes import ROUTES as LANE_ROUTES
from headgate.web.handlers.metrics import ROUTES as METRIC_ROUTES
from headgate.web.handlers.openapi import show_openapi
from headgate.web.handlers.running_settings import ROUTES as SETTINGS_ROUTES
from headgate.web.handlers.slots import ROUTES as SLOT_ROUTES
from headgate.web.handlers.status import show_alive, show_ready, show_stats
from headgate.web.handlers.tasks import QUERY_FIELDS as TASK_QUERY
from headgate.web.handlers.tasks import cancel_task, explain_task, list_tasks, show_task
from headgate.web.handlers.tokens import ROUTES as TOKEN_ROUTES
from headgate.web.handlers.usage import ROUTES as USAGE_ROUTES
from headgate.web.handlers.webhooks import ROUTES as WEBHOOK_ROUTES
from headgate.web.handlers.workers import ROUTES as WORKER_ROUTES

SUBMIT_REFUSES = (
    "unknown_project",
    "unknown_target",
    "unknown_slot",
    "unknown_provider",
    "unknown_parent",
    "draining",
    "idempotency_mismatch",
    "queue_full",
    "idempotency_full",
)

ROUTES = (
    Route(
        "POST",
        "/tasks",
        submit_task,
        "submit a task",
        "submit",
        takes=TaskBody,
        answers={202: SubmittedBody},
        refuses=SUBMIT_REFUSES,
        headers=("Idempotency-Key",),
    ),
    Route(
        "GET",
        "/tasks",
        list_tasks,
        "list tasks, newest or oldest first",
        "read",
        answers={200: TaskListBody},
        query=TASK_QUERY,
    ),
    Route(
        "POST",
        "/tasks/batch",
        submit_batch,
        "submit 1 to 50 tasks",
        "submit",
        takes=BatchBody,
        answers={202: SubmittedBatchBody},
        refuses=(*SUBMIT_REFUSES, "batch_empty", "batch_too_large"),
        headers=("Idempotency-Key",),
    ),
    Route("GET", "/tasks/{id}", show_task, "show a task", "read", answers={200: TaskSnapshot}),
    Route(
        "POST",
        "/tasks/{id}/cancel",
        cancel_task,
        "cancel a task",
        "cancel",
        answers={200: CancelledBody, 202: CancelledBody},
        refuses=("conflict",),
    ),
    Route(
        "GET",
        "/tasks/{id}/why",
        explain_task,
        "say why a task waits",
        "read",
        answers={200: WhyBody},
        refuses=("not_dispatching",),
    ),
    *BULK_ROUTES,
    *WORKER_ROUTES,
    *EVENT_ROUTES,
    *WEBHOOK_ROUTES,
    *BUDGET_ROUTES,
    *BUDGET_FIGURE_ROUTES,
    *USAGE_ROUTES,
    *TOKEN_ROUTES,
    Route(
        "GET", "/scheduler/stats", show_stats, "counts and limits", "read", answers={200: StatsBody}
    ),
    *LANE_ROUTES,
    *ADMIN_ROUTES,
    *SETTINGS_ROUTES,
    *SLOT_ROUTES,
    *METRIC_ROUTES,
    Route(
        "GET", "/livez", show_alive, "say that the process serves", None, answers={200: ReadyBody}
    ),
    Route(
        "GET",
        "/readyz",
        show_ready,
        "say whether this node takes and runs tasks",
        None,
        answers={200: ReadyBody},
        refuses=("not_ready",),
    ),
    Route(
        "GET",
        "/openapi.json",
        show_openapi,
        "describe the API to programs",
        None,
        answers={200: "application/json"},
    ),
)
