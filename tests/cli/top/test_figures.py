"""The figures of each pane, from answers as a service gives them."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from rich.cells import cell_len

from headgate.api.schema.admin import LaneBody, LaneListBody, ProjectBody, ProjectListBody
from headgate.api.schema.tasks import (
    LimitsShown,
    MetricsBody,
    QueueBody,
    ReasonBody,
    StatsBody,
    WhyBody,
)
from headgate.cli.top import rows as top_rows
from headgate.cli.top.panes import PANES, SLOTS, WAITING, PaneKind, note
from headgate.cli.top.picture import Picture, ShownTask, ShownTasks, Throughput
from headgate.cli.top.tables import (
    GAP,
    Arranged,
    Holds,
    Row,
    fitted,
    number_cell,
    since_cell,
    text_cell,
    widths_of,
)
from headgate.core.slots.status import NextWakeBody, SlotBody, SlotListBody
from headgate.core.slots.wakes import ENDED, WakeMode, mode_words
from headgate.core.task import TaskStatus

TIMES = ("oldest", "time", "waits", "ends", "room in", "resets", "wake")
"""The columns of times, in whichever pane they are."""
NOW = datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW + seconds, UTC)


def texts(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def project(**given: object) -> ProjectBody:
    fields = {
        "id": "search", "name": "", "credit_weight": 2.0, "max_concurrent_agents": None,
        "budget_limit": None, "status": "active", "queued": 3, "inflight": 1,
        "configured": True, "overridden": [], **given,
    }  # fmt: skip
    return ProjectBody(**fields)  # type: ignore[arg-type]


def test_a_project_has_the_share_that_it_had_beside_its_target() -> None:
    picture = Picture()
    body = project(
        target_share=0.4, actual_share=0.25, deficit=0.15, tokens=123_456, max_concurrent_agents=6
    )
    picture.projects = ProjectListBody(projects=[body])
    (row,) = top_rows.project_rows(picture, NOW)
    assert texts(row) == [
        "search", "active", "", "25 %", "40 %", "15 %", "3", "1", "6", "2", "123k",
    ]  # fmt: skip
    bar = row.cells[2].bar
    assert bar is not None
    assert (bar.used, bar.mark) == (0.25, 0.4)


def test_where_nobody_knows_shares_none_is_made_up() -> None:
    picture = Picture()
    picture.projects = ProjectListBody(projects=[project()])
    (row,) = top_rows.project_rows(picture, NOW)
    assert texts(row)[2:6] == ["-", "-", "-", "-"]
    assert texts(row)[8:] == ["-", "2", "-"]


def test_lanes_are_in_the_order_of_the_service() -> None:
    picture = Picture()
    lanes = [
        LaneBody(project_id="p", agent_id="", queued=2, inflight=0, ready=1,
                 oldest_wait_seconds=61.0, load=4.0),
        LaneBody(project_id="p", agent_id="a0", queued=0, inflight=1),
    ]  # fmt: skip
    picture.lanes = LaneListBody(lanes=lanes, count=2, strategy="load")
    rows = top_rows.lane_rows(picture, NOW)
    assert texts(rows[0]) == ["(any)", "p", "2", "1", "0", "1 min 1 s", "4.00", ""]
    assert texts(rows[1]) == ["a0", "p", "0", "-", "1", "-", "-", "-"]


def task(task_id: str, **given: object) -> ShownTask:
    fields = {
        "task_id": task_id, "project_id": "p", "state": TaskStatus.RUNNING,
        "created_at": moment(-100), "started_at": moment(-90), "attempt": 2, "max_attempts": 3,
        **given,
    }  # fmt: skip
    return ShownTask(**fields)  # type: ignore[arg-type]


def test_what_runs_longest_comes_first_and_what_is_assigned_has_not_begun() -> None:
    picture = Picture()
    young = task("young", started_at=moment(-5), agent_id="a", target="t", action="x")
    given = task("given", state=TaskStatus.ASSIGNED, started_at=None, created_at=moment(-1))
    picture.running = ShownTasks(tasks=(given, young, task("old")))
    rows = top_rows.running_rows(picture, NOW)
    assert [row.key for row in rows] == ["old", "young", "given"]
    assert texts(rows[1]) == ["young", "5.0 s", "2/3", "a", "p", "t", "x"]
    assert texts(rows[2])[1] == "assigned"


def test_a_task_that_began_more_often_than_it_may_fail_is_not_counted_against_that() -> None:
    picture = Picture()
    picture.running = ShownTasks(tasks=(task("recovered", attempt=3, max_attempts=1),))
    assert texts(top_rows.running_rows(picture, NOW)[0])[2] == "3"


def test_a_list_that_goes_on_says_that_the_oldest_are_shown() -> None:
    picture = Picture()
    picture.waiting = ShownTasks(tasks=(task("t", state=TaskStatus.QUEUED),), next_cursor="c")
    rows = top_rows.waiting_rows(picture, NOW)
    said = note(WAITING, picture, wanted="", found=Arranged(rows, len(rows)))
    assert said == "The oldest 1 are shown; / finds others."


def test_a_clock_that_is_behind_that_of_the_service_shows_no_negative_time() -> None:
    picture = Picture()
    picture.running = ShownTasks(tasks=(task("t", started_at=moment(30)),))
    assert texts(top_rows.running_rows(picture, NOW)[0])[1] == "0 ms"


@pytest.mark.parametrize(
    ("why", "shown"),
    [
        (None, "…"),
        ("this node does not dispatch", "this node does not dispatch"),
        (WhyBody(task_id="t", state=TaskStatus.QUEUED, reasons=()), "starts now"),
        (WhyBody(task_id="t", state=TaskStatus.DONE, reasons=()), "done"),
        (
            WhyBody(
                task_id="t",
                state=TaskStatus.QUEUED,
                reasons=(
                    ReasonBody(hold={}, message="project p is paused"),
                    ReasonBody(hold={}, message="agent a has 1 of 1 places in use"),
                ),
            ),
            "project p is paused +1",
        ),
    ],
)
def test_a_waiting_task_says_its_first_reason_and_how_many_more(
    why: WhyBody | str | None, shown: str
) -> None:
    picture = Picture()
    picture.waiting = ShownTasks(tasks=(task("t", state=TaskStatus.QUEUED),))
    if why is not None:
        picture.reasons["t"] = why
    assert texts(top_rows.waiting_rows(picture, NOW)[0])[4] == shown


def slot(**given: object) -> SlotBody:
    fields = {
        "name": "work", "provider": "zai", "state": "open", "enabled": True, "limits": [],
        "wake_modes": [], "wakes_enabled": False, "wake_pending": False, "wake_errors": 0,
        "poll_errors": 0, **given,
    }  # fmt: skip
    return SlotBody(**fields)  # type: ignore[arg-type]


def test_a_slot_counts_down_to_its_reset_and_says_what_holds_its_tasks() -> None:
    picture = Picture()
    full = slot(state="exhausted", percent_used=100.0, resets_at=moment(3700), hold="used up")
    picture.slots = SlotListBody(slots=[full, slot(state="unknown")], count=2)
    rows = top_rows.slot_rows(picture, NOW)
    assert texts(rows[0]) == [
        "work", "exhausted", "", "100 %", "1 h 1 min", "-", "-", "0", "used up",
    ]  # fmt: skip
    assert texts(rows[1])[2:7] == ["-", "-", "-", "-", "-"]
    assert texts(top_rows.slot_rows(picture, NOW + 3700)[0])[4] == ENDED


def test_a_slot_that_is_disabled_says_that_once() -> None:
    picture = Picture()
    why = "disabled, the provider refused the key"
    picture.slots = SlotListBody(slots=[slot(state="disabled", hold=why)], count=1)
    (row,) = top_rows.slot_rows(picture, NOW)
    assert (texts(row)[1], texts(row)[-1]) == ("disabled", "the provider refused the key")


def test_a_slot_says_what_wakes_it_next_and_how_often_something_went_wrong() -> None:
    picture = Picture()
    wake = NextWakeBody(at=moment(90), mode="after_reset", reason="after_reset mode (1 min)")
    tired = slot(next_wake=wake, poll_errors=2, wake_errors=1, last_error="no answer")
    picture.slots = SlotListBody(slots=[tired], count=1)
    (row,) = top_rows.slot_rows(picture, NOW)
    assert texts(row)[5:] == ["1 min 30 s", "after a reset", "3", "no answer"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_columns_stay_where_they_are_while_their_times_count_down(width: int) -> None:
    def widths(seconds: float) -> list[int]:
        wake = NextWakeBody(at=moment(seconds), mode="after_reset", reason="")
        held = slot(resets_at=moment(seconds), next_wake=wake, hold="the provider is asked less")
        picture = Picture()
        picture.slots = SlotListBody(slots=[held], count=1)
        return widths_of(SLOTS.columns, top_rows.slot_rows(picture, NOW), width)

    counted = (-1.0, 0.4, 9.4, 10.0, 60.0, 239.0, 3_599.0, 86_399.0, 99 * 86_400.0)
    assert {tuple(widths(seconds)) for seconds in counted} == {tuple(widths(60.0))}


@pytest.mark.parametrize("kind", PANES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seconds", [0.4, 9.4, 3_599.0, 86_399.0])
def test_a_time_is_whole_in_eighty_columns(kind: PaneKind, seconds: float) -> None:
    others = {Holds.FIGURE: number_cell("12.3k", 12_300.0)}
    cells = [
        since_cell(seconds)
        if column.title in TIMES
        else others.get(column.holds, text_cell("x" * 60))
        for column in kind.columns
    ]
    widths = widths_of(kind.columns, [Row(key="a", cells=tuple(cells))], 80)
    shown = {
        fitted(cell, column, width).strip()
        for cell, column, width in zip(cells, kind.columns, widths, strict=True)
        if column.title in TIMES
    }
    assert shown <= {since_cell(seconds).text}


@pytest.mark.parametrize("mode", [*(mode.value for mode in WakeMode), "retry"])
def test_the_words_for_a_wake_have_their_room_wherever_their_column_is_shown(mode: str) -> None:
    picture = Picture()
    wake = NextWakeBody(at=moment(90), mode=mode, reason="")
    busy = slot(next_wake=wake, last_error="x" * 200, state="exhausted", resets_at=moment(90_000))
    picture.slots = SlotListBody(slots=[busy], count=1)
    rows = top_rows.slot_rows(picture, NOW)
    woken = [column.title for column in SLOTS.columns].index("woken")
    widths = widths_of(SLOTS.columns, rows, SLOTS.columns[woken].from_width)
    shown = fitted(rows[0].cells[woken], SLOTS.columns[woken], widths[woken])
    assert shown.rstrip() == mode_words(mode)
    assert sum(widths) + len(GAP) * (len(widths) - 1) <= SLOTS.columns[woken].from_width


def stats(done: int, failed: int = 0) -> StatsBody:
    counts = dict.fromkeys(
        ("tasks_submitted", "tasks_cancelled", "tasks_rejected", "tasks_expired", "dispatch_count"),
        0,
    )
    metrics = MetricsBody(
        **counts, tasks_completed=done, tasks_failed=failed, avg_dispatch_latency_ms=0.0, agents={}
    )
    queue = QueueBody(total_queued=0, total_inflight=0, agents={})
    return StatsBody(queue=queue, metrics=metrics, config=LimitsShown())


LONG_REASON = (
    "scope session:load-test is closed: $0.30 of $0.30 are used or reserved, and $0.10 asked for"
)


@pytest.mark.parametrize(("width", "least"), [(80, 37), (100, 57), (120, 77)])
def test_a_long_reason_has_the_room_that_long_names_leave(width: int, least: int) -> None:
    picture = Picture()
    waiting = task(
        f"tsk_{'x' * 26}", state=TaskStatus.QUEUED, agent_id="researcher-large-1",
        project_id="research-of-the-spring", created_at=moment(-3_599),
    )  # fmt: skip
    picture.waiting = ShownTasks(tasks=(waiting,))
    picture.reasons[waiting.task_id] = WhyBody(
        task_id=waiting.task_id,
        state=TaskStatus.QUEUED,
        reasons=(ReasonBody(hold={}, message=LONG_REASON),),
    )
    rows = top_rows.waiting_rows(picture, NOW)
    assert widths_of(WAITING.columns, rows, width)[4] >= least


@pytest.mark.parametrize(
    "message", [LONG_REASON, LONG_REASON * 20, "漢" * 100], ids=["long", "endless", "wide"]
)
@pytest.mark.parametrize("width", [80, 100, 120])
def test_how_many_more_reasons_there_are_is_seen_however_long_the_first_is(
    message: str, width: int
) -> None:
    picture = Picture()
    waiting = task("t", state=TaskStatus.QUEUED)
    picture.waiting = ShownTasks(tasks=(waiting,))
    reason = ReasonBody(hold={}, message=message)
    picture.reasons["t"] = WhyBody(task_id="t", state=TaskStatus.QUEUED, reasons=(reason,) * 3)
    rows = top_rows.waiting_rows(picture, NOW)
    room = widths_of(WAITING.columns, rows, width)[4]
    shown = fitted(rows[0].cells[4], WAITING.columns[4], room)
    assert shown.rstrip().endswith("… +2") or shown.rstrip() == f"{message} +2"
    assert cell_len(shown) == room


def test_throughput_is_that_of_the_last_minute() -> None:
    throughput = Throughput()
    throughput.add(stats(0), 0.0)
    assert throughput.per_minute() is None
    for second in range(2, 602, 2):
        throughput.add(stats(second * 10, second), float(second))
    rates = throughput.per_minute()
    assert rates is not None
    assert [round(rate) for rate in rates] == [600, 60]


def test_counts_that_go_back_are_those_of_another_store() -> None:
    throughput = Throughput()
    throughput.add(stats(1000), 0.0)
    throughput.add(stats(5), 10.0)
    assert throughput.per_minute() is None
    throughput.add(stats(15), 20.0)
    assert throughput.per_minute() == (60.0, 0.0)


def test_a_list_keeps_nothing_of_what_clients_sent() -> None:
    sent = {"taskId": "t", "projectId": "p", "state": "queued", "createdAt": "2030-01-31T12:00:00Z"}
    page = {"tasks": [{**sent, "params": {"x": "y" * 1000}, "result": [1]}], "count": 1}
    read = msgspec.json.decode(msgspec.json.encode(page), type=ShownTasks)
    assert msgspec.json.encode(read.tasks[0]).count(b"y" * 10) == 0
