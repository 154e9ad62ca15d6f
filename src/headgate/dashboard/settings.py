"""Settings: what is in force and where it was read, what the last reload changed, how the node is.

Rule: a value comes from `headgate.api.settings`, which hides what may be a secret
before anybody searches or draws it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from headgate.api.admin import patch, reloaded
from headgate.api.errors import ApiError
from headgate.api.schema.admin import (
    AgentPatchBody,
    BudgetPatchBody,
    ChangeBody,
    OverrideBody,
    PatchBody,
    ProjectPatchBody,
    SettingBody,
    SettingsBody,
    SlotPatchBody,
    TargetPatchBody,
)
from headgate.api.settings import SECTIONS, SettingsQuery, settings_body
from headgate.config.overrides import OverrideKind
from headgate.core.dispatch_state import DispatchState
from headgate.dashboard.forms import SETTINGS_FIELDS, changed_or_said
from headgate.dashboard.lists import ROWS, Part, address, first_of, number_in, part_at
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route

SETTINGS = "/ui/settings"
PAGE_ROWS = 100
MAX_CHANGES = 50
OVERRIDES_FROM = "overrides_from"
MAX_NODES = 50
MAX_TEXT = 200

_PATCHES: tuple[tuple[OverrideKind, type[PatchBody]], ...] = (
    ("projects", ProjectPatchBody),
    ("agents", AgentPatchBody),
    ("targets", TargetPatchBody),
    ("slots", SlotPatchBody),
    ("budgets", BudgetPatchBody),
)


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node or a worker that runs tasks: how many at once, and how many it runs now."""

    id: str
    agent_id: str
    capacity: int
    taken: int


async def show(view: View, _: str) -> Page:
    """Show the settings in force, and how the node is."""
    query = _query(view)
    body = await settings_body(view.api, query)
    nodes, more_nodes = _nodes(view)
    part = _part(view, query, body)
    context: dict[str, Any] = {
        "body": body,
        "part": part,
        "query": query,
        "sections": SECTIONS,
        "labels": SETTINGS_FIELDS,
        "is_all": not query.is_changed,
        "overrides": _overrides(view, body.overrides),
        "needs_restart": _changes(body.needs_restart),
        "changed": [] if body.last_reload is None else _changes(body.last_reload.changed),
        "most_changes": MAX_CHANGES,
        "health": view.api.engine.health(),
        "nodes": nodes,
        "more_nodes": more_nodes,
        "can_act": view.can("admin"),
    }
    return Page(template="settings.html", title="Settings", context=context)


def _query(view: View) -> SettingsQuery:
    """Read the filter; unless all are asked for, only what is not the default is shown."""
    given = view.request.query()
    section = given.get("section", "")
    if section and section not in SECTIONS:
        label = SETTINGS_FIELDS["section"]
        raise ApiError("invalid_field", f"{label}: must be one of {', '.join(SECTIONS)}")
    return SettingsQuery(
        section=section,
        text=given.get("text", "").strip()[:MAX_TEXT],
        is_changed=given.get("all") != "yes",
        first=number_in(given, "from"),
        limit=PAGE_ROWS,
    )


def _part(view: View, query: SettingsQuery, body: SettingsBody) -> Part[tuple[str, str, str]]:
    given, end = view.request.query(), query.first + PAGE_ROWS
    return Part(
        rows=[_row(one) for one in body.settings],
        first=query.first,
        count=body.matching,
        first_url=address(SETTINGS, {**given, "from": ""}) if query.first else None,
        next_url=address(SETTINGS, {**given, "from": str(end)}) if body.next_cursor else None,
    )


def _row(one: SettingBody) -> tuple[str, str, str]:
    return one.key, _written(one.value), one.origin


def _changes(changes: list[ChangeBody]) -> list[dict[str, str]]:
    return [
        {"key": one.key, "before": _written(one.before), "after": _written(one.after)}
        for one in changes
    ]


def _overrides(view: View, overrides: Sequence[OverrideBody]) -> Part[dict[str, Any]]:
    first = first_of(view, OVERRIDES_FROM)
    rows = [_override(one) for one in overrides[first : first + ROWS]]
    return part_at(view, rows, OVERRIDES_FROM, count=len(overrides))


def _override(one: OverrideBody) -> dict[str, Any]:
    return {
        "key": one.key,
        "value": _written(one.value),
        "file_value": "nothing" if one.file_value is None else _written(one.file_value),
        "at": one.at,
        "by": one.by,
        "fields": {"kind": one.kind, "name": one.name, "field": one.field},
    }


def _written(value: object) -> str:
    """Return a value about as a file has it."""
    return "none" if value is None else msgspec.json.encode(value).decode()


def _nodes(view: View) -> tuple[list[NodeRow], int]:
    """Return who runs tasks, as far as the node that dispatches knows; elsewhere nobody does."""
    dispatch_state = view.api.engine.outlook.dispatch_state
    rows = [] if dispatch_state is None else node_rows(dispatch_state)
    return rows[:MAX_NODES], max(0, len(rows) - MAX_NODES)


def node_rows(dispatch_state: DispatchState) -> list[NodeRow]:
    """Return the nodes and workers that the dispatcher knows, the nodes first."""
    in_flight = dispatch_state.in_flight
    taken = Counter(attempt.node_id for attempt in in_flight)
    rows = []
    for node_id in sorted(in_flight.known_nodes()):
        agent_id = in_flight.agent_of(node_id) or ""
        capacity = in_flight.workers_of(agent_id) if agent_id else in_flight.capacity
        rows.append(
            NodeRow(
                id=node_id,
                agent_id=agent_id,
                capacity=capacity.get(node_id, 0),
                taken=taken[node_id],
            )
        )
    return sorted(rows, key=lambda row: (row.agent_id, row.id))


async def reload(view: View, _: str, __: Form) -> Done:
    """Read the settings file again."""
    try:
        found = await reloaded(view.api, view.request)
    except ApiError as api_error:
        if api_error.body.code != "invalid_settings":
            raise
        said = f"nothing changed, because {api_error.body.error}."
        return Done(to=SETTINGS, said=said, is_error=True)
    changed, waiting = len(found.changed), len(found.needs_restart)
    said = "Headgate read the file; no key changed."
    if changed or waiting:
        said = (
            f"Headgate read the file; {_keys(changed)} changed, {_keys(waiting)} after a restart."
        )
    if found.kept:
        said += f" A 0 keeps what was: {', '.join(found.kept)}. The next start refuses it."
    return Done(to=SETTINGS, said=said)


def _keys(number: int) -> str:
    return {0: "no key", 1: "one key"}.get(number, f"{number} keys")


async def end_override(view: View, _: str, form: Form) -> Done:
    """Let the file say again what was changed beside it."""
    found = next((one for one in _PATCHES if one[0] == form.get("kind")), None)
    if found is None:
        raise ApiError("not_found", "there is no such override")
    kind, patch_type = found
    body = patch_type(reset=[form.get("field")])

    async def end() -> str:
        await patch(view.api, view.request, kind, form.get("name"), body)
        return "the value of the file applies again"

    return await changed_or_said(SETTINGS, end, SETTINGS_FIELDS)


ROUTES: tuple[PageRoute, ...] = (
    page_route(SETTINGS, show, needs="admin"),
    action_route(f"{SETTINGS}/reload", reload),
    action_route(f"{SETTINGS}/overrides/end", end_override),
)
