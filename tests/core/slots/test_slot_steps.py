"""The steps of a slot, one by one: start, polls, claims, switches, new configurations."""

from __future__ import annotations

import pickle
from functools import partial
from zoneinfo import ZoneInfo

import msgspec
import pytest

from core.slots.slot_world import CLAIM_SECONDS, World, finish
from headgate.core.slots.polling import RESET_POLL_DELAY_SECONDS, poll_due_at, wake_obstacle
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit, QuotaReport
from headgate.core.slots.slot import SlotConfig, SlotReading, SlotRow, standing_of
from headgate.core.slots.steps import PollDone, begin, claim_poll, poll_done, reopen, switch
from headgate.core.slots.wakes import (
    Confirmation,
    SlotSchedule,
    WakeConfig,
    WakeMode,
    should_fire_wake,
)

NOW = 1_771_176_960.0
HOUR = 3600.0
INTERVAL = WakeConfig(wake_modes=frozenset({WakeMode.INTERVAL}))
WORK = SlotConfig(name="work", provider="zai", wake=INTERVAL, key_digest="k1", settings_digest="s1")
ASLEEP = msgspec.structs.replace(WORK, wake=WakeConfig())


def started(config: SlotConfig = WORK) -> World:
    world = World(NOW, (config,))
    world.begin("work", starts=True)
    return world


def report(*rows: QuotaLimit) -> QuotaReport:
    return QuotaReport(level="pro", limits=rows)


def tokens(
    percent: float, resets_in: float | None = None, *, kind: str = "TOKENS_LIMIT"
) -> QuotaLimit:
    reset_ms = None if resets_in is None else int((NOW + resets_in) * 1000)
    return QuotaLimit(type=kind, unit=3, percentage=percent, next_reset_epoch_ms=reset_ms)


def failure(kind: QuotaFailureKind, **fields: object) -> QuotaFailure:
    return QuotaFailure(kind=kind, **fields)  # type: ignore[arg-type]


def polled(world: World, answer: QuotaReport | QuotaFailure, config: SlotConfig = WORK) -> PollDone:
    claim_id = world.new_id()
    take = partial(claim_poll, config=config, claim_id=claim_id, seconds=CLAIM_SECONDS, force=True)
    assert world.step(("work",), take) is not None
    done = world.step(
        ("work",), partial(poll_done, config=config, claim_id=claim_id, answer=answer)
    )
    assert world.row("work") == done.row
    return done


def test_a_start_polls_first_and_wakes_if_the_reading_calls_for_it() -> None:
    world = started()
    assert world.row("work").start == "poll"
    finish(world.quota_pass("work"))
    assert world.provider("work").wakes == [NOW]
    row = world.row("work")
    assert row.start == ""
    assert row.schedule.wake_pending
    finish(world.quota_pass("work"))
    assert world.row("work").schedule.last_confirmed_at == NOW


def test_a_start_beside_an_open_window_sends_nothing() -> None:
    world = started()
    world.provider("work").open_until = NOW + HOUR
    finish(world.quota_pass("work"))
    assert world.provider("work").wakes == []
    assert world.row("work").start == ""


def test_a_start_without_a_mode_sends_nothing() -> None:
    world = started(ASLEEP)
    finish(world.quota_pass("work"))
    assert world.provider("work").wakes == []


def test_a_start_into_a_pause_wakes_after_it() -> None:
    world = started()
    world.provider("work").failure = failure(QuotaFailureKind.THROTTLED, retry_after_seconds=600)
    finish(world.quota_pass("work"))
    assert world.row("work").start == "poll"
    assert poll_due_at(WORK, world.row("work"), NOW) == NOW + 600
    world.provider("work").failure = None
    world.now += 600
    finish(world.quota_pass("work"))
    assert world.provider("work").wakes == [NOW + 600]


def test_of_two_nodes_one_gets_the_poll() -> None:
    world = started()
    take = partial(claim_poll, config=WORK, seconds=CLAIM_SECONDS)
    assert world.step(("work",), partial(take, claim_id="one")) is not None
    assert world.step(("work",), partial(take, claim_id="two")) is None
    assert poll_due_at(WORK, world.row("work"), NOW) == NOW + CLAIM_SECONDS


def test_a_claim_whose_reply_got_lost_is_given_again() -> None:
    world = started()
    take = partial(claim_poll, config=WORK, seconds=CLAIM_SECONDS, claim_id="one")
    assert world.step(("work",), take) == world.step(("work",), take)


