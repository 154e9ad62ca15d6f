"""Budgets over random fleets, at the defaults: what nobody gave an estimate for passes no limit.

Nodes and the dispatcher crash, attempts fail, get lost and are cancelled. Some tasks come with an
estimate; some targets report what they used, some only tokens, some name a model without a price,
some say nothing. The journal of the ledger is played back entry by entry, in the store and outside.
`MONEY_SEEDS=2000 pytest tests/engine/test_money_simulation.py -o timeout=0` plays more seeds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.simulated_service import (
    LATE_SECONDS,
    Plan,
    Report,
    SimulatedService,
    plan_of,
    run_service,
)
from engine.simulated_work import FOREVER_SECONDS, Work
from engine.witness import Witness
from headgate.budgets.local import LocalLedger
from headgate.core.budgets import ledger as ledger_module
from headgate.core.budgets.ledger import (
    EMPTY,
    Adjustment,
    Balance,
    Clock,
    JournalEntry,
    LedgerState,
    Limit,
    Part,
    Unit,
    read_account,
)
from headgate.core.budgets.reservations import Call, Reservation, Settlement
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import parse_window
from headgate.core.estimates import NOTHING, Estimates
from headgate.core.lifecycle import Failed, Limited, Succeeded, Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task import OnExhausted, Progress, Task, TaskStatus, Terms, task_holding
from headgate.engine.engine import EngineSettings
from headgate.executors.executor import WorkOrder
from headgate.storage.ledger import AMOUNTS, to_entry
from headgate.storage.sqlite import SqliteTransaction
from headgate.storage.unit_of_work import Spec
from headgate.storage.zones import zone
from headgate.testing import SimulatedLoop

SEEDS = int(os.environ.get("MONEY_SEEDS", "8"))
SEEDS_A_TEST = 4
PLANTED_SEEDS = 12
"""How many fleets may miss a planted failure; the first that finds it is the last."""

SILENT_AFTER = 3

DOLLARS = Scope("session:dollars")
TOKENS = Scope("session:tokens")
BOTH = Scope("session:both")
NESTED = Scope("session:both/workflow:w")
HOURLY = Scope("project:x")
BUDGETS = {
    Scope(""): Limit(limit_micro_usd=MicroUsd(40_000_000), limit_tokens=Tokens(400_000)),
    DOLLARS: Limit(limit_micro_usd=MicroUsd(500_000)),
    TOKENS: Limit(limit_tokens=Tokens(3_000)),
    BOTH: Limit(limit_micro_usd=MicroUsd(2_000_000), limit_tokens=Tokens(20_000)),
    NESTED: Limit(limit_micro_usd=MicroUsd(300_000), window=parse_window("day")),
    HOURLY: Limit(limit_tokens=Tokens(4_000), window=parse_window("rolling:1h")),
}
SCOPES: tuple[tuple[str, ...], ...] = (
    *((DOLLARS,), (TOKENS,), (BOTH,), (NESTED,), (HOURLY,), (DOLLARS, TOKENS)),
    *((HOURLY, NESTED), ()),
)
WINDOWED = (NESTED, HOURLY)
ENDS = (Call.COMMIT, Call.RELEASE, Call.EXPIRE)

_JOURNAL = (
    f"SELECT seq, at, reservation_id, call, charges, {', '.join(AMOUNTS)} FROM ledger_journal"
    " WHERE seq > ? ORDER BY seq"
)
_ROWS = "SELECT id, state, progress, spec FROM tasks"
_specs = msgspec.json.Decoder(Spec)
_progresses = msgspec.json.Decoder(Progress)


class Known(NamedTuple):
    """What is known of a task that was submitted: its project and target, and what it gave."""

    kind: tuple[str, str]
    given: frozenset[Unit]


class MoneyWitness(Witness):
    """Plays the journal back, and holds each entry against what was known at that time.

    It knows nothing of estimates: a kind of work is known once anybody has said what it used, and
    says nothing if three successes went by without it.
    """

    def __init__(self, settings: EngineSettings, clock: Clock) -> None:
        super().__init__(settings, clock)
        self.probes = 0
        self.admissions = 0
        self._seq = 0
        self._tasks: dict[str, Known] = {}
        self._figures: set[tuple[str, str, Unit]] = set()
        self._silent: Counter[tuple[str, str, Unit]] = Counter()
        self._ended: set[str] = set()
        self._buckets: dict[Scope, dict[int, Balance]] = {}
        self._live: dict[tuple[str, str], set[str]] = {}

    def look(self, transaction: SqliteTransaction) -> None:
        """Check what is about to be committed."""
        super().look(transaction)
        if not self.commits:
            return
        for row in transaction.read(_ROWS):
            self._learn(*row)
        if not transaction.read("SELECT 1 FROM sqlite_master WHERE name = 'ledger_journal'"):
            return
        for row in transaction.read(_JOURNAL, (self._seq,)):
            self._seq = row[0]
            self.book(to_entry(row[1:]))

    def _learn(self, task_id: str, state: str, progress_text: str, spec_text: str) -> None:
        known = self._tasks.get(task_id)
        if known is None:
            known = self._tasks[task_id] = _known_of(_specs.decode(spec_text))
        if task_id in self._ended:
            return
        progress = _progresses.decode(progress_text)
        project_id, target = known.kind
        is_done = state == TaskStatus.DONE.value
        for unit in Unit:
            is_tokens = unit is Unit.TOKENS
            said = progress.reported_tokens if is_tokens else progress.reported_micro_usd
            # Work that failed and cost nothing has told nothing.
            if said or (said is not None and is_done):
                self._figures.add((project_id, target, unit))
                if progress.is_priced:
                    self._figures.add(("", target, unit))
            elif is_done and said is None:
                self._silent[project_id, target, unit] += 1
        if state in ("done", "failed", "cancelled", "rejected"):
            self._ended.add(task_id)

    def book(self, entry: JournalEntry) -> None:
        """Book one entry of a journal, and look at what is true then."""
        for charge in entry.charges:
            buckets = self._buckets.setdefault(charge.scope, {})
            buckets[charge.bucket_start] = buckets.get(charge.bucket_start, EMPTY).add(entry.delta)
        limited: set[Unit] = set()
        for charge in entry.charges:
            limited |= self._check_scope(charge.scope, entry)
        if entry.call is Call.RESERVE:
            self.admissions += 1
            self._check_start(entry, limited)
        elif entry.call in ENDS:
            for live in self._live.values():
                live.discard(entry.reservation_id)

    def _check_scope(self, scope: Scope, entry: JournalEntry) -> set[Unit]:
        limit = self.settings.budgets.get(scope)
        if limit is None:
            return set()
        account = read_account(
            scope, limit, self._buckets[scope], now=entry.at, tz=zone(limit.window.zone)
        )
        limited = {unit for unit in Unit if limit.amount(unit) is not None}
        for unit in limited:
            spent, reserved, overrun = account.balance.column(unit)
            most = limit.amount(unit) or 0
            if spent + reserved > most:
                self.problems.append(f"{scope} has {spent} + {reserved} {unit.value} of {most}")
            if entry.call is Call.RESERVE and spent + reserved + overrun > most:
                self.problems.append(
                    f"{entry.reservation_id} was admitted to {scope}, which has"
                    f" {spent} + {reserved} + {overrun} {unit.value} of {most}"
                )
        return limited

    def _check_start(self, entry: JournalEntry, limited: set[Unit]) -> None:
        known = self._tasks.get(task_holding(entry.reservation_id))
        if known is None:
            self.problems.append(f"{entry.reservation_id} is of a task that nobody submitted")
            return
        project_id, target = known.kind
        is_probe = False
        for unit in sorted(limited - known.given, key=lambda one: one.value):
            delta = entry.delta
            held = delta.reserved_tokens if unit is Unit.TOKENS else delta.reserved_micro_usd
            kinds = ((project_id, target, unit), ("", target, unit))
            is_known = not self._figures.isdisjoint(kinds)
            is_silent = not is_known and self._silent[kinds[0]] >= SILENT_AFTER
            if not held and not is_silent:
                self.problems.append(f"{known} holds no {unit.value}: {entry}")
            is_probe |= not is_known and not is_silent
        if is_probe:
            self.probes += 1
            live = self._live.setdefault(known.kind, set())
            live.add(entry.reservation_id)
            if len(live) > 1:
                self.problems.append(f"{len(live)} probes of {known.kind}: {sorted(live)}")


def _known_of(spec: Spec) -> Known:
    task, terms = spec.task, spec.terms
    given = set[Unit]()
    if task.estimate_tokens is not None:
        given.add(Unit.TOKENS)
    if terms.estimate_micro_usd is not None or terms.cost_micro_usd is not None:
        given.add(Unit.MICRO_USD)
    return Known((task.project_id, task.target or ""), frozenset(given))


class WitnessedState(LedgerState):
    """A ledger whose witness sees each entry."""

    def __init__(self, book: Callable[[JournalEntry], None]) -> None:
        super().__init__(zone)
        self._book = book

    def _record(
        self,
        settlement: Settlement,
        call: Call | Adjustment,
        now: float,
        parts: Sequence[Part] | None = None,
    ) -> Reservation:
        before = len(self.entries)
        reservation = super()._record(settlement, call, now, parts)
        for entry in self.entries[before:]:
            self._book(entry)
        return reservation


class OutsideLedger(LocalLedger):
    """A ledger that outlives every node."""

    def __init__(self, book: Callable[[JournalEntry], None], *, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._state = WitnessedState(book)

    async def close(self) -> None:
        """Stay open: others use it as well."""


class MoneyService(SimulatedService):
    """A fleet most of whose tasks bring no estimate, in scopes with limits."""

    witness: MoneyWitness

    def __init__(self, loop: SimulatedLoop, plan: Plan, *, is_outside: bool = False) -> None:
        super().__init__(loop, plan)
        if is_outside:
            self.ledger = OutsideLedger(self.witness.book, clock=loop.clock)

    def new_settings(self) -> EngineSettings:
        """Return budgets in both units, with and without windows."""
        return msgspec.structs.replace(super().new_settings(), budgets=BUDGETS)

    def new_witness(self) -> Witness:
        """Return who plays the journal back."""
        return MoneyWitness(self.settings, self.loop.clock)

    def work_of(self, target: str) -> Work:
        """Return work with a heavy tail of costs, of which targets say different things."""
        return _work_of(self.loop.random, target)

    def some_work(self, now: float) -> tuple[Task, Terms]:
        """Return a task in some limited scopes, mostly without an estimate."""
        draws = self.loop.random
        task, terms = super().some_work(now)
        scopes = draws.choice(SCOPES)
        deadlines: list[float | None] = [now + 3.0, now + 60.0, now + 400.0]
        # Nobody waits for the end of a window here.
        deadlines += [] if set(scopes) & set(WINDOWED) else [None, now + LATE_SECONDS]
        task = msgspec.structs.replace(
            task,
            scopes=scopes,
            estimate_tokens=draws.choice([None, None, None, 0, 50, 400]),
            deadline=draws.choice(deadlines),
        )
        terms = msgspec.structs.replace(
            terms,
            action=draws.choice(["work", "search"]),
            estimate_micro_usd=draws.choice([None, None, None, 0, 5_000, 60_000]),
            cost_micro_usd=draws.choice([None] * 9 + [1_000]),
            on_exhausted=draws.choice(list(OnExhausted)),
        )
        return task, terms


def _work_of(random: Random, target: str) -> Work:
    def work(_order: WorkOrder) -> tuple[float, Any]:
        draw = random.random()
        seconds = random.choice([0.0, 0.01, 0.5, 3.0, 8.0])
        cost = random.lognormvariate(9.0, 1.2)
        usage = _said(target, round(cost) + 1, round(cost / 100) + 1, is_odd=random.random() < 0.3)
        if draw < 0.7:
            return seconds, Succeeded(usage=usage)
        if draw < 0.8:
            said = random.choice([usage, Usage()])
            return seconds, Failed(error="it broke", is_transient=True, usage=said)
        if draw < 0.85:
            return seconds, Failed(error="it is wrong", usage=Usage())
        if draw < 0.92:
            return seconds, Limited(retry_after_seconds=random.choice([0.0, 1.0, 5.0]))
        return FOREVER_SECONDS, Succeeded(usage=usage)

    return work


def _said(target: str, micro_usd: int, tokens: int, *, is_odd: bool) -> Usage:
    """Return what a target says of its usage; some say something else at times."""
    match target:
        case "t":
            return Usage(micro_usd=micro_usd, tokens=tokens, model="dear", is_priced=is_odd)
        case "u":
            return Usage(tokens=tokens) if is_odd else Usage()
        case "pull":
            return Usage(micro_usd=micro_usd, tokens=None if is_odd else tokens)
        case _:
            unknown = Usage(tokens=tokens, model="unheard-of")
            return unknown if is_odd else Usage(tokens=tokens, micro_usd=micro_usd)


def play(seed: int, *, is_outside: bool) -> tuple[Report, MoneyWitness]:
    services: list[MoneyService] = []

    def new_service(loop: SimulatedLoop, plan: Plan) -> MoneyService:
        services.append(MoneyService(loop, plan, is_outside=is_outside))
        return services[0]

    report = run_service(plan_of(seed), new_service)
    return report, services[0].witness


LEDGERS = pytest.mark.parametrize("is_outside", [False, True], ids=["own", "outside"])


@LEDGERS
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_no_limit_is_passed_by_more_than_an_overrun_and_probes_run_alone(
    first: int, is_outside: bool
) -> None:
    probes = admissions = 0
    for seed in range(first, min(first + SEEDS_A_TEST, SEEDS)):
        report, witness = play(seed, is_outside=is_outside)
        assert report.problems == (), f"seed {seed}"
        assert report.tasks >= report.acknowledged
        probes += witness.probes
        admissions += witness.admissions
    # A fleet in which nothing was unknown, or nothing was learned, would show nothing.
    assert 0 < probes < admissions


# The same fleets find what is wrong, in a ledger and in a dispatcher.


def _ignore_kinds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_module, "counted_kind", lambda *_: "")


def _hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Estimates, "_unknown", lambda *_: NOTHING)


def _forget_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_module, "_hold_in", lambda _account, _unit, limit, *_: limit // 2 + 1)


@LEDGERS
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (_ignore_kinds, "probes of"),
        (_hold_nothing, "holds no"),
        (_forget_limits, "was admitted to"),
    ],
)
def test_a_planted_failure_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: str,
    is_outside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert any(
        found in problem
        for seed in range(PLANTED_SEEDS)
        for problem in play(seed, is_outside=is_outside)[0].problems
    )
