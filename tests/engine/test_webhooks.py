"""The loop that delivers: on time, in spite of bad receivers and stores, within its bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest
import structlog

from engine.one_service import Service
from engine.one_service import play as play_service
from headgate.engine.webhooks import CLAIM_SECONDS, HOSTS_AT_LEAST, Webhooks
from headgate.storage.deliveries import (
    Alert,
    Deliveries,
    DeliveryQuery,
    DeliveryState,
    Message,
    SendReport,
)
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.schema import BODIES, DELIVERY_ROWS
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import delivery_row
from headgate.storage.writer import Fault
from headgate.testing import SimulatedLoop, simulate

ARRIVED = SendReport(status=200, has_arrived=True)
BROKEN = SendReport(status=500, error="answered 500")
MINUTE, HOUR = 60.0, 3_600.0

Answering = Callable[[Message], Coroutine[Any, Any, SendReport]]


class Receiver:
    """Stands for the wire: answers as a test says, and remembers what came when."""

    def __init__(self, clock: Callable[[], float], answer: Answering) -> None:
        self._clock = clock
        self._answer = answer
        self._started = clock()
        self.came: list[tuple[float, str]] = []
        self.bodies: dict[str, set[bytes]] = {}
        self.under_way: Counter[str] = Counter()
        self.most_open: Counter[str] = Counter()
        self.is_closed = False

    async def send(
        self, message: Message, body: bytes, secrets: Sequence[str], *, now: float
    ) -> SendReport:
        """Take a message."""
        assert secrets
        self.came.append((round(now - self._started, 3), message.id))
        self.bodies.setdefault(message.id, set()).add(body)
        host = message.url.split("/")[2]
        for name in (host, "all"):
            self.under_way[name] += 1
            self.most_open[name] = max(self.most_open[name], self.under_way[name])
        try:
            return await self._answer(message)
        finally:
            self.under_way.subtract((host, "all"))

    async def open(self) -> None:
        """There is nothing to get ready."""

    async def close(self) -> None:
        """Note that it is over."""
        self.is_closed = True

    def times(self, message_id: str) -> list[float]:
        """Return when a message came, in seconds from the start."""
        return [at for at, name in self.came if name == message_id]


def always(report: SendReport, seconds: float = 0.01) -> Answering:
    async def answer(_: Message) -> SendReport:
        await asyncio.sleep(seconds)
        return report

    return answer


class Stage:
    """A store with deliveries in it, and senders on it."""

    def __init__(self, loop: SimulatedLoop, answer: Answering) -> None:
        self.loop = loop
        self.database = MemoryDatabase()
        self.fault: Callable[[], Fault | None] = lambda: None
        self.receiver = Receiver(loop.clock, answer)
        self.deliveries = Deliveries(self.new_store())
        self._numbers = count()

    def new_store(self) -> MemoryTaskStore:
        return MemoryTaskStore(
            self.database, clock=self.loop.clock, is_shared=True, faults=self._next_fault
        )

    def _next_fault(self) -> Fault | None:
        return self.fault()

    async def sender(self, *, is_alone: bool = False, concurrency: int = 8) -> Webhooks:
        """Return another sender, on a store of its own."""
        store = self.new_store()
        await store.open()
        return Webhooks(
            Deliveries(store),
            self.receiver,
            concurrency=concurrency,
            draws=self.loop.random,
            is_alone=is_alone,
        )

    async def file(self, *urls: str) -> list[str]:
        """File a message for each address, and return their ids."""
        alerts = [self._alert() for _ in urls]
        for alert, url in zip(alerts, urls, strict=True):
            await self.deliveries.alert([alert], url)
        return [alert.message_id for alert in alerts]

    async def file_tasks(self, project_id: str, *urls: str) -> list[str]:
        """File a message of a project for each address, and return their ids."""
        rows = [
            delivery_row(
                f"msg_{next(self._numbers):04}",
                event="task.done",
                url=url,
                now=self.loop.clock(),
                project_id=project_id,
            )
            for url in urls
        ]

        def write(transaction: Transaction, _: float) -> None:
            transaction.insert(DELIVERY_ROWS, rows)
            transaction.insert(BODIES, [(row[0], "{}") for row in rows])

        store = self.new_store()
        await store.open()
        await store.run(write)
        return [row[0] for row in rows]

    def _alert(self) -> Alert:
        number = next(self._numbers)
        return Alert(
            message_id=f"msg_{number:04}",
            scope=f"project:p{number}",
            unit="tokens",
            percent=50,
            limit=1,
            until=None,
            body=f'{{"n":{number}}}',
        )

    async def states(self) -> Counter[DeliveryState]:
        found = (await self.deliveries.find(DeliveryQuery(limit=1_000))).deliveries
        return Counter(one.state for one in found)


Scenario = Callable[[Stage], Coroutine[Any, Any, None]]


def play(scenario: Scenario, answer: Answering) -> None:
    async def main(loop: SimulatedLoop) -> None:
        stage = Stage(loop, answer)
        await stage.deliveries._access.open()  # type: ignore[attr-defined]
        await scenario(stage)

    simulate(main, seed=1, max_steps=5_000_000)


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_message_is_tried_on_schedule_and_then_given_up() -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        sender = await stage.sender()
        while (found := await stage.deliveries.get(one)) and found.due_at is not None:
            await asyncio.sleep(max(0.0, found.due_at - stage.loop.clock() - 0.1))
            assert await sender.run_once() == (found.tries == 0), "not before its time"
            await asyncio.sleep(0.1)
            await sender.run_once()
            await sender.settled()
        times = stage.receiver.times(one)
        waits = [later - earlier for earlier, later in pairwise(times)]
        assert times[0] < 0.1, "the first try is at once"
        table = [5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR]
        for wait, least in zip(waits, table, strict=True):
            assert least <= wait <= 1.1 * least + 1
        assert len(stage.receiver.bodies[one]) == 1, "the same bytes on every try"
        assert await stage.states() == {DeliveryState.DEAD: 1}

    play(scenario, always(BROKEN))


@pytest.mark.parametrize(
    ("report", "state", "wait"),
    [
        (ARRIVED, DeliveryState.DELIVERED, None),
        (SendReport(status=410, error="gone", is_final=True), DeliveryState.DEAD, None),
        (SendReport(status=429, error="x", asked_seconds=60.0), DeliveryState.PENDING, 60.0),
        (SendReport(error="no answer"), DeliveryState.PENDING, 5.0),
    ],
)
def test_what_a_receiver_answers_decides_what_comes_next(
    report: SendReport, state: DeliveryState, wait: float | None
) -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        sender = await stage.sender()
        assert await sender.run_once() == 1
        await sender.settled()
        found = await stage.deliveries.get(one)
        assert found is not None
        assert (found.state, found.status, found.tries) == (state, report.status, 1)
        if wait is not None:
            assert found.due_at is not None
            assert wait <= found.due_at - stage.loop.clock() <= 1.1 * wait

    play(scenario, always(report))


def test_a_receiver_that_hangs_keeps_nobody_else_waiting() -> None:
    async def answer(message: Message) -> SendReport:
        await asyncio.sleep(10.0 if "slow" in message.url else 0.01)
        return BROKEN if "slow" in message.url else ARRIVED

    async def scenario(stage: Stage) -> None:
        await stage.file(*["http://slow.example/"] * 100)
        running = asyncio.create_task((await stage.sender()).run())
        await asyncio.sleep(0.5)
        fast = await stage.file(*["http://fast.example/"] * 20)
        await asyncio.sleep(2.0)
        assert all(len(stage.receiver.times(one)) == 1 for one in fast)
        await asyncio.sleep(600)
        assert stage.receiver.most_open["slow.example"] == 8 // HOSTS_AT_LEAST
        assert stage.receiver.most_open["all"] <= 8
        assert len({name for _, name in stage.receiver.came}) == 120, "each has had a try"
        await ended(running)

    play(scenario, answer)


def hangs_at(word: str) -> Answering:
    """Answer like a receiver that never does where a word is in the address."""

    async def answer(message: Message) -> SendReport:
        await asyncio.sleep(10.0 if word in message.url else 0.01)
        return SendReport(error="no answer") if word in message.url else ARRIVED

    return answer


@pytest.mark.parametrize(
    ("hanging", "within_seconds"),
    [
        ([f"h{number}.example" for number in range(4)], 1.0),
        ([f"h{number}.evil.example" for number in range(100)], 1.0),
        # Hosts that nobody has heard of share their places, and wait for each other.
        ([f"h{number}.example" for number in range(35)], 11.0),
    ],
)
def test_hosts_that_hang_leave_places_for_others(hanging: list[str], within_seconds: float) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.file(*[f"http://{host}/hang" for host in hanging for _ in range(40)])
        running = asyncio.create_task((await stage.sender(concurrency=32)).run())
        await asyncio.sleep(0.5)
        (healthy,) = await stage.file("http://healthy.test/")
        await asyncio.sleep(within_seconds)
        assert len(stage.receiver.times(healthy)) == 1
        await ended(running)

    play(scenario, hangs_at("hang"))


@pytest.mark.parametrize("concurrency", [2, 8, 32])
def test_receivers_of_one_project_that_hang_delay_those_of_no_other(concurrency: int) -> None:
    """However many hosts it invents, and though nobody has heard of the other's."""

    async def scenario(stage: Stage) -> None:
        urls = [f"http://10.{number // 250}.{number % 250}.1/hang" for number in range(2_000)]
        await stage.file_tasks("hostile", *urls)
        running = asyncio.create_task((await stage.sender(concurrency=concurrency)).run())
        for number in range(6):
            await asyncio.sleep(7.5)
            (one,) = await stage.file_tasks("honest", f"http://healthy-{number}.test/")
            await asyncio.sleep(1.1 if concurrency > 2 else 10.1)
            assert len(stage.receiver.times(one)) == 1
        await ended(running)

    play(scenario, hangs_at("hang"))


