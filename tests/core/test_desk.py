"""The desk: what it does with a record, a plan, a refusal and the passing of time."""

from __future__ import annotations

from time import perf_counter

import pytest

from core.desk_model import START, desk_of, ended, queued, taken
from headgate.core.budgets.accounts import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_plan import Planned
from headgate.core.dispatch_state import Desk
from headgate.core.gates import GateClosure, GatePart
from headgate.core.parking import ASK_AGAIN_SECONDS
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import Agent, Project
from headgate.core.task import OnExhausted, TaskStatus


def refusal(
    *,
    spent: int = 0,
    reserved: int = 0,
    requested: int = 100,
    resets_at: int | None = None,
    scope: str = "session:s",
) -> Refused:
    may_clear = resets_at is not None or spent + requested <= 1_000
    return Refused(
        scope=Scope(scope),
        unit=Unit.TOKENS,
        limit=1_000,
        spent=spent,
        reserved=reserved,
        overrun=0,
        requested=requested,
        resets_at=resets_at,
        may_clear=may_clear,
    )


def planned_ids(desk: Desk, now: float = START) -> list[str]:
    return [line.task.id for line in desk.plan(now, most=100)]


def only_line(desk: Desk, now: float = START) -> Planned:
    (line,) = desk.plan(now, most=100)
    return line


def test_a_plan_takes_its_places_at_once() -> None:
    desk = desk_of(queued("t1"), queued("t2"))
    assert planned_ids(desk) == ["t1", "t2"]
    assert (len(desk.flights), len(desk.waiting)) == (2, 0)
    assert planned_ids(desk) == []


def test_a_plan_stops_where_nodes_have_no_places_left() -> None:
    desk = desk_of(*(queued(f"t{n}") for n in range(5)), places=2)
    assert len(planned_ids(desk)) == 2


def test_without_a_node_nothing_is_planned() -> None:
    desk = desk_of(queued("t1"))
    desk.flights.drop_node("n1")
    assert planned_ids(desk) == []


def test_the_node_with_the_most_free_places_is_next() -> None:
    desk = desk_of(*(queued(f"t{n}") for n in range(3)), places=1, agents=_agents(3))
    desk.flights.set_node("n2", 3)
    nodes = [line.node_id for line in desk.plan(START, most=10)]
    assert nodes == ["n2", "n2", "n1"]


def test_a_task_waits_for_its_parents_and_starts_after_the_last() -> None:
    desk = desk_of(queued("t1", waiting_for=2))
    desk.see(queued("t1", waiting_for=1), START)
    assert planned_ids(desk) == []
    desk.see(queued("t1", waiting_for=0), START)
    assert planned_ids(desk) == ["t1"]


def test_a_record_from_before_the_last_parent_ended_changes_nothing() -> None:
    desk = desk_of(queued("t1"))
    desk.see(queued("t1", waiting_for=1), START)
    assert planned_ids(desk) == ["t1"]


def test_a_task_starts_at_its_time_and_not_before() -> None:
    desk = desk_of(queued("t1", not_before=START + 10))
    assert desk.next_at() == START + 10
    desk.fall_due(START + 9.9)
    assert planned_ids(desk, START + 9.9) == []
    desk.fall_due(START + 10)
    assert planned_ids(desk, START + 10) == ["t1"]


def test_a_queued_task_expires_at_its_deadline_and_again_until_the_store_has_ended_it() -> None:
    desk = desk_of(queued("t1", deadline=START + 5))
    assert desk.fall_due(START + 4.9) == []
    assert desk.fall_due(START + 5) == ["t1"]
    assert planned_ids(desk, START + 5) == []
    assert desk.fall_due(START + 5.5) == []
    assert desk.fall_due(START + 6) == ["t1"]
    desk.see(ended(queued("t1"), TaskStatus.FAILED), START + 6)
    assert desk.next_at() is None


def test_a_task_in_flight_does_not_expire_here() -> None:
    desk = desk_of(queued("t1", deadline=START + 5))
    assert planned_ids(desk) == ["t1"]
    assert desk.fall_due(START + 100) == []


def test_a_record_of_a_landed_attempt_that_comes_late_takes_no_place() -> None:
    record = queued("t1")
    desk = desk_of(record)
    running = taken(record, only_line(desk))
    desk.see(ended(running, TaskStatus.DONE), START)
    desk.see(running, START)
    assert (len(desk.flights), desk.tick) == (0, 1)


def test_a_late_record_of_an_attempt_does_not_take_the_next_one_out_of_the_queue() -> None:
    record = queued("t1")
    desk = desk_of(record)
    running = taken(record, only_line(desk))
    desk.see(ended(running, TaskStatus.QUEUED), START)
    desk.see(running, START)
    assert planned_ids(desk) == ["t1"]


