"""The rows of each pane, from what a service answers; money to the micro-dollar."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest
from rich.cells import cell_len

from headgate.api.schema.admin import LaneBody, LaneListBody, ProjectBody, ProjectListBody
from headgate.api.schema.calls import CallBody, CallWhyBody
from headgate.api.schema.tasks import (
    BudgetStatusBody,
    LimitsBody,
    MetricsBody,
    QueueBody,
    ReasonBody,
    StatsBody,
    WhyBody,
)
from headgate.cli.output import clock_time
from headgate.cli.top import rows as top_rows
from headgate.cli.top.panes import CALLS, SLOTS, WAITING, amount, note
from headgate.cli.top.rows import budget_rows, left_text, spent_text
from headgate.cli.top.service_state import (
    ServiceState,
    ShownTask,
    ShownTasks,
    Throughput,
    calls_by_upstream,
)
from headgate.cli.top.tables import (
    BAD,
    CAREFUL,
    ArrangedRows,
    Row,
    fitted,
    widths_of,
)
from headgate.core.call import CallState
from headgate.core.slots.status import NextWakeBody, SlotBody, SlotListBody
from headgate.core.task import TaskStatus
from headgate.core.task_view import ProgressBody

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC).timestamp()


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW + seconds, UTC)


def texts(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def call(upstream: str, state: CallState, seconds: float, number: int = 1) -> CallBody:
    return CallBody(
        call_id=f"call-{number}",
        state=state,
        project_id="search",
        agent_id="coder",
        model="gpt-5",
        upstream=upstream,
        created_at=moment(seconds),
    )


def test_calls_are_counted_by_upstream_with_the_one_that_waits_longest() -> None:
    waiting, running = CallState.WAITING, CallState.RUNNING
    found = calls_by_upstream(
        [
            call("b", running, -200),
            call("a", running, -90),
            call("a", waiting, -30, number=2),
            call("a", waiting, -75, number=3),
        ]
    )
    assert [(one.upstream, one.waiting, one.running) for one in found] == [("a", 2, 1), ("b", 0, 1)]
    longest = found[0].longest
    assert longest is not None
    assert longest.call_id == "call-3"


REASON = ReasonBody(detail={"reason": "upstream_full"}, message="openai is full")
CALL_REASONS: list[tuple[CallWhyBody | str | None, str]] = [
    (None, "…"),
    ("call not found", "call not found"),
    (CallWhyBody(call_id="call-1", state=CallState.WAITING), "starts now"),
    (CallWhyBody(call_id="call-1", state=CallState.RUNNING), "running"),
    (CallWhyBody(call_id="call-1", state=CallState.WAITING, reasons=(REASON,)), "openai is full"),
]


@pytest.mark.parametrize(("why", "text"), CALL_REASONS)
def test_an_upstream_shows_why_its_oldest_call_waits(
    why: CallWhyBody | str | None, text: str
) -> None:
    service = ServiceState()
    (one,) = calls_by_upstream([call("a", CallState.WAITING, -75)])
    service.calls = (msgspec.structs.replace(one, why=why),)
    (row,) = top_rows.call_rows(service, NOW)
    assert texts(row)[:3] == ["a", "1", "0"]
    assert texts(row)[4:] == ["search", "gpt-5", text]
    assert amount(CALLS, service) == "1"


def project(**given: object) -> ProjectBody:
    fields = {
        "id": "search", "name": "", "credit_weight": 2.0, "max_concurrent_agents": None,
        "budget_limit": None, "status": "active", "queued": 3, "inflight": 1,
        "configured": True, "overridden": [], **given,
    }  # fmt: skip
    return ProjectBody(**fields)  # type: ignore[arg-type]


def test_a_project_has_the_share_that_it_had_beside_its_target() -> None:
    service = ServiceState()
    body = project(
        target_share=0.4, actual_share=0.25, deficit=0.15, tokens=123_456, max_concurrent_agents=6
    )
    service.projects = ProjectListBody(projects=[body])
    (row,) = top_rows.project_rows(service, NOW)
    assert texts(row) == [
        "search", "active", "", "25 %", "40 %", "15 %", "3", "1", "6", "2", "123k",
    ]  # fmt: skip
    bar = row.cells[2].bar
    assert bar is not None
    assert (bar.used, bar.mark) == (0.25, 0.4)


def test_lanes_are_in_the_order_of_the_service() -> None:
    service = ServiceState()
    lanes = [
        LaneBody(project_id="p", agent_id="", queued=2, inflight=0, ready=1,
                 oldest_wait_seconds=61.0, load=4.0),
        LaneBody(project_id="p", agent_id="a0", queued=0, inflight=1),
    ]  # fmt: skip
    service.lanes = LaneListBody(lanes=lanes, count=2, strategy="load")
    rows = top_rows.lane_rows(service, NOW)
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
    service = ServiceState()
    half = ProgressBody(fraction=0.5, text="12 of 24", at=moment(-1))
    young = task(
        "young", started_at=moment(-5), agent_id="a", target="t", action="x", progress=half
    )
    given = task("given", state=TaskStatus.ASSIGNED, started_at=None, created_at=moment(-1))
    service.running = ShownTasks(tasks=(given, young, task("old")))
    rows = top_rows.running_rows(service, NOW)
    assert [row.key for row in rows] == ["old", "young", "given"]
    assert texts(rows[1]) == ["young", "5.0 s", "2/3", "a", "p", "t", "x", "50 %, 12 of 24"]
    assert texts(rows[2])[1] == "assigned"


def test_a_task_that_began_more_often_than_it_may_fail_is_not_counted_against_that() -> None:
    service = ServiceState()
    service.running = ShownTasks(tasks=(task("recovered", attempt=3, max_attempts=1),))
    assert texts(top_rows.running_rows(service, NOW)[0])[2] == "3"


def test_a_list_that_goes_on_says_that_the_oldest_are_shown() -> None:
    service = ServiceState()
    service.waiting = ShownTasks(tasks=(task("t", state=TaskStatus.QUEUED),), next_cursor="c")
    rows = top_rows.waiting_rows(service, NOW)
    said = note(WAITING, service, wanted="", found=ArrangedRows(rows, len(rows)))
    assert said == "The oldest 1 are shown; / finds others."


def test_a_clock_that_is_behind_that_of_the_service_shows_no_negative_time() -> None:
    service = ServiceState()
    service.running = ShownTasks(tasks=(task("t", started_at=moment(30)),))
    assert texts(top_rows.running_rows(service, NOW)[0])[1] == "0 ms"


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
                    ReasonBody(detail={}, message="project p is paused"),
                    ReasonBody(detail={}, message="agent a has 1 of 1 permits in use"),
                ),
            ),
            "project p is paused +1",
        ),
    ],
)
def test_a_waiting_task_says_its_first_reason_and_how_many_more(
    why: WhyBody | str | None, shown: str
) -> None:
    service = ServiceState()
    service.waiting = ShownTasks(tasks=(task("t", state=TaskStatus.QUEUED),))
    if why is not None:
        service.reasons["t"] = why
    assert texts(top_rows.waiting_rows(service, NOW)[0])[4] == shown


def slot(**given: object) -> SlotBody:
    fields = {
        "name": "work", "provider": "zai", "zone": "UTC", "state": "open", "enabled": True,
        "quota_from": "address", "quota_text": "", "limits": [],
        "wake_modes": [], "wakes_enabled": False, "wake_pending": False, "wake_errors": 0,
        "poll_errors": 0, **given,
    }  # fmt: skip
    return SlotBody(**fields)  # type: ignore[arg-type]


def test_a_slot_says_what_wakes_it_next_and_how_often_something_went_wrong() -> None:
    service = ServiceState()
    wake = NextWakeBody(at=moment(90), mode="after_reset", reason="", text="")
    tired = slot(next_wake=wake, poll_errors=2, wake_errors=1, last_error="no answer")
    service.slots = SlotListBody(slots=[tired], count=1)
    (row,) = top_rows.slot_rows(service, NOW)
    assert texts(row)[5:] == ["1 min 30 s", "after a reset", "3", "no answer"]


def test_a_wake_that_will_be_skipped_is_not_counted_down_to() -> None:
    service = ServiceState()
    text = "13:05 Europe/Berlin: skipped, the window is open until 14:41"
    until = moment(6_060)
    wake = NextWakeBody(
        at=moment(90), mode="times", reason="", text=text, is_skipped=True, open_until=until
    )
    service.slots = SlotListBody(slots=[slot(next_wake=wake)], count=1)
    (row,) = top_rows.slot_rows(service, NOW)
    words = f"the window is open until {clock_time(until)}"
    assert texts(row)[5:] == ["skipped", "at times of day", "0", words]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_columns_stay_where_they_are_while_their_times_count_down(width: int) -> None:
    def widths(seconds: float) -> list[int]:
        wake = NextWakeBody(at=moment(seconds), mode="after_reset", reason="", text="")
        held = slot(
            resets_at=moment(seconds), next_wake=wake, wait_reason="the provider is asked less"
        )
        service = ServiceState()
        service.slots = SlotListBody(slots=[held], count=1)
        return widths_of(SLOTS.columns, top_rows.slot_rows(service, NOW), width)

    counted = (-1.0, 0.4, 9.4, 10.0, 60.0, 239.0, 3_599.0, 86_399.0, 99 * 86_400.0)
    assert {tuple(widths(seconds)) for seconds in counted} == {tuple(widths(60.0))}


def stats(done: int, failed: int = 0) -> StatsBody:
    counts = dict.fromkeys(
        ("tasks_submitted", "tasks_cancelled", "tasks_rejected", "tasks_expired", "dispatch_count"),
        0,
    )
    metrics = MetricsBody(
        **counts, tasks_completed=done, tasks_failed=failed, avg_dispatch_latency_ms=0.0, agents={}
    )
    queue = QueueBody(total_queued=0, total_inflight=0, agents={})
    return StatsBody(queue=queue, metrics=metrics, config=LimitsBody())


LONG_REASON = (
    "scope session:load-test is closed: $0.30 of $0.30 are used or reserved, and $0.10 asked for"
)


@pytest.mark.parametrize(
    "message", [LONG_REASON, LONG_REASON * 20, "漢" * 100], ids=["long", "endless", "wide"]
)
@pytest.mark.parametrize("width", [80, 100, 120])
def test_how_many_more_reasons_there_are_is_seen_however_long_the_first_is(
    message: str, width: int
) -> None:
    service = ServiceState()
    waiting = task("t", state=TaskStatus.QUEUED)
    service.waiting = ShownTasks(tasks=(waiting,))
    reason = ReasonBody(detail={}, message=message)
    service.reasons["t"] = WhyBody(task_id="t", state=TaskStatus.QUEUED, reasons=(reason,) * 3)
    rows = top_rows.waiting_rows(service, NOW)
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


def budget(**given: object) -> BudgetStatusBody:
    fields = {
        "scope": "", "window": "none", "spent_usd": "0", "reserved_usd": "0", "overrun_usd": "0",
        "spent_tokens": 0, "reserved_tokens": 0, "overrun_tokens": 0, **given,
    }  # fmt: skip
    status = BudgetStatusBody(**fields)  # type: ignore[arg-type]
    used_usd = (status.spent_usd, status.reserved_usd, status.overrun_usd)
    if status.limit_usd is not None:
        status.remaining_usd = str(Decimal(status.limit_usd) - sum(map(Decimal, used_usd)))
    used_tokens = status.spent_tokens + status.reserved_tokens + status.overrun_tokens
    if status.limit_tokens is not None:
        status.remaining_tokens = status.limit_tokens - used_tokens
    return status


def test_a_budget_has_one_bar_of_whatever_is_nearer_to_its_limit() -> None:
    child = budget(
        scope="session:a/run:1", window="rolling:24h", limit_usd="10", spent_usd="2",
        overrun_usd="1", reserved_usd="1", limit_tokens=1000, spent_tokens=100,
        resets_at=moment(90),
    )  # fmt: skip
    service = ServiceState()
    service.budgets = budget(children=[budget(scope="session:a", children=[child])])
    rows = budget_rows(service, NOW)
    assert [texts(row)[0] for row in rows] == [
        "the whole service", "  session:a", "    run:1",
    ]  # fmt: skip
    assert texts(rows[0])[3] == "no limit"
    assert texts(rows[2])[2:] == [
        "$3.00", "$10.00, 1,000 tokens/24h", "-", "1 min 30 s", "100", "$1.00", "-",
    ]  # fmt: skip
    bar = rows[2].cells[1].bar
    assert bar is not None
    assert (round(bar.used, 3), round(bar.held, 3)) == (0.3, 0.1)


def test_a_limit_of_nothing_is_used_up() -> None:
    service = ServiceState()
    service.budgets = budget(limit_usd="0")
    (row,) = budget_rows(service, NOW)
    assert row.cells[1].bar is not None
    assert (row.cells[1].bar.used, row.cells[1].style) == (1.0, BAD)


def one(**given: object) -> list[str]:
    """Return the row of one scope."""
    service = ServiceState()
    service.budgets = budget(**given)
    return texts(budget_rows(service, NOW)[0])


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, "-"),
        ({"limit_usd": "10"}, "-"),
        ({"limit_usd": "10", "spent_usd": "4", "exhausted_at": moment(720)}, "12 min"),
        ({"limit_usd": "10", "spent_usd": "4", "reserved_usd": "6"}, "now"),
        ({"limit_usd": "10", "spent_usd": "4", "overrun_usd": "6.5"}, "now"),
        ({"limit_tokens": 5, "spent_tokens": 5, "exhausted_at": moment(-1)}, "now"),
    ],
)
def test_a_budget_says_when_it_ends_if_anybody_knows(given: dict[str, object], ends: str) -> None:
    assert one(**given)[4] == ends


def test_a_budget_has_the_colour_of_the_share_that_is_told_elsewhere() -> None:
    # The two parts, each rounded, are a little less than the eight tenths that they are together.
    service = ServiceState()
    service.budgets = budget(limit_usd="10", spent_usd="1", reserved_usd="7")
    assert budget_rows(service, NOW)[0].cells[1].style == CAREFUL


def test_money_is_added_up_to_the_micro_dollar() -> None:
    # As floats, these would be a micro-dollar less.
    status = budget(spent_usd="4503599627.370497", overrun_usd="4503599627.370498")
    assert spent_text(status) == "$9,007,199,254.74"
    service = ServiceState()
    service.budgets = status
    assert budget_rows(service, NOW)[0].cells[2].order == 9_007_199_254_740_995


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, ""),
        ({"remaining_usd": "140.12"}, "$140.12"),
        ({"remaining_usd": "-1.50", "remaining_tokens": 7}, "$0.00"),
        ({"remaining_tokens": 1_200_000}, "1.2M tokens"),
    ],
)
def test_what_is_left_is_never_less_than_nothing(given: dict[str, object], left: str) -> None:
    assert left_text(budget(**given)) == left
