"""How plans are applied: wholly or not at all, once, and only by whoever dispatches."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headgate.core.admission import QueueLimits
from headgate.core.rate_limits import RateCharge
from headgate.core.task import MAX_LOSSES, Choice, Submission, TaskStatus
from headgate.errors import StaleEpochError
from headgate.storage.store import (
    Assigned,
    Expiration,
    Heir,
    Node,
    NotAssigned,
    Queued,
    TurnedAway,
)
from storage.scene import AGAIN, AWAY, HERE, LEASE_SECONDS, Place, ids


async def test_a_plan_repeats_its_answer(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", submission=Submission(action="type"))
        line = scene.line("t1")
        first = await scene.plan(line)
        assert isinstance(first[0], Assigned)
        assert first[0].record.submission.action == "type"
        assert await scene.plan(line) == first
        assert (await scene.store.totals()).started == 1


async def test_a_task_keeps_why_its_latest_attempt_was_started(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        chosen = Choice(projects=3, target_share=0.25, is_guaranteed=True, ready=9)
        await scene.plan(msgspec.structs.replace(scene.line("t1"), choice=chosen))
        assert (await scene.get("t1")).progress.choice == chosen
        await scene.settle("t1", AGAIN)
        assert (await scene.get("t1")).progress.choice == chosen
        await scene.plan(scene.line("t1", attempt=2))
        await scene.settle("t1", attempt=2)
        assert (await scene.get("t1")).progress.choice is None


async def test_a_task_is_assigned_in_the_transaction_that_stores_it(place: Place) -> None:
    async with place.scene() as scene:
        new = scene.new("t1", provider="zai", submission=Submission(action="type"))
        line = scene.line("t1", slot="work")
        queued, (assigned,) = await asyncio.gather(scene.ask(new), scene.plan(line))
        assert isinstance(queued, Queued)
        assert queued.record.task.status is TaskStatus.QUEUED
        assert isinstance(assigned, Assigned)
        assert assigned.record.submission.action == "type"
        kept = await scene.get("t1")
        assert (kept.task.status, kept.progress.slot) == (TaskStatus.RUNNING, "work")
        assert kept.progress == assigned.record.progress
        await scene.settle("t1")


async def test_a_task_that_is_turned_away_is_not_assigned_in_the_same_transaction(
    place: Place,
) -> None:
    async with place.scene() as scene:
        no_room = QueueLimits(max_queue=0, max_per_agent=None)
        for task_id, is_kept in (("t1", True), ("t2", False)):
            new = scene.new(task_id, limits=no_room)
            new = msgspec.structs.replace(new, keeps_refusal=is_kept)
            refused, (line,) = await asyncio.gather(scene.ask(new), scene.plan(scene.line(task_id)))
            assert isinstance(refused, TurnedAway)
            assert isinstance(line, NotAssigned)
            assert (line.record is not None) is is_kept
        assert (await scene.store.totals()).started == 0


async def test_a_plan_of_an_old_epoch_takes_no_task_with_it(place: Place) -> None:
    async with place.scene() as scene:
        plan = scene.store.assign(scene.epoch - 1, [scene.line("t1")])
        queued, stale = await asyncio.gather(
            scene.ask(scene.new("t1")), plan, return_exceptions=True
        )
        assert isinstance(queued, Queued)
        assert isinstance(stale, StaleEpochError)
        assert await scene.state("t1") == "queued"


async def test_a_line_that_is_too_late_changes_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        other = msgspec.structs.replace(scene.line("t1"), reservation_id="other")
        (taken,) = await scene.plan(other)
        assert isinstance(taken, NotAssigned)
        assert taken.record == msgspec.structs.replace(
            await scene.get("t1"), submission=Submission()
        )
        await scene.settle("t1", AGAIN)
        (old,) = await scene.plan(scene.line("t1", attempt=1))
        assert isinstance(old, NotAssigned)
        (ahead,) = await scene.plan(scene.line("t1", attempt=3))
        assert isinstance(ahead, NotAssigned)
        await scene.assign("t1", attempt=2)


async def test_a_task_that_is_gone_is_not_assigned(place: Place) -> None:
    async with place.scene() as scene:
        (gone,) = await scene.plan(scene.line("nothing"))
        assert gone == NotAssigned(task_id="nothing", record=None)


async def test_what_was_cancelled_meanwhile_is_not_assigned(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        await scene.cancel("t1")
        (answer,) = await scene.plan(scene.line("t1"))
        assert isinstance(answer, NotAssigned)
        assert answer.record is not None
        assert answer.record.task.status is TaskStatus.CANCELLED


async def test_a_budget_refuses_one_line_and_not_the_others(place: Place) -> None:
    async with place.scene() as scene:
        await scene.set_limit("project:search", 250)
        for number in range(4):
            await scene.submit(f"t{number}")
        lines = [scene.line(f"t{number}", tokens=100) for number in range(3)]
        lines.append(scene.line("t3", tokens=50))
        answers = await scene.plan(*lines)
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == ["Assigned", "Assigned", "NotAssigned", "Assigned"]
        refused = answers[2]
        assert isinstance(refused, NotAssigned)
        assert refused.refused is not None
        assert (refused.refused.scope, refused.refused.reserved) == ("project:search", 200)
        assert await scene.lane() == (1, 3)


async def test_several_plans_at_once_never_pass_a_limit(place: Place) -> None:
    async with place.scene() as scene:
        await scene.set_limit("", 300)
        for number in range(8):
            await scene.submit(f"t{number}")
        plans = [scene.plan(scene.line(f"t{number}")) for number in range(8)]
        answers = [answer for (answer,) in await asyncio.gather(*plans)]
        assert sum(isinstance(answer, Assigned) for answer in answers) == 3


async def test_two_plans_for_one_task_take_it_once(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        line = scene.line("t1")
        rival = msgspec.structs.replace(line, reservation_id="other", reserve=None)
        first, second = await asyncio.gather(scene.plan(line), scene.plan(rival))
        assert isinstance(first[0], Assigned)
        assert isinstance(second[0], NotAssigned)


async def test_a_reservation_id_that_is_taken_assigns_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.submit("t2")
        await scene.submit("t3")
        line = scene.line("t2", tokens=5)
        assert line.reserve is not None
        taken = msgspec.structs.replace(line.reserve, reservation_id=f"t1:1:{scene.epoch}")
        lines = [msgspec.structs.replace(line, reserve=taken), scene.line("t3")]
        refused, assigned = await scene.plan(*lines)
        assert isinstance(refused, NotAssigned)
        assert isinstance(assigned, Assigned)


async def test_a_reservation_that_is_over_holds_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1")
        await scene.submit("t2")
        line, first = scene.line("t2"), scene.line("t1")
        (answer,) = await scene.plan(msgspec.structs.replace(line, reserve=first.reserve))
        assert isinstance(answer, NotAssigned)
        assert await scene.lane() == (1, 0)


async def test_rate_charges_are_summed_by_bucket(place: Place) -> None:
    async with place.scene() as scene:
        charges = (
            RateCharge(limit_id="slot:a:requests:60", bucket=7, amount=1),
            RateCharge(limit_id="slot:a:tokens:60", bucket=7, amount=100),
        )
        for number in range(3):
            await scene.submit(f"t{number}")
        await scene.plan(*[scene.line(f"t{number}", rate_charges=charges) for number in range(2)])
        await scene.assign("t2", rate_charges=charges)
        kept = (await scene.store.backlog(scene.epoch)).rate_counts
        assert {charge.limit_id: charge.amount for charge in kept} == {
            "slot:a:requests:60": 3,
            "slot:a:tokens:60": 300,
        }


async def test_an_epoch_that_is_over_changes_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        stale = scene.epoch
        await scene.let_time_pass(LEASE_SECONDS)
        assert scene.epoch > stale
        line = scene.line("t1")
        with pytest.raises(StaleEpochError):
            await scene.store.assign(stale, [line])
        with pytest.raises(StaleEpochError):
            await scene.store.drop(
                stale, [Expiration(task_id="t1", status=TaskStatus.FAILED, error="late")]
            )
        with pytest.raises(StaleEpochError):
            await scene.store.recover(stale, ["t1"])
        for read in (scene.store.backlog, scene.store.news):
            with pytest.raises(StaleEpochError):
                await read(stale)
        assert await scene.state("t1") == "queued"


async def test_a_stale_plan_does_not_spoil_one_beside_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        stale = scene.store.assign(scene.epoch - 1, [scene.line("t1")])
        good = scene.plan(scene.line("t1"))
        first, second = await asyncio.gather(stale, good, return_exceptions=True)
        assert isinstance(first, StaleEpochError)
        assert isinstance(second, list)
        assert isinstance(second[0], Assigned)


async def test_nothing_is_assigned_to_a_node_that_is_not_alive(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        (unknown,) = await scene.plan(scene.line("t1", node_id=AWAY))
        assert isinstance(unknown, NotAssigned)
        await scene.join_away()
        await scene.let_time_pass(LEASE_SECONDS / 2)
        await scene.let_time_pass(LEASE_SECONDS / 2)
        (dead,) = await scene.plan(scene.line("t1", node_id=AWAY))
        assert isinstance(dead, NotAssigned)


async def test_another_node_starts_what_it_collects(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1", submission=Submission(action="type"))
        assigned = await scene.assign("t1", node_id=AWAY)
        assert assigned.task.status is TaskStatus.ASSIGNED
        assert assigned.progress.started_at is None
        scene.clock.advance(1)
        collected = await scene.store.collect(AWAY)
        (record,) = collected.started
        assert record.task.status is TaskStatus.RUNNING
        assert record.submission.action == "type"
        assert record.progress.started_at == scene.clock()
        assert (await scene.store.collect(AWAY)).started == ()
        assert (await scene.store.collect(HERE)).started == ()
        await scene.settle("t1", node_id=AWAY)
        assert await scene.state("t1") == "done"


async def test_a_node_hears_of_what_it_has_to_cancel(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        await scene.cancel("t1")
        await scene.cancel("t1")
        assert (await scene.store.collect(AWAY)).cancelled == ("t1",)
        assert (await scene.store.collect(AWAY)).cancelled == ()


async def test_a_node_that_asks_itself_is_not_told(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.cancel("t1", node_id=HERE)
        assert (await scene.store.collect(HERE)).cancelled == ()


async def test_a_node_that_is_not_alive_collects_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.let_time_pass(LEASE_SECONDS / 2)
        await scene.let_time_pass(LEASE_SECONDS / 2)
        assert (await scene.store.collect(AWAY)).started == ()
        assert await scene.state("t1") == "assigned"
        (record,) = await scene.store.recover(scene.epoch, ["t1"])
        assert record.task.status is TaskStatus.QUEUED


async def test_an_heir_goes_on_with_what_outlives_its_node(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        (started,) = (await scene.store.collect(AWAY)).started
        heir = Heir(node_id=HERE, targets=frozenset({"browser"}))
        assert await scene.store.recover(scene.epoch, ["t1"], heir=heir) == []
        await scene.store.leave(AWAY)
        (record,) = await scene.store.recover(scene.epoch, ["t1"], heir=heir)
        assert heir.has(record)
        assert record.task.status is TaskStatus.RUNNING
        before, after = started.progress, record.progress
        assert (after.node_id, after.attempt, after.losses) == (HERE, before.attempt, 0)
        assert after.reservation_id == before.reservation_id
        assert (await scene.store.recover(scene.epoch, ["t1"], heir=heir)) == []


async def test_an_heir_takes_nothing_that_ended_with_its_node(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        await scene.store.leave(AWAY)
        heir = Heir(node_id=HERE, targets=frozenset({"cluster"}))
        (record,) = await scene.store.recover(scene.epoch, ["t1"], heir=heir)
        assert record.task.status is TaskStatus.QUEUED
        assert record.progress.losses == 1


async def test_what_a_dead_node_ran_is_lost_and_booked_in_full(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        assert await scene.store.recover(scene.epoch, ["t1"]) == []
        await scene.store.leave(AWAY)
        (record,) = await scene.store.recover(scene.epoch, ["t1"])
        assert record.task.status is TaskStatus.QUEUED
        assert (record.progress.losses, record.tokens, record.micro_usd) == (1, 100, 10)
        assert record.error == "its node was lost"
        assert await scene.store.recover(scene.epoch, ["t1"]) == [record]
        assert await scene.is_stale(scene.settlement("t1", node_id=AWAY))
        await scene.assign("t1", attempt=2)
        assert await scene.is_stale(scene.settlement("t1", node_id=AWAY))


async def test_what_was_only_assigned_costs_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.leave(AWAY)
        (record,) = await scene.store.recover(scene.epoch, ["t1"])
        assert (record.progress.losses, record.tokens, record.error) == (0, 0, None)


async def test_a_lost_task_that_was_to_be_cancelled_is_cancelled(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.submit("t2", depends_on=("t1",))
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        await scene.cancel("t1")
        await scene.store.leave(AWAY)
        records = await scene.store.recover(scene.epoch, ["t1"])
        assert ids(records) == ["t1", "t2"]
        assert await scene.states("t1", "t2") == ["cancelled", "failed"]


async def test_a_task_that_kills_its_nodes_fails_in_the_end(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        for life in range(MAX_LOSSES):
            node_id = f"life-{life}"
            await scene.store.join(Node(id=node_id, capacity=1), lease_seconds=LEASE_SECONDS)
            await scene.assign("t1", attempt=life + 1, node_id=node_id)
            await scene.store.collect(node_id)
            await scene.store.leave(node_id)
            await scene.store.recover(scene.epoch, ["t1"])
        assert await scene.state("t1") == "failed"


async def test_money_that_went_back_before_the_node_came_is_decided_again(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        line = scene.line("t1", node_id=AWAY)
        assert line.reserve is not None
        short = msgspec.structs.replace(line.reserve, lease_seconds=1.0)
        await scene.plan(msgspec.structs.replace(line, reserve=short))
        scene.clock.advance(2)
        assert (await scene.store.collect(AWAY)).started == ()
        record = await scene.get("t1")
        assert record.task.status is TaskStatus.QUEUED
        await scene.assign("t1", attempt=2)


async def test_a_settlement_ends_a_task_whose_reservation_has_expired(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        line = scene.line("t1")
        assert line.reserve is not None
        short = msgspec.structs.replace(line.reserve, lease_seconds=1.0)
        await scene.plan(msgspec.structs.replace(line, reserve=short))
        scene.clock.advance(2)
        (record,) = await scene.settle("t1")
        assert record.task.status is TaskStatus.DONE


async def test_a_start_is_counted_with_the_agent_that_took_the_task(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("open", agent_id=None)
        record = await scene.assign("open", agent_id="taker")
        assert record.agent_id == "taker"
        lanes = {lane.agent_id: lane for lane in (await scene.store.totals()).lanes}
        assert (lanes["taker"].started, lanes[""].started) == (1, 0)
        assert (lanes[""].submitted, lanes["taker"].submitted) == (1, 0)
