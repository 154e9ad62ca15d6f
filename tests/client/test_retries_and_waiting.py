"""What is sent again, and how a client waits: without a network and without time.

`SyncClient` is driven here; the asynchronous client is the file that it is generated from.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import SyncClient
from headgate.api.schema.tasks import SubmittedBody
from headgate.client import sync_client
from headgate.client.event_stream import Message
from headgate.client.requests import IDEMPOTENCY_KEY, Call, new_call
from headgate.client.responses import Response, no_response, not_reached, pause_seconds
from headgate.core.task_view import TaskSnapshot
from headgate.errors import (
    HeadgateError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)

TAKEN = b'{"taskId":"tsk_1","state":"queued","position":1,"createdAt":"2027-01-15T08:00:00Z"}'
OUTAGE = b'{"code":"unavailable","error":"the store is away","retryable":true}'
GONE = no_response("http://s", "it broke")
NOBODY = not_reached("http://s", "refused")

Outcome = Response | ServiceError | bool


class ScriptedTransport:
    """A transport and a clock in one: outcomes come in their order, and time passes when asked."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self._outcomes = outcomes
        self._now = -1
        self.taken: list[str] = []
        self.sent: list[Call[Any]] = []
        self.pauses: list[float] = []

    def send(self, call: Call[Any]) -> Response:
        self.taken.append("send")
        self.sent.append(call)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, ServiceError):
            raise outcome
        assert isinstance(outcome, Response)
        return outcome

    def listen(
        self,
        call: Call[Any],  # noqa: ARG002
        is_news: Callable[[Message], bool],  # noqa: ARG002
        *,
        seconds: float,  # noqa: ARG002
    ) -> bool:
        self.taken.append("listen")
        outcome = self._outcomes.pop(0)
        assert isinstance(outcome, bool)
        return outcome

    def sleep(self, seconds: float) -> None:
        self.taken.append("pause")
        self.pauses.append(seconds)

    def monotonic(self) -> float:
        self._now += 1
        return self._now


