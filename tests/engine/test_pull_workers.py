"""What a node does for workers: it hands out what was decided, waits within bounds, and settles."""

from __future__ import annotations

import asyncio
from itertools import count, pairwise
from typing import Any

import msgspec
import pytest

from engine.one_service import Service, play
from engine.simulated_workers import SimulatedClient
from headgate.api.schema.workers import BeatBody, HeartbeatBody
from headgate.budgets.local import LocalLedger
from headgate.client import worker as pulling
from headgate.client.worker import ServiceConnection
from headgate.core.budgets.ledger import Limit, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.dispatch_state import CANCEL_GRACE_SECONDS, DEADLINE_GRACE_SECONDS
from headgate.core.lifecycle import UNKNOWN_USAGE, Failed, Limited, Outcome, Succeeded, Usage
from headgate.core.money import Tokens
from headgate.core.snapshot import Agent
from headgate.core.task import TaskStatus
from headgate.engine import workers
from headgate.engine.engine import Engine
from headgate.engine.workers import Claim, Report
from headgate.errors import LedgerUnavailableError, StaleWorkerError
from headgate.executors.executor import WorkOrder
from headgate.storage.store import Orders, StaleLease, Visit
from headgate.testing import Host

PULL: dict[str, Any] = {"pull_targets": frozenset({"pull"}), "worker_lease_seconds": 30.0}
DONE = Succeeded(result=msgspec.Raw(b'{"ok":true}'), usage=Usage(tokens=7, micro_usd=0))


class Worker:
    """A worker by hand: every step is one call."""

    def __init__(self, engine: Engine, agent_id: str = "a", capacity: int = 1) -> None:
        self.engine = engine
        self.agent_id = agent_id
        self.capacity = capacity
        self.worker_id: str | None = None
        self.running: dict[str, int] = {}

    async def claim(self, *, wait: float = 0.0, capacity: int | None = None) -> list[str]:
        """Claim, and run whatever comes."""
        claim = Claim(
            agent_id=self.agent_id,
            worker_id=self.worker_id,
            capacity=self.capacity if capacity is None else capacity,
            running=dict(self.running),
            wait_seconds=wait,
        )
        self.worker_id, orders = await self.engine.workers.claim(claim)
        self.running |= {one.task.id: one.progress.attempt for one in orders.tasks}
        return [one.task.id for one in orders.tasks]

    async def beat(self) -> Orders:
        return await self.engine.workers.beat(self.worker_id or "", self.agent_id, self.running)

    async def tell(self, task_id: str, outcome: Outcome = DONE) -> str:
        """Say what came of a task, and return its state."""
        record = await self.engine.get(task_id)
        assert record is not None
        report = Report(
            record=record,
            worker_id=self.worker_id or "",
            attempt=self.running[task_id],
            outcome=outcome,
        )
        answer = await self.engine.workers.settle(report)
        return "stale" if isinstance(answer, StaleLease) else answer.task.status.value


async def why(service: Service, task_id: str) -> list[str]:
    answer = await service.engine.why(task_id)
    assert answer is not None
    return [reason.message for reason in answer.reasons]


def test_a_claim_waits_for_what_the_dispatcher_assigns_and_runs_it_once() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        waiting = asyncio.create_task(worker.claim(wait=20.0))
        await asyncio.sleep(5.0)
        task_id = await service.submit(agent_id="a", target="pull")
        started = service.loop.time()
        assert await waiting == [task_id]
        assert service.loop.time() - started < 1.0
        assert await worker.tell(task_id) == "done"
        assert await worker.tell(task_id) == "done"
        record = await service.get(task_id)
        assert (record.result, record.tokens) == ('{"ok":true}', 7)
        assert service.ordered() == []

    play(scenario, **PULL)


def test_what_cannot_run_for_want_of_a_worker_says_so_and_holds_up_nobody() -> None:
    async def scenario(service: Service) -> None:
        parked = [await service.submit(agent_id="a", target="pull") for _ in range(3)]
        plain = await service.submit(agent_id="a")
        assert (await service.ended(plain)).task.status is TaskStatus.DONE
        assert await why(service, parked[0]) == ["no worker of agent a is connected"]
        worker = Worker(service.engine)
        await worker.claim()
        assert await worker.claim(wait=5.0) == parked[:1]
        (line,) = await why(service, parked[1])
        assert line.startswith("all 1 permits of agent a's workers are taken, since ")

    play(scenario, **PULL)


