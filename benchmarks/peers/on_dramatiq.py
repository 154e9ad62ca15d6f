"""Dramatiq on Redis: one process of many threads."""

from __future__ import annotations

import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.marks import broker_url, count_one

THREADS = 100

broker = RedisBroker(url=f"{broker_url()}&max_connections={2 * THREADS}")
dramatiq.set_broker(broker)


def _noop() -> None:
    count_one()


noop = dramatiq.actor(_noop, actor_name="noop")


def worker_command() -> list[str]:
    return [
        *(sys.executable, "-m", "dramatiq", "benchmarks.peers.on_dramatiq"),
        *("--processes", "1", "--threads", str(THREADS)),
    ]


def produce(tasks: int) -> None:
    for _ in range(tasks):
        noop.send()