def test_slow_receivers_of_one_project_leave_permits_for_slow_ones_of_another() -> None:
    async def answer(_: Message) -> SendReport:
        await asyncio.sleep(3.0)
        return ARRIVED

    async def scenario(stage: Stage) -> None:
        running = asyncio.create_task((await stage.sender(concurrency=32)).run())
        urls = [f"http://10.{number // 250}.{number % 250}.1/" for number in range(200)]
        await stage.file_tasks("honest", "http://slow.test/")
        await stage.file_tasks("hostile", *urls)
        await asyncio.sleep(60)
        await stage.file_tasks("hostile", *urls * 5)
        await asyncio.sleep(10)
        (one,) = await stage.file_tasks("honest", "http://slow.test/")
        await asyncio.sleep(3.1)
        assert len(stage.receiver.times(one)) == 1
        await ended(running)

    play(scenario, answer)


def test_a_host_that_is_known_to_be_quick_waits_for_none_that_hang() -> None:
    async def scenario(stage: Stage) -> None:
        (known,) = await stage.file("http://healthy.test/")
        running = asyncio.create_task((await stage.sender(concurrency=32)).run())
        await asyncio.sleep(2)
        assert len(stage.receiver.times(known)) == 1
        await stage.file(*[f"http://h{number}.example/hang" for number in range(400)])
        for _ in range(30):
            await asyncio.sleep(3)
            (one,) = await stage.file("http://healthy.test/")
            await asyncio.sleep(1.1)
            assert len(stage.receiver.times(one)) == 1
        await ended(running)

    play(scenario, hangs_at("hang"))


