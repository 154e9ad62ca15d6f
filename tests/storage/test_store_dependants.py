"""What the end of a task does to those that depend on it."""

from __future__ import annotations

import asyncio

import pytest

from headgate.core.admission import QueueLimits
from headgate.core.lifecycle import Finish
from headgate.core.task import OnParentFailure, TaskStatus, Terms
from headgate.storage.store import Expiration, NotAssigned, Queued, TurnedAway, UnknownParent
from storage.scene import AGAIN, DONE, FAILED, HERE, Place, ids

RUNS_ANYWAY = Terms(on_parent_failure=OnParentFailure.RUN)


async def test_a_task_waits_for_its_parent(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        child = await scene.submit("b", depends_on=("a",))
        assert child.progress.waiting_for == 1
        (refused,) = await scene.plan(scene.line("b"))
        assert isinstance(refused, NotAssigned)
        records = await scene.settle("a")
        assert ids(records) == ["a", "b"]
        assert records[1].progress.waiting_for == 0
        await scene.assign("b")


async def test_a_parent_that_is_tried_again_has_not_ended(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.submit("b", depends_on=("a",))
        assert ids(await scene.settle("a", AGAIN)) == ["a"]
        assert (await scene.get("b")).progress.waiting_for == 1


async def test_a_parent_that_is_done_is_not_waited_for(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.settle("a")
        child = await scene.submit("b", depends_on=("a",))
        assert child.progress.waiting_for == 0
        await scene.assign("b")


async def test_an_unknown_parent_stores_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("a")
        answer = await scene.ask(scene.new("b", depends_on=("a", "nobody")))
        assert answer == UnknownParent(parent_id="nobody")
        assert await scene.states("a", "b") == ["queued", "gone"]
        assert (await scene.store.totals()).submitted == 1


async def test_nothing_can_depend_on_itself(place: Place) -> None:
    async with place.scene() as scene:
        assert await scene.ask(scene.new("a", depends_on=("a",))) == UnknownParent(parent_id="a")


async def test_two_that_come_together_cannot_depend_on_each_other(place: Place) -> None:
    async with place.scene() as scene:
        first, second = await asyncio.gather(
            scene.ask(scene.new("a", depends_on=("b",))),
            scene.ask(scene.new("b", depends_on=("a",))),
        )
        assert first == UnknownParent(parent_id="b")
        assert second == UnknownParent(parent_id="a")


async def test_a_parent_may_come_in_the_same_batch(place: Place) -> None:
    async with place.scene() as scene:
        await asyncio.gather(
            scene.store.submit(scene.new("a")),
            scene.store.submit(scene.new("b", depends_on=("a",))),
            scene.store.cancel("a", node_id=HERE),
        )
        assert await scene.states("a", "b") == ["cancelled", "failed"]


async def test_a_parent_named_twice_counts_once(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        child = await scene.submit("b", depends_on=("a", "a"))
        assert child.progress.waiting_for == 1
        await scene.settle("a")
        await scene.assign("b")


@pytest.mark.parametrize("status", [TaskStatus.FAILED, TaskStatus.CANCELLED])
async def test_the_end_of_a_parent_fails_a_whole_chain(place: Place, status: TaskStatus) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.submit("b", depends_on=("a",))
        await scene.submit("c", depends_on=("b",))
        await scene.submit("d", depends_on=("c",))
        records = await scene.settle("a", Finish(status=status, error="no"))
        assert ids(records) == ["a", "b", "c", "d"]
        assert [record.error for record in records[1:]] == [
            f"parent a is {status.value}",
            "parent b is failed",
            "parent c is failed",
        ]
        assert await scene.lane() == (0, 0)


async def test_the_repeat_of_a_settlement_shows_the_others_again(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.submit("b", depends_on=("a",))
        await scene.submit("c", depends_on=("b",))
        first = await scene.settle("a", FAILED)
        assert await scene.settle("a", FAILED) == first
        await scene.submit("p")
        await scene.submit("q", depends_on=("p",))
        cancelled = await scene.cancel("p")
        assert await scene.cancel("p") == cancelled


async def test_a_cancelled_parent_ends_what_waits_for_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("a")
        await scene.submit("b", depends_on=("a",))
        assert ids(await scene.cancel("a")) == ["a", "b"]
        assert (await scene.get("b")).error == "parent a is cancelled"


async def test_a_dropped_parent_ends_what_waits_for_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("a")
        await scene.submit("b", depends_on=("a",))
        drop = Expiration(task_id="a", status=TaskStatus.REJECTED, error="no money")
        first = await scene.store.drop(scene.epoch, [drop])
        assert ids(first) == ["a", "b"]
        assert await scene.store.drop(scene.epoch, [drop]) == first
        assert (await scene.get("b")).error == "parent a is rejected"


async def test_a_task_may_run_whatever_its_parents_came_to(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.submit("b", depends_on=("a",), terms=RUNS_ANYWAY)
        assert ids(await scene.settle("a", FAILED)) == ["a", "b"]
        await scene.assign("b")
        late = await scene.submit("c", depends_on=("a",), terms=RUNS_ANYWAY)
        assert late.progress.waiting_for == 0


async def test_a_task_whose_parent_has_failed_is_stored_as_failed(place: Place) -> None:
    full = QueueLimits(max_queue=0)
    async with place.scene() as scene:
        await scene.run("a")
        await scene.settle("a", FAILED)
        new = scene.new("b", depends_on=("a",), limits=full)
        answer = await scene.ask(new)
        assert isinstance(answer, Queued)
        assert answer.record.task.status is TaskStatus.FAILED
        assert answer.record.error == "parent a is failed"
        assert await scene.ask(new) == answer


async def test_a_task_that_is_turned_away_is_no_dependant(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        full = QueueLimits(max_queue=0)
        refused = await scene.ask(scene.new("b", depends_on=("a",), limits=full))
        assert isinstance(refused, TurnedAway)
        assert (await scene.get("a")).progress.dependants == 0


async def test_a_diamond_starts_when_both_sides_are_done(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        for side in ("b", "c"):
            await scene.submit(side, depends_on=("a",))
        await scene.submit("d", depends_on=("b", "c"))
        await scene.settle("a")
        await scene.assign("b")
        await scene.assign("c")
        records = await scene.settle("b")
        assert records[-1].progress.waiting_for == 1
        assert ids(await scene.settle("c")) == ["c", "d"]
        await scene.assign("d")
        await scene.settle("d")
        for task_id in "abcd":
            assert (await scene.get(task_id)).progress.dependants == 0


async def test_a_diamond_fails_once(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        for side in ("b", "c"):
            await scene.submit(side, depends_on=("a",))
        await scene.submit("d", depends_on=("b", "c"))
        records = await scene.settle("a", FAILED)
        assert sorted(ids(records)) == ["a", "b", "c", "d"]
        assert (await scene.store.totals()).failed == 4


async def test_both_parents_may_end_in_the_same_batch(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("a")
        await scene.run("b")
        await scene.submit("c", depends_on=("a", "b"))
        await asyncio.gather(scene.settle("a", DONE), scene.settle("b", FAILED))
        assert await scene.state("c") == "failed"
        await scene.run("x")
        await scene.run("y")
        await scene.submit("z", depends_on=("x", "y"))
        await asyncio.gather(scene.settle("x"), scene.settle("y"))
        await scene.assign("z")


async def test_many_dependants_end_with_their_parent(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("a")
        news = [scene.new(f"b{number:03}", depends_on=("a",)) for number in range(200)]
        await asyncio.gather(*[scene.ask(new) for new in news])
        assert len(await scene.cancel("a")) == 201
        assert await scene.lane() == (0, 0)
