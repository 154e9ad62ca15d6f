"""Eight processes hammer one tree of scopes while their parent kills them at random.

Each round is a session with small limits. When it is nearly used up the next one begins, and the
parent reads the journal of the old one and plays it back: after every admission, what was spent,
reserved and overrun must be within every limit that the admission met. At the end, when all leases
have run out, the balances must equal the journal, nothing may be reserved, and the root must hold
exactly what the sessions hold.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_long
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import TYPE_CHECKING

from budgets.support import drift_of, flat
from headgate.budgets.connect import connect_budget
from headgate.budgets.tracker import MAX_JOURNAL_ENTRIES, LedgerTracker
from headgate.core.budgets.ledger import EMPTY, Balance, JournalEntry
from headgate.core.budgets.reservations import Call
from headgate.errors import LedgerUnavailableError
from torture.backends import LEDGERS, running_ledger
from torture.ledger_worker import LONGEST_LEASE_SECONDS, WORKFLOWS, Count, session_of, work

if TYPE_CHECKING:
    from ctypes import Array

WORKERS = 8
PRELOADED = (
    "torture.ledger_worker",
    "headgate.budgets.postgres",
    "headgate.budgets.redis",
    "headgate.budgets.sqlite",
)
LIMIT_SESSION = 700
LIMIT_WORKFLOW = 300
LONGEST_ROUND_SECONDS = 2.0
REFUSING_SECONDS = 0.03
# A worker that still reserves in a round that is over has done so by then.
SETTLED_SECONDS = 0.3
LONGEST_PAUSE_SECONDS = 0.2
FULL_RATIO = 0.9
FEWEST_ROUNDS = 3
MOST_SECONDS = 600.0


@dataclass
class Findings:
    """What a run on one backend did and found."""

    kills: int = 0
    rounds: int = 0
    admissions: int = 0
    highest_ratio: float = 0.0
    unread_rounds: int = 0
    drift: int = 0
    leaks: int = 0
    root_differs: bool = False
    counts: list[int] = field(default_factory=lambda: [0] * len(Count))

    def is_full(self) -> bool:
        """Tell whether the limits were reached at all, in some rounds."""
        return self.highest_ratio > FULL_RATIO and self.rounds >= FEWEST_ROUNDS

    def is_right(self, kills: int) -> bool:
        """Tell whether every promise was kept, and enough was done to say so."""
        is_kept = self.highest_ratio <= 1.0 and self.drift == 0 and self.leaks == 0
        is_seen = self.counts[Count.VIOLATIONS] == 0 and self.unread_rounds == 0
        is_enough = self.kills >= kills and self.is_full()
        return is_kept and is_seen and is_enough and not self.root_differs


class Fleet:
    """The workers, each with its number; one is started again after a kill."""

    def __init__(self, url: str, seed: int) -> None:
        self.current: c_long = RawValue(c_long, 0)
        self.kills = 0
        self._url = url
        self._seed = seed
        self._random = random.Random(seed)
        self._counts: list[Array[c_long]] = [RawArray(c_long, len(Count)) for _ in range(WORKERS)]
        # Children come from a process without threads, in a few milliseconds.
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._processes = [self._start(index) for index in range(WORKERS)]

    def kill_one(self) -> None:
        """Kill a worker in the middle of whatever it does, and start another."""
        index = self._random.randrange(WORKERS)
        self._end(self._processes[index])
        self.kills += 1
        self._processes[index] = self._start(index)

    def kill_all(self) -> None:
        """Kill every worker for good."""
        for process in self._processes:
            self._end(process)

    def pause_seconds(self) -> float:
        """Draw the time until the next kill."""
        return self._random.uniform(0.0, LONGEST_PAUSE_SECONDS)

    def counts(self) -> list[int]:
        """Sum the counters of all workers."""
        return [sum(column) for column in zip(*self._counts, strict=True)]

    def _start(self, index: int) -> ForkServerProcess:
        self._seed += 1
        arguments = (self._url, self._seed, self._counts[index], self.current)
        process = self._context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    @staticmethod
    def _end(process: ForkServerProcess) -> None:
        process.kill()
        process.join()
        process.close()


async def torture(url: str, *, kills: int, seconds: float, seed: int) -> Findings:
    """Hammer, kill, and look at the ledger."""
    findings = Findings()
    async with connect_budget(url) as tracker:
        await _set_limits(tracker, 0)
        fleet = Fleet(url, seed)
        try:
            reader = asyncio.create_task(_turn_rounds(tracker, fleet, findings))
            ends_at = time.monotonic() + seconds
            gives_up_at = ends_at + MOST_SECONDS
            while fleet.kills < kills or time.monotonic() < ends_at or not findings.is_full():
                if time.monotonic() > gives_up_at:
                    break
                await asyncio.sleep(fleet.pause_seconds())
                fleet.kill_one()
                if reader.done():
                    reader.result()
            reader.cancel()
        finally:
            fleet.kill_all()
        findings.kills, findings.counts = fleet.kills, fleet.counts()
        # Leases are judged by the server's clock, and an extension may have come last.
        await asyncio.sleep(2 * LONGEST_LEASE_SECONDS + SETTLED_SECONDS)
        await _look(tracker, fleet.current.value, findings)
    return findings


async def _set_limits(tracker: LedgerTracker, number: int) -> None:
    session = session_of(number)
    await tracker.set_budget(session, f"0.{LIMIT_SESSION:06}", LIMIT_SESSION)
    for workflow in range(WORKFLOWS):
        scope = f"{session}/workflow:w{workflow}"
        await tracker.set_budget(scope, f"0.{LIMIT_WORKFLOW:06}", LIMIT_WORKFLOW)


async def _turn_rounds(tracker: LedgerTracker, fleet: Fleet, findings: Findings) -> None:
    """Begin a round after the other, each with its limits set, and read those that are over."""
    ended: deque[tuple[str, float]] = deque()
    while True:
        try:
            session = session_of(fleet.current.value)
            await _use_up(tracker, session)
            await _set_limits(tracker, fleet.current.value + 1)
            fleet.current.value += 1
            ended.append((session, time.monotonic()))
            while ended and time.monotonic() - ended[0][1] > SETTLED_SECONDS:
                entries = await tracker.journal(ended[0][0], limit=MAX_JOURNAL_ENTRIES)
                play_back(entries[::-1], findings, _limit_of)
                ended.popleft()
        except LedgerUnavailableError:
            await asyncio.sleep(0.01)


async def _use_up(tracker: LedgerTracker, session: str) -> None:
    """Wait until a session is nearly used up, and a little longer, for the refusals."""
    ends_at = time.monotonic() + LONGEST_ROUND_SECONDS
    while time.monotonic() < ends_at:
        await asyncio.sleep(REFUSING_SECONDS)
        status = await tracker.status(session)
        remaining = min(status.remaining_micro_usd or 0, status.remaining_tokens or 0)
        if remaining < LIMIT_SESSION * (1 - FULL_RATIO):
            break
    await asyncio.sleep(REFUSING_SECONDS)


def play_back(
    entries: Sequence[JournalEntry], findings: Findings, limit_of: Callable[[str], int | None]
) -> None:
    """Book a journal again, oldest first, and look at each admission."""
    balances: dict[str, Balance] = {}
    known: set[str] = set()
    findings.rounds += 1
    for entry in entries:
        if entry.call is Call.RESERVE:
            known.add(entry.reservation_id)
        elif entry.reservation_id not in known:
            # The beginning of the round is no longer in the journal, so nothing can be said.
            findings.unread_rounds += 1
            return
        for charge in entry.charges:
            balance = balances.get(charge.scope, EMPTY).add(entry.delta)
            balances[charge.scope] = balance
            limit = limit_of(charge.scope)
            if entry.call is Call.RESERVE and limit is not None:
                used = max(balance.used_micro_usd, balance.used_tokens)
                findings.highest_ratio = max(findings.highest_ratio, used / limit)
        findings.admissions += entry.call is Call.RESERVE


def _limit_of(scope: str) -> int | None:
    if not scope:
        return None
    return LIMIT_WORKFLOW if "/" in scope else LIMIT_SESSION


async def _look(tracker: LedgerTracker, rounds: int, findings: Findings) -> None:
    """Hold the balances against the journal, and the root against the sessions."""
    await tracker.ledger.sweep()
    audit = await tracker.ledger.audit()
    findings.drift = len(drift_of(audit))
    findings.leaks = sum(
        1 for kept in audit.kept.values() if kept.reserved_micro_usd or kept.reserved_tokens
    )
    root, sessions, workflows = EMPTY, EMPTY, EMPTY
    for (scope, _), balance in audit.kept.items():
        if not scope:
            root = root.add(balance)
        elif "/" in scope:
            workflows = workflows.add(balance)
        else:
            sessions = sessions.add(balance)
    findings.root_differs = not root == sessions == workflows
    status = flat(await tracker.status())
    shown = sum(status[name].spent_micro_usd for name in status if name and "/" not in name)
    findings.root_differs |= shown != root.spent_micro_usd or len(status) < rounds


def run(options: argparse.Namespace) -> bool:
    """Torture each backend, print what was found, and tell whether all is right."""
    is_right = True
    for backend in options.backend or LEDGERS:
        started = time.monotonic()
        with running_ledger(backend) as url:
            found = asyncio.run(
                torture(url, kills=options.kills, seconds=options.seconds, seed=options.seed)
            )
        verdict = found.is_right(options.kills)
        is_right &= verdict
        _report(backend, found, time.monotonic() - started, is_kept=verdict)
    return is_right


def _report(backend: str, found: Findings, seconds: float, *, is_kept: bool) -> None:
    counts = found.counts
    print(f"\nledger on {backend}: {'kept' if is_kept else 'BROKEN'} ({seconds:.0f} s)")
    print(f"  operations          {counts[Count.OPERATIONS]:,}")
    print(f"  refusals            {counts[Count.REFUSALS]:,}")
    print(f"  late calls          {counts[Count.LATE]:,}")
    print(f"  unavailable         {counts[Count.UNAVAILABLE]:,}")
    print(f"  kills               {found.kills}")
    print(f"  admissions replayed {found.admissions:,} in {found.rounds} rounds")
    print(f"  highest ratio       {found.highest_ratio:.6f}")
    print(f"  seen over a limit   {counts[Count.VIOLATIONS]}")
    print(f"  rounds not read     {found.unread_rounds}")
    print(f"  drift               {found.drift}")
    print(f"  leaks               {found.leaks}")
    print(f"  root differs        {found.root_differs}")
