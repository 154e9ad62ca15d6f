"""Two nodes on one PostgreSQL: one dispatches at a time, and what is over stays over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import count

import psycopg
import pytest

from budgets.servers import running_postgres
from headgate.core.admission import QueueLimits
from headgate.core.lifecycle import NOTHING_USED, Finish
from headgate.core.task import Lease, Submission, Task, TaskStatus, Terms
from headgate.errors import StaleEpochError, StoreUnavailableError
from headgate.storage.ledger import lock_ledger
from headgate.storage.postgres import PostgresDatabase, PostgresTaskStore
from headgate.storage.store import (
    DISPATCHER,
    Assigned,
    Assignment,
    NewTask,
    Node,
    Queued,
    Settled,
    Settlement,
    StaleLease,
)
from headgate.storage.transaction import LostTransactionError
from headgate.storage.writer import ChildStarter
from headgate.testing import VirtualClock
from service.support import wait_until

LEASE_SECONDS = 3.0
NODE_LEASE_SECONDS = 10.0
PATIENCE_SECONDS = 30.0
NO_LIMITS = QueueLimits(max_queue=None, max_per_agent=None)


class Pair:
    """Two stores over the same tables, as two processes have them; `n1` dispatches at first."""

    def __init__(self, url: str) -> None:
        self.clock = VirtualClock()
        self.first = PostgresTaskStore(url, clock=self.clock)
        self.second = PostgresTaskStore(url, clock=self.clock)
        self.epoch = 0

    async def start(self) -> None:
        await self.first.open()
        await self.second.open()
        for store, node_id in ((self.first, "n1"), (self.second, "n2")):
            await store.join(Node(id=node_id, capacity=4), lease_seconds=NODE_LEASE_SECONDS)
        elected = await self.first.elect("n1", lease_seconds=LEASE_SECONDS)
        assert elected.node_id == "n1"
        self.epoch = elected.epoch

    async def take_over(self) -> int:
        """Let the first node's leases end, and the second one be elected."""
        self.clock.advance(LEASE_SECONDS)
        elected = await self.second.elect("n2", lease_seconds=LEASE_SECONDS)
        assert elected.node_id == "n2"
        return elected.epoch


@asynccontextmanager
async def two_nodes(url: str) -> AsyncIterator[Pair]:
    pair = Pair(url)
    await pair.start()
    try:
        yield pair
    finally:
        await pair.first.close()
        await pair.second.close()


def new_task(task_id: str, *, by: str) -> NewTask:
    return NewTask(
        task=Task(id=task_id, project_id="default", agent_id="a1"),
        terms=Terms(),
        submission=Submission(action="click"),
        limits=NO_LIMITS,
        node_id=by,
    )


def assignment(task_id: str, *, to: str, starts: bool = False, attempt: int = 1) -> Assignment:
    return Assignment(
        task_id=task_id,
        attempt=attempt,
        agent_id="a1",
        node_id=to,
        starts=starts,
        reservation_id="",
        share_tokens=0,
    )


def done(task_id: str, *, by: str, attempt: int = 1) -> Settlement:
    return Settlement(
        task_id=task_id,
        lease=Lease(node_id=by, attempt=attempt),
        step=Finish(status=TaskStatus.DONE),
        cost=NOTHING_USED,
    )


async def status_of(store: PostgresTaskStore, task_id: str) -> TaskStatus:
    record = await store.get(task_id)
    assert record is not None
    return record.task.status


