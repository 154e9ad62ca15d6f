"""Domains: systems in one database that share nothing, neither a lock nor a budget nor a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg
import pytest

from budgets.servers import PostgresServer
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import ROOT
from headgate.core.money import Tokens
from headgate.errors import StoreError
from headgate.storage.ledger import lock_ledger
from headgate.storage.postgres import PostgresDatabase, PostgresTaskStore, domain_url
from headgate.storage.store import Assigned, NotAssigned
from storage.scene import AWAY, LEASE_SECONDS, Place, Scene

PATIENCE_SECONDS = 30.0


@asynccontextmanager
async def domain(url: str, name: str) -> AsyncIterator[Scene]:
    """Open a domain with one node, which is elected; its counts are audited at the end."""
    place = Place(
        "postgres",
        lambda clock, keeps: PostgresTaskStore(url, clock=clock, keeps_ledger=keeps, domain=name),
    )
    async with place.scene() as scene:
        yield scene


@asynccontextmanager
async def two_domains(url: str) -> AsyncIterator[tuple[Scene, Scene]]:
    async with domain(url, "evals") as evals, domain(url, "prod") as prod:
        yield evals, prod


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


async def test_each_domain_has_its_own_dispatcher_and_its_own_tasks(url: str) -> None:
    async with two_domains(url) as (evals, prod):
        assert (evals.epoch, prod.epoch) == (1, 1)
        await evals.run("t1")
        assert await prod.state("t1") == "gone"
        await prod.run("t1")
        await evals.settle("t1")
        assert (await evals.state("t1"), await prod.state("t1")) == ("done", "running")


async def test_a_domain_that_stands_still_delays_no_other(url: str) -> None:
    async with two_domains(url) as (evals, prod):
        stuck = PostgresDatabase(domain_url(url, "evals"))
        try:
            transaction = stuck.begin()
            lock_ledger(transaction)
            # Only what is read back says that the lock was given.
            transaction.read("SELECT 1")
            waiting = asyncio.ensure_future(evals.submit("t1"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await prod.run("t1")
                await prod.settle("t1")
            assert not waiting.done()
        finally:
            stuck.rollback()
            stuck.close()
        await waiting


async def test_a_domain_is_opened_while_another_is_being_migrated(url: str) -> None:
    async with domain(url, "evals"):
        pass
    with psycopg.connect(domain_url(url, "evals")) as connection:
        # What a node does first that starts, and then stands still.
        connection.execute(
            "SELECT pg_advisory_xact_lock(7203614081::bigint + hashtext(current_schema()))"
        )
        async with asyncio.timeout(PATIENCE_SECONDS), domain(url, "prod") as prod:
            await prod.run("t1")


async def test_the_budgets_of_domains_are_apart(url: str) -> None:
    async with two_domains(url) as (evals, prod):
        await evals.store.set_limits({ROOT: Limit(limit_tokens=Tokens(150))})
        for scene in (evals, prod):
            await scene.submit("t1")
            await scene.submit("t2")
        lines = [await scene.plan(*map(scene.line, ("t1", "t2"))) for scene in (evals, prod)]
        assert [[type(one) for one in answers] for answers in lines] == [
            [Assigned, NotAssigned],
            [Assigned, Assigned],
        ]


async def test_nobody_is_woken_for_what_another_domain_does(url: str) -> None:
    async with two_domains(url) as (evals, prod):
        calls = {"evals": 0, "prod": 0}
        told = {name: asyncio.Event() for name in calls}

        def watch(name: str, scene: Scene) -> None:
            def call() -> None:
                calls[name] += 1
                told[name].set()

            scene.store.watch("dispatcher", call)

        async def heard(name: str) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await told[name].wait()
            told[name].clear()

        for name, scene in (("evals", evals), ("prod", prod)):
            watch(name, scene)
            # Each is called once it is connected.
            await heard(name)
        await evals.submit("t1", node_id=AWAY)
        await heard("evals")
        # Notifications come in the order of their commits.
        await prod.submit("t1", node_id=AWAY)
        await heard("prod")
        assert calls == {"evals": 2, "prod": 2}
        for scene in (evals, prod):
            scene.store.unwatch()


async def test_without_a_domain_everything_is_where_it_was(url: str) -> None:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(domain(url, ""))
        evals = await stack.enter_async_context(domain(url, "evals"))
        await plain.run("t1")
        assert await evals.state("t1") == "gone"
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT schemaname FROM pg_tables WHERE tablename = 'tasks' ORDER BY schemaname"
        ).fetchall()
    assert found == [("headgate_evals",), ("public",)]


async def test_two_nodes_of_a_new_domain_may_start_at_once(url: str) -> None:
    stores = [PostgresTaskStore(url, domain="evals") for _ in range(4)]
    try:
        await asyncio.gather(*(store.open() for store in stores))
        elected = await asyncio.gather(
            *(store.elect(f"n{n}", lease_seconds=LEASE_SECONDS) for n, store in enumerate(stores))
        )
        assert len({one.node_id for one in elected}) == 1
    finally:
        for store in stores:
            await store.close()


async def test_a_role_that_may_not_create_the_schema_is_told_so(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS limited")
        connection.execute("CREATE ROLE limited LOGIN")
    store = PostgresTaskStore(url.replace("postgres@", "limited@"), domain="evals")
    with pytest.raises(StoreError, match="schema headgate_evals cannot be created"):
        await store.open()


async def test_the_size_of_a_domain_is_that_of_its_own_tables(url: str) -> None:
    async with two_domains(url) as (evals, prod):
        sizes = []
        for scene in (evals, prod):
            database = PostgresDatabase(domain_url(url, "evals" if scene is evals else "prod"))
            sizes.append(database.begin().measure(is_limited=True).used_bytes)
            database.rollback()
            database.close()
        with psycopg.connect(url) as connection:
            ((whole,),) = connection.execute(
                "SELECT pg_database_size(current_database())"
            ).fetchall()
        assert all(0 < size < whole / 2 for size in sizes)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("postgresql://db/x", "-csearch_path=headgate_evals"),
        (
            "postgresql://db/x?options=-cwork_mem%3D8MB",
            "-cwork_mem=8MB -csearch_path=headgate_evals",
        ),
    ],
)
def test_a_domain_is_reached_by_its_schema_and_keeps_other_options(
    given: str, options: str
) -> None:
    assert psycopg.conninfo.conninfo_to_dict(domain_url(given, "evals"))["options"] == options
    assert domain_url(given, "") == given