def test_all_places_are_used_by_quick_hosts_and_no_more() -> None:
    async def scenario(stage: Stage) -> None:
        urls = [f"http://h{number}.example/" for number in range(10)]
        await stage.file(*urls)
        sender = await stage.sender(concurrency=8)
        assert await sender.run_once() == 6, "two are kept for hosts that are known"
        await sender.settled()
        assert await sender.run_once() == 4
        await sender.settled()
        await stage.file(*urls, *urls)
        assert await sender.run_once() == 8
        assert await sender.run_once() == 0
        running = asyncio.create_task(sender.run())
        await asyncio.sleep(60)
        assert stage.receiver.most_open["all"] == 8
        assert await stage.states() == {DeliveryState.DELIVERED: 30}
        await ended(running)

    play(scenario, always(ARRIVED, 1.0))


@pytest.mark.parametrize(
    ("report", "most"), [(ARRIVED, 8), (BROKEN, 8), (SendReport(error="no answer"), 1)]
)
def test_a_host_that_answers_slowly_gets_places_among_the_slow_and_one_that_hangs_has_one(
    report: SendReport, most: int
) -> None:
    async def scenario(stage: Stage) -> None:
        urls = [f"http://{host}.example/" for host in ("a", "b")]
        await stage.file(*(url for url in urls for _ in range(40)))
        running = asyncio.create_task((await stage.sender(concurrency=32)).run())
        await asyncio.sleep(40)
        assert max(stage.receiver.most_open[f"{host}.example"] for host in ("a", "b")) <= most
        assert stage.receiver.most_open["all"] == max(most, 2), "a quarter of all together"
        await ended(running)

    play(scenario, always(report, 3.0))


