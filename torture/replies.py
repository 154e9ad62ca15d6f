"""A fault proxy loses thousands of replies, and still no amount is booked twice."""

from __future__ import annotations

import argparse
import asyncio
import time

from budgets.fault_proxy import FaultProxy, running_proxy
from budgets.lost_replies import Outcome, lose_replies
from budgets.proxied import Proxied, proxied_postgres, proxied_redis
from budgets.servers import running_postgres, running_valkey
from budgets.support import Sums, drift_of, usd

CALLERS = 16
BACKENDS = ("redis", "postgres")


async def lose(proxied: Proxied, *, drops: int, seed: int) -> tuple[FaultProxy, Outcome, bool]:
    """Lose replies, then compare what the callers know with what is in the ledger."""
    proxy = proxied.proxy(seed=seed)
    async with running_proxy(proxy), proxied.through(proxy) as tracker:
        proxy.harm(drop_reply=0.4, cut_request=0.05, delay_reply=0.02)
        outcome = await lose_replies(tracker, proxy, drops=drops, callers=CALLERS, seed=seed)
        proxy.heal()
    async with proxied.direct() as tracker:
        booked = await usd(tracker)
        drift = drift_of(await tracker.ledger.audit())
    known = Sums(outcome.spent_micro_usd, outcome.reserved_micro_usd, outcome.overrun_micro_usd)
    is_right = booked == known and not drift and not outcome.wrong_answers
    return proxy, outcome, is_right and proxy.dropped_replies >= drops


def run(options: argparse.Namespace) -> bool:
    """Lose replies of each backend that has a server, and tell whether all is right."""
    verdicts = [
        _run_one(backend, options) for backend in options.backend or BACKENDS if backend in BACKENDS
    ]
    return all(verdicts)


def _run_one(backend: str, options: argparse.Namespace) -> bool:
    started = time.monotonic()
    if backend == "redis":
        with running_valkey() as valkey:
            found = lose(proxied_redis(valkey), drops=options.drops, seed=options.seed)
            proxy, outcome, is_right = asyncio.run(found)
    else:
        with running_postgres() as postgres:
            found = lose(proxied_postgres(postgres), drops=options.drops, seed=options.seed)
            proxy, outcome, is_right = asyncio.run(found)
    seconds = time.monotonic() - started
    print(f"\nlost replies on {backend}: {'kept' if is_right else 'BROKEN'} ({seconds:.0f} s)")
    print(f"  replies lost        {proxy.dropped_replies:,}")
    print(f"  requests lost       {proxy.cut_requests:,}")
    print(f"  lifecycles          {outcome.lifecycles:,}")
    print(f"  calls               {outcome.calls:,}")
    print(f"  unacknowledged      {outcome.unacknowledged:,}, each made again under its id")
    print(f"  wrong answers       {len(outcome.wrong_answers)}")
    print(f"  ledger as expected  {is_right}")
    return is_right
