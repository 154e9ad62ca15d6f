"""Grants a second of `loco-agent`, in the process of an interpreter that has it.

    python -m benchmarks.inprocess_peer --agents 1000 --queued 10000 --capacity 8 --seconds 3

It prints one number. Only so much is measured, because all of the queue would take minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from loco import Agent, AsyncLOCOScheduler, SharedResource, Task


async def grants_a_second(*, agents: int, queued: int, capacity: int, seconds: float) -> float:
    names = [f"agent-{number}" for number in range(agents)]
    scheduler = AsyncLOCOScheduler(
        [Agent(agent_id=name) for name in names],
        SharedResource("llm", capacity=capacity),
        max_waiters=2 * queued,
    )
    for number in range(queued):
        await scheduler.submit_task(names[number % agents], Task())
    granted = 0
    enough = asyncio.Event()

    async def call(name: str) -> None:
        nonlocal granted
        async with scheduler.acquire(name):
            granted += 1
            if granted == queued:
                enough.set()
            await asyncio.sleep(0)

    calls = [asyncio.create_task(call(names[number % agents])) for number in range(queued)]
    await asyncio.sleep(0)
    started, before = time.process_time(), granted
    try:
        async with asyncio.timeout(seconds):
            await enough.wait()
    except TimeoutError:
        pass
    rate = (granted - before) / (time.process_time() - started)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("agents", "queued", "capacity"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    print(asyncio.run(grants_a_second(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