def test_open_tasks_are_pulled_by_agents_that_take_open_ones() -> None:
    async def scenario(service: Service) -> None:
        own = Worker(service.engine, "own")
        await own.claim()
        task_id = await service.submit(target="pull")
        assert await own.claim(wait=3.0) == []
        taker = Worker(service.engine, "any")
        await taker.claim()
        assert await taker.claim(wait=3.0) == [task_id]

    play(scenario, agents=(Agent(id="any", capacity=5),), **PULL)


def test_places_of_nodes_and_of_workers_do_not_stand_in_for_each_other() -> None:
    async def scenario(service: Service) -> None:
        plain = [await service.submit(agent_id="b") for _ in range(3)]
        pulled = [await service.submit(agent_id="a", target="pull") for _ in range(3)]
        worker = Worker(service.engine, capacity=2)
        await worker.claim()
        assert await worker.claim(wait=3.0) == pulled[:1] or len(worker.running) == 2
        await asyncio.sleep(0.5)
        await worker.claim()
        assert sorted(worker.running) == pulled[:2]
        assert service.executor.most_running == 1
        assert len(service.ordered()) < len(plain)

    play(scenario, lambda _order: (60.0, DONE), capacity=1, **PULL)


def test_no_place_is_offered_twice_whatever_is_claimed_again() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        tasks = [await service.submit(agent_id="a", target="pull") for _ in range(2)]
        assert await worker.claim(wait=5.0) == tasks[:1]
        worker.running.clear()
        assert await worker.claim(wait=5.0) == tasks[:1]
        assert await worker.claim(wait=5.0) == []
        assert await worker.tell(tasks[0]) == "done"
        assert await worker.claim(wait=5.0) == tasks[1:]

    play(scenario, **PULL)


def test_a_worker_that_goes_silent_loses_its_tasks_to_another() -> None:
    async def scenario(service: Service) -> None:
        first, second = Worker(service.engine), Worker(service.engine)
        task_id = await service.submit(agent_id="a", target="pull", max_attempts=1)
        await first.claim()
        assert await first.claim(wait=5.0) == [task_id]
        await second.claim()
        for _ in range(8):
            if await second.claim(wait=20.0):
                break
        assert second.running == {task_id: 2}
        assert await first.tell(task_id) == "stale"
        with pytest.raises(StaleWorkerError):
            await first.beat()
        assert await second.tell(task_id) == "done"

    play(scenario, **PULL)


def test_signs_of_life_keep_a_long_task() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        task_id = await service.submit(agent_id="a", target="pull")
        await worker.claim()
        await worker.claim(wait=5.0)
        for _ in range(20):
            await asyncio.sleep(20.0)
            assert (await worker.beat()).lost == ()
        assert await worker.tell(task_id) == "done"
        assert (await service.get(task_id)).progress.attempt == 1

    play(scenario, **PULL)


def test_a_cancel_is_told_at_once_to_a_claim_that_waits() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine, capacity=2)
        task_id = await service.submit(agent_id="a", target="pull")
        await worker.claim()
        await worker.claim(wait=5.0)
        waiting = asyncio.create_task(worker.claim(wait=20.0))
        await asyncio.sleep(1.0)
        cancelling = asyncio.create_task(service.engine.cancel(task_id))
        await waiting
        assert (await worker.beat()).cancelled == (task_id,)
        assert await worker.tell(task_id, Failed(error="stopped", is_transient=True)) == "cancelled"
        record = await cancelling
        assert record is not None
        assert record.task.status is TaskStatus.CANCELLED

    play(scenario, **PULL)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_worker_that_does_not_stop_is_not_waited_for(is_cancelled: bool) -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        deadline = None if is_cancelled else service.now() + 10.0
        task_id = await service.submit(agent_id="a", target="pull", deadline=deadline)
        await worker.claim()
        await worker.claim(wait=5.0)
        started = service.loop.time()
        if is_cancelled:
            await service.engine.cancel(task_id)
        while not (await service.get(task_id)).is_terminal:
            await asyncio.sleep(1.0)
            orders = await worker.beat()
        waited = service.loop.time() - started
        record = await service.get(task_id)
        if is_cancelled:
            assert (record.error, waited >= CANCEL_GRACE_SECONDS) == ("cancelled", True)
        else:
            assert record.error == "deadline exceeded while running"
            assert 9.0 + DEADLINE_GRACE_SECONDS <= waited < 15.0 + DEADLINE_GRACE_SECONDS
        assert record.tokens == 100
        orders = await worker.beat()
        assert orders.lost == (task_id,)
        assert await worker.tell(task_id) == "stale"

    play(scenario, **PULL)


