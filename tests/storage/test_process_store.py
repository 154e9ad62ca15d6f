"""Stores that a process of its own writes to: every subject of theirs, by the real clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from headgate.core.budgets.ledger import SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.idempotency import KeyRefusal, SubmitKey
from headgate.core.lifecycle import Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task import Submission, Terms
from headgate.errors import IllegalSettlementError, StaleEpochError
from headgate.storage.audit import Actor, AuditEntry, AuditLog
from headgate.storage.deliveries import Deliveries, DeliveryQuery
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.sql_store import SqlTaskStore, StoreLedger
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import KeyedAnswer, KeyedSubmit, Overdue, Settled, Visit
from headgate.storage.tokens import TokenStore, new_token
from headgate.storage.writer import ChildStarter, ProcessWriter
from storage.scene import HERE, Place, Scene

WORKER = "worker-1"
HOOK = Terms(callback_url="https://hooks.example/done")
GIVEN = Submission(action="click", params=msgspec.Raw(b'{"n":1}'), retry_of="t0")


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> SqlTaskStore:
    """Make a store of each kind that can have a process."""
    starter = ChildStarter()
    if request.param == "sqlite":
        path = request.getfixturevalue("tmp_path") / "tasks.db"
        return SqliteTaskStore(path, starter=starter)
    return PostgresTaskStore(request.getfixturevalue("postgres_url"), starter=starter)


@asynccontextmanager
async def opened(store: SqlTaskStore) -> AsyncIterator[Scene]:
    assert isinstance(store.writer, ProcessWriter)
    await store.open()
    try:
        scene = Scene(Place("process", lambda _clock, _ledger: store), store)
        await scene.start()
        yield scene
    finally:
        await store.close()


def visit(*, joins: bool = False, running: dict[str, int] | None = None) -> Visit:
    return Visit(
        worker_id=WORKER,
        agent_id="coder",
        capacity=2,
        running=running or {},
        lease_seconds=30.0,
        joins=joins,
        node_id=HERE,
    )


async def test_a_keyed_task_of_a_worker_is_whole_from_submit_to_its_webhook(
    store: SqlTaskStore,
) -> None:
    async with opened(store) as scene:
        step = KeyedSubmit(
            key=SubmitKey(owner="", name="k", digest="d"),
            tasks=(scene.new("t1", terms=HOOK, submission=GIVEN),),
        )
        first = await store.submit_keyed(step)
        assert isinstance(first, KeyedAnswer)
        again = await store.submit_keyed(msgspec.structs.replace(step, tasks=()))
        assert again == KeyedAnswer(entries=first.entries, fresh=(), is_replay=True)
        other = msgspec.structs.replace(step.key, digest="e")
        refused = await store.submit_keyed(msgspec.structs.replace(step, key=other))
        assert refused is KeyRefusal.MISMATCH

        await store.visit(visit(joins=True))
        await scene.assign("t1", node_id=WORKER)
        (handed_out,) = (await store.visit(visit())).tasks
        assert (handed_out.submission, handed_out.terms) == (GIVEN, HOOK)
        assert (await store.cancel("t1", node_id=HERE)) is not None
        assert (await store.visit(visit(running={"t1": 1}))).cancelled == ("t1",)

        cost = Usage(tokens=7, micro_usd=3, model="small")
        settlement = scene.settlement("t1", node_id=WORKER, cost=cost, result=msgspec.Raw(b"[1]"))
        settled = await store.settle(msgspec.structs.replace(settlement, node_id=HERE))
        assert isinstance(settled, Settled)
        found = await store.get("t1")
        assert found is not None
        assert settled.records[0] == msgspec.structs.replace(
            found, submission=settled.records[0].submission
        )
        deliveries = await Deliveries(store).find(DeliveryQuery())
        assert [one.task_id for one in deliveries.deliveries] == ["t1"]


async def test_errors_of_the_process_arrive_as_what_they_are(store: SqlTaskStore) -> None:
    async with opened(store) as scene:
        await scene.submit("t1")
        wanted = [Overdue(task_id="t1", attempt=1)]
        with pytest.raises(StaleEpochError):
            await store.give_up(scene.epoch + 1, wanted)
        assert [one.task.id for one in await store.give_up(scene.epoch, wanted)] == ["t1"]
        unknown = SettleRequest(
            reservation_id="none", call=Call.COMMIT, micro_usd=MicroUsd(1), tokens=Tokens(1)
        )
        with pytest.raises(IllegalSettlementError) as caught:
            await StoreLedger(store).settle(unknown)
        assert caught.value.current


async def test_tokens_and_the_audit_log_are_written_there_too(store: SqlTaskStore) -> None:
    async with opened(store):
        tokens = TokenStore(store)
        made = new_token(name="t", permissions=("read",), now=tokens.now()).kept
        entry = AuditEntry(actor=Actor(name="me"), action="token.create", subject=made.token.id)
        await tokens.add(made, entry)
        assert [one.id for one in await tokens.list()] == [made.token.id]
        page = await AuditLog(store).page()
        assert [one.subject for one in page.rows] == [made.token.id]
