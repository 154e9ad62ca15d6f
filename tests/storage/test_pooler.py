"""A real PgBouncer: with sessions of its own everything works, otherwise one line says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from budgets.servers import UNPRIVILEGED, PostgresServer, running_postgres
from executors.endpoint import free_port
from headgate.errors import InvalidSettingError
from headgate.storage.postgres import PostgresDatabase

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="needs pgbouncer, of Debian's package")

SETTINGS = """
[databases]
postgres = host={folder} port=5432 dbname=postgres user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
logfile =
ignore_startup_parameters = extra_float_digits
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Run a server that the pooler stands before."""
    with running_postgres() as running:
        yield running


@contextmanager
def pooler(server: PostgresServer, mode: str, size: int) -> Iterator[str]:
    """Run a pooler, and give the URL of the database behind it."""
    port = free_port()
    path = server.folder / "pgbouncer.ini"
    path.write_text(SETTINGS.format(folder=server.folder, port=port, mode=mode, size=size))
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    process = subprocess.Popen(
        [str(PGBOUNCER), "-q", str(path)], user=user, stderr=subprocess.DEVNULL
    )
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
    try:
        ends_at = time.monotonic() + 10
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert time.monotonic() < ends_at
                time.sleep(0.02)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("size", [1, 5])
def test_transactions_that_share_connections_are_refused(server: PostgresServer, size: int) -> None:
    with pooler(server, "transaction", size) as url:
        database = PostgresDatabase(url)
        with pytest.raises(InvalidSettingError, match="pool_mode = session"):
            database.begin()


def test_sessions_of_their_own_work(server: PostgresServer) -> None:
    with pooler(server, "session", 5) as url:
        database = PostgresDatabase(url)
        assert database.begin().read("SELECT 1") == [(1,)]
        database.commit()
        database.close()