def test_a_host_gets_more_places_the_more_often_it_was_quick() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.file(*["http://a.example/"] * 40)
        sender = await stage.sender(concurrency=32)
        started = []
        for _ in range(5):
            started.append(await sender.run_once())
            await sender.settled()
        assert started == [1, 2, 8, 8, 8]

    play(scenario, always(ARRIVED, 0.1))


def test_senders_share_the_work_and_send_nothing_twice() -> None:
    async def scenario(stage: Stage) -> None:
        ids = await stage.file(*[f"http://h{number % 10}.example/" for number in range(60)])
        senders = [await stage.sender() for _ in range(3)]
        running = [asyncio.create_task(sender.run()) for sender in senders]
        await asyncio.sleep(30)
        assert Counter(name for _, name in stage.receiver.came) == Counter(ids)
        await ended(*running)

    play(scenario, always(ARRIVED, 0.5))


def test_what_a_lost_sender_had_claimed_is_sent_by_another() -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        await stage.deliveries.claim([one], claimed_by="lost", seconds=10 + CLAIM_SECONDS)
        running = asyncio.create_task((await stage.sender()).run())
        await asyncio.sleep(30)
        assert stage.receiver.came == []
        await asyncio.sleep(15)
        assert len(stage.receiver.times(one)) == 1
        await ended(running)

    play(scenario, always(ARRIVED))


def test_a_sender_that_is_alone_begins_with_what_the_last_one_left() -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        await stage.deliveries.claim([one], claimed_by="killed", seconds=40)
        running = asyncio.create_task((await stage.sender(is_alone=True)).run())
        await asyncio.sleep(1)
        assert len(stage.receiver.times(one)) == 1
        await ended(running)

    play(scenario, always(ARRIVED))


def test_a_sender_that_stops_leaves_nothing_claimed() -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        running = asyncio.create_task((await stage.sender()).run())
        await asyncio.sleep(1)
        await ended(running)
        assert stage.receiver.is_closed
        found = await stage.deliveries.get(one)
        assert found is not None
        assert (found.state, found.tries) == (DeliveryState.PENDING, 0)
        assert len(await stage.deliveries.due(limit=1)) == 1

    play(scenario, always(ARRIVED, 5.0))


def test_a_store_that_is_away_delays_deliveries_and_loses_none() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.file(*["http://a.example/"] * 4)
        running = asyncio.create_task((await stage.sender()).run())
        await asyncio.sleep(1)
        stage.fault = lambda: Fault.REFUSED
        await asyncio.sleep(30)
        stage.fault = lambda: None
        await asyncio.sleep(60)
        assert await stage.states() == {DeliveryState.DELIVERED: 4}
        await ended(running)

    play(scenario, always(ARRIVED, 3.0))


@pytest.mark.parametrize("seed", range(3))
def test_lost_replies_and_bad_receivers_lose_no_message(seed: int) -> None:
    draws = Random(seed)
    taken: Counter[str] = Counter()

    async def answer(message: Message) -> SendReport:
        await asyncio.sleep(draws.uniform(0.0, 2.0))
        if draws.random() < 0.3:
            return BROKEN
        taken[message.id] += 1
        return ARRIVED

    def fault() -> Fault | None:
        draw = draws.random()
        return Fault.REFUSED if draw < 0.1 else Fault.REPLY_LOST if draw < 0.3 else None

    async def scenario(stage: Stage) -> None:
        ids = await stage.file(*[f"http://h{number % 5}.example/" for number in range(40)])
        running = [asyncio.create_task((await stage.sender()).run()) for _ in range(2)]
        stage.fault = fault
        await asyncio.sleep(HOUR)
        stage.fault = lambda: None
        await asyncio.sleep(60)
        for one in ids:
            found = await stage.deliveries.get(one)
            assert found is not None
            assert (found.state is DeliveryState.DELIVERED) == (found.ended_at is not None)
            assert found.state is DeliveryState.PENDING or taken[one]
        assert (await stage.states())[DeliveryState.DELIVERED] >= 36
        assert all(len(bodies) == 1 for bodies in stage.receiver.bodies.values())
        await ended(*running)

    play(scenario, answer)


