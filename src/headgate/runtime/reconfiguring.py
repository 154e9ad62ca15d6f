"""Other settings for an engine that runs: from the next round on, and for what starts by then.

Rule: what runs goes on as it began. A limit that is lowered below what runs stops new starts only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from headgate.executor import Executor
from headgate.runtime.engine import Engine, EngineSettings

IN_FORCE_SECONDS = 5.0


async def reconfigure(
    engine: Engine, settings: EngineSettings, executors: Mapping[str, Executor]
) -> None:
    """Go by other settings; this cannot fail.

    The executors are open. Those that are there no more are closed when nobody uses them.
    """
    places = settings.places if settings.is_enabled else 0
    await engine.node.offer(places, lease_seconds=settings.lease_seconds)
    before, engine.settings = engine.settings, settings
    engine.workers.lease_seconds = settings.worker_lease_seconds
    engine.reaper.result_ttl_seconds = settings.result_ttl_seconds
    engine.dispatcher.reconfigure(
        settings.desk,
        tick_seconds=settings.tick_seconds,
        asks_budgets=settings.budgets != before.budgets,
    )
    _replace_executors(engine, executors)


async def in_force(engine: Engine) -> None:
    """Wait until the dispatcher goes by the latest settings, within bounds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(IN_FORCE_SECONDS):
            await engine.dispatcher.pending.in_force()


def _replace_executors(engine: Engine, executors: Mapping[str, Executor]) -> None:
    settings, before = engine.settings, engine.executors
    old = {name: one for name, one in before.items() if executors.get(name) is not one}
    attempts = engine.runner.under_way_at(old)
    engine.executors = executors
    engine.runner.reconfigure(
        executors, policy=settings.policy, max_result_bytes=settings.max_result_bytes
    )
    engine.retired.retire(list(old.values()), attempts)
