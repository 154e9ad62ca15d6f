"""A primary and a synchronous standby: nothing that was confirmed is lost when they change places.

The servers are real. A store is given both hosts, and finds the one that takes changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest

from budgets.servers import PostgresPair, running_pair
from headgate.errors import LedgerUnavailableError
from headgate.storage import postgres
from headgate.storage.postgres import PostgresDatabase, connection_parameters
from headgate.storage.transaction import LostTransactionError
from headgate.storage.writer import Job, perform

TRY_SECONDS = 30.0


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresPair]:
    """Start a pair with a table of numbers."""
    monkeypatch.setattr(postgres, "_timelines", {})
    with running_pair() as started:
        with psycopg.connect(started.primary.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
        yield started


def add(database: PostgresDatabase, number: int) -> None:
    """Add a number, or raise why nobody knows whether it is there."""
    job = Job(
        lambda transaction: transaction.run(
            "INSERT INTO numbers VALUES (?) ON CONFLICT DO NOTHING", (number,)
        )
    )
    perform(database, [job])
    if job.error is not None:
        raise job.error


def add_until_taken(database: PostgresDatabase, number: int) -> None:
    ends_at = time.monotonic() + TRY_SECONDS
    while True:
        try:
            add(database, number)
        except LedgerUnavailableError:
            assert time.monotonic() < ends_at
            time.sleep(0.05)
        else:
            return


def numbers(url: str) -> set[int]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute("SELECT number FROM numbers").fetchall()}


def test_several_hosts_mean_the_one_that_takes_changes() -> None:
    found = connection_parameters("postgresql://postgres@/postgres?host=/a,/b")
    assert found["target_session_attrs"] == "read-write"
    given = "postgresql://postgres@/postgres?host=/a,/b&target_session_attrs=any"
    assert connection_parameters(given)["target_session_attrs"] == "any"
    assert "target_session_attrs" not in connection_parameters("postgresql://postgres@/postgres")


def test_what_was_confirmed_is_there_after_a_failover(pair: PostgresPair) -> None:
    database = PostgresDatabase(pair.url)
    confirmed = set()
    try:
        for number in range(6):
            add_until_taken(database, number)
            confirmed.add(number)
            if number % 2:
                pair.fail_over()
                pair.rejoin()
        assert numbers(pair.primary.url) >= confirmed
    finally:
        database.close()


def test_a_former_primary_confirms_nothing(
    pair: PostgresPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take changes for a while; what the wrong one is told, nobody is told was done."""
    monkeypatch.setattr(postgres, "CONFIRM_SECONDS", 1.0)
    database = PostgresDatabase(pair.url)
    try:
        add_until_taken(database, 1)
        pair.split()
        # The connection is still to the former primary, which has no standby any more. The next
        # try asks all hosts, and finds the one that took over; that one has no standby yet.
        with pytest.raises(LostTransactionError, match="did not confirm"):
            add(database, 2)
        assert 2 in numbers(pair.standby.url)
        pair.rejoin()
        add_until_taken(database, 3)
        assert numbers(pair.primary.url) == {1, 2, 3}
    finally:
        database.close()


def test_who_has_seen_the_new_primary_does_not_go_back(
    pair: PostgresPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CONFIRM_SECONDS", 1.0)
    former = pair.primary
    pair.split()
    hosts = f"{former.folder},{pair.primary.folder}"
    url = f"postgresql://postgres@/postgres?host={hosts}"
    database = PostgresDatabase(url)
    try:
        # A process that has seen nothing takes the first host that takes changes.
        assert timeline(database) == 1
        database.close()
        postgres.learn_timelines(connection_parameters(url))
        assert timeline(database) == 2
        pair.primary.stand_still()
        try:
            only_former = PostgresDatabase(f"{url}&connect_timeout=2")
            with pytest.raises(LedgerUnavailableError, match="is a former primary"):
                only_former.begin()
        finally:
            pair.primary.go_on()
    finally:
        database.close()


def timeline(database: PostgresDatabase) -> int:
    """Return the timeline of the server that a database is at."""
    transaction = database.begin()
    (row,) = transaction.read("SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)")
    database.rollback()
    return int(row[0], 16)
