"""The table of the routes of administration."""

from __future__ import annotations

from headgate.bodies.admin import (
    AgentBody,
    AgentListBody,
    AgentPatchBody,
    AuditListBody,
    BudgetListBody,
    BudgetPatchBody,
    BulkCancelBody,
    BulkRetryBody,
    ProjectBody,
    ProjectListBody,
    ProjectPatchBody,
    ReloadBody,
    SwitchBody,
    TargetBody,
    TargetListBody,
    TargetPatchBody,
    TaskFilterBody,
)
from headgate.bodies.tasks import SubmittedBody
from headgate.web.api import Route
from headgate.web.handlers import administering, audit_log, bulk

AGAIN_REFUSES = (
    "conflict",
    "draining",
    "unknown_project",
    "unknown_target",
    "unknown_slot",
    "unknown_provider",
    "queue_full",
)

BULK_ROUTES = (
    Route(
        "POST",
        "/tasks/cancel",
        bulk.cancel_tasks,
        "count the tasks that match, or cancel them",
        "cancel",
        takes=TaskFilterBody,
        answers={200: BulkCancelBody},
        refuses=("not_found",),
    ),
    Route(
        "POST",
        "/tasks/retry",
        bulk.retry_tasks,
        "count the tasks that match, or try them again",
        "submit",
        takes=TaskFilterBody,
        answers={200: BulkRetryBody},
        refuses=("not_found",),
    ),
    Route(
        "POST",
        "/tasks/{id}/retry",
        bulk.retry_task,
        "make a new task of one that ended",
        "submit",
        answers={202: SubmittedBody},
        refuses=("missing_field", *AGAIN_REFUSES),
    ),
)

ADMIN_ROUTES = (
    Route(
        "POST",
        "/scheduler/pause",
        administering.pause,
        "start nothing new until it is resumed",
        answers={200: SwitchBody},
        refuses=("not_found",),
    ),
    Route(
        "POST",
        "/scheduler/resume",
        administering.resume,
        "start tasks again",
        answers={200: SwitchBody},
        refuses=("not_found",),
    ),
    Route(
        "POST",
        "/scheduler/reload",
        administering.reload,
        "read the settings file again",
        answers={200: ReloadBody},
        refuses=("not_found", "invalid_settings"),
    ),
    Route(
        "GET",
        "/projects",
        administering.list_projects,
        "list projects",
        "read",
        answers={200: ProjectListBody},
        refuses=("not_found",),
    ),
    Route(
        "GET",
        "/projects/{id}",
        administering.show_project,
        "show a project",
        "read",
        answers={200: ProjectBody},
    ),
    Route(
        "PATCH",
        "/projects/{id}",
        administering.change_project,
        "change a project: its weight, cap, budget or status",
        takes=ProjectPatchBody,
        answers={200: ProjectBody},
    ),
    Route(
        "GET",
        "/agents",
        administering.list_agents,
        "list agents",
        answers={200: AgentListBody},
        refuses=("not_found",),
    ),
    Route(
        "GET", "/agents/{id}", administering.show_agent, "show an agent", answers={200: AgentBody}
    ),
    Route(
        "PATCH",
        "/agents/{id}",
        administering.change_agent,
        "change an agent: its places, type or status",
        takes=AgentPatchBody,
        answers={200: AgentBody},
    ),
    Route(
        "GET",
        "/targets",
        administering.list_targets,
        "list targets",
        answers={200: TargetListBody},
        refuses=("not_found",),
    ),
    Route(
        "GET",
        "/targets/{id}",
        administering.show_target,
        "show a target",
        answers={200: TargetBody},
    ),
    Route(
        "PATCH",
        "/targets/{id}",
        administering.change_target,
        "pause, resume or drain a target",
        takes=TargetPatchBody,
        answers={200: TargetBody},
    ),
    Route(
        "GET",
        "/budgets",
        administering.list_budgets,
        "list the limits of budgets",
        answers={200: BudgetListBody},
        refuses=("not_found",),
    ),
    Route(
        "PATCH",
        "/budgets",
        administering.change_budget,
        "change the limits of a scope",
        takes=BudgetPatchBody,
        answers={200: BudgetListBody},
        query=administering.BUDGET_QUERY,
        refuses=("not_found",),
    ),
    Route(
        "GET",
        "/audit",
        audit_log.list_audit,
        "say who changed what, newest first",
        answers={200: AuditListBody},
        query=audit_log.QUERY_FIELDS,
        refuses=("not_found",),
    ),
)
