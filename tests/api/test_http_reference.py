"""The reference of the HTTP API names every route, field, parameter and code, and no other."""

from __future__ import annotations

import msgspec

from doc_pages import ROOT, rows_under
from headgate.api.app import ROUTES
from headgate.api.errors import CODES
from headgate.api.schema.admin import (
    DeliveryBody,
    DeliveryTryBody,
    JournalBody,
    JournalEntryBody,
    LaneBody,
    LaneListBody,
    LastReloadBody,
    OverrideBody,
    PingBody,
    PingedBody,
    ProjectBody,
    SecretBody,
    SettingBody,
    SettingsBody,
)
from headgate.api.schema.tasks import (
    AdjustBody,
    BudgetStatusBody,
    CommitBody,
    LimitsBody,
    MetricsBody,
    NewTokenBody,
    QueueBody,
    RecentBody,
    ReservationBody,
    ReserveBody,
    SettledBody,
    StoreBody,
    UsageRowBody,
)
from headgate.api.schema.workers import (
    BeatBody,
    ClaimBody,
    ClaimedBody,
    CompleteBody,
    FailBody,
    HeartbeatBody,
    UsedBody,
)
from headgate.api.settings import QUERY_FIELDS as SETTINGS_QUERY
from headgate.api.submission import BATCH_FIELDS, TASK_FIELDS
from headgate.api.tasks import QUERY_FIELDS
from headgate.api.usage import USAGE_QUERY
from headgate.api.webhooks import QUERY_FIELDS as WEBHOOK_QUERY
from headgate.core.slots.status import (
    LoopBody,
    NextWakeBody,
    QuotaLimitBody,
    SlotBody,
    SlotListBody,
    SlotLogBody,
)
from headgate.core.task_view import AttemptBody, TaskSnapshot
from headgate.storage.tokens import PERMISSIONS

PAGE = (ROOT / "docs/reference/http-api.md").read_text()


def names_of(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def named(heading: str) -> list[str]:
    return [row[0] for row in rows_under(PAGE, heading)]


def test_every_route_is_documented() -> None:
    rows = rows_under(PAGE, "Routes")
    assert rows == [[route.method, route.path, route.summary] for route in ROUTES]


def test_every_error_code_is_documented() -> None:
    rows = rows_under(PAGE, "Error codes")
    assert rows == [
        [code, str(kind.status), kind.meaning.strip("`")] for code, kind in CODES.items()
    ]


def test_every_field_of_a_submission_is_documented() -> None:
    assert named("Submitting a task") == list(TASK_FIELDS)
    section = PAGE.split("## Submitting a batch")[1].split("\n## ")[0]
    assert all(f"`{field}`" in section for field in BATCH_FIELDS)


def test_every_field_of_a_snapshot_is_documented() -> None:
    assert named("Showing a task") == names_of(TaskSnapshot)
    section = PAGE.split("## Showing a task")[1].split("\n## ")[0]
    assert [name for name in names_of(AttemptBody) if f"`{name}`" not in section] == []


def test_every_query_parameter_is_documented() -> None:
    assert named("Listing tasks") == list(QUERY_FIELDS)


def test_every_figure_of_the_stats_is_documented() -> None:
    section = PAGE.split("## Counts and limits")[1].split("\n## ")[0]
    for kind in (QueueBody, MetricsBody, RecentBody, LimitsBody, StoreBody, LaneListBody, LaneBody):
        assert all(f"`{name}`" in section for name in names_of(kind))


def test_every_figure_of_a_project_is_documented() -> None:
    section = PAGE.split("## Administration")[1].split("\n## ")[0]
    figures = ("queued", "inflight", "targetShare", "actualShare", "deficit", "tokens")
    assert set(figures) <= set(names_of(ProjectBody))
    assert [name for name in figures if f"`{name}`" not in section] == []


def test_every_field_of_a_webhook_is_documented() -> None:
    assert named("Webhooks") == names_of(DeliveryBody)
    section = PAGE.split("## Webhooks")[1].split("\n## ")[0]
    for field in (
        *WEBHOOK_QUERY,
        *names_of(DeliveryTryBody),
        *names_of(PingBody),
        *names_of(PingedBody),
        *names_of(SecretBody),
    ):
        assert f"`{field}`" in section or f'"{field}"' in section


def test_every_field_of_workers_is_documented() -> None:
    assert named("Pulling tasks") == names_of(ClaimBody)
    section = PAGE.split("## Pulling tasks")[1].split("\n## ")[0]
    for kind in (ClaimedBody, HeartbeatBody, BeatBody, CompleteBody, FailBody, UsedBody):
        assert all(f"`{name}`" in section for name in names_of(kind)), kind


def test_every_field_of_a_wish_for_a_token_is_documented() -> None:
    assert named("Tokens") == names_of(NewTokenBody)


def test_every_field_of_a_budget_is_documented() -> None:
    assert named("Budgets") == names_of(ReserveBody)
    assert set(names_of(CommitBody)) <= set(names_of(ReserveBody))
    section = PAGE.split("## Budgets\n")[1].split("\n## ")[0]
    bodies = (ReservationBody, SettledBody, BudgetStatusBody, JournalBody, JournalEntryBody)
    listed = [name for kind in bodies for name in names_of(kind) if not name.endswith("Tokens")]
    assert [name for name in listed if f"`{name}`" not in section] == []


def test_every_field_of_an_adjustment_is_documented() -> None:
    assert named("Adjustments") == names_of(AdjustBody)


def test_every_parameter_and_figure_of_usage_is_documented() -> None:
    assert named("Usage") == list(USAGE_QUERY)
    section = PAGE.split("## Usage\n")[1].split("\n## ")[0]
    assert [name for name in names_of(UsageRowBody) if f"`{name}`" not in section] == []


def test_every_field_of_a_slot_is_documented() -> None:
    assert named("Key slots") == names_of(SlotBody)
    section = PAGE.split("## Key slots\n")[1].split("\n## ")[0]
    inner = (SlotListBody, QuotaLimitBody, NextWakeBody, LoopBody, SlotLogBody)
    listed = [name for kind in inner for name in names_of(kind)]
    assert [name for name in listed if f"`{name}`" not in section] == []


def test_every_figure_of_the_settings_is_documented() -> None:
    section = PAGE.split("## Administration\n")[1].split("\n## ")[0]
    bodies = (SettingsBody, SettingBody, OverrideBody, LastReloadBody)
    listed = [*SETTINGS_QUERY, *(name for kind in bodies for name in names_of(kind))]
    assert [name for name in listed if f"`{name}" not in section] == []


def test_every_permission_is_documented() -> None:
    assert named("Who is let in") == list(PERMISSIONS)
