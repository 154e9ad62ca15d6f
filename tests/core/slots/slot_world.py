"""Slots without a runtime: rows, nodes that may die between any two steps, and a provider.

A node's loops are generators that yield wherever a process can die: after a claim and before the
request leaves, after the request and before its answer is stored. Whoever drives them goes on with
one, interleaves two, or drops one, which is a crash. The world takes note of every trigger that is
served, and of every wake that is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

from headgate.core.slots.polling import (
    WakeCause,
    due_wake,
    may_open_window,
    poll_due_at,
    window_is_over,
)
from headgate.core.slots.quota import QuotaFailure, QuotaLimit, QuotaReport, WakeAnswer
from headgate.core.slots.slot import Rows, SlotConfig, SlotRow
from headgate.core.slots.steps import (
    PollDone,
    WakeClaim,
    begin,
    claim_poll,
    claim_wake,
    close_window,
    look,
    observe,
    poll_done,
    skip_wake,
    wake_done,
)
from headgate.core.slots.wakes import WakeMode, due_trigger
from headgate.storage.slot_rows import Step

Answer = TypeVar("Answer")
Life = Generator[None, None, None]

CLAIM_SECONDS = 90.0
WINDOW_SECONDS = 5 * 3600.0


class FakeProvider:
    """A key's window: cold until somebody wakes it, then open for five hours."""

    def __init__(self) -> None:
        self.open_until: float | None = None
        self.percent = 7.0
        self.failure: QuotaFailure | None = None
        self.wake_failure: QuotaFailure | None = None
        self.polls = 0
        self.wakes: list[float] = []

    def read_quota(self, now: float) -> QuotaReport | QuotaFailure:
        self.polls += 1
        if self.failure is not None:
            return self.failure
        is_open = self.open_until is not None and self.open_until > now
        reset_ms = int((self.open_until or 0) * 1000) if is_open else None
        percent = self.percent if is_open else 0.0
        row = QuotaLimit(type="TOKENS_LIMIT", percentage=percent, next_reset_epoch_ms=reset_ms)
        return QuotaReport(limits=(row,))

    def wake(self, now: float) -> WakeAnswer:
        self.wakes.append(now)
        if self.wake_failure is not None:
            return WakeAnswer(failure=self.wake_failure)
        self.open_if_cold(now)
        return WakeAnswer()

    def open_if_cold(self, now: float) -> None:
        if self.open_until is None or self.open_until <= now:
            self.open_until = now + WINDOW_SECONDS