Script = Callable[..., tuple[SyncClient, ScriptedTransport]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that makes a client whose transport gives these outcomes."""

    def scripted(*outcomes: Outcome, retries: int = 3) -> tuple[SyncClient, ScriptedTransport]:
        transport = ScriptedTransport(list(outcomes))
        clock = SimpleNamespace(sleep=transport.sleep, monotonic=transport.monotonic)
        monkeypatch.setattr(sync_client, "time", clock)
        monkeypatch.setattr(sync_client, "SyncTransport", lambda *_, **__: transport)
        return SyncClient("http://s", retries=retries), transport

    return scripted


def submit(client: SyncClient) -> SubmittedBody:
    return client.submit(action="x", agent_id="a")


def read(client: SyncClient) -> object:
    return client.stats()


def change_once(client: SyncClient) -> object:
    return client.retry("tsk_1")


def refused(status: int, code: str, **headers: str) -> Response:
    body = f'{{"code":"{code}","error":"{code}","retryable":true}}'.encode()
    return Response(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, body
    )


@pytest.mark.parametrize(
    ("verb", "failure", "is_sent_again"),
    [
        (submit, GONE, True),
        (submit, NOBODY, True),
        (submit, refused(429, "queue_full"), True),
        (submit, refused(503, "unavailable"), True),
        (submit, Response(502, {}, b"<html>"), True),
        (submit, refused(500, "internal"), False),
        (submit, refused(400, "missing_field"), False),
        (submit, refused(401, "unauthorized"), False),
        (submit, refused(422, "idempotency_mismatch"), False),
        (read, GONE, True),
        (read, refused(504, "slow"), True),
        (change_once, NOBODY, True),
        (change_once, refused(429, "limit_reached"), True),
        (change_once, GONE, False),
        (change_once, refused(503, "unavailable"), False),
    ],
)
def test_what_is_sent_again(
    script: Script, verb: Callable[[SyncClient], object], failure: Outcome, is_sent_again: bool
) -> None:
    client, transport = script(failure, refused(404, "not_found"))
    with pytest.raises(HeadgateError):
        verb(client)
    assert len(transport.sent) == (2 if is_sent_again else 1)


def test_a_submission_keeps_its_key_through_all_tries_and_another_has_its_own(
    script: Script,
) -> None:
    taken = Response(202, {}, TAKEN)
    client, transport = script(GONE, NOBODY, taken, taken)
    assert submit(client).task_id == "tsk_1"
    keys = {call.headers[IDEMPOTENCY_KEY] for call in transport.sent}
    assert len(keys) == 1
    submit(client)
    assert transport.sent[-1].headers[IDEMPOTENCY_KEY] not in keys


def test_after_its_tries_the_last_error_is_raised(script: Script) -> None:
    client, transport = script(GONE, GONE, Response(503, {}, OUTAGE), retries=2)
    with pytest.raises(ServiceUnavailableError) as caught:
        read(client)
    error = caught.value
    assert (error.code, error.status, str(error)) == ("unavailable", 503, "the store is away")
    assert transport.taken == ["send", "pause", "send", "pause", "send"]


def test_pauses_grow_and_are_never_shorter_than_the_service_asks(script: Script) -> None:
    call = new_call("GET", "/scheduler/stats", response_type=bytes)
    waits = [pause_seconds(call, GONE, attempt) for attempt in (1, 4, 10)]
    assert waits == sorted(w for w in waits if w is not None)
    assert all(w is not None and w <= 8.0 for w in waits)
    asked = refused(429, "limit_reached", retry_after="7")
    client, transport = script(asked, asked, retries=1)
    with pytest.raises(ServiceLimitError):
        read(client)
    assert transport.pauses == [7.0]


def test_a_pause_of_minutes_is_the_callers_to_wait(script: Script) -> None:
    client, transport = script(refused(429, "limit_reached", retry_after="3600"))
    with pytest.raises(ServiceLimitError) as caught:
        read(client)
    assert caught.value.retry_after_seconds == 3600
    assert len(transport.taken) == 1


def snapshot(state: str, attempt: int = 1) -> Response:
    body = (
        f'{{"taskId":"t","priority":0,"state":"{state}","createdAt":"2027-01-15T08:00:00Z",'
        f'"projectId":"p","weight":1.0,"onParentFailure":"fail","maxAttempts":1,'
        f'"onExhausted":"wait","attempt":{attempt}}}'
    )
    return Response(200, {}, body.encode())


def progress(client: SyncClient, transport: ScriptedTransport, **given: float) -> list[str]:
    """Follow a task to its end; return what the transport did, with the states between."""

    def note(task: TaskSnapshot) -> None:
        transport.taken.append(task.state.value)

    for task in client.progress("t", **given):
        note(task)
    return transport.taken


def test_events_say_when_to_read_and_only_what_is_read_counts(script: Script) -> None:
    done = progress(
        *script(snapshot("queued"), True, snapshot("running"), True, snapshot("done"), retries=0)
    )
    assert done == ["send", "queued", "listen", "send", "running", "listen", "send", "done"]


def test_without_events_reading_alone_does(script: Script) -> None:
    outcomes = [snapshot("running"), False, snapshot("running"), False, snapshot("failed")]
    polls = ["listen", "pause", "send"]
    assert progress(*script(*outcomes)) == ["send", "running", *polls, *polls, "failed"]


def test_events_that_promise_what_cannot_be_seen_do_not_make_it_spin(script: Script) -> None:
    same = [True, snapshot("assigned"), True, snapshot("assigned")]
    done = progress(*script(snapshot("assigned"), *same, True, snapshot("done")))
    assert done.count("pause") == 1


def test_a_further_attempt_is_a_change(script: Script) -> None:
    outcomes = [snapshot("running"), True, snapshot("running", 2), True, snapshot("done", 2)]
    assert progress(*script(*outcomes)).count("running") == 2


def test_waiting_ends_in_time_and_says_that_the_task_goes_on(script: Script) -> None:
    client, transport = script(snapshot("running"), True, snapshot("running"))
    with pytest.raises(WaitTimeoutError, match="still running; it goes on") as caught:
        progress(client, transport, timeout_seconds=2)
    assert isinstance(caught.value, TimeoutError)


def test_a_service_that_is_gone_for_a_while_is_waited_for(script: Script) -> None:
    away = [False, *[NOBODY] * 12, *[refused(503, "unavailable")] * 4, *[GONE] * 3]
    client, transport = script(snapshot("running"), *away, snapshot("done"), retries=1)
    assert client.wait("t", timeout_seconds=1_000).state.value == "done"
    assert transport.taken.count("pause") >= 19


def test_a_service_that_stays_away_is_said_when_the_time_is_up(script: Script) -> None:
    client, transport = script(snapshot("running"), False, *[NOBODY] * 100, retries=0)
    with pytest.raises(WaitTimeoutError, match="was running when it was last seen; no service"):
        client.wait("t", timeout_seconds=30)
    assert transport.taken.count("send") < 40


def test_without_a_time_a_service_that_stays_away_is_an_error_in_the_end(script: Script) -> None:
    client, transport = script(snapshot("running"), False, *[NOBODY] * 1_000, retries=0)
    with pytest.raises(ServiceUnavailableError, match=r"no service answers.* url= .*server= "):
        client.wait("t")
    assert transport.taken.count("send") > 100


def test_a_service_that_never_answered_is_not_waited_for(script: Script) -> None:
    client, transport = script(*[NOBODY] * 10, retries=1)
    with pytest.raises(ServiceUnavailableError):
        client.wait("t", timeout_seconds=1_000)
    assert transport.taken.count("send") == 2


def test_a_task_that_is_gone_is_an_error_and_not_waited_for(script: Script) -> None:
    client, _ = script(refused(404, "not_found"))
    with pytest.raises(RequestRefusedError):
        client.wait("t")
