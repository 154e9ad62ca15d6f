"""A state machine that calls a ledger and the plain model alike, and compares every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from budgets.plain_model import Amounts, Answer, PlainModel
from budgets.support import TrackerFactory, drift_of, flat
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.core.budgets.scopes import charged_scopes, parse_scope
from headgate.errors import BudgetExceededError, IllegalSettlementError

SCOPES = ["", "session:a", "session:a/workflow:w1", "session:a/workflow:w2", "tenant:t/team:x"]
EVERY_SCOPE = [*SCOPES, "tenant:t"]
NAMES = [f"r{number}" for number in range(6)]
TEN_MINUTES_SECONDS = 600.0
NEVER_SECONDS = 7 * 86_400.0

scopes = st.sampled_from(SCOPES)
names = st.sampled_from(NAMES)
amounts = st.tuples(st.integers(0, 40), st.integers(0, 40))
limits = st.one_of(st.none(), st.integers(0, 150))
leases = st.sampled_from([1.0, 30.0, 300.0])


def dollars(micro_usd: int) -> str:
    return f"0.{micro_usd:06}"


class LedgerMachine(RuleBasedStateMachine):
    """Two trackers on the same ledger, turn about, beside one model."""

    make_factory: ClassVar[Callable[[], TrackerFactory]]

    def __init__(self) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._factory = type(self).make_factory()
        self.clock = self._factory.clock
        # Ten minutes to midnight, so that windows by day turn over on the way.
        self.clock.advance(86_400 - TEN_MINUTES_SECONDS)
        self.model = PlainModel(now=self.clock())
        self._trackers = [self._open(), self._open()]
        self._turn = 0
        self._fresh = 0

    def _open(self) -> LedgerTracker:
        return self._runner.run(self._stack.enter_async_context(self._factory()))

    @property
    def tracker(self) -> LedgerTracker:
        """The tracker whose turn it is."""
        self._turn += 1
        return self._trackers[self._turn % 2]

    def teardown(self) -> None:
        """Close the trackers and the loop, also after a failure."""
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    def _compare(self, call: Awaitable[ReservationToken | None], expected: Answer) -> None:
        # Commit and release answer nothing; what they did is read by the invariant.
        answer = self._runner.run(answer_of(call))
        assert answer in (expected, "done" if expected != "refused" else expected)
        assert (answer == "refused") == (expected == "refused")

    @rule(scope=scopes, usd=limits, tokens=limits, by_day=st.booleans())
    def set_budget(self, scope: str, usd: int | None, tokens: int | None, by_day: bool) -> None:
        """Replace a limit; without any amount there is no window either."""
        limit_usd = None if usd is None else dollars(usd)
        window = "day" if by_day else None
        self._runner.run(self.tracker.set_budget(scope, limit_usd, tokens, window))
        is_by_day = by_day and (usd is not None or tokens is not None)
        self.model.pass_time()
        self.model.set_limit(scope, (usd, tokens, is_by_day))

    @rule(
        name=names,
        scope=scopes,
        also=st.lists(scopes, max_size=2),
        asked=amounts,
        lease=leases,
        at_once=st.booleans(),
    )
    def reserve(
        self,
        *,
        name: str,
        scope: str,
        also: list[str],
        asked: Amounts,
        lease: float,
        at_once: bool,
    ) -> None:
        """Reserve under an id that may be known, with parameters that may differ."""
        self.model.pass_time()
        reached = charged_scopes(parse_scope(scope), [parse_scope(other) for other in also])
        expected = self.model.reserve(name, reached, asked, lease, at_once=at_once)
        call = self.tracker.reserve(
            scope,
            dollars(asked[0]),
            tokens=asked[1],
            reservation_id=name,
            lease_seconds=lease,
            also=also,
            dispatched=at_once,
        )
        self._compare(call, expected)

    @rule(scope=scopes, asked=amounts, count=st.integers(2, 6))
    def reserve_together(self, scope: str, asked: Amounts, count: int) -> None:
        """Reserve the same several times at once: as many get it as would one after another."""
        self.model.pass_time()
        reached = charged_scopes(parse_scope(scope))
        fresh = [f"together-{self._fresh + number}" for number in range(count)]
        self._fresh += count
        expected = [
            self.model.reserve(name, reached, asked, NEVER_SECONDS, at_once=False) for name in fresh
        ]
        answers = self._runner.run(self._all_at_once(scope, asked, fresh))
        admitted = [name for name, answer in zip(fresh, answers, strict=True) if answer == "held"]
        assert len(admitted) == expected.count("held")
        # Who got it is open; the model takes over the names that did.
        held = [self.model.reservations.pop(name) for name in fresh[: len(admitted)]]
        self.model.reservations.update(zip(admitted, held, strict=True))

    async def _all_at_once(self, scope: str, asked: Amounts, fresh: list[str]) -> list[Answer]:
        calls = (
            self.tracker.reserve(
                scope,
                dollars(asked[0]),
                tokens=asked[1],
                reservation_id=name,
                lease_seconds=NEVER_SECONDS,
            )
            for name in fresh
        )
        return await asyncio.gather(*(answer_of(call) for call in calls))

    @rule(name=names)
    def dispatched(self, name: str) -> None:
        """Mark one as dispatched."""
        self.model.pass_time()
        self._compare(self.tracker.dispatched(name), self.model.dispatched(name))

    @rule(name=names, lease=leases)
    def extend(self, name: str, lease: float) -> None:
        """Renew a lease."""
        self.model.pass_time()
        self._compare(self.tracker.extend(name, lease), self.model.extend(name, lease))

    @rule(name=names, actual=amounts)
    def commit(self, name: str, actual: Amounts) -> None:
        """Book an actual, perhaps late, perhaps twice, perhaps another one."""
        self.model.pass_time()
        call = self.tracker.commit(name, dollars(actual[0]), tokens=actual[1])
        self._compare(call, self.model.commit(name, actual))

    @rule(name=names)
    def release(self, name: str) -> None:
        """Give one back."""
        self.model.pass_time()
        self._compare(self.tracker.release(name), self.model.release(name))

    @rule(seconds=st.sampled_from([0.5, 30.0, TEN_MINUTES_SECONDS]))
    def advance(self, seconds: float) -> None:
        """Let leases end and days turn."""
        self.clock.advance(seconds)
        self.model.now = self.clock()

    @rule()
    def audit(self) -> None:
        """Hold the balances against the journal."""
        self.model.pass_time()
        assert drift_of(self._runner.run(self.tracker.ledger.audit())) == {}

    @invariant()
    def balances_are_those_of_the_model(self) -> None:
        """Compare every scope after every step."""
        self.model.pass_time()
        found = flat(self._runner.run(self.tracker.status()))
        for scope in EVERY_SCOPE:
            status = found.get(scope)
            read = (
                ((0, 0, 0), (0, 0, 0))
                if status is None
                else (
                    (status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd),
                    (status.spent_tokens, status.reserved_tokens, status.overrun_tokens),
                )
            )
            assert read == (self.model.sums(scope, 0), self.model.sums(scope, 1)), scope


async def answer_of(call: Awaitable[ReservationToken | None]) -> Answer:
    """Return what a call answered, in the words of the model."""
    try:
        token = await call
    except IllegalSettlementError:
        return "refused"
    except BudgetExceededError as error:
        sums = (error.spent, error.reserved, error.overrun)
        return ("exceeded", error.scope, error.unit, error.limit, *sums)
    return "done" if token is None else token.state.value


def check_against_the_model(
    make_factory: Callable[[], TrackerFactory], *, examples: int, shrinks: bool = True
) -> None:
    """Run the machine on a fresh ledger for each example; raises at the first difference."""
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    run_state_machine_as_test(
        type("Machine", (LedgerMachine,), {"make_factory": staticmethod(make_factory)}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            phases=phases,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