@pytest.mark.parametrize("later", [CLAIM_SECONDS, 86_400.0, -86_400.0])
def test_the_claim_of_a_dead_node_ends_whatever_the_clock_does(later: float) -> None:
    world = started()
    take = partial(claim_poll, config=WORK, seconds=CLAIM_SECONDS)
    world.step(("work",), partial(take, claim_id="dead"))
    world.now += later
    assert world.step(("work",), partial(take, claim_id="two")) is not None
    late = world.step(
        ("work",), partial(poll_done, config=WORK, claim_id="dead", answer=report(tokens(99)))
    )
    assert late.is_stale
    assert world.row("work").reading is None


def test_a_claim_of_another_clock_does_not_put_off_the_poll_of_a_start() -> None:
    world = started()
    world.now += 86_400
    take = partial(claim_poll, config=WORK, seconds=CLAIM_SECONDS)
    world.step(("work",), partial(take, claim_id="dead"))
    world.now -= 86_400
    row = world.begin("work", starts=True)
    assert poll_due_at(WORK, row, world.now) == world.now


def test_the_next_poll_counts_from_when_the_last_one_began() -> None:
    world = started(ASLEEP)
    life = world.poll("work")
    next(life)
    world.now += 20
    finish(life)
    assert poll_due_at(ASLEEP, world.row("work"), world.now) == NOW + 1_800


def test_a_poll_that_is_not_due_is_claimed_by_force_only_and_never_in_a_pause() -> None:
    world = started(ASLEEP)
    finish(world.quota_pass("work"))
    take = partial(claim_poll, config=ASLEEP, seconds=CLAIM_SECONDS)
    assert world.step(("work",), partial(take, claim_id="x")) is None
    assert world.step(("work",), partial(take, claim_id="x", force=True)) is not None
    polled(started(), failure(QuotaFailureKind.THROTTLED, retry_after_seconds=5))
    paused = started()
    polled(paused, failure(QuotaFailureKind.THROTTLED, retry_after_seconds=5))
    assert paused.step(("work",), partial(take, claim_id="y", force=True)) is None


def test_a_good_reading_is_kept_and_ends_errors() -> None:
    world = started(ASLEEP)
    away = failure(QuotaFailureKind.TIMEOUT, message="no answer in 10 s")
    failures = []
    for _ in range(3):
        failures.append(polled(world, away))
        world.now += 8 * HOUR
    world.now = NOW
    errors = [(done.errors_before, done.errors_after) for done in failures]
    assert errors == [(0, 1), (1, 2), (2, 3)]
    done = failures[-1]
    assert done.backoff_minutes == 240
    assert done.problem == "timeout: no answer in 10 s"
    done = polled(world, report(tokens(7, HOUR)))
    assert (done.outcome, done.errors_before, done.errors_after) == ("ok", 3, 0)
    reading = world.row("work").reading
    assert reading is not None
    assert (reading.percent_used, reading.resets_at, reading.level) == (7, NOW + HOUR, "pro")
    assert not reading.is_exhausted


@pytest.mark.parametrize(
    ("kind", "needs_wake", "errors"),
    [
        (QuotaFailureKind.TIMEOUT, True, 1),
        (QuotaFailureKind.UNREACHABLE, True, 1),
        (QuotaFailureKind.SERVER_ERROR, True, 1),
        (QuotaFailureKind.REJECTED, True, 1),
        (QuotaFailureKind.GARBAGE, True, 1),
        (QuotaFailureKind.THROTTLED, True, 0),
        (QuotaFailureKind.REFUSED, False, 1),
    ],
)
def test_each_failure_is_told_apart(kind: QuotaFailureKind, needs_wake: bool, errors: int) -> None:
    done = polled(started(), failure(kind, code=401))
    assert (done.outcome, done.needs_wake, done.errors_after) == (kind.value, needs_wake, errors)
    assert done.is_disabled is (kind is QuotaFailureKind.REFUSED)
    assert done.row.schedule.last_poll_at == NOW


def test_a_report_without_the_driving_row_is_garbage() -> None:
    config = msgspec.structs.replace(WORK, limit_type="CREDIT_LIMIT")
    done = polled(started(config), report(tokens(7)), config)
    assert done.outcome == "garbage"
    assert done.errors_after == 1


def test_polling_is_disabled_at_the_limit_of_errors_and_says_so() -> None:
    world = started(ASLEEP)
    outcomes = []
    for _ in range(10):
        outcomes.append(polled(world, failure(QuotaFailureKind.TIMEOUT)))
        world.now += 8 * HOUR
    assert [done.is_disabled for done in outcomes] == [False] * 9 + [True]
    assert outcomes[-1].backoff_minutes is None
    hold = standing_of(ASLEEP, world.row("work"), NOW).closure
    assert hold is not None
    assert hold.why == (
        "disabled, 10 polls failed in a row, the last: timeout"
        "; correct that, then run `headgate slot resume work`"
    )
    assert poll_due_at(ASLEEP, world.row("work"), NOW + 1e6) is None


