"""`headgate slot` against answers that were written down: what it prints, and how it exits."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from cli.said import in_zone
from client.scripted_server import response, scripted
from headgate.cli import output
from headgate.cli.main import run
from headgate.cli.output import clock_time
from headgate.errors import utc_time

NOW = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
SOON = NOW + timedelta(hours=4, minutes=12, seconds=20)
OPEN: dict[str, Any] = {
    "name": "work",
    "provider": "zai",
    "zone": "Europe/Berlin",
    "quotaFrom": "traffic",
    "quotaText": "headers",
    "state": "open",
    "enabled": True,
    "percentUsed": 7.0,
    "resetsAt": SOON.isoformat(),
    "level": "pro",
    "limits": [{"type": "TOKENS_LIMIT", "unit": 3, "percentUsed": 7.0}],
    "wakeModes": ["after_reset"],
    "wakesEnabled": True,
    "nextWake": {
        "at": (SOON + timedelta(minutes=1)).isoformat(),
        "mode": "after_reset",
        "reason": "after_reset mode (1 min after reset)",
        "text": "13:06 Europe/Berlin: 1 min after the reset",
    },
    "wakePending": False,
    "lastConfirmedAt": (NOW - timedelta(minutes=48)).isoformat(),
    "wakeErrors": 0,
    "pollErrors": 0,
}
USED_UP = OPEN | {
    "name": "spare",
    "state": "exhausted",
    "percentUsed": 100.0,
    "waitReason": "slot spare is used up (100%)",
    "waitUntil": SOON.isoformat(),
    "wakeModes": [],
    "wakesEnabled": False,
    "nextWake": None,
    "lastConfirmedAt": None,
    "wakeErrors": 2,
    "pollErrors": 1,
}


class StoppedClock(datetime):
    """A clock that shows one time, however long a test takes."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> StoppedClock:
        """Return that time."""
        return cls.fromtimestamp(NOW.timestamp(), tz)


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "datetime", StoppedClock)


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "nothing"))


def said(
    capsys: pytest.CaptureFixture[str], call: str, answer: object, *, status: int = 200
) -> tuple[int, str, str, str]:
    """Return the exit code, both outputs, and the first line of the request."""
    with scripted(response(status, json.dumps(answer))) as server:
        code = run(["slot", *call.split(), "--url", server.url])
        request = server.requests[0].split("\r\n")[0]
    out, err = capsys.readouterr()
    return code, out, err, request


def test_status_is_a_line_a_slot(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"slots": [OPEN, USED_UP], "count": 2}
    code, out, _, request = said(capsys, "list", answer)
    assert (code, request) == (0, "GET /slots HTTP/1.1")
    title, header, first, second, hold = out.splitlines()
    assert title == "Slots"
    assert re.split(r"\s{2,}", header.strip())[:4] == ["slot", "state", "used", "resets in"]
    assert re.split(r"\s{2,}", first.strip()) == [
        "work",
        "open",
        "7%",
        "4 h 12 min",
        "4 h 13 min: after_reset",
        "48 min ago",
    ]
    assert re.split(r"\s{2,}", second.strip()) == [
        "spare",
        "exhausted",
        "100%",
        "4 h 12 min",
        "never",
        "1 poll, 2 wake",
    ]
    assert hold.startswith("  spare is closed: slot spare is used up (100%), until ")


def test_status_as_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _, _ = said(capsys, "list --json", {"slots": [OPEN, USED_UP], "count": 2})
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["work", "spare"]


def test_status_without_slots_says_how_to_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err, _ = said(capsys, "list", {"slots": [], "count": 0})
    assert (code, out) == (0, "")
    assert "[[slots]]" in err


def test_status_of_one_slot_is_everything_that_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _, request = said(capsys, "show spare", USED_UP)
    assert (code, request) == (0, "GET /slots/spare HTTP/1.1")
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    assert facts["state"] == "exhausted"
    assert facts["closed because"].startswith("slot spare is used up (100%), until ")
    assert facts["wake modes"] == "none: it is never woken"
    assert facts["errors"] == "1 poll, 2 wake"
    assert facts["limit"] == "TOKENS_LIMIT, unit 3, 7% used"
    _, out, _, _ = said(capsys, "show spare --json", USED_UP)
    assert json.loads(out)["state"] == "exhausted"


SKIPPED = OPEN["nextWake"] | {
    "text": "13:06 Europe/Berlin: skipped, the window is open until 14:00; the next one at 14:05",
    "isSkipped": True,
    "openUntil": "2027-01-15T13:00:00Z",
    "then": "2027-01-15T16:00:00Z",
}
SKIPPED_TEXT = (
    "21:13:20 JST: skipped, the window is open until 22:00:00 JST; "
    "the next one at 2027-01-16 01:00:00 JST"
)
UNTIL = "used up until 21:00:00 JST"
OFF = "paused by hand, `headgate slot resume work` brings it back"


