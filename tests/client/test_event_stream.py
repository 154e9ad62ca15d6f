"""A stream of events is read alike in whatever pieces it comes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.client.event_stream import Message, MessageReader, Reconnector, event_of, is_last
from headgate.client.responses import no_response
from headgate.core.events import EventKind
from headgate.errors import NotAllowedError, ServiceUnavailableError

STREAM = (
    b": hello\n\n"
    b'id: 7\nevent: task.running\ndata: {"id":"7","kind":"task.running",'
    b'"time":"2027-01-15T08:00:00Z","taskId":"t","state":"running","attempt":1}\n\n'
    b": beat\r\n\r\n"
    b"id: 8\ndata: one\ndata: two\n\n"
    b"data: unfinished"
)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_messages_do_not_depend_on_how_the_stream_was_cut(cuts: list[int]) -> None:
    reader = MessageReader()
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    found = [message for piece in pieces for message in reader.feed(piece)]
    assert [message.id for message in found] == ["7", "8"]
    assert found[1].data == b"one\ntwo"


def test_an_id_alone_moves_the_place_on_and_a_comment_does_not() -> None:
    reader = MessageReader()
    found = reader.feed(b": hello\n\nid: 4\n\n: beat\n\nid: 5\n\n")
    assert found == [Message("4", b""), Message("5", b"")]
    assert [event_of(message) for message in found] == [None, None]
    assert not any(is_last(message) for message in found)


def test_a_message_becomes_an_event_and_one_of_an_unknown_kind_is_passed_over() -> None:
    event = event_of(MessageReader().feed(STREAM)[0])
    assert event is not None
    assert (event.kind, event.task_id, event.attempt) == (EventKind.RUNNING, "t", 1)
    assert event_of(Message("9", b'{"id":"9","kind":"task.praised"}')) is None


def test_an_event_without_end_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.client.event_stream.MAX_MESSAGE_BYTES", 1000)
    reader = MessageReader()
    for _ in range(20):
        reader.feed(b"data: " + b"x" * 50 + b"\n")
    with pytest.raises(ServiceUnavailableError):
        reader.feed(b"data: x\n")


@pytest.mark.parametrize(("state", "last"), [("running", False), ("done", True), ("failed", True)])
def test_the_stream_of_a_task_ends_with_the_task(state: str, last: bool) -> None:
    assert is_last(Message("", f'{{"state":"{state}"}}'.encode())) is last


def test_a_broken_stream_goes_on_after_the_last_message_until_patience_is_over() -> None:
    now = [0.0]
    reconnector = Reconnector(None, 60.0, clock=lambda: now[0])
    reconnector.saw(Message("5", b"x"))
    reconnector.saw(Message("", b"x"))
    assert reconnector.last_event_id == "5"
    broken = no_response("http://s", "it broke")
    assert reconnector.failed(broken) <= reconnector.failed(broken) * 4
    now[0] = 59.0
    reconnector.failed(broken)
    reconnector.saw(Message("6", b"x"))
    now[0] = 118.0
    reconnector.failed(broken)
    now[0] = 180.0
    with pytest.raises(ServiceUnavailableError):
        reconnector.failed(broken)


def test_a_stream_that_is_not_allowed_is_not_asked_for_again() -> None:
    reconnector = Reconnector(None, 60.0, clock=lambda: 0.0)
    with pytest.raises(NotAllowedError):
        reconnector.failed(NotAllowedError("no", code="unauthorized", status=401))