def test_a_fault_of_the_sender_is_a_failed_try() -> None:
    async def answer(_: Message) -> SendReport:
        raise ValueError("nobody foresaw this")

    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/")
        sender = await stage.sender()
        await sender.run_once()
        await sender.settled()
        found = await stage.deliveries.get(one)
        assert found is not None
        assert (found.tries, found.error) == (1, "could not be sent: ValueError")

    play(scenario, answer)


class Strange(Deliveries):
    """Cannot read what is told."""

    async def body(self, message: Message) -> str | None:
        """Fail as nobody foresaw."""
        raise ValueError(f"nobody foresaw this of {message.url}")


def test_a_fault_on_the_way_is_a_failed_try_that_is_told_once() -> None:
    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("http://a.example/CANARY")
        store = stage.new_store()
        await store.open()
        sender = Webhooks(Strange(store), stage.receiver, draws=stage.loop.random)
        with structlog.testing.capture_logs() as lines:
            await sender.run_once()
            await sender.settled()
        found = await stage.deliveries.get(one)
        assert found is not None
        assert (found.tries, found.error) == (1, "could not be sent: ValueError")
        assert found.due_at is not None
        assert found.due_at - stage.loop.clock() >= 5.0, "it waits like any other"
        assert [line["event"] for line in lines] == ["a webhook could not be sent"]

    play(scenario, always(ARRIVED))


def test_a_ping_ends_before_a_request_does() -> None:
    async def scenario(stage: Stage) -> None:
        sender = await stage.sender()
        started = stage.loop.clock()
        report = await sender.ping("http://a.example/")
        assert stage.loop.clock() - started == pytest.approx(25.0)
        assert (report.has_arrived, report.is_final) == (False, False)
        assert report.error == "no answer within 25 seconds"

    play(scenario, always(ARRIVED, 60.0))


def test_a_ping_is_sent_at_once_and_not_kept() -> None:
    async def scenario(stage: Stage) -> None:
        sender = await stage.sender()
        assert await sender.ping("http://a.example/") == ARRIVED
        assert len(stage.receiver.came) == 1
        assert await stage.states() == {}

    play(scenario, always(ARRIVED))


def test_a_task_that_ends_wakes_its_own_node() -> None:
    async def scenario(service: Service) -> None:
        receiver = Receiver(service.loop.clock, always(ARRIVED))
        store = service.engine.store
        assert isinstance(store, MemoryTaskStore)
        sender = Webhooks(Deliveries(store), receiver, draws=service.loop.random)
        service.engine.feed.subscribe(records=sender.observe)
        running = asyncio.create_task(sender.run())
        await asyncio.sleep(10.4)
        task_id = await service.submit(callback_url="http://a.example/")
        record = await service.ended(task_id)
        await asyncio.sleep(0.1)
        ((_, message_id),) = receiver.came
        completed_at = record.progress.completed_at
        assert completed_at is not None
        assert message_id == task_id.replace("tsk_", "msg_")
        found = await sender.deliveries.get(message_id)
        assert found is not None
        assert found.state is DeliveryState.DELIVERED
        assert found.ended_at is not None
        assert found.ended_at - completed_at < 0.2
        await ended(running)

    play_service(scenario)


def test_what_a_receiver_says_is_kept_and_not_logged() -> None:
    said = "answered 500: Cannot POST /services/CANARY"
    report = SendReport(status=500, error=said, problem="answered 500")

    async def scenario(stage: Stage) -> None:
        (one,) = await stage.file("https://a.example/services/CANARY")
        sender = await stage.sender()
        with structlog.testing.capture_logs() as lines:
            await sender.run_once()
            await sender.settled()
        assert "CANARY" not in str(lines)
        (line,) = [line for line in lines if line["event"] == "webhook failed"]
        assert (line["status"], line["problem"]) == (500, "answered 500")
        found = await stage.deliveries.get(one)
        assert found is not None
        assert found.error == said

    play(scenario, always(report))


def test_of_an_address_the_log_shows_the_host_alone() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.file("https://a.example/services/T0KEN?key=CANARY")
        sender = await stage.sender()
        with structlog.testing.capture_logs() as lines:
            await sender.run_once()
            await sender.settled()
        (line,) = [line for line in lines if line["event"] == "webhook failed"]
        assert line["host"] == "a.example"
        assert "CANARY" not in str(lines)
        assert "T0KEN" not in str(lines)

    play(scenario, always(BROKEN))
