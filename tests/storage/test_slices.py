"""Slices of budgets: turned in one transaction, never past a limit, exact when all is settled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import count

import pytest

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Limit, Refused, ReserveRequest
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import Settled
from headgate.core.money import MicroUsd, Tokens
from headgate.engine.escrow import IDLE_SECONDS, Draw, Escrow
from headgate.errors import StoreError, StoreUnavailableError
from headgate.storage.call_rows import (
    CallQuery,
    CallStore,
    EndedCall,
    SliceAnswer,
    SliceTurn,
    first_call_id_at,
)
from headgate.storage.sql_store import StoreLedger
from storage.scene import Place, Scene

PROJECT = Scope("project:search")
SCOPES = (ROOT, PROJECT)
LIMIT = 1_000_000
NUMBERS = count()


async def limited(scene: Scene, limit: int = LIMIT) -> None:
    await StoreLedger(scene.store).set_limit(PROJECT, Limit(limit_micro_usd=MicroUsd(limit)))


async def balance(scene: Scene) -> tuple[int, int, int]:
    (account,) = await StoreLedger(scene.store).accounts(PROJECT, most=1)
    found = account.balance
    return found.spent_micro_usd, found.reserved_micro_usd, found.overrun_micro_usd


def ended(scene: Scene, micro_usd: int) -> EndedCall:
    now = scene.clock()
    record = CallRecord(
        id=f"{first_call_id_at(now)[:-6]}{next(NUMBERS):06}",
        project_id="search",
        agent_id="coder",
        model="large",
        upstream="anthropic",
        state=CallState.DONE,
        created_at=now,
        started_at=now,
        ended_at=now,
        tokens=0,
        micro_usd=micro_usd,
    )
    return EndedCall(record=record, share=Amounts(record.micro_usd or 0, record.tokens or 0))


def escrow_of(
    scene: Scene,
    store: CallStore | None = None,
    settled: Callable[[Settled], None] = lambda _: None,
) -> Escrow:
    names = count()
    return Escrow(
        store or CallStore(scene.store),
        now=scene.clock,
        new_name=lambda: f"slice-{next(names)}",
        settled=settled,
    )


async def test_calls_that_draw_on_a_slice_are_booked_to_the_micro_dollar(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        first = await escrow.refill(SCOPES, Amounts(100))
        assert first is not None
        second = escrow.draw(SCOPES, Amounts(100))
        assert second is not None, "a slice has headroom for a further call"
        escrow.settle(first, Amounts(60), ended(scene, 60))
        escrow.settle(second, Amounts(110), ended(scene, 110))
        await escrow.recall()
        assert sum(await balance(scene)) == 170
        assert (await balance(scene))[1] == 0
        page = await CallStore(scene.store).find(CallQuery())
        assert sorted(one.micro_usd or 0 for one in page.records) == [60, 110]


async def test_what_is_in_flight_stays_held_when_a_slice_is_turned(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        draw = await escrow.refill(SCOPES, Amounts(500))
        assert draw is not None
        await escrow.recall()
        assert await balance(scene) == (0, 500, 0)
        escrow.give_back(draw)
        await escrow.recall()
        assert await balance(scene) == (0, 0, 0)


async def test_a_question_sees_what_ended_while_a_slice_was_turned(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        first = await escrow.refill(SCOPES, Amounts(100))
        second = escrow.draw(SCOPES, Amounts(100))
        assert first is not None
        assert second is not None
        escrow.settle(first, Amounts(60), ended(scene, 60))
        escrow.turn_due()
        await asyncio.sleep(0)
        escrow.settle(second, Amounts(50), ended(scene, 50))
        await escrow.flush()
        assert (await balance(scene))[0] == 110
        await escrow.recall()


async def test_near_a_limit_calls_are_left_to_reservations_of_their_own(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene, 100)
        escrow = escrow_of(scene)
        assert await escrow.refill(SCOPES, Amounts(90)) is None
        assert sum(await balance(scene)) == 0


async def test_a_slice_that_nobody_uses_is_given_back(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        draw = await escrow.refill(SCOPES, Amounts(100))
        assert draw is not None
        escrow.settle(draw, Amounts(100), ended(scene, 100))
        assert (await balance(scene))[1] > 0
        scene.clock.advance(2.0)
        await escrow.recall()
        assert await balance(scene) == (100, 0, 0)


async def test_who_waits_for_a_budget_hears_of_the_scopes_of_a_slice_alone(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        heard: list[Settled] = []
        escrow = escrow_of(scene, settled=heard.append)
        draw = await escrow.refill(SCOPES, Amounts(100))
        assert draw is not None
        escrow.settle(draw, Amounts(60), ended(scene, 60))
        await escrow.recall()
        assert {one.scopes for one in heard} == {SCOPES}


async def test_a_crash_books_the_slice_and_no_more_than_its_headroom_too_much(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        draw = await escrow.refill(SCOPES, Amounts(1_000))
        assert draw is not None
        held = (await balance(scene))[1]
        scene.clock.advance(1_000.0)
        await StoreLedger(scene.store).sweep()
        spent, reserved, overrun = await balance(scene)
        assert reserved == 0
        assert 1_000 <= spent + overrun == held <= 1_000 + LIMIT // 16


async def test_what_a_call_spent_is_booked_though_others_are_in_flight(place: Place) -> None:
    """A call that costs far more than it held leaves no room that others could be given."""
    async with place.scene() as scene:
        await limited(scene, 20_000)
        escrow = escrow_of(scene)
        dear = await escrow.refill(SCOPES, Amounts(100))
        other = escrow.draw(SCOPES, Amounts(100))
        assert dear is not None
        assert other is not None
        escrow.settle(dear, Amounts(19_950), ended(scene, 19_950))
        await escrow.flush()
        spent, reserved, overrun = await balance(scene)
        assert spent + overrun == 19_950
        assert reserved == 100, "what is in flight stays held, past the limit if need be"
        request = ReserveRequest(
            reservation_id="one-more",
            scopes=SCOPES,
            micro_usd=MicroUsd(10),
            tokens=Tokens(0),
            lease_seconds=60.0,
        )
        assert isinstance(await StoreLedger(scene.store).reserve(request), Refused)
        escrow.settle(other, Amounts(100), ended(scene, 100))
        await escrow.recall()
        assert sum(await balance(scene)) == 20_050


async def test_a_free_call_that_lasts_has_its_row_written(place: Place) -> None:
    async with place.scene() as scene:
        escrow = escrow_of(scene)
        draw = await escrow.refill(SCOPES, Amounts())
        assert draw is not None
        for _ in range(3):
            scene.clock.advance(40.0)
            escrow.turn_due()
        escrow.settle(draw, Amounts(), ended(scene, 0))
        await escrow.flush()
        assert len((await CallStore(scene.store).find(CallQuery())).records) == 1


class _Broken(CallStore):
    """A store that cannot write some rows, whatever is tried."""

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        if turn.ended:
            raise StoreError("a row that no table takes")
        return await super().turn(turn)


async def test_a_row_that_cannot_be_written_keeps_no_money_from_being_booked(place: Place) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene, _Broken(scene.store))
        draw = await escrow.refill(SCOPES, Amounts(100))
        assert draw is not None
        escrow.settle(draw, Amounts(70), ended(scene, 70))
        await escrow.flush()
        scene.clock.advance(2.0)
        await escrow.recall()
        assert await balance(scene) == (70, 0, 0)


class _Slow(CallStore):
    """A store that answers when it is told to, and may lose what it was asked."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.store)
        self.answers = asyncio.Event()
        self.answers.set()
        self.is_away = False

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        await self.answers.wait()
        if self.is_away:
            self.is_away = False
            self.answers.clear()
            raise StoreUnavailableError("gone for a moment")
        return await super().turn(turn)


