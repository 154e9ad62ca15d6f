"""Slots at the desk: held ones park their tasks, and a provider's tasks get the one with room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from core.desk_model import START, desk_of, ended, queued, settings, taken
from headgate.core.dispatch_plan import Planned
from headgate.core.dispatch_state import Desk, refit
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import GateClosed
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import Agent, LanePolicy
from headgate.core.task import TaskRecord, TaskStatus
from headgate.core.why import Reason, reasons
from headgate.errors import utc_time

RESET = START + 3_600
USED_UP = "exhausted, 100% used"


def open_slot(name: str, percent: float | None = None, provider: str = "zai") -> SlotStanding:
    return SlotStanding(name=name, provider=provider, percent_used=percent, resets_at=RESET)


def held_slot(name: str, until: float | None = RESET, why: str = USED_UP) -> SlotStanding:
    hold = GateClosure(kind="slot", name=name, until=until, why=why)
    return SlotStanding(name=name, provider="zai", hold=hold, percent_used=100.0, resets_at=until)


def paused(name: str, until: float, why: str = "429") -> GateClosure:
    return GateClosure(kind="slot", name=name, until=until, why=why)


def planned(desk: Desk, now: float = START) -> list[tuple[str, str | None]]:
    return [(line.task.id, line.slot) for line in desk.plan(now, most=100)]


def only_line(desk: Desk, now: float = START) -> Planned:
    (line,) = desk.plan(now, most=100)
    return line


def why(desk: Desk, task_id: str = "t1", now: float = START) -> list[GateClosed]:
    holds = [reason.hold for reason in reasons(desk, task_id, now)]
    return [hold for hold in holds if isinstance(hold, GateClosed)]


def with_slots(*standings: SlotStanding, records: Sequence[TaskRecord], **fields: object) -> Desk:
    desk = desk_of(**fields)  # type: ignore[arg-type]
    desk.set_slots(standings)
    for record in records:
        desk.see(record, START)
    return desk


def test_a_held_slot_parks_its_tasks_and_no_others() -> None:
    records = [queued("t1", slot="work"), queued("t2", slot="home"), queued("t3")]
    desk = with_slots(held_slot("work"), open_slot("home"), records=records)
    assert planned(desk) == [("t2", None), ("t3", None)]


@pytest.mark.parametrize("until", [RESET, START + 1, START - 1, None])
def test_only_another_standing_opens_a_held_slot(until: float | None) -> None:
    desk = with_slots(held_slot("work", until), records=[queued("t1", slot="work")])
    assert desk.next_at() is None, "its time is only shown"
    for now in (START, START + 2, RESET + 1):
        assert desk.fall_due(now) == []
        assert planned(desk, now) == []
    desk.set_slots([open_slot("work")])
    assert planned(desk, RESET + 1) == [("t1", None)]


def test_a_slot_that_left_the_file_holds_nothing_any_more() -> None:
    desk = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    desk.set_slots([])
    assert planned(desk) == [("t1", None)]


def test_a_slot_that_nobody_configured_is_a_name_that_limits_are_counted_on() -> None:
    desk = with_slots(records=[queued("t1", slot="label")])
    desk.close(paused("label", START + 9), START)
    assert planned(desk) == []
    desk.fall_due(START + 9)
    assert planned(desk, START + 9) == [("t1", None)]


@pytest.mark.parametrize("pause_first", [True, False])
def test_the_end_of_a_pause_does_not_open_a_slot_that_is_held(pause_first: bool) -> None:
    desk = with_slots(records=[queued("t1", slot="work")])
    steps: list[Callable[[], None]] = [
        lambda: desk.close(paused("work", START + 9), START),
        lambda: desk.set_slots([held_slot("work")]),
    ]
    for step in steps if pause_first else reversed(steps):
        step()
    assert [hold.why for hold in why(desk)] == [USED_UP, "429"]
    desk.fall_due(START + 9)
    assert planned(desk, START + 9) == []
    assert desk.next_at() is None, "nothing is due again and again"
    desk.set_slots([open_slot("work")])
    assert planned(desk, START + 9) == [("t1", None)]


def test_the_end_of_a_hold_does_not_end_a_pause() -> None:
    desk = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    desk.close(paused("work", START + 9), START)
    desk.set_slots([open_slot("work")])
    assert planned(desk) == []
    assert [hold.why for hold in why(desk)] == ["429"]
    assert desk.next_at() == START + 9
    desk.fall_due(START + 9)
    assert planned(desk, START + 9) == [("t1", None)]


def test_a_pause_of_an_administrator_and_one_of_a_provider_end_apart() -> None:
    desk = desk_of(queued("t1", target="t"), paused_targets=("t",))
    desk.close(GateClosure(kind="target", name="t", until=START + 9, why="429"), START)
    assert [hold.why for hold in why(desk)] == ["paused by an administrator", "429"]
    refit(desk, settings())
    assert planned(desk) == []
    desk.fall_due(START + 9)
    assert planned(desk, START + 9) == [("t1", None)]


def test_the_reason_of_a_slot_has_its_percentage_and_its_reset() -> None:
    desk = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    (reason,) = reasons(desk, "t1", START)
    assert reason.hold == GateClosed(
        kind="slot", name="work", until=RESET, why=USED_UP, percent_used=100.0, resets_at=RESET
    )
    assert reason.message == f"slot work is closed: {USED_UP}, until {utc_time(RESET)}"
    assert reason.until == RESET


def test_the_reason_of_a_pause_tells_of_the_quota_what_it_does_not_say_itself() -> None:
    desk = with_slots(open_slot("work", 42.5), records=[queued("t1", slot="work")])
    desk.close(paused("work", START + 9), START)
    (reason,) = reasons(desk, "t1", START)
    expected = f"slot work is closed: 429, 42.5% used, resets at {utc_time(RESET)}"
    assert reason.message == f"{expected}, until {utc_time(START + 9)}"


def test_a_task_of_a_provider_gets_the_slot_with_the_most_headroom() -> None:
    slots = [open_slot("a", 80), open_slot("b", 20), open_slot("c", 5, provider="openai")]
    desk = with_slots(*slots, records=[queued("t1", provider="zai")])
    assert planned(desk) == [("t1", "b")]


def test_tasks_of_a_provider_spread_over_slots_that_are_used_alike() -> None:
    records = [queued(f"t{number}", provider="zai") for number in range(3)]
    desk = with_slots(open_slot("a", 5), open_slot("b", 5), records=records)
    assert [slot for _, slot in planned(desk)] == ["a", "b", "a"]
    assert desk.flights.by_slot == {"a": 2, "b": 1}


def test_named_slots_count_for_the_choice_as_well() -> None:
    records = [queued("t1", slot="a"), queued("t2", provider="zai")]
    desk = with_slots(open_slot("a", 5), open_slot("b", 5), records=records)
    assert planned(desk) == [("t1", None), ("t2", "b")]


def test_a_provider_holds_its_tasks_while_all_of_its_slots_are_closed() -> None:
    records = [queued("t1", provider="zai"), queued("t2")]
    desk = with_slots(held_slot("a"), open_slot("b", 5), records=records)
    desk.close(paused("b", START + 9), START)
    assert planned(desk) == [("t2", None)]
    (hold,) = why(desk)
    assert (hold.kind, hold.name, hold.until) == ("provider", "zai", START + 9)
    assert hold.why == f"none of its slots is open: a ({USED_UP}), b (429)"
    desk.fall_due(START + 9)
    assert planned(desk, START + 9) == [("t1", "b")]


def test_a_provider_opens_with_the_first_of_its_slots() -> None:
    desk = with_slots(held_slot("a"), held_slot("b"), records=[queued("t1", provider="zai")])
    assert planned(desk) == []
    desk.set_slots([held_slot("a"), open_slot("b")])
    assert planned(desk) == [("t1", "b")]


def test_a_provider_without_slots_holds_its_tasks_until_one_is_configured() -> None:
    desk = with_slots(records=[queued("t1", provider="zai")])
    assert planned(desk) == []
    (hold,) = why(desk)
    assert "no slot of zai is configured" in hold.why
    desk.set_slots([open_slot("new")])
    assert planned(desk) == [("t1", "new")]
    desk.set_slots([])
    desk.see(queued("t2", provider="zai"), START)
    assert planned(desk) == []


def test_a_429_pauses_the_slot_that_was_given_and_the_next_attempt_gets_another() -> None:
    record = queued("t1", provider="zai")
    desk = with_slots(open_slot("a", 5), open_slot("b", 50), records=[record])
    line = only_line(desk)
    assert line.slot == "a"
    desk.close(paused("a", START + 60), START)
    desk.see(ended(taken(record, line), TaskStatus.QUEUED), START)
    assert planned(desk) == [("t1", "b")]


def test_what_a_store_refuses_leaves_its_slot_again() -> None:
    record = queued("t1", provider="zai")
    desk = with_slots(open_slot("a", 5), records=[record])
    desk.refuse(only_line(desk), record, None, START)
    assert desk.flights.by_slot == {}
    assert planned(desk) == [("t1", "a")]


def test_a_desk_that_is_loaded_counts_the_slots_of_attempts_under_way() -> None:
    record = queued("t1", provider="zai")
    line = only_line(with_slots(open_slot("a", 5), records=[record]))
    running = taken(record, line)
    desk = desk_of()
    desk.load_more([running], START)
    assert desk.flights.by_slot == {"a": 1}


def requests(slot: str, most: int) -> RateLimit:
    return RateLimit(kind="slot", name=slot, unit="requests", most=most, window_seconds=60)


def tokens(slot: str, most: int) -> RateLimit:
    return RateLimit(kind="slot", name=slot, unit="tokens", most=most, window_seconds=3_600)


def test_the_limit_of_a_slot_counts_what_was_given_to_it() -> None:
    records = [queued(f"t{number}", provider="zai") for number in range(4)]
    desk = with_slots(
        open_slot("a", 5),
        open_slot("b", 50),
        records=records,
        rate_limits=(requests("a", 2), requests("b", 1)),
        agents=(Agent(id="a", capacity=9),),
    )
    assert [slot for _, slot in planned(desk)] == ["a", "a", "b"]
    (hold,) = why(desk, "t3")
    assert (hold.kind, hold.until) == ("provider", START + 61)
    assert planned(desk) == []
    desk.fall_due(START + 61)
    assert planned(desk, START + 61) == [("t3", "a")]


def test_a_task_that_one_slot_can_never_hold_gets_another() -> None:
    record = queued("t1", provider="zai", estimate_tokens=500)
    desk = with_slots(
        open_slot("small", 0), open_slot("large", 90), records=[record],
        rate_limits=(tokens("small", 100),),
    )  # fmt: skip
    assert planned(desk) == [("t1", "large")]


def test_a_task_that_no_open_slot_can_hold_waits_alone_and_is_tried_again() -> None:
    records = [
        queued("t1", provider="zai", estimate_tokens=500),
        queued("t2", provider="zai", estimate_tokens=50),
    ]
    desk = with_slots(
        open_slot("small", 0), held_slot("large"), records=records,
        rate_limits=(tokens("small", 100),),
    )  # fmt: skip
    assert planned(desk) == [("t2", "small")]
    assert planned(desk) == []
    assert "can never hold it" in why(desk)[0].why
    desk.set_slots([open_slot("small", 0), open_slot("large", 50)])
    desk.fall_due(START + 60)
    assert planned(desk, START + 60) == [("t1", "large")]


def test_gates_are_as_they_were_after_all_lanes_were_built_again() -> None:
    records = [queued("t1", slot="work"), queued("t2", provider="zai"), queued("t3")]
    desk = with_slots(held_slot("work"), records=records)
    refit(desk, settings(lane_policy=LanePolicy.HIGHEST_LOAD))
    assert planned(desk) == [("t3", None)]
    desk.set_slots([open_slot("work")])
    assert sorted(planned(desk)) == [("t1", None), ("t2", "work")]


def test_many_tasks_behind_a_held_slot_cost_a_round_nothing() -> None:
    records = [queued(f"t{number:05}", provider="zai") for number in range(2_000)]
    desk = with_slots(held_slot("a"), records=[*records, queued("z")])
    assert desk.index.ready("x") == 1
    assert planned(desk) == [("z", None)]
    assert desk.closures.is_closed(GatePart("provider", "zai"))


def test_whatever_holds_a_task_of_a_slot_is_told() -> None:
    desk = with_slots(
        held_slot("work"), records=[queued("t1", slot="work", target="t")], paused_targets=("t",)
    )
    found: list[Reason] = list(reasons(desk, "t1", START))
    kinds = [reason.hold.kind for reason in found if isinstance(reason.hold, GateClosed)]
    assert kinds == ["target", "slot"], "what somebody paused may last longer than a window"
