"""The reference of the HTTP API names every route, field, parameter and code, and no other."""

from __future__ import annotations

import msgspec

from doc_pages import ROOT, rows_under
from headgate.intake.bodies import BATCH_FIELDS, TASK_FIELDS
from headgate.task_snapshot import TaskSnapshot
from headgate.web.api import LimitsShown
from headgate.web.refusals import CODES
from headgate.web.routes import ROUTES
from headgate.web.status import MetricsBody, QueueBody
from headgate.web.tasks import QUERY_FIELDS

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


def test_every_query_parameter_is_documented() -> None:
    assert named("Listing tasks") == list(QUERY_FIELDS)


def test_every_figure_of_the_stats_is_documented() -> None:
    section = PAGE.split("## Counts and limits")[1].split("\n## ")[0]
    for kind in (QueueBody, MetricsBody, LimitsShown):
        assert all(f"`{name}`" in section for name in names_of(kind))
