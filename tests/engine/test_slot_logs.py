"""The log of slots: what is written, what is kept, what is taken out, and what never stops."""

from __future__ import annotations

import os
import threading
from datetime import date
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headgate.core.slots.status import LogLine
from headgate.engine.slots.slot_log import (
    MAX_BODY_CHARS,
    SlotLog,
    SlotTrail,
    latest_lines,
    log_files,
    read_log,
)
from headgate.providers.provider import RequestFailed, RequestSent, ResponseReceived
from headgate.redaction import REDACTED, hidden_address, redacted

MIDNIGHT = 1_767_225_600.0
DAY = 86_400.0
KEY = "zk-4f1d/é 9%secret"


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = MIDNIGHT + 1.5

    def __call__(self) -> float:
        return self.now


def say_everything(trail: SlotTrail, body: str = "hi") -> None:
    url = "https://api.test/quota?key=abc&model=glm"
    trail.sent(RequestSent(flow_id="f1", action="wake", method="POST", url=url, body=body))
    trail.received(
        ResponseReceived(
            flow_id="f1",
            action="wake",
            method="POST",
            url=url,
            status=200,
            duration_ms=3,
            body=body,
        )
    )
    trail.failed(
        RequestFailed(flow_id="f2", action="poll", method="GET", url=url, error=body, duration_ms=9)
    )
    trail.event("quota-poller.wake-confirmed", "f1", next_reset="soon", said=body)


def test_all_four_phases_are_written_with_their_fields(tmp_path: Path) -> None:
    log = SlotLog(tmp_path / "logs", clock=Clock())
    say_everything(log.trail("work"))
    log.close()
    text = (tmp_path / "logs/slots-2026-01-01.jsonl").read_text()
    lines = [msgspec.json.decode(line) for line in text.splitlines()]
    assert [line["phase"] for line in lines] == ["request", "response", "error", "event"]
    assert lines[1] == {
        "ts": "2026-01-01T00:00:01.500Z",
        "slot": "work",
        "action": "wake",
        "phase": "response",
        "method": "POST",
        "url": f"https://api.test/quota?key={REDACTED}&model=glm",
        "flow_id": "f1",
        "status": 200,
        "response_body": "hi",
        "duration_ms": 3.0,
    }
    assert lines[3]["details"] == {"next_reset": "soon", "said": "hi"}


def test_the_files_are_for_nobody_else(tmp_path: Path) -> None:
    log = SlotLog(tmp_path / "logs", clock=Clock())
    log.trail("work").event("started")
    log.close()
    assert (tmp_path / "logs").stat().st_mode & 0o077 == 0
    assert log_files(tmp_path / "logs")[0].stat().st_mode & 0o077 == 0


def test_the_key_of_a_slot_is_taken_out_wherever_it_turns_up(tmp_path: Path) -> None:
    log = SlotLog(tmp_path, clock=Clock())
    echoed = f"you sent {KEY} and {msgspec.json.encode({'k': KEY}).decode()} Bearer abc.def"
    say_everything(log.trail("work").hiding(KEY), echoed)
    log.close()
    text = (tmp_path / "slots-2026-01-01.jsonl").read_text()
    assert "secret" not in text
    assert "abc" not in text


