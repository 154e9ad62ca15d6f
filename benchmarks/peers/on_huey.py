"""Huey on Redis, or on a SQLite file that is synced to disk at each commit or never.

Results are not kept.
"""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

from huey import RedisHuey, SqliteHuey

from benchmarks.peers.marks import broker_url, count_one

REDIS_WORKERS = 8
# A file has one writer at a time, and more of them only wait for each other.
SQLITE_WORKERS = 1
LOCK_SECONDS = 60
UNSYNCED = "unsynced"


def _huey() -> RedisHuey | SqliteHuey:
    url = broker_url()
    place = urlsplit(url)
    if place.scheme != "sqlite":
        return RedisHuey(url=url, results=False)
    is_synced = place.query != UNSYNCED
    return SqliteHuey(filename=place.path, results=False, timeout=LOCK_SECONDS, fsync=is_synced)


huey = _huey()


def _noop() -> None:
    count_one()


noop = huey.task()(_noop)


def worker_command() -> list[str]:
    workers = REDIS_WORKERS if isinstance(huey, RedisHuey) else SQLITE_WORKERS
    return [
        *(sys.executable, "-m", "huey.bin.huey_consumer", "benchmarks.peers.on_huey.huey"),
        *("--workers", str(workers), "--worker-type", "thread", "--no-periodic", "--quiet"),
        *("--delay", "0.01", "--max-delay", "0.01"),
    ]


def produce(tasks: int) -> None:
    for _ in range(tasks):
        noop()
