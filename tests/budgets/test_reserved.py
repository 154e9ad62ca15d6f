"""Holding money around a call: however the body ends, what may have been charged is booked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from headgate.budgets.local import LocalBudgetTracker, LocalLedger
from headgate.budgets.tracker import SETTLE_SECONDS, ActiveReservation, LedgerTracker, reserved
from headgate.core.budgets.ledger import Clock, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.errors import (
    BudgetExceededError,
    IllegalSettlementError,
    InvalidAmountError,
    InvalidFieldError,
    InvalidSettingError,
    LedgerUnavailableError,
)
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")

SCOPE = "session:eval/workflow:w1"
LEASE_SECONDS = 60.0


def run(scenario: Callable[[LedgerTracker], Awaitable[T]]) -> T:
    """Run a scenario in virtual time, on a fresh ledger."""

    async def main(loop: SimulatedLoop) -> T:
        async with LocalBudgetTracker(clock=loop.clock) as tracker:
            return await scenario(tracker)

    return simulate(main).result


async def amounts(tracker: LedgerTracker) -> tuple[int, int, int]:
    """Return spent, reserved and overrun of the session, in micro-dollars."""
    status = await tracker.status("session:eval")
    return status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd


class ProviderError(Exception):
    """Whatever a provider's client raises."""


Body = Callable[[ActiveReservation], None]


def says_nothing(held: ActiveReservation) -> None:
    assert held.micro_usd == 70_000


def reports_less(held: ActiveReservation) -> None:
    held.charge("0.05")


def reports_more(held: ActiveReservation) -> None:
    held.charge("0.10")


def reports_twice(held: ActiveReservation) -> None:
    held.charge("0.01")
    held.charge("0.02")


def was_free(held: ActiveReservation) -> None:
    held.not_charged()


def was_charged_after_all(held: ActiveReservation) -> None:
    held.not_charged()
    held.charge("0.05")


def fails(held: ActiveReservation) -> None:
    raise ProviderError


def fails_after_a_charge(held: ActiveReservation) -> None:
    held.charge("0.05")
    raise ProviderError


def is_refused_a_connection(held: ActiveReservation) -> None:
    raise ConnectionRefusedError


def is_refused_the_second_connection(held: ActiveReservation) -> None:
    held.charge("0.03")
    raise ConnectionRefusedError


def knows_that_it_was_free(held: ActiveReservation) -> None:
    held.not_charged()
    raise ProviderError


ENDS: list[tuple[Body, tuple[int, int, int]]] = [
    (says_nothing, (70_000, 0, 0)),
    (reports_less, (50_000, 0, 0)),
    (reports_more, (70_000, 0, 30_000)),
    (reports_twice, (20_000, 0, 0)),
    (was_free, (0, 0, 0)),
    (was_charged_after_all, (50_000, 0, 0)),
    (fails, (70_000, 0, 0)),
    (fails_after_a_charge, (50_000, 0, 0)),
    (is_refused_a_connection, (0, 0, 0)),
    (is_refused_the_second_connection, (30_000, 0, 0)),
    (knows_that_it_was_free, (0, 0, 0)),
]


@pytest.mark.parametrize(("body", "expected"), ENDS, ids=[body.__name__ for body, _ in ENDS])
def test_the_end_of_the_body_decides_what_is_booked(
    body: Body, expected: tuple[int, int, int]
) -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with suppress(ProviderError, ConnectionRefusedError):
            async with reserved(
                tracker, SCOPE, "0.07", not_charged_on=(ConnectionRefusedError,)
            ) as held:
                assert await amounts(tracker) == (0, 70_000, 0)
                body(held)
        assert await amounts(tracker) == expected

    run(scenario)


@pytest.mark.parametrize("error", [ProviderError, ConnectionRefusedError, asyncio.CancelledError])
def test_the_error_of_the_body_is_raised(error: type[BaseException]) -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        raised = error()
        with pytest.raises(error) as caught:
            async with reserved(tracker, SCOPE, "0.07", not_charged_on=(ConnectionRefusedError,)):
                raise raised
        assert caught.value is raised

    run(scenario)


def test_tokens_that_are_not_reported_are_those_that_were_reserved() -> None:
    async def scenario(tracker: LedgerTracker) -> list[int]:
        spent = []
        for tokens in (None, 30):
            async with reserved(tracker, SCOPE, "0.07", tokens=100) as held:
                held.charge("0.05", tokens=tokens)
            spent.append((await tracker.status(SCOPE)).spent_tokens)
        return spent

    assert run(scenario) == [100, 130]


def test_further_scopes_are_held_too() -> None:
    async def scenario(tracker: LedgerTracker) -> float:
        async with reserved(tracker, SCOPE, "0.07", also=("team:red",)):
            pass
        return await tracker.get_spent("team:red")

    assert run(scenario) == 0.07


