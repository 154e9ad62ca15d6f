"""Taskiq on Redis: one event loop that runs many tasks at once, results not kept."""

from __future__ import annotations

import asyncio
import sys

import uvloop
from taskiq_redis import ListQueueBroker

from benchmarks.peers.marks import broker_url, count_one

CONCURRENCY = 100
CHUNK = 100

broker = ListQueueBroker(broker_url(), max_connection_pool_size=CHUNK)


async def _noop() -> None:
    count_one()


noop = broker.register_task(_noop, task_name="noop")


def worker_command() -> list[str]:
    return [
        *(sys.executable, "-m", "taskiq", "worker", "benchmarks.peers.on_taskiq:broker"),
        *("--workers", "1", "--max-async-tasks", str(CONCURRENCY), "--no-parse"),
        *("--ack-type", "when_received", "--log-level", "ERROR"),
    ]


def produce(tasks: int) -> None:
    uvloop.run(_produce(tasks))


async def _produce(tasks: int) -> None:
    await broker.startup()
    for start in range(0, tasks, CHUNK):
        await asyncio.gather(*(noop.kiq() for _ in range(min(CHUNK, tasks - start))))
    await broker.shutdown()
