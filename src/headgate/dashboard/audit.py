"""The audit log: who changed what, when, and from what to what."""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.api.admin import audit_list
from headgate.api.schema.admin import AuditEntryBody
from headgate.dashboard.lists import address
from headgate.dashboard.page import Page, PageRoute, View, page_route

AUDIT = "/ui/settings/audit"
PAGE_ROWS = 50
MAX_KEYS = 5
MAX_VALUE = 120


async def show(view: View, _: str) -> Page:
    """Show one page of changes, newest first."""
    cursor = view.request.query().get("cursor", "")
    found = await audit_list(view.api, {"limit": str(PAGE_ROWS), "cursor": cursor})
    context: dict[str, Any] = {
        "entries": [(entry, *_details(entry)) for entry in found.entries],
        "newest": AUDIT if cursor else None,
        "older": address(AUDIT, {"cursor": found.next_cursor}) if found.next_cursor else None,
    }
    return Page(template="audit.html", title="Audit log", context=context)


def _details(entry: AuditEntryBody) -> tuple[list[tuple[str, str]], int]:
    """Return what changed, key by key, and how many keys there are beside those."""
    detail = entry.detail
    if isinstance(detail, msgspec.Raw):
        detail = msgspec.json.decode(detail)
    if not isinstance(detail, dict):
        return [], 0
    pairs = [(key, _value(value)) for key, value in list(detail.items())[:MAX_KEYS]]
    return pairs, max(0, len(detail) - MAX_KEYS)


def _value(value: object) -> str:
    if isinstance(value, dict) and value.keys() == {"from", "to"}:
        return f"{_written(value['from'])} → {_written(value['to'])}"
    return _written(value)


def _written(value: object) -> str:
    text = "none" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


ROUTES: tuple[PageRoute, ...] = (page_route(AUDIT, show, needs="admin"),)