def test_a_refused_hold_does_not_run_its_body() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        await tracker.set_budget("session:eval", "0.05")
        with pytest.raises(BudgetExceededError):
            async with reserved(tracker, SCOPE, "0.07"):
                pytest.fail("the body ran")
        assert await amounts(tracker) == (0, 0, 0)

    run(scenario)


def test_an_id_whose_call_is_over_does_not_run_its_body_again() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async with reserved(tracker, SCOPE, "0.07", reservation_id="call-1"):
            pass
        with pytest.raises(IllegalSettlementError, match="use a new id"):
            async with reserved(tracker, SCOPE, "0.07", reservation_id="call-1"):
                pytest.fail("the body ran")
        assert await amounts(tracker) == (70_000, 0, 0)

    run(scenario)


def test_an_impossible_charge_is_refused_where_it_is_made() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with pytest.raises(InvalidAmountError):
            async with reserved(tracker, SCOPE, "0.07") as held:
                held.charge(-1)
        assert await amounts(tracker) == (70_000, 0, 0)

    run(scenario)


def test_the_lease_is_renewed_while_the_body_runs() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS) as held:
            await asyncio.sleep(20.5 * LEASE_SECONDS)
            assert await amounts(tracker) == (0, 70_000, 0)
            assert held.renewal_error is None
            held.charge("0.05")
        assert await amounts(tracker) == (50_000, 0, 0)

    run(scenario)


def test_a_renewal_that_is_refused_is_noted_and_not_tried_again() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async def call() -> None:
            async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS) as held:
                await tracker.release(held.reservation_id)
                await asyncio.sleep(10 * LEASE_SECONDS)
                assert isinstance(held.renewal_error, IllegalSettlementError)

        with pytest.raises(IllegalSettlementError, match="gave the money back"):
            await call()

    run(scenario)


def test_renewal_goes_on_when_the_ledger_comes_back() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS) as held:
            await tracker.ledger.close()
            await asyncio.sleep(LEASE_SECONDS / 2)
            assert isinstance(held.renewal_error, LedgerUnavailableError)
            await tracker.ledger.open()
            await asyncio.sleep(LEASE_SECONDS)
            assert held.renewal_error is None
            held.charge("0.05")
        assert await amounts(tracker) == (50_000, 0, 0)

    run(scenario)


def test_a_late_report_corrects_what_the_end_of_the_lease_assumed() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS) as held:
            await tracker.ledger.close()
            await asyncio.sleep(2 * LEASE_SECONDS)
            await tracker.ledger.open()
            assert await amounts(tracker) == (70_000, 0, 0)
            held.charge("0.05")
        assert await amounts(tracker) == (50_000, 0, 0)

    run(scenario)


def test_a_cancelled_body_is_assumed_to_have_been_charged() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5), reserved(tracker, SCOPE, "0.07"):
                await asyncio.sleep(LEASE_SECONDS)
        assert await amounts(tracker) == (70_000, 0, 0)

    run(scenario)


def test_an_error_keeps_its_place_when_the_ledger_is_unreachable_too() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async def call() -> None:
            async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS):
                await tracker.ledger.close()
                raise ProviderError

        with pytest.raises(ProviderError) as caught:
            await call()
        assert "was not settled" in caught.value.__notes__[0]
        await tracker.ledger.open()
        assert await amounts(tracker) == (0, 70_000, 0)
        await asyncio.sleep(LEASE_SECONDS)
        assert await amounts(tracker) == (70_000, 0, 0)

    run(scenario)


def test_a_cost_that_could_not_be_booked_is_an_error() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async def call() -> None:
            async with reserved(tracker, SCOPE, "0.07") as held:
                held.charge("0.05")
                await tracker.ledger.close()

        with pytest.raises(LedgerUnavailableError):
            await call()

    run(scenario)


class SlowLedger(LocalLedger):
    """Books whose answers to some calls take their time, after they were applied."""

    def __init__(self, clock: Clock, *, slow: Call, seconds: float) -> None:
        super().__init__(clock=clock)
        self.slow = slow
        self.seconds = seconds

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        answer = await super().reserve(request)
        if self.slow is Call.RESERVE:
            await asyncio.sleep(self.seconds)
        return answer

    async def settle(self, request: SettleRequest) -> Reservation:
        if request.call is self.slow:
            await asyncio.sleep(self.seconds)
        return await super().settle(request)


def run_slowly(
    scenario: Callable[[LedgerTracker], Awaitable[None]], *, slow: Call, seconds: float
) -> float:
    """Run a scenario on a slow ledger, and return the virtual seconds that it took."""

    async def main(loop: SimulatedLoop) -> None:
        async with LedgerTracker(SlowLedger(loop.clock, slow=slow, seconds=seconds)) as tracker:
            await scenario(tracker)

    return simulate(main).seconds