def test_a_task_cancelled_while_its_plan_is_on_the_way_frees_its_place_once() -> None:
    record = queued("t1")
    desk = desk_of(record)
    line = only_line(desk)
    cancelled = ended(record, TaskStatus.CANCELLED)
    desk.see(cancelled, START)
    assert (len(desk.flights), desk.tick) == (0, 0)
    assert desk.refuse(line, cancelled, None, START) is None
    assert (desk.flights.active, desk.figures.started) == ({"x": 0}, {"x": 0})
    assert planned_ids(desk) == []


def test_a_queued_record_from_before_the_plan_leaves_the_plan_alone() -> None:
    record = queued("t1", waiting_for=0)
    desk = desk_of(record)
    only_line(desk)
    desk.see(record, START)
    assert (len(desk.flights), len(desk.waiting)) == (1, 0)


def test_what_a_plan_asked_for_in_vain_is_offered_again() -> None:
    record = queued("t1")
    desk = desk_of(record)
    line = only_line(desk)
    assert desk.refuse(line, record, None, START) is None
    assert planned_ids(desk) == ["t1"]


def test_a_task_that_is_gone_is_forgotten_wherever_it_is() -> None:
    desk = desk_of(queued("t1"), queued("t2", not_before=START + 9))
    line = only_line(desk)
    desk.forget("t1", START)
    desk.forget("t2", START)
    assert desk.refuse(line, None, None, START) is None
    assert (len(desk.flights), len(desk.waiting), desk.next_at()) == (0, 0, None)


def test_a_project_with_work_in_flight_has_had_its_guaranteed_start() -> None:
    projects = (Project(id="x", max_concurrent_agents=None), Project(id="y"))
    desk = desk_of(queued("x1"), projects=projects, agents=_agents(1, capacity=2), places=2)
    desk.figures.add("x", START, tokens=0)
    assert planned_ids(desk) == ["x1"]
    for number in range(2, 4):
        desk.see(queued(f"x{number}"), START)
    desk.see(queued("y1", project_id="y"), START)
    assert planned_ids(desk) == ["y1"]


@pytest.mark.parametrize(
    ("refused", "on_exhausted", "is_rejected"),
    [
        (refusal(spent=1_000), OnExhausted.WAIT, True),
        (refusal(reserved=1_000), OnExhausted.WAIT, False),
        (refusal(reserved=1_000), OnExhausted.REJECT, True),
        (refusal(spent=1_000, resets_at=int(START) + 60), OnExhausted.WAIT, False),
        (refusal(spent=1_000, resets_at=int(START) + 60), OnExhausted.REJECT, True),
        (refusal(spent=500, requested=1_001, resets_at=None), OnExhausted.WAIT, True),
    ],
)
def test_a_task_waits_for_budget_only_while_waiting_can_help(
    refused: Refused, on_exhausted: OnExhausted, is_rejected: bool
) -> None:
    record = queued("t1", scopes=("session:s",), on_exhausted=on_exhausted)
    desk = desk_of(record)
    error = desk.refuse(only_line(desk), record, refused, START)
    assert (error is not None) == is_rejected
    assert planned_ids(desk) == []


def test_a_scope_with_a_window_is_asked_again_when_it_resets() -> None:
    record = queued("t1", scopes=("session:s",))
    desk = desk_of(record)
    refused = refusal(spent=1_000, resets_at=int(START) + 60)
    desk.refuse(only_line(desk), record, refused, START)
    assert desk.next_at() == START + 60
    desk.fall_due(START + 60)
    assert planned_ids(desk, START + 60) == ["t1"]


def test_money_that_others_hold_is_asked_for_again_soon() -> None:
    record = queued("t1", scopes=("session:s",))
    desk = desk_of(record)
    desk.refuse(only_line(desk), record, refusal(reserved=1_000), START)
    assert desk.next_at() == START + ASK_AGAIN_SECONDS
    desk.fall_due(START + ASK_AGAIN_SECONDS)
    assert planned_ids(desk, START + ASK_AGAIN_SECONDS) == ["t1"]


@pytest.mark.parametrize("scope", ["session:s", ""])
def test_an_attempt_that_ends_wakes_those_who_wait_for_its_scope_or_the_root(scope: str) -> None:
    first, second = queued("t1", scopes=("session:s",)), queued("t2", scopes=("session:s",))
    desk = desk_of(first, second, agents=_agents(2))
    line, other = desk.plan(START, most=2)
    desk.refuse(other, second, refusal(reserved=1_000, scope=scope), START)
    assert planned_ids(desk) == []
    desk.see(ended(taken(first, line), TaskStatus.DONE, tokens=10), START)
    assert planned_ids(desk) == ["t2"]


