"""Why a task waits, as whoever asks is told: the rules that hold it, and the room of its slots."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from headgate.core.key_slots.slot import SlotStanding
from headgate.core.tasks.records import TaskRecord, slot_of
from headgate.core.tasks.task import TaskStatus
from headgate.core.why import Reason
from headgate.task_snapshot import moment

MAX_SLOTS_SHOWN = 100


class SlotRoom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How much of the quota of a slot is used, and when it resets; what is unknown is left out."""

    name: str
    provider: str | None = None
    percent_used: float | None = None
    resets_at: datetime | None = None


class Why(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Where a task stands, and each rule that keeps it waiting.

    `slot` is the one that it names or was given, `slots` those that it may be given.
    """

    task_id: str
    state: TaskStatus
    reasons: tuple[Reason, ...]
    slot: SlotRoom | None = None
    slots: tuple[SlotRoom, ...] = ()


def why_of(
    record: TaskRecord, standings: Iterable[SlotStanding], reasons: tuple[Reason, ...] = ()
) -> Why:
    """Return the answer about a task."""
    task = record.task
    is_open = task.provider is not None and task.status is TaskStatus.QUEUED
    slot = None if is_open and task.slot is None else slot_of(record)
    return Why(
        task_id=task.id,
        state=task.status,
        reasons=reasons,
        slot=None if slot is None else _named(slot, standings),
        slots=_of_provider(task.provider, standings) if slot is None and task.provider else (),
    )


def _named(name: str, standings: Iterable[SlotStanding]) -> SlotRoom:
    """Return what is known of a slot; a name that no configured slot has is only a name."""
    found = (_room(one) for one in standings if one.name == name)
    return next(found, SlotRoom(name=name))


def _of_provider(provider: str, standings: Iterable[SlotStanding]) -> tuple[SlotRoom, ...]:
    rooms = [_room(one) for one in standings if one.provider == provider]
    return tuple(rooms[:MAX_SLOTS_SHOWN])


def _room(standing: SlotStanding) -> SlotRoom:
    return SlotRoom(
        name=standing.name,
        provider=standing.provider,
        percent_used=standing.percent_used,
        resets_at=moment(standing.resets_at),
    )
