"""The steps of a wake: claim, answer, retry; and slots that share a key, and so a wake."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from core.slots.slot_world import World, finish
from headgate.core.slots.polling import (
    WakeCause,
    due_wake,
    poll_due_at,
    wake_obstacle,
    window_is_over,
)
from headgate.core.slots.quota import (
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
)
from headgate.core.slots.slot import SlotConfig
from headgate.core.slots.steps import (
    WakeClaim,
    WakeDone,
    WindowDone,
    claim_wake,
    close_window,
    skip_wake,
    wake_done,
)
from headgate.core.slots.wakes import Confirmation, WakeConfig, WakeMode, WindowEnd

NOW = 1_771_176_960.0
HOUR = 3600.0
WINDOW = 15 * 60.0
INTERVAL = WakeConfig(wake_modes=frozenset({WakeMode.INTERVAL}))
WORK = SlotConfig(name="work", provider="zai", wake=INTERVAL, key_digest="k1", settings_digest="s1")
HOME = msgspec.structs.replace(WORK, name="home", settings_digest="s2")
OTHER = msgspec.structs.replace(WORK, name="other", key_digest="k2", settings_digest="s3")


def due(*configs: SlotConfig) -> World:
    """Make slots that are cold and whose interval has just elapsed."""
    world = World(NOW - HOUR, configs or (WORK,))
    for provider in world.providers.values():
        provider.open_until = NOW - 1
    for name in world.configs:
        world.begin(name, starts=True)
        finish(world.quota_pass(name))
        assert world.row(name).start == ""
    world.now = NOW
    return world


def names(world: World, name: str) -> tuple[str, ...]:
    return tuple(config.name for config in world.sharers(name))


def claimed(
    world: World, name: str = "work", cause: WakeCause = "scheduled", claim_id: str = "w1"
) -> WakeClaim | None:
    step = partial(
        claim_wake, configs=world.sharers(name), name=name, cause=cause, claim_id=claim_id
    )
    return world.step(names(world, name), step)


def answered(
    world: World, answer: WakeAnswer, name: str = "work", claim_id: str = "w1"
) -> WakeDone:
    step = partial(
        wake_done, configs=world.sharers(name), name=name, claim_id=claim_id, answer=answer
    )
    return world.step(names(world, name), step)


def closed(world: World, name: str = "work", claim_id: str = "r1") -> WindowDone:
    step = partial(close_window, configs=world.sharers(name), name=name, claim_id=claim_id)
    return world.step(names(world, name), step)


def told_nothing(world: World, name: str) -> None:
    """Let a poll fail, after which a retry window may end."""
    provider = world.provider(name)
    provider.failure = QuotaFailure(kind=QuotaFailureKind.TIMEOUT)
    finish(world.quota_pass(name))
    provider.failure = None


def failed(kind: QuotaFailureKind, **fields: object) -> WakeAnswer:
    return WakeAnswer(failure=QuotaFailure(kind=kind, **fields))  # type: ignore[arg-type]


def test_a_trigger_is_claimed_once() -> None:
    world = due()
    claim = claimed(world)
    assert claim is not None
    assert (claim.cause, claim.reason) == ("scheduled", "interval mode (60 min elapsed)")
    assert claimed(world, claim_id="w2") is None
    assert world.row("work").schedule.wake_pending


def test_a_claim_whose_reply_got_lost_is_given_again_and_sent() -> None:
    world = due(WORK, HOME)
    first, again = claimed(world), claimed(world)
    assert first is not None
    assert again is not None
    assert (again.id, again.also, again.is_shared) == (first.id, ("home",), False)


def test_a_wake_asks_for_a_poll_at_once_and_ends_one_that_is_under_way() -> None:
    world = due()
    life = world.poll("work", force=True)
    next(life)
    claimed(world)
    assert poll_due_at(WORK, world.row("work"), NOW) == NOW
    next(life)
    next(life)
    assert world.row("work").schedule.poll_requested
    assert world.row("work").schedule.wake_errors == 0


def test_a_trigger_that_the_pre_check_finds_needless_is_answered_once() -> None:
    world = due()
    found = due_wake(WORK, world.row("work"), NOW)
    assert found is not None
    assert found.trigger is not None
    skip = partial(skip_wake, config=WORK, marker=found.trigger.marker)
    world.step(("work",), skip)
    before = world.row("work")
    assert due_wake(WORK, before, NOW) is None
    world.step(("work",), skip)
    assert world.row("work") == before


def test_a_wake_by_hand_needs_no_mode() -> None:
    world = due(msgspec.structs.replace(WORK, wake=WakeConfig()))
    assert claimed(world) is None
    claim = claimed(world, cause="manual")
    assert claim is not None
    assert claim.reason == "by hand"
    assert wake_obstacle(WORK, world.row("work"), NOW) == "a wake is being confirmed"
    assert claimed(world, cause="manual", claim_id="w2") is None


def test_no_wake_goes_before_a_pause_ends_and_the_trigger_is_kept() -> None:
    world = due()
    throttled = QuotaFailure(kind=QuotaFailureKind.THROTTLED, retry_after_seconds=600)
    world.provider("work").failure = throttled
    finish(world.wake_pass("work"))
    assert claimed(world) is None
    assert claimed(world, cause="manual") is None
    assert wake_obstacle(WORK, world.row("work"), NOW).startswith("paused")
    world.provider("work").failure = None
    world.now += 600
    finish(world.wake_pass("work"))
    assert world.provider("work").wakes == [NOW + 600]


@pytest.mark.parametrize(
    ("answer", "outcome", "is_pending", "is_disabled", "waits"),
    [
        (WakeAnswer(), "ok", True, False, 0),
        (failed(QuotaFailureKind.TIMEOUT), "timeout", True, False, 0),
        (failed(QuotaFailureKind.SERVER_ERROR), "server_error", True, False, 0),
        (failed(QuotaFailureKind.REJECTED), "rejected", True, False, 0),
        (failed(QuotaFailureKind.REFUSED, code=401), "refused", False, True, None),
        (failed(QuotaFailureKind.THROTTLED, retry_after_seconds=5), "throttled", True, False, 5),
        (failed(QuotaFailureKind.THROTTLED), "throttled", True, False, 60),
        (failed(QuotaFailureKind.EXHAUSTED, resets_at=NOW + 99), "exhausted", False, False, 101),
    ],
)
def test_what_the_answer_to_a_wake_means(
    answer: WakeAnswer, outcome: str, is_pending: bool, is_disabled: bool, waits: float | None
) -> None:
    world = due()
    claimed(world)
    done = answered(world, answer)
    assert (done.outcome, done.is_disabled, done.is_stale) == (outcome, is_disabled, False)
    row = world.row("work")
    assert row.schedule.wake_pending is is_pending
    assert poll_due_at(WORK, row, NOW) == (None if waits is None else NOW + waits)


def test_a_report_in_the_answer_confirms_the_wake() -> None:
    world = due()
    claimed(world)
    reset_ms = int((NOW + 5 * HOUR) * 1000)
    row = QuotaLimit(type="TOKENS_LIMIT", percentage=1, next_reset_epoch_ms=reset_ms)
    done = answered(world, WakeAnswer(report=QuotaReport(limits=(row,))))
    assert done.confirmation is Confirmation.CONFIRMED
    assert not done.row.schedule.wake_pending
    assert done.row.reading is not None
    assert poll_due_at(WORK, done.row, NOW) == NOW + 1800


def test_a_report_that_confirms_nothing_leaves_the_counting_to_the_poll() -> None:
    world = due()
    claimed(world)
    cold = QuotaReport(limits=(QuotaLimit(type="TOKENS_LIMIT", percentage=0),))
    done = answered(world, WakeAnswer(report=cold))
    assert done.row.schedule.wake_pending
    assert done.row.schedule.wake_errors == 0
    assert poll_due_at(WORK, done.row, NOW) == NOW


def test_an_answer_counts_once_and_only_under_its_claim() -> None:
    world = due()
    claimed(world)
    refused = failed(QuotaFailureKind.REFUSED, code=401)
    assert answered(world, refused, claim_id="stranger").is_stale
    assert not answered(world, WakeAnswer()).is_stale
    assert answered(world, refused).is_stale
    assert not world.row("work").schedule.slot_auto_disabled


def test_an_unconfirmed_wake_is_sent_once_more_and_then_the_schedule_goes_on() -> None:
    world = due()
    world.provider("work").wake_failure = QuotaFailure(kind=QuotaFailureKind.TIMEOUT)
    world.run(31)
    assert world.provider("work").wakes == [NOW, NOW + WINDOW]
    row = world.row("work")
    assert not row.schedule.wake_pending
    assert row.schedule.wake_auto_disabled
    assert row.schedule.disabled_reason == "no wake was confirmed in 30 readings"
    assert not row.schedule.slot_auto_disabled
    patient = msgspec.structs.replace(INTERVAL, max_consecutive_errors=1000)
    world = due(msgspec.structs.replace(WORK, wake=patient))
    world.provider("work").wake_failure = QuotaFailure(kind=QuotaFailureKind.TIMEOUT)
    world.run(61)
    assert world.provider("work").wakes == [NOW, NOW + WINDOW, NOW + HOUR]


def test_polls_come_every_minute_while_a_wake_is_pending_whatever_the_backoff() -> None:
    world = due()
    world.provider("work").failure = QuotaFailure(kind=QuotaFailureKind.SERVER_ERROR)
    finish(world.wake_pass("work"))
    before = world.provider("work").polls
    world.run(29)
    assert world.provider("work").polls - before == 29
    assert world.row("work").schedule.consecutive_poll_errors == 1


def test_a_retry_whose_reply_got_lost_is_given_again() -> None:
    world = due()
    claimed(world)
    told_nothing(world, "work")
    world.now += WINDOW
    first, again = closed(world), closed(world)
    assert first.outcome is again.outcome is WindowEnd.RETRY_NOW
    assert again.claim is not None
    assert again.claim.id == "r1"
    assert closed(world, claim_id="r2").outcome is WindowEnd.NOT_YET


def test_a_window_that_is_not_over_is_left_alone() -> None:
    world = due()
    claimed(world)
    before = world.row("work")
    assert not window_is_over(WORK, before, NOW)
    assert closed(world).outcome is WindowEnd.NOT_YET
    assert world.row("work") == before


def test_slots_of_one_key_that_are_due_together_are_served_by_one_wake() -> None:
    world = due(WORK, HOME, OTHER)
    claim = claimed(world)
    assert claim is not None
    assert claim.also == ("home",)
    assert claimed(world, "home", claim_id="w2") is None
    assert claimed(world, "other", claim_id="w3") is not None
    answered(world, failed(QuotaFailureKind.REFUSED, code=403))
    disabled = [name for name in world.configs if world.row(name).schedule.slot_auto_disabled]
    assert disabled == ["work", "home"]


def late(*configs: SlotConfig, minutes: float) -> World:
    """Make slots of which all but the first are due some minutes later than it."""
    world = due(*configs)
    for config in configs[1:]:
        row = world.row(config.name)
        fired = NOW - HOUR + minutes * 60
        schedule = msgspec.structs.replace(row.schedule, last_interval_fire=fired)
        world.rows[config.name] = msgspec.structs.replace(row, schedule=schedule)
    return world


@pytest.mark.parametrize(("minutes", "is_confirmed"), [(0.5, True), (0.5, False), (10, False)])
def test_a_slot_that_comes_due_a_little_later_joins_the_wake(
    minutes: float, is_confirmed: bool
) -> None:
    world = late(WORK, HOME, minutes=minutes)
    assert getattr(claimed(world), "also", None) == ()
    answered(world, WakeAnswer())
    if is_confirmed:
        world.provider("work").open_until = NOW + 5 * HOUR
        finish(world.poll("work"))
        assert not world.row("work").schedule.wake_pending
    world.now += minutes * 60
    claim = claimed(world, "home", claim_id="w2")
    assert claim is not None
    assert claim.is_shared
    home = world.row("home")
    assert home.schedule.wake_pending
    assert home.schedule.last_wake_at == NOW
    assert home.wake_claim is None


def test_a_slot_that_joined_is_confirmed_by_its_own_poll() -> None:
    world = late(WORK, HOME, minutes=0.5)
    claimed(world)
    world.now += 30
    claimed(world, "home", claim_id="w2")
    world.provider("work").wake(world.now)
    finish(world.quota_pass("home"))
    assert world.row("home").schedule.last_confirmed_at == NOW + 30
    assert len(world.provider("home").wakes) == 1


def test_long_after_a_confirmed_wake_the_next_slot_sends_its_own() -> None:
    world = late(WORK, HOME, minutes=2)
    finish(world.wake_pass("work"))
    finish(world.quota_pass("work"))
    world.provider("work").open_until = NOW + 1
    world.now += 120
    claim = claimed(world, "home", claim_id="w2")
    assert claim is not None
    assert not claim.is_shared


def test_a_wake_under_another_key_is_not_shared() -> None:
    world = late(WORK, HOME, minutes=0.5)
    claimed(world)
    stored = msgspec.structs.replace(WORK, key_digest="old")
    world.rows["work"] = msgspec.structs.replace(world.row("work"), config=stored)
    world.now += 30
    claim = claimed(world, "home", claim_id="w2")
    assert claim is not None
    assert not claim.is_shared


def test_retries_of_slots_of_one_key_are_sent_once() -> None:
    world = due(WORK, HOME)
    world.provider("work").wake_failure = QuotaFailure(kind=QuotaFailureKind.TIMEOUT)
    world.run(31)
    assert world.provider("work").wakes == [NOW, NOW + WINDOW]
    assert not any(world.row(name).schedule.wake_pending for name in ("work", "home"))


def test_a_retry_a_moment_after_another_slots_wake_joins_it() -> None:
    world = due(WORK, HOME)
    claimed(world)
    told_nothing(world, "work")
    told_nothing(world, "home")
    home = world.row("home")
    deadline = NOW + WINDOW + 30
    schedule = msgspec.structs.replace(home.schedule, wake_retry_window_deadline=deadline)
    world.rows["home"] = msgspec.structs.replace(home, schedule=schedule)
    world.now = NOW + WINDOW
    assert closed(world).outcome is WindowEnd.RETRY_NOW
    world.now += 30
    done = closed(world, "home", claim_id="r2")
    assert done.outcome is WindowEnd.RETRY_NOW
    assert done.claim is not None
    assert done.claim.is_shared