def test_a_settlement_is_not_lost_to_a_second_cancellation() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async def call() -> None:
            async with reserved(tracker, SCOPE, "0.07") as held:
                held.charge("0.05")
                await asyncio.sleep(1_000)

        task = asyncio.create_task(call())
        for _ in range(3):
            await asyncio.sleep(1)
            task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert await amounts(tracker) == (50_000, 0, 0)

    run_slowly(scenario, slow=Call.COMMIT, seconds=5)


def test_a_cancellation_during_the_settlement_is_not_swallowed() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async def call() -> None:
            async with asyncio.timeout(2):
                async with reserved(tracker, SCOPE, "0.07") as held:
                    held.charge("0.05")
                pytest.fail("the cancellation was swallowed")

        with pytest.raises(TimeoutError):
            await call()
        assert await amounts(tracker) == (50_000, 0, 0)

    run_slowly(scenario, slow=Call.COMMIT, seconds=5)


def test_a_ledger_that_hangs_does_not_hang_the_caller() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with pytest.raises(LedgerUnavailableError, match="lease decides"):
            async with reserved(tracker, SCOPE, "0.07"):
                pass

    took = run_slowly(scenario, slow=Call.COMMIT, seconds=100_000)
    assert took == pytest.approx(SETTLE_SECONDS)


def test_a_renewal_that_hangs_is_given_up_and_tried_again() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        async with reserved(tracker, SCOPE, "0.07", lease_seconds=LEASE_SECONDS) as held:
            await asyncio.sleep(LEASE_SECONDS)
            assert isinstance(held.renewal_error, LedgerUnavailableError)
        assert await amounts(tracker) == (70_000, 0, 0)

    run_slowly(scenario, slow=Call.EXTEND, seconds=100_000)


def test_what_a_cancelled_reserve_may_hold_is_given_back() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), reserved(tracker, SCOPE, "0.07"):
                pytest.fail("the body ran")
        assert await amounts(tracker) == (0, 0, 0)

    run_slowly(scenario, slow=Call.RESERVE, seconds=5)


def test_under_an_id_of_the_caller_a_cancelled_reserve_is_left_to_its_lease() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        with pytest.raises(TimeoutError):
            async with (
                asyncio.timeout(1),
                reserved(tracker, SCOPE, "0.07", reservation_id="call-1"),
            ):
                pytest.fail("the body ran")
        assert await amounts(tracker) == (0, 70_000, 0)

    run_slowly(scenario, slow=Call.RESERVE, seconds=5)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"lease_seconds": "60"}, "lease_seconds: must be a number"),
    ({"lease_seconds": None}, "lease_seconds: must be a number"),
    ({"lease_seconds": True}, "lease_seconds: must be a number"),
    ({"reservation_id": 5}, "reservation_id: must be a string"),
]


@pytest.mark.parametrize(("arguments", "line"), WRONG_TYPES)
def test_an_argument_of_a_wrong_type_is_told_and_holds_nothing(
    arguments: dict[str, Any], line: str
) -> None:
    async def scenario(tracker: LedgerTracker) -> tuple[int, int, int]:
        with pytest.raises(InvalidFieldError, match=line):
            async with tracker.reserved(SCOPE, "0.07", **arguments):
                pytest.fail("the body must not run")
        return await amounts(tracker)

    assert run(scenario) == (0, 0, 0)


def test_a_window_of_a_wrong_type_is_told() -> None:
    async def scenario(tracker: LedgerTracker) -> None:
        window: Any = 5
        with pytest.raises(InvalidSettingError, match="window: must be a string"):
            await tracker.set_budget(SCOPE, "1", window=window)

    run(scenario)


class HeldUpLedger(LocalLedger):
    """A ledger on which a reserve takes until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.let_through = asyncio.Event()

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        self.asked.set()
        await self.let_through.wait()
        return await super().reserve(request)


def test_a_reserve_that_lands_after_its_hold_was_cancelled_is_given_back() -> None:
    async def cancel_while_reserving() -> int:
        ledger = HeldUpLedger()
        tracker = LedgerTracker(ledger)

        async def call() -> None:
            async with tracker.reserved("session:s", "1.00"):
                pytest.fail("the body must not run")

        calling = asyncio.create_task(call())
        await ledger.asked.wait()
        calling.cancel()
        # The cancellation has arrived before the reserve comes to its end.
        await asyncio.sleep(0)
        ledger.let_through.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        return (await tracker.status("session:s")).reserved_micro_usd

    assert asyncio.run(cancel_while_reserving()) == 0
