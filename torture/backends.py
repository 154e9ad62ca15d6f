"""Ledgers for the checks: a file, or a server started for the occasion."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from budgets.servers import has_redis, running_postgres, running_replicas, running_valkey

SHARED = ("sqlite", "redis", "postgres")
REPLICATED = ("sentinel", "cluster")
LEDGERS = (*SHARED, *REPLICATED, *(("redis-server",) if has_redis() else ()))
"""`redis` is Valkey from a wheel, `redis-server` the Redis of the system where it is there."""


@contextmanager
def running_ledger(backend: str, *, is_durable: bool = False) -> Iterator[str]:
    """Give the URL of a fresh ledger for the length of the block."""
    if backend in ("redis", "redis-server"):
        with running_valkey(program="valkey" if backend == "redis" else "redis") as valkey:
            yield valkey.url
    elif backend in REPLICATED:
        with running_replicas(backend) as replicas:
            yield replicas.url
    elif backend == "postgres":
        with running_postgres(is_durable=is_durable) as postgres:
            yield postgres.url
    else:
        with tempfile.TemporaryDirectory(prefix="hg-") as folder:
            yield f"sqlite:///{folder}/ledger.db"
