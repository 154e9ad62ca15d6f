"""Submitting under a key, in every store: once, with the same answer, and with nothing between."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.admission import QueueLimits
from headgate.core.idempotency import (
    KEPT_SECONDS,
    InvalidEntry,
    KeyRefusal,
    OrphanEntry,
    RejectedEntry,
    SubmitKey,
    TakenEntry,
)
from headgate.core.retention import Retention
from headgate.core.task import TaskStatus
from headgate.errors import StoreUnavailableError
from headgate.storage import submit
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.sql_store import UPKEEP_SECONDS
from headgate.storage.store import (
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    Queued,
    TaskQuery,
    TurnedAway,
)
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Fault
from headgate.testing import SimulatedLoop, simulate
from storage.scene import DONE, Place, Scene, ids

Result = TypeVar("Result")

WRONG = InvalidEntry(code="invalid_field", field="priority", message="field 'priority': is wrong")
ONE_WAITS = QueueLimits(max_queue=1, max_per_agent=1)


def keyed(
    *tasks: NewTask | InvalidEntry, name: str = "k", owner: str = "", digest: str = "d"
) -> KeyedSubmit:
    return KeyedSubmit(key=SubmitKey(owner=owner, name=name, digest=digest), tasks=tasks)


async def answer_of(scene: Scene, step: KeyedSubmit) -> KeyedAnswer:
    answer = await scene.store.submit_keyed(step)
    assert isinstance(answer, KeyedAnswer), answer
    return answer


async def kept_sums(scene: Scene) -> dict[str, int]:
    def read(transaction: Transaction) -> dict[str, int]:
        names = "name IN ('submit_keys', 'submit_key_bytes')"
        counted: dict[str, int] = dict(
            transaction.read(f"SELECT name, amount FROM counters WHERE {names}")
        )
        rows = transaction.read("SELECT bytes FROM submit_keys")
        assert counted.get("submit_keys", 0) == len(rows)
        assert counted.get("submit_key_bytes", 0) == sum(row[0] for row in rows)
        by_owner = "SELECT owner, COUNT(*), SUM(bytes) FROM submit_keys GROUP BY owner ORDER BY 1"
        held = "SELECT owner, key_count, bytes FROM submit_key_owners ORDER BY 1"
        assert transaction.read(by_owner) == transaction.read(held)
        return counted

    return await scene.store.ask(read)


async def test_the_same_key_and_request_get_the_same_answer_and_one_task(place: Place) -> None:
    async with place.scene() as scene:
        first = await answer_of(scene, keyed(scene.new("t1")))
        again = await answer_of(scene, keyed(scene.new("t2")))
        assert (first.is_replay, again.is_replay) == (False, True)
        assert first.entries == again.entries
        assert isinstance(first.entries[0], TakenEntry)
        assert [type(one) for one in first.fresh] == [Queued]
        assert again.fresh == ()
        assert ids(await scene.found(TaskQuery())) == ["t1"]


async def test_the_answer_outlives_its_task(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        first = await answer_of(scene, keyed(scene.new("t1")))
        await scene.assign("t1")
        await scene.settle("t1", DONE)
        await scene.let_time_pass(1.0)
        assert (await scene.store.evict(Retention(seconds=0), limit=10)).tasks == 1
        again = await answer_of(scene, keyed(scene.new("t2")))
        assert (again.entries, again.is_replay) == (first.entries, True)
        assert await scene.states("t1", "t2") == ["gone", "gone"]


async def test_another_request_under_the_key_is_a_mismatch(place: Place) -> None:
    async with place.scene() as scene:
        await answer_of(scene, keyed(scene.new("t1")))
        other = keyed(scene.new("t2"), digest="other")
        assert await scene.store.submit_keyed(other) is KeyRefusal.MISMATCH
        assert await scene.state("t2") == "gone"


async def test_keys_belong_to_their_callers(place: Place) -> None:
    async with place.scene() as scene:
        for number, owner in enumerate(("", "tok_a", "tok_b")):
            step = keyed(scene.new(f"t{number}"), owner=owner, digest=owner)
            assert not (await answer_of(scene, step)).is_replay
        assert len(await scene.found(TaskQuery())) == 3


async def test_requests_at_the_same_time_share_one_answer(place: Place) -> None:
    async with place.scene() as scene:
        steps = [keyed(scene.new(f"t{number}")) for number in range(20)]
        answers = await asyncio.gather(*[answer_of(scene, step) for step in steps])
        assert len({answer.entries for answer in answers}) == 1
        assert [answer.is_replay for answer in answers].count(False) == 1
        assert len(await scene.found(TaskQuery())) == 1


async def test_of_a_batch_only_the_tasks_that_had_no_room_are_tried_again(place: Place) -> None:
    async with place.scene() as scene:
        orphan = scene.new("t9", depends_on=("gone",))

        async def sent(one: str, other: str) -> KeyedAnswer:
            tasks = [scene.new(name, limits=ONE_WAITS) for name in (one, other)]
            return await answer_of(scene, keyed(*tasks, WRONG, orphan))

        first = await sent("t1", "t2")
        kinds = [type(entry) for entry in first.entries]
        assert kinds == [TakenEntry, RejectedEntry, InvalidEntry, OrphanEntry]
        sums = await kept_sums(scene)
        # There is still no room, and what is kept stays as it is.
        refused = await sent("t3", "t4")
        assert [type(entry) for entry in refused.entries] == kinds
        assert (refused.is_replay, [type(one) for one in refused.fresh]) == (False, [TurnedAway])
        assert await kept_sums(scene) == sums
        await scene.cancel("t1")
        taken = await sent("t5", "t6")
        assert [type(one) for one in taken.entries] == [TakenEntry, TakenEntry, *kinds[2:]]
        assert taken.entries[0] == first.entries[0]
        assert [one.record.task.id for one in taken.fresh if isinstance(one, Queued)] == ["t6"]
        assert not taken.is_replay
        again = await sent("t7", "t8")
        assert (again.entries, again.is_replay) == (taken.entries, True)
        assert (await kept_sums(scene))["submit_keys"] == 1
        assert await scene.states("t1", "t2", "t4", "t6") == [
            "cancelled",
            "rejected",
            "rejected",
            "queued",
        ]
        assert await scene.states("t3", "t5", "t7", "t8", "t9") == ["gone"] * 5


async def test_a_batch_that_is_wrong_as_a_whole_by_now_has_its_first_answer(place: Place) -> None:
    async with place.scene() as scene:
        tasks = [scene.new(name, limits=ONE_WAITS) for name in ("t1", "t2")]
        first = await answer_of(scene, keyed(*tasks))
        again = await answer_of(scene, keyed(WRONG))
        assert (again.entries, again.is_replay) == (first.entries, True)


async def test_an_answer_that_only_says_later_is_not_kept(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("waits")
        refused = await answer_of(scene, keyed(scene.new("t1", limits=ONE_WAITS), WRONG))
        assert isinstance(refused.entries[0], RejectedEntry)
        await scene.cancel("waits")
        taken = await answer_of(scene, keyed(scene.new("t2", limits=ONE_WAITS), WRONG))
        assert (taken.is_replay, type(taken.entries[0])) == (False, TakenEntry)


@pytest.mark.parametrize("entry", [WRONG, "orphan"])
async def test_a_request_that_is_wrong_keeps_its_answer(
    place: Place, entry: InvalidEntry | str
) -> None:
    async with place.scene() as scene:
        wrong = scene.new("t1", depends_on=("t0",)) if isinstance(entry, str) else entry
        first = await answer_of(scene, keyed(wrong))
        await scene.submit("t0")
        again = await answer_of(scene, keyed(scene.new("t2")))
        assert (again.entries, again.is_replay) == (first.entries, True)
        assert ids(await scene.found(TaskQuery())) == ["t0"]


async def test_a_key_is_kept_for_a_day_and_then_goes(place: Place) -> None:
    async with place.scene() as scene:
        await answer_of(scene, keyed(scene.new("t1")))
        await scene.let_time_pass(KEPT_SECONDS)
        assert (await answer_of(scene, keyed(scene.new("t2")))).is_replay
        assert (await kept_sums(scene))["submit_keys"] == 1
        await scene.let_time_pass(UPKEEP_SECONDS + 1.0)
        assert not (await answer_of(scene, keyed(scene.new("t2"), digest="other"))).is_replay
        assert (await kept_sums(scene))["submit_keys"] == 1


async def test_old_keys_go_in_steps_and_all_of_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "PURGED_AT_ONCE", 2)
    async with place.scene() as scene:
        for number in range(5):
            await answer_of(scene, keyed(scene.new(f"t{number}"), name=f"k{number}"))
        await scene.let_time_pass(KEPT_SECONDS + UPKEEP_SECONDS + 1.0)
        for _ in range(3):
            await scene.let_time_pass(0.0)
        assert await kept_sums(scene) == {"submit_keys": 0, "submit_key_bytes": 0}


@pytest.mark.parametrize(("bound", "most"), [("MAX_KEYS", 2), ("MAX_KEPT_BYTES", 300)])
async def test_when_no_key_can_be_kept_nothing_is_done_under_a_new_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(submit, bound, most)
    async with place.scene() as scene:
        steps = [keyed(scene.new(f"t{number}"), name=f"k{number}") for number in range(3)]
        answers = await asyncio.gather(*[scene.store.submit_keyed(step) for step in steps])
        assert answers[2] is KeyRefusal.FULL
        assert await scene.state("t2") == "gone"
        # What is kept is still answered, and a task without a key is still taken.
        assert (await answer_of(scene, keyed(scene.new("t8"), name="k1"))).is_replay
        await scene.submit("t9")
        await kept_sums(scene)


@pytest.mark.parametrize(("bound", "most"), [("MAX_KEYS", 8), ("MAX_KEPT_BYTES", 1_400)])
async def test_one_token_cannot_use_up_the_keys_of_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(submit, bound, most)
    async with place.scene() as scene:
        steps = [
            keyed(scene.new(f"t{number}"), name=f"k{number}", owner="greedy") for number in range(3)
        ]
        answers = [await scene.store.submit_keyed(step) for step in steps]
        assert answers[2] is KeyRefusal.FULL
        await answer_of(scene, keyed(scene.new("u1"), owner="modest"))
        for number in range(3):
            await answer_of(scene, keyed(scene.new(f"v{number}"), name=f"v{number}"))
        await kept_sums(scene)


def count_again(transaction: Transaction, _: float) -> None:
    transaction.run("DELETE FROM submit_key_owners")
    statement = submit.MIGRATIONS[1].sqlite[1]
    assert statement in submit.MIGRATIONS[1].postgres
    transaction.run(statement)


async def test_a_store_from_before_owners_were_counted_has_them_counted(place: Place) -> None:
    async with place.scene() as scene:
        for number, owner in enumerate(("", "one", "one", "two")):
            step = keyed(scene.new(f"t{number}"), name=f"k{number}", owner=owner)
            await answer_of(scene, step)
        await scene.store.run(count_again)
        assert (await kept_sums(scene))["submit_keys"] == 4


async def test_a_step_and_its_answer_can_be_sent_to_another_process(place: Place) -> None:
    async with place.scene() as scene:
        step = keyed(scene.new("t1"), WRONG)
        assert pickle.loads(pickle.dumps(step)) == step
        answer = await answer_of(scene, step)
        assert pickle.loads(pickle.dumps(answer)) == answer


def faults_of(random: Random, share: float) -> Fault | None:
    return random.choice(list(Fault)) if random.random() < share else None


async def until_answered(step: Callable[[], Awaitable[Result]]) -> Result:
    while True:
        try:
            return await step()
        except StoreUnavailableError:
            await asyncio.sleep(0.01)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.2, 0.5, 0.8]))
def test_whatever_commits_are_refused_and_replies_lost_each_key_has_one_task(
    seed: int, share: float
) -> None:
    async def main(loop: SimulatedLoop) -> int:
        random, numbers = Random(seed), count()
        store = MemoryTaskStore(
            MemoryDatabase(), clock=loop.clock, faults=lambda: faults_of(random, share)
        )
        scene = Scene(Place("memory", lambda _clock, _ledger: store), store)

        async def submit(name: str) -> KeyedAnswer:
            return await answer_of(scene, keyed(scene.new(f"t{next(numbers)}"), name=name))

        await until_answered(store.open)
        calls = [until_answered(partial(submit, f"k{number % 3}")) for number in range(9)]
        answers = await asyncio.gather(*calls)
        assert len({answer.entries for answer in answers}) == 3
        assert all(answer.is_replay == (not answer.fresh) for answer in answers)
        return len((await until_answered(partial(store.find, TaskQuery()))).records)

    assert simulate(main, seed=seed, max_steps=50_000).result == 3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.2, 0.5, 0.8]))
def test_whatever_replies_are_lost_each_task_of_a_batch_is_taken_once(
    seed: int, share: float
) -> None:
    async def main(loop: SimulatedLoop) -> list[str]:
        random, numbers = Random(seed), count()
        store = MemoryTaskStore(
            MemoryDatabase(), clock=loop.clock, faults=lambda: faults_of(random, share)
        )
        scene = Scene(Place("memory", lambda _clock, _ledger: store), store)

        async def submit() -> KeyedAnswer:
            tasks = [scene.new(f"t{next(numbers)}", limits=ONE_WAITS) for _ in range(3)]
            return await answer_of(scene, keyed(*tasks))

        async def make_room() -> None:
            for record in (await store.find(TaskQuery())).records:
                if not record.is_terminal:
                    await store.cancel(record.task.id, node_id="")

        await until_answered(store.open)
        while True:
            answers = await asyncio.gather(*[until_answered(submit) for _ in range(2)])
            if all(isinstance(entry, TakenEntry) for entry in answers[-1].entries):
                break
            await until_answered(make_room)
        records = (await until_answered(partial(store.find, TaskQuery(limit=1_000)))).records
        taken = [one.task.id for one in records if one.task.status is not TaskStatus.REJECTED]
        named = [one.task_id for one in answers[-1].entries if isinstance(one, TakenEntry)]
        assert sorted(taken) == sorted(named)
        return taken

    assert len(simulate(main, seed=seed, max_steps=50_000).result) == 3
