"""SAQ on Redis: one event loop that runs many jobs at once."""

from __future__ import annotations

import asyncio
import sys

import uvloop
from redis import asyncio as redis
from saq import Worker
from saq.queue.redis import RedisQueue

from benchmarks.peers.marks import broker_url, count_one

CONCURRENCY = 100
CHUNK = 100


async def noop(_context: object) -> None:
    count_one()


def _queue() -> RedisQueue:
    return RedisQueue(redis.from_url(broker_url(), max_connections=2 * CONCURRENCY))


def worker_command() -> list[str]:
    return [sys.executable, "-m", "benchmarks.peers.on_saq"]


def produce(tasks: int) -> None:
    uvloop.run(_produce(tasks))


async def _produce(tasks: int) -> None:
    queue = _queue()
    await queue.connect()
    for start in range(0, tasks, CHUNK):
        numbers = range(min(CHUNK, tasks - start))
        await asyncio.gather(*(queue.enqueue("noop", ttl=-1) for _ in numbers))
    await queue.disconnect()


async def _work() -> None:
    worker = Worker(_queue(), functions=[noop], concurrency=CONCURRENCY)
    await worker.start()


if __name__ == "__main__":
    uvloop.run(_work())