SECRETS = [
    ("Authorization: Bearer abc.def-1", "abc.def"),
    ('{"api_key": "abc-1"}', "abc-1"),
    ("https://p.test/q?token=abc1&x=2", "abc1"),
    ("https://ada:abc1@p.test/", "abc1"),
    ("key sk-proj-abcdefgh12345678 is wrong", "sk-proj-abcdefgh12345678"),
    ('{"message": "{\\"password\\": \\"abc1\\"}"}', "abc1"),
    ("access_key=abc1", "abc1"),
    ('{"accessKey": "abc1"}', "abc1"),
    ('{"secretKey":"abc1"}', "abc1"),
    ("private_key: abc1", "abc1"),
    ("session_token=abc1", "abc1"),
    ("subscription-key=abc1", "abc1"),
    ("dbPassword=abc1", "abc1"),
    ("AIzaSyA-1234567890abcdefghijklmnopqrstu", "AIzaSy"),
    ("gsk_1234567890abcdef", "gsk_1234"),
    ('{"token": ["abc1", "abc2"], "x": 1}', "abc"),
    ('{"tokens": 3, "secret": {"a": ["abc1"]}}', "abc"),
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_what_looks_like_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret not in redacted(text)


@pytest.mark.parametrize(
    "text",
    ['{"type": "TOKENS_LIMIT", "percentage": 7}', '{"max_tokens": 1}', "a monkey: tokens 3", ""],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "document",
    [
        {"token": ["abc1", "abc2"], "x": 1},
        {"token": {"a": "abc1"}, "x": 1},
        {"api_key": "abc1", "x": 1},
        {"key": None, "x": 1},
    ],
)
def test_json_without_its_secrets_is_json_still(document: dict[str, object]) -> None:
    assert msgspec.json.decode(redacted(msgspec.json.encode(document).decode()))["x"] == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://h/q?k=S1&subscription-key=S2&code=S3", "https://h/q?k=***&subscription-key=***&code=***"),
        ("https://a:S1@h/q?S2", "https://***@h/q?***"),
        ("https://h/q?page=2#S1=3", "https://h/q?page=***"),
        ("https://h/q?key={key}&x=", "https://h/q?key={key}&x="),
        ("https://h/q", "https://h/q"),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_what_its_query_says(url: str, shown: str) -> None:
    assert hidden_address(url) == shown


@given(st.text(min_size=6, max_size=40), st.text(max_size=60), st.text(max_size=60))
@settings(deadline=None)
def test_a_known_key_never_stays(key: str, before: str, after: str) -> None:
    if key not in REDACTED:
        assert key not in redacted(before + key + after, (key,)).replace(REDACTED, "\0")


def test_bodies_are_cut_off(tmp_path: Path) -> None:
    log = SlotLog(tmp_path, clock=Clock())
    say_everything(log.trail("work"), "x" * 1_000_000)
    log.close()
    (line,) = [line for line in read_log(tmp_path) if line.phase == "response"]
    assert line.response_body is not None
    assert len(line.response_body) == MAX_BODY_CHARS + 1


def test_there_is_one_file_a_day_and_old_ones_go(tmp_path: Path) -> None:
    clock = Clock()
    log = SlotLog(tmp_path, clock=clock, max_log_days=3)
    (tmp_path / "slots-notes.jsonl").write_text("kept\n")
    for _ in range(6):
        log.trail("work").event("tick")
        clock.now += DAY
    log.close()
    assert [path.stem for path in log_files(tmp_path)] == [
        "slots-2026-01-04",
        "slots-2026-01-05",
        "slots-2026-01-06",
    ]
    assert (tmp_path / "slots-notes.jsonl").exists()


def test_lines_are_read_by_slot_day_and_number(tmp_path: Path) -> None:
    clock = Clock()
    log = SlotLog(tmp_path, clock=clock)
    for day in range(3):
        for number in range(4):
            log.trail("ab"[number % 2]).event(f"{day}-{number}")
        clock.now += DAY
    log.close()
    with (tmp_path / "slots-2026-01-03.jsonl").open("ab") as file:
        file.write(b'{"ts": "cut o')

    def actions(**which: object) -> list[str]:
        lines: list[LogLine] = read_log(tmp_path, **which)  # type: ignore[arg-type]
        return [line.action for line in lines]

    assert actions(tail=3) == ["2-1", "2-2", "2-3"]
    assert actions(tail=3, slot="a") == ["1-2", "2-0", "2-2"]
    assert actions(day=date(2026, 1, 1)) == ["0-0", "0-1", "0-2", "0-3"]
    assert actions(tail=0) == []
    assert actions(day=date(2025, 1, 1)) == []
    assert read_log(tmp_path / "nothing") == []


def test_a_disk_that_takes_nothing_is_told_once_and_stops_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.write_text("not a folder")
    log = SlotLog(folder, clock=Clock())
    with capture_logs() as told:
        for _ in range(20):
            log.trail("work").event("tick")
            log.close()
        folder.unlink()
        log.trail("work").event("tock")
        log.close()
    assert [line["event"] for line in told] == [
        "the slot log cannot be written; slots go on without it",
        "the slot log is written again",
        "lines of the slot log were dropped",
    ]
    assert log.dropped == 20
    assert [line.action for line in read_log(folder)] == ["tock"]


def test_a_file_that_is_full_takes_no_more(tmp_path: Path) -> None:
    log = SlotLog(tmp_path, clock=Clock(), max_file_bytes=1_000)
    for _ in range(40):
        log.trail("work").event("tick" * 10)
        log.close()
    assert log_files(tmp_path)[0].stat().st_size < 1_200
    assert log.dropped > 0


def test_a_queue_that_is_full_drops_lines_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slots-2026-01-01.jsonl")
    log = SlotLog(tmp_path, clock=Clock(), max_queued=5)
    # Nobody reads, so the thread stands still in its first write.
    for _ in range(100):
        log.trail("work").event("tick")
    assert log.dropped > 50
    read: list[bytes] = []
    reader = threading.Thread(
        target=lambda: read.append((tmp_path / "slots-2026-01-01.jsonl").read_bytes())
    )
    reader.start()
    log.close()
    reader.join(10)
    assert log.dropped + read[0].count(b"\n") == 100


def test_a_trail_without_a_log_writes_nothing() -> None:
    say_everything(SlotTrail("work"))


def test_the_latest_lines_of_a_slot_come_from_the_ends_of_files(tmp_path: Path) -> None:
    clock = Clock()
    log = SlotLog(tmp_path, clock=clock)
    for day in range(3):
        clock.now = MIDNIGHT + day * DAY
        for number in range(4):
            log.trail("work").event(f"e{day}{number}", "f")
            log.trail("other").event("x", "f")
    log.close()

    def actions(most: int, most_bytes: int = 10_000) -> list[str]:
        return [one.action for one in latest_lines(tmp_path, "work", most, most_bytes=most_bytes)]

    assert actions(6) == ["e12", "e13", "e20", "e21", "e22", "e23"]
    assert actions(100) == [f"e{day}{number}" for day in range(3) for number in range(4)]
    assert actions(0) == []
    size = (tmp_path / "slots-2026-01-03.jsonl").stat().st_size
    assert actions(100, size) == ["e20", "e21", "e22", "e23"]
    assert actions(100, size - 1) == ["e21", "e22", "e23"]
    assert [one.action for one in log.latest("work", 2)] == ["e22", "e23"]
    assert len(log.latest("work", 100)) == 12
    assert latest_lines(tmp_path / "none", "work", 5) == []