def test_an_attempt_without_scopes_wakes_those_who_wait_for_the_root() -> None:
    first, second = queued("t1"), queued("t2", scopes=("session:s",))
    desk = desk_of(first, second, agents=_agents(2))
    line, other = desk.plan(START, most=2)
    desk.refuse(other, second, refusal(reserved=1_000, scope=""), START)
    desk.see(ended(taken(first, line), TaskStatus.DONE, tokens=10), START)
    assert planned_ids(desk) == ["t2"]


def test_a_dear_task_is_set_aside_and_cheap_ones_go_on() -> None:
    dear = queued("t1", scopes=("session:s",), priority=0, estimate_tokens=900)
    cheap = queued("t2", scopes=("session:s",), priority=1, estimate_tokens=10)
    desk = desk_of(dear, agents=_agents(1))
    desk.refuse(only_line(desk), dear, refusal(spent=500, requested=900, resets_at=2**33), START)
    desk.see(cheap, START)
    assert planned_ids(desk) == ["t2"]


def test_a_paused_target_opens_by_itself() -> None:
    desk = desk_of(queued("t1", target="t"))
    desk.close(GateClosure(kind="target", name="t", until=START + 7), START)
    assert planned_ids(desk) == []
    assert desk.next_at() == START + 7
    desk.fall_due(START + 7)
    assert planned_ids(desk, START + 7) == ["t1"]


def test_the_longer_of_two_pauses_holds() -> None:
    desk = desk_of(queued("t1", target="t"))
    desk.close(GateClosure(kind="target", name="t", until=START + 30), START)
    desk.close(GateClosure(kind="target", name="t", until=START + 5), START)
    desk.fall_due(START + 6)
    assert planned_ids(desk, START + 6) == []


def test_a_pause_that_is_over_closes_nothing() -> None:
    desk = desk_of(queued("t1", target="t"))
    desk.close(GateClosure(kind="target", name="t", until=START), START)
    assert planned_ids(desk) == ["t1"]


REQUESTS = RateLimit(kind="target", name="t", unit="requests", most=2, window_seconds=60)
TOKENS = RateLimit(kind="target", name="t", unit="tokens", most=500, window_seconds=60)


def test_what_meets_a_rate_limit_leaves_its_place_to_others_in_the_same_plan() -> None:
    limited = [queued(f"t{n}", target="t") for n in range(4)]
    other = queued("u1", priority=1)
    desk = desk_of(*limited, other, agents=_agents(3), places=3, rate_limits=(REQUESTS,))
    assert sorted(planned_ids(desk)) == ["t0", "t1", "u1"]


def test_a_rate_limit_lets_go_when_its_window_has_passed() -> None:
    records = [queued(f"t{n}", target="t") for n in range(3)]
    desk = desk_of(*records, agents=_agents(3), rate_limits=(REQUESTS,))
    assert planned_ids(desk) == ["t0", "t1"]
    at = desk.next_at()
    assert at is not None
    assert START + 60 <= at <= START + 62
    desk.fall_due(at)
    assert planned_ids(desk, at) == ["t2"]


def test_a_task_larger_than_a_rate_limit_keeps_nobody_else_waiting() -> None:
    large = queued("t1", target="t", estimate_tokens=501)
    small = queued("t2", target="t", estimate_tokens=100, priority=1)
    desk = desk_of(large, small, agents=_agents(1), rate_limits=(TOKENS,))
    assert planned_ids(desk) == ["t2"]
    assert desk.next_at() == START + 60


def test_a_line_that_was_not_applied_counts_against_no_rate_limit() -> None:
    record = queued("t1", target="t")
    desk = desk_of(record, rate_limits=(REQUESTS,))
    for _ in range(5):
        desk.refuse(only_line(desk), record, None, START)
    assert planned_ids(desk) == ["t1"]


def test_tokens_beyond_the_estimate_are_charged_with_a_later_line_that_is_applied() -> None:
    first = queued("t1", target="t", estimate_tokens=100)
    second = queued("t2", target="t", estimate_tokens=100)
    desk = desk_of(first, rate_limits=(TOKENS,))
    desk.see(ended(taken(first, only_line(desk)), TaskStatus.DONE, tokens=250), START)
    desk.see(second, START)
    line = only_line(desk)
    assert [charge.amount for charge in line.rate_charges] == [100, 150]
    desk.refuse(line, second, None, START)
    assert [charge.amount for charge in only_line(desk).rate_charges] == [100, 150]


