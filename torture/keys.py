"""A service is killed again and again while clients submit under keys: each key has one task.

Clients send again whatever was not answered, and now and then what was. At the end the tasks in the
store are held against what was answered: none more, none less, none twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from headgate.app import build_store
from headgate.config import load_settings
from headgate.storage.store import TaskQuery
from service.keyed_load import KeyedClients
from service.support import ServiceProcess
from torture.backends import running_ledger

BACKENDS = ("sqlite", "postgres")
CLIENTS = 6
KILLS_SHARE = 4
"""Every start of a service takes seconds, and other checks kill more of them."""

MOST_SECONDS = 1.2
PAGE = 1_000
LIMITS = """[scheduler]
max_queue_size = 10_000_000
max_per_agent = 10_000_000
max_scheduled = 10_000_000
"""


def run(options: argparse.Namespace) -> bool:
    """Kill a service on each backend, and tell whether every key had one task."""
    backends = [one for one in options.backend or BACKENDS if one in BACKENDS]
    verdicts = [_run_one(backend, options) for backend in backends]
    return all(verdicts)


def _run_one(backend: str, options: argparse.Namespace) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hg-") as name, running_ledger(backend) as url:
        folder = Path(name)
        config = folder / "keys.toml"
        config.write_text(f'{LIMITS}\n[store]\nurl = "{url}"\n')
        service = ServiceProcess(folder, "--data", str(folder), "--config", str(config))
        kills = max(1, options.kills // KILLS_SHARE)
        clients = _torture(service, kills=kills, seed=options.seed)
        stored = asyncio.run(_stored(config))
    answered = sorted(answer.body["taskId"] for answer in clients.answers.values())
    is_right = answered == sorted(stored) and not clients.wrong
    seconds = time.monotonic() - started
    print(f"\nkeys on {backend}: {'kept' if is_right else 'BROKEN'} ({seconds:.0f} s)")
    print(f"  kills               {kills:,}")
    print(f"  keys answered       {len(answered):,}")
    print(f"  answers lost        {clients.lost:,}, each asked for again")
    print(f"  answers given again {clients.replays:,}, {len(clients.wrong)} of them another")
    print(f"  tasks stored        {len(stored):,}")
    return is_right


def _torture(service: ServiceProcess, *, kills: int, seed: int) -> KeyedClients:
    draws = random.Random(seed)
    service.start()
    clients = KeyedClients(service, clients=CLIENTS)
    clients.start()
    try:
        for _ in range(kills):
            time.sleep(draws.uniform(0.05, MOST_SECONDS))
            service.kill()
            service.start()
    finally:
        clients.stop()
        service.kill()
    return clients


async def _stored(config: Path) -> list[str]:
    """Read the ids of all tasks, page by page."""
    store = build_store(load_settings(config, {}, {}), data=config.parent, keeps_ledger=True)
    await store.open()
    found: list[str] = []
    page = await store.find(TaskQuery(limit=PAGE))
    while True:
        found += [record.task.id for record in page.records]
        if page.next_before is None:
            break
        page = await store.find(TaskQuery(limit=PAGE, before=page.next_before))
    await store.close()
    return found
