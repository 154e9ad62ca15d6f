"""The dispatch state: what it does with a record, a plan, a refusal and the passing of time."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import pytest

from core.dispatch_model import START, ended, queued, state_of, taken
from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import ASK_AGAIN_SECONDS, DispatchState, Planned
from headgate.core.estimates import Hold, given
from headgate.core.gates import GateClosure, GatePart
from headgate.core.load import ADAPTIVE_WINDOW
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import Agent, LanePolicy, Project
from headgate.core.task import OnExhausted, TaskRecord, TaskStatus


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


def planned_ids(dispatch_state: DispatchState, now: float = START) -> list[str]:
    return [line.task.id for line in dispatch_state.plan(now, most=100)]


def only_line(dispatch_state: DispatchState, now: float = START) -> Planned:
    (line,) = dispatch_state.plan(now, most=100)
    return line


def test_a_plan_takes_its_places_at_once() -> None:
    dispatch_state = state_of(queued("t1"), queued("t2"))
    assert planned_ids(dispatch_state) == ["t1", "t2"]
    assert (len(dispatch_state.in_flight), len(dispatch_state.waiting)) == (2, 0)
    assert planned_ids(dispatch_state) == []


def test_a_plan_stops_where_nodes_have_no_places_left() -> None:
    dispatch_state = state_of(*(queued(f"t{n}") for n in range(5)), places=2)
    assert len(planned_ids(dispatch_state)) == 2


def test_without_a_node_nothing_is_planned() -> None:
    dispatch_state = state_of(queued("t1"))
    dispatch_state.in_flight.drop_node("n1")
    assert planned_ids(dispatch_state) == []


def test_the_node_with_the_most_free_places_is_next() -> None:
    dispatch_state = state_of(*(queued(f"t{n}") for n in range(3)), places=1, agents=_agents(3))
    dispatch_state.in_flight.set_node("n2", 3)
    nodes = [line.node_id for line in dispatch_state.plan(START, most=10)]
    assert nodes == ["n2", "n2", "n1"]


def test_a_task_waits_for_its_parents_and_starts_after_the_last() -> None:
    dispatch_state = state_of(queued("t1", waiting_for=2))
    dispatch_state.observe(queued("t1", waiting_for=1), START)
    assert planned_ids(dispatch_state) == []
    dispatch_state.observe(queued("t1", waiting_for=0), START)
    assert planned_ids(dispatch_state) == ["t1"]


def test_a_record_from_before_the_last_parent_ended_changes_nothing() -> None:
    dispatch_state = state_of(queued("t1"))
    dispatch_state.observe(queued("t1", waiting_for=1), START)
    assert planned_ids(dispatch_state) == ["t1"]


def test_a_task_starts_at_its_time_and_not_before() -> None:
    dispatch_state = state_of(queued("t1", not_before=START + 10))
    assert dispatch_state.next_at() == START + 10
    dispatch_state.fall_due(START + 9.9)
    assert planned_ids(dispatch_state, START + 9.9) == []
    dispatch_state.fall_due(START + 10)
    assert planned_ids(dispatch_state, START + 10) == ["t1"]


def test_a_queued_task_expires_at_its_deadline_and_again_until_the_store_has_ended_it() -> None:
    dispatch_state = state_of(queued("t1", deadline=START + 5))
    assert dispatch_state.fall_due(START + 4.9).expired == []
    assert dispatch_state.fall_due(START + 5).expired == ["t1"]
    assert planned_ids(dispatch_state, START + 5) == []
    assert dispatch_state.fall_due(START + 5.5).expired == []
    assert dispatch_state.fall_due(START + 6).expired == ["t1"]
    dispatch_state.observe(ended(queued("t1"), TaskStatus.FAILED), START + 6)
    assert dispatch_state.next_at() is None


def test_a_task_in_flight_does_not_expire_here() -> None:
    dispatch_state = state_of(queued("t1", deadline=START + 5))
    assert planned_ids(dispatch_state) == ["t1"]
    assert dispatch_state.fall_due(START + 100).expired == []


def test_a_record_of_a_landed_attempt_that_comes_late_takes_no_place() -> None:
    record = queued("t1")
    dispatch_state = state_of(record)
    running = taken(record, only_line(dispatch_state))
    dispatch_state.observe(ended(running, TaskStatus.DONE), START)
    dispatch_state.observe(running, START)
    assert (len(dispatch_state.in_flight), dispatch_state.tick) == (0, 1)


def test_a_late_record_of_an_attempt_does_not_take_the_next_one_out_of_the_queue() -> None:
    record = queued("t1")
    dispatch_state = state_of(record)
    running = taken(record, only_line(dispatch_state))
    dispatch_state.observe(ended(running, TaskStatus.QUEUED), START)
    dispatch_state.observe(running, START)
    assert planned_ids(dispatch_state) == ["t1"]


def test_a_task_cancelled_while_its_plan_is_on_the_way_frees_its_place_once() -> None:
    record = queued("t1")
    dispatch_state = state_of(record)
    line = only_line(dispatch_state)
    cancelled = ended(record, TaskStatus.CANCELLED)
    dispatch_state.observe(cancelled, START)
    assert (len(dispatch_state.in_flight), dispatch_state.tick) == (0, 0)
    assert dispatch_state.refuse(line, cancelled, None, START) is None
    assert (dispatch_state.in_flight.active, dispatch_state.usage.started) == ({"x": 0}, {"x": 0})
    assert planned_ids(dispatch_state) == []


def test_a_queued_record_from_before_the_plan_leaves_the_plan_alone() -> None:
    record = queued("t1", waiting_for=0)
    dispatch_state = state_of(record)
    only_line(dispatch_state)
    dispatch_state.observe(record, START)
    assert (len(dispatch_state.in_flight), len(dispatch_state.waiting)) == (1, 0)


def test_what_a_plan_asked_for_in_vain_is_offered_again() -> None:
    record = queued("t1")
    dispatch_state = state_of(record)
    line = only_line(dispatch_state)
    assert dispatch_state.refuse(line, record, None, START) is None
    assert planned_ids(dispatch_state) == ["t1"]


def test_a_task_that_is_gone_is_forgotten_wherever_it_is() -> None:
    dispatch_state = state_of(queued("t1"), queued("t2", not_before=START + 9))
    line = only_line(dispatch_state)
    dispatch_state.forget("t1", START)
    dispatch_state.forget("t2", START)
    assert dispatch_state.refuse(line, None, None, START) is None
    assert (
        len(dispatch_state.in_flight),
        len(dispatch_state.waiting),
        dispatch_state.next_at(),
    ) == (
        0,
        0,
        None,
    )


def test_a_project_with_work_in_flight_has_had_its_guaranteed_start() -> None:
    projects = (Project(id="x", max_concurrent_agents=None), Project(id="y"))
    dispatch_state = state_of(
        queued("x1"), projects=projects, agents=_agents(1, capacity=2), places=2
    )
    dispatch_state.usage.add("x", START, tokens=0)
    assert planned_ids(dispatch_state) == ["x1"]
    for number in range(2, 4):
        dispatch_state.observe(queued(f"x{number}"), START)
    dispatch_state.observe(queued("y1", project_id="y"), START)
    assert planned_ids(dispatch_state) == ["y1"]


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
    dispatch_state = state_of(record)
    error = dispatch_state.refuse(only_line(dispatch_state), record, refused, START)
    assert (error is not None) == is_rejected
    assert planned_ids(dispatch_state) == []


def test_a_scope_with_a_window_is_asked_again_when_it_resets() -> None:
    record = queued("t1", scopes=("session:s",))
    dispatch_state = state_of(record)
    refused = refusal(spent=1_000, resets_at=int(START) + 60)
    dispatch_state.refuse(only_line(dispatch_state), record, refused, START)
    assert dispatch_state.next_at() == START + 60
    dispatch_state.fall_due(START + 60)
    assert planned_ids(dispatch_state, START + 60) == ["t1"]


def test_money_that_others_hold_is_asked_for_again_soon() -> None:
    record = queued("t1", scopes=("session:s",))
    dispatch_state = state_of(record)
    dispatch_state.refuse(only_line(dispatch_state), record, refusal(reserved=1_000), START)
    assert dispatch_state.next_at() == START + ASK_AGAIN_SECONDS
    dispatch_state.fall_due(START + ASK_AGAIN_SECONDS)
    assert planned_ids(dispatch_state, START + ASK_AGAIN_SECONDS) == ["t1"]


@pytest.mark.parametrize("scope", ["session:s", ""])
def test_an_attempt_that_ends_wakes_those_who_wait_for_its_scope_or_the_root(scope: str) -> None:
    first, second = queued("t1", scopes=("session:s",)), queued("t2", scopes=("session:s",))
    dispatch_state = state_of(first, second, agents=_agents(2))
    line, other = dispatch_state.plan(START, most=2)
    dispatch_state.refuse(other, second, refusal(reserved=1_000, scope=scope), START)
    assert planned_ids(dispatch_state) == []
    dispatch_state.observe(ended(taken(first, line), TaskStatus.DONE, tokens=10), START)
    assert planned_ids(dispatch_state) == ["t2"]


def test_an_attempt_without_scopes_wakes_those_who_wait_for_the_root() -> None:
    first, second = queued("t1"), queued("t2", scopes=("session:s",))
    dispatch_state = state_of(first, second, agents=_agents(2))
    line, other = dispatch_state.plan(START, most=2)
    dispatch_state.refuse(other, second, refusal(reserved=1_000, scope=""), START)
    dispatch_state.observe(ended(taken(first, line), TaskStatus.DONE, tokens=10), START)
    assert planned_ids(dispatch_state) == ["t2"]


def test_a_dear_task_is_set_aside_and_cheap_ones_go_on() -> None:
    dear = queued("t1", scopes=("session:s",), priority=0, estimate_tokens=900)
    cheap = queued("t2", scopes=("session:s",), priority=1, estimate_tokens=10)
    dispatch_state = state_of(dear, agents=_agents(1))
    dispatch_state.refuse(
        only_line(dispatch_state), dear, refusal(spent=500, requested=900, resets_at=2**33), START
    )
    dispatch_state.observe(cheap, START)
    assert planned_ids(dispatch_state) == ["t2"]


def _started(dispatch_state: DispatchState, records: dict[str, TaskRecord], left: int) -> list[str]:
    """Return what starts until nothing more does, of a root that has so many tokens left."""
    started = []
    while lines := dispatch_state.plan(START, most=100):
        for line in lines:
            tokens = line.hold.tokens.amount
            if tokens <= left:
                left -= tokens
                started.append(line.task.id)
                continue
            refused = refusal(spent=500, reserved=500 - left, requested=tokens, scope="")
            dispatch_state.refuse(line, records[line.task.id], refused, START)
    return started


@pytest.mark.parametrize("is_call", [False, True])
@pytest.mark.parametrize("left", [50, 0])
def test_one_project_that_needs_more_than_is_left_stops_no_other(
    left: int, *, is_call: bool
) -> None:
    projects = tuple(Project(id=name, max_concurrent_agents=None) for name in "xy")
    plenty: dict[str, Any] = dict.fromkeys(
        ("max_inflight", "places", "max_per_agent_inflight"), 100
    )
    dispatch_state = state_of(projects=projects, **plenty)
    records = {}
    for project_id, tokens, count in (("x", 400, 200), ("y", 10, 2)):
        for number in range(count):
            record = queued(
                f"{project_id}{number}",
                project_id=project_id,
                agent_id=project_id,
                estimate_tokens=tokens,
                is_call=is_call,
                target="upstream:u" if is_call else None,
            )
            records[record.task.id] = record
            if is_call:
                hold = Hold(micro_usd=given(0), tokens=given(tokens), kind=f"{project_id}/u/")
                dispatch_state.observe_call(record, partial(_held, hold), START)
            else:
                dispatch_state.observe(record, START)
    assert sorted(_started(dispatch_state, records, left)) == (["y0", "y1"] if left else [])
    root = GatePart("scope", "")
    assert dispatch_state.closures.is_closed(root) is (not left)
    assert dispatch_state.waiting_for_scopes() == {"": 200 if left else 202}
    assert dispatch_state.next_at() == START + ASK_AGAIN_SECONDS
    if not is_call:
        # Another dispatcher, which has only the records, comes to the same.
        still = {name: records[name] for name in dispatch_state.waiting}
        after = state_of(*still.values(), projects=projects, **plenty)
        assert _started(after, still, left - 20) == []
        assert after.waiting_for_scopes() == dispatch_state.waiting_for_scopes()
        parts = [{one.part for one in state.closures.all()} for state in (dispatch_state, after)]
        assert parts[0] == parts[1]
    # Once there is room, all of them are asked for again, in their order.
    dispatch_state.fall_due(START + ASK_AGAIN_SECONDS)
    assert dispatch_state.closures.all() == []
    expected = ["x0", "x1"] if left else ["x0", "x1", "y0", "y1"]
    assert sorted(_started(dispatch_state, records, 820)) == expected


def _held(hold: Hold) -> Hold:
    return hold


def test_who_will_not_wait_is_told_once_its_project_is_kept_out() -> None:
    projects = tuple(Project(id=name, max_concurrent_agents=None) for name in "xy")
    reject = OnExhausted.REJECT
    dear = [queued(f"t{n:02}", estimate_tokens=400) for n in range(99)]
    unwilling = [
        queued("x", estimate_tokens=400, priority=9, on_exhausted=reject),
        queued("y", project_id="y", agent_id="b", estimate_tokens=10, on_exhausted=reject),
    ]
    records = {one.task.id: one for one in (*dear, *unwilling)}
    dispatch_state = state_of(*records.values(), projects=projects)
    assert _started(dispatch_state, records, 50) == ["y"]
    assert list(dispatch_state.fall_due(START).rejected) == ["x"]


def test_a_refusal_of_one_project_does_not_let_another_wait_longer() -> None:
    first, second = queued("t1", project_id="x"), queued("t2", project_id="y", estimate_tokens=9)
    dispatch_state = state_of(first, second)
    lines = {line.task.id: line for line in dispatch_state.plan(START, most=9)}
    for name, record, seconds in (("t1", first, 0.0), ("t2", second, 4.0)):
        refused = refusal(reserved=950, requested=100, scope="")
        dispatch_state.refuse(lines[name], record, refused, START + seconds)
    assert dispatch_state.next_at() == START + ASK_AGAIN_SECONDS


def test_who_comes_later_gets_no_money_that_an_older_task_waits_for() -> None:
    older, *later = (queued(name, scopes=("session:s",), estimate_tokens=100) for name in "abc")
    dispatch_state = state_of(older)
    dispatch_state.refuse(only_line(dispatch_state), older, refusal(reserved=950), START)
    # Who holds the money has ended in the ledger, and that end is not heard of here.
    for record in later:
        dispatch_state.observe(record, START)
        assert planned_ids(dispatch_state) == []
    dispatch_state.open(GatePart("scope", "session:s"))
    assert planned_ids(dispatch_state) == ["a", "b", "c"]


def test_a_more_urgent_task_asks_for_money_that_an_older_one_waits_for() -> None:
    older, *later = (
        queued(name, scopes=("session:s",), estimate_tokens=100, priority=priority)
        for name, priority in (("a", 5), ("b", 5), ("c", 0))
    )
    dispatch_state = state_of(older)
    dispatch_state.refuse(only_line(dispatch_state), older, refusal(reserved=950), START)
    for record in later:
        dispatch_state.observe(record, START)
    assert planned_ids(dispatch_state) == ["c"]


@pytest.mark.parametrize("seconds", [ASK_AGAIN_SECONDS - 1, ASK_AGAIN_SECONDS])
def test_a_newcomer_has_those_before_it_ask_again_after_a_while(seconds: float) -> None:
    """A ledger elsewhere may have got a higher limit, and tells nobody."""
    older, late = (queued(name, scopes=("session:s",), estimate_tokens=100) for name in "ab")
    dispatch_state = state_of(older)
    refused = refusal(spent=950, resets_at=int(START) + 86_400)
    dispatch_state.refuse(only_line(dispatch_state), older, refused, START)
    dispatch_state.observe(late, START + seconds)
    expected = ["a", "b"] if seconds == ASK_AGAIN_SECONDS else []
    assert planned_ids(dispatch_state, START + seconds) == expected


def test_a_paused_target_opens_by_itself() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 7), START)
    assert planned_ids(dispatch_state) == []
    assert dispatch_state.next_at() == START + 7
    dispatch_state.fall_due(START + 7)
    assert planned_ids(dispatch_state, START + 7) == ["t1"]


def test_the_longer_of_two_pauses_holds() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 30), START)
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 5), START)
    dispatch_state.fall_due(START + 6)
    assert planned_ids(dispatch_state, START + 6) == []


def test_a_pause_that_is_over_closes_nothing() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START), START)
    assert planned_ids(dispatch_state) == ["t1"]


REQUESTS = RateLimit(kind="target", name="t", unit="requests", most=2, window_seconds=60)
TOKENS = RateLimit(kind="target", name="t", unit="tokens", most=500, window_seconds=60)


def test_what_meets_a_rate_limit_leaves_its_place_to_others_in_the_same_plan() -> None:
    limited = [queued(f"t{n}", target="t") for n in range(4)]
    other = queued("u1", priority=1)
    dispatch_state = state_of(*limited, other, agents=_agents(3), places=3, rate_limits=(REQUESTS,))
    assert sorted(planned_ids(dispatch_state)) == ["t0", "t1", "u1"]


def test_a_rate_limit_lets_go_when_its_window_has_passed() -> None:
    records = [queued(f"t{n}", target="t") for n in range(3)]
    dispatch_state = state_of(*records, agents=_agents(3), rate_limits=(REQUESTS,))
    assert planned_ids(dispatch_state) == ["t0", "t1"]
    at = dispatch_state.next_at()
    assert at is not None
    assert START + 60 <= at <= START + 62
    dispatch_state.fall_due(at)
    assert planned_ids(dispatch_state, at) == ["t2"]


def test_a_task_larger_than_a_rate_limit_keeps_nobody_else_waiting() -> None:
    large = queued("t1", target="t", estimate_tokens=501)
    small = queued("t2", target="t", estimate_tokens=100, priority=1)
    dispatch_state = state_of(large, small, agents=_agents(1), rate_limits=(TOKENS,))
    assert planned_ids(dispatch_state) == ["t2"]
    assert dispatch_state.next_at() == START + 60


def test_a_line_that_was_not_applied_counts_against_no_rate_limit() -> None:
    record = queued("t1", target="t")
    dispatch_state = state_of(record, rate_limits=(REQUESTS,))
    for _ in range(5):
        dispatch_state.refuse(only_line(dispatch_state), record, None, START)
    assert planned_ids(dispatch_state) == ["t1"]


@pytest.mark.parametrize("claim", [{"estimate_tokens": 10**12}, {"weight": 1e9}])
def test_what_a_task_claims_does_not_use_up_a_rate_limit(claim: dict[str, Any]) -> None:
    wide = msgspec.structs.replace(TOKENS, most=500_000)
    hostile = queued("t1", target="t", has_claims=True, **claim)
    dispatch_state = state_of(hostile, rate_limits=(wide,))
    line = only_line(dispatch_state)
    assert [charge.amount for charge in line.rate_charges] == [1_000]
    said = ended(taken(hostile, line), TaskStatus.DONE, tokens=10**12)
    progress = msgspec.structs.replace(said.progress, share_tokens=10_000, is_claimed=True)
    dispatch_state.observe(msgspec.structs.replace(said, progress=progress), START)
    dispatch_state.observe(queued("t2", target="t"), START)
    own, more = [charge.amount for charge in only_line(dispatch_state).rate_charges]
    assert more == 9_000
    assert own <= 11_000, "what is learned of a claim is bounded as well"


def test_tokens_beyond_the_estimate_are_charged_with_a_later_line_that_is_applied() -> None:
    first = queued("t1", target="t", estimate_tokens=100)
    second = queued("t2", target="t", estimate_tokens=100)
    dispatch_state = state_of(first, rate_limits=(TOKENS,))
    dispatch_state.observe(
        ended(taken(first, only_line(dispatch_state)), TaskStatus.DONE, tokens=250), START
    )
    dispatch_state.observe(second, START)
    line = only_line(dispatch_state)
    assert [charge.amount for charge in line.rate_charges] == [100, 150]
    dispatch_state.refuse(line, second, None, START)
    assert [charge.amount for charge in only_line(dispatch_state).rate_charges] == [100, 150]


def test_loading_finds_what_is_in_flight_and_who_has_it() -> None:
    record = queued("t1", agent_id="made")
    running = taken(record, only_line(state_of(record)))
    dispatch_state = DispatchState(state_of().settings)
    dispatch_state.load(
        [running], usage=(), rate_counts=(), closures=(), lane_served={}, tick=7, now=START
    )
    entry = dispatch_state.index.agents.get("made")
    assert entry is not None
    assert (entry.inflight, dispatch_state.in_flight.on_node("n1"), dispatch_state.tick) == (
        1,
        ["t1"],
        7,
    )
    dispatch_state.observe(ended(running, TaskStatus.DONE, tokens=5), START)
    assert (entry.inflight, len(dispatch_state.in_flight), dispatch_state.usage.tokens) == (
        0,
        0,
        {"x": 5},
    )


def test_lag_is_forgiven_once_to_a_project_that_comes_back() -> None:
    dispatch_state = state_of(
        queued("x1"), queued("x2"), agents=_agents(1), places=1, max_lag_tokens=100
    )
    dispatch_state.usage.add("x", START, tokens=100_000)
    dispatch_state.plan(START, most=1)
    dispatch_state.observe(queued("y1", project_id="y"), START)
    dispatch_state.in_flight.set_node("n1", 2)
    dispatch_state.index.set_agent(Agent(id="more"))
    dispatch_state.plan(START, most=1)
    assert dispatch_state.forgiven_now["y"] > 0
    assert dispatch_state.usage.forgiven["y"] == dispatch_state.forgiven_now["y"]


def test_parked_tasks_cost_a_round_nothing() -> None:
    """100,000 tasks behind one closed gate, in front of one that can run."""
    empty, parked = state_of(), state_of()
    parked.close(GateClosure(kind="slot", name="s", until=START + 9_999), START)
    for number in range(100_000):
        parked.observe(queued(f"p{number:06}", slot="s"), START)
    assert _seconds_of_a_plan(parked) < 20 * _seconds_of_a_plan(empty) + 0.005


def test_a_round_costs_the_same_however_many_tasks_are_set_aside_or_have_to_wait() -> None:
    empty, full = state_of(), state_of()
    for number in range(20_000):
        full.observe(queued(f"w{number:06}", waiting_for=1), START)
        full.observe(queued(f"n{number:06}", not_before=START + 1_000), START)
    assert _seconds_of_a_plan(full) < 20 * _seconds_of_a_plan(empty) + 0.005


def _seconds_of_a_plan(dispatch_state: DispatchState) -> float:
    """The fastest of a few, so that a busy machine does not matter."""
    times = []
    for number in range(20):
        record = queued(f"z{number}")
        dispatch_state.observe(record, START)
        started = perf_counter()
        (line,) = dispatch_state.plan(START, most=10)
        times.append(perf_counter() - started)
        dispatch_state.observe(ended(taken(record, line), TaskStatus.DONE), START)
    return min(times)


def test_ended_tasks_leave_nothing_behind() -> None:
    dispatch_state = state_of()
    for number in range(3_000):
        scope = f"session:{number}"
        record = queued(
            f"t{number}", agent_id=f"agent-{number % 50}", scopes=(scope,), deadline=START + 99
        )
        dispatch_state.observe(record, START)
        line = only_line(dispatch_state)
        refused = refusal(reserved=500, requested=900, scope=scope)
        dispatch_state.refuse(line, record, refused, START)
        dispatch_state.observe(ended(record, TaskStatus.CANCELLED), START)
    assert (
        len(dispatch_state.waiting),
        len(dispatch_state.index),
        dispatch_state.parking.refusals,
    ) == (0, 0, {})
    dispatch_state.fall_due(START + 100)
    dispatch_state.fall_due(START + 100)
    dispatch_state.fall_due(START + 100)
    assert dispatch_state.next_at() is None


def test_agents_made_by_their_tasks_are_forgotten_when_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headgate.core.dispatch_state.MAX_KNOWN_AGENTS", 10)
    dispatch_state = state_of()
    for number in range(100):
        record = queued(f"t{number}", agent_id=f"agent-{number}")
        dispatch_state.observe(record, START)
        dispatch_state.observe(
            ended(taken(record, only_line(dispatch_state)), TaskStatus.DONE), START
        )
    assert len(dispatch_state.made_agents) <= 11


def test_busy_agents_are_kept_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.core.dispatch_state.MAX_KNOWN_AGENTS", 10)
    dispatch_state = state_of(*(queued(f"t{n}", agent_id=f"agent-{n}") for n in range(60)))
    assert len(dispatch_state.made_agents) == 60


def test_opening_a_gate_that_is_not_closed_does_nothing() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.open(GatePart("target", "t"))
    dispatch_state.open(GatePart("scope", "session:s"))
    assert planned_ids(dispatch_state) == ["t1"]


def _agents(count: int, *, capacity: int = 1) -> tuple[Agent, ...]:
    return tuple(Agent(id=f"g{number}", capacity=capacity) for number in range(count))


def tuned(weights: list[float]) -> float:
    """Return alpha after as many grants, while each finds one more task of the next weight."""
    waiting = [queued(f"b{n}", agent_id="a") for n in range(5)]
    dispatch_state = state_of(
        *waiting, places=1, lane_policy=LanePolicy.HIGHEST_LOAD, auto_tune=True
    )
    for number, weight in enumerate(weights):
        waiting.append(queued(f"t{number}", agent_id="a", weight=weight))
        dispatch_state.observe(waiting[-1], START)
        line = only_line(dispatch_state)
        (record,) = (one for one in waiting if one.task.id == line.task.id)
        dispatch_state.observe(ended(taken(record, line), TaskStatus.DONE), START)
    return dispatch_state.alpha


def test_a_backlog_that_grows_in_weight_alone_raises_alpha() -> None:
    assert tuned([1.0] * ADAPTIVE_WINDOW) == 0.25
    assert tuned([2.0**n for n in range(ADAPTIVE_WINDOW)]) == 0.26


def test_waits_that_differ_within_one_agent_do_not_lower_alpha() -> None:
    dispatch_state = state_of(
        *(queued(f"t{n}", agent_id="a", enqueued_tick=0) for n in range(20)),
        places=1,
        lane_policy=LanePolicy.HIGHEST_LOAD,
        auto_tune=True,
    )
    for _ in range(15):
        line = only_line(dispatch_state)
        record = taken(queued(line.task.id, agent_id="a"), line)
        dispatch_state.observe(ended(record, TaskStatus.DONE), START)
    assert dispatch_state.alpha == 0.25
