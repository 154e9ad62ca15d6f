"""What administration keeps in the store: overrides, the audit log, retries of many tasks."""

from __future__ import annotations

import pickle
from functools import partial

import pytest

from headgate.config import overrides
from headgate.config.overrides import Override, ReplacedBudget, StoredChange
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.money import Tokens
from headgate.core.task import TaskStatus
from headgate.storage import audit, queries
from headgate.storage.audit import KEPT_SECONDS, Actor, AuditEntry, AuditLog
from headgate.storage.queries import BulkFilter
from headgate.storage.sql_store import SqlTaskStore
from storage.scene import Place, Scene

WHO = Actor(name="ann", token_id="t1", request_id="r1")
LIVE = (TaskStatus.QUEUED, TaskStatus.ASSIGNED, TaskStatus.RUNNING)


async def adopted(store: SqlTaskStore, **fields: object) -> None:
    stored_change = StoredChange(**fields)  # type: ignore[arg-type]
    await store.run(partial(overrides.store_change, stored_change=stored_change, keeps_ledger=True))


async def test_an_entry_is_there_once_however_often_it_is_written(place: Place) -> None:
    async with place.scene() as scene:
        entry = AuditEntry(actor=WHO, action="project.patch", subject="a", detail={"x": 1})
        for _ in range(2):
            await scene.store.run(partial(audit._write_one, entry=entry))
        (row,) = (await AuditLog(scene.store).page()).rows
        assert (row.actor, row.token_id, row.request_id) == ("ann", "t1", "r1")
        assert (row.at, bytes(row.detail)) == (scene.clock(), b'{"x":1}')


async def test_entries_come_newest_first_page_by_page(place: Place) -> None:
    async with place.scene() as scene:
        log = AuditLog(scene.store)
        for number in range(5):
            await log.record(WHO, "act", str(number))
        first = await log.page(limit=3)
        rest = await log.page(limit=3, before=first.next_before)
        assert [row.subject for row in (*first.rows, *rest.rows)] == ["4", "3", "2", "1", "0"]
        assert rest.next_before is None


async def test_no_flood_of_reads_makes_a_change_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_KEPT", 4)
    monkeypatch.setattr(audit, "MAX_READS_KEPT", 3)
    async with place.scene() as scene:
        log = AuditLog(scene.store)
        for number in range(6):
            await log.record(WHO, "change", str(number))
            for _ in range(5):
                read = AuditEntry(actor=WHO, action="read", is_read=True)
                await scene.store.run(partial(audit._write_one, entry=read))
        rows = (await log.page()).rows
        changes = [row.subject for row in rows if row.action == "change"]
        assert changes == ["5", "4", "3", "2"]
        assert len(rows) == 4 + 3


