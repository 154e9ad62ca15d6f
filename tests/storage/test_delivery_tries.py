"""The latest tries of a delivery, in every store: when, how long, what came back, and how many."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from headgate.storage import deliveries as delivery_rows
from headgate.storage import schema as delivery_schema
from headgate.storage.deliveries import (
    MAX_KEPT_TRIES,
    Deliveries,
    Delivery,
    DeliveryQuery,
    DeliveryTry,
    TryOutcome,
    get,
    settle,
)
from headgate.storage.schema import DELIVERY_ROWS
from headgate.storage.sql_store import migrate_all
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import delivery_row
from storage.scene import Place, Scene
from storage.tables import DIALECTS, fresh_tables
from storage.test_deliveries import HOOK, ME, OTHER, arrived, claimed, failed

BEYOND = 1e10


async def filed(scene: Scene) -> Deliveries:
    """End a task that somebody is to be told of."""
    await scene.run("t1", terms=HOOK)
    await scene.settle("t1")
    return Deliveries(scene.store)


async def tried(scene: Scene, deliveries: Deliveries, **fields: object) -> None:
    """Try once, an hour after the last time."""
    await scene.let_time_pass(3_600)
    await deliveries.claim(["msg_t1"], claimed_by=ME, seconds=30.0)
    outcome = TryOutcome(id="msg_t1", claimed_by=ME, has_arrived=False, due_at=scene.clock())
    await deliveries.settle(msgspec.structs.replace(outcome, **fields))


async def tries_of(deliveries: Deliveries) -> tuple[DeliveryTry, ...]:
    found = await deliveries.get("msg_t1")
    assert found is not None
    return found.latest_tries


async def test_each_try_is_kept_with_what_came_back(place: Place) -> None:
    async with place.scene() as scene:
        deliveries = await filed(scene)
        assert await tries_of(deliveries) == ()
        await tried(scene, deliveries, error="cannot be reached", duration_ms=9)
        first_at = scene.clock()
        await tried(scene, deliveries, status=500, error="answered 500: no", answer="no")
        second_at = scene.clock()
        await tried(scene, deliveries, has_arrived=True, status=200, answer="thanks", body=None)
        assert await tries_of(deliveries) == (
            DeliveryTry(at=first_at, duration_ms=9, error="cannot be reached"),
            DeliveryTry(at=second_at, status=500, answer="no"),
            DeliveryTry(at=scene.clock(), status=200, answer="thanks"),
        )
        (listed,) = (await deliveries.find(DeliveryQuery())).deliveries
        assert (listed.tries, listed.latest_tries) == (3, ()), "a list is small"


async def test_an_outcome_that_changes_nothing_is_no_try(place: Place) -> None:
    async with place.scene() as scene:
        deliveries = await filed(scene)
        (message,) = (await claimed(deliveries)).messages
        await deliveries.settle(failed(message, by=OTHER, due_at=BEYOND))
        assert await tries_of(deliveries) == ()
        for _ in range(2):
            await deliveries.settle(arrived(message))
        assert len(await tries_of(deliveries)) == 1


async def test_only_the_latest_tries_are_kept_also_over_redeliveries(place: Place) -> None:
    async with place.scene() as scene:
        deliveries = await filed(scene)
        for number in range(MAX_KEPT_TRIES):
            await tried(scene, deliveries, status=500 + number)
        assert isinstance(await deliveries.redeliver("msg_t1"), Delivery)
        await tried(scene, deliveries, status=599)
        kept = [one.status for one in await tries_of(deliveries)]
        assert kept == [*range(501, 500 + MAX_KEPT_TRIES), 599]


async def test_tries_go_with_their_delivery(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_rows, "MAX_DEAD", 0)
    async with place.scene() as scene:
        deliveries = await filed(scene)
        await tried(scene, deliveries, status=410, due_at=None)
        assert await deliveries.purge() == 1

        def count(transaction: Transaction, _now: float) -> int:
            return int(transaction.read("SELECT COUNT(*) FROM delivery_tries")[0][0])

        if place.kind != "wired":
            assert await scene.store.run(count) == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_message_that_is_filed_anew_has_none_of_the_tries_before(
    dialect: str, request: pytest.FixtureRequest
) -> None:
    def file(transaction: Transaction, at: float) -> None:
        row = delivery_row("msg_1", event="x", url="https://x/", now=at)
        transaction.insert(DELIVERY_ROWS, [row])

    def note(transaction: Transaction, status: int) -> None:
        outcome = TryOutcome(id="msg_1", claimed_by=ME, has_arrived=False, status=status)
        delivery_rows.note(transaction, outcome, 5.0)

    with fresh_tables(dialect, request) as tables:
        tables.do(lambda transaction: file(transaction, 1.25))
        tables.do(lambda transaction: note(transaction, 500))
        tables.do(lambda transaction: file(transaction, 2.25))
        assert tables.do(lambda transaction: delivery_rows.latest(transaction, "msg_1")) == ()
        tables.do(lambda transaction: note(transaction, 501))
        (one,) = tables.do(lambda transaction: delivery_rows.latest(transaction, "msg_1"))
        assert one.status == 501


@pytest.mark.parametrize("dialect", DIALECTS)
def test_deliveries_of_a_database_from_before_go_on(
    dialect: str, request: pytest.FixtureRequest
) -> None:
    def go_back(transaction: Transaction) -> None:
        transaction.run("DROP TABLE delivery_tries")
        sql = "UPDATE headgate_schema SET version = 1 WHERE part = ?"
        transaction.run(sql, (delivery_schema.DELIVERIES,))
        row = delivery_row("msg_1", event="x", url="https://x/", now=1.0)
        transaction.insert(DELIVERY_ROWS, [row])
        transaction.run("UPDATE deliveries SET tries = 3, status = 500")
        transaction.run("ALTER TABLE deliveries DROP COLUMN project_id")

    outcome = TryOutcome(id="msg_1", claimed_by=ME, has_arrived=True, status=204)
    with fresh_tables(dialect, request) as tables:
        tables.do(go_back)
        tables.do(migrate_all)
        found = tables.do(partial(get, delivery_id="msg_1"))
        assert found is not None
        assert (found.tries, found.status, found.latest_tries) == (3, 500, ())
        tables.do(partial(settle, now=5.0, outcome=outcome))
        found = tables.do(partial(get, delivery_id="msg_1"))
        assert found is not None
        assert (found.tries, found.latest_tries) == (4, (DeliveryTry(at=5.0, status=204),))
