"""Slots in the store: steps, versions, the audit log, rows of other programs, what is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC
from functools import partial
from zoneinfo import ZoneInfo

import msgspec
import pytest

from headgate.core.slots.quota import QuotaLimit, QuotaReport
from headgate.core.slots.slot import Rows, SlotConfig, SlotRow
from headgate.core.slots.steps import begin, claim_poll, claim_wake, poll_done
from headgate.core.slots.wakes import SlotSchedule, WakeConfig, WakeMode
from headgate.errors import CallerError, StoreError
from headgate.storage import slot_rows
from headgate.storage.audit import Actor, AuditEntry, AuditLog
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.slot_rows import KEPT_SECONDS, SlotStore
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Fault
from storage.scene import Place

ENTRY = AuditEntry(actor=Actor(name="ada"), action="slot.disable", subject="work")


def config(name: str = "work", zone: str = "Europe/Berlin") -> SlotConfig:
    wake = WakeConfig(wake_modes=frozenset(WakeMode), wake_times=("09:00",), zone=ZoneInfo(zone))
    return SlotConfig(
        name=name, provider="zai", wake=wake, key_digest="k", settings_digest="s", limit_unit=3
    )


def renamed(rows: Rows, now: float, *, text: str) -> tuple[tuple[SlotRow, ...], float]:
    changed = tuple(
        msgspec.structs.replace(row, schedule=SlotSchedule(disabled_reason=text))
        for row in rows.values()
    )
    return changed, now


def refused(rows: Rows, now: float) -> tuple[tuple[SlotRow, ...], None]:
    raise CallerError(f"not {sorted(rows)}")


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[SqlTaskStore]:
    store = place.store()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def kept(slots: SlotStore, after: int = -1) -> dict[str, SlotRow]:
    return {row.name: row for row in await slots.rows(after)}


async def put(store: SqlTaskStore, name: str, text: str) -> None:
    await store.run(partial(_put, name=name, text=text))


def _put(transaction: Transaction, now: float, *, name: str, text: str) -> None:
    sql = "INSERT INTO slots (name, version, changed_at, kept) VALUES (?, 99, ?, ?)"
    transaction.run(sql, (name, now, text))


async def test_a_step_on_a_slot_that_nothing_is_kept_of_gets_an_empty_row(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        assert await slots.rows() == ()
        row = await slots.step(("work",), partial(begin, config=config(), starts=True))
        found = await kept(slots)
        assert found["work"] == msgspec.structs.replace(row, version=found["work"].version)
        assert found["work"].config == config()


async def test_everything_that_is_kept_of_a_slot_comes_back(place: Place) -> None:
    limit = QuotaLimit(
        type="TOKENS_LIMIT\0 \\u0000 é", unit="hours", percentage=7, next_reset_epoch_ms=2**52
    )
    answer = QuotaReport(level="pro", limits=(limit,))
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("work",), partial(begin, config=config(), starts=True))
        claim = partial(claim_poll, config=config(), claim_id="c1", seconds=90.0)
        assert await slots.step(("work",), claim) is not None
        done = await slots.step(
            ("work",), partial(poll_done, config=config(), claim_id="c1", answer=answer)
        )
        await slots.step(
            ("work",),
            partial(claim_wake, configs=(config(),), name="work", cause="manual", claim_id="w1"),
        )
        row = (await kept(slots))["work"]
        assert row.reading == done.row.reading
        assert row.wake_claim is not None
        assert row.wake_claim.id == "w1"
        assert row.schedule.wake_pending
        assert row.config == config()
    async with opened(place) as store:
        if place.kind != "memory":
            assert (await kept(SlotStore(store)))["work"] == row


async def test_versions_grow_across_slots_and_say_what_is_new(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("a", "b", "c"), partial(renamed, text="1"))
        first = await slots.rows()
        assert [row.version for row in first] == sorted({row.version for row in first})
        await slots.step(("b",), partial(renamed, text="2"))
        (changed,) = await slots.rows(after=first[-1].version)
        assert (changed.name, changed.schedule.disabled_reason) == ("b", "2")
        assert [row.name for row in await slots.rows()] == ["a", "c", "b"]
        assert await slots.rows(after=changed.version) == ()


async def test_versions_do_not_repeat_after_rows_were_forgotten(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("a",), partial(renamed, text="1"))
        (before,) = await slots.rows()
        place.clock.advance(KEPT_SECONDS + 1)
        assert await slots.forget(()) == 1
        await slots.step(("a",), partial(renamed, text="2"))
        (after,) = await slots.rows()
        assert after.version > before.version


async def test_a_step_that_changes_nothing_writes_nothing(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("work",), partial(begin, config=config()))
        (before,) = await slots.rows()
        await slots.step(("work",), partial(begin, config=config()))
        assert await slots.rows(after=before.version) == ()


async def test_what_a_step_raises_changes_nothing_and_reaches_the_caller(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        with pytest.raises(CallerError, match="not \\['work'\\]"):
            await slots.step(("work",), refused, ENTRY)
        assert await slots.rows() == ()
        assert (await AuditLog(store).page()).rows == ()


async def test_the_entry_of_the_audit_log_is_written_with_the_step(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("work",), partial(renamed, text="x"), ENTRY)
        (row,) = (await AuditLog(store).page()).rows
        assert (row.actor, row.action, row.subject) == ("ada", "slot.disable", "work")


async def test_of_two_nodes_that_claim_at_the_same_time_one_gets_it(place: Place) -> None:
    one, two = place.store(), place.store()
    async with opened(place) as store:
        await SlotStore(store).step(("work",), partial(begin, config=config(), starts=True))
        await one.open()
        await two.open()
        try:
            claims = await asyncio.gather(
                *(
                    SlotStore(node).step(
                        ("work",),
                        partial(claim_poll, config=config(), claim_id=f"c{number}", seconds=90.0),
                    )
                    for number, node in enumerate((one, two) * 5)
                )
            )
        finally:
            await one.close()
            await two.close()
        assert len([claim for claim in claims if claim is not None]) == 1


async def test_fields_of_a_newer_program_are_passed_over(place: Place) -> None:
    text = (
        '{"schedule": {"wake_errors": 3, "mood": "good"}, "reading": {"read_at": 1, "new": [1]},'
        ' "config": {"name": "work", "provider": "zai", "x": 1}, "start": "dance", "y": {}}'
    )
    async with opened(place) as store:
        await put(store, "work", text)
        row = (await kept(SlotStore(store)))["work"]
        assert row.schedule.wake_errors == 3
        assert row.reading is not None
        assert row.config is not None
        assert row.start == ""


async def test_a_reading_or_configuration_that_cannot_be_read_is_as_none(place: Place) -> None:
    text = (
        '{"schedule": {"wake_errors": 3}, "reading": {"read_at": "soon"},'
        ' "config": {"name": "work", "provider": "zai", "wake": {"wake_modes": ["lunar"]}}}'
    )
    async with opened(place) as store:
        await put(store, "work", text)
        slots = SlotStore(store)
        row = (await kept(slots))["work"]
        assert (row.reading, row.config, row.schedule.wake_errors) == (None, None, 3)
        row = await slots.step(("work",), partial(begin, config=config(), starts=True))
        assert row.schedule.wake_errors == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schedule": {"wake_errors": "many"}}'])
async def test_a_row_that_cannot_be_read_is_named_and_the_others_still_work(
    place: Place, text: str
) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await put(store, "work", text)
        await slots.step(("home",), partial(begin, config=config("home")))
        assert set(await kept(slots)) == {"home"}
        with pytest.raises(StoreError, match="slot 'work': what is kept of it cannot be read"):
            await slots.step(("work",), partial(begin, config=config()))
        assert await slots.drop_unreadable("work")
        await slots.step(("work",), partial(begin, config=config()))
        assert not await slots.drop_unreadable("work")
        assert not await slots.drop_unreadable("nowhere")
        assert set(await kept(slots)) == {"home", "work"}


async def test_a_zone_that_is_not_known_any_more_is_no_error(place: Place) -> None:
    wake = '{"wake_modes": ["times"], "wake_times": ["09:00"], "zone": "Mars/Olympus"}'
    text = f'{{"schedule": {{}}, "config": {{"name": "w", "provider": "z", "wake": {wake}}}}}'
    async with opened(place) as store:
        await put(store, "work", text)
        row = (await kept(SlotStore(store)))["work"]
        assert row.config is not None
        assert row.config.wake.zone is UTC


async def test_slots_that_are_not_configured_are_forgotten_after_thirty_days(place: Place) -> None:
    async with opened(place) as store:
        slots = SlotStore(store)
        await slots.step(("old", "kept", "it's"), partial(renamed, text="1"))
        place.clock.advance(KEPT_SECONDS + 1)
        await slots.step(("new",), partial(renamed, text="1"))
        assert await slots.forget(("kept", "it's")) == 1
        assert set(await kept(slots)) == {"kept", "it's", "new"}
        assert await slots.forget(()) == 2


async def test_the_number_of_rows_is_bounded_by_what_is_configured(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_rows, "MAX_KEPT", 3)
    async with opened(place) as store:
        slots = SlotStore(store)
        for name in "abcde":
            place.clock.advance(1)
            await slots.step((name,), partial(renamed, text="1"))
        assert await slots.forget(("a",)) == 2
        assert set(await kept(slots)) == {"a", "d", "e"}


async def test_a_claim_whose_reply_gets_lost_is_answered_as_if_it_had_not() -> None:
    faults: list[Fault | None] = []
    store = MemoryTaskStore(faults=lambda: faults.pop() if faults else None)
    await store.open()
    slots = SlotStore(store)
    await slots.step(("work",), partial(begin, config=config(), starts=True))
    faults.append(Fault.REPLY_LOST)
    poll = partial(claim_poll, config=config(), claim_id="c1", seconds=90.0)
    assert await slots.step(("work",), poll) is not None
    faults.append(Fault.REPLY_LOST)
    wake = partial(claim_wake, configs=(config(),), name="work", cause="manual", claim_id="w1")
    claim = await slots.step(("work",), wake)
    assert claim is not None
    assert not claim.is_shared
    assert not faults
    await store.close()