async def test_calls_draw_on_what_a_slice_had_while_it_is_turned(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.engine.escrow.RETRY_SECONDS", 0.0)
    async with place.scene() as scene:
        await limited(scene)
        store = _Slow(scene)
        escrow = escrow_of(scene, store)
        first = await escrow.refill(SCOPES, Amounts(100))
        assert first is not None
        left = escrow._slices[SCOPES].available.micro_usd
        store.answers.clear()
        escrow.settle(first, Amounts(60), ended(scene, 60))
        escrow.turn_due()
        await asyncio.sleep(0)
        draws = []
        while (draw := escrow.draw(SCOPES, Amounts(100))) is not None:
            draws.append(draw)
        assert 100 <= 100 * len(draws) <= left, "no more than the store knows to be held"
        escrow.give_back(draws.pop())
        store.is_away = True
        store.answers.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not store.is_away
        assert escrow.draw(SCOPES, Amounts(1)) is None, "the store does not answer"
        store.answers.set()
        await escrow.flush()
        spent, reserved, overrun = await balance(scene)
        assert (spent, overrun) == (60, 0)
        assert reserved >= 100 * len(draws)
        for one in draws:
            escrow.settle(one, Amounts(10), ended(scene, 10))
        await escrow.recall()
        assert await balance(scene) == (60 + 10 * len(draws), 0, 0)


async def test_calls_that_wait_together_have_their_money_after_two_turns_at_most(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        amounts = [Amounts(100 * (1 + number % 3)) for number in range(60)]
        draws = await asyncio.gather(*[escrow.refill(SCOPES, one) for one in amounts])
        assert None not in draws
        for draw in draws:
            assert draw is not None
            escrow.give_back(draw)
        await escrow.recall()
        assert await balance(scene) == (0, 0, 0)


async def test_a_slice_has_room_for_the_next_call_while_others_end_one_by_one(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await limited(scene)
        escrow = escrow_of(scene)
        draws = await asyncio.gather(*[escrow.refill(SCOPES, Amounts(100)) for _ in range(8)])
        for draw in draws:
            assert draw is not None
            escrow.settle(draw, Amounts(100), ended(scene, 100))
            await escrow.flush()
        draw = escrow.draw(SCOPES, Amounts(100))
        assert draw is not None
        escrow.give_back(draw)
        await escrow.recall()


def sets_of(project: str, count: int) -> list[tuple[Scope, ...]]:
    name = f"project:{project}"
    return [(ROOT, Scope(name), Scope(f"{name}/session:{number}")) for number in range(count)]


async def use(escrow: Escrow, scene: Scene, scopes: tuple[Scope, ...]) -> bool:
    """Draw on a slice and settle it; tell whether there was one."""
    draw = escrow.draw(scopes, Amounts(100)) or await escrow.refill(scopes, Amounts(100))
    if draw is not None:
        escrow.settle(draw, Amounts(60), ended(scene, 60))
    return draw is not None


@pytest.fixture
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.engine.escrow.MAX_SLICES", 4)
    monkeypatch.setattr("headgate.engine.escrow.MAX_SLICES_EACH", 3)


@pytest.mark.usefixtures("few_slices")
async def test_one_project_leaves_slices_to_the_others(place: Place) -> None:
    async with place.scene() as scene:
        escrow = escrow_of(scene)
        made = [await use(escrow, scene, one) for one in sets_of("greedy", 5)]
        assert made == [True, True, True, False, False], "they are in use, and it has no more"
        (other,) = sets_of("other", 1)
        assert await use(escrow, scene, other)
        await escrow.recall()


@pytest.mark.usefixtures("few_slices")
async def test_the_slice_that_is_used_least_makes_room(place: Place) -> None:
    async with place.scene() as scene:
        escrow = escrow_of(scene)
        first, second, third, fourth = sets_of("search", 4)
        in_flight = await escrow.refill(first, Amounts(100))
        assert in_flight is not None
        for one in (second, third):
            assert await use(escrow, scene, one)
        scene.clock.advance(2 * IDLE_SECONDS)
        assert await use(escrow, scene, second)
        assert await use(escrow, scene, fourth)
        assert set(escrow._slices) == {first, second, fourth}, "what is in flight stays"
        await escrow.flush()
        escrow.turn_due()
        assert not escrow._retired
        escrow.settle(in_flight, Amounts(60), ended(scene, 60))
        await escrow.recall()
        assert await balance(scene) == (5 * 60, 0, 0)
        page = await CallStore(scene.store).find(CallQuery())
        assert len(page.records) == 5


@pytest.mark.usefixtures("few_slices")
async def test_a_full_store_of_slices_takes_from_whoever_has_most(place: Place) -> None:
    async with place.scene() as scene:
        escrow = escrow_of(scene)
        for one in (*sets_of("greedy", 3), *sets_of("other", 1)):
            assert await use(escrow, scene, one)
        scene.clock.advance(2 * IDLE_SECONDS)
        (third,) = sets_of("third", 1)
        assert await use(escrow, scene, third)
        assert set(escrow._slices) == {*sets_of("greedy", 3)[1:], *sets_of("other", 1), third}
        await escrow.recall()


class _Away(CallStore):
    """A store that has lost some answers, after it wrote or before."""

    def __init__(self, scene: Scene, source: random.Random) -> None:
        super().__init__(scene.store)
        self._source = source

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        if self._source.random() < 0.2:
            raise StoreUnavailableError("lost before it was written")
        answer = await super().turn(turn)
        if self._source.random() < 0.2:
            raise StoreUnavailableError("lost after it was written")
        return answer


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_never_pass_a_limit_and_the_books_are_exact(
    place: Place, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lost answers, overruns, idle times and turns at any moment."""
    monkeypatch.setattr("headgate.engine.escrow.RETRY_SECONDS", 0.0)
    source = random.Random(seed)
    async with place.scene() as scene:
        await limited(scene, 20_000)
        escrow = escrow_of(scene, _Away(scene, source))
        in_flight: list[Draw] = []
        spent = overrun = 0
        for _ in range(120):
            choice = source.random()
            if choice < 0.55:
                amounts = Amounts(source.randint(1, 60))
                draw = escrow.draw(SCOPES, amounts) or await escrow.refill(SCOPES, amounts)
                if draw is not None:
                    in_flight.append(draw)
            elif choice < 0.9 and in_flight:
                draw = in_flight.pop(source.randrange(len(in_flight)))
                if source.random() < 0.1:
                    escrow.give_back(draw)
                else:
                    cost = source.randint(0, draw.amounts.micro_usd + 5)
                    overrun += max(0, cost - draw.amounts.micro_usd)
                    spent += cost
                    escrow.settle(draw, Amounts(cost), ended(scene, cost))
            elif choice < 0.97:
                escrow.turn_due()
                await asyncio.sleep(0)
            else:
                scene.clock.advance(source.choice((0.2, 1.5)))
            held = sum(await balance(scene))
            assert held <= 20_000 + overrun
            if not any(one.is_turning for one in escrow._slices.values()):
                drawn = sum(one.amounts.micro_usd for one in in_flight)
                assert held + overrun >= spent + drawn, "what is in flight is held, whatever comes"
        while in_flight:
            draw = in_flight.pop()
            escrow.settle(draw, Amounts(1), ended(scene, 1))
            spent += 1
        scene.clock.advance(2.0)
        await escrow.recall()
        await escrow.recall()
        booked = await balance(scene)
        assert booked[0] + booked[2] == spent
        assert booked[1] == 0
