"""`headgate audit`: who changed what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import clock_time, print_json_lines, print_table

if TYPE_CHECKING:
    from headgate.api.schema.admin import AuditEntryBody


PAGE = 1_000
MAX_SHOWN = 100_000


@click.command(
    epilog="""\b
Examples:
  headgate audit
  headgate audit --limit 1000 --json | jq 'select(.action == "settings.reload")'
"""
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_SHOWN),
    default=50,
    show_default=True,
    help="How many to show.",
)
@connection_options
@json_option
def audit(*, limit: int, connection: Connection, as_json: bool) -> None:
    """Show who changed what, newest first; entries are kept for 90 days."""
    entries = _entries(connection, limit)
    if as_json:
        print_json_lines(entries)
        return
    header = ("at", "who", "what", "subject", "change")
    print_table("Changes", header, [_row(entry) for entry in entries])


def _entries(connection: Connection, limit: int) -> list[AuditEntryBody]:
    entries: list[AuditEntryBody] = []
    cursor: str | None = None
    with connect(connection) as client:
        while len(entries) < limit:
            page = client.audit(limit=min(PAGE, limit - len(entries)), cursor=cursor)
            entries += page.entries
            cursor = page.next_cursor
            if cursor is None:
                break
    return entries


def _row(entry: AuditEntryBody) -> tuple[str, ...]:
    at = clock_time(entry.at)
    return at, entry.actor, entry.action, entry.subject, _change(entry.detail)


def _change(detail: Any) -> str:  # noqa: ANN401
    if not isinstance(detail, dict):
        return ""
    return ", ".join(f"{key}: {_step(step)}" for key, step in detail.items())


def _step(step: Any) -> str:  # noqa: ANN401
    if isinstance(step, dict) and set(step) == {"from", "to"}:
        return f"{_text(step['from'])} → {_text(step['to'])}"
    return _text(step)


def _text(value: Any) -> str:  # noqa: ANN401
    return msgspec.json.encode(value).decode()
