"""No sequence of a tenant's calls takes from others more than it was granted.

What is left in a scope that a tenant may not charge falls by no more than what the tenant was
admitted to hold, plus what was left in its own scopes that an operator limited. Whatever is claimed
beyond is accepted or rejected, to the micro-dollar, and balances equal the journal.

A tenant that is bound to nothing carries no budget of an operator past its limit, and a scope that
no operator limited has all that it claimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from budgets.servers import PostgresServer, ValkeyServer
from budgets.support import TrackerFactory, drift_of, local_factory, placed_factory
from headgate.core.budgets.ledger import Adjustment
from headgate.core.budgets.scopes import Tenant
from headgate.errors import BudgetExceededError, CallerError

pytestmark = pytest.mark.hypothesis

ROOT_LIMIT = 10_000
OWN_LIMIT = 300
TENANTS = {
    "project:alpha": Tenant(project_id="alpha"),
    "project:beta/agent:evil": Tenant(agent_id="evil"),
}
names = st.sampled_from([f"r{number}" for number in range(5)])
amounts = st.integers(0, 400)
indices = st.integers(0, 1)
ends = st.sampled_from(["commit", "commit", "release", "dispatched", "extend"])


def dollars(micro_usd: int) -> str:
    return f"{micro_usd / 1_000_000:.6f}"


class TenantMachine(RuleBasedStateMachine):
    """Two hostile tenants, one with a limit of its own, beside an operator who decides."""

    make_factory: ClassVar[Callable[[], TrackerFactory]]
    tenants: ClassVar[dict[str, Tenant]] = TENANTS
    root_limit: ClassVar[int] = ROOT_LIMIT

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._factory = type(self).make_factory()
        self.clock = self._factory.clock
        self.tracker = self._runner.run(self._stack.enter_async_context(self._factory()))
        self._runner.run(self.tracker.set_budget("", dollars(self.root_limit)))
        self._runner.run(self.tracker.set_budget("project:alpha", dollars(OWN_LIMIT)))
        self.admitted = 0
        self.known: set[tuple[str, str]] = set()
        self.decided = {Adjustment.ACCEPT: 0, Adjustment.REJECT: 0}

    def teardown(self) -> None:
        """Close the tracker and the loop, also after a failure."""
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    @rule(
        which=indices,
        name=names,
        deeper=st.booleans(),
        usd=amounts,
        at_once=st.booleans(),
    )
    def reserve(self, which: int, name: str, deeper: bool, usd: int, at_once: bool) -> None:
        """Hold something, perhaps nothing, perhaps under a name that is known."""
        scope = self._scope(which)
        inner = f"{scope}/session:s" if deeper else scope
        call = self.tracker.reserve(
            inner, dollars(usd), reservation_id=f"{scope}:{name}", dispatched=at_once
        )
        with suppress(BudgetExceededError, CallerError):
            self._runner.run(call)
            if (scope, name) not in self.known:
                self.known.add((scope, name))
                self.admitted += usd

    @rule(which=indices, name=names, end=ends, usd=amounts)
    def settle(self, which: int, name: str, end: str, usd: int) -> None:
        """Claim any cost, or do anything else to a reservation, late or twice."""
        scope = self._scope(which)
        held, tracker = f"{scope}:{name}", self.tracker
        with suppress(CallerError):
            if end == "commit":
                self._runner.run(tracker.commit(held, dollars(usd), tenant=self.tenants[scope]))
            elif end == "release":
                self._runner.run(tracker.release(held))
            elif end == "extend":
                self._runner.run(tracker.extend(held, 300.0))
            else:
                self._runner.run(tracker.dispatched(held))

    @rule(which=indices, usd=st.integers(1, 10**6))
    def limit_oneself(self, which: int, usd: int) -> None:
        """Have a tenant say how much it may spend."""
        scope = self._scope(which)
        with suppress(CallerError):
            call = self.tracker.create_budget(f"{scope}/session:s", dollars(usd), is_by_tenant=True)
            self._runner.run(call)

    def _scope(self, which: int) -> str:
        scopes = list(self.tenants)
        return scopes[which % len(scopes)]

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def advance(self, seconds: float) -> None:
        """Let leases end."""
        self.clock.advance(seconds)

    @rule(call=st.sampled_from([Adjustment.ACCEPT, Adjustment.REJECT]), usd=st.integers(1, 200))
    def decide(self, call: Adjustment, usd: int) -> None:
        """Have the operator accept or reject some of what is claimed."""
        with suppress(CallerError):
            self._runner.run(self.tracker.adjust("", dollars(usd), call=call))
            self.decided[call] += usd

    def most_lost(self) -> int:
        """Return what the root may lose without the operator's word."""
        return self.admitted + OWN_LIMIT

    @invariant()
    def others_lose_no_more_than_was_granted(self) -> None:
        """Compare what the root has left with what was admitted, allowed and accepted."""
        root = self._runner.run(self.tracker.own_status(""))
        assert root.remaining_micro_usd is not None
        lost = self.root_limit - root.remaining_micro_usd
        assert lost - self.decided[Adjustment.ACCEPT] <= self.most_lost()

    @invariant()
    def every_claim_is_counted_or_waits_or_was_decided(self) -> None:
        """Sum up the journal: nothing of a claim is anywhere else."""
        entries = self._runner.run(self.tracker.journal("", limit=1_000))
        made = sum(
            entry.delta.unaccepted_micro_usd for entry in entries if entry.call.value == "commit"
        )
        left = self._runner.run(self.tracker.own_status("")).unaccepted_micro_usd
        assert made == left + sum(self.decided.values())
        assert drift_of(self._runner.run(self.tracker.ledger.audit())) == {}