class World:
    """The rows of all slots, the time, and what happened."""

    def __init__(self, now: float, configs: tuple[SlotConfig, ...]) -> None:
        self.now = now
        self.configs = {config.name: config for config in configs}
        self.rows: Rows = {}
        self.providers = {config.key_digest: FakeProvider() for config in configs}
        self.served: Counter[tuple[str, WakeMode, str]] = Counter()
        self.sent: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.unsent: set[str] = set()
        self.markers: dict[str, list[str]] = {config.name: [] for config in configs}
        self._ids = 0

    def new_id(self) -> str:
        self._ids += 1
        return f"id-{self._ids}"

    def row(self, name: str) -> SlotRow:
        return self.rows.get(name) or SlotRow(name=name)

    def provider(self, name: str) -> FakeProvider:
        return self.providers[self.configs[name].key_digest]

    def sharers(self, name: str) -> tuple[SlotConfig, ...]:
        own = self.configs[name]
        others = [
            config
            for config in self.configs.values()
            if config.key_digest == own.key_digest and config.name != name
        ]
        return (own, *others)

    def step(self, names: tuple[str, ...], step: Step[Answer]) -> Answer:
        changed, answer = step({name: self.row(name) for name in names}, self.now)
        for row in changed:
            assert row.name in names
            self._note(self.row(row.name), row)
            self.rows[row.name] = row
        return answer

    def _note(self, before: SlotRow, after: SlotRow) -> None:
        """Take note of the triggers that this change has served, and of wakes to be sent."""
        if after.wake_claim is not None and after.wake_claim != before.wake_claim:
            self.unsent.add(before.name)
        was_retried = before.schedule.wake_timeout_retry_fired
        is_confirmed = after.schedule.last_confirmed_at != before.schedule.last_confirmed_at
        if is_confirmed or (was_retried and not after.schedule.wake_pending):
            self.unsent.discard(before.name)
        config = self.configs[before.name]
        trigger = due_trigger(config.wake, before.schedule, self.now)
        for each in () if trigger is None else (trigger, *trigger.also_due):
            field = {
                WakeMode.INTERVAL: "last_interval_fire",
                WakeMode.TIMES: "times_served_until",
                WakeMode.AFTER_RESET: "last_reset_marker",
            }[each.mode]
            value = getattr(after.schedule, field)
            if value != getattr(before.schedule, field) and value is not None:
                self.served[before.name, each.mode, each.marker] += 1
                self.markers[before.name].append(each.marker)

    def begin(self, name: str, *, starts: bool = False) -> SlotRow:
        return self.step((name,), partial(begin, config=self.configs[name], starts=starts))

    def quota_pass(self, name: str) -> Life:
        """Do what the quota loop does when it comes round."""
        config = self.configs[name]
        due_at = poll_due_at(config, self.row(name), self.now)
        if not config.wake.is_polled:
            self.step((name,), partial(look, config=config))
        elif due_at is not None and due_at <= self.now:
            yield from self.poll(name)
        if self.row(name).start == "wake":
            yield from self._wake(name, self._claim(name, "initial"))

    def wake_pass(self, name: str) -> Life:
        """Do what the wake loop does when it comes round."""
        config, row = self.configs[name], self.row(name)
        if window_is_over(config, row, self.now):
            yield from self._end_window(name)
            return
        due = due_wake(config, row, self.now)
        if due is None or due.trigger is None:
            return
        if not config.wake.is_polled:
            if may_open_window(row, self.now):
                yield from self._wake(name, self._claim(name, "scheduled"))
            else:
                self.step((name,), partial(skip_wake, config=config, marker=due.trigger.marker))
            return
        done = yield from self.poll(name, force=True)
        if done is None or done.is_stale:
            return
        if done.needs_wake:
            yield from self._wake(name, self._claim(name, "scheduled"))
        else:
            marker = due.trigger.marker
            self.step((name,), partial(skip_wake, config=config, marker=marker))

    def see_traffic(self, name: str) -> None:
        """Have somebody use the key, whose answer tells the window that it opened."""
        config, provider = self.configs[name], self.provider(name)
        if provider.failure is None:
            provider.open_if_cold(self.now)
            answer = provider.read_quota(self.now)
            self.step((name,), partial(observe, config=config, answer=answer, at=self.now))

    def poll(self, name: str, *, force: bool = False) -> Generator[None, None, PollDone | None]:
        config, claim_id = self.configs[name], self.new_id()
        claim = self.step(
            (name,),
            partial(
                claim_poll, config=config, claim_id=claim_id, seconds=CLAIM_SECONDS, force=force
            ),
        )
        if claim is None:
            return None
        yield
        answer = self.provider(name).read_quota(self.now)
        yield
        done = self.step(
            (name,), partial(poll_done, config=config, claim_id=claim_id, answer=answer)
        )
        yield
        return done

    def _claim(self, name: str, cause: WakeCause) -> Callable[[str], WakeClaim | None]:
        def claim(claim_id: str) -> WakeClaim | None:
            configs = self.sharers(name)
            step = partial(claim_wake, configs=configs, name=name, cause=cause, claim_id=claim_id)
            return self.step(tuple(config.name for config in configs), step)

        return claim

    def _wake(self, name: str, claim: Callable[[str], WakeClaim | None]) -> Life:
        claim_id = self.new_id()
        claimed = claim(claim_id)
        if claimed is not None and not claimed.is_shared:
            yield from self._send(name, claim_id)

    def _end_window(self, name: str) -> Life:
        claim_id, configs = self.new_id(), self.sharers(name)
        step = partial(close_window, configs=configs, name=name, claim_id=claim_id)
        done = self.step(tuple(config.name for config in configs), step)
        if done.claim is not None:
            self.retries[name] += 1
            if not done.claim.is_shared:
                yield from self._send(name, claim_id)

    def _send(self, name: str, claim_id: str) -> Life:
        configs = self.sharers(name)
        yield
        self.sent[claim_id] += 1
        self.unsent -= {config.name for config in configs}
        answer = self.provider(name).wake(self.now)
        yield
        step = partial(wake_done, configs=configs, name=name, claim_id=claim_id, answer=answer)
        self.step(tuple(config.name for config in configs), step)
        yield

    def minute(self, name: str) -> None:
        """Let both loops come round once, undisturbed."""
        finish(self.wake_pass(name))
        finish(self.quota_pass(name))

    def run(self, minutes: int) -> None:
        """Let both loops of every slot come round every minute."""
        for _ in range(minutes):
            for name in self.configs:
                self.minute(name)
            self.now += 60.0


def finish(life: Generator[None, None, object]) -> None:
    """Go on with a loop until its pass is over."""
    for _ in life:
        pass