def test_a_refused_key_stops_at_once_until_the_settings_change() -> None:
    world = started()
    polled(world, failure(QuotaFailureKind.REFUSED, code=401))
    world.begin("work", starts=True)
    assert poll_due_at(WORK, world.row("work"), NOW) is None
    world.configs["work"] = msgspec.structs.replace(WORK, settings_digest="s2", key_digest="k2")
    row = world.begin("work")
    assert not row.schedule.slot_auto_disabled
    assert row.start == "poll"
    assert poll_due_at(world.configs["work"], row, NOW) == NOW


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_disabled_slot_comes_back_by_hand_or_by_any_change_of_its_settings(by_hand: bool) -> None:
    world = started()
    for _ in range(10):
        polled(world, failure(QuotaFailureKind.TIMEOUT))
        world.now += 8 * HOUR
    assert world.row("work").schedule.slot_auto_disabled
    world.now = NOW
    if by_hand:
        world.step(("work",), partial(switch, config=WORK, is_on=True))
    else:
        world.configs["work"] = msgspec.structs.replace(WORK, settings_digest="s2")
        world.begin("work")
    row = world.row("work")
    assert not row.schedule.slot_auto_disabled
    assert row.schedule.consecutive_poll_errors == 0
    assert poll_due_at(world.configs["work"], row, NOW) == NOW


def test_an_exhausted_key_is_a_reading_and_not_an_error() -> None:
    world = started()
    exhausted = failure(QuotaFailureKind.EXHAUSTED, code=1316, resets_at=NOW + HOUR)
    done = polled(world, exhausted)
    assert (done.outcome, done.errors_after, done.needs_wake) == ("exhausted", 0, False)
    row = world.row("work")
    standing = standing_of(WORK, row, NOW)
    assert standing.closure is not None
    assert standing.closure.until == NOW + HOUR
    assert standing.closure.why == "exhausted, 100% used"
    assert row.schedule.next_reset_epoch_ms == (NOW + HOUR) * 1000


def test_an_exhausted_slot_is_held_until_a_poll_says_otherwise() -> None:
    world = started(ASLEEP)
    polled(world, report(tokens(100, 900)), ASLEEP)
    row = world.row("work")
    assert poll_due_at(ASLEEP, row, NOW) == NOW + 900 + RESET_POLL_DELAY_SECONDS
    hold = standing_of(ASLEEP, row, NOW + 901).closure
    assert hold is not None
    assert hold.until is None
    world.now += 902
    polled(world, report(tokens(0)), ASLEEP)
    assert standing_of(ASLEEP, world.row("work"), world.now).closure is None


@pytest.mark.parametrize(
    ("rows", "shown", "until", "is_exhausted"),
    [
        ((tokens(7, 600),), 7, 600, False),
        ((tokens(99.9, 600),), 99.9, 600, False),
        ((tokens(100, 600),), 100, 600, True),
        ((tokens(120, 600),), 120, 600, True),
        ((tokens(100, -1),), 100, -1, True),
        ((tokens(100),), 100, None, True),
        ((tokens(7, 600), tokens(100, 9000)), 100, 9000, True),
        ((tokens(100, 600), tokens(100, 9000)), 100, 9000, True),
        ((tokens(100, 600), tokens(50, 9000)), 100, 600, True),
        ((tokens(100, 600, kind="TIME_LIMIT"), tokens(7, 500)), 7, 500, False),
        ((tokens(100, 600, kind="TIME_LIMIT"),), 100, 600, False),
        ((tokens(100, 600, kind="CREDIT_LIMIT"), tokens(7, 500)), 7, 500, False),
        (
            (tokens(7, 500, kind="CREDIT_LIMIT"), tokens(100, 9e4, kind="CREDIT_LIMIT")),
            100,
            9e4,
            True,
        ),
    ],
)
def test_which_rows_exhaust_a_slot(
    rows: tuple[QuotaLimit, ...], shown: float, until: float | None, is_exhausted: bool
) -> None:
    world = started(ASLEEP)
    polled(world, report(*rows), ASLEEP)
    reading = world.row("work").reading
    assert reading is not None
    assert reading.is_exhausted is is_exhausted
    assert reading.percent_used == shown
    assert reading.resets_at == (None if until is None else NOW + until)
    assert reading.limits == rows


