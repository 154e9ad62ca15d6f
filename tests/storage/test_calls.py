"""Ended calls of the gateway: one transaction books everything, and lists stay bounded."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Limit, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.lifecycle import MAX_MODEL_LENGTH
from headgate.core.money import MicroUsd, Tokens
from headgate.core.retention import CALL_RETENTION_SECONDS, Retention, StoreSize
from headgate.errors import IllegalSettlementError, StoreUnavailableError
from headgate.storage import call_rows, maintenance
from headgate.storage.call_rows import (
    MAX_TEXT,
    CallPage,
    CallQuery,
    CallStore,
    EndedCall,
    KeptPlace,
    first_call_id_at,
)
from headgate.storage.sql_store import StoreLedger
from headgate.storage.store import Node
from headgate.storage.tokens import UNBOUND, Bounds
from headgate.storage.transaction import Transaction
from headgate.storage.usage import GROUPINGS, Grouping, UnpricedModel, UsageReports, UsageSum
from storage.scene import AWAY, HERE, Place, Scene

NUMBERS = count()
SCOPES = (ROOT, Scope("project:search"))


def ended(scene: Scene, **fields: Any) -> CallRecord:
    """Make a call that was done after a second."""
    now = scene.clock()
    given: dict[str, Any] = {
        "id": f"{first_call_id_at(now)[:-6]}{next(NUMBERS):06}",
        "project_id": "search",
        "agent_id": "coder",
        "model": "large",
        "upstream": "anthropic",
        "state": CallState.DONE,
        "created_at": now - 2.0,
        "started_at": now - 1.0,
        "ended_at": now,
        "slot": "work",
        "status": 200,
        "tries": 1,
        "reserved_tokens": 100,
        "reserved_micro_usd": 10,
        "tokens": 70,
        "micro_usd": 7,
    }
    return CallRecord(**{**given, **fields})


async def hold(scene: Scene, reservation_id: str) -> None:
    request = ReserveRequest(
        reservation_id=reservation_id,
        scopes=SCOPES,
        micro_usd=MicroUsd(10),
        tokens=Tokens(100),
        lease_seconds=60.0,
        dispatched=True,
    )
    assert isinstance(await StoreLedger(scene.store).reserve(request), Reservation)


def commit(reservation_id: str, *, tokens: int = 70, micro_usd: int = 7) -> SettleRequest:
    return SettleRequest(
        reservation_id=reservation_id,
        call=Call.COMMIT,
        micro_usd=MicroUsd(micro_usd),
        tokens=Tokens(tokens),
    )


def end_of(record: CallRecord, settle: SettleRequest | None = None) -> EndedCall:
    return EndedCall(
        record=record, settle=settle, share=Amounts(record.micro_usd or 0, record.tokens or 0)
    )


async def finish(store: CallStore, *records: CallRecord) -> None:
    await store.finish([end_of(record) for record in records])


async def listed(store: CallStore, **fields: Any) -> list[str]:
    return [record.id for record in (await store.find(CallQuery(**fields))).records]


async def sums(scene: Scene, by: Grouping, bounds: Bounds = UNBOUND) -> dict[str, UsageSum]:
    report = await UsageReports(scene.store).report(
        by, since=0.0, until=scene.clock() + 1.0, bounds=bounds
    )
    return {one.key: one for one in report.rows}


def shares(transaction: Transaction) -> dict[str, tuple[int, ...]]:
    sql = "SELECT project_id, tokens, micro_usd, started, completed FROM project_usage"
    return {row[0]: row[1:] for row in transaction.read(sql)}


async def test_a_call_is_read_as_it_was_written(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        whole = ended(
            scene,
            upstream_model="large-2",
            protocol="messages",
            is_stream=True,
            priority=-3,
            scopes=("session:s", "project:search"),
            client="claude-code",
            session="5a1f",
            token_id="tok_1",
            first_byte_at=scene.clock() - 0.5,
            key_rule="A warm session stays on its key.",
            error="it was cut off",
            input_tokens=50,
            cached_tokens=10,
            cache_write_tokens=5,
            output_tokens=20,
            reasoning_tokens=3,
            assumed_tokens=1,
            assumed_micro_usd=2,
            is_unpriced=True,
        )
        least = CallRecord(
            id=first_call_id_at(scene.clock() - 1.0),
            project_id="search",
            agent_id="coder",
            model="large",
            state=CallState.REFUSED,
        )
        await finish(store, whole, least)
        assert await store.get(whole.id) == whole
        assert await store.get(least.id) == least
        assert await store.get("call-none") is None


async def test_an_end_settles_the_money_and_counts_the_usage(place: Place) -> None:
    async with place.scene() as scene:
        await hold(scene, "r1")
        record = ended(scene)
        (answer,) = await CallStore(scene.store).finish(
            [EndedCall(record=record, settle=commit("r1"), share=Amounts(7, 80))]
        )
        assert isinstance(answer, Reservation)
        accounts = await StoreLedger(scene.store).accounts(ROOT)
        for account in accounts:
            balance = account.balance
            assert (balance.spent_tokens, balance.spent_micro_usd) == (70, 7)
            assert (balance.reserved_tokens, balance.reserved_micro_usd) == (0, 0)
        used = UsageSum(key="", calls=1, tokens=70, micro_usd=7)
        for by, key in zip(GROUPINGS, ("search", "coder", "large", "work", None), strict=True):
            ((found, one),) = (await sums(scene, by)).items()
            assert msgspec.structs.replace(one, key="") == used
            assert key in (None, found)
        assert await scene.store.ask(shares) == {"search": (80, 7, 1, 1)}
        (total,) = await UsageReports(scene.store).totals()
        assert (total.model, total.tokens, total.priced_micro_usd) == ("large", 70, 7)


async def test_the_same_end_again_changes_nothing(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        await hold(scene, "r1")
        end = EndedCall(record=ended(scene), settle=commit("r1"), share=Amounts(7, 70))
        answers = [
            *await store.finish([end, end]),
            *await store.finish([end]),
        ]
        assert [isinstance(answer, Reservation) for answer in answers] == [True, False, False]
        assert (await sums(scene, "project"))["search"].calls == 1
        assert len(await listed(store)) == 1


async def test_a_settlement_that_is_refused_spoils_no_other(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        await hold(scene, "r1")
        records = [ended(scene) for _ in range(3)]
        answers = await store.finish(
            [
                end_of(records[0], commit("unknown")),
                end_of(records[1], commit("r1")),
                end_of(records[2]),
            ]
        )
        assert [type(answer) for answer in answers] == [
            IllegalSettlementError,
            Reservation,
            type(None),
        ]
        assert sorted(await listed(store)) == sorted(record.id for record in records)


async def test_what_was_held_is_given_back_by_a_release(place: Place) -> None:
    async with place.scene() as scene:
        limit = Limit(limit_micro_usd=MicroUsd(10))
        await StoreLedger(scene.store).set_limit(Scope("project:search"), limit)
        await hold(scene, "r1")
        record = ended(scene, state=CallState.FAILED, tokens=0, micro_usd=0)
        release = SettleRequest(reservation_id="r1", call=Call.RELEASE)
        await CallStore(scene.store).finish([EndedCall(record=record, settle=release)])
        await hold(scene, "r2")
        await StoreLedger(scene.store).settle(commit("r2"))


async def test_a_call_of_a_task_writes_its_row_alone(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        record = ended(scene, task_id="t1")
        assert await store.finish([EndedCall(record=record, share=Amounts(7, 70))]) == [None]
        assert await listed(store, task_id="t1") == [record.id]
        assert await sums(scene, "project") == {}
        assert await scene.store.ask(shares) == {}


async def test_what_a_call_has_tried_counts_though_it_is_refused_in_the_end(place: Place) -> None:
    async with place.scene() as scene:
        refused = ended(scene, state=CallState.REFUSED, tokens=None, micro_usd=None)
        end = EndedCall(record=refused, share=Amounts(3, 30))
        await CallStore(scene.store).finish([end])
        assert await scene.store.ask(shares) == {"search": (30, 3, 0, 0)}


async def test_a_call_that_never_started_has_used_nothing(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        refused = ended(scene, state=CallState.REFUSED, started_at=None, tokens=None, slot=None)
        await finish(store, msgspec.structs.replace(refused, micro_usd=None))
        assert await listed(store, states=(CallState.REFUSED,)) == [refused.id]
        assert await sums(scene, "project") == {}


async def test_without_a_ledger_in_the_store_the_rest_is_written(place: Place) -> None:
    async with place.scene(keeps_ledger=False) as scene:
        store = CallStore(scene.store)
        await finish(store, ended(scene))
        assert (await sums(scene, "slot"))["work"].tokens == 70
        assert len(await listed(store)) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (70, 7, 0, 0, 0, 7, 0)),
        ({"assumed_tokens": 70, "assumed_micro_usd": 7}, (70, 7, 70, 7, 0, 0, 0)),
        ({"assumed_tokens": 20, "assumed_micro_usd": 2}, (70, 7, 20, 2, 0, 5, 0)),
        ({"is_unpriced": True, "assumed_micro_usd": 7}, (70, 7, 0, 7, 70, 0, 0)),
        ({"tokens": 101}, (101, 7, 0, 0, 0, 7, 1)),
        ({"micro_usd": 11}, (70, 11, 0, 0, 0, 11, 1)),
        ({"tokens": 101, "reserved_tokens": 0}, (101, 7, 0, 0, 0, 7, 0)),
    ],
)
async def test_sums_tell_apart_how_amounts_are_known(
    place: Place, fields: dict[str, Any], expected: tuple[int, ...]
) -> None:
    async with place.scene() as scene:
        await finish(CallStore(scene.store), ended(scene, **fields))
        (total,) = await UsageReports(scene.store).totals()
        assert msgspec.structs.astuple(total)[2:] == expected


async def test_a_model_without_a_price_is_told(place: Place) -> None:
    async with place.scene() as scene:
        record = ended(scene, model="fast", upstream_model="house", is_unpriced=True, micro_usd=0)
        await finish(CallStore(scene.store), record)
        found = await UsageReports(scene.store).unpriced()
        assert found == (UnpricedModel(model="house", tokens=70),)


@pytest.mark.parametrize("model", ["x" * 2_000, "a\nb", "a\0b", "\udcff"])
async def test_whatever_a_client_calls_a_model_is_kept_and_spoils_nothing(
    place: Place, model: str
) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        strange = ended(scene, model=model, error=model)
        usual = ended(scene)
        await finish(store, strange, usual)
        kept = await store.get(strange.id)
        assert kept is not None
        assert len(kept.model) <= MAX_TEXT
        assert kept.error == kept.model
        models = await sums(scene, "model")
        assert len(models) == 2
        assert all(len(name) <= MAX_MODEL_LENGTH and name.isprintable() for name in models)
        assert await listed(store, model=kept.model) == [strange.id]


async def test_calls_that_end_at_once_share_an_operation(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        records = [ended(scene) for _ in range(1_100)]
        for number in (0, 500, 1_099):
            await hold(scene, f"r{number}")
        async with asyncio.timeout(30):
            answers = await asyncio.gather(
                *(
                    store.finish([end_of(record, commit(f"r{number}"))])
                    for number, record in enumerate(records)
                )
            )
        kinds = [isinstance(one, Reservation) for (one,) in answers]
        assert [number for number, is_held in enumerate(kinds) if is_held] == [0, 500, 1_099]
        assert (await sums(scene, "project"))["search"].calls == len(records)


async def test_a_caller_that_leaves_keeps_nobody_else_from_an_answer(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        left, stayed = ended(scene), ended(scene)
        leaving = asyncio.create_task(finish(store, left))
        staying = asyncio.create_task(finish(store, stayed))
        await asyncio.sleep(0)
        leaving.cancel()
        async with asyncio.timeout(10):
            await staying
        assert await listed(store) == [stayed.id, left.id]
        with pytest.raises(asyncio.CancelledError):
            await leaving


async def test_a_store_that_is_away_says_so_to_everybody_and_serves_the_next(place: Place) -> None:
    class Away:
        """Loses what it is asked for, until it is back."""

        is_away = True

        def __init__(self) -> None:
            self.now = scene.store.now
            self.ask = scene.store.ask

        async def run(self, operation: Any) -> Any:
            if self.is_away:
                raise StoreUnavailableError("away")
            return await scene.store.run(operation)

    async with place.scene() as scene:
        access = Away()
        store = CallStore(access)
        record = ended(scene)
        ends = await asyncio.gather(
            finish(store, record), finish(store, ended(scene)), return_exceptions=True
        )
        assert [type(end) for end in ends] == [StoreUnavailableError] * 2
        access.is_away = False
        await finish(store, record)
        assert await listed(store) == [record.id]


# Lists


async def test_a_list_is_filtered_and_goes_on_where_the_page_before_ended(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        records = []
        for number in range(12):
            scene.clock.advance(1.0)
            records.append(
                ended(
                    scene,
                    project_id="search" if number % 2 else "ads",
                    agent_id=f"a{number % 3}",
                    slot=("work", "spare")[number % 4 == 0],
                    state=(CallState.DONE, CallState.FAILED)[number % 5 == 0],
                    upstream=("anthropic", "openai")[number > 6],
                    model=("large", "small")[number > 8],
                )
            )
        await finish(store, *records)
        queries: list[dict[str, Any]] = [
            {},
            {"project_id": "ads"},
            {"agent_id": "a1"},
            {"project_id": "ads", "agent_id": "a1"},
            {"slot": "spare"},
            {"states": (CallState.FAILED,)},
            {"states": (CallState.FAILED, CallState.DONE)},
            {"upstream": "openai", "model": "small"},
            {"since": scene.clock() - 6.0},
            {"until": scene.clock() - 6.0, "agent_id": "a0"},
            {"project_id": "none"},
            {"task_id": "t1"},
        ]
        for given in queries:
            query = CallQuery(**given)
            expected = [record.id for record in reversed(records) if query.matches(record)]
            assert await listed(store, **given) == expected
            found: list[str] = []
            page = CallPage(records=(), next_before=None)
            while not found or page.next_before is not None:
                page = await store.find(
                    msgspec.structs.replace(query, limit=2, before=page.next_before)
                )
                found += [record.id for record in page.records]
                if not page.records:
                    break
            assert found == expected


async def test_a_list_looks_at_so_many_calls_and_says_where_to_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_rows, "MAX_LOOKED_AT", 10)
    async with place.scene() as scene:
        store = CallStore(scene.store)
        rare = ended(scene, agent_id="rare")
        records = [ended(scene) for _ in range(25)]
        await finish(store, rare, *records)
        query = CallQuery(agent_id="rare")
        pages = 0
        while True:
            page = await store.find(query)
            pages += 1
            if page.next_before is None:
                break
            assert page.records == ()
            query = msgspec.structs.replace(query, before=page.next_before)
        assert (pages, [one.id for one in page.records]) == (3, [rare.id])


# Retention


def evict(
    transaction: Transaction, now: float, *, size: StoreSize | None = None, limit: int = 500
) -> tuple[int, bool]:
    found = maintenance.evict(transaction, now, retention=Retention(), limit=limit, size=size)
    return found.calls, found.has_more


async def test_calls_go_after_seven_days(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        store = CallStore(scene.store)
        await finish(store, *[ended(scene) for _ in range(5)])
        scene.clock.advance(3_600.0)
        young = ended(scene)
        await finish(store, young)
        scene.clock.advance(CALL_RETENTION_SECONDS - 3_600.0)
        assert await scene.store.run(evict) == (0, False)
        scene.clock.advance(1.0)
        assert await scene.store.run(partial(evict, limit=2)) == (2, True)
        assert await scene.store.run(evict) == (3, False)
        assert await listed(store) == [young.id]


async def test_too_many_calls_are_taken_from_the_project_that_has_most(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_ENDED_CALLS", 10)
    async with place.scene(evicts=True) as scene:
        store = CallStore(scene.store)
        honest = [ended(scene, project_id="honest") for _ in range(4)]
        flood = [ended(scene, project_id="flood") for _ in range(20)]
        await finish(store, *honest, *flood)
        assert await scene.store.run(evict) == (14, False)
        kept = await listed(store)
        assert sorted(kept) == sorted(one.id for one in [*honest, *flood[-6:]])


async def test_a_store_that_is_too_large_drops_calls_before_tasks(place: Place) -> None:
    async with place.scene(evicts=True) as scene:
        store = CallStore(scene.store)
        await scene.run("t1")
        await scene.settle("t1")
        records = [ended(scene, error="x" * 900) for _ in range(10)]
        await finish(store, *records, ended(scene, project_id="small"))
        size = StoreSize(used_bytes=94_500, max_bytes=100_000)
        found, _ = await scene.store.run(partial(evict, size=size))
        assert 3 <= found <= 5
        assert (await scene.get("t1")).is_terminal
        assert len(await listed(store, project_id="small")) == 1
        assert await listed(store, project_id="search") == [
            one.id for one in reversed(records[found:])
        ]


async def test_a_call_that_was_noted_and_never_ended_is_lost_once(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        running = {"state": CallState.RUNNING, "ended_at": None, "tokens": None, "micro_usd": None}
        one, two, three = (ended(scene, **running) for _ in range(3))
        await store.note_running([one, two, three])
        done = msgspec.structs.replace(three, state=CallState.DONE, ended_at=scene.clock())
        await store.finish([EndedCall(record=done, is_noted=True)])
        assert await store.end_lost(scene.clock() - 1.0, without=()) == [], "they were just seen"
        lost = await store.end_lost(scene.clock() + 1.0, without=[two.id])
        assert [(record.id, record.state) for record in lost] == [(one.id, CallState.FAILED)]
        assert await store.end_lost(scene.clock() + 1.0, without=[two.id]) == []
        assert await listed(store) == [three.id, one.id]
        kept = await store.get(one.id)
        assert kept is not None
        assert kept.error == call_rows.LOST


async def test_calls_are_lost_when_the_lease_of_their_node_ends(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        running = {"state": CallState.RUNNING, "ended_at": None, "tokens": None, "micro_usd": None}
        own, there, gone = (ended(scene, **running) for _ in range(3))
        await scene.store.join(Node(id=AWAY, capacity=0), lease_seconds=60.0)
        await store.note_running([own], node_id=HERE)
        await store.note_running([there], node_id=AWAY)
        await store.note_running([gone], node_id="n3")
        seen_before = scene.clock() - 1.0

        async def lost() -> list[str]:
            found = await store.end_lost(seen_before, without=[own.id], with_dead_nodes=True)
            return [record.id for record in found]

        assert await store.end_lost(seen_before, without=[own.id]) == []
        assert await lost() == [gone.id], "nobody knows the third node"
        scene.clock.advance(61.0)
        assert await lost() == [there.id]
        assert await lost() == []


async def test_a_lost_call_is_booked_as_assumed_until_it_ends_after_all(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        record = ended(scene)
        running = {"state": CallState.RUNNING, "ended_at": None, "tokens": None, "micro_usd": None}
        of_task = ended(scene, **running, task_id="t1")
        await store.note_running([msgspec.structs.replace(record, **running), of_task])
        await store.end_lost(scene.clock() + 1.0, without=())
        for call_id in (record.id, of_task.id):
            kept = await store.get(call_id)
            assert kept is not None
            assert (kept.tokens, kept.micro_usd) == (100, 10)
            assert (kept.assumed_tokens, kept.assumed_micro_usd) == (100, 10)
        (total,) = await UsageReports(scene.store).totals()
        assert msgspec.structs.astuple(total)[2:] == (100, 10, 100, 10, 0, 0, 0), "not of the task"
        assert await scene.store.ask(shares) == {"search": (100, 10, 1, 0)}
        scene.clock.advance(7_200.0)
        for _ in range(2):
            await store.finish([end_of(record)])
        (total,) = await UsageReports(scene.store).totals()
        assert msgspec.structs.astuple(total)[2:] == (70, 7, 0, 0, 0, 7, 0)
        found = (await sums(scene, "model"))["large"]
        assert (found.calls, found.tokens, found.micro_usd) == (1, 70, 7)


async def test_a_call_that_was_taken_for_lost_is_booked_when_it_ends(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        record = ended(scene)
        await store.note_running([msgspec.structs.replace(record, state=CallState.RUNNING)])
        await store.end_lost(scene.clock() + 1.0, without=())
        await hold(scene, "r1")
        (answer,) = await store.finish([end_of(record, commit("r1"))])
        assert isinstance(answer, Reservation)
        assert await store.get(record.id) == record
        assert await listed(store) == [record.id]


async def test_a_response_in_the_background_is_corrected_once(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        await hold(scene, "r1")
        assumed = {"tokens": 100, "micro_usd": 10, "assumed_tokens": 100, "assumed_micro_usd": 10}
        record = ended(scene, **assumed, reservation_id="r1")
        await finish(store, record)
        settled = {"tokens": 70, "micro_usd": 7, "assumed_tokens": 0, "assumed_micro_usd": 0}
        changed = msgspec.structs.replace(record, **settled, reservation_id="")
        assert await store.correct(changed, commit("r1"))
        assert not await store.correct(changed, commit("r1"))
        assert await store.get(record.id) == changed
        (total,) = await UsageReports(scene.store).totals()
        assert msgspec.structs.astuple(total)[2:] == (70, 7, 0, 0, 0, 7, 0)
        found = (await sums(scene, "model"))["large"]
        assert (found.calls, found.tokens, found.micro_usd) == (1, 70, 7)


async def test_what_the_ledger_does_not_take_corrects_nothing(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        record = ended(scene, reservation_id="gone")
        await finish(store, record)
        changed = msgspec.structs.replace(record, tokens=1, reservation_id="")
        assert not await store.correct(changed, commit("gone", tokens=1))
        assert await store.get(record.id) == record


async def test_calls_that_run_at_other_nodes_are_counted_while_these_live(place: Place) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        running = {"state": CallState.RUNNING, "ended_at": None, "tokens": None, "micro_usd": None}
        here, there, moved, gone = (ended(scene, **running) for _ in range(4))
        await scene.store.join(Node(id=AWAY, capacity=0), lease_seconds=60.0)
        await store.note_running([here], node_id=HERE)
        await store.note_running([there, moved], node_id=AWAY)
        await store.note_running([gone], node_id="n3")

        async def elsewhere(node_id: str, *, seconds: float = 30.0) -> list[str]:
            seen_after = scene.clock() - seconds
            found = await store.running_elsewhere(node_id, seen_after=seen_after)
            return [one.id for one in found]

        assert await elsewhere(HERE) == [there.id, moved.id], "nobody knows the third node"
        assert await elsewhere(AWAY) == [here.id]
        assert await elsewhere(HERE, seconds=-1.0) == [], "nobody has seen them since"
        await store.forget_running([moved.id])
        await store.note_running([there], node_id=HERE)
        assert await elsewhere(HERE) == []
        assert await elsewhere(AWAY) == [here.id, there.id], "it has another node by now"
        done = msgspec.structs.replace(there, state=CallState.DONE, ended_at=scene.clock())
        await store.finish([EndedCall(record=done, is_noted=True)])
        assert await elsewhere(AWAY) == [here.id]
        assert await store.ended([there.id, here.id]) == (done,)
        assert await store.ended([]) == ()


async def test_a_kept_place_is_noted_for_the_next_node_and_is_no_call_that_runs(
    place: Place,
) -> None:
    async with place.scene() as scene:
        store = CallStore(scene.store)
        waits = {"state": CallState.WAITING, "ended_at": None, "tokens": None, "micro_usd": None}
        one, two = (ended(scene, **waits) for _ in range(2))
        places = [KeptPlace("i1", 50.0, one), KeptPlace("i2", 60.0, two)]
        await store.note_places(places, node_id=AWAY)
        assert await store.places_elsewhere(HERE) == tuple(places)
        assert await store.places_elsewhere(AWAY) == ()
        assert await store.running_elsewhere(HERE, seen_after=0.0) == ()
        later = scene.clock() + 1_000.0
        assert await store.end_lost(later, without=(), with_dead_nodes=True) == []
        await store.note_places(places[1:], node_id=HERE)
        assert await store.places_elsewhere(HERE) == (places[0],)
        running = msgspec.structs.replace(one, state=CallState.RUNNING)
        await store.note_running([running], node_id=AWAY)
        assert await store.places_elsewhere("") == (places[1],), "the other one has come back"
        assert await store.end_lost(later, without=()) != []
        over = msgspec.structs.replace(two, state=CallState.CANCELLED, ended_at=scene.clock())
        await store.finish([EndedCall(record=over, is_noted=True)])
        assert await store.places_elsewhere("") == ()
