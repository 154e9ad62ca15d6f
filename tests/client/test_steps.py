"""Retries and waiting, step by step, without a network and without time."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.api.schema.tasks import SubmittedBody
from headgate.client import calls, steps
from headgate.client.calls import IDEMPOTENCY_KEY, Call
from headgate.client.replies import Reply, no_answer, not_reached
from headgate.errors import (
    HeadgateError,
    RequestRefusedError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

TAKEN = b'{"taskId":"tsk_1","state":"queued","position":1,"createdAt":"2027-01-15T08:00:00Z"}'
OUTAGE = b'{"code":"unavailable","error":"the store is away","retryable":true}'
GONE = no_answer("http://s", "it broke")
NOBODY = not_reached("http://s", "refused")

SUBMIT = calls.submit({"action": "x", "agent_id": "a"})
READ = calls.stats()
ONCE = calls.retry("tsk_1")


def refused(status: int, code: str, **headers: str) -> Reply:
    body = f'{{"code":"{code}","error":"{code}","retryable":true}}'.encode()
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def carried_out(
    call: Call[Any], outcomes: list[steps.Outcome], *, retries: int = 3
) -> tuple[list[steps.Step], Any]:
    """Return the steps that were taken, and the answer or the error at their end."""
    taken: list[steps.Step] = []
    todo = steps.attempts(call, retries=retries)
    outcome: steps.Outcome = None
    while True:
        try:
            step = todo.send(outcome)
        except StopIteration as end:
            return taken, end.value
        except HeadgateError as error:
            return taken, error
        taken.append(step)
        outcome = outcomes.pop(0) if isinstance(step, Call) else None


@pytest.mark.parametrize(
    ("call", "failure", "is_sent_again"),
    [
        (SUBMIT, GONE, True),
        (SUBMIT, NOBODY, True),
        (SUBMIT, refused(429, "queue_full"), True),
        (SUBMIT, refused(503, "unavailable"), True),
        (SUBMIT, Reply(502, {}, b"<html>"), True),
        (SUBMIT, refused(500, "internal"), False),
        (SUBMIT, refused(400, "missing_field"), False),
        (SUBMIT, refused(401, "unauthorized"), False),
        (SUBMIT, refused(422, "idempotency_mismatch"), False),
        (READ, GONE, True),
        (READ, refused(504, "slow"), True),
        (ONCE, NOBODY, True),
        (ONCE, refused(429, "limit_reached"), True),
        (ONCE, GONE, False),
        (ONCE, refused(503, "unavailable"), False),
    ],
)
def test_what_is_sent_again(call: Call[Any], failure: steps.Outcome, is_sent_again: bool) -> None:
    taken, end = carried_out(call, [failure, refused(404, "not_found")])
    sent = [step for step in taken if isinstance(step, Call)]
    assert len(sent) == (2 if is_sent_again else 1)
    assert isinstance(end, HeadgateError)


def test_a_submission_keeps_its_key_through_all_tries_and_another_has_its_own() -> None:
    taken, answer = carried_out(SUBMIT, [GONE, NOBODY, Reply(202, {}, TAKEN)])
    keys = {step.headers[IDEMPOTENCY_KEY] for step in taken if isinstance(step, Call)}
    assert len(keys) == 1
    assert isinstance(answer, SubmittedBody)
    assert calls.submit({"action": "x"}).headers[IDEMPOTENCY_KEY] not in keys


def test_after_its_tries_the_last_error_is_raised() -> None:
    taken, end = carried_out(READ, [GONE, GONE, Reply(503, {}, OUTAGE)], retries=2)
    assert isinstance(end, ServiceUnavailableError)
    assert (end.code, end.status, str(end)) == ("unavailable", 503, "the store is away")
    assert len(taken) == 5


def test_pauses_grow_and_are_never_shorter_than_the_service_asks() -> None:
    waits = [steps.pause_seconds(READ, GONE, attempt) for attempt in (1, 4, 10)]
    assert waits == sorted(w for w in waits if w is not None)
    assert all(w is not None and w <= 8.0 for w in waits)
    asked = refused(429, "limit_reached", retry_after="7")
    taken, _ = carried_out(READ, [asked, asked], retries=1)
    assert [step.seconds for step in taken if isinstance(step, steps.Pause)] == [7.0]


def test_a_pause_of_minutes_is_the_callers_to_wait() -> None:
    taken, end = carried_out(READ, [refused(429, "limit_reached", retry_after="3600")])
    assert isinstance(end, ServiceLimitError)
    assert end.retry_after_seconds == 3600
    assert len(taken) == 1


def snapshot(state: str, attempt: int = 1) -> Reply:
    body = (
        f'{{"taskId":"t","priority":0,"state":"{state}","createdAt":"2027-01-15T08:00:00Z",'
        f'"projectId":"p","weight":1.0,"onParentFailure":"fail","maxAttempts":1,'
        f'"onExhausted":"wait","attempt":{attempt}}}'
    )
    return Reply(200, {}, body.encode())


def changes(outcomes: list[steps.Outcome], *, until: float | None = None) -> list[Any]:
    """Follow a task to its end; return the steps by name, with its states."""
    clock = iter(range(1000))
    seen = None
    told: list[Any] = []
    while seen is None or not steps.has_ended(seen):
        todo = steps.next_change("t", seen, retries=0, clock=lambda: next(clock), until=until)
        outcome: steps.Outcome = None
        while True:
            try:
                step = todo.send(outcome)
            except StopIteration as end:
                seen = end.value
                told.append(seen.state.value)
                break
            told.append(type(step).__name__)
            outcome = None if isinstance(step, steps.Pause) else outcomes.pop(0)
    return told


def test_events_say_when_to_look_and_looking_says_what_is_so() -> None:
    told = changes([snapshot("queued"), True, snapshot("running"), True, snapshot("done")])
    assert told == ["Call", "queued", "Listen", "Call", "running", "Listen", "Call", "done"]


def test_without_events_looking_alone_does() -> None:
    told = changes([snapshot("running"), False, snapshot("running"), False, snapshot("failed")])
    looks = ["Listen", "Pause", "Call"]
    assert told == ["Call", "running", *looks, *looks, "failed"]


def test_events_that_promise_what_cannot_be_seen_do_not_make_it_spin() -> None:
    same: list[steps.Outcome] = [True, snapshot("assigned"), True, snapshot("assigned")]
    told = changes([snapshot("assigned"), *same, True, snapshot("done")])
    assert told.count("Pause") == 1


def test_a_further_attempt_is_a_change() -> None:
    told = changes([snapshot("running"), True, snapshot("running", 2), True, snapshot("done", 2)])
    assert told.count("running") == 2


def test_waiting_ends_in_time_and_says_that_the_task_goes_on() -> None:
    with pytest.raises(WaitTimeoutError, match="still running; it goes on") as caught:
        changes([snapshot("running"), True, snapshot("running")], until=1)
    assert isinstance(caught.value, TimeoutError)


def test_a_task_that_is_gone_is_an_error_and_not_waited_for() -> None:
    with pytest.raises(RequestRefusedError):
        changes([refused(404, "not_found")])
