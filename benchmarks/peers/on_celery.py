"""Celery on Redis: one process, many messages fetched ahead, results not kept."""

from __future__ import annotations

import sys

from celery import Celery

from benchmarks.peers.marks import broker_url, count_one

app = Celery("noop", broker=broker_url().replace("unix://", "redis+socket://").partition("?")[0])
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=1_000,
    worker_send_task_events=False,
    worker_enable_remote_control=False,
    broker_connection_retry_on_startup=True,
)


def _noop() -> None:
    count_one()


noop = app.task(name="noop")(_noop)


def worker_command() -> list[str]:
    return [
        *(sys.executable, "-m", "celery", "--app", "benchmarks.peers.on_celery", "worker"),
        *("--pool", "threads", "--concurrency", "8", "--loglevel", "ERROR"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]


def produce(tasks: int) -> None:
    with app.producer_pool.acquire() as producer:
        for _ in range(tasks):
            noop.apply_async(producer=producer)