@pytest.mark.parametrize(
    ("changes", "fact", "text"),
    [
        ({"pollErrors": 1, "lastError": "server error: 500"}, "last error", "server error: 500"),
        ({"enabled": False, "disabledReason": OFF, "waitReason": OFF}, "closed because", OFF),
        ({"enabled": False, "disabledReason": OFF, "waitReason": OFF}, "reason", None),
        ({"disabledReason": "wakes were not confirmed"}, "reason", "wakes were not confirmed"),
        ({}, "quota from", "traffic: headers"),
        ({}, "next wake", "21:13:20 JST: 1 min after the reset"),
        ({}, "wake zone", "Europe/Berlin"),
        ({"nextWake": SKIPPED}, "next wake", SKIPPED_TEXT),
        ({"waitReason": "used up until 2027-01-15 12:00:00 UTC"}, "closed because", UNTIL),
        (
            {"readAt": "2027-01-14T06:30:00Z"},
            "read",
            "2027-01-14 15:30:00 JST (26 h ago)",
        ),
        (
            {"resetsAt": (NOW - timedelta(minutes=2)).isoformat()},
            "resets",
            "the window ended 2 min ago; a reading has to confirm it",
        ),
        ({"wakeLoop": {"restarts": 1, "problem": "stuck"}}, "wake loop", "restarted once, stuck"),
        ({"wakeLoop": {"restarts": 2, "problem": "x"}}, "wake loop", "restarted 2 times, x"),
    ],
)
def test_a_fact_is_told_once_and_in_words(
    changes: dict[str, object], fact: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with in_zone("Asia/Tokyo"):
        _, out, _, _ = said(capsys, "show work", OPEN | changes)
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    assert facts.get(fact) == text


def test_every_time_of_a_slot_is_in_utc_if_that_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with in_zone("Asia/Tokyo"):
        _, shown, _, _ = said(capsys, "show work --utc", OPEN | {"nextWake": SKIPPED})
        _, listed, _, _ = said(
            capsys, "list --utc", {"slots": [OPEN | {"nextWake": SKIPPED}], "count": 1}
        )
    for text in (shown, listed):
        assert "12:13:20 UTC: skipped, the window is open until 13:00:00 UTC" in text
        assert "JST" not in text


@pytest.mark.parametrize("verb", ["show", "warm", "pause", "resume"])
def test_a_name_that_is_empty_is_refused_by_its_own_name(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["slot", verb, ""]) == 2
    assert "SLOT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"wakePending": True}, "work: sent a wake; headgate slot show work says when"),
        ({}, "work: sent a wake, and it is confirmed; the window resets in 4 h 12 min"),
    ],
)
def test_warm_says_what_came_of_it(
    changes: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _, request = said(capsys, "warm work", OPEN | changes, status=202)
    assert (code, request) == (0, "POST /slots/work/warm HTTP/1.1")
    assert out.startswith(line)


def test_a_wake_that_is_refused_is_one_line_and_is_not_sent_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refusal = {
        "code": "window_open",
        "error": "slot work: the window is open until 2027-01-15 12:00:00 UTC",
        "retryable": False,
        "details": {"slot": "work", "resetsAt": "2027-01-15T12:00:00Z"},
        "requestId": "r1",
    }
    code, out, err, _ = said(capsys, "warm work", refusal, status=409)
    assert (code, out) == (2, "")
    until = clock_time(datetime(2027, 1, 15, 12, tzinfo=UTC))
    assert err == f"headgate: slot work: the window is open until {until}\n"


@pytest.mark.parametrize(
    ("verb", "sent", "changes", "line"),
    [
        ("resume", "enable", {}, "Slot work is active.\n"),
        (
            "resume",
            "enable",
            {"enabled": False, "disabledReason": "disabled in the configuration"},
            "Slot work is still disabled in the configuration.\n",
        ),
        (
            "pause",
            "disable",
            {"enabled": False, "disabledReason": OFF},
            (
                "Slot work is paused: nothing is sent with its key; "
                "calls and tasks that need the key wait. "
                "headgate slot resume work ends this.\n"
            ),
        ),
    ],
)
def test_a_slot_is_paused_and_resumed(
    verb: str,
    sent: str,
    changes: dict[str, object],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _, request = said(capsys, f"{verb} work", OPEN | changes)
    assert (code, out, request) == (0, line, f"POST /slots/work/{sent} HTTP/1.1")
    _, out, _, _ = said(capsys, f"{verb} work --json", OPEN | changes)
    assert json.loads(out)["name"] == "work"


def test_a_name_with_anything_in_it_is_one_segment_of_the_path(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, _, _, request = said(capsys, "warm a/../b?c", OPEN, status=202)
    assert request == "POST /slots/a%2F..%2Fb%3Fc/warm HTTP/1.1"


@pytest.mark.parametrize(
    ("slots", "line"),
    [
        ({"slot": {"name": "work", "percentUsed": 7.5, "resetsAt": SOON.isoformat()}}, "7.5% used"),
        ({"slots": [{"name": "work", "provider": "zai", "percentUsed": 0.0}]}, "0% used"),
        ({"slot": {"name": "a-label"}}, ""),
    ],
)
def test_why_tells_the_room_of_a_slot_that_holds_nothing(
    slots: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"taskId": "tsk_1", "state": "running", "reasons": [], **slots}
    with scripted(response(200, json.dumps(answer))) as server:
        assert run(["why", "tsk_1", "--url", server.url]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "tsk_1 is running, and waits for nothing"
    assert [one.startswith(f"  slot work: {line}") for one in rest] == [True] * bool(line)


def test_why_tells_percent_and_reset_of_a_slot_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    until, resets_at = SOON.timestamp(), SOON.timestamp() + 3600
    message = (
        f"slot work is closed: asked for a pause, 73% used, resets at {utc_time(resets_at)}, "
        f"until {utc_time(until)}"
    )
    reason = {
        "detail": {"reason": "gate_closed", "kind": "slot", "name": "work", "resets_at": None},
        "message": message,
        "until": SOON.isoformat(),
    }
    answer = {"taskId": "tsk_1", "state": "queued", "reasons": [reason]}
    with scripted(response(200, json.dumps(answer))) as server:
        assert run(["why", "tsk_1", "--url", server.url]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    resets, ends = (clock_time(datetime.fromtimestamp(at, UTC)) for at in (resets_at, until))
    assert line == (
        f"  slot work is closed: asked for a pause, 73% used, resets at {resets}, until {ends} "
        "(in 4 h)"
    )