def test_a_configured_row_may_be_that_of_tools() -> None:
    config = msgspec.structs.replace(ASLEEP, limit_type="TIME_LIMIT")
    done = polled(started(config), report(tokens(100, 600, kind="TIME_LIMIT")), config)
    assert done.row.reading is not None
    assert done.row.reading.is_exhausted


def test_a_weekly_limit_that_is_used_up_calls_for_no_wake() -> None:
    done = polled(started(), report(tokens(0), tokens(100, 9e4)))
    assert not done.needs_wake
    assert done.row.start == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"is_enabled": False}, "disabled in the configuration"),
        ({}, "paused by hand, `headgate slot resume work` brings it back"),
    ],
)
def test_a_slot_that_is_off_is_neither_polled_nor_woken_and_holds_its_tasks(
    change: dict[str, bool], why: str
) -> None:
    world = started()
    finish(world.quota_pass("work"))
    assert world.row("work").schedule.wake_pending
    if change:
        world.configs["work"] = msgspec.structs.replace(WORK, settings_digest="s2", **change)
        world.begin("work")
    else:
        world.step(("work",), partial(switch, config=WORK, is_on=False))
    config, row = world.configs["work"], world.row("work")
    assert not row.schedule.wake_pending
    polls, wakes = world.provider("work").polls, len(world.provider("work").wakes)
    world.run(200)
    assert (world.provider("work").polls, len(world.provider("work").wakes)) == (polls, wakes)
    hold = standing_of(config, row, NOW).closure
    assert hold is not None
    assert hold.why == why
    assert wake_obstacle(config, row, NOW) == why


def test_a_slot_that_is_enabled_again_starts_anew() -> None:
    world = started()
    world.step(("work",), partial(switch, config=WORK, is_on=False))
    row = world.step(("work",), partial(switch, config=WORK, is_on=True))
    assert row.start == "poll"
    finish(world.quota_pass("work"))
    assert len(world.provider("work").wakes) == 1


def test_switching_off_what_the_file_disables_keeps_it_off_until_both_allow_it() -> None:
    world = started(msgspec.structs.replace(WORK, is_enabled=False))
    config = world.configs["work"]
    row = world.step(("work",), partial(switch, config=config, is_on=True))
    assert row.start == ""
    assert poll_due_at(config, row, NOW) is None


def test_an_answer_to_the_old_key_changes_nothing_for_the_new_one() -> None:
    world = started()
    life = world.poll("work")
    next(life)
    world.provider("work").failure = failure(QuotaFailureKind.REFUSED, code=401)
    next(life)
    world.configs["work"] = msgspec.structs.replace(WORK, settings_digest="s2", key_digest="k2")
    world.begin("work")
    for _ in life:
        pass
    assert not world.row("work").schedule.slot_auto_disabled


def test_a_new_key_forgets_what_was_known_of_the_old_one() -> None:
    world = started()
    polled(world, report(tokens(100, HOUR)))
    world.configs["work"] = msgspec.structs.replace(WORK, settings_digest="s2", key_digest="k2")
    row = world.begin("work")
    assert row.reading is None
    assert row.schedule.next_reset_epoch_ms is None
    assert standing_of(world.configs["work"], row, NOW).closure is None


def test_the_same_configuration_again_changes_nothing() -> None:
    world = started()
    rows = {"work": world.row("work")}
    assert begin(rows, NOW + 60, config=WORK) == ((), rows["work"])


def test_a_zone_that_came_back_from_disk_is_no_change() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    wake = WakeConfig(wake_modes=frozenset({WakeMode.TIMES}), wake_times=("09:00",), zone=berlin)
    config = msgspec.structs.replace(WORK, wake=wake)
    stored = msgspec.structs.replace(wake, zone=ZoneInfo.no_cache("Europe/Berlin"))
    world = started(config)
    schedule = msgspec.structs.replace(world.row("work").schedule, times_served_until=1.0)
    row = msgspec.structs.replace(
        world.row("work"),
        schedule=schedule,
        config=msgspec.structs.replace(config, wake=stored),
    )
    _, after = begin({"work": row}, NOW, config=config)
    assert after.schedule == schedule


def test_a_changed_time_is_put_in_force_without_a_restart() -> None:
    world = started()
    polled(world, report(tokens(7, HOUR)))
    faster = msgspec.structs.replace(INTERVAL, wake_interval_minutes=1)
    world.configs["work"] = msgspec.structs.replace(WORK, wake=faster, settings_digest="s2")
    row = world.begin("work")
    assert row.config == world.configs["work"]
    assert should_fire_wake(faster, row.schedule, NOW + 60) is not None


