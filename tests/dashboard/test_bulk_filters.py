"""Which tasks a bulk action means: all that the filters say, and no more than were shown."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from dashboard.browser import Browser, serving, submit
from headgate.api.schema.admin import TaskFilterBody
from headgate.api.tasks import LIVE
from headgate.dashboard.tasks import TEXTS, Filters

PAUSED = '[projects.default]\nstatus = "paused"\n'
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
MEANT = {
    "text": TaskFilterBody(text="given"),
    "project": TaskFilterBody(project_id="given"),
    "agent": TaskFilterBody(agent_id="given"),
    "target": TaskFilterBody(target="given"),
    "slot": TaskFilterBody(slot="given"),
    "provider": TaskFilterBody(provider="given"),
    "scope": TaskFilterBody(scope="given"),
    "label": TaskFilterBody(label="given"),
    "since": TaskFilterBody(created_after=NOON),
    "until": TaskFilterBody(created_before=NOON),
}


def test_every_filter_of_the_list_holds_for_what_is_done_to_many() -> None:
    for name in TEXTS:
        value = "2026-01-31T12:00" if name in ("since", "until") else "given"
        assert Filters(texts={name: value}).body(LIVE) == MEANT[name]


async def test_no_more_are_cancelled_than_were_shown_where_there_may_be_more(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, PAUSED) as (_, app):
        for _ in range(3):
            await submit(app)
        browser = Browser(app)
        await browser.get("/ui/tasks/cancel")
        fields = {"counted": 1, "counted_at": "2099-01-01T00:00:00Z", "at_least": "yes"}
        _, said = await browser.act("/ui/tasks/cancel", fields)
    assert said == "Done: Cancelled: 1 task. 2 tasks more match; go on below."
