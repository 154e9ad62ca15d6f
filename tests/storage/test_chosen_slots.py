"""The slot of an attempt, in every store: it goes with the attempt, and the task keeps its own."""

from __future__ import annotations

from headgate.core.gates import GateClosure
from headgate.core.lifecycle import TryAgain
from headgate.core.task import TaskStatus, slot_of
from headgate.storage.store import Assigned
from storage.scene import AGAIN, AWAY, Place, Scene


async def given(scene: Scene, task_id: str, slot: str | None, *, attempt: int = 1) -> str | None:
    (answer,) = await scene.plan(scene.line(task_id, slot=slot, attempt=attempt))
    assert isinstance(answer, Assigned)
    return answer.record.progress.slot


async def test_an_attempt_has_the_slot_that_was_chosen_for_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", provider="zai")
        assert await given(scene, "t1", "work") == "work"
        (kept,) = (await scene.store.backlog(scene.epoch)).records
        assert (kept.task.provider, kept.task.slot, kept.progress.slot) == ("zai", None, "work")
        await scene.settle("t1")
        ended = await scene.store.get("t1")
        assert ended is not None
        assert (ended.task.status, slot_of(ended)) == (TaskStatus.DONE, "work")


async def test_the_next_attempt_has_a_slot_of_its_own(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", provider="zai")
        await given(scene, "t1", "work")
        await scene.settle("t1", AGAIN)
        assert await given(scene, "t1", "home", attempt=2) == "home"


async def test_a_task_without_a_slot_is_kept_without_one(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        assert await given(scene, "t1", None) is None


async def test_the_dispatcher_hears_of_a_chosen_slot_that_another_node_paused(place: Place) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1", provider="zai")
        await scene.plan(scene.line("t1", node_id=AWAY, slot="work"))
        await scene.store.collect(AWAY)
        until = scene.clock() + 30
        closure = GateClosure(kind="slot", name="work", until=until, why="429")
        step = TryAgain(not_before=until, rate_limit_hits=1)
        await scene.settle("t1", step, node_id=AWAY, closure=closure)
        told = await scene.store.news(scene.epoch)
        assert told.closures == (closure,)