def test_the_first_start_leaves_past_times_alone_and_a_restart_catches_up() -> None:
    wake = WakeConfig(wake_modes=frozenset({WakeMode.TIMES}), wake_times=("17:30",))
    config = msgspec.structs.replace(WORK, wake=wake)
    world = started(config)
    assert NOW % 86_400 == 17 * HOUR + 36 * 60
    assert should_fire_wake(wake, world.row("work").schedule, NOW) is None
    world.now = NOW + 86_400
    assert should_fire_wake(wake, world.begin("work", starts=True).schedule, world.now) is not None


def test_standings_of_what_is_not_known_and_of_a_window_that_is_over() -> None:
    assert standing_of(WORK, SlotRow(name="work"), NOW).percent_used is None
    world = started(ASLEEP)
    polled(world, report(tokens(80, 600)), ASLEEP)
    now, later = (standing_of(ASLEEP, world.row("work"), at) for at in (NOW, NOW + 600))
    assert (now.percent_used, now.resets_at, now.closure) == (80, NOW + 600, None)
    assert (later.percent_used, later.resets_at, later.closure) == (0, None, None)


def test_a_pause_holds_tasks_until_its_end() -> None:
    world = started()
    polled(world, report(tokens(80, HOUR)))
    polled(world, failure(QuotaFailureKind.THROTTLED, retry_after_seconds=600))
    hold = standing_of(WORK, world.row("work"), NOW).closure
    assert hold is not None
    assert (hold.until, hold.why) == (NOW + 600, "paused, the provider asked for it, 80% used")
    assert standing_of(WORK, world.row("work"), NOW + 600).closure is None


def test_unchanged_readings_are_counted() -> None:
    world = started(ASLEEP)
    counts = []
    for percent in (7, 7, 7, 8, 8):
        polled(world, report(tokens(percent, HOUR)), ASLEEP)
        counts.append(world.row("work").schedule.unchanged_readings)
    assert counts == [0, 1, 2, 0, 1]


def test_a_reading_while_a_wake_is_pending_says_whether_it_worked() -> None:
    world = started()
    world.provider("work").wake_failure = failure(QuotaFailureKind.TIMEOUT)
    finish(world.quota_pass("work"))
    assert polled(world, report(tokens(0))).confirmation is Confirmation.NOT_CONFIRMED
    assert world.row("work").schedule.wake_errors == 1
    assert polled(world, report(tokens(1, 5 * HOUR))).confirmation is Confirmation.CONFIRMED
    assert world.row("work").schedule.wake_errors == 0
    assert polled(world, report(tokens(1, 5 * HOUR))).confirmation is Confirmation.NOT_PENDING


def test_steps_and_their_answers_can_be_sent_to_another_process() -> None:
    berlin = msgspec.structs.replace(INTERVAL, zone=ZoneInfo("Europe/Berlin"))
    config = msgspec.structs.replace(WORK, wake=berlin)
    step = pickle.loads(pickle.dumps(partial(begin, config=config, starts=True)))
    changed, row = step({}, NOW)
    assert changed == (row,)
    assert pickle.loads(pickle.dumps(row)) == row


def test_a_slot_that_is_reopened_lets_its_tasks_go_until_the_next_answer() -> None:
    config = SlotConfig(name="work", provider="zai")
    used_up = SlotReading(
        read_at=900.0,
        percent_used=100.0,
        resets_at=9_000.0,
        is_exhausted=True,
        exhausted_since=800.0,
    )
    paused = SlotSchedule(paused_until=5_000.0)
    row = SlotRow(name="work", schedule=paused, reading=used_up, config=config)
    closure = standing_of(config, row, 1_000.0).closure
    assert closure is not None
    assert (closure.cause, closure.by, closure.until) == ("provider", "zai", 5_000.0)
    exhausted = standing_of(config, msgspec.structs.replace(row, schedule=SlotSchedule()), 1_000.0)
    assert exhausted.closure is not None
    assert (exhausted.closure.since, exhausted.closure.until) == (800.0, 9_000.0)
    (changed,), after = reopen({"work": row}, 1_000.0, config=config)
    assert changed == after
    assert standing_of(config, after, 1_000.0).closure is None
    assert after.schedule.poll_requested, "and the provider is asked"
    assert standing_of(config, after, 1_000.0).percent_used is None, "nobody knows until it answers"
    off = msgspec.structs.replace(row, is_off=True)
    _, still = reopen({"work": off}, 1_000.0, config=config)
    closure = standing_of(config, still, 1_000.0).closure
    assert closure is not None
    assert closure.cause == "operator"
