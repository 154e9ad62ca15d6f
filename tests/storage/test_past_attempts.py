"""Attempts after which a task was tried again, in every store: a short note of each is kept."""

from __future__ import annotations

import msgspec
import pytest

from headgate.core.lifecycle import UNKNOWN_USAGE, TryAgain, Usage
from headgate.core.task import MAX_ERROR_CHARACTERS, MAX_PAST_ATTEMPTS, PastAttempt, Progress, Terms
from headgate.storage.store import MAX_PAGE_BYTES, Overdue, TaskQuery, Visit
from storage.scene import AGAIN, AWAY, COST, DONE, FAILED, HERE, LEASE_SECONDS, Place, Scene

WORKER = "worker-1"


async def notes(scene: Scene, task_id: str = "t1") -> tuple[PastAttempt, ...]:
    return (await scene.get(task_id)).progress.attempts


async def tried(scene: Scene, attempt: int, step: TryAgain = AGAIN) -> None:
    await scene.assign("t1", attempt=attempt)
    await scene.settle("t1", step, attempt=attempt)


async def test_a_task_that_ends_with_its_first_attempt_keeps_no_note(place: Place) -> None:
    async with place.scene() as scene:
        for step, task_id in ((DONE, "t1"), (FAILED, "t2")):
            await scene.run(task_id)
            (record,) = await scene.settle(task_id, step)
            assert record.progress.attempts == ()
            assert b"attempts" not in msgspec.json.encode(record.progress)


async def test_a_failed_attempt_is_noted_with_its_times_its_place_and_its_cost(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", provider="zai")
        started_at = scene.clock()
        await scene.assign("t1", slot="work", agent_id="helper")
        await scene.let_time_pass(3)
        ended_at = scene.clock()
        (record,) = await scene.settle("t1", AGAIN, cost=COST)
        note = PastAttempt(
            attempt=1,
            started_at=started_at,
            ended_at=ended_at,
            error="once more",
            agent_id="helper",
            slot="work",
            node_id=HERE,
            tokens=70,
            micro_usd=7,
        )
        assert record.progress.attempts == (note,)
        assert await notes(scene) == (note,)
        await scene.let_time_pass(3)
        await scene.assign("t1", attempt=2)
        await scene.settle("t1", attempt=2)
        assert await notes(scene) == (note,), "the last attempt is in the record itself"


async def test_the_same_settlement_again_notes_nothing_again(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        for _ in range(2):
            await scene.settle("t1", AGAIN)
        assert len(await notes(scene)) == 1


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (UNKNOWN_USAGE, (100, 10, 100, 10)),
        (Usage(tokens=70), (70, 10, 0, 10)),
        (Usage(tokens=0, micro_usd=0), (0, 0, 0, 0)),
    ],
)
async def test_a_note_says_what_was_booked_and_what_of_it_is_assumed(
    place: Place, cost: Usage, expected: tuple[int, int, int, int]
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", AGAIN, cost=cost)
        (note,) = await notes(scene)
        booked = (note.tokens, note.micro_usd, note.assumed_tokens, note.assumed_micro_usd)
        assert booked == expected


@pytest.mark.parametrize("has_begun", [True, False])
async def test_an_attempt_that_was_lost_with_its_node_is_noted(
    place: Place, has_begun: bool
) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await tried(scene, 1)
        await scene.assign("t1", attempt=2, node_id=AWAY)
        started_at = scene.clock() if has_begun else None
        if has_begun:
            await scene.store.collect(AWAY)
        await scene.let_time_pass(LEASE_SECONDS / 2)
        await scene.let_time_pass(LEASE_SECONDS / 2 + 1)
        await scene.store.recover(scene.epoch, ["t1"])
        _, note = await notes(scene)
        assert (note.attempt, note.node_id, note.ended_at) == (2, AWAY, scene.clock())
        assert note.started_at == started_at, "the time of the attempt before is not its own"
        assert note.error == ("its node was lost" if has_begun else None)
        assert note.assumed_tokens == (100 if has_begun else 0)


async def test_an_attempt_that_a_worker_did_not_end_in_time_is_noted(place: Place) -> None:
    async with place.scene() as scene:
        visit = Visit(
            worker_id=WORKER,
            agent_id="coder",
            capacity=1,
            running={},
            lease_seconds=60.0,
            joins=True,
        )
        await scene.store.visit(visit)
        await scene.submit("t1", terms=Terms(max_attempts=2, attempt_seconds=5.0))
        await scene.assign("t1", node_id=WORKER)
        await scene.store.visit(msgspec.structs.replace(visit, joins=False))
        await scene.let_time_pass(6)
        await scene.store.give_up(scene.epoch, [Overdue(task_id="t1", attempt=1)])
        (note,) = await notes(scene)
        assert (note.node_id, note.error) == (WORKER, "timed out after 5 s")


async def test_a_task_that_is_to_be_cancelled_ends_without_a_note(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.cancel("t1")
        await scene.settle("t1", AGAIN)
        record = await scene.get("t1")
        assert (record.task.status.value, record.progress.attempts) == ("cancelled", ())


async def test_only_the_latest_attempts_are_kept(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        for attempt in range(1, MAX_PAST_ATTEMPTS + 4):
            await tried(scene, attempt)
        numbers = [note.attempt for note in await notes(scene)]
        assert numbers == list(range(4, MAX_PAST_ATTEMPTS + 4))


async def test_of_an_error_its_beginning_is_noted_whatever_is_in_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        await tried(scene, 1, TryAgain(not_before=None, error="x" * 2_000))
        await tried(scene, 2, TryAgain(not_before=None, error="a\0b\ud800 é"))
        long, strange = [note.error or "" for note in await notes(scene)]
        assert (len(long), long[-2:]) == (MAX_ERROR_CHARACTERS, "x…")
        assert strange == "ab? é"
        assert (await scene.get("t1")).error == strange


async def test_a_page_of_a_list_counts_the_notes_of_its_tasks(place: Place) -> None:
    note = PastAttempt(attempt=1, ended_at=1.0, error="\x01" * MAX_ERROR_CHARACTERS)
    full = len(msgspec.json.encode(Progress(attempts=(note,) * MAX_PAST_ATTEMPTS)))
    assert full * 1_000 > MAX_PAGE_BYTES, "else there would be nothing to count"
    async with place.scene() as scene:
        again = TryAgain(not_before=None, error="\x01" * MAX_ERROR_CHARACTERS)
        results = msgspec.Raw(b'"' + b"r" * (MAX_PAGE_BYTES - full) + b'"')
        await scene.run("t2")
        await scene.settle("t2", result=results)
        await scene.submit("t1")
        for attempt in range(1, MAX_PAST_ATTEMPTS + 1):
            await tried(scene, attempt, again)
        page = await scene.store.find(TaskQuery(limit=10))
        assert (len(page.records), page.next_before) == (1, page.records[0].task.id)
