"""Slots: those without room park their tasks, and a provider's tasks get the one with room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from core.dispatch_model import START, ended, queued, settings, state_of, taken
from headgate.core.dispatch_state import DispatchState, Planned
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import GateClosed
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import Agent, LanePolicy
from headgate.core.task import TaskRecord, TaskStatus
from headgate.core.why import TaskReason, reasons
from headgate.errors import utc_time

RESET = START + 3_600
USED_UP = "exhausted, 100% used"


def open_slot(name: str, percent: float | None = None, provider: str = "zai") -> SlotStanding:
    return SlotStanding(name=name, provider=provider, percent_used=percent, resets_at=RESET)


def held_slot(name: str, until: float | None = RESET, why: str = USED_UP) -> SlotStanding:
    hold = GateClosure(kind="slot", name=name, until=until, why=why)
    return SlotStanding(
        name=name, provider="zai", closure=hold, percent_used=100.0, resets_at=until
    )


def paused(name: str, until: float, why: str = "429") -> GateClosure:
    return GateClosure(kind="slot", name=name, until=until, why=why)


def planned(dispatch_state: DispatchState, now: float = START) -> list[tuple[str, str | None]]:
    return [(line.task.id, line.slot) for line in dispatch_state.plan(now, most=100)]


def only_line(dispatch_state: DispatchState, now: float = START) -> Planned:
    (line,) = dispatch_state.plan(now, most=100)
    return line


def why(dispatch_state: DispatchState, task_id: str = "t1", now: float = START) -> list[GateClosed]:
    holds = [reason.detail for reason in reasons(dispatch_state, task_id, now)]
    return [hold for hold in holds if isinstance(hold, GateClosed)]


def with_slots(
    *standings: SlotStanding, records: Sequence[TaskRecord], **fields: object
) -> DispatchState:
    dispatch_state = state_of(**fields)  # type: ignore[arg-type]
    dispatch_state.set_slots(standings)
    for record in records:
        dispatch_state.observe(record, START)
    return dispatch_state


def test_a_held_slot_parks_its_tasks_and_no_others() -> None:
    records = [queued("t1", slot="work"), queued("t2", slot="home"), queued("t3")]
    dispatch_state = with_slots(held_slot("work"), open_slot("home"), records=records)
    assert planned(dispatch_state) == [("t2", None), ("t3", None)]


@pytest.mark.parametrize("until", [RESET, START + 1, START - 1, None])
def test_only_another_standing_opens_a_held_slot(until: float | None) -> None:
    dispatch_state = with_slots(held_slot("work", until), records=[queued("t1", slot="work")])
    assert dispatch_state.next_at() is None, "its time is only shown"
    for now in (START, START + 2, RESET + 1):
        assert dispatch_state.fall_due(now).expired == []
        assert planned(dispatch_state, now) == []
    dispatch_state.set_slots([open_slot("work")])
    assert planned(dispatch_state, RESET + 1) == [("t1", None)]


def test_a_slot_that_left_the_file_holds_nothing_any_more() -> None:
    dispatch_state = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    dispatch_state.set_slots([])
    assert planned(dispatch_state) == [("t1", None)]


def test_a_slot_that_nobody_configured_is_a_name_that_limits_are_counted_on() -> None:
    dispatch_state = with_slots(records=[queued("t1", slot="label")])
    dispatch_state.close(paused("label", START + 9), START)
    assert planned(dispatch_state) == []
    dispatch_state.fall_due(START + 9)
    assert planned(dispatch_state, START + 9) == [("t1", None)]


@pytest.mark.parametrize("pause_first", [True, False])
def test_the_end_of_a_pause_does_not_open_a_slot_that_is_held(pause_first: bool) -> None:
    dispatch_state = with_slots(records=[queued("t1", slot="work")])
    steps: list[Callable[[], None]] = [
        lambda: dispatch_state.close(paused("work", START + 9), START),
        lambda: dispatch_state.set_slots([held_slot("work")]),
    ]
    for step in steps if pause_first else reversed(steps):
        step()
    assert [hold.why for hold in why(dispatch_state)] == [USED_UP]
    dispatch_state.fall_due(START + 9)
    assert planned(dispatch_state, START + 9) == []
    assert dispatch_state.next_at() is None, "nothing is due again and again"
    dispatch_state.set_slots([open_slot("work")])
    assert planned(dispatch_state, START + 9) == [("t1", None)]


def test_the_end_of_a_hold_does_not_end_a_pause() -> None:
    dispatch_state = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    dispatch_state.close(paused("work", START + 9), START)
    dispatch_state.set_slots([open_slot("work")])
    assert planned(dispatch_state) == []
    assert [hold.why for hold in why(dispatch_state)] == ["429"]
    assert dispatch_state.next_at() == START + 9
    dispatch_state.fall_due(START + 9)
    assert planned(dispatch_state, START + 9) == [("t1", None)]


def test_a_pause_of_an_administrator_and_one_of_a_provider_end_apart() -> None:
    dispatch_state = state_of(queued("t1", target="t"), paused_targets=("t",))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 9, why="429"), START)
    assert [hold.why for hold in why(dispatch_state)] == ["paused by an administrator", "429"]
    dispatch_state.refit(settings())
    assert planned(dispatch_state) == []
    dispatch_state.fall_due(START + 9)
    assert planned(dispatch_state, START + 9) == [("t1", None)]


def test_the_reason_of_a_slot_has_its_percentage_and_its_reset() -> None:
    dispatch_state = with_slots(held_slot("work"), records=[queued("t1", slot="work")])
    (reason,) = reasons(dispatch_state, "t1", START)
    assert reason.detail == GateClosed(
        kind="slot", name="work", until=RESET, why=USED_UP, percent_used=100.0, resets_at=RESET
    )
    assert reason.message == f"slot work is closed: {USED_UP}, until {utc_time(RESET)}"
    assert reason.until == RESET


def test_the_reason_of_a_pause_tells_of_the_quota_what_it_does_not_say_itself() -> None:
    dispatch_state = with_slots(open_slot("work", 42.5), records=[queued("t1", slot="work")])
    dispatch_state.close(paused("work", START + 9), START)
    (reason,) = reasons(dispatch_state, "t1", START)
    expected = f"slot work is closed: 429, 42.5% used, resets at {utc_time(RESET)}"
    assert reason.message == f"{expected}, until {utc_time(START + 9)}"


def test_a_task_of_a_provider_gets_the_slot_with_the_most_headroom() -> None:
    slots = [open_slot("a", 80), open_slot("b", 20), open_slot("c", 5, provider="openai")]
    dispatch_state = with_slots(*slots, records=[queued("t1", provider="zai")])
    assert planned(dispatch_state) == [("t1", "b")]


def test_tasks_of_a_provider_spread_over_slots_that_are_used_alike() -> None:
    records = [queued(f"t{number}", provider="zai") for number in range(3)]
    dispatch_state = with_slots(open_slot("a", 5), open_slot("b", 5), records=records)
    assert [slot for _, slot in planned(dispatch_state)] == ["a", "b", "a"]
    assert dispatch_state.in_flight.by_slot == {"a": 2, "b": 1}


def test_named_slots_count_for_the_choice_as_well() -> None:
    records = [queued("t1", slot="a"), queued("t2", provider="zai")]
    dispatch_state = with_slots(open_slot("a", 5), open_slot("b", 5), records=records)
    assert planned(dispatch_state) == [("t1", None), ("t2", "b")]


def test_a_provider_holds_its_tasks_while_all_of_its_slots_are_closed() -> None:
    records = [queued("t1", provider="zai"), queued("t2")]
    dispatch_state = with_slots(held_slot("a"), open_slot("b", 5), records=records)
    dispatch_state.close(paused("b", START + 9), START)
    assert planned(dispatch_state) == [("t2", None)]
    (hold,) = why(dispatch_state)
    assert (hold.kind, hold.name, hold.until) == ("provider", "zai", START + 9)
    assert hold.why == f"none of its slots is open: a ({USED_UP}), b (429)"
    dispatch_state.fall_due(START + 9)
    assert planned(dispatch_state, START + 9) == [("t1", "b")]


def test_a_provider_opens_with_the_first_of_its_slots() -> None:
    dispatch_state = with_slots(
        held_slot("a"), held_slot("b"), records=[queued("t1", provider="zai")]
    )
    assert planned(dispatch_state) == []
    dispatch_state.set_slots([held_slot("a"), open_slot("b")])
    assert planned(dispatch_state) == [("t1", "b")]


def test_a_provider_without_slots_holds_its_tasks_until_one_is_configured() -> None:
    dispatch_state = with_slots(records=[queued("t1", provider="zai")])
    assert planned(dispatch_state) == []
    (hold,) = why(dispatch_state)
    assert "no slot of zai is configured" in hold.why
    dispatch_state.set_slots([open_slot("new")])
    assert planned(dispatch_state) == [("t1", "new")]
    dispatch_state.set_slots([])
    dispatch_state.observe(queued("t2", provider="zai"), START)
    assert planned(dispatch_state) == []


def test_a_429_pauses_the_slot_that_was_given_and_the_next_attempt_gets_another() -> None:
    record = queued("t1", provider="zai")
    dispatch_state = with_slots(open_slot("a", 5), open_slot("b", 50), records=[record])
    line = only_line(dispatch_state)
    assert line.slot == "a"
    dispatch_state.close(paused("a", START + 60), START)
    dispatch_state.observe(ended(taken(record, line), TaskStatus.QUEUED), START)
    assert planned(dispatch_state) == [("t1", "b")]


def test_what_a_store_refuses_leaves_its_slot_again() -> None:
    record = queued("t1", provider="zai")
    dispatch_state = with_slots(open_slot("a", 5), records=[record])
    dispatch_state.refuse(only_line(dispatch_state), record, None, START)
    assert dispatch_state.in_flight.by_slot == {}
    assert planned(dispatch_state) == [("t1", "a")]


def test_a_state_that_is_loaded_counts_the_slots_of_attempts_under_way() -> None:
    record = queued("t1", provider="zai")
    line = only_line(with_slots(open_slot("a", 5), records=[record]))
    running = taken(record, line)
    dispatch_state = state_of()
    dispatch_state.load_more([running], START)
    assert dispatch_state.in_flight.by_slot == {"a": 1}


def requests(slot: str, most: int) -> RateLimit:
    return RateLimit(kind="slot", name=slot, unit="requests", most=most, window_seconds=60)


def tokens(slot: str, most: int) -> RateLimit:
    return RateLimit(kind="slot", name=slot, unit="tokens", most=most, window_seconds=3_600)


def test_the_limit_of_a_slot_counts_what_was_given_to_it() -> None:
    records = [queued(f"t{number}", provider="zai") for number in range(4)]
    dispatch_state = with_slots(
        open_slot("a", 5),
        open_slot("b", 50),
        records=records,
        rate_limits=(requests("a", 2), requests("b", 1)),
        agents=(Agent(id="a", capacity=9),),
    )
    assert [slot for _, slot in planned(dispatch_state)] == ["a", "a", "b"]
    (hold,) = why(dispatch_state, "t3")
    assert (hold.kind, hold.until) == ("provider", START + 61)
    assert planned(dispatch_state) == []
    dispatch_state.fall_due(START + 61)
    assert planned(dispatch_state, START + 61) == [("t3", "a")]


def test_a_task_that_one_slot_can_never_hold_gets_another() -> None:
    record = queued("t1", provider="zai", estimate_tokens=500)
    dispatch_state = with_slots(
        open_slot("small", 0), open_slot("large", 90), records=[record],
        rate_limits=(tokens("small", 100),),
    )  # fmt: skip
    assert planned(dispatch_state) == [("t1", "large")]


def test_a_task_that_no_open_slot_can_hold_waits_alone_and_is_tried_again() -> None:
    records = [
        queued("t1", provider="zai", estimate_tokens=500),
        queued("t2", provider="zai", estimate_tokens=50),
    ]
    dispatch_state = with_slots(
        open_slot("small", 0), held_slot("large"), records=records,
        rate_limits=(tokens("small", 100),),
    )  # fmt: skip
    assert planned(dispatch_state) == [("t2", "small")]
    assert planned(dispatch_state) == []
    assert "can never take it" in why(dispatch_state)[0].why
    dispatch_state.set_slots([open_slot("small", 0), open_slot("large", 50)])
    dispatch_state.fall_due(START + 60)
    assert planned(dispatch_state, START + 60) == [("t1", "large")]


def test_gates_are_as_they_were_after_all_lanes_were_built_again() -> None:
    records = [queued("t1", slot="work"), queued("t2", provider="zai"), queued("t3")]
    dispatch_state = with_slots(held_slot("work"), records=records)
    dispatch_state.refit(settings(lane_policy=LanePolicy.HIGHEST_LOAD))
    assert planned(dispatch_state) == [("t3", None)]
    dispatch_state.set_slots([open_slot("work")])
    assert sorted(planned(dispatch_state)) == [("t1", None), ("t2", "work")]


def test_many_tasks_behind_a_held_slot_cost_a_round_nothing() -> None:
    records = [queued(f"t{number:05}", provider="zai") for number in range(2_000)]
    dispatch_state = with_slots(held_slot("a"), records=[*records, queued("z")])
    assert dispatch_state.index.ready("x") == 1
    assert planned(dispatch_state) == [("z", None)]
    assert dispatch_state.closures.is_closed(GatePart("provider", "zai"))


def test_whatever_holds_a_task_of_a_slot_is_told() -> None:
    dispatch_state = with_slots(
        held_slot("work"), records=[queued("t1", slot="work", target="t")], paused_targets=("t",)
    )
    found: list[TaskReason] = list(reasons(dispatch_state, "t1", START))
    kinds = [reason.detail.kind for reason in found if isinstance(reason.detail, GateClosed)]
    assert kinds == ["target", "slot"], "what somebody paused may last longer than a window"


def test_a_slot_takes_as_many_tasks_as_its_own_bound_allows() -> None:
    records = [queued(f"t{number}", slot="work") for number in (1, 2, 3)]
    dispatch_state = with_slots(open_slot("work"), records=records, slot_permits={"work": 2})
    first, second = dispatch_state.plan(START, most=100)
    assert (first.task.id, second.task.id) == ("t1", "t2")
    (closed,) = why(dispatch_state, "t3")
    assert "slots.work.max_inflight = 2" in closed.message
    dispatch_state.observe(ended(taken(records[0], first), TaskStatus.DONE), START)
    assert planned(dispatch_state) == [("t3", None)]


def test_what_is_left_open_goes_to_a_slot_that_is_not_full() -> None:
    records = [queued(f"t{number}", provider="zai") for number in (1, 2, 3)]
    slots = (open_slot("work", 1.0), open_slot("home", 2.0))
    permits = {"work": 1, "home": 1}
    dispatch_state = with_slots(*slots, records=records, slot_permits=permits)
    assert planned(dispatch_state) == [("t1", "work"), ("t2", "home")]
    (closed,) = why(dispatch_state, "t3")
    assert closed.kind == "provider"
    dispatch_state.refit(settings(slot_permits={"work": 2}))
    assert planned(dispatch_state) == [("t3", "work")]


def test_a_full_slot_that_is_used_up_meanwhile_stays_closed() -> None:
    records = [queued(f"t{number}", slot="work") for number in (1, 2)]
    dispatch_state = with_slots(open_slot("work"), records=records, slot_permits={"work": 1})
    line = only_line(dispatch_state)
    dispatch_state.set_slots([held_slot("work")])
    dispatch_state.observe(ended(taken(records[0], line), TaskStatus.DONE), START)
    assert planned(dispatch_state) == []
    dispatch_state.set_slots([open_slot("work")])
    assert planned(dispatch_state) == [("t2", None)]
