"""A task as a command that submits the same again.

Rule: what is pasted into a shell does what it shows. The JSON has nothing but ASCII in it, so no
character of a task hides another, and all of it is one quoted word. The token is a placeholder.
"""

from __future__ import annotations

import json
import shlex

import msgspec

from headgate.core.money import plain_usd
from headgate.core.tasks.records import TaskRecord
from headgate.core.texts.figures import iso

MAX_BODY_BYTES = 8_000
"""What a command line may carry; a larger task is tried again instead."""

BEARER = '-H "Authorization: Bearer $HEADGATE_TOKEN" '


def curl_of(record: TaskRecord, address: str, *, needs_token: bool) -> str | None:
    """Return the command; None if the task is too large for one."""
    given = record.submission
    if len(given.params or b"") + len(given.input or b"") > MAX_BODY_BYTES:
        return None
    body = json.dumps(_body(record))
    if len(body) > MAX_BODY_BYTES:
        return None
    bearer = BEARER if needs_token else ""
    return f"curl -s {bearer}{shlex.quote(address + '/tasks')} -d {shlex.quote(body)}"


def _body(record: TaskRecord) -> dict[str, object]:
    """Return what was submitted, as far as it was not the default or its time is over."""
    task, terms, given = record.task, record.terms, record.submission
    names_slot = terms.names_slot
    fields: dict[str, object] = {
        "agentId": task.agent_id,
        "projectId": task.project_id,
        "action": given.action,
        "tabId": given.tab_id,
        "selector": given.selector,
        "ref": given.ref,
        "params": _value(given.params),
        "input": _value(given.input),
        "priority": task.priority,
        "weight": task.weight if task.weight != 1 else None,
        "target": task.target,
        "slot": task.slot if names_slot else None,
        "provider": task.provider if names_slot else None,
        "estimate": _estimate(record),
        "scopes": list(task.scopes),
        "labels": given.labels,
        "maxAttempts": terms.max_attempts if terms.max_attempts != 1 else None,
        "onExhausted": terms.on_exhausted.value,
        "callbackUrl": terms.callback_url,
        "dependsOn": list(terms.depends_on),
        "onParentFailure": terms.on_parent_failure.value if terms.depends_on else None,
        "notBefore": _to_come(record),
    }
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _value(raw: msgspec.Raw | None) -> object:
    return json.loads(bytes(raw)) if raw else None


def _estimate(record: TaskRecord) -> dict[str, object]:
    tokens, micro_usd = record.task.estimate_tokens, record.terms.estimate_micro_usd
    given = {"tokens": tokens, "usd": plain_usd(micro_usd) if micro_usd else None}
    return {name: value for name, value in given.items() if value is not None}


def _to_come(record: TaskRecord) -> str | None:
    """Return the time that a task waits for; one that has started waits for none."""
    if record.progress.attempt or record.task.not_before is None or record.is_terminal:
        return None
    return iso(record.task.not_before)
