"""One slot at work: what it is configured with, what is known of it, and how its key is used.

Rule: every use of the key is claimed in the store first, so that a store that cannot be asked means
that nothing is sent. Setup and row may change between any two awaits; each step goes by those that
it began with.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from headgate.core.slots.polling import (
    CLAIM_SECONDS,
    WakeCause,
    open_until,
    poll_due_at,
    wake_obstacle,
)
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaReport, WakeAnswer
from headgate.core.slots.slot import SlotConfig, SlotRow, SlotStanding, standing_of, why_off
from headgate.core.slots.steps import (
    MAX_PROBLEM_CHARS,
    PollDone,
    WakeClaim,
    WakeDone,
    begin,
    claim_poll,
    claim_wake,
    is_news,
    is_used_up,
    look,
    needs_look,
    observe,
    poll_done,
    refuse_key,
    reopen,
    switch,
    wake_done,
)
from headgate.core.slots.wakes import is_paused
from headgate.engine.slots import slot_log
from headgate.engine.slots.row_cache import SlotRowCache
from headgate.engine.slots.slot_log import SlotTrail
from headgate.engine.supervisor import Pulse
from headgate.errors import (
    InvalidSettingError,
    SlotUnavailableError,
    StoreError,
    StoreUnavailableError,
    WindowOpenError,
)
from headgate.providers.provider import Call, Provider
from headgate.redaction import redacted
from headgate.storage.audit import AuditEntry

# A sleep that can be ended: cheap, because every slot has two of them.


class Alarm:
    """Wakes one sleeper after some time, or when it rings."""

    __slots__ = ("_has_rung", "_sleeper")

    def __init__(self) -> None:
        self._has_rung = False
        self._sleeper: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the sleep, or the next one if nobody sleeps."""
        self._has_rung = True
        _wake(self._sleeper)

    async def sleep(self, seconds: float) -> None:
        """Sleep so long, or until it rings."""
        if not self._has_rung:
            loop = asyncio.get_running_loop()
            self._sleeper = loop.create_future()
            timer = loop.call_later(max(0.0, seconds), _wake, self._sleeper)
            try:
                await self._sleeper
            finally:
                timer.cancel()
                self._sleeper = None
        self._has_rung = False


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)


# What is configured for a slot while it runs, and what can be told of it.


def _no_mark() -> object:
    """Mark a key that stays for as long as the process does."""
    return None


class SlotSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One slot with all that it needs to run.

    `read_key` raises `InvalidSettingError` where the key cannot be read. It is asked for each
    request, so that a key file may be replaced, and no key is kept. `key_mark` is cheap, and
    returns something else once the key may be another. `key_place` is the variable or the file
    that has it. `config_for` returns the configuration with a key.
    """

    config: SlotConfig
    provider: Provider
    read_key: Callable[[], str]
    is_logging: bool = True
    key_place: str = ""
    key_mark: Callable[[], object] = _no_mark
    config_for: Callable[[str], SlotConfig] | None = None


class LoopHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a loop is doing on this node; times are Unix seconds.

    `problem` is empty while it does its work.
    """

    last_step_at: float | None = None
    restarts: int = 0
    problem: str = ""


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a slot.

    `polls` and `wakes` count by their outcome what this node has done since it started.
    """

    config: SlotConfig
    row: SlotRow
    standing: SlotStanding
    next_poll_at: float | None
    wake_loop: LoopHealth = LoopHealth()
    quota_loop: LoopHealth = LoopHealth()
    polls: dict[str, int] = {}
    wakes: dict[str, int] = {}


log = structlog.get_logger("headgate.slots")

RETRY_SECONDS = 2.0
"""When a loop looks again where another reads the quota, or the store could not be asked."""

ANSWER_SECONDS = 30.0
"""For so long a wake is waited for whose sender may have died."""

LOOK_SECONDS = 60.0

TOO_MANY_REQUESTS = 429
OBSERVE_SECONDS = 30.0
NEWS_SECONDS = 1.0
"""How often at most what real traffic tells of a quota is stored: anything, and what matters."""


class Shared(NamedTuple):
    """What the slots of a node have in common.

    `sharers` returns the configurations of all slots with the same key, the given one first.
    """

    rows: SlotRowCache
    trail_of: Callable[[str], SlotTrail]
    make_id: Callable[[], str]
    turns: asyncio.Semaphore
    sharers: Callable[[SlotConfig], tuple[SlotConfig, ...]]
    poll_soon: Callable[[Iterable[str]], None]
    changed: Callable[[], None]


ACTIONS: dict[WakeCause, str] = {
    "scheduled": "scheduled-wake",
    "initial": "initial-wake",
    "manual": "manual-wake",
    "retry": "forced-wake-retry",
}
"""What each kind of wake is called in the log of slots."""

PRE_CHECK_TRIES = 10
PRE_CHECK_PAUSE_SECONDS = 1.0


class KeySlot:
    """A slot of this node, with what its two loops share."""

    def __init__(self, setup: SlotSetup, shared: Shared) -> None:
        self.setup = setup
        self.shared = shared
        self.name = setup.config.name
        self.wake_alarm, self.quota_alarm = Alarm(), Alarm()
        self.wake_pulse, self.quota_pulse = Pulse(), Pulse()
        self.polls: Counter[str] = Counter()
        self.wakes: Counter[str] = Counter()
        self.quota_sleeps_until = float("inf")
        self._trail = shared.trail_of(self.name)
        self._reading: asyncio.Future[PollDone | None] | None = None
        self._begun: SlotConfig | None = None
        self._looked_at = float("-inf")
        self._is_looking = False
        self.observed_due_at = float("inf")
        self._response: tuple[int, Mapping[str, str], float] | None = None
        self._examined_at = float("-inf")
        self._has_limits = False
        self._observed: tuple[float, QuotaReport | QuotaFailure] | None = None
        self._observed_at = float("-inf")
        self._standing: SlotStanding | None = None
        # Equal to no mark, so that the first look is a real one.
        self._key_mark: object = object()

    @property
    def config(self) -> SlotConfig:
        """What the slot is configured with now."""
        return self.setup.config

    @property
    def row(self) -> SlotRow:
        """What is known of the slot."""
        return self.shared.rows.row(self.name)

    @property
    def is_on(self) -> bool:
        """Whether anything may be sent."""
        return not why_off(self.config, self.row)

    @property
    def trail(self) -> SlotTrail:
        """Where what happens is written, unless the slot is not to be logged."""
        return self._trail if self.setup.is_logging else SlotTrail(self.name)

    def now(self) -> float:
        """Return the time that all nodes go by."""
        return self.shared.rows.now()

    def reconfigure(self, setup: SlotSetup) -> None:
        """Go by another setup from the next step on, which comes at once."""
        self.setup = setup
        self.wake_alarm.ring()
        self.quota_alarm.ring()

    def look_at_key(self) -> None:
        """See whether the key was replaced, which costs next to nothing while it was not.

        One that cannot be read is no other key: it may be back, and the same, a moment later.
        """
        mark = self.setup.key_mark()
        if mark == self._key_mark:
            return
        self._key_mark = mark
        with suppress(InvalidSettingError):
            self._use_key(self.setup.read_key())

    async def begin(self) -> None:
        """Have the store know the configuration, if it does not yet."""
        config = self.config
        if config == self._begun:
            return
        step = partial(begin, config=config, starts=self._starts_with(config))
        try:
            await self.shared.rows.step((self.name,), step)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            if not await self.shared.rows.drop_unreadable(self.name):
                raise
            slot_log.from_nothing(self.trail, self.name, str(error))
            await self.shared.rows.step((self.name,), step)
        self._begun = config
        self.restate()

    def seen(self, row: SlotRow) -> None:
        """Take note of a row that has changed."""
        self.restate()
        due_at = self.next_poll_at(row)
        if due_at is not None and due_at < self.quota_sleeps_until:
            self.quota_alarm.ring()

    def restate(self) -> None:
        """Work out anew what the slot means for tasks, and tell if that is something else."""
        standing = standing_of(self.config, self.row, self.now())
        if standing != self._standing:
            self._standing = standing
            self.shared.changed()

    def standing(self) -> SlotStanding:
        """Return what the slot means for tasks."""
        return self._standing or standing_of(self.config, self.row, self.now())

    def read_soon(self) -> None:
        """Have the quota read soon, unless that was asked for within a minute."""
        now = self.now()
        if abs(now - self._looked_at) >= LOOK_SECONDS:
            self._looked_at = now
            self._is_looking = True
            self.quota_alarm.ring()

    def takes_look(self) -> bool:
        """Tell once whether somebody wants the quota to be read."""
        is_looking, self._is_looking = self._is_looking, False
        return is_looking

    def next_poll_at(self, row: SlotRow) -> float | None:
        """Return when the quota is read next; None if nobody will.

        While a wake is on its way a reading could not tell of it, so the poll waits for its answer.
        """
        now = self.now()
        due_at, sent_at = poll_due_at(self.config, row, now), row.schedule.last_wake_at
        if due_at is None or row.wake_claim is None or sent_at is None or sent_at > now:
            # One that lies ahead was sent before the clock went back.
            return due_at
        return max(due_at, sent_at + ANSWER_SECONDS)

    def observe(self, status: int, headers: Mapping[str, str], at: float) -> None:
        """Take note of a response that somebody got with this key; the quota loop stores it.

        Only the newest is read, once a second and at a refusal, so that traffic costs next to
        nothing. That a quota is used up is stored at once, what changes nothing but a percentage at
        most every half minute, and the rest within a second or two.
        """
        self._response = (status, headers, at)
        if status == TOO_MANY_REQUESTS or abs(at - self._examined_at) >= NEWS_SECONDS:
            self._examine()
        elif self._has_limits:
            self._store_by(min(self.observed_due_at, self._examined_at + NEWS_SECONDS))

    def _examine(self) -> None:
        """Read the newest response, and say by when what it tells is to be stored."""
        if self._response is None:
            return
        (status, headers, at), self._response = self._response, None
        self._examined_at = self.now()
        answer = self.setup.provider.read_response(status, headers, at)
        self._has_limits = answer is not None
        if answer is not None:
            self._observed = (at, answer)
        if self._observed is None:
            self.observed_due_at = float("inf")
            return
        told = (self.config, self.row, self._observed[1], at)
        if is_used_up(*told):
            self._store_by(self._examined_at)
        else:
            wait = NEWS_SECONDS if is_news(*told) else OBSERVE_SECONDS
            self._store_by(self._observed_at + wait)

    def _store_by(self, due_at: float) -> None:
        self.observed_due_at = due_at
        if due_at < self.quota_sleeps_until:
            self.quota_alarm.ring()

    async def store_observed(self) -> None:
        """Have the store know what responses to real traffic said, if that is due."""
        if self.now() < self.observed_due_at:
            return
        self._examine()
        if self._observed is None or self.now() < self.observed_due_at:
            return
        (at, answer), self._observed = self._observed, None
        self.observed_due_at, self._observed_at = float("inf"), self.now()
        step = partial(observe, config=self.config, answer=answer, at=at)
        done = await self.shared.rows.step((self.name,), step)
        if done.is_kept:
            self.polls["observed"] += 1
            slot_log.observed(self.trail, self.config, done)

    async def refuse_key(self, status: int, key: str) -> None:
        """Disable the slot: its provider refused the key to real traffic, if it has that one."""
        if self.setup.read_key() != key:
            return
        await self.begin()
        place = self.setup.key_place
        step = partial(refuse_key, config=self.config, status=status, key_place=place)
        row = await self.shared.rows.step((self.name,), step)
        if row is not None:
            slot_log.disabled(self.trail, self.name, row)
        self.restate()

    async def look(self) -> None:
        """Look after a slot that is not polled: whether its key is there, and its start."""
        try:
            self._use_key(self.setup.read_key())
            problem = ""
        except InvalidSettingError as error:
            problem = str(error)
        if problem or needs_look(self.row, self.now()):
            step = partial(look, config=self.config, key_problem=problem)
            await self.shared.rows.step((self.name,), step)

    async def poll(self, action: str, *, pulse: Pulse, is_forced: bool = False) -> PollDone | None:
        """Read the quota, and have the store know; None if another node does so just now.

        Whoever asks while this node reads for somebody else shares what comes of it.
        """
        if self._reading is not None:
            return await asyncio.shield(self._reading)
        self._reading = reading = asyncio.get_running_loop().create_future()
        try:
            done = await self._poll(action, pulse, is_forced=is_forced)
        except StoreError as error:
            reading.set_exception(error)
            # Nobody may share it, and then nobody looks.
            reading.exception()
            raise
        else:
            reading.set_result(done)
            return done
        finally:
            self._reading = None
            if not reading.done():
                reading.set_result(None)

    async def _poll(self, action: str, pulse: Pulse, *, is_forced: bool) -> PollDone | None:
        async with Turn(self.shared.turns, pulse):
            config, rows = self.config, self.shared.rows
            claiming = partial(
                claim_poll,
                config=config,
                claim_id=self.shared.make_id(),
                seconds=CLAIM_SECONDS,
                force=is_forced,
            )
            claim = await rows.step((self.name,), claiming)
            if claim is None:
                return None
            answer = await self._read_quota(action, claim.id)
            settling = partial(poll_done, config=config, claim_id=claim.id, answer=answer)
            done = await rows.step((self.name,), settling)
        self.polls["stale" if done.is_stale else done.outcome] += 1
        slot_log.polled(self.trail, config, done, flow_id=claim.id)
        return done

    async def send_wake(
        self, action: str, flow_id: str, *, pulse: Pulse, is_timely: Callable[[], bool]
    ) -> WakeAnswer | None:
        """Send a wake that has been claimed; None if it is too late when its turn comes."""
        async with Turn(self.shared.turns, pulse):
            setup = self.setup
            call = self._call(setup, action, flow_id)
            if isinstance(call, QuotaFailure):
                return WakeAnswer(failure=call)
            # Last of all, so that next to nothing can come between the look and the request.
            if not is_timely():
                return None
            try:
                answer = await setup.provider.wake(call)
            except Exception as error:
                log.exception("a provider failed", slot=self.name)
                answer = WakeAnswer(failure=_crashed(error))
        if answer.failure is None:
            return answer
        return msgspec.structs.replace(answer, failure=_told(answer.failure, call.key))

    def status(self) -> SlotStatus:
        """Return everything about the slot."""
        config, row, now = self.config, self.row, self.now()
        return SlotStatus(
            config=config,
            row=row,
            standing=standing_of(config, row, now),
            next_poll_at=self.next_poll_at(row),
            wake_loop=_health(self.wake_pulse),
            quota_loop=_health(self.quota_pulse),
            polls=dict(self.polls),
            wakes=dict(self.wakes),
        )

    async def claim_and_send(
        self, cause: WakeCause, *, pulse: Pulse, entry: AuditEntry | None = None
    ) -> tuple[WakeClaim | None, WakeDone | None]:
        """Send a wake unless there is no need any more; without a claim nothing was sent.

        It is claimed in the store, sent, and its answer stored. The process may die between any two
        of these: before the claim nothing has happened, after it the wake is pending, and its retry
        window sends it if no reading confirms it.
        """
        asked_at = time.monotonic()
        configs = self.shared.sharers(self.config)
        step = partial(
            claim_wake,
            configs=configs,
            name=self.name,
            cause=cause,
            claim_id=self.shared.make_id(),
        )
        claim = await self.shared.rows.step(tuple(one.name for one in configs), step, entry)
        if claim is None:
            return None, None
        return claim, await self.send_claimed(claim, asked_at=asked_at, pulse=pulse)

    async def send_claimed(
        self, claim: WakeClaim, *, asked_at: float, pulse: Pulse
    ) -> WakeDone | None:
        """Send what was claimed, and have the store know; None if another slot's wake serves it.

        `asked_at` is when the claim was asked for, by `time.monotonic`: the clock of a running loop
        may stand still within one of its rounds. A claim that has grown old, because the process or
        its machine stood still, is not sent: its retry sees to it.
        """
        if claim.is_shared:
            self.wakes["shared"] += 1
            slot_log.shared_wake(self.trail, self.name, claim)
            return None
        is_timely = partial(self._is_timely, claim, asked_at)
        answer = await self.send_wake(
            ACTIONS[claim.cause], claim.id, pulse=pulse, is_timely=is_timely
        )
        if answer is None:
            return self._unsent(claim)
        configs = self.shared.sharers(self.config)
        done = await self.shared.rows.step(
            tuple(one.name for one in configs),
            partial(wake_done, configs=configs, name=self.name, claim_id=claim.id, answer=answer),
        )
        self.wakes[done.outcome] += 1
        slot_log.woken(self.trail, self.name, claim, done)
        self.shared.poll_soon((self.name, *claim.also))
        return done

    async def warm(self, entry: AuditEntry | None) -> SlotStatus:
        """Wake a slot, unless a fresh reading shows that its window is open."""
        await self.begin()
        self._check_free()
        if self.config.wake.is_polled:
            needs_wake = (await self._pre_check()).needs_wake
        else:
            needs_wake = open_until(self.row, self.now()) is None
        self._check_free()
        if not needs_wake:
            raise self._needless()
        claim, done = await self.claim_and_send("manual", pulse=Pulse(), entry=entry)
        if claim is None:
            self._check_free()
            raise SlotUnavailableError(self.name, "somebody else woke it just now")
        if done is not None and done.is_stale and done.problem:
            raise SlotUnavailableError(self.name, f"the wake was {done.problem}")
        if done is not None and done.problem:
            raise SlotUnavailableError(self.name, f"the wake was sent and failed ({done.problem})")
        return self.status()

    async def switch(self, entry: AuditEntry | None, *, is_on: bool) -> SlotStatus:
        """Enable a slot, whatever had disabled it, or disable it."""
        await self.begin()
        step = partial(switch, config=self.config, is_on=is_on)
        await self.shared.rows.step((self.name,), step, entry)
        slot_log.switched(self.trail, self.name, is_on=is_on)
        self.restate()
        self.wake_alarm.ring()
        self.quota_alarm.ring()
        return self.status()

    async def reopen(self) -> SlotStatus:
        """Let its tasks start again, until an answer of the provider closes it."""
        await self.begin()
        await self.shared.rows.step((self.name,), partial(reopen, config=self.config))
        self.restate()
        self.quota_alarm.ring()
        return self.status()

    def _is_timely(self, claim: WakeClaim, asked_at: float) -> bool:
        """Tell by both clocks: one stands still while a machine sleeps, one can be set back."""
        took = time.monotonic() - asked_at
        return took < claim.send_within_seconds and self.now() < claim.send_before

    def _unsent(self, claim: WakeClaim) -> WakeDone:
        self.wakes["too_late"] += 1
        slot_log.unsent(self.trail, self.name, claim)
        problem = "not sent, because too much time had passed; its retry window sees to it"
        return WakeDone(row=self.row, outcome="too_late", is_stale=True, problem=problem)

    async def _pre_check(self) -> PollDone:
        for _ in range(PRE_CHECK_TRIES):
            done = await self.poll("manual-precheck", pulse=Pulse(), is_forced=True)
            if done is not None and not done.is_stale:
                return done
            self._check_free()
            await asyncio.sleep(PRE_CHECK_PAUSE_SECONDS)
        raise SlotUnavailableError(self.name, "its quota is being read just now")

    def _check_free(self) -> None:
        obstacle = wake_obstacle(self.config, self.row, self.now())
        if obstacle:
            schedule = self.row.schedule
            until = schedule.paused_until if is_paused(schedule, self.now()) else None
            raise SlotUnavailableError(self.name, obstacle, until=until)

    def _needless(self) -> WindowOpenError | SlotUnavailableError:
        reading, hold = self.row.reading, self.standing().closure
        if reading is not None and reading.is_exhausted and hold is not None:
            return SlotUnavailableError(self.name, hold.why, until=hold.until)
        return WindowOpenError(self.name, None if reading is None else reading.resets_at)

    def _starts_with(self, config: SlotConfig) -> bool:
        """Tell whether the slot begins with this configuration.

        One with a new mode does: on a cold key nothing might ever come due for it.
        """
        before = self._begun
        return before is None or bool(config.wake.wake_modes - before.wake.wake_modes)

    def _use_key(self, key: str) -> None:
        """Go by another configuration if this is another key: it has a window of its own."""
        setup = self.setup
        config = setup.config if setup.config_for is None else setup.config_for(key)
        if config.key_digest != setup.config.key_digest:
            self.trail.event("key-replaced")
            self.reconfigure(msgspec.structs.replace(setup, config=config))

    async def _read_quota(self, action: str, flow_id: str) -> QuotaReport | QuotaFailure:
        setup = self.setup
        call = self._call(setup, action, flow_id)
        if isinstance(call, QuotaFailure):
            return call
        try:
            answer = await setup.provider.read_quota(call)
        except Exception as error:
            log.exception("a provider failed", slot=self.name)
            answer = _crashed(error)
        return _told(answer, call.key) if isinstance(answer, QuotaFailure) else answer

    def _call(self, setup: SlotSetup, action: str, flow_id: str) -> Call | QuotaFailure:
        try:
            key = setup.read_key()
        except InvalidSettingError as error:
            self.trail.event("key-unreadable", flow_id, problem=str(error))
            return QuotaFailure(kind=QuotaFailureKind.NO_KEY, message=str(error))
        self._use_key(key)
        return Call(key=key, action=action, flow_id=flow_id, trail=self.trail.hiding(key))


class Turn:
    """One of the requests that may be under way at a time; waiting for it is no standing still."""

    def __init__(self, turns: asyncio.Semaphore, pulse: Pulse) -> None:
        self._turns = turns
        self._pulse = pulse

    async def __aenter__(self) -> None:
        self._pulse.wait()
        await self._turns.acquire()
        self._pulse.begin()

    async def __aexit__(self, *_: object) -> None:
        self._turns.release()


def _crashed(error: Exception) -> QuotaFailure:
    """Return the failure of a provider that raised: it counts as any other, and can be told."""
    message = f"the provider's part of this service failed: {type(error).__name__}"
    return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message=message)


def _told(failure: QuotaFailure, key: str) -> QuotaFailure:
    """Return a failure that may be kept and told: without the key, and on one short line."""
    line = " ".join(redacted(failure.message, (key,)).split())[:MAX_PROBLEM_CHARS]
    return msgspec.structs.replace(failure, message=line)


def _health(pulse: Pulse) -> LoopHealth:
    return LoopHealth(
        last_step_at=pulse.last_step_at, restarts=pulse.restarts, problem=pulse.problem
    )
