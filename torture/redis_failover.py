"""A Redis with two replicas fails over again and again, and nothing that was granted is lost.

Behind Sentinels and in a cluster, on Valkey and on the Redis of the system. The primary is killed;
is killed and back before it is replaced; stands still, is replaced, and goes on as if nothing had
been; is parted from everybody but clients; or is parted from the rest together with one replica,
which goes on to confirm what it is told.

Callers insist on each call under its id. Each round is a session with a limit. What callers were
granted there, to the micro-dollar, must never pass the limit and must be what the ledger has; each
id must have the state that its caller was told last.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from budgets.servers import Network, Replicas, has_redis, running_network, running_replicas
from budgets.support import drift_of
from headgate.budgets.connect import connect_budget
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.errors import BudgetExceededError, IllegalSettlementError, LedgerUnavailableError

Result = TypeVar("Result")

TOPOLOGIES = ("sentinel", "cluster")
TRACKERS = 3
CALLERS = 6
LIMIT_MICRO_USD = 400_000
MOST_MICRO_USD = 2_000
LEASE_SECONDS = 3_600.0
PAUSE_SECONDS = 0.05
BETWEEN_SECONDS = 0.5
SPLIT_SECONDS = 1.5
MOST_SECONDS = 120.0
FULL_RATIO = 0.9
DURABLE = ("--appendfsync", "always")
LOOKED_AT_ONCE = 500


@dataclass
class Round:
    """A session with a limit, and what callers know of it."""

    name: str
    limit_micro_usd: int = LIMIT_MICRO_USD
    held_micro_usd: int = 0
    spent_micro_usd: int = 0
    refusals: int = 0

    @property
    def ratio(self) -> float:
        """How much of the limit callers were granted."""
        return (self.held_micro_usd + self.spent_micro_usd) / self.limit_micro_usd


class Known(NamedTuple):
    """What a caller was told last of a reservation."""

    session: str
    held_micro_usd: int
    is_dispatched_at_once: bool
    state: str


@dataclass
class Findings:
    """What was done, and what was found."""

    failovers: dict[str, int] = field(default_factory=dict)
    longest_seconds: dict[str, float] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    lifecycles: int = 0
    calls: int = 0
    unacknowledged: int = 0
    is_over: bool = False
    highest_ratio: float = 0.0
    lost: int = 0
    differing: int = 0
    drift: int = 0
    seconds: float = 0.0

    def is_right(self, failovers: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        is_kept = self.highest_ratio <= 1.0 and not self.lost and not self.differing
        is_enough = sum(self.failovers.values()) >= failovers and self.highest_ratio > FULL_RATIO
        return is_kept and is_enough and not self.drift

    async def insist(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make a call until it is answered."""
        ends_at = time.monotonic() + MOST_SECONDS
        while time.monotonic() < ends_at:
            try:
                answer = await call()
            except LedgerUnavailableError:
                self.unacknowledged += 1
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                self.calls += 1
                return answer
        raise AssertionError("no answer in time")


async def torture(service: Replicas, network: Network, *, failovers: int, seed: int) -> Findings:
    """Fail over under load, and hold what callers know against the ledger."""
    findings = Findings()
    source = random.Random(seed)
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        trackers = [
            await stack.enter_async_context(connect_budget(service.url)) for _ in range(TRACKERS)
        ]
        await _begin_round(findings, trackers[0])
        async with asyncio.TaskGroup() as group:
            group.create_task(_turn_rounds(findings, trackers[0]))
            for number in range(TRACKERS * CALLERS):
                own = random.Random(f"{seed}:{number}")
                group.create_task(_call(findings, trackers[number % TRACKERS], own))
            for number in range(failovers):
                kind = KINDS[number % len(KINDS)]
                await _fail_over(service, network, findings, kind, source)
            await _fill_a_round(findings)
            findings.is_over = True
        await _look(findings, trackers[0])
    findings.seconds = time.monotonic() - started
    return findings


KINDS = ("killed", "restarted", "stopped", "parted alone", "parted with a replica")


async def _fail_over(
    service: Replicas, network: Network, findings: Findings, kind: str, source: random.Random
) -> None:
    calls = findings.calls
    port = await asyncio.to_thread(service.wait_for_primary)
    server = service.servers[port]
    beside = source.choice([copy for copy in service.copies() if copy != port])
    began = time.monotonic()
    match kind:
        case "killed" | "restarted":
            await asyncio.to_thread(server.kill)
        case "stopped":
            server.stand_still()
        case "parted alone":
            network.split({port})
        case _:
            network.split({port, beside})
    if kind != "restarted":
        await asyncio.to_thread(lambda: service.wait_for_primary(other_than=port))
        await asyncio.sleep(SPLIT_SECONDS)
    match kind:
        case "killed" | "restarted":
            await asyncio.to_thread(server.start)
        case "stopped":
            server.go_on()
        case _:
            network.heal()
    await asyncio.to_thread(service.wait_until_whole)
    answered = findings.calls
    ends_at = time.monotonic() + MOST_SECONDS
    while findings.calls < answered + TRACKERS * CALLERS:
        assert time.monotonic() < ends_at, "calls are not answered again"
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - began
    findings.failovers[kind] = findings.failovers.get(kind, 0) + 1
    findings.longest_seconds[kind] = max(findings.longest_seconds.get(kind, 0.0), seconds)
    count = sum(findings.failovers.values())
    meanwhile = findings.calls - calls
    print(f"  {count}: the primary was {kind}; {seconds:.1f} s, {meanwhile:,} calls", flush=True)
    await asyncio.sleep(BETWEEN_SECONDS)