def test_a_pause_of_a_provider_holds_the_agent_and_not_the_target_that_all_share() -> None:
    async def scenario(service: Service) -> None:
        one, two = Worker(service.engine, "a"), Worker(service.engine, "b")
        first = await service.submit(agent_id="a", target="pull")
        await one.claim()
        await one.claim(wait=5.0)
        assert await one.tell(first, Limited(retry_after_seconds=60.0)) == "queued"
        del one.running[first]
        behind = await service.submit(agent_id="a", target="pull")
        other = await service.submit(agent_id="b", target="pull")
        await two.claim()
        assert await two.claim(wait=5.0) == [other]
        assert await one.claim(wait=5.0) == []
        assert any("agent a is closed" in line for line in await why(service, behind))
        for _ in range(3):
            await asyncio.sleep(20.0)
            await one.beat()
        assert await one.claim(wait=5.0) == [first]

    play(scenario, **PULL)


def test_no_word_of_a_worker_closes_a_slot_and_an_operator_opens_its_agent() -> None:
    doubted: list[str] = []

    async def scenario(service: Service) -> None:
        service.engine.feed.subscribe(paused_slots=doubted.append)
        one, two = Worker(service.engine, "a"), Worker(service.engine, "b")
        first = await service.submit(agent_id="a", target="pull", slot="shared")
        await one.claim()
        await one.claim(wait=5.0)
        assert await one.tell(first, Limited(retry_after_seconds=86_400.0)) == "queued"
        del one.running[first]
        assert doubted == ["shared"], "its provider is asked"
        (closure,) = await service.engine.closures()
        assert (closure.kind, closure.name, closure.cause) == ("agent", "a", "worker")
        assert (closure.by, closure.task_id) == (one.worker_id, first)
        other = await service.submit(agent_id="b", target="pull", slot="shared")
        await two.claim()
        assert await two.claim(wait=5.0) == [other]
        assert await one.claim(wait=5.0) == []
        assert await service.engine.open_gate(closure.part)
        assert await one.claim(wait=5.0) == [first]

    play(scenario, **PULL)


def test_budgets_hold_for_workers_as_for_everybody() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine, capacity=9)
        for _ in range(4):
            await service.submit(agent_id="a", target="pull")
        await worker.claim()
        await worker.claim(wait=3.0)
        await worker.claim(wait=3.0)
        assert len(worker.running) == 2
        assert await worker.tell(next(iter(worker.running)), Failed(error="no")) == "failed"
        assert await worker.claim(wait=3.0) == []

    budgets = {Scope(ROOT): Limit(limit_tokens=Tokens(250))}
    play(scenario, budgets=budgets, **PULL)


class AwayAtFirst(LocalLedger):
    """Books that cannot be asked when the first work is about to begin."""

    is_away = True

    async def settle(self, request: SettleRequest) -> Reservation:
        if request.call is Call.DISPATCHED and self.is_away:
            self.is_away = False
            raise LedgerUnavailableError("the ledger is away")
        return await super().settle(request)


