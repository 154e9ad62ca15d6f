"""Ledgers for the checks: a file, or a server started for the occasion."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from budgets.servers import running_postgres, running_valkey

SHARED = ("sqlite", "redis", "postgres")


@contextmanager
def running_ledger(backend: str, *, is_durable: bool = False) -> Iterator[str]:
    """Give the URL of a fresh ledger for the length of the block."""
    if backend == "redis":
        with running_valkey() as valkey:
            yield valkey.url
    elif backend == "postgres":
        with running_postgres(is_durable=is_durable) as postgres:
            yield postgres.url
    else:
        with tempfile.TemporaryDirectory(prefix="hg-") as folder:
            yield f"sqlite:///{folder}/ledger.db"
