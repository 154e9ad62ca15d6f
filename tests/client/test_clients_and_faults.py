"""What both clients make of answers that are late, foreign, broken or missing."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from client.both_clients import Ask, EitherClient
from client.scripted_server import response, scripted
from headgate import SyncClient
from headgate.errors import (
    InvalidSettingError,
    NotAllowedError,
    RequestRefusedError,
    ServiceLimitError,
    ServiceUnavailableError,
    WaitTimeoutError,
)
from service.support import wait_until

READY = response(200, '{"status":"ready","role":"dispatcher"}')
BUSY = response(503, '{"code":"unavailable","error":"away","retryable":true}')
TAKEN = response(
    202, '{"taskId":"tsk_1","state":"queued","position":1,"createdAt":"2027-01-15T08:00:00Z"}'
)
TASK = (
    '{"taskId":"t","priority":0,"state":"%s","createdAt":"2027-01-15T08:00:00Z","projectId":"p",'
    '"weight":1.0,"onParentFailure":"fail","maxAttempts":1,"onExhausted":"wait","attempt":1}'
)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADGATE_URL", "HEADGATE_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_reply_that_is_lost_is_asked_for_again_under_one_key(ask: Ask) -> None:
    with scripted(b"", BUSY, TAKEN) as server:
        answer = EitherClient(ask, server.url).submit(agent_id="a", action="x")
        keys = server.headers("idempotency-key")
    assert answer.task_id == "tsk_1"
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32


def test_a_token_is_sent_and_one_that_is_refused_is_said_to_be(ask: Ask) -> None:
    refusal = response(
        401, '{"code":"unauthorized","error":"who?","retryable":false}', x_request_id="r-1"
    )
    with scripted(refusal) as server:
        with pytest.raises(NotAllowedError) as caught:
            EitherClient(ask, server.url, token="secret-1").stats()
        assert server.headers("authorization") == ["Bearer secret-1"]
    assert (caught.value.code, caught.value.request_id) == ("unauthorized", "r-1")
    assert "secret-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "error", "line"),
    [
        (response(301, "", location="https://x/"), RequestRefusedError, "but at https://x/"),
        (response(200, "<html>", kind="text/html"), ServiceUnavailableError, "not one of a Headg"),
        (response(500, "<html>", kind="text/html"), ServiceUnavailableError, "answered 500"),
        (response(418, "[]"), RequestRefusedError, "answered 418"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", ServiceUnavailableError, "gave no answer"),
    ],
)
def test_what_is_no_headgate_is_told_in_one_line(
    ask: Ask, answer: bytes, error: type[Exception], line: str
) -> None:
    with scripted(answer) as server, pytest.raises(error) as caught:
        EitherClient(ask, server.url, retries=0).ready()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_service_that_takes_too_long_is_not_waited_for(ask: Ask) -> None:
    with (
        scripted(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", READY) as server,
        pytest.raises(ServiceUnavailableError, match="took too long"),
    ):
        EitherClient(ask, server.url, retries=0, timeout_seconds=0.2).ready()


def test_where_nobody_listens_the_error_says_what_to_do(ask: Ask) -> None:
    with pytest.raises(ServiceUnavailableError, match="headgate up") as caught:
        EitherClient(ask, "http://127.0.0.1:1", retries=0).ready()
    assert caught.value.code == "unreachable"


@pytest.mark.parametrize(
    "url", ["ftp://x", "127.0.0.1:7420", "http://", "http://a:b@c", "http://x:y"]
)
def test_an_address_that_is_none_is_refused(ask: Ask, url: str) -> None:
    with pytest.raises(InvalidSettingError, match="url"):
        EitherClient(ask, url).ready()


def test_a_token_with_a_line_break_never_becomes_a_header(ask: Ask) -> None:
    with pytest.raises(InvalidSettingError, match="token") as caught:
        EitherClient(ask, "http://x", token="a\r\nHost: evil").ready()
    assert "evil" not in str(caught.value)


def test_url_and_token_come_from_the_environment(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(READY) as server:
        monkeypatch.setenv("HEADGATE_URL", f"{server.url}/behind/a/proxy/")
        monkeypatch.setenv("HEADGATE_TOKEN", "from-outside")
        assert ask(None, "ready", options={}).role == "dispatcher"
        assert server.requests[0].startswith("GET /behind/a/proxy/readyz HTTP/1.1\r\n")
        assert server.headers("authorization") == ["Bearer from-outside"]


def test_a_budget_without_room_is_said_to_be_so_at_once(ask: Ask) -> None:
    details = '{"scope":"project:p","limit":"1.00","resetsAt":null,"mayClear":false}'
    refusal = f'{{"code":"budget_exceeded","error":"no","retryable":false,"details":{details}}}'
    with scripted(response(402, refusal), response(402, refusal)) as server:
        with pytest.raises(ServiceLimitError) as caught:
            EitherClient(ask, server.url).reserve("r", "project:p", usd="2.00")
        assert len(server.requests) == 1
    assert caught.value.code == "budget_exceeded"
    assert caught.value.details["mayClear"] is False


def test_an_id_cannot_lead_elsewhere(ask: Ask) -> None:
    with scripted(response(404, '{"code":"not_found","error":"no","retryable":false}')) as server:
        with pytest.raises(RequestRefusedError):
            EitherClient(ask, server.url).get("../scheduler/stats?x=#\r\n")
        assert server.requests[0].startswith("GET /tasks/..%2Fscheduler%2Fstats%3Fx%3D%23%0D%0A ")


def test_a_field_that_only_a_newer_service_has_is_passed_over(ask: Ask) -> None:
    newer = TASK.replace('"attempt":1', '"attempt":1,"mood":"fine"')
    with scripted(response(200, newer % "done")) as server:
        assert EitherClient(ask, server.url).get("t").state.value == "done"


def test_waiting_goes_on_where_events_are_refused(ask: Ask) -> None:
    none = response(404, '{"code":"not_found","error":"no","retryable":false}')
    running, done = response(200, TASK % "running"), response(200, TASK % "done")
    with scripted(running, none, running, none, done) as server:
        assert EitherClient(ask, server.url).wait("t").state.value == "done"


def test_a_connection_that_was_closed_while_idle_is_not_used_again() -> None:
    cancelled = response(200, '{"status":"cancelled","taskId":"t"}', x_then="close")
    with scripted(cancelled, cancelled, cancelled) as server, SyncClient(server.url) as client:
        for number in range(3):
            # A cancel is not sent again when its answer is lost, so a lost one would be an error.
            assert client.cancel("t").status == "cancelled"
            wait_until(lambda number=number: server.closed > number, seconds=30)  # type: ignore[misc]


def event(number: int, state: str) -> str:
    kind = {"running": "task.running", "done": "task.completed"}[state]
    return (
        f'id: {number}\ndata: {{"id":"{number}","kind":"{kind}","time":"2027-01-15T08:00:00Z",'
        f'"taskId":"t","projectId":"p","state":"{state}","attempt":1}}\n\n'
    )


def stream(*events: str) -> bytes:
    body = "".join(f"{len(one):x}\r\n{one}\r\n" for one in events)
    head = (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    return (head + body).encode()


def test_a_stream_that_breaks_goes_on_after_the_last_event(ask: Ask) -> None:
    first = stream(event(1, "running")) + b"nonsense\r\n"
    second = stream(event(2, "done")) + b"0\r\n\r\n"
    with scripted(first, BUSY, second) as server:
        events = EitherClient(ask, server.url).events("t")
        assert server.headers("last-event-id") == ["", "1", "1"]
    assert [one.id for one in events] == ["1", "2"]


def test_a_stream_that_breaks_before_its_first_event_goes_on_from_where_it_began(ask: Ask) -> None:
    place = "id: 40\n\n"
    first = stream(place) + b"nonsense\r\n"
    second = stream(event(41, "done")) + b"0\r\n\r\n"
    with scripted(first, second) as server:
        events = EitherClient(ask, server.url).events("t")
        assert server.headers("last-event-id") == ["", "40"]
    assert [one.id for one in events] == ["41"]


@pytest.mark.parametrize(
    ("answer", "error", "line"),
    [
        (
            response(404, '{"code":"not_found","error":"task not found","retryable":false}'),
            RequestRefusedError,
            "task not found",
        ),
        (
            response(401, '{"code":"unauthorized","error":"who?","retryable":false}'),
            NotAllowedError,
            "who?",
        ),
        (
            response(403, '{"code":"forbidden","error":"not this","retryable":false}'),
            NotAllowedError,
            "not this",
        ),
    ],
)
def test_a_stream_that_is_refused_is_not_asked_for_again(
    ask: Ask, answer: bytes, error: type[Exception], line: str
) -> None:
    with scripted(answer) as server:
        with pytest.raises(error) as caught:
            EitherClient(ask, server.url).events("nope")
        assert len(server.requests) == 1
    assert (type(caught.value), str(caught.value)) == (error, line)


class HeartbeatServer:
    """A service whose task never ends, and whose events are nothing but signs of life."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := connection.recv(65536):
                if b"/events" not in request.partition(b"\r\n")[0]:
                    connection.sendall(response(200, TASK % "running"))
                    continue
                head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
                while not self._is_over.wait(0.02):
                    connection.sendall(b"3\r\n:\n\n\r\n")


def test_signs_of_life_do_not_keep_a_wait_from_ending_in_time(ask: Ask) -> None:
    server = HeartbeatServer()
    with closing(server):
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="still running"):
            EitherClient(ask, server.url).wait("t", timeout_seconds=0.5)
        assert 0.5 <= time.monotonic() - began < 30.0