def test_with_books_outside_the_store_the_work_begins_only_when_they_know() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        task_id = await service.submit(agent_id="a", target="pull")
        await worker.claim()
        while not await worker.claim(wait=5.0):
            pass
        assert worker.running == {task_id: 2}
        assert await worker.tell(task_id, Succeeded(usage=UNKNOWN_USAGE)) == "done"
        await asyncio.sleep(2.0)
        assert service.ledger is not None
        (account,) = await service.ledger.accounts(Scope(ROOT), most=1)
        assert (account.balance.spent_tokens, account.balance.reserved_tokens) == (100, 0)
        assert (await service.get(task_id)).progress.losses == 0

    play(scenario, new_ledger=lambda clock: AwayAtFirst(clock=clock), **PULL)


def test_another_claim_of_a_worker_takes_the_place_of_the_one_that_waits() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        first = asyncio.create_task(worker.claim(wait=20.0))
        await asyncio.sleep(1.0)
        second = asyncio.create_task(worker.claim(wait=20.0))
        assert await first == []
        assert service.loop.time() < 10.0
        task_id = await service.submit(agent_id="a", target="pull")
        assert await second == [task_id]

    play(scenario, **PULL)


def test_claims_that_wait_are_answered_when_the_node_stops() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        waiting = asyncio.create_task(worker.claim(wait=20.0))
        await asyncio.sleep(1.0)
        started = service.loop.time()
        service.engine.workers.close()
        assert await waiting == []
        assert await worker.claim(wait=20.0) == []
        assert service.loop.time() - started < 1.0

    play(scenario, **PULL)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_worker_whose_claims_are_not_kept_waiting_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    monkeypatch.setattr(workers, "MAX_WAITING", 0)

    async def scenario(service: Service) -> None:
        if is_closed:
            service.engine.workers.close()
        asked = count(1)
        host = Host(service.loop, "machine")

        def pick() -> tuple[Host, Engine]:
            assert next(asked) < 1_000
            return host, service.engine

        line = ServiceConnection(
            SimulatedClient(service.loop.random, pick, lost_rate=0.0),
            "a",
            notify=lambda _line: None,
        )
        worker = pulling.Worker(line, service.executor, agent_id="a", capacity=1)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(30.0)
        worker.drain()
        await working
        assert 20 <= next(asked) <= 40

    play(scenario, **PULL)


def test_only_so_many_claims_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_WAITING", 1)

    async def scenario(service: Service) -> None:
        one, two = Worker(service.engine), Worker(service.engine)
        await asyncio.gather(one.claim(), two.claim())
        waiting = asyncio.create_task(one.claim(wait=20.0))
        await asyncio.sleep(1.0)
        started = service.loop.time()
        assert await two.claim(wait=20.0) == []
        assert service.loop.time() - started < 1.0
        waiting.cancel()

    play(scenario, **PULL)


def test_a_worker_may_speak_to_any_node_at_any_time() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        worker = Worker(other)
        await worker.claim()
        task_id = await service.submit(agent_id="a", target="pull")
        found: list[str] = []
        for engine in (other, service.engine, other):
            worker.engine = engine
            found += await worker.claim(wait=12.0)
        assert found == [task_id]
        worker.engine = other
        assert await worker.tell(task_id) == "done"
        await asyncio.sleep(5.0)
        dispatch_state = service.engine.dispatcher.dispatch_state
        assert dispatch_state is not None
        assert len(dispatch_state.in_flight) == 0

    play(scenario, **PULL)


def test_a_worker_that_leaves_gives_back_what_it_has_not_begun_at_once() -> None:
    async def scenario(service: Service) -> None:
        first, second = Worker(service.engine), Worker(service.engine)
        await first.claim()
        task_id = await service.submit(agent_id="a", target="pull")
        await asyncio.sleep(1.0)
        assert (await service.get(task_id)).task.status is TaskStatus.ASSIGNED
        await first.claim(capacity=0)
        await second.claim()
        assert await second.claim(wait=5.0) == [task_id]
        assert (await service.get(task_id)).progress.losses == 0

    play(scenario, **PULL)


