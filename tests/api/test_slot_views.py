"""What a slot's status is told as: its state, what disables it, and the wake that comes next."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from headgate.api.slots import slot_body
from headgate.core.gates import GateClosure
from headgate.core.slots.quota import QuotaLimit
from headgate.core.slots.slot import SlotConfig, SlotReading, SlotRow, SlotStanding
from headgate.core.slots.status import SlotBody
from headgate.core.slots.wakes import SlotSchedule, WakeConfig, WakeMode
from headgate.engine.slots.slot import LoopHealth, SlotStatus

NOW = 1_800_000_000.0
HOUR = 3600.0
BY_HAND = "paused by hand, `headgate slot resume work` brings it back"
WOKEN = WakeConfig(wake_modes=frozenset({WakeMode.AFTER_RESET, WakeMode.INTERVAL}))


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def status(
    *,
    reading: SlotReading | None = None,
    schedule: SlotSchedule | None = None,
    is_off: bool = False,
    is_enabled: bool = True,
    wake: WakeConfig = WOKEN,
    hold: GateClosure | None = None,
) -> SlotStatus:
    config = SlotConfig(name="work", provider="zai", wake=wake, is_enabled=is_enabled)
    row = SlotRow(name="work", schedule=schedule or SlotSchedule(), reading=reading, is_off=is_off)
    standing = SlotStanding(
        name="work",
        provider="zai",
        closure=hold,
        percent_used=None if reading is None else reading.percent_used,
        resets_at=None if reading is None else reading.resets_at,
    )
    return SlotStatus(
        config=config,
        row=row,
        standing=standing,
        next_poll_at=NOW + 60,
        wake_loop=LoopHealth(last_step_at=NOW - 1),
        quota_loop=LoopHealth(restarts=2, problem="stuck"),
    )


def reading(**fields: float | bool | None) -> SlotReading:
    return msgspec.convert({"read_at": NOW - 5, **fields}, SlotReading)


STATES = [
    (status(), "unknown"),
    (status(reading=reading()), "cold"),
    (status(reading=reading(resets_at=NOW)), "cold"),
    (status(reading=reading(resets_at=NOW + 1)), "open"),
    (status(reading=reading(resets_at=NOW + 1, is_exhausted=True)), "exhausted"),
    # The first reading after the reset frees its tasks, not the clock.
    (status(reading=reading(resets_at=NOW - 1, is_exhausted=True)), "exhausted"),
    (status(reading=reading(), schedule=SlotSchedule(paused_until=NOW + 9)), "closed"),
    (status(schedule=SlotSchedule(paused_until=NOW + 9, paused_why="not set")), "no_key"),
    (status(schedule=SlotSchedule(paused_until=NOW - 9, paused_why="not set")), "no_key"),
    (status(reading=reading(), schedule=SlotSchedule(paused_until=NOW - 9)), "cold"),
    (status(schedule=SlotSchedule(slot_auto_disabled=True, disabled_reason="no")), "disabled"),
    (status(is_off=True), "paused"),
    (status(is_off=True, is_enabled=False), "disabled"),
    (status(is_enabled=False), "disabled"),
]


@pytest.mark.parametrize(("given", "state"), STATES)
def test_the_state_is_told_from_what_is_known(given: SlotStatus, state: str) -> None:
    body = slot_body(given, NOW)
    assert body.state == state
    assert body.enabled == (state not in ("disabled", "paused"))


@pytest.mark.parametrize(
    ("given", "reason", "wakes_enabled"),
    [
        (status(), "", True),
        (status(wake=WakeConfig()), "", False),
        (status(is_enabled=False), "disabled in the configuration", False),
        (status(is_off=True), BY_HAND, False),
        (
            status(schedule=SlotSchedule(slot_auto_disabled=True, disabled_reason="401")),
            "disabled, 401; correct that, then run `headgate slot resume work`",
            False,
        ),
        (
            status(schedule=SlotSchedule(wake_auto_disabled=True, disabled_reason="10 errors")),
            "10 errors",
            False,
        ),
    ],
)
def test_what_disables_a_slot_is_said(given: SlotStatus, reason: str, wakes_enabled: bool) -> None:
    body = slot_body(given, NOW)
    assert (body.disabled_reason, body.wakes_enabled) == (reason, wakes_enabled)


SENT = SlotSchedule(last_interval_fire=NOW)
PENDING = msgspec.structs.replace(SENT, wake_pending=True, wake_retry_window_deadline=NOW + 60)
FAR = msgspec.structs.replace(PENDING, wake_retry_window_deadline=253_402_300_859.0)


def paused(seconds: float) -> SlotSchedule:
    return msgspec.structs.replace(SENT, paused_until=NOW + seconds)


@pytest.mark.parametrize(
    ("given", "mode", "due_at"),
    [
        (status(schedule=SENT), "interval", NOW + HOUR),
        (status(schedule=PENDING), "retry", NOW + 60),
        (
            status(schedule=msgspec.structs.replace(PENDING, wake_timeout_retry_fired=True)),
            "interval",
            NOW + HOUR,
        ),
        (status(), None, None),
        (status(schedule=SENT, is_off=True), None, None),
        # A pause holds what is due until it ends.
        (status(schedule=paused(9 * HOUR)), "interval", NOW + 9 * HOUR),
        (status(schedule=paused(60)), "interval", NOW + HOUR),
        # No calendar reaches that far.
        (status(schedule=FAR), None, None),
    ],
)
def test_the_next_wake_is_the_retry_of_one_under_way_or_the_next_trigger(
    given: SlotStatus, mode: str | None, due_at: float | None
) -> None:
    wake = slot_body(given, NOW).next_wake
    assert (None if wake is None else (wake.mode, wake.at)) == (
        None if mode is None or due_at is None else (mode, at(due_at))
    )


def test_everything_else_is_passed_on() -> None:
    limit = QuotaLimit(type="TOKENS_LIMIT", unit=3, percentage=7.0, next_reset_epoch_ms=int(NOW))
    schedule = SlotSchedule(
        last_wake_at=NOW - 3,
        last_confirmed_at=NOW - 2,
        last_poll_at=NOW - 1,
        wake_errors=3,
        consecutive_poll_errors=4,
    )
    read = SlotReading(read_at=NOW, percent_used=7.0, level="pro", limits=(limit,))
    hold = GateClosure(kind="slot", name="work", until=NOW + 8, why="used up (100%)")
    body = slot_body(status(reading=read, schedule=schedule, hold=hold), NOW)
    assert (body.percent_used, body.level, body.wait_reason) == (7.0, "pro", "used up (100%)")
    assert body.wait_until == at(NOW + 8)
    assert (body.last_wake_at, body.last_confirmed_at) == (at(NOW - 3), at(NOW - 2))
    assert (body.last_poll_at, body.next_poll_at) == (at(NOW - 1), at(NOW + 60))
    assert (body.wake_errors, body.poll_errors) == (3, 4)
    assert body.wake_modes == ["interval", "after_reset"]
    assert body.limits[0].percent_used == 7.0
    assert body.wake_loop is not None
    assert body.wake_loop.last_step_at == at(NOW - 1)
    assert body.quota_loop is not None
    assert (body.quota_loop.restarts, body.quota_loop.problem) == (2, "stuck")


def test_figures_are_in_the_json_also_when_they_are_nought() -> None:
    shown = msgspec.json.decode(msgspec.json.encode(slot_body(status(), NOW)))
    assert shown["wakeErrors"] == shown["pollErrors"] == 0
    assert shown["wakePending"] is False
    assert shown["limits"] == []
    assert "resetsAt" not in shown
    assert msgspec.convert(shown, SlotBody, strict=False) == slot_body(status(), NOW)


@pytest.mark.parametrize("far", [253_402_300_859.0, 1e300, float("inf")])
def test_no_time_that_is_kept_breaks_a_view(far: float) -> None:
    limit = QuotaLimit(type="TOKENS_LIMIT", next_reset_epoch_ms=253_402_300_859_000)
    kept = SlotReading(read_at=NOW, resets_at=far, limits=(limit,))
    body = slot_body(status(reading=kept), NOW)
    assert (body.resets_at, body.limits[0].resets_at) == (None, None)


def test_what_went_wrong_at_the_last_poll_is_told() -> None:
    schedule = SlotSchedule(consecutive_poll_errors=1, last_problem="server error: 500")
    assert slot_body(status(schedule=schedule), NOW).last_error == "server error: 500"
    assert slot_body(status(), NOW).last_error == ""


@pytest.mark.parametrize("until", [NOW + 9_000, None])
def test_of_two_closures_the_one_that_opens_last_is_told(until: float | None) -> None:
    hold = GateClosure(kind="slot", name="work", until=until, why="exhausted, 100% used")
    limited = GateClosure(kind="slot", name="work", until=NOW + 60, why="anthropic returned 429")
    for given in (
        slot_body(status(hold=hold), NOW, closures=[limited]),
        slot_body(status(hold=limited), NOW, closures=[hold]),
    ):
        assert given.wait_reason == "exhausted, 100% used"
        assert given.wait_until == (None if until is None else at(until))
        assert [one.why for one in given.closures] == [hold.why, limited.why]
