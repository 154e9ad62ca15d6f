"""What waits for a process that writes: who is in its next transaction, and with how much."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headgate.storage.transaction import Transaction
from headgate.storage.writer import (
    ALONE_SECONDS,
    GREEDY_SECONDS,
    MAX_BATCH,
    MAX_BYTES_OF_CALLER,
    MAX_GREEDY_JOBS,
    MAX_JOBS_OF_CALLER,
    MIN_GREEDY_JOBS,
    WRITER_PAUSES,
    Askers,
    Awaited,
    JobQueue,
    asker,
)

SHORT_SECONDS = GREEDY_SECONDS / 4
"""How long a transaction takes where the greedy have as many jobs in the next as there may be."""


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A queue, the callers that it knows of, and a clock."""

    def __init__(self) -> None:
        self.clock = Time()
        self.callers = Askers(self.clock)
        self.queue = JobQueue(self.callers, clock=self.clock)
        self.packed = b"job"

    def ask(self, who: str, jobs: int = 1, *, goes_first: bool = False) -> None:
        """Have a caller ask for so many things."""
        asker.set(who)
        if who:
            self.callers.note(who)
        for _ in range(jobs):
            self.queue.put(Awaited(_work), goes_first=goes_first)

    def frame(self) -> list[Awaited]:
        """Return the jobs of the next frame."""
        return [job for job, _ in self.queue.take(lambda _: self.packed)]

    def whose(self) -> dict[str, int]:
        """Return how many jobs each caller has in the next frame."""
        found: dict[str, int] = {}
        for job in self.frame():
            found[job.who] = found.get(job.who, 0) + 1
        return found


def _work(_: Transaction) -> None:
    """Stand for an operation."""


@pytest.fixture(autouse=True)
def forget_asker() -> Iterator[None]:
    """Ask for nobody after a test."""
    yield
    asker.set("")


async def test_the_write_of_another_is_in_the_next_transaction_beside_a_flood() -> None:
    stage = Stage()
    stage.ask("greedy", 10_000)
    stage.ask("modest")
    stage.ask("")
    assert stage.whose() == {"greedy": MAX_JOBS_OF_CALLER, "modest": 1, "": 1}


async def test_beside_others_a_caller_is_in_one_transaction_of_three() -> None:
    stage = Stage()
    stage.ask("modest")
    stage.ask("greedy", 1_000)
    first = stage.frame()
    # The next of a caller waits for the answer to its last one, and then for a while.
    assert stage.frame() == []
    assert stage.queue.seconds_left() is None
    stage.queue.answered(first, SHORT_SECONDS)
    assert stage.frame() == []
    assert stage.queue.seconds_left() == pytest.approx(WRITER_PAUSES * SHORT_SECONDS)
    stage.ask("")
    assert stage.whose() == {"": 1}
    stage.clock.now += WRITER_PAUSES * SHORT_SECONDS
    assert stage.whose() == {"greedy": MAX_JOBS_OF_CALLER}


async def test_greedy_callers_are_together_in_one_transaction_of_three() -> None:
    stage = Stage()
    for who in ("greedy 1", "greedy 2", "greedy 3"):
        stage.ask(who, 1_000)
    stage.ask("modest")
    first = stage.frame()
    stage.queue.answered(first, SHORT_SECONDS)
    pause_seconds = WRITER_PAUSES * SHORT_SECONDS
    assert stage.queue.seconds_left() == pytest.approx(pause_seconds)
    # Whoever had less than others goes on at once.
    stage.ask("modest")
    assert stage.whose() == {"modest": 1}
    stage.clock.now += pause_seconds / 2
    assert stage.frame() == []
    stage.clock.now += pause_seconds / 2
    assert sum(stage.whose().values()) == MAX_GREEDY_JOBS
    # The third of them, which was not among these, waits for their answer as they do.
    assert stage.frame() == []
    assert stage.queue.seconds_left() is None


