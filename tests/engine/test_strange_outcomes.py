"""Whatever an executor says came of a task, the task ends and its place is free again."""

from __future__ import annotations

import msgspec
import pytest

from engine.one_service import Service, play
from engine.simulated_work import DONE, always, in_turn
from headgate.core.lifecycle import Failed, Limited, Succeeded, Usage
from headgate.core.money import MAX_RESERVATION_TOKENS
from headgate.core.task import TaskRecord, TaskStatus
from headgate.storage.store import Settled, Settlement, StaleLease

RESERVED_TOKENS = 100


async def run_one(service: Service) -> TaskRecord:
    return await service.ended(await service.submit())


def test_an_outcome_that_cannot_be_stored_fails_its_task() -> None:
    record = play(run_one, always(0.0, Succeeded(result=msgspec.Raw(b"\xff\xfe"))))
    assert record.task.status is TaskStatus.FAILED
    assert record.error == "its outcome cannot be stored: UnicodeDecodeError"
    assert record.tokens == RESERVED_TOKENS, "what nobody knows is booked as reserved"


def test_a_settlement_that_the_store_fails_at_is_offered_until_it_is_taken() -> None:
    async def scenario(service: Service) -> TaskRecord:
        store = service.engine.store
        settle, failures = store.settle, iter(range(6))

        async def failing(settlement: Settlement) -> Settled | StaleLease:
            if next(failures, None) is not None:
                raise RuntimeError("a fault of the store's own")
            return await settle(settlement)

        store.settle = failing  # type: ignore[method-assign]
        record = await run_one(service)
        assert len(service.engine.runner) == 0, "its place is free"
        return record

    record = play(scenario, always(0.0))
    assert record.task.status is TaskStatus.FAILED
    assert record.error == "its outcome cannot be stored: RuntimeError"


@pytest.mark.parametrize("error", ["no file \udcff", "an odd \0 one", ""])
def test_an_error_in_any_characters_fails_its_task(error: str) -> None:
    record = play(run_one, always(0.0, Failed(error=error)))
    assert record.task.status is TaskStatus.FAILED


@pytest.mark.parametrize("tokens", [-1, MAX_RESERVATION_TOKENS + 1, 2**70])
def test_usage_that_nobody_can_have_had_counts_as_unknown(tokens: int) -> None:
    outcome = Succeeded(usage=Usage(tokens=tokens, micro_usd=tokens))
    record = play(run_one, always(0.0, outcome))
    assert record.task.status is TaskStatus.DONE
    assert (record.tokens, record.micro_usd) == (RESERVED_TOKENS, 0)


def test_a_pause_that_is_no_number_is_one_of_unknown_length() -> None:
    outcome = Limited(retry_after_seconds=float("nan"))
    record = play(run_one, in_turn((0.0, outcome), (0.0, DONE)))
    assert record.task.status is TaskStatus.DONE
