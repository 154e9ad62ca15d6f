"""The page of events names every kind, field and parameter, with the figures of the code."""

from __future__ import annotations

import re

import msgspec

from doc_pages import ROOT, rows_under
from headgate.api.events import HEARTBEAT_SECONDS, QUERY_FIELDS
from headgate.api.http import connection
from headgate.api.shares import MAX_STREAMS
from headgate.core.events import MAX_ERROR_CHARACTERS, MEANINGS, EventKind, TaskEvent
from headgate.engine.events import MAX_EVENTS
from headgate.metrics import METRICS

PAGE = (ROOT / "docs/reference/events.md").read_text()
MONITOR = (ROOT / "docs/how-to/monitor.md").read_text()


def test_every_kind_is_documented() -> None:
    rows = rows_under(PAGE, "Kinds")
    assert rows == [[kind.value, MEANINGS[kind]] for kind in EventKind]


def test_every_field_is_documented() -> None:
    fields = [field.encode_name for field in msgspec.structs.fields(TaskEvent)]
    assert [row[0] for row in rows_under(PAGE, "Fields")] == fields


def test_every_parameter_is_documented() -> None:
    assert [row[0] for row in rows_under(PAGE, "Choosing events")] == list(QUERY_FIELDS)


def test_the_figures_are_those_of_the_code() -> None:
    figures = (
        f"{MAX_EVENTS:,} events",
        f"{MAX_STREAMS} streams",
        f"{HEARTBEAT_SECONDS:.0f} seconds without an event",
        f"nothing for {connection.TAKE_SECONDS:.0f} seconds",
        f"{MAX_ERROR_CHARACTERS} characters",
    )
    assert [figure for figure in figures if figure not in PAGE] == []


def test_every_metric_that_the_page_about_monitoring_names_exists() -> None:
    named = set(re.findall(r"\bheadgate_\w+", MONITOR))
    assert named <= METRICS.keys()