def test_loading_finds_what_is_in_flight_and_who_has_it() -> None:
    record = queued("t1", agent_id="made")
    running = taken(record, only_line(desk_of(record)))
    desk = Desk(desk_of().settings)
    desk.load([running], usage=(), rate_counts=(), closures=(), lane_served={}, tick=7, now=START)
    entry = desk.index.agents.get("made")
    assert entry is not None
    assert (entry.inflight, desk.flights.on_node("n1"), desk.tick) == (1, ["t1"], 7)
    desk.see(ended(running, TaskStatus.DONE, tokens=5), START)
    assert (entry.inflight, len(desk.flights), desk.figures.tokens) == (0, 0, {"x": 5})


def test_lag_is_forgiven_once_to_a_project_that_comes_back() -> None:
    desk = desk_of(queued("x1"), queued("x2"), agents=_agents(1), places=1, max_lag_tokens=100)
    desk.figures.add("x", START, tokens=100_000)
    desk.plan(START, most=1)
    desk.see(queued("y1", project_id="y"), START)
    desk.flights.set_node("n1", 2)
    desk.index.set_agent(Agent(id="more"))
    desk.plan(START, most=1)
    assert desk.forgiven_now["y"] > 0
    assert desk.figures.forgiven["y"] == desk.forgiven_now["y"]


def test_parked_tasks_cost_a_round_nothing() -> None:
    """100,000 tasks behind one closed gate, in front of one that can run."""
    empty, parked = desk_of(), desk_of()
    parked.close(GateClosure(kind="slot", name="s", until=START + 9_999), START)
    for number in range(100_000):
        parked.see(queued(f"p{number:06}", slot="s"), START)
    assert _seconds_of_a_plan(parked) < 20 * _seconds_of_a_plan(empty) + 0.005


def test_a_round_costs_the_same_however_many_tasks_are_set_aside_or_have_to_wait() -> None:
    empty, full = desk_of(), desk_of()
    for number in range(20_000):
        full.see(queued(f"w{number:06}", waiting_for=1), START)
        full.see(queued(f"n{number:06}", not_before=START + 1_000), START)
    assert _seconds_of_a_plan(full) < 20 * _seconds_of_a_plan(empty) + 0.005


def _seconds_of_a_plan(desk: Desk) -> float:
    """The fastest of a few, so that a busy machine does not matter."""
    times = []
    for number in range(20):
        record = queued(f"z{number}")
        desk.see(record, START)
        started = perf_counter()
        (line,) = desk.plan(START, most=10)
        times.append(perf_counter() - started)
        desk.see(ended(taken(record, line), TaskStatus.DONE), START)
    return min(times)


def test_ended_tasks_leave_nothing_behind() -> None:
    desk = desk_of()
    for number in range(3_000):
        scope = f"session:{number}"
        record = queued(
            f"t{number}", agent_id=f"agent-{number % 50}", scopes=(scope,), deadline=START + 99
        )
        desk.see(record, START)
        line = only_line(desk)
        refused = refusal(reserved=500, requested=900, scope=scope)
        desk.refuse(line, record, refused, START)
        desk.see(ended(record, TaskStatus.CANCELLED), START)
    assert (len(desk.waiting), len(desk.index), desk.parking.refusals) == (0, 0, {})
    desk.fall_due(START + 100)
    desk.fall_due(START + 100)
    desk.fall_due(START + 100)
    assert desk.next_at() is None


def test_agents_made_by_their_tasks_are_forgotten_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headgate.core.dispatch_state.MAX_KNOWN_AGENTS", 10)
    desk = desk_of()
    for number in range(100):
        record = queued(f"t{number}", agent_id=f"agent-{number}")
        desk.see(record, START)
        desk.see(ended(taken(record, only_line(desk)), TaskStatus.DONE), START)
    assert len(desk.made_agents) <= 11


def test_busy_agents_are_kept_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.core.dispatch_state.MAX_KNOWN_AGENTS", 10)
    desk = desk_of(*(queued(f"t{n}", agent_id=f"agent-{n}") for n in range(60)))
    assert len(desk.made_agents) == 60


def test_opening_a_gate_that_is_not_closed_does_nothing() -> None:
    desk = desk_of(queued("t1", target="t"))
    desk.open(GatePart("target", "t"))
    desk.open(GatePart("scope", "session:s"))
    assert planned_ids(desk) == ["t1"]


def _agents(count: int, *, capacity: int = 1) -> tuple[Agent, ...]:
    return tuple(Agent(id=f"g{number}", capacity=capacity) for number in range(count))