@pytest.mark.parametrize(
    ("seconds", "jobs"),
    [
        (GREEDY_SECONDS / 1_000, MAX_GREEDY_JOBS),
        (GREEDY_SECONDS / MAX_GREEDY_JOBS, MAX_GREEDY_JOBS),
        (GREEDY_SECONDS / 32, 32),
        (GREEDY_SECONDS / MIN_GREEDY_JOBS, MIN_GREEDY_JOBS),
        (2 * GREEDY_SECONDS / MIN_GREEDY_JOBS, MIN_GREEDY_JOBS),
    ],
)
async def test_the_greedy_have_as_many_jobs_as_keep_a_transaction_short(
    seconds: float, jobs: int
) -> None:
    stage = Stage()
    for who in ("greedy 1", "greedy 2", "greedy 3"):
        stage.ask(who, 1_000)
    stage.ask("modest")
    first = stage.frame()
    stage.queue.answered(first, seconds * len(first))
    stage.clock.now += WRITER_PAUSES * seconds * len(first)
    assert sum(stage.whose().values()) == jobs


async def test_the_greedy_take_turns() -> None:
    stage = Stage()
    names = [f"greedy {number}" for number in range(5)]
    had = dict.fromkeys(names, 0)
    for _ in range(10):
        for who in names:
            stage.ask(who, MAX_JOBS_OF_CALLER)
        frame = stage.frame()
        for job in frame:
            had[job.who] += 1
        stage.queue.answered(frame, 0.01)
        stage.clock.now += WRITER_PAUSES * 0.01
    assert max(had.values()) <= min(had.values()) + 2 * MAX_JOBS_OF_CALLER


async def test_what_a_caller_had_is_forgotten() -> None:
    stage = Stage()
    stage.ask("greedy", 10)
    stage.ask("modest")
    stage.queue.answered(stage.frame(), 0.01)
    stage.clock.now += 10.0
    stage.ask("modest", 2)
    stage.queue.answered(stage.frame(), 0.01)
    stage.ask("greedy")
    assert stage.whose() == {"greedy": 1}


async def test_a_caller_that_is_alone_fills_transaction_after_transaction() -> None:
    stage = Stage()
    stage.ask("modest")
    stage.frame()
    stage.clock.now += ALONE_SECONDS
    stage.ask("greedy", 2 * MAX_BATCH)
    assert [stage.whose(), stage.whose()] == [{"greedy": MAX_BATCH}] * 2


async def test_large_writes_of_a_caller_are_few_in_a_transaction() -> None:
    stage = Stage()
    stage.packed = bytes(MAX_BYTES_OF_CALLER // 2)
    stage.ask("modest")
    stage.ask("greedy", 10)
    assert stage.whose() == {"modest": 1, "greedy": 2}


async def test_signs_of_life_go_first_of_all_or_of_those_of_their_caller() -> None:
    stage = Stage()
    stage.ask("modest", 2)
    stage.ask("")
    stage.ask("modest", goes_first=True)
    stage.ask("", goes_first=True)
    waiting = list(stage.queue)
    frame = stage.frame()
    assert frame[0].who == ""
    modest = [job for job in frame if job.who == "modest"]
    assert modest[0] is next(job for job in waiting if job.who == "modest")
    assert len(frame) == 5


async def test_what_is_cancelled_or_cannot_be_packed_is_not_sent() -> None:
    stage = Stage()
    stage.ask("modest", 3)
    first, second, third = stage.queue
    first.future.cancel()
    frame = stage.queue.take(lambda job: None if job is second else b"job")
    assert [job for job, _ in frame] == [third]
    assert len(stage.queue) == 0


async def test_at_the_end_nobody_is_kept_waiting() -> None:
    stage = Stage()
    stage.ask("modest")
    stage.ask("greedy", 2 * MAX_JOBS_OF_CALLER)
    stage.frame()
    stage.queue.is_closing = True
    assert stage.whose() == {"greedy": MAX_JOBS_OF_CALLER}
