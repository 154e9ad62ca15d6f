"""What each caller has in hand: one that takes all it can get leaves room for the others."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.api import shares
from headgate.api.errors import ApiError
from headgate.api.shares import Holder, Making, Pool, Seat, Shares, Turns, address_key

OPERATOR = Holder("operator", is_trusted=True)


def fill(pool: Pool, holder: Holder) -> int:
    """Take as much as one caller can get, one at a time."""
    while pool.has_room(holder):
        pool.take(holder.key)
    return pool.of(holder.key)


@given(st.integers(16, 5_000), st.integers(1, 6))
def test_however_many_take_all_they_can_the_next_finds_room(most: int, greedy: int) -> None:
    pool = Pool(most)
    had = [fill(pool, Holder(f"greedy {number}")) for number in range(greedy)]
    assert had[0] >= (most - most // 16) * 8 // 9 - 1, "one that is alone gets nearly everything"
    assert had == sorted(had, reverse=True)
    if most >= 16 * 9**greedy:
        assert pool.has_room(Holder("modest"))
    assert pool.has_room(OPERATOR)
    fill(pool, OPERATOR)
    assert pool.taken == pool.most, "nothing is kept from an operator"


async def test_a_caller_has_few_answers_in_the_making_and_others_have_their_turn() -> None:
    making, under_way = Making(8), Counter[str]()
    most, ended = Counter[str](), list[str]()

    async def ask(key: str) -> None:
        async with making.turn(Holder(key)):
            under_way[key] += 1
            most[key] = max(most[key], under_way[key])
            most["all"] = max(most["all"], under_way.total())
            await asyncio.sleep(0.01)
            under_way[key] -= 1
        ended.append(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(ask("hostile"))
        await asyncio.sleep(0.005)
        for _ in range(3):
            group.create_task(ask("honest"))
    assert most["hostile"] == 4, "alone, it has half"
    assert most["all"] <= 8
    assert ended[:16].count("honest") == 3
    assert len(ended) == 203


async def test_an_answer_that_nobody_waits_for_any_more_gives_its_turn_back() -> None:
    making, holder = Making(2), Holder("one")

    async def ask() -> None:
        async with making.turn(holder):
            await asyncio.sleep(1.0)

    tasks = [asyncio.create_task(ask()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(30.0), making.turn(holder), making.turn(Holder("other")):
        pass


def test_what_was_given_back_is_there_again() -> None:
    pool = Pool(100)
    one = Holder("one")
    had = fill(pool, one)
    pool.give_back("one", had)
    assert (pool.taken, pool.of("one")) == (0, 0)
    assert fill(pool, one) == had


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.1", "at 10.0.0.1"),
        ("::ffff:10.0.0.1", "at 10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "at 2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "at 2001:db8:1:2::/64"),
        ("::1", "at ::/64"),
        ("", "at "),
        ("not an address", "at not an address"),
    ],
)
def test_all_addresses_of_a_network_are_one_caller(address: str, key: str) -> None:
    assert address_key(address) == key


class Client:
    """A connection that does nothing."""

    def __init__(self, shared: Shares, address: str = "10.0.0.1") -> None:
        self.is_closed = False
        self.seat = Seat(shared, address, self.close)

    def close(self) -> None:
        self.is_closed = True


def small(most: int, monkeypatch: pytest.MonkeyPatch) -> Shares:
    monkeypatch.setattr(shares, "MAX_CONNECTIONS", most)
    return Shares()


def test_idle_connections_of_the_caller_with_too_many_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = small(160, monkeypatch)
    modest = Client(shared, "10.0.0.2")
    greedy = [Client(shared) for _ in range(500)]
    assert not modest.is_closed
    assert [one.is_closed for one in greedy] == [True] * 368 + [False] * 132
    assert not any(one.seat.is_extra for one in greedy)


def test_a_connection_counts_for_its_token_once_that_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger and an honest caller at one address: the honest one's connections stay."""
    shared = small(160, monkeypatch)
    honest = [Client(shared) for _ in range(10)]
    for one in honest:
        one.seat.work()
        one.seat.identify("honest", is_trusted=False)
        one.seat.rest()
    strangers = [Client(shared) for _ in range(500)]
    assert not any(one.is_closed for one in honest)
    assert shared.connections.of("honest") == 10
    assert strangers[0].is_closed