async def _begin_round(findings: Findings, tracker: LedgerTracker) -> None:
    name = f"session:round-{len(findings.rounds)}"
    await findings.insist(lambda: tracker.set_budget(name, f"0.{LIMIT_MICRO_USD:06}"))
    findings.rounds.append(Round(name))


async def _fill_a_round(findings: Findings) -> None:
    """Let callers use up a limit, for which a few failovers leave them too little time."""
    ends_at = time.monotonic() + MOST_SECONDS
    while findings.highest_ratio <= FULL_RATIO and time.monotonic() < ends_at:  # noqa: ASYNC110  a figure
        await asyncio.sleep(PAUSE_SECONDS)


async def _turn_rounds(findings: Findings, tracker: LedgerTracker) -> None:
    """Begin another round when callers have been refused often enough in this one."""
    while not findings.is_over:
        await asyncio.sleep(PAUSE_SECONDS)
        if findings.rounds[-1].refusals > TRACKERS * CALLERS:
            await _begin_round(findings, tracker)


async def _call(findings: Findings, tracker: LedgerTracker, source: random.Random) -> None:
    while not findings.is_over:
        try:
            await _lifecycle(findings, tracker, source)
        except IllegalSettlementError as error:
            findings.lost += 1
            print(f"  {error}", flush=True)
        await asyncio.sleep(0.002)


async def _lifecycle(findings: Findings, tracker: LedgerTracker, source: random.Random) -> None:
    findings.lifecycles += 1
    current, name = findings.rounds[-1], f"r{findings.lifecycles}"
    known = Known(current.name, source.randint(1, MOST_MICRO_USD), source.random() < 0.5, "held")
    try:
        await findings.insist(lambda: _reserve(tracker, name, known))
    except BudgetExceededError:
        current.refusals += 1
        await asyncio.sleep(PAUSE_SECONDS)
        return
    held = known.held_micro_usd
    current.held_micro_usd += held
    findings.highest_ratio = max(findings.highest_ratio, current.ratio)
    ending, actual = source.random(), source.randint(held // 2, held)
    # What is given back may be granted to somebody else before the answer comes.
    if ending < 0.6:
        current.held_micro_usd -= held
        current.spent_micro_usd += actual
        await findings.insist(lambda: tracker.commit(name, f"0.{actual:06}"))
        known = known._replace(state="committed")
    elif ending < 0.8:
        current.held_micro_usd -= held
        await findings.insist(lambda: tracker.release(name))
        known = known._replace(state="released")
    elif known.is_dispatched_at_once:
        known = known._replace(state="dispatched")
    findings.known[name] = known


async def _reserve(tracker: LedgerTracker, name: str, known: Known) -> ReservationToken:
    return await tracker.reserve(
        known.session,
        f"0.{known.held_micro_usd:06}",
        reservation_id=name,
        lease_seconds=LEASE_SECONDS,
        dispatched=known.is_dispatched_at_once,
    )


async def _look(findings: Findings, tracker: LedgerTracker) -> None:
    """Hold each round, and then each id, against the ledger."""
    for one in findings.rounds:
        status = await findings.insist(partial(tracker.status, one.name))
        booked = status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd
        findings.differing += booked != (one.spent_micro_usd, one.held_micro_usd, 0)
    findings.drift = len(drift_of(await findings.insist(tracker.ledger.audit)))

    async def is_lost(name: str) -> bool:
        known = findings.known[name]
        try:
            token = await findings.insist(lambda: _reserve(tracker, name, known))
        except BudgetExceededError:
            return True
        return token.state.value != known.state

    names = list(findings.known)
    for first in range(0, len(names), LOOKED_AT_ONCE):
        lost = await asyncio.gather(*map(is_lost, names[first : first + LOOKED_AT_ONCE]))
        findings.lost += sum(lost)


def run(options: argparse.Namespace) -> bool:
    """Torture each kind of service on each program, and tell whether all is right."""
    is_right = True
    for topology in TOPOLOGIES:
        if options.backend and topology not in options.backend:
            continue
        for program in ("valkey", "redis"):
            title = f"{program} that fails over, {topology}"
            if program == "redis" and not has_redis():
                print(f"\nskipped {title}: no redis-server is here; install Debian's redis-server")
                continue
            print(f"\n{title}", flush=True)
            with (
                running_network() as network,
                running_replicas(topology, program, *DURABLE, network=network) as service,
            ):
                found = asyncio.run(
                    torture(service, network, failovers=options.failovers, seed=options.seed)
                )
            is_kept = found.is_right(options.failovers)
            is_right &= is_kept
            _report(title, found, is_kept=is_kept)
    return is_right


def _report(title: str, found: Findings, *, is_kept: bool) -> None:
    print(f"{title}: {'kept' if is_kept else 'BROKEN'} ({found.seconds:.0f} s)")
    for kind, count in found.failovers.items():
        longest = found.longest_seconds[kind]
        print(f"  {kind:<22} {count} times, whole again after {longest:.1f} s at most")
    print(f"  lifecycles             {found.lifecycles:,} in {len(found.rounds)} rounds")
    print(f"  calls answered         {found.calls:,}")
    print(f"  unacknowledged         {found.unacknowledged:,}, each made again under its id")
    print(f"  highest ratio          {found.highest_ratio:.6f}")
    print(f"  rounds that differ     {found.differing}")
    print(f"  ids lost or changed    {found.lost} of {len(found.known):,}")
    print(f"  drift                  {found.drift}")
