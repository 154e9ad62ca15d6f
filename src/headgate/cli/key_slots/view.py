"""A slot as people read it: one line of a table, or everything that is known."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from headgate.cli.times import clock_time, countdown, from_now, has_come
from headgate.core.key_slots.wake_words import ENDED, ended_words, reason_words
from headgate.core.texts.printable import printable

if TYPE_CHECKING:
    from headgate.bodies.slots import LimitBody, LoopBody, NextWakeBody, SlotBody

HEADER = ("slot", "state", "used", "resets in", "next wake", "confirmed", "errors")
WHOLE = ("slot", "state", "used", "resets in", "confirmed")


def row_of(slot: SlotBody) -> tuple[str, ...]:
    """Return one line of a table of slots."""
    return (
        slot.name,
        slot.state,
        percent(slot.percent_used),
        "" if slot.resets_at is None else _reset_soon(slot.resets_at),
        _wake_soon(slot),
        _confirmation(slot),
        _errors(slot),
    )


def holds_of(slots: Sequence[SlotBody]) -> list[str]:
    """Return a line for each slot whose tasks wait; a column would have no room for it."""
    return [printable(f"  tasks of {one.name} wait: {_hold(one)}") for one in slots if one.hold]


def lines_of(slot: SlotBody) -> list[str]:
    """Return everything that is known of a slot, a line for each thing."""
    found = [(name, text) for name, text in _facts(slot) if text]
    width = max(len(name) for name, _ in found)
    lines = [f"{name:<{width}}  {printable(text)}" for name, text in found]
    return lines + [f"{'limit':<{width}}  {printable(_limit(one))}" for one in slot.limits]


def percent(value: float | None) -> str:
    """Return how much is used, without decimals that nobody needs."""
    return "" if value is None else f"{value:.1f}".removesuffix(".0") + "%"


def _facts(slot: SlotBody) -> list[tuple[str, str]]:
    return [
        ("slot", slot.name),
        ("provider", slot.provider),
        ("plan", slot.level or ""),
        ("state", slot.state),
        ("reason", "" if slot.hold == slot.disabled_reason else slot.disabled_reason),
        ("holds tasks", _hold(slot)),
        ("used", percent(slot.percent_used)),
        ("resets", _reset(slot.resets_at)),
        ("read", _at(slot.read_at)),
        ("next poll", _at(slot.next_poll_at)),
        ("wake modes", ", ".join(slot.wake_modes) or "none: it is never woken"),
        ("next wake", _wake(slot.next_wake)),
        ("last wake", _at(slot.last_wake_at)),
        ("confirmed", _confirmation(slot)),
        ("errors", _errors(slot) or "none"),
        ("last error", slot.last_error),
        ("wake loop", _loop(slot.wake_loop)),
        ("quota loop", _loop(slot.quota_loop)),
    ]


def _hold(slot: SlotBody) -> str:
    if not slot.hold or slot.held_until is None:
        return slot.hold
    return f"{slot.hold}, until {_at(slot.held_until)}"


def _reset_soon(resets_at: datetime) -> str:
    return ENDED if has_come(resets_at) else countdown(resets_at)


def _reset(resets_at: datetime | None) -> str:
    if resets_at is None or not has_come(resets_at):
        return _at(resets_at)
    return ended_words(from_now(resets_at))


def _wake_soon(slot: SlotBody) -> str:
    wake = slot.next_wake
    if wake is not None:
        return f"{countdown(wake.at)}: {wake.mode}"
    if not slot.wake_modes:
        return "never"
    return "" if slot.wakes_enabled else "disabled"


def _wake(wake: NextWakeBody | None) -> str:
    if wake is None:
        return ""
    # What is due is being checked, or waits for its turn; how late it is says nothing.
    at = "now" if has_come(wake.at) else _at(wake.at)
    return f"{at}: {reason_words(wake.reason)}"


def _confirmation(slot: SlotBody) -> str:
    if slot.wake_pending:
        return "pending"
    return "" if slot.last_confirmed_at is None else from_now(slot.last_confirmed_at)


def _errors(slot: SlotBody) -> str:
    counted = (("poll", slot.poll_errors), ("wake", slot.wake_errors))
    return ", ".join(f"{count} {noun}" for noun, count in counted if count)


def _loop(loop: LoopBody | None) -> str:
    if loop is None or (loop.last_step_at is None and not loop.problem):
        return ""
    seen = "" if loop.last_step_at is None else f"seen {from_now(loop.last_step_at)}"
    times = "once" if loop.restarts == 1 else f"{loop.restarts} times"
    restarts = f"restarted {times}" if loop.restarts else ""
    return ", ".join(part for part in (seen, restarts, loop.problem) if part)


def _limit(limit: LimitBody) -> str:
    unit = "" if limit.unit is None else f"unit {limit.unit}"
    resets = "" if limit.resets_at is None else _limit_reset(limit.resets_at)
    used = "" if limit.percent_used is None else f"{percent(limit.percent_used)} used"
    return ", ".join(part for part in (limit.type, unit, used, resets) if part)


def _limit_reset(resets_at: datetime) -> str:
    return f"{ENDED if has_come(resets_at) else 'resets'} {_at(resets_at)}"


def _at(moment: datetime | None) -> str:
    return "" if moment is None else f"{clock_time(moment)} ({from_now(moment)})"