def test_a_token_with_too_many_connections_loses_its_idle_ones_then_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = small(90, monkeypatch)

    def authenticated() -> Client:
        one = Client(shared)
        one.seat.work()
        one.seat.identify("greedy", is_trusted=False)
        return one

    busy = [authenticated() for _ in range(75)]
    busy[7].seat.rest()
    authenticated()
    assert busy[7].is_closed
    with pytest.raises(ApiError) as refused:
        authenticated()
    assert (refused.value.kind.status, refused.value.closes) == (429, True)
    other = Client(shared, "10.0.0.2")
    other.seat.identify("modest", is_trusted=False)
    assert not other.seat.is_extra


def test_where_many_callers_have_everything_an_operator_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = small(160, monkeypatch)
    for number in range(400):
        Client(shared, f"10.0.{number // 250}.{number % 250}").seat.work()
    operator = Client(shared)
    assert operator.seat.is_extra
    assert not shared.is_overfull or shared.connections.taken > 160 + shares.EXTRA_CONNECTIONS
    operator.seat.work()
    operator.seat.identify("operator", is_trusted=True)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "know", "work", "rest", "hold", "drop", "go"]),
        st.integers(0, 30),
        st.integers(0, 400),
    ),
    max_size=120,
)


@given(STEPS)
def test_what_is_counted_is_what_the_connections_have(steps: list[tuple[str, int, int]]) -> None:
    shared = Shares()
    shared.connections.most = 20
    shared.bytes.most = 2_000
    seats: dict[int, tuple[Client, int]] = {}
    for step, number, amount in steps:
        if step == "come" and number not in seats:
            seats[number] = (Client(shared, f"10.0.0.{amount % 4}"), 0)
        seats = {one: kept for one, kept in seats.items() if not kept[0].is_closed}
        if number not in seats:
            continue
        client, size = seats[number]
        match step:
            case "know":
                try:
                    client.seat.identify(f"t{amount % 3}", is_trusted=amount % 5 == 0)
                except ApiError:
                    assert client.seat.is_extra
            case "work":
                client.seat.work()
            case "rest":
                client.seat.rest()
            case "hold":
                client.seat.hold(amount)
                seats[number] = (client, size + amount)
            case "drop":
                client.seat.let_go(amount)
                seats[number] = (client, max(size - amount, 0))
            case "go":
                client.seat.leave()
                del seats[number]
        seats = {one: kept for one, kept in seats.items() if not kept[0].is_closed}
    here = Counter(client.seat.holder.key for client, _ in seats.values())
    assert {key: shared.connections.of(key) for key in here} == here
    assert shared.connections.taken == sum(here.values())
    assert shared.bytes.taken == sum(size for _, size in seats.values())
    for client, _ in seats.values():
        client.seat.leave()
    assert (shared.connections.taken, shared.bytes.taken, shared.idle) == (0, 0, {})


class Play:
    """Work that takes time, on a clock of its own; what came when is kept."""

    def __init__(self) -> None:
        self.now = 0.0
        # The pauses between rounds are by another clock, and have a test of their own.
        self.turns = Turns(lambda: self.now, pauses=0)
        self.shared = Shares()
        self.ended: dict[str, list[float]] = {}

    def seat(self, caller: str) -> Seat:
        seat = Seat(self.shared, "10.0.0.1", lambda: None)
        seat.identify(caller, is_trusted=False)
        return seat

    async def work(self, caller: str, steps: int, step_seconds: float) -> float:
        """Do some steps, and return how long they took."""
        began_at = self.now
        for _ in range(steps):
            await asyncio.sleep(0)
            self.now += step_seconds
        self.ended.setdefault(caller, []).append(self.now)
        return self.now - began_at

    def start(self, caller: str, steps: int, step_seconds: float) -> asyncio.Task[float]:
        work = self.turns.run(self.work(caller, steps, step_seconds), self.seat(caller))
        return asyncio.create_task(work)


async def test_a_caller_with_hundreds_of_requests_does_not_keep_another_waiting() -> None:
    play = Play()
    flood = [play.start("greedy", 20, 0.003) for _ in range(400)]
    for _ in range(3):
        await asyncio.sleep(0)
    took = []
    while not all(task.done() for task in flood):
        took.append(await play.start("honest", 2, 0.000_1))
    assert len(took) > 100
    assert max(took[2:]) < 0.015, "a few steps of the other, and not hundreds"


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_work_that_others_wait_for_waits_for_no_turn(*, is_awaited: bool) -> None:
    play = Play()
    flood = [play.start("greedy", 20, 0.003) for _ in range(200)]
    flood.append(play.start("honest", 1_000, 0.000_01))
    seat = play.seat("greedy")
    seat.is_awaited = lambda: True
    if not is_awaited:
        seat.wait_again()
    for _ in range(3):
        await asyncio.sleep(0)
    work = play.turns.run(play.work("its permit", 5, 0.000_1), seat)
    took = await asyncio.create_task(work)
    assert (took < 0.1) is is_awaited, "the others take hundreds of steps"
    await asyncio.gather(*flood)


