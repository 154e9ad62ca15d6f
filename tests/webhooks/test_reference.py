"""The page about webhooks names every event, header, try and field, and no other."""

from __future__ import annotations

import msgspec

from doc_pages import ROOT, rows_under
from headgate.engine.budget_alerts import AlertBody
from headgate.engine.webhooks import WAITS_SECONDS
from headgate.storage.deliveries import ALERT_EVENT, PING_EVENT, DeliveryState
from headgate.storage.unit_of_work import TASK_EVENTS

PAGE = (ROOT / "docs/reference/webhooks.md").read_text()
UNITS = {"second": 1, "minute": 60, "hour": 3_600}


def first_cells(heading: str) -> list[str]:
    return [row[0] for row in rows_under(PAGE, heading)]


def test_every_event_and_state_is_documented() -> None:
    assert first_cells("Events") == [*TASK_EVENTS.values(), ALERT_EVENT, PING_EVENT]
    assert first_cells("States") == [state.value for state in DeliveryState]


def test_the_waits_between_tries_are_those_of_the_program() -> None:
    shown = [row[1].split() for row in rows_under(PAGE, "Tries")][1:]
    assert [int(count) * UNITS[unit.rstrip("s")] for count, unit in shown] == list(WAITS_SECONDS)


def test_every_field_of_an_alert_is_documented() -> None:
    fields = msgspec.structs.fields(AlertBody)
    assert first_cells("Budget alerts") == [field.encode_name for field in fields]
