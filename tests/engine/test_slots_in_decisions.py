"""Slots and the engine: their tasks wait with a reason and a time, and start when there is room."""

from __future__ import annotations

import asyncio

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
    slow_down = Limited(retry_after_seconds=300.0, error="slow down")

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

    slow_down = Limited(retry_after_seconds=300.0)
    assert 300 <= play(scenario, in_turn((1.0, slow_down), (1.0, DONE))) <= 303