async def test_a_caller_that_is_alone_does_all_its_work_at_once() -> None:
    play = Play()
    await asyncio.gather(*[play.start("alone", 5, 0.01) for _ in range(100)])
    assert play.now == pytest.approx(100 * 5 * 0.01)
    assert play.ended["alone"][-1] - play.ended["alone"][0] == pytest.approx(99 * 0.01)


async def test_what_cancelled_work_had_is_freed_without_a_search_for_garbage() -> None:
    class Body:
        """What work has in hand."""

    kept: list[weakref.ref[Body]] = []

    async def work() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        await asyncio.Event().wait()

    play = Play()
    gc.disable()
    try:
        task = asyncio.create_task(play.turns.run(work(), play.seat("one")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        del task
        assert [one() for one in kept] == [None]
    finally:
        gc.enable()


async def test_two_that_want_everything_get_half_each() -> None:
    play = Play()
    tasks = [play.start(name, 1_000, 0.001) for name in ("one", "two", "two", "two", "two")]
    await tasks[0]
    ended_at = play.now
    assert 1.5 < ended_at < 3, "alone it took one second, and by turns of requests five"
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_beside_others_a_greedy_caller_leaves_the_processor_to_them() -> None:
    play = Play()
    play.turns = Turns(time.perf_counter)
    busy_seconds = 0.0

    async def burn() -> None:
        nonlocal busy_seconds
        while True:
            await asyncio.sleep(0)
            until = time.perf_counter() + 0.002
            while time.perf_counter() < until:
                pass
            busy_seconds += 0.002

    async def live() -> None:
        for _ in range(1_000):
            await asyncio.sleep(0.01)

    greedy, honest = play.seat("greedy"), play.seat("honest")
    tasks = [asyncio.create_task(play.turns.run(burn(), greedy)) for _ in range(20)]
    tasks.append(asyncio.create_task(play.turns.run(live(), honest)))
    await asyncio.sleep(0.2)
    before, began_at = busy_seconds, time.perf_counter()
    await asyncio.sleep(1.0)
    share = (busy_seconds - before) / (time.perf_counter() - began_at)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert share < 0.6, "it took nearly all of the time before"


def test_greedy_callers_wait_longer_while_the_loop_comes_late() -> None:
    turns = Turns(lambda: 0.0)
    assert turns.pause_seconds(0.001) == pytest.approx(0.002)
    for _ in range(40):
        turns.note_late(0.003)
    assert turns.pause_seconds(0.001) == pytest.approx(0.002 + 4 * 0.003, rel=0.01)
    for _ in range(40):
        turns.note_late(1.0)
    assert turns.pause_seconds(0.001) == shares.MAX_PAUSE_SECONDS
    for _ in range(60):
        turns.note_late(-0.001)
    assert turns.pause_seconds(0.001) == pytest.approx(0.002, rel=0.01)
    assert turns.pause_seconds(0.0) == 0.0


async def test_work_that_waits_for_its_turn_can_be_cancelled() -> None:
    play = Play()
    told: list[str] = []

    async def stubborn() -> None:
        try:
            for _ in range(1_000):
                await asyncio.sleep(0)
                play.now += 0.01
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    seat = play.seat("greedy")
    tasks = [asyncio.create_task(play.turns.run(stubborn(), seat)) for _ in range(20)]
    await play.start("honest", 10, 0.000_1)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert len(told) == 20


async def test_work_gives_its_result_or_its_error() -> None:
    play = Play()
    assert await play.start("one", 3, 0.001) == pytest.approx(0.003)

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await asyncio.create_task(play.turns.run(fails(), play.seat("one")))


def test_callers_are_forgotten_when_they_did_nothing_for_a_while() -> None:
    turns = Turns(lambda: 0.0)
    for number in range(10_000):
        turns.charge(f"caller {number}", 0.000_2, now=number * 0.000_1)
    assert len(turns._used) <= shares.MAX_CALLERS + 1
    turns.charge("last", 0.001, now=60.0)
    assert list(turns._used) == ["last"]