async def test_a_task_submitted_at_one_node_runs_on_the_other(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.second.submit(new_task("t1", by="n2"))
        news = await pair.first.news(pair.epoch)
        assert [record.task.id for record in news.records] == ["t1"]
        assert [node.id for node in news.nodes] == ["n1", "n2"]
        (answer,) = await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        assert isinstance(answer, Assigned)
        (started,) = (await pair.second.collect("n2")).started
        assert started.lease == Lease(node_id="n2", attempt=1)
        assert isinstance(await pair.second.settle(done("t1", by="n2")), Settled)
        (ended,) = (await pair.first.news(pair.epoch)).records
        assert ended.task.status is TaskStatus.DONE


async def test_news_comes_in_parts_and_says_whether_there_is_more(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.storage.sql_store.MAX_NEWS", 4)
    async with two_nodes(postgres_url) as pair:
        for number in range(6):
            await pair.second.submit(new_task(f"t{number}", by="n2"))
        parts = [await pair.first.news(pair.epoch) for _ in range(2)]
        assert [(len(part.records), part.has_more) for part in parts] == [(4, True), (2, False)]


async def test_the_dispatcher_reads_news_while_another_node_keeps_the_lock(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.second.submit(new_task("t1", by="n2"))
        other = PostgresDatabase(postgres_url)
        try:
            transaction = other.begin()
            lock_ledger(transaction)
            transaction.read("SELECT 1")
            async with asyncio.timeout(PATIENCE_SECONDS):
                news = await pair.first.news(pair.epoch)
            assert [record.task.id for record in news.records] == ["t1"]
        finally:
            other.rollback()
            other.close()


_WAITING = (
    "SELECT COUNT(*) FROM pg_stat_activity"
    " WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
_TOGETHER = "SELECT COUNT(DISTINCT CAST(xmin AS TEXT)) FROM tasks WHERE id IN ('t1', 't2')"


@pytest.mark.parametrize("starter", [None, ChildStarter()], ids=["thread", "process"])
async def test_what_comes_while_another_node_writes_shares_the_next_transaction(
    postgres_url: str, starter: ChildStarter | None
) -> None:
    store, other = PostgresTaskStore(postgres_url, starter=starter), PostgresDatabase(postgres_url)

    def is_waiting() -> bool:
        return bool(look.execute(_WAITING).fetchall()[0][0])

    async def submitted(*task_ids: str) -> None:
        """Submit tasks, each when the one before waits for the lock that another has."""
        transaction = other.begin()
        lock_ledger(transaction)
        transaction.read("SELECT 1")
        answers: list[Awaitable[object]] = []
        for task_id in task_ids:
            answers.append(asyncio.ensure_future(store.submit(new_task(task_id, by="n1"))))
            # A process is sent it meanwhile.
            await asyncio.to_thread(wait_until, is_waiting, seconds=PATIENCE_SECONDS)
        # Longer than any answer takes without others.
        await asyncio.to_thread(transaction.read, "SELECT pg_sleep(0.5)")
        other.commit()
        await asyncio.gather(*answers)

    await store.open()
    try:
        with psycopg.connect(postgres_url, autocommit=True) as look:
            for number in range(3):
                await store.submit(new_task(f"alone-{number}", by="n1"))
            await submitted("t0")
            await submitted("t1", "t2")
            assert look.execute(_TOGETHER).fetchall() == [(1,)]
    finally:
        await store.close()
        other.close()


async def test_news_that_was_seen_is_forgotten(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.storage.sql_store.FORGET_SECONDS", 0.0)
    async with two_nodes(postgres_url) as pair:
        for number in range(3):
            await pair.second.submit(new_task(f"t{number}", by="n2"))
            assert len((await pair.first.news(pair.epoch)).records) == 1
        await pair.first.news(pair.epoch)
        await pair.first.sent(())
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT COUNT(*) FROM messages").fetchall() == [(0,)]


async def test_another_takes_over_when_the_lease_has_ended_and_not_before(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        pair.clock.advance(LEASE_SECONDS - 0.1)
        assert (await pair.second.elect("n2", lease_seconds=LEASE_SECONDS)).node_id == "n1"
        pair.clock.advance(0.1)
        elected = await pair.second.elect("n2", lease_seconds=LEASE_SECONDS)
        assert (elected.node_id, elected.epoch) == ("n2", pair.epoch + 1)


async def test_a_dispatcher_that_stood_still_past_its_lease_changes_nothing(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.first.submit(new_task("t1", by="n1"))
        epoch = await pair.take_over()
        plan = [assignment("t1", to="n1", starts=True)]
        for stale in (
            pair.first.assign(pair.epoch, plan),
            pair.first.recover(pair.epoch, ["t1"]),
            pair.first.drop(pair.epoch, []),
            pair.first.news(pair.epoch),
            pair.first.backlog(pair.epoch),
        ):
            with pytest.raises(StaleEpochError):
                await stale
        assert await status_of(pair.second, "t1") is TaskStatus.QUEUED
        backlog = await pair.second.backlog(epoch)
        assert [record.task.id for record in backlog.records] == ["t1"]


async def test_whoever_is_elected_with_two_asking_at_once_is_one(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        for _ in range(5):
            pair.clock.advance(LEASE_SECONDS)
            elections = await asyncio.gather(
                pair.first.elect("n1", lease_seconds=LEASE_SECONDS),
                pair.second.elect("n2", lease_seconds=LEASE_SECONDS),
            )
            assert elections[0] == elections[1]


async def test_a_task_is_taken_back_from_a_node_only_when_its_lease_has_ended(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.first.submit(new_task("t1", by="n1"))
        await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        await pair.second.collect("n2")
        await pair.first.recover(pair.epoch, ["t1"])
        assert await status_of(pair.first, "t1") is TaskStatus.RUNNING
        pair.clock.advance(NODE_LEASE_SECONDS)
        epoch = (await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
        (record,) = await pair.first.recover(epoch, ["t1"])
        assert (record.task.status, record.progress.losses) == (TaskStatus.QUEUED, 1)


async def test_a_node_that_comes_back_too_late_can_neither_settle_nor_start_nor_live(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        for task_id in ("t1", "t2"):
            await pair.first.submit(new_task(task_id, by="n1"))
            await pair.first.assign(pair.epoch, [assignment(task_id, to="n2")])
            if task_id == "t1":
                await pair.second.collect("n2")
        pair.clock.advance(NODE_LEASE_SECONDS)
        epoch = (await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
        assert len(await pair.first.recover(epoch, ["t1", "t2"])) == 2
        assert isinstance(await pair.second.settle(done("t1", by="n2")), StaleLease)
        assert (await pair.second.collect("n2")).started == ()
        beat = await pair.second.beat("n2", capacity=4, lease_seconds=NODE_LEASE_SECONDS)
        assert not beat.is_alive
        assert await status_of(pair.first, "t1") is TaskStatus.QUEUED


async def test_a_node_that_comes_back_before_anybody_acted_goes_on(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.first.submit(new_task("t1", by="n1"))
        await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        await pair.second.collect("n2")
        pair.clock.advance(2 * NODE_LEASE_SECONDS)
        # Both ask at once: whichever is first, nobody has acted yet.
        beats = await asyncio.gather(
            pair.first.beat("n1", capacity=4, lease_seconds=NODE_LEASE_SECONDS),
            pair.second.beat("n2", capacity=4, lease_seconds=NODE_LEASE_SECONDS),
        )
        assert all(beat.is_alive for beat in beats)
        epoch = (await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
        assert await pair.first.recover(epoch, ["t1"]) == []
        assert isinstance(await pair.second.settle(done("t1", by="n2")), Settled)


async def test_of_a_late_sign_and_a_recovery_at_once_exactly_one_counts(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        for number in range(10):
            task_id, node_id = f"t{number}", f"late{number}"
            node = Node(id=node_id, capacity=4)
            await pair.second.join(node, lease_seconds=LEASE_SECONDS)
            await pair.first.submit(new_task(task_id, by="n1"))
            await pair.first.assign(pair.epoch, [assignment(task_id, to=node_id)])
            await pair.second.collect(node_id)
            pair.clock.advance(LEASE_SECONDS)
            await pair.first.beat("n1", capacity=4, lease_seconds=NODE_LEASE_SECONDS)
            pair.epoch = (await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
            beat, recovered = await asyncio.gather(
                pair.second.beat(node_id, capacity=4, lease_seconds=LEASE_SECONDS),
                pair.first.recover(pair.epoch, [task_id]),
            )
            assert beat.is_alive is not bool(recovered)
            settled = await pair.second.settle(done(task_id, by=node_id))
            assert isinstance(settled, Settled if beat.is_alive else StaleLease)


async def test_the_next_attempt_settles_and_the_one_before_it_does_not(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.first.submit(new_task("t1", by="n1"))
        await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        await pair.second.collect("n2")
        pair.clock.advance(NODE_LEASE_SECONDS)
        epoch = (await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)).epoch
        await pair.first.recover(epoch, ["t1"])
        await pair.second.join(Node(id="n2b", capacity=4), lease_seconds=NODE_LEASE_SECONDS)
        await pair.first.assign(epoch, [assignment("t1", to="n2b", attempt=2)])
        (started,) = (await pair.second.collect("n2b")).started
        assert started.lease == Lease(node_id="n2b", attempt=2)
        assert isinstance(await pair.second.settle(done("t1", by="n2")), StaleLease)
        answer = await pair.second.settle(done("t1", by="n2b", attempt=2))
        assert isinstance(answer, Settled)


async def test_a_collect_whose_answer_was_lost_is_answered_again(postgres_url: str) -> None:
    async with two_nodes(postgres_url) as pair:
        await pair.first.submit(new_task("t1", by="n1"))
        await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        given_up = asyncio.create_task(pair.second.collect("n2"))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        (started,) = (await pair.second.collect("n2")).started
        assert started.task.id == "t1"
        assert (await pair.second.collect("n2")).started == ()


class Ear:
    """Lets a test wait until it is called back."""

    def __init__(self) -> None:
        self._called = asyncio.Event()

    def __call__(self) -> None:
        self._called.set()

    async def heard(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._called.wait()
        self._called.clear()


async def test_the_dispatcher_and_a_node_are_called_when_there_is_something_for_them(
    postgres_url: str,
) -> None:
    async with two_nodes(postgres_url) as pair:
        dispatcher, node = Ear(), Ear()
        pair.first.watch(DISPATCHER, dispatcher)
        pair.second.watch("n2", node)
        await dispatcher.heard()
        await node.heard()
        await pair.second.submit(new_task("t1", by="n2"))
        await dispatcher.heard()
        await pair.first.assign(pair.epoch, [assignment("t1", to="n2")])
        await node.heard()
        assert len((await pair.second.collect("n2")).started) == 1


@pytest.mark.parametrize(("idle_seconds", "transaction_seconds"), [(0.1, 60.0), (60.0, 0.2)])
async def test_a_lock_is_taken_back_from_a_node_that_stands_still(
    postgres_url: str, idle_seconds: float, transaction_seconds: float
) -> None:
    standing_still = PostgresDatabase(
        postgres_url,
        idle_timeout_seconds=idle_seconds,
        transaction_timeout_seconds=transaction_seconds,
    )
    async with two_nodes(postgres_url) as pair:
        transaction = standing_still.begin()
        lock_ledger(transaction)
        transaction.read("SELECT 1")
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await pair.second.submit(new_task("t1", by="n2"))
        assert isinstance(answer, Queued)
        with pytest.raises(LostTransactionError):
            transaction.read("SELECT 1")
        standing_still.close()


async def test_the_clock_of_the_server_decides_unless_another_is_given(postgres_url: str) -> None:
    store = PostgresTaskStore(postgres_url)
    await store.open()
    try:
        with psycopg.connect(postgres_url) as connection:
            (row,) = connection.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())").fetchall()
        assert store.now() == pytest.approx(float(row[0]), abs=5.0)
    finally:
        await store.close()


class Load:
    """Callers that submit one task after another, at both nodes, and note each answer."""

    def __init__(self, pair: Pair) -> None:
        self.acknowledged: set[str] = set()
        self.refused = 0
        self._is_over = False
        self._answered = asyncio.Condition()
        self._callers = [
            asyncio.create_task(self._call(store, f"{node_id}-{number}"))
            for store, node_id in ((pair.first, "n1"), (pair.second, "n2"))
            for number in range(4)
        ]

    async def more(self, *, acknowledged: int = 0, refused: int = 0) -> None:
        """Wait until so many more were acknowledged, or refused."""
        wanted = (len(self.acknowledged) + acknowledged, self.refused + refused)
        async with asyncio.timeout(PATIENCE_SECONDS), self._answered:
            await self._answered.wait_for(
                lambda: len(self.acknowledged) >= wanted[0] and self.refused >= wanted[1]
            )

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._callers)

    async def _call(self, store: PostgresTaskStore, name: str) -> None:
        for number in count():
            if self._is_over:
                return
            task_id = f"{name}-{number:06}"
            try:
                await store.submit(new_task(task_id, by=name))
                self.acknowledged.add(task_id)
            except StoreUnavailableError:
                self.refused += 1
            async with self._answered:
                self._answered.notify_all()


async def test_a_server_that_restarts_under_load_loses_nothing_that_was_acknowledged() -> None:
    with running_postgres(is_durable=True) as server:
        async with two_nodes(server.url) as pair:
            load = Load(pair)
            try:
                await load.more(acknowledged=100)
                await asyncio.to_thread(server.kill)
                await load.more(refused=16)
                await asyncio.to_thread(server.start)
                await load.more(acknowledged=100)
            finally:
                await load.end()
            elected = await pair.first.elect("n1", lease_seconds=LEASE_SECONDS)
            backlog = await pair.first.backlog(elected.epoch)
            assert load.acknowledged <= {record.task.id for record in backlog.records}
