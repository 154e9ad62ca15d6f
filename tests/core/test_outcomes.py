"""What an outcome comes to: the next step of its task, and what is booked for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.lifecycle import (
    CANCELLED,
    MAX_PAUSE_SECONDS,
    NOTHING_USED,
    Cancelled,
    Failed,
    Finish,
    Limited,
    Lost,
    Outcome,
    Succeeded,
    TryAgain,
    Usage,
    behind,
    closure_after,
    cost_of,
    known_usage,
    next_step,
    pause_seconds,
    timed_out,
)
from headgate.core.task import (
    MAX_LOSSES,
    NO_PROGRESS,
    WORKER_PREFIX,
    Progress,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)

NOW = 1_000.0
ONCE = Terms()
THRICE = Terms(max_attempts=3)
BROKEN = Failed(error="broken", is_transient=True)
DONE = Finish(status=TaskStatus.DONE)
FAILED = Finish(status=TaskStatus.FAILED, error="broken")


def step(
    outcome: Outcome, terms: Terms = ONCE, progress: Progress = NO_PROGRESS
) -> Finish | TryAgain:
    return next_step(outcome, progress, terms, now=NOW, draw=0.0)


@pytest.mark.parametrize(
    ("outcome", "terms", "progress", "expected"),
    [
        (Succeeded(), ONCE, NO_PROGRESS, DONE),
        (Cancelled(), THRICE, NO_PROGRESS, Finish(status=TaskStatus.CANCELLED, error=CANCELLED)),
        # a failure that will not go away ends the task, whatever attempts are left
        (Failed(error="broken"), THRICE, NO_PROGRESS, FAILED),
        # a transient one costs an attempt, and the last one ends it
        (BROKEN, ONCE, NO_PROGRESS, FAILED),
        (BROKEN, THRICE, NO_PROGRESS, TryAgain(not_before=1_001, failures=1, error="broken")),
        (
            BROKEN,
            THRICE,
            Progress(failures=1),
            TryAgain(not_before=1_002, failures=2, error="broken"),
        ),
        (BROKEN, THRICE, Progress(failures=2), FAILED),
        # neither losses nor rate limits cost an attempt
        (
            BROKEN,
            THRICE,
            Progress(attempt=9, losses=4, rate_limit_hits=3),
            TryAgain(not_before=1_001, failures=1, losses=4, rate_limit_hits=3, error="broken"),
        ),
        (
            Limited(retry_after_seconds=7),
            ONCE,
            Progress(failures=0),
            TryAgain(not_before=1_007, rate_limit_hits=1, error="rate limited"),
        ),
        (
            Limited(),
            ONCE,
            Progress(rate_limit_hits=1),
            TryAgain(not_before=1_120, rate_limit_hits=2, error="rate limited"),
        ),
        (Lost(has_started=False), ONCE, Progress(losses=4), TryAgain(not_before=None, losses=4)),
        (
            Lost(has_started=True),
            ONCE,
            NO_PROGRESS,
            TryAgain(not_before=None, losses=1, error="its node was lost"),
        ),
    ],
)
def test_what_a_task_does_next(
    outcome: Outcome, terms: Terms, progress: Progress, expected: Finish | TryAgain
) -> None:
    assert step(outcome, terms, progress) == expected


def test_a_task_that_loses_its_node_too_often_is_taken_to_be_the_cause() -> None:
    last = step(Lost(has_started=True), THRICE, Progress(losses=MAX_LOSSES - 1))
    assert isinstance(last, Finish)
    assert last.status is TaskStatus.FAILED
    assert f"{MAX_LOSSES} times" in (last.error or "")


@pytest.mark.parametrize(
    ("asked", "hits", "expected"),
    [
        (None, 1, 60.0),
        (None, 2, 120.0),
        (None, 9, 300.0),
        (0.0, 1, 1.0),
        (0.0, 4, 8.0),
        (-5.0, 99, 300.0),
        (1.5, 99, 1.5),
        (12.5, 9, 12.5),
        (10**9, 1, MAX_PAUSE_SECONDS),
    ],
)
def test_a_provider_is_left_alone_as_long_as_it_says(
    asked: float | None, hits: int, expected: float
) -> None:
    assert pause_seconds(Limited(retry_after_seconds=asked), hits) == expected


@pytest.mark.parametrize(
    ("outcome", "tokens", "micro_usd"),
    [
        (Succeeded(), 100, 50),
        (Succeeded(usage=Usage(tokens=7)), 7, 50),
        (Succeeded(usage=Usage(tokens=0, micro_usd=0)), 0, 0),
        (Succeeded(usage=Usage(tokens=900, micro_usd=600)), 900, 600),
        (Failed(error="x"), 100, 50),
        (Failed(error="x", usage=NOTHING_USED), 0, 0),
        (Cancelled(), 100, 50),
        (Cancelled(usage=Usage(micro_usd=3)), 100, 3),
        (Limited(), 0, 0),
        (Lost(has_started=True), 100, 50),
        (Lost(has_started=False), 0, 0),
    ],
)
def test_what_the_provider_may_have_charged_is_booked(
    outcome: Outcome, tokens: int, micro_usd: int
) -> None:
    cost = cost_of(outcome, reserved_tokens=100, reserved_micro_usd=50)
    assert cost == Usage(tokens=tokens, micro_usd=micro_usd)


@pytest.mark.parametrize(
    ("outcome", "known"),
    [
        (Succeeded(), Usage()),
        (Succeeded(usage=Usage(tokens=7)), Usage(tokens=7)),
        (Succeeded(usage=Usage(tokens=-1, micro_usd=3)), Usage(micro_usd=3)),
        (Failed(error="x", usage=NOTHING_USED), NOTHING_USED),
        (timed_out(30.0), Usage()),
        (Cancelled(usage=Usage(micro_usd=3)), Usage(micro_usd=3)),
        (Limited(), NOTHING_USED),
        (Lost(has_started=True), Usage()),
        (Lost(has_started=False), NOTHING_USED),
    ],
)
def test_a_figure_that_nobody_gave_stays_unknown_until_it_is_booked(
    outcome: Outcome, known: Usage
) -> None:
    assert known_usage(outcome) == known


@pytest.mark.parametrize(
    ("seconds", "error"),
    [(30.0, "timed out after 30 s"), (0.25, "timed out after 0.25 s"), (604_800.0, "604800 s")],
)
def test_an_attempt_that_timed_out_may_be_tried_again(seconds: float, error: str) -> None:
    outcome = timed_out(seconds)
    assert outcome.error.endswith(error)
    found = next_step(outcome, NO_PROGRESS, Terms(max_attempts=2), now=NOW, draw=0.0)
    assert isinstance(found, TryAgain)


OUTCOMES = st.one_of(
    st.just(BROKEN),
    st.just(Limited(retry_after_seconds=1)),
    st.just(Lost(has_started=True)),
    st.just(Lost(has_started=False)),
)


@settings(deadline=None)
@given(st.lists(OUTCOMES, max_size=60), st.integers(1, 5), st.floats(0, 0.999))
def test_attempts_and_losses_are_capped_and_waits_never_lie_in_the_past(
    outcomes: list[Outcome], max_attempts: int, draw: float
) -> None:
    terms, progress = Terms(max_attempts=max_attempts), NO_PROGRESS
    failures = losses = 0
    for outcome in outcomes:
        failures += isinstance(outcome, Failed)
        losses += isinstance(outcome, Lost) and outcome.has_started
        found = next_step(outcome, progress, terms, now=NOW, draw=draw)
        is_last = failures >= max_attempts or losses >= MAX_LOSSES
        assert isinstance(found, Finish) == is_last
        if isinstance(found, Finish):
            return
        assert found.not_before is None or found.not_before >= NOW
        progress = Progress(
            failures=found.failures, losses=found.losses, rate_limit_hits=found.rate_limit_hits
        )


NODE, WORKER = "node-1", f"{WORKER_PREFIX}{'0' * 32}"
HOUR, DAY = 3_600.0, 86_400.0


@pytest.mark.parametrize(
    ("node_id", "asked", "slot", "resets_in", "closed", "cause", "seconds"),
    [
        # A worker: its agent, whatever slot its task has.
        (WORKER, 60.0, None, None, ("agent", "coder"), "worker", 60.0),
        (WORKER, DAY, None, None, ("agent", "coder"), "worker", DAY),
        (WORKER, 9 * DAY, None, None, ("agent", "coder"), "worker", DAY),
        (WORKER, DAY, "work", 600.0, ("agent", "coder"), "worker", DAY),
        # A target that says so: itself, and an hour at most.
        (NODE, 60.0, None, None, ("target", "t"), "target", 60.0),
        (NODE, DAY, None, 600.0, ("target", "t"), "target", HOUR),
        # The provider of a slot: until the window resets, or an hour.
        (NODE, 60.0, "work", 600.0, ("slot", "work"), "provider", 60.0),
        (NODE, DAY, "work", 600.0, ("slot", "work"), "provider", 600.0),
        (NODE, DAY, "work", 5 * HOUR, ("slot", "work"), "provider", 5 * HOUR),
        (NODE, 2 * HOUR, "work", 9 * DAY, ("slot", "work"), "provider", 2 * HOUR),
        (NODE, DAY, "work", None, ("slot", "work"), "provider", HOUR),
        (NODE, DAY, "work", -5.0, ("slot", "work"), "provider", HOUR),
    ],
)
def test_who_asks_for_a_pause_says_what_closes_and_for_how_long_at_most(
    node_id: str,
    asked: float,
    slot: str | None,
    resets_in: float | None,
    closed: tuple[str, str],
    cause: str,
    seconds: float,
) -> None:
    record = TaskRecord(
        task=Task(id="tsk_1", project_id="p", agent_id="coder", target="t", slot="work"),
        agent_id="coder",
        progress=Progress(attempt=1, node_id=node_id),
    )
    closure = closure_after(
        Limited(retry_after_seconds=asked, error="slow down", slot=slot),
        record,
        now=1_000.0,
        slot_resets_at=None if resets_in is None else 1_000.0 + resets_in,
    )
    assert closure is not None
    assert (closure.part, closure.cause, closure.task_id) == (closed, cause, "tsk_1")
    assert (closure.since, closure.until) == (1_000.0, 1_000.0 + seconds)
    assert closure.by == (WORKER if node_id == WORKER else "t")
    again = TryAgain(not_before=closure.until, rate_limit_hits=1)
    assert behind(closure, again, record.task) == TryAgain(not_before=None, rate_limit_hits=1)


def test_a_task_that_names_no_agent_waits_for_itself_where_a_worker_paused_one() -> None:
    task = Task(id="tsk_1", project_id="p", target="pull")
    record = TaskRecord(task=task, agent_id="coder", progress=Progress(attempt=1, node_id=WORKER))
    closure = closure_after(Limited(retry_after_seconds=60.0), record, now=0.0)
    assert closure is not None
    again = behind(closure, TryAgain(not_before=5.0), task)
    assert again == TryAgain(not_before=60.0), "or its worker would get it again at once"
    assert behind(closure, Finish(status=TaskStatus.FAILED), task) == Finish(
        status=TaskStatus.FAILED
    )


def test_no_other_outcome_closes_anything() -> None:
    record = TaskRecord(task=Task(id="tsk_1", project_id="p", target="t", slot="work"))
    for outcome in (Succeeded(), Failed(error="no"), Cancelled(), Lost(has_started=True)):
        assert closure_after(outcome, record, now=0.0) is None