class UnboundMachine(TenantMachine):
    """One that is bound to nothing, in the project with a limit and beside it."""

    tenants: ClassVar[dict[str, Tenant]] = {"project:alpha": Tenant(), "session:evil": Tenant()}
    root_limit: ClassVar[int] = 500

    def most_lost(self) -> int:
        """Return what the root may lose without the operator's word."""
        return self.root_limit

    @invariant()
    def the_project_is_within_its_limit(self) -> None:
        """The operator accepts claims in the root alone."""
        project = self._runner.run(self.tracker.own_status("project:alpha"))
        assert project.remaining_micro_usd is not None
        assert project.remaining_micro_usd >= 0

    @invariant()
    def nothing_waits_where_nobody_limited(self) -> None:
        """Whoever only tracks costs sees all of them."""
        status = self._runner.run(self.tracker.own_status("session:evil"))
        assert status.unaccepted_micro_usd == 0


def check(make_factory: Callable[[], TrackerFactory], *, examples: int) -> None:
    for kind in (TenantMachine, UnboundMachine):
        check_machine(kind, make_factory, examples=examples)


def check_machine(
    kind: type[TenantMachine], make_factory: Callable[[], TrackerFactory], *, examples: int
) -> None:
    run_state_machine_as_test(
        type("Machine", (kind,), {"make_factory": staticmethod(make_factory)}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            phases=(Phase.generate, Phase.shrink),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_tenants_on_the_ledger_in_memory() -> None:
    check(local_factory, examples=80)


def test_tenants_on_the_sqlite_ledger(tmp_path: Path) -> None:
    numbers = count()

    def fresh() -> TrackerFactory:
        path = str(tmp_path / f"{next(numbers)}.db")
        return placed_factory("sqlite", "SqliteBudgetTracker", path, path)

    check(fresh, examples=20)


def test_tenants_on_the_redis_ledger(valkey: ValkeyServer) -> None:
    def fresh() -> TrackerFactory:
        valkey.flush()
        return placed_factory("redis", "RedisBudgetTracker", valkey.url, valkey.url)

    check(fresh, examples=20)


def test_tenants_on_the_postgresql_ledger(postgres: PostgresServer) -> None:
    def fresh() -> TrackerFactory:
        url = postgres.new_schema()
        return placed_factory("postgres", "PostgresBudgetTracker", url, url)

    check(fresh, examples=10)