async def test_no_flood_of_a_tenant_makes_an_entry_of_another_go(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_KEPT", 4)
    monkeypatch.setattr(audit, "MAX_KEPT_OF_TENANT", 3)
    hostile = Actor(name="hostile", token_id="h", is_tenant=True)
    honest = Actor(name="honest", token_id="o", is_tenant=True)
    async with place.scene() as scene:
        log = AuditLog(scene.store)
        await log.record(WHO, "token.create")
        await log.record(honest, "tasks.cancel")
        for _ in range(9):
            await log.record(hostile, "tasks.cancel")
        rows = (await log.page()).rows
        assert [row.actor for row in rows] == [*["hostile"] * 3, "honest", WHO.name]


async def test_old_entries_and_endless_texts_are_not_kept(place: Place) -> None:
    async with place.scene() as scene:
        log = AuditLog(scene.store)
        await log.record(WHO, "old")
        scene.clock.advance(KEPT_SECONDS + 1)
        assert (await log.page()).rows == ()
        await scene.elect()
        await log.record(Actor(name="n\0" * 500), "new", "s" * 10_000, {"x": "y" * 100_000})
        (row,) = (await log.page()).rows
        assert (len(row.actor), len(row.subject)) == (128, 256)
        assert b"too large" in bytes(row.detail)
        await scene.let_time_pass(1.0)


async def test_overrides_budgets_and_the_entry_are_written_together(place: Place) -> None:
    async with place.scene() as scene:
        one = Override(kind="projects", name="a", key="status", value="paused", by="ann")
        other = Override(kind="budgets", name="session:s", key="limit_tokens", value=5)
        entry = AuditEntry(actor=WHO, action="project.patch")
        limits = {Scope("session:s"): Limit(limit_tokens=Tokens(5))}
        await adopted(scene.store, begun=(one, other), budgets=limits, entries=(entry,))
        found = await scene.store.ask(overrides.read_overrides)
        assert [(row.path, row.value, row.by) for row in found] == [
            (other.path, 5, ""),
            (one.path, "paused", "ann"),
        ]
        rows = await scene.store.ask(_configured)
        assert rows == ["session:s"]
        await adopted(scene.store, ended=(one.path,))
        assert [row.path for row in await scene.store.ask(overrides.read_overrides)] == [other.path]
        assert len((await AuditLog(scene.store).page()).rows) == 1


def _configured(transaction):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return [row[0] for row in transaction.read("SELECT scope FROM configured_budgets")]


def test_what_is_run_in_the_store_can_be_sent_to_another_process() -> None:
    entry = AuditEntry(actor=WHO, action="act")
    change = StoredChange(entries=(entry,))
    for operation in (
        partial(audit._write_one, entry=entry),
        partial(overrides.store_change, stored_change=change, keeps_ledger=True),
        partial(overrides.busy_names, asked=(("projects", "a"),)),
        partial(queries.count_part, wanted=BulkFilter(states=LIVE)),
        partial(queries.take_up, pairs=[("a", "b")]),
    ):
        assert pickle.loads(pickle.dumps(operation)).func is operation.func


async def test_a_replaced_budget_is_told_of_until_somebody_changes_it(place: Place) -> None:
    replaced = [
        ReplacedBudget(name=name, before="$5.00 a day set by hand", after="$100.00")
        for name in ("root", "session:s")
    ]
    async with place.scene() as scene:
        question = partial(overrides.read_replaced_budgets, since=scene.clock())
        await adopted(scene.store, entries=tuple(one.entry for one in replaced))
        assert await scene.store.ask(question) == (replaced[1], replaced[0])
        await AuditLog(scene.store).record(WHO, "budget.patch", "root")
        assert await scene.store.ask(question) == (replaced[1],)
        later = partial(overrides.read_replaced_budgets, since=scene.clock() + 1)
        assert await scene.store.ask(later) == ()


async def test_what_still_has_tasks_is_busy(place: Place) -> None:
    asked = (
        ("projects", "search"),
        ("projects", "other"),
        ("agents", "coder"),
        ("targets", "browser"),
        ("targets", "brow"),
    )
    async with place.scene() as scene:
        busy = partial(overrides.busy_names, asked=asked)
        assert await scene.store.ask(busy) == set()
        await scene.submit("t1")
        wanted = {("projects", "search"), ("agents", "coder"), ("targets", "browser")}
        assert await scene.store.ask(busy) == wanted
        await scene.cancel("t1")
        assert await scene.store.ask(busy) == set()


async def matching(scene: Scene, **fields: object) -> list[str]:
    wanted = BulkFilter(**({"states": LIVE} | fields))  # type: ignore[arg-type]
    found = await scene.store.ask(partial(queries.ids, wanted=wanted, limit=10))
    counted, _ = await scene.store.ask(partial(queries.count_part, wanted=wanted))
    assert counted == len(found)
    return found


async def test_a_filter_finds_what_matches_all_of_it(place: Place) -> None:
    from headgate.core.task import Submission  # noqa: PLC0415

    async with place.scene() as scene:
        labelled = Submission(action="click", labels={"run": "7", 'a"b': "x"})
        await scene.submit("t1", submission=labelled)
        await scene.submit("t2", agent_id="other")
        await scene.submit("t3", project_id="else")
        await scene.cancel("t3")
        assert await matching(scene) == ["t1", "t2"]
        assert await matching(scene, agent_id="coder") == ["t1"]
        assert await matching(scene, project_id="search", target="browser") == ["t1", "t2"]
        assert await matching(scene, target="brow") == []
        assert await matching(scene, label=("run", "7")) == ["t1"]
        assert await matching(scene, label=('a"b', "x")) == ["t1"]
        assert await matching(scene, label=("run", "8")) == []
        assert await matching(scene, states=(TaskStatus.CANCELLED,)) == ["t3"]


async def test_a_task_that_was_taken_up_keeps_its_new_id_until_it_is_submitted(
    place: Place,
) -> None:
    async with place.scene() as scene:
        for task_id in ("t1", "t2"):
            await scene.submit(task_id)
            await scene.cancel(task_id)
        store = scene.store
        first = await store.run(partial(queries.take_up, pairs=[("t1", "n1"), ("t2", "n2")]))
        again = await store.run(partial(queries.take_up, pairs=[("t1", "x1"), ("t2", "x2")]))
        assert first == again == {"t1": "n1", "t2": "n2"}
        await store.run(partial(queries.close_up, submitted=["t1"], refused=["t2"]))
        cancelled = {"states": (TaskStatus.CANCELLED,), "is_retry": True}
        assert await matching(scene, **cancelled) == ["t2"]
        later = await store.run(partial(queries.take_up, pairs=[("t2", "x2")]))
        assert later == {"t2": "x2"}
