"""What forms call their fields, one table for each form, and what is wrong with a field by it.

Templates take their labels from here and messages do too, so that a person finds the field that is
spoken of. Rule: a field without a label is called as whoever refused it calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.errors import InvalidFieldError
from headgate.web.refusals import Refusal

BUDGET_FIELDS = {
    "scope": "Scope",
    "limit_usd": "Dollars",
    "limit_tokens": "Tokens",
    "window": "Window",
}
PROJECT_FIELDS = {
    "credit_weight": "Weight",
    "max_concurrent_agents": "Cap on tasks in flight",
    "budget_limit": "Token budget",
    "status": "Status",
}
AGENT_FIELDS = {"capacity": "Capacity", "status": "Status"}
FILTER_FIELDS = {
    "text": "Text",
    "project": "Project",
    "agent": "Agent",
    "label": "Label",
    "state": "State",
    "target": "Target",
    "slot": "Slot",
    "provider": "Provider",
    "scope": "Budget",
    "since": "Submitted since (UTC)",
    "until": "Submitted before (UTC)",
}
WEBHOOK_FIELDS = {"state": "State", "task": "Task", "url": "Address"}
SETTINGS_FIELDS = {"text": "Text", "section": "Section", "reset": "Override"}
TOKEN_FIELDS = {
    "name": "Name",
    "permissions": "Permissions",
    "expiresAt": "Expires after",
    "agentId": "Only for the agent",
    "projectId": "Only for the project",
}


def told(error: InvalidFieldError | Refusal, labels: Mapping[str, str]) -> str:
    """Return what is wrong, by the label of the field that it is about."""
    field, whole = _field_of(error), str(error)
    # A setting is named by its whole path; its last part is the field of the form.
    label = labels.get(field.rpartition(".")[2])
    if label is None:
        return whole
    problem = whole.removeprefix(f"field '{field}': ").removeprefix(f"{field}: ")
    return f"{label}: {problem}"


def _field_of(error: InvalidFieldError | Refusal) -> str:
    if isinstance(error, InvalidFieldError):
        return error.field
    return str(error.body.details.get("field", ""))
