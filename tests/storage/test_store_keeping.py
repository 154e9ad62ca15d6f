"""What is kept and for how long, where the money is elsewhere, and which tables are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.ledger import Balance, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT
from headgate.core.lifecycle import NOTHING_USED
from headgate.core.money import MicroUsd, Tokens
from headgate.core.rate_limits import RateCharge
from headgate.core.retention import BY_AGE, BY_NUMBER, Evicted, Retention, RetentionCut
from headgate.core.task import TaskStatus
from headgate.errors import StoreError
from headgate.storage import ledger, maintenance, queries
from headgate.storage.queries import BulkFilter
from headgate.storage.sql_store import UPKEEP_SECONDS
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import Node, TaskQuery
from headgate.storage.task_ids import TaskIds, first_id_at, seconds_of
from headgate.storage.transaction import Dialect, Transaction
from storage.scene import AWAY, DONE, FAILED, HERE, LEASE_SECONDS, Place, Scene, ids

A_DAY_SECONDS = 86_400.0

LISTS = {
    "SELECT id FROM tasks WHERE eviction_rank IS NULL ORDER BY id DESC LIMIT 9": "live_tasks",
    "SELECT id FROM tasks WHERE id < 'x' AND eviction_rank IS NULL ORDER BY id DESC LIMIT 9": (
        "live_tasks"
    ),
    "SELECT id FROM tasks WHERE eviction_rank IN (3) ORDER BY id || '' DESC LIMIT 9": (
        "ended_tasks"
    ),
    "SELECT id FROM tasks WHERE id < 'x' AND eviction_rank IN (0, 3) ORDER BY id || '' LIMIT 9": (
        "ended_tasks"
    ),
    "SELECT id FROM tasks WHERE eviction_rank = 2 AND project_id = 'p' AND"
    " evictable_since IS NOT NULL AND evictable_since <= 9 ORDER BY evictable_since, id LIMIT 9": (
        "ended_tasks"
    ),
}
"""Statements as lists and the reaper ask them, with the index that they must not go without."""


async def test_ended_tasks_go_oldest_first(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        for task_id in ("c", "a", "b"):
            await scene.run(task_id)
            await scene.settle(task_id)
            scene.clock.advance(1)
        await scene.submit("d")
        evict = scene.store.evict
        assert (await evict(Retention(seconds=0), limit=2)).tasks == 2
        assert ids(await scene.found(TaskQuery())) == ["d", "b"]
        assert (await evict(Retention(seconds=2), limit=2)).tasks == 0
        assert (await evict(Retention(seconds=0), limit=2)).tasks == 1
        assert (await scene.store.totals()).completed == 3


async def test_a_result_stays_until_those_who_need_it_have_ended(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.run("a")
        await scene.submit("b", depends_on=("a",))
        await scene.settle("a")
        scene.clock.advance(1)
        assert (await scene.store.evict(Retention(seconds=0), limit=9)).tasks == 0
        await scene.assign("b")
        await scene.settle("b", FAILED)
        scene.clock.advance(1)
        assert (await scene.store.evict(Retention(seconds=0), limit=9)).tasks == 2


async def test_a_task_may_go_before_the_result_that_it_read(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.run("a")
        for child in ("b", "c"):
            await scene.submit(child, depends_on=("a",))
        await scene.settle("a")
        await scene.assign("b")
        await scene.settle("b")
        scene.clock.advance(1)
        assert (await scene.store.evict(Retention(seconds=0), limit=9)).tasks == 1
        await scene.cancel("c")
        scene.clock.advance(1)
        assert (await scene.store.evict(Retention(seconds=0), limit=9)).tasks == 2


async def test_too_many_go_by_how_they_ended_and_failures_last(place: Place) -> None:
    ends = {"f1": FAILED, "d1": DONE, "d2": DONE, "f2": FAILED}
    async with place.scene(evicts=True) as scene:
        for task_id, end in ends.items():
            await scene.run(task_id)
            await scene.settle(task_id, end)
            scene.clock.advance(1)
        await scene.submit("c1")
        await scene.cancel("c1")
        await scene.submit("q1")

        async def left(most: int) -> list[str]:
            await scene.store.evict(Retention(seconds=1e6, max_tasks=most), limit=9)
            return sorted(ids(await scene.found(TaskQuery())))

        assert await left(5) == ["c1", "d1", "d2", "f1", "f2", "q1"]
        assert await left(4) == ["d1", "d2", "f1", "f2", "q1"]
        assert await left(3) == ["d2", "f1", "f2", "q1"]
        assert await left(2) == ["f1", "f2", "q1"]
        assert await left(1) == ["f2", "q1"]
        assert await left(0) == ["q1"]


async def test_a_deleted_task_is_told_from_one_that_never_was_without_a_row(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        names = [first_id_at(scene.clock() + second) for second in range(5)]
        for task_id, end in zip(names, (DONE, FAILED, DONE, FAILED), strict=False):
            await scene.run(task_id)
            await scene.settle(task_id, end)
            scene.clock.advance(1)
        evict, deleted_by = scene.store.evict, scene.store.deleted_by
        assert await deleted_by(names[0]) is None
        assert (await evict(Retention(seconds=3.5, max_tasks=None), limit=9)).tasks == 1
        by_age = await deleted_by(names[0])
        assert by_age == RetentionCut(setting=BY_AGE, value=3.5, task_id=names[0])
        # The success goes before the older failure, which is still there for whoever asks.
        assert (await evict(Retention(seconds=3.5, max_tasks=2), limit=9)).tasks == 1
        by_number = RetentionCut(setting=BY_NUMBER, value=2.0, task_id=names[2])
        assert await deleted_by(names[2]) == by_number
        assert await scene.store.get(names[1]) is not None
        assert await deleted_by(names[0]) == by_age
        assert await deleted_by(names[3]) is None
        assert await deleted_by(names[4]) is None
        assert await deleted_by("mine") is None


@pytest.mark.hypothesis
@given(st.floats(0, 4e9), st.integers(0, 29), st.sampled_from("ilouI!é"))
@settings(deadline=None)
def test_an_id_of_our_form_tells_its_time_and_any_other_none(
    now: float, place: int, wrong: str
) -> None:
    task_id = TaskIds().new(now)
    assert seconds_of(task_id) == int(now * 1_000) / 1_000
    assert first_id_at(now) <= task_id < first_id_at(now + 0.002)
    assert seconds_of(task_id[:place] + wrong + task_id[place + 1 :]) is None
    assert seconds_of(task_id[:-1]) is None


async def test_a_step_of_eviction_is_bounded_in_bytes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_EVICTED_BYTES", 25_000)
    async with place.scene(evicts=True) as scene:
        for number in range(7):
            await scene.run(f"t{number}")
            await scene.settle(f"t{number}", result=msgspec.Raw(b'"' + b"x" * 10_000 + b'"'))
            scene.clock.advance(1)
        steps = [await scene.store.evict(Retention(seconds=0), limit=100) for _ in range(4)]
        assert [step.tasks for step in steps] == [3, 3, 1, 0]
        assert [step.has_more for step in steps] == [True, True, False, False]


async def test_a_dispatcher_starts_without_looking_at_what_has_ended(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.run("t1")
        await scene.settle("t1")
        await scene.submit("t2")
        plan = await scene.store.writer.submit(partial(explained, queries.BACKLOG))
        assert "live_tasks" in plan
        assert ids((await scene.store.backlog(scene.epoch)).records) == ["t2"]


async def test_a_list_of_what_few_tasks_are_reads_nothing_else(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_ROWS", 3)
    monkeypatch.setattr(queries, "MAX_SORTED_ROWS", 3)
    async with place.scene(evicts=True) as scene:
        for number in range(2):
            await scene.submit(f"a{number}")
            await scene.run(f"b{number}")
            await scene.settle(f"b{number}", FAILED)
        for number in range(8):
            await scene.run(f"c{number}")
            await scene.settle(f"c{number}")
        for states, expected in (
            ((TaskStatus.QUEUED,), ["a1", "a0"]),
            ((TaskStatus.QUEUED, TaskStatus.RUNNING), ["a1", "a0"]),
            ((TaskStatus.FAILED,), ["b1", "b0"]),
            ((TaskStatus.FAILED, TaskStatus.CANCELLED), ["b1", "b0"]),
        ):
            page = await scene.store.find(TaskQuery(states=states))
            assert (ids(page.records), page.next_before) == (expected, None)
            first = await scene.store.find(TaskQuery(states=states, limit=1))
            assert (ids(first.records), first.next_before) == (expected[:1], expected[0])
            last = await scene.store.find(TaskQuery(states=states, before=expected[0]))
            assert (ids(last.records), last.next_before) == (expected[1:], None)
            oldest = await scene.store.find(TaskQuery(states=states, is_oldest_first=True))
            assert ids(oldest.records) == expected[::-1]
            wanted = BulkFilter(states=states)
            found = await scene.store.ask(partial(queries.ids, wanted=wanted, limit=9))
            assert found == expected[::-1]
            counted = await scene.store.ask(partial(queries.count_part, wanted=wanted))
            assert counted == (2, None)
        # There are too many of these to sort; the page says that there is more.
        done = await scene.store.find(TaskQuery(states=(TaskStatus.DONE,)))
        assert (ids(done.records), done.next_before) == (["c7", "c6", "c5"], "c5")


@pytest.mark.parametrize("sql", LISTS)
async def test_such_a_list_goes_by_its_index(place: Place, sql: str) -> None:
    async with place.scene() as scene:
        assert LISTS[sql] in await scene.store.writer.submit(partial(explained, sql))


async def test_a_file_stops_growing_and_shrinks_when_tasks_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FREE_PAGES_KEPT", 20)
    monkeypatch.setattr(maintenance, "MAX_PAGES_GIVEN_BACK", 50)
    path = tmp_path / "tasks.db"
    place = Place(
        "sqlite", lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
    )
    kept = Retention(seconds=1e6, max_tasks=40)

    def page_count(transaction: Transaction) -> int:
        return int(transaction.read("PRAGMA page_count")[0][0])

    async with place.scene(evicts=True) as scene:
        pages = []
        for turn in range(4):
            for number in range(40):
                await scene.run(f"t{turn}-{number}")
                result = msgspec.Raw(b'"' + b"x" * 20_000 + b'"')
                await scene.settle(f"t{turn}-{number}", result=result)
                scene.clock.advance(0.01)
                await scene.store.evict(kept, limit=100)
            pages.append(await scene.store.writer.submit(page_count))
        # What one turn deletes is where the next one writes.
        assert max(pages[1:]) <= 1.3 * pages[0]
        step = Evicted(has_more=True)
        while step.has_more or step.tasks:
            step = await scene.store.evict(Retention(seconds=0, max_tasks=0), limit=100)
            pages.append(await scene.store.writer.submit(page_count))
            assert pages[-2] - pages[-1] <= 50
        assert pages[-1] < 0.6 * pages[3]


async def test_a_file_shrinks_while_a_busy_service_deletes_some_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "FREE_PAGES_KEPT", 20)
    path = tmp_path / "tasks.db"
    place = Place(
        "sqlite",
        lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger),
    )
    async with place.scene(evicts=True) as scene:
        for number in range(60):
            await scene.run(f"t{number}")
            await scene.settle(f"t{number}", result=msgspec.Raw(b'"' + b"x" * 20_000 + b'"'))
            scene.clock.advance(0.01)
        steps = [
            await scene.store.evict(Retention(seconds=1e6, max_tasks=most), limit=100)
            for most in (10, 9, 8)
        ]
        assert [step.tasks for step in steps] == [50, 1, 1]
        free = "PRAGMA freelist_count"
        left = await scene.store.writer.submit(lambda transaction: transaction.read(free))
        assert left[0][0] <= 30


def explained(sql: str, transaction: Transaction) -> str:
    states = tuple("queued" for _ in range(sql.count("?")))
    words = "EXPLAIN QUERY PLAN" if transaction.dialect is Dialect.SQLITE else "EXPLAIN"
    return str(transaction.read(f"{words} {sql}", states))


async def test_what_is_old_is_forgotten(place: Place) -> None:
    def purge(transaction: Transaction) -> None:
        maintenance.purge(transaction, place.clock())

    async with place.scene(evicts=True) as scene:
        old = RateCharge(limit_id="slot:a:tokens:60", bucket=5, amount=1)
        await scene.submit("t1")
        await scene.assign("t1", rate_charges=(old,))
        await scene.settle("t1")
        await scene.let_time_pass(31 * A_DAY_SECONDS)
        new = RateCharge(limit_id="slot:a:tokens:60", bucket=200, amount=1)
        await scene.submit("t2", agent_id="other")
        await scene.assign(
            "t2", agent_id="other", tick=maintenance.LANE_KEPT_TICKS, rate_charges=(new,)
        )
        await scene.store.writer.submit(purge)
        backlog = await scene.store.backlog(scene.epoch)
        assert backlog.rate_counts == (new,)
        assert [row.started for row in backlog.usage] == [1]
        assert sorted(lane.agent_id for lane in backlog.lanes) == ["coder", "other"]
        many_ticks = (
            f"UPDATE counters SET amount = {2 * maintenance.LANE_KEPT_TICKS} WHERE name = 'tick'"
        )
        await scene.store.writer.submit(lambda transaction: transaction.run(many_ticks))
        await scene.store.writer.submit(purge)
        backlog = await scene.store.backlog(scene.epoch)
        assert [lane.agent_id for lane in backlog.lanes] == ["other"]


async def test_a_lane_in_which_nothing_ever_ran_goes_when_it_is_empty(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        for agent_id in ("came", "waits"):
            await scene.submit(f"t-{agent_id}", agent_id=agent_id)
        await scene.submit("t-open", agent_id=None)
        await scene.run("t-served")
        await scene.assign("t-open", agent_id="taker")
        for task_id in ("t-open", "t-served"):
            await scene.settle(task_id)
        await scene.cancel("t-came")
        await scene.store.writer.submit(lambda tasks: maintenance.purge(tasks, place.clock()))
        totals = await scene.store.totals()
        assert {lane.agent_id for lane in totals.lanes} == {"", "coder", "taker", "waits"}
        (forgotten,) = totals.forgotten
        assert (forgotten.project_id, forgotten.submitted, forgotten.cancelled) == ("search", 1, 1)


async def test_a_lane_that_is_forgotten_leaves_what_happened_to_its_project(place: Place) -> None:
    def forget_lanes(transaction: Transaction, now: float) -> None:
        transaction.run(f"UPDATE lanes SET served_tick = {-2 * maintenance.LANE_KEPT_TICKS}")
        maintenance.purge(transaction, now)

    async with place.scene(evicts=True) as scene:
        for number in range(1, 4):
            await scene.submit(f"t{number}", agent_id=f"a{number}")
            scene.clock.advance(1.0)
            await scene.assign(f"t{number}", agent_id=f"a{number}")
            await scene.settle(f"t{number}")
            await scene.store.run(forget_lanes)
            totals = await scene.store.totals()
            (forgotten,) = totals.forgotten
            assert (totals.lanes, forgotten.started) == ((), number)
            assert forgotten.wait_ms == totals.wait_ms == 1_000 * number


async def test_the_store_keeps_its_ledger_from_growing(place: Place) -> None:
    def journal(transaction: Transaction) -> int:
        return int(transaction.read("SELECT COUNT(*) FROM ledger_journal")[0][0])

    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1")
        assert await scene.store.writer.submit(journal) == 2
        await scene.let_time_pass(2 * A_DAY_SECONDS)
        assert await scene.store.writer.submit(journal) == 0


async def test_settlements_for_a_ledger_outside_wait_in_the_outbox(place: Place) -> None:
    async with place.scene(keeps_ledger=False) as scene:
        for number in range(3):
            await scene.submit(f"t{number}")
            await scene.assign(f"t{number}", reserves=False)
        await scene.settle("t0")
        await scene.settle("t0")
        await scene.settle("t1", cost=NOTHING_USED)
        await scene.store.leave(HERE)
        await scene.store.recover(scene.epoch, ["t2"])
        epoch = scene.epoch
        expected = [
            SettleRequest(
                reservation_id=f"t0:1:{epoch}",
                call=Call.COMMIT,
                micro_usd=MicroUsd(7),
                tokens=Tokens(70),
            ),
            SettleRequest(reservation_id=f"t1:1:{epoch}", call=Call.RELEASE),
            SettleRequest(
                reservation_id=f"t2:1:{epoch}",
                call=Call.COMMIT,
                micro_usd=MicroUsd(10),
                tokens=Tokens(100),
            ),
        ]
        assert await scene.store.outbox(limit=9) == expected
        assert await scene.store.outbox(limit=1) == expected[:1]
        for _ in range(2):
            await scene.store.sent([f"t0:1:{epoch}", f"t1:1:{epoch}"])
        assert await scene.store.outbox(limit=9) == expected[2:]


@pytest.mark.parametrize("part", ["tasks", "ledger"])
async def test_newer_tables_than_the_program_knows_are_refused(place: Place, part: str) -> None:
    async with place.scene() as scene:
        newer = f"UPDATE headgate_schema SET version = 99 WHERE part = '{part}'"
        await scene.store.writer.submit(lambda transaction: transaction.run(newer))
        later = place.store()
        with pytest.raises(StoreError, match="install a newer headgate"):
            await later.open()


async def test_a_store_of_one_process_takes_earlier_nodes_for_dead(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        scene.store.is_shared = False
        await scene.store.join(Node(id=AWAY, capacity=1), lease_seconds=LEASE_SECONDS)
        elected = await scene.store.elect(AWAY, lease_seconds=LEASE_SECONDS)
        assert (elected.node_id, elected.epoch) == (AWAY, scene.epoch + 1)
        (record,) = await scene.store.recover(elected.epoch, ["t1"])
        assert record.progress.losses == 1


async def test_what_was_acknowledged_can_be_read_at_once(place: Place) -> None:
    async with place.scene() as scene:
        for number in range(50):
            await scene.submit(f"t{number}")
            assert await scene.state(f"t{number}") == "queued"


async def test_money_that_no_task_holds_any_more_is_not_held_for_ever(place: Place) -> None:
    """A reservation of a task has no lease; one that was left behind is ended."""
    async with place.scene() as scene:
        await scene.run("runs")
        await scene.run("ends")
        await scene.settle("ends")
        await scene.submit("waits")

        def leave_behind(transaction: Transaction) -> None:
            for task_id, dispatched in (("gone", True), ("ends", True), ("waits", False)):
                line = scene.line(task_id, attempt=7).reserve
                assert line is not None
                request = msgspec.structs.replace(line, dispatched=dispatched)
                (answer,) = ledger.apply_batch(transaction, [request], scene.clock())
                assert isinstance(answer, Reservation)

        await scene.store.writer.submit(leave_behind)
        assert await balance(scene) == Balance(
            spent_tokens=Tokens(70),
            spent_micro_usd=MicroUsd(7),
            reserved_tokens=Tokens(400),
            reserved_micro_usd=MicroUsd(40),
        )
        await scene.let_time_pass(UPKEEP_SECONDS - 1.0)
        assert (await balance(scene)).reserved_tokens == 400, "once a minute is enough"
        await scene.let_time_pass(2.0)
        assert await balance(scene) == Balance(
            spent_tokens=Tokens(270),
            spent_micro_usd=MicroUsd(27),
            reserved_tokens=Tokens(100),
            reserved_micro_usd=MicroUsd(10),
        ), "what had begun is assumed, what had not is given back, what runs is held"


async def balance(scene: Scene) -> Balance:
    """Read what is booked at the root."""

    def read(transaction: Transaction) -> Balance:
        return ledger.accounts(transaction, ROOT, scene.clock(), most=1)[0].balance

    return await scene.store.writer.submit(read)


async def test_more_orphans_than_fit_into_one_step_are_ended_in_several(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "HOLDERS_PER_STEP", 3)
    async with place.scene() as scene:

        def leave_behind(transaction: Transaction) -> None:
            for number in range(8):
                line = scene.line(f"gone{number}").reserve
                assert line is not None
                ledger.apply_batch(transaction, [line], scene.clock())

        await scene.store.writer.submit(leave_behind)
        for left in (500, 200, 0, 0):
            await scene.let_time_pass(UPKEEP_SECONDS + 1.0)
            assert (await balance(scene)).reserved_tokens == left
