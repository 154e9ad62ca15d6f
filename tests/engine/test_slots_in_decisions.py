"""Slots and the engine: their tasks wait with a reason and a time, and start when there is room."""

from __future__ import annotations

import asyncio

import pytest

from engine.one_service import Service, play
from engine.simulated_work import DONE, always, in_turn
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import Limited
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import TaskStatus
from headgate.core.task_view import moment, snapshot_of
from headgate.engine.engine import SlotRoom

WINDOW_SECONDS = 60.0
USED_UP = "exhausted, 100% used"


def open_slot(name: str, percent: float | None = None) -> SlotStanding:
    return SlotStanding(name=name, provider="zai", percent_used=percent)


def used_up(service: Service, name: str, seconds: float = WINDOW_SECONDS) -> SlotStanding:
    until = service.now() + seconds
    hold = GateClosure(kind="slot", name=name, until=until, why=USED_UP)
    return SlotStanding(
        name=name, provider="zai", closure=hold, percent_used=100.0, resets_at=until
    )


def set_slots(service: Service, *standings: SlotStanding) -> None:
    service.engine.dispatcher.set_slots(standings)


def slots_given(service: Service) -> list[str | None]:
    return [order.slot for order in service.executor.orders]


def test_an_exhausted_slot_holds_its_tasks_with_reason_and_time_and_others_run_on() -> None:
    async def scenario(service: Service) -> None:
        held = used_up(service, "work")
        set_slots(service, held, open_slot("home", 5.0))
        waiting = await service.submit(slot="work")
        for fields in ({"slot": "home"}, {"provider": "zai"}, {}):
            await service.ended(await service.submit(**fields))
        why = await service.engine.why(waiting)
        assert why is not None
        (reason,) = why.reasons
        assert reason.until == held.resets_at
        assert USED_UP in reason.message
        room = SlotRoom(
            name="work", provider="zai", percent_used=100.0, resets_at=moment(held.resets_at)
        )
        assert (why.slot, why.slots) == (room, ())
        await asyncio.sleep(2 * WINDOW_SECONDS)
        assert waiting not in service.ordered(), "only a poll shows the reset"
        set_slots(service, open_slot("work", 0.0), open_slot("home", 5.0))
        record = await service.ended(waiting, within_seconds=2.0)
        assert snapshot_of(record).slot == "work"

    play(scenario, always(0.5))


def test_a_held_slot_does_not_make_the_dispatcher_spin() -> None:
    async def scenario(service: Service) -> int:
        set_slots(service, used_up(service, "work", seconds=-1.0))
        await service.submit(slot="work")
        await service.submit(provider="zai")
        rounds = 0
        run_once = service.engine.dispatcher.run_once

        async def counted() -> bool:
            nonlocal rounds
            rounds += 1
            return await run_once()

        service.engine.dispatcher.run_once = counted  # type: ignore[method-assign]
        await asyncio.sleep(100)
        return rounds

    assert play(scenario) < 300


def test_a_task_of_a_provider_shows_its_slots_while_it_waits_and_the_one_it_got() -> None:
    async def scenario(service: Service) -> None:
        set_slots(service, used_up(service, "a"), used_up(service, "b"))
        task_id = await service.submit(provider="zai")
        why = await service.engine.why(task_id)
        assert why is not None
        assert (why.slot, [room.name for room in why.slots]) == (None, ["a", "b"])
        assert "a (exhausted, 100% used), b (exhausted" in why.reasons[0].message
        waiting = snapshot_of(await service.get(task_id))
        assert (waiting.slot, waiting.provider) == (None, "zai")
        set_slots(service, used_up(service, "a"), open_slot("b", 3.0))
        record = await service.ended(task_id)
        assert slots_given(service) == ["b"]
        assert (snapshot_of(record).slot, snapshot_of(record).provider) == ("b", "zai")
        why = await service.engine.why(task_id)
        assert why is not None
        assert (why.slot, why.slots) == (SlotRoom(name="b", provider="zai", percent_used=3.0), ())

    play(scenario)


def test_a_429_pauses_the_slot_that_was_given_and_nothing_else() -> None:
    paused: list[str] = []
    slow_down = Limited(retry_after_seconds=300.0, error="slow down", slot="a")

    async def scenario(service: Service) -> None:
        service.engine.feed.subscribe(paused_slots=paused.append)
        set_slots(service, open_slot("a", 5.0), open_slot("b", 50.0))
        first = await service.submit(provider="zai")
        record = await service.ended(first, within_seconds=5.0)
        assert paused == ["a"], "whoever polls it is told"
        assert slots_given(service) == ["a", "b"], "it went on with another slot"
        assert record.task.status is TaskStatus.DONE
        named = await service.submit(slot="a")
        why = await service.engine.why(named)
        assert why is not None
        assert [reason.message.partition(", until")[0] for reason in why.reasons] == [
            "slot a is closed: slow down, 5% used"
        ]
        await service.ended(named)
        assert service.now() >= (why.reasons[0].until or 0.0) > 0.0, "it had to wait"

    play(scenario, in_turn((1.0, slow_down), (1.0, DONE)))


