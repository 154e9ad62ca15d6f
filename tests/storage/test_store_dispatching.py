"""What a dispatcher starts from, what it hears, and what it has remembered."""

from __future__ import annotations

import pytest

from headgate.core.gates import GateClosure, GatePart
from headgate.core.lifecycle import EXPIRED_WHILE_QUEUED, TryAgain
from headgate.core.retention import Retention
from headgate.core.task import TaskStatus
from headgate.errors import IllegalTransitionError
from headgate.storage.audit import Actor, AuditEntry
from headgate.storage.store import Expiration, News
from storage.scene import AGAIN, AWAY, HERE, LEASE_SECONDS, Place, Scene, ids


async def news(scene: Scene) -> News:
    return await scene.store.news(scene.epoch)


async def test_a_backlog_is_everything_that_has_not_ended(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.run("t2", agent_id=None)
        await scene.run("t3")
        await scene.settle("t3")
        await scene.submit("t4")
        await scene.assign("t4", node_id=AWAY, tick=9)
        backlog = await scene.store.backlog(scene.epoch)
        states = {record.task.id: record.task.status.value for record in backlog.records}
        assert states == {"t1": "queued", "t2": "running", "t4": "assigned"}
        assert [node.id for node in backlog.nodes] == [HERE, AWAY]
        lanes = {lane.agent_id: (lane.queued, lane.inflight) for lane in backlog.lanes}
        assert lanes == {"": (0, 0), "coder": (1, 2)}
        assert {lane.agent_id: lane.served_tick for lane in backlog.lanes}["coder"] == 9
        assert backlog.tick == 1


async def test_the_dispatcher_hears_nothing_of_its_own_changes(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", AGAIN)
        await scene.cancel("t1")
        told = await news(scene)
        assert (told.records, told.gone) == ((), ())


async def test_the_dispatcher_hears_of_what_others_submit_and_settle(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1", node_id=AWAY)
        await scene.submit("t2")
        await scene.submit("t3", depends_on=("t2",))
        assert ids((await news(scene)).records) == ["t1"]
        assert (await news(scene)).records == ()
        await scene.assign("t2", node_id=AWAY)
        await scene.store.collect(AWAY)
        await scene.settle("t2", node_id=AWAY)
        told = await news(scene)
        assert ids(told.records) == ["t2", "t3"]
        assert told.records[0].tokens == 70
        assert [node.id for node in told.nodes] == [HERE, AWAY]


async def test_the_dispatcher_hears_of_what_others_cancel(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        await scene.submit("t2", depends_on=("t1",))
        await scene.cancel("t1", node_id=AWAY)
        told = await news(scene)
        assert [record.task.status.value for record in told.records] == ["cancelled", "failed"]


async def test_what_was_evicted_meanwhile_is_gone(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        await scene.submit("t1", node_id=AWAY)
        await scene.cancel("t1")
        scene.clock.advance(1)
        await scene.store.evict(Retention(seconds=0), limit=10)
        told = await news(scene)
        assert (told.records, told.gone) == ((), ("t1",))


async def test_whoever_reads_the_backlog_has_no_old_news(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", node_id=AWAY)
        assert ids((await scene.store.backlog(scene.epoch)).records) == ["t1"]
        assert (await news(scene)).records == ()


async def test_while_nobody_dispatches_nobody_is_told(place: Place) -> None:
    async with place.scene() as scene:
        await scene.store.resign(HERE)
        await scene.submit("t1", node_id=AWAY)
        await scene.elect()
        assert (await news(scene)).records == ()
        assert ids((await scene.store.backlog(scene.epoch)).records) == ["t1"]


async def test_a_gate_that_a_provider_closed_is_remembered(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        until = scene.clock() + 30
        closure = GateClosure(kind="target", name="browser", until=until, why="429")
        step = TryAgain(not_before=until, rate_limit_hits=1)
        await scene.settle("t1", step, closure=closure)
        assert (await scene.store.backlog(scene.epoch)).closures == (closure,)
        await scene.let_time_pass(30)
        assert (await scene.store.backlog(scene.epoch)).closures == ()


async def test_the_dispatcher_hears_of_gates_that_others_closed(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        until = scene.clock() + 30
        closure = GateClosure(kind="target", name="browser", until=until, why="429")
        step = TryAgain(not_before=until, rate_limit_hits=1)
        await scene.settle("t1", step, node_id=AWAY, closure=closure)
        told = await news(scene)
        assert told.closures == (closure,)
        assert ids(told.records) == ["t1"]


async def test_a_gate_that_somebody_opens_is_open_and_the_dispatcher_hears_of_it(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        until = scene.clock() + 30
        closure = GateClosure(
            kind="slot",
            name="work/1",
            until=until,
            why="429",
            cause="provider",
            by="browser",
            task_id="t1",
            since=scene.clock(),
        )
        await scene.settle("t1", TryAgain(not_before=None, rate_limit_hits=1), closure=closure)
        assert await scene.store.closures() == (closure,)
        entry = AuditEntry(actor=Actor(name="it"), action="slot.open", subject="work/1")
        assert await scene.store.open_gate(closure.part, entry)
        assert await scene.store.closures() == ()
        assert (await news(scene)).opened == (closure.part,)
        assert (await news(scene)).opened == (), "it is told once"
        assert not await scene.store.open_gate(GatePart("scope", "project:a/agent:b"))
        told = await news(scene)
        assert (told.opened, told.records) == ((GatePart("scope", "project:a/agent:b"),), ())


@pytest.mark.parametrize(("first", "second"), [(30, 20), (20, 30)])
async def test_a_gate_stays_closed_for_the_longest_that_was_asked(
    place: Place, first: int, second: int
) -> None:
    async with place.scene() as scene:
        start = scene.clock()
        for number, seconds in enumerate((first, second)):
            await scene.run(f"t{number}")
            closure = GateClosure(kind="target", name="browser", until=start + seconds)
            await scene.settle(f"t{number}", closure=closure)
        (kept,) = (await scene.store.backlog(scene.epoch)).closures
        assert kept.until == start + 30


async def test_forgiven_tokens_are_remembered_by_the_hour(place: Place) -> None:
    async with place.scene() as scene:
        await scene.store.forgive(scene.epoch, {"search": 50, "crawl": 7})
        await scene.store.forgive(scene.epoch, {"search": 25})
        usage = (await scene.store.backlog(scene.epoch)).usage
        assert {row.project_id: row.forgiven for row in usage} == {"search": 75, "crawl": 7}
        await scene.let_time_pass(3_600)
        await scene.store.forgive(scene.epoch, {"search": 1})
        usage = (await scene.store.backlog(scene.epoch)).usage
        assert [row.forgiven for row in usage if row.project_id == "search"] == [75, 1]


async def test_a_deadline_that_passed_in_the_queue_is_counted_as_expired(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        await scene.submit("t2")
        drops = [
            Expiration(task_id="t1", status=TaskStatus.FAILED, error=EXPIRED_WHILE_QUEUED),
            Expiration(task_id="t2", status=TaskStatus.REJECTED, error="no money"),
            Expiration(task_id="nothing", status=TaskStatus.FAILED, error="no"),
        ]
        records = await scene.store.drop(scene.epoch, drops)
        assert [record.error for record in records] == [EXPIRED_WHILE_QUEUED, "no money"]
        totals = await scene.store.totals()
        assert (totals.failed, totals.expired, totals.rejected) == (1, 1, 1)


async def test_what_is_not_queued_any_more_is_not_dropped(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        drop = Expiration(task_id="t1", status=TaskStatus.FAILED, error="late")
        (record,) = await scene.store.drop(scene.epoch, [drop])
        assert record.task.status is TaskStatus.RUNNING


async def test_a_drop_that_the_table_does_not_have_changes_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        drop = Expiration(task_id="t1", status=TaskStatus.DONE, error="")
        with pytest.raises(IllegalTransitionError):
            await scene.store.drop(scene.epoch, [drop])
        assert await scene.lane() == (1, 0)


async def test_a_node_that_stays_elected_keeps_its_epoch(place: Place) -> None:
    async with place.scene() as scene:
        before = scene.epoch
        await scene.let_time_pass(LEASE_SECONDS / 2)
        assert scene.epoch == before
