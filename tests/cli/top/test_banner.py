"""The lines above and below the panes say whole things in any width, or show where they are cut."""

from __future__ import annotations

import msgspec
import pytest
from rich.cells import cell_len

from headgate.api.schema.tasks import (
    BudgetStatusBody,
    LimitsBody,
    MetricsBody,
    QueueBody,
    RecentBody,
    StatsBody,
)
from headgate.cli.top.banner import Part, cut, message_parts, total_parts
from headgate.cli.top.service_state import ServiceState

WIDTHS = (200, 160, 120, 100, 80, 70, 60, 40, 20)


def busy(*, paused: bool = False) -> ServiceState:
    """Return a picture whose totals need far more than eighty columns."""
    service = ServiceState()
    service.budgets = BudgetStatusBody(
        scope="", window="rolling:1h", spent_usd="1039.88", reserved_usd="0", overrun_usd="0",
        limit_usd="9180", remaining_usd="8140.12", spent_tokens=0, reserved_tokens=0,
        overrun_tokens=0,
    )  # fmt: skip
    counts = dict.fromkeys(
        ("tasks_submitted", "tasks_completed", "tasks_failed", "tasks_cancelled", "tasks_rejected",
         "tasks_expired", "dispatch_count"),
        0,
    )  # fmt: skip
    service.stats = StatsBody(
        queue=QueueBody(total_queued=9_876, total_inflight=1_234, agents={}),
        metrics=MetricsBody(**counts, avg_dispatch_latency_ms=1.0, agents={}),
        recent=RecentBody(seconds=300.0, dispatch_count=1, average_wait_seconds=83.5),
        config=LimitsBody(max_queue_size=100_000, max_inflight=20_000),
        paused=paused,
    )
    return service


def text(parts: list[Part]) -> str:
    return "".join(text for text, _ in parts).rstrip()


def rates(service: ServiceState, done: int, failed: int) -> ServiceState:
    """Have so many tasks end in a minute."""
    assert service.stats is not None
    for at, counts in ((0.0, (0, 0)), (60.0, (done, failed))):
        metrics = msgspec.structs.replace(
            service.stats.metrics, tasks_completed=counts[0], tasks_failed=counts[1]
        )
        service.throughput.add(msgspec.structs.replace(service.stats, metrics=metrics), at)
    return service


COUNTS = "queued 9,876  in flight 1,234  done 4,321/min  failed 12/min"
LIMITED = "queued 9,876 of 100k  in flight 1,234 of 20.0k  done 4,321/min  failed 12/min"
SPENT, LEFT, WAIT = "spent $1,039.88", "left $8,140.12", "wait 1 min 23 s"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, f"{LIMITED}  {SPENT}  {LEFT} of $9,180.00/1h  {WAIT}"),
        (126, f"{LIMITED}  {SPENT}  {LEFT} of $9,180.00/1h"),
        (120, f"{COUNTS}  {SPENT}  {LEFT}  {WAIT}"),
        (100, f"{COUNTS}  {SPENT}  {LEFT}"),
        (80, f"{COUNTS}  {SPENT}"),
        (70, COUNTS),
        (40, "queued 9,876  in flight 1,234"),
    ],
)
def test_limits_go_before_figures_do_and_what_is_spent_stays_in_eighty_columns(
    width: int, shown: str
) -> None:
    assert text(total_parts(rates(busy(), 4_321, 12), width=width)) == shown


def test_a_pause_of_everything_is_said_in_any_width() -> None:
    for width in WIDTHS:
        shown = text(total_parts(busy(paused=True), width=width))
        assert shown.startswith("PAUSED")
        assert cell_len(shown) <= width


def test_a_line_that_is_too_long_shows_that_it_was_cut() -> None:
    parts = [("connection ", "bold"), ("漢字漢字", "red")]
    assert text(cut(parts, 30)) == "connection 漢字漢字"
    assert text(cut(parts, 14)) == "connection 漢…"
    assert text(cut(parts, 8)) == "connect…"
    assert cut(parts, 0) == []


def test_a_long_text_to_look_for_leaves_room_for_what_is_said() -> None:
    shown = text(message_parts("Sorted.", ServiceState(), is_problem=False, wanted="x" * 200))
    assert shown.index("Sorted.") < 70