def test_a_dispatcher_that_reads_everything_anew_still_knows_its_slots() -> None:
    async def scenario(service: Service) -> None:
        set_slots(service, used_up(service, "work"))
        task_id = await service.submit(slot="work")
        dispatcher = service.engine.dispatcher
        dispatcher._start_anew()
        await asyncio.sleep(20)
        assert dispatcher.dispatch_state is not None
        assert task_id not in service.ordered()
        set_slots(service, open_slot("work"))
        await service.ended(task_id)

    play(scenario)


def test_a_node_that_is_elected_later_goes_by_the_latest_standings() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        for engine in service.engines:
            engine.dispatcher.set_slots((used_up(service, "work"),))
        task_id = await service.submit(slot="work")
        await service.engine.stop(drain_seconds=0.0)
        service.engines.remove(service.engine)
        service.engine = other
        await asyncio.sleep(60)
        assert other.dispatcher.is_leading
        assert (await service.get(task_id)).task.status is TaskStatus.QUEUED
        other.dispatcher.set_slots((open_slot("work"),))
        await service.ended(task_id)

    play(scenario)


def test_a_task_of_a_provider_waits_where_its_only_slot_asked_for_a_pause() -> None:
    async def scenario(service: Service) -> float:
        set_slots(service, open_slot("only"))
        started = service.now()
        await service.ended(await service.submit(provider="zai"))
        return service.now() - started

    slow_down = Limited(retry_after_seconds=300.0, slot="only")
    assert 300 <= play(scenario, in_turn((1.0, slow_down), (1.0, DONE))) <= 303


def test_a_pause_of_a_slot_ends_with_its_window() -> None:
    async def scenario(service: Service) -> float:
        resets_at = service.now() + 200.0
        set_slots(service, SlotStanding(name="work", provider="zai", resets_at=resets_at))
        started = service.now()
        await service.ended(await service.submit(slot="work"))
        return service.now() - started

    a_day = Limited(retry_after_seconds=86_400.0, slot="work")
    assert 200 <= play(scenario, in_turn((1.0, a_day), (1.0, DONE))) <= 205


def test_an_operator_opens_what_an_answer_closed_and_its_tasks_go_on() -> None:
    async def scenario(service: Service) -> None:
        set_slots(service, open_slot("work"))
        task_id = await service.submit(slot="work")
        await service.running(task_id)
        await asyncio.sleep(2.0)
        (closure,) = await service.engine.closures()
        assert (closure.kind, closure.name, closure.cause) == ("slot", "work", "provider")
        assert (closure.task_id, closure.by) == (task_id, "")
        assert closure.since == pytest.approx(service.now(), abs=3.0)
        assert closure.until == pytest.approx((closure.since or 0.0) + 3_600)
        assert await service.engine.open_gate(closure.part)
        await service.ended(task_id, within_seconds=5.0)
        assert await service.engine.closures() == ()
        assert not await service.engine.open_gate(closure.part), "it was open"

    a_day = Limited(retry_after_seconds=86_400.0, slot="work")
    play(scenario, in_turn((1.0, a_day), (1.0, DONE)))


def test_a_gate_that_another_node_opens_is_open_for_the_one_that_dispatches() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        task_id = await service.submit(target="t")
        await service.running(task_id)
        await asyncio.sleep(2.0)
        (closure,) = await other.closures()
        assert (closure.kind, closure.name, closure.cause) == ("target", "t", "target")
        assert await other.open_gate(closure.part)
        await service.ended(task_id, within_seconds=10.0)

    an_hour = Limited(retry_after_seconds=3_600.0)
    play(scenario, in_turn((1.0, an_hour), (1.0, DONE)))


def test_only_the_projects_that_a_slot_is_for_are_given_it() -> None:
    async def scenario(service: Service) -> None:
        mine = SlotStanding(name="mine", provider="zai", percent_used=1.0, projects=("x",))
        set_slots(service, mine, open_slot("all", 50.0))
        own = await service.submit(provider="zai", project_id="x")
        other = await service.submit(provider="zai", project_id="y")
        await service.ended(own)
        await service.ended(other)
        given = {order.task_id: order.slot for order in service.executor.orders}
        assert given == {own: "mine", other: "all"}
        set_slots(service, mine)
        kept = [
            await service.submit(provider="zai", project_id="y"),
            await service.submit(slot="mine", project_id="y"),
        ]
        await service.ended(await service.submit(slot="mine", project_id="x"))
        for task_id, what in zip(kept, ("any slot of zai", "slot mine"), strict=True):
            why = await service.engine.why(task_id)
            assert why is not None
            (reason,) = why.reasons
            assert f"project y may not use {what}" in reason.message
            assert "mine" not in [room.name for room in why.slots]
        set_slots(service, SlotStanding(name="mine", provider="zai"))
        for task_id in kept:
            await service.ended(task_id, within_seconds=10.0)

    play(scenario)


def test_a_project_waits_while_the_slots_that_it_may_use_are_closed() -> None:
    async def scenario(service: Service) -> None:
        closed = used_up(service, "all")
        set_slots(service, SlotStanding(name="mine", provider="zai", projects=("x",)), closed)
        waiting = await service.submit(provider="zai", project_id="y")
        await service.ended(await service.submit(provider="zai", project_id="x"))
        assert waiting not in service.ordered()
        why = await service.engine.why(waiting)
        assert why is not None
        (reason,) = why.reasons
        assert "mine" not in reason.message, "it is not told of what it may not use"
        set_slots(service, open_slot("all"))
        await service.ended(waiting, within_seconds=10.0)

    play(scenario)
