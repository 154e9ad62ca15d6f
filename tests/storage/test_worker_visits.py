"""Workers in the store: a life with a lease, tasks that are handed out until they are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from headgate.core.lifecycle import Usage
from headgate.core.task import AttemptReport, ProgressReport, is_worker
from headgate.errors import LimitReachedError
from headgate.storage import nodes
from headgate.storage import workers as worker_visits
from headgate.storage.store import Node, Orders, Overdue, Visit
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import UnitOfWork
from storage.scene import AGAIN, HERE, LEASE_SECONDS, Place, Scene, ids

WORKER = "worker-1"
WORKER_LEASE_SECONDS = 30.0


async def visit(
    scene: Scene,
    *,
    worker_id: str = WORKER,
    agent_id: str = "coder",
    capacity: int | None = 2,
    running: dict[str, int] | None = None,
    joins: bool = False,
    takes: bool = True,
    reports: dict[str, ProgressReport] | None = None,
) -> Orders:
    return await scene.store.visit(
        Visit(
            worker_id=worker_id,
            agent_id=agent_id,
            capacity=capacity,
            running=running or {},
            lease_seconds=WORKER_LEASE_SECONDS,
            joins=joins,
            takes=takes,
            node_id=HERE,
            reports=reports or {},
        )
    )


async def wait(scene: Scene, seconds: float) -> None:
    """Let time pass, with a node that is alive all the while."""
    while seconds > 0:
        await scene.let_time_pass(min(seconds, LEASE_SECONDS / 2))
        seconds -= LEASE_SECONDS / 2


async def workers(scene: Scene) -> list[Node]:
    backlog = await scene.store.backlog(scene.epoch)
    return [node for node in backlog.nodes if is_worker(node.id)]


async def with_task(scene: Scene, task_id: str = "t1", **fields: object) -> None:
    """Have a worker join, and a task assigned to it."""
    await visit(scene, joins=True)
    await scene.submit(task_id, **fields)
    await scene.assign(task_id, node_id=WORKER)


async def test_a_worker_is_a_node_that_serves_an_agent(place: Place) -> None:
    async with place.scene() as scene:
        assert (await visit(scene, joins=True, capacity=3)).has_news
        (worker,) = await workers(scene)
        assert (worker.id, worker.agent_id, worker.capacity) == (WORKER, "coder", 3)
        assert worker.lease_until == scene.clock() + WORKER_LEASE_SECONDS


async def test_a_join_that_is_repeated_changes_nothing(place: Place) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        await visit(scene, joins=True)
        assert len(await workers(scene)) == 1


async def test_workers_that_join_and_are_never_seen_again_do_not_pile_up(place: Place) -> None:
    async with place.scene() as scene:
        for number in range(12):
            await visit(scene, worker_id=f"worker-{number}", joins=True)
            await wait(scene, WORKER_LEASE_SECONDS)
        assert len(await workers(scene)) <= 1
        kept = await scene.store.run(kept_rows)
        assert kept <= nodes.FORGOTTEN_AFTER_LEASES + 2


async def test_an_agent_has_a_bounded_number_of_workers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_WORKERS_PER_AGENT", 2)
    async with place.scene() as scene:
        for number in (1, 2):
            await visit(scene, worker_id=f"worker-{number}", joins=True)
        with pytest.raises(LimitReachedError, match="agent 'coder' has 2 workers"):
            await visit(scene, worker_id="worker-3", joins=True)
        assert (await visit(scene, worker_id="worker-2", joins=True)).is_alive
        other = await visit(scene, worker_id="worker-4", agent_id="other", joins=True)
        assert other.is_alive
        await visit(scene, worker_id="worker-1", capacity=0)
        assert (await visit(scene, worker_id="worker-3", joins=True)).is_alive


async def test_visits_that_come_together_are_received_in_one_transaction(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    receive = worker_visits.receive

    def counted(work: UnitOfWork, visits: Sequence[Visit]) -> list[worker_visits.Received]:
        together.append(len(visits))
        return receive(work, visits)

    monkeypatch.setattr(worker_visits, "receive", counted)
    async with place.scene() as scene:
        names = [f"worker-{number}" for number in range(20)]
        await asyncio.gather(*(visit(scene, worker_id=name, joins=True) for name in names))
        assert len(await workers(scene)) == 20
        for name in ("t1", "t2"):
            await scene.submit(name)
        await scene.assign("t1", node_id="worker-3")
        await scene.assign("t2", node_id="worker-7")
        together.clear()
        found = await asyncio.gather(*(visit(scene, worker_id=name) for name in names))
        assert sum(together) == 20
        assert len(together) <= 2
        handed_out = {
            name: ids(orders.tasks)
            for name, orders in zip(names, found, strict=True)
            if orders.tasks
        }
        assert handed_out == {"worker-3": ["t1"], "worker-7": ["t2"]}


async def test_one_visit_that_is_refused_leaves_those_beside_it_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_WORKERS_PER_AGENT", 2)
    async with place.scene() as scene:
        found = await asyncio.gather(
            *(visit(scene, worker_id=f"worker-{number}", joins=True) for number in range(4)),
            visit(scene, worker_id="worker-other", agent_id="other", joins=True),
            visit(scene, worker_id="worker-unknown"),
            return_exceptions=True,
        )
        refused = [isinstance(one, LimitReachedError) for one in found]
        assert refused == [False, False, True, True, False, False]
        alive = [one.is_alive for one in found if isinstance(one, Orders)]
        assert alive == [True, True, True, False]


async def test_a_visit_that_fails_fails_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = worker_visits.receive

    def failing(work: UnitOfWork, visits: Sequence[Visit]) -> list[worker_visits.Received]:
        if any(one.worker_id == "worker-bad" for one in visits):
            raise ValueError("a visit that nobody foresaw")
        return receive(work, visits)

    monkeypatch.setattr(worker_visits, "receive", failing)
    async with place.scene() as scene:
        names = ("worker-1", "worker-bad", "worker-2")
        found = await asyncio.gather(
            *(visit(scene, worker_id=name, joins=True) for name in names), return_exceptions=True
        )
        assert [isinstance(one, Orders) for one in found] == [True, False, True]
        assert len(await workers(scene)) == 2


async def test_two_visits_of_a_worker_are_received_one_after_the_other(place: Place) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        changes = [visit(scene, capacity=capacity) for capacity in (5, 3, 4)]
        await asyncio.gather(*changes)
        assert [worker.capacity for worker in await workers(scene)] == [4]


async def test_answers_that_are_too_large_together_come_one_after_the_other(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_visits, "MAX_TOGETHER_BYTES", 1)
    async with place.scene() as scene:
        names = [f"worker-{number}" for number in range(4)]
        for number, name in enumerate(names):
            await visit(scene, worker_id=name, joins=True)
            await scene.submit(f"t{number}")
            await scene.assign(f"t{number}", node_id=name)
        found = await asyncio.gather(*(visit(scene, worker_id=name) for name in names))
        assert [ids(orders.tasks) for orders in found] == [["t0"], ["t1"], ["t2"], ["t3"]]


async def test_the_dispatcher_is_told_of_the_workers_that_changed_and_counts_the_others(
    place: Place,
) -> None:
    async with place.scene() as scene:
        for number in (1, 2, 3):
            await visit(scene, worker_id=f"worker-{number}", joins=True)
        told = await scene.store.news(scene.epoch)
        assert (told.workers, told.has_all_workers) == ((3, 6), True)
        await visit(scene, worker_id="worker-1", capacity=5)
        await visit(scene, worker_id="worker-2", capacity=0)
        await visit(scene, worker_id="worker-3")
        told = await scene.store.news(scene.epoch, all_workers=False)
        changed = [(one.id, one.capacity) for one in told.nodes if is_worker(one.id)]
        assert changed == [("worker-1", 5)]
        assert (told.gone_workers, told.workers) == (("worker-2",), (2, 7))
        assert (told.records, told.gone) == ((), ())
        await wait(scene, WORKER_LEASE_SECONDS)
        told = await scene.store.news(scene.epoch, all_workers=False)
        assert (told.gone_workers, told.workers) == ((), (0, 0))


async def test_the_dispatcher_is_told_of_a_worker_that_comes_late(place: Place) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        await wait(scene, WORKER_LEASE_SECONDS)
        await scene.store.news(scene.epoch)
        await visit(scene)
        told = await scene.store.news(scene.epoch, all_workers=False)
        assert [one.id for one in told.nodes if is_worker(one.id)] == [WORKER]


def kept_rows(transaction: Transaction, _now: float) -> int:
    (row,) = transaction.read("SELECT COUNT(*) FROM workers", ())
    return int(row[0])


async def test_what_is_assigned_is_started_by_the_next_visit(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        assert await scene.state("t1") == "assigned"
        orders = await visit(scene)
        assert ids(orders.tasks) == ["t1"]
        assert orders.tasks[0].submission.action == "click"
        assert await scene.state("t1") == "running"


async def test_a_task_is_handed_out_again_until_the_worker_names_it(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        assert ids((await visit(scene)).tasks) == ["t1"]
        assert ids((await visit(scene)).tasks) == ["t1"]
        assert (await visit(scene, running={"t1": 1})).tasks == ()
        assert (await scene.get("t1")).progress.attempt == 1


async def test_a_heartbeat_renews_the_lease_and_hands_nothing_out(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await wait(scene, 20.0)
        orders = await visit(scene, capacity=None, takes=False)
        assert (orders.is_alive, orders.tasks, orders.has_news) == (True, (), False)
        await wait(scene, 20.0)
        assert [worker.capacity for worker in await workers(scene)] == [2]
        assert await scene.state("t1") == "assigned"


async def test_a_worker_settles_under_its_own_lease_and_a_repeat_gets_its_answer(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.settle("t1", node_id=WORKER)
        await scene.settle("t1", node_id=WORKER)
        assert await scene.state("t1") == "done"
        assert (await visit(scene, running={"t1": 1})).lost == ("t1",)


async def test_a_worker_that_comes_late_goes_on_if_nobody_took_its_tasks(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await wait(scene, WORKER_LEASE_SECONDS + 5.0)
        assert await workers(scene) == []
        orders = await visit(scene, running={"t1": 1})
        assert (orders.is_alive, orders.lost) == (True, ())
        await scene.settle("t1", node_id=WORKER)


async def test_a_worker_whose_tasks_were_taken_back_is_not_alive_and_stays_so(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await wait(scene, WORKER_LEASE_SECONDS)
        assert ids(await scene.store.recover(scene.epoch, ["t1"])) == ["t1"]
        assert not (await visit(scene, running={"t1": 1})).is_alive
        scene.clock.set_back(WORKER_LEASE_SECONDS)
        assert not (await visit(scene, running={"t1": 1})).is_alive


async def test_a_worker_that_comes_late_needs_room_as_a_new_one_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MAX_WORKERS_PER_AGENT", 1)
    async with place.scene() as scene:
        await visit(scene, joins=True)
        await wait(scene, WORKER_LEASE_SECONDS)
        await visit(scene, worker_id="worker-2", joins=True)
        with pytest.raises(LimitReachedError):
            await visit(scene)


async def test_nobody_poses_as_the_worker_of_another_agent(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        assert not (await visit(scene, agent_id="other")).is_alive
        assert ids((await visit(scene)).tasks) == ["t1"]


async def test_tasks_of_a_dead_worker_are_taken_back_and_what_it_says_is_stale(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await wait(scene, WORKER_LEASE_SECONDS)
        (record,) = await scene.store.recover(scene.epoch, ["t1"])
        assert (record.task.status.value, record.progress.losses) == ("queued", 1)
        assert record.tokens == 100
        assert await scene.is_stale(scene.settlement("t1", node_id=WORKER))
        await scene.assign("t1", attempt=2)
        assert await scene.is_stale(scene.settlement("t1", node_id=WORKER))


async def test_a_task_that_a_live_worker_has_is_not_taken_back(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await wait(scene, LEASE_SECONDS)
        assert await scene.store.recover(scene.epoch, ["t1"]) == []
        assert ids((await visit(scene)).tasks) == ["t1"]


async def test_a_worker_that_leaves_gives_back_what_it_has_not_begun(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        orders = await visit(scene, capacity=0)
        assert (orders.is_alive, orders.tasks, orders.has_news) == (True, (), True)
        record = await scene.get("t1")
        assert (record.task.status.value, record.progress.losses) == ("queued", 0)
        assert record.tokens == 0
        assert await workers(scene) == []
        assert not (await visit(scene)).is_alive


async def test_a_worker_that_leaves_keeps_what_it_runs_until_it_has_ended(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await visit(scene, capacity=0, running={"t1": 1})
        assert [worker.capacity for worker in await workers(scene)] == [0]
        assert (await visit(scene, capacity=None, takes=False)).is_alive
        await scene.settle("t1", node_id=WORKER)
        await visit(scene, capacity=0)
        assert await workers(scene) == []


async def test_a_worker_that_leaves_loses_what_it_does_not_name(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await visit(scene, capacity=0)
        record = await scene.get("t1")
        assert (record.task.status.value, record.progress.losses) == ("queued", 1)
        assert record.tokens == 100


async def test_a_claim_that_waited_does_not_offer_places_again(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await visit(scene, capacity=0, running={"t1": 1})
        orders = await visit(scene, capacity=None)
        assert (orders.is_alive, orders.tasks) == (True, ())
        assert await scene.state("t1") == "running"


async def test_a_cancel_is_told_to_the_worker_until_it_has_stopped(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.cancel("t1")
        for takes in (True, False):
            orders = await visit(scene, capacity=None, running={"t1": 1}, takes=takes)
            assert orders.cancelled == ("t1",)
        await scene.settle("t1", AGAIN, node_id=WORKER)
        assert await scene.state("t1") == "cancelled"
        assert (await visit(scene)).cancelled == ()


async def test_a_cancelled_task_that_the_worker_does_not_have_ends_by_its_next_claim(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.cancel("t1")
        orders = await visit(scene)
        assert (orders.tasks, orders.cancelled) == ((), ())
        assert await scene.state("t1") == "cancelled"


async def test_an_attempt_beyond_its_deadline_is_given_up_and_booked_in_full(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        assert await give_up(scene) == ["running"]
        await set_deadline(scene, scene.clock() + 5.0)
        await wait(scene, 6.0)
        assert await give_up(scene, "t2", attempt=2) == ["running"]
        assert await give_up(scene, "t2") == ["failed"]
        record = await scene.get("t2")
        assert record.error == "deadline exceeded while running"
        assert record.tokens == 100
        assert await scene.is_stale(scene.settlement("t2", node_id=WORKER))
        assert (await visit(scene, running={"t1": 1, "t2": 1})).lost == ("t2",)


async def test_an_attempt_that_is_not_stopped_is_given_up_as_cancelled(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.cancel("t1")
        assert await give_up(scene) == ["cancelled"]
        assert (await scene.get("t1")).tokens == 100


async def test_workers_outlive_the_only_process_of_a_store(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        scene.store.is_shared = False
        scene.clock.advance(3_600.0)
        await scene.store.join(Node(id="n9", capacity=8), lease_seconds=LEASE_SECONDS)
        elected = await scene.store.elect("n9", lease_seconds=LEASE_SECONDS)
        assert [node.id for node in (await scene.store.backlog(elected.epoch)).nodes] == [
            "n9",
            WORKER,
        ]
        assert await scene.store.recover(elected.epoch, ["t1"]) == []
        assert (await visit(scene, running={"t1": 1})).lost == ()
        await scene.settle("t1", node_id=WORKER)
        scene.clock.advance(WORKER_LEASE_SECONDS)
        elected = await scene.store.elect("n9", lease_seconds=LEASE_SECONDS)
        backlog = await scene.store.backlog(elected.epoch)
        assert [node.id for node in backlog.nodes] == ["n9"]


async def test_while_a_node_was_there_no_worker_is_given_grace(place: Place) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        await wait(scene, WORKER_LEASE_SECONDS - 1.0)
        await scene.join_away()
        await wait(scene, 2.0)
        assert await workers(scene) == []


async def test_signs_of_life_alone_keep_tasks_and_no_offer(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.submit("t2")
        await scene.assign("t2", node_id=WORKER)
        await wait(scene, WORKER_LEASE_SECONDS - 1)
        running = {"t1": 1}
        assert not (await visit(scene, capacity=None, takes=False, running=running)).has_news
        await wait(scene, 2.0)
        orders = await visit(scene, capacity=None, takes=False, running=running)
        assert (orders.is_alive, orders.lost, orders.has_news) == (True, (), True)
        assert await scene.states("t1", "t2") == ["running", "queued"]
        assert [worker.capacity for worker in await workers(scene)] == [0]
        assert (await visit(scene, running=running)).has_news
        assert [worker.capacity for worker in await workers(scene)] == [2]


async def test_one_answer_has_a_bounded_number_of_tasks(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_visits, "MAX_HANDED_OUT", 2)
    async with place.scene() as scene:
        await visit(scene, joins=True, capacity=9)
        for task_id in ("t1", "t2", "t3"):
            await scene.submit(task_id)
            await scene.assign(task_id, node_id=WORKER)
        assert ids((await visit(scene, capacity=9)).tasks) == ["t1", "t2"]
        orders = await visit(scene, capacity=9, running={"t1": 1, "t2": 1})
        assert ids(orders.tasks) == ["t3"]


async def test_one_answer_has_a_bounded_size_and_always_a_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_visits, "MAX_HANDED_OUT_BYTES", 1)
    async with place.scene() as scene:
        await visit(scene, joins=True, capacity=9)
        for task_id in ("t1", "t2"):
            await scene.submit(task_id)
            await scene.assign(task_id, node_id=WORKER)
        assert ids((await visit(scene, capacity=9)).tasks) == ["t1"]
        assert await scene.state("t2") == "assigned"


async def test_a_settlement_of_a_worker_is_news_where_it_was_not_written(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await scene.store.news(scene.epoch)
        settlement = scene.settlement("t1", node_id=WORKER, cost=Usage(tokens=1, micro_usd=1))
        await scene.store.settle(settlement)
        assert ids((await scene.store.news(scene.epoch)).records) == ["t1"]


HALF = ProgressReport(fraction=0.5, text="half")


async def report_of(scene: Scene, task_id: str = "t1") -> ProgressReport | None:
    return (await scene.get(task_id)).progress.report


async def test_what_a_worker_reports_is_kept_while_the_attempt_runs(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        first_at = scene.clock()
        await visit(scene, running={"t1": 1}, reports={"t1": HALF, "t2": HALF})
        assert await report_of(scene) == msgspec.structs.replace(HALF, at=first_at)
        # Sooner than a second later, and again the same: neither is written.
        await visit(scene, running={"t1": 1}, reports={"t1": ProgressReport(fraction=0.6)})
        await wait(scene, 2.0)
        await visit(scene, running={"t1": 1}, reports={"t1": HALF})
        await visit(scene, running={"t1": 1})
        assert await report_of(scene) == msgspec.structs.replace(HALF, at=first_at)
        await visit(scene, running={"t1": 1}, reports={"t1": ProgressReport(fraction=9.0)})
        assert await report_of(scene) == ProgressReport(fraction=1.0, at=scene.clock())
        await scene.settle("t1", node_id=WORKER)
        assert await report_of(scene) is None


async def test_a_worker_reports_of_its_own_attempts_alone(place: Place) -> None:
    async with place.scene() as scene:
        await with_task(scene)
        await visit(scene)
        await visit(scene, worker_id="worker-2", joins=True)
        running = {"t1": 1}
        await visit(scene, worker_id="worker-2", running=running, reports={"t1": HALF})
        assert await report_of(scene) is None
        await visit(scene, running={"t1": 2}, reports={"t1": HALF})
        assert await report_of(scene) is None


async def test_what_an_attempt_reports_is_gone_with_it(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        reports = [
            AttemptReport(task_id="t1", attempt=1, report=HALF),
            AttemptReport(task_id="unknown", attempt=1, report=HALF),
        ]
        await scene.store.report(reports)
        assert await report_of(scene) == msgspec.structs.replace(HALF, at=scene.clock())
        await scene.settle("t1", step=AGAIN)
        assert await report_of(scene) is None
        await scene.store.report(reports)
        assert await report_of(scene) is None
        await scene.let_time_pass(60.0)
        await scene.assign("t1", attempt=2)
        await scene.store.report(reports)
        assert await report_of(scene) is None


async def give_up(scene: Scene, task_id: str = "t1", *, attempt: int = 1) -> list[str]:
    overdue = [Overdue(task_id=task_id, attempt=attempt)]
    records = await scene.store.give_up(scene.epoch, overdue)
    return [record.task.status.value for record in records]


async def set_deadline(scene: Scene, deadline: float) -> None:
    """Have the worker run a second task, which has a deadline."""
    await scene.submit("t2", deadline=deadline)
    await scene.assign("t2", node_id=WORKER)
    await visit(scene, running={"t1": 1})