def test_a_result_beyond_the_limit_fails_the_task_and_is_not_kept() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        task_id = await service.submit(agent_id="a", target="pull")
        await worker.claim()
        await worker.claim(wait=5.0)
        assert await worker.tell(task_id) == "failed"
        record = await service.get(task_id)
        assert (record.error, record.result) == ("result is larger than 5 bytes", None)

    play(scenario, max_result_bytes=5, **PULL)


def test_a_claim_that_waits_asks_the_store_at_its_begin_and_at_its_end() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        visits, receive = count(), service.engine.store.visit

        async def counted(visit: Visit) -> Orders:
            next(visits)
            return await receive(visit)

        service.engine.store.visit = counted  # type: ignore[method-assign]
        started = service.loop.time()
        assert await worker.claim(wait=20.0) == []
        assert service.loop.time() - started >= 20.0
        assert next(visits) == 2
        assert (await worker.beat()).is_alive

    play(scenario, **PULL)


def test_a_claim_says_how_long_it_had_waited_when_its_lease_was_renewed() -> None:
    async def scenario(service: Service) -> None:
        worker = Worker(service.engine)
        await worker.claim()
        asked = Claim(
            agent_id="a", worker_id=worker.worker_id, capacity=1, running={}, wait_seconds=20.0
        )
        waiting = asyncio.create_task(service.engine.workers.claim(asked))
        await asyncio.sleep(12.0)
        await service.submit(agent_id="a", target="pull")
        _, orders = await waiting
        assert len(orders.tasks) == 1
        assert 11.9 < orders.waited_seconds < 12.5

    play(scenario, **PULL)


class NotedConnection(ServiceConnection):
    """Notes when heartbeats are sent."""

    def __init__(self, service: Service) -> None:
        host = Host(service.loop, "machine")
        client = SimulatedClient(service.loop.random, lambda: (host, service.engine), lost_rate=0.0)
        super().__init__(client, "a", notify=lambda _line: None)
        self.beats: list[float] = []

    async def beat(self, body: HeartbeatBody) -> BeatBody:
        self.beats.append(asyncio.get_running_loop().time())
        return await super().beat(body)


def test_a_worker_sends_heartbeats_while_it_has_something_to_lose() -> None:
    async def scenario(service: Service) -> None:
        line = NotedConnection(service)
        worker = pulling.Worker(line, service.executor, agent_id="a", capacity=1)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(119.0)
        assert line.beats == []
        task_id = await service.submit(agent_id="a", target="pull")
        began = service.loop.time()
        await service.ended(task_id)
        times = [began, *line.beats, service.loop.time()]
        assert all(later - earlier < 11.0 for earlier, later in pairwise(times))
        worker.drain()
        await working
        assert (await service.get(task_id)).progress.attempt == 1

    play(scenario, lambda _order: (35.0, DONE), **PULL)


def test_a_worker_that_drains_hands_back_what_does_not_end_in_time() -> None:
    async def scenario(service: Service) -> None:
        line = NotedConnection(service)
        worker = pulling.Worker(line, service.executor, agent_id="a", capacity=2)
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(1.0)
        short = await service.submit(agent_id="a", target="pull")
        long = await service.submit(agent_id="a", target="pull", max_attempts=1)
        long_ids.append(long)
        await asyncio.sleep(1.0)
        behind = await service.submit(agent_id="a", target="pull")
        started = service.loop.time()
        worker.drain(25.0)
        await working
        assert 25.0 <= service.loop.time() - started < 27.0
        assert (await service.get(short)).task.status is TaskStatus.DONE
        handed_back, waiting = await service.get(long), await service.get(behind)
        assert (handed_back.task.status, handed_back.progress.losses) == (TaskStatus.QUEUED, 1)
        assert (waiting.task.status, waiting.progress.attempt) == (TaskStatus.QUEUED, 0)
        other = Worker(service.engine, capacity=2)
        await other.claim()
        while len(other.running) < 2:
            await other.claim(wait=5.0)
        assert other.running == {long: 2, behind: 1}
        assert await other.tell(long) == "done"

    long_ids: list[str] = []

    def work(order: WorkOrder) -> tuple[float, Outcome]:
        return (600.0 if order.task_id in long_ids else 10.0), DONE

    play(scenario, work, **PULL)
