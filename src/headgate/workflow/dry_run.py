"""What a run would do, without doing it: the order of its steps, what they cost, where it ends.

The rules are those of a real run: the same progress gives out what is ready, the same estimates are
held, and the same inequality refuses what a budget cannot hold. What only a run can find out is
taken at its best: every step succeeds, costs what is held for it, and takes as long as any other;
what it will have put out is not known, so an estimate that is made from it is only a lower bound.
What nobody knows the cost of holds a probe, which is shown and not counted as spent.

Rule: nothing is created, held or written, in any ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from headgate.budgets.connect import SCHEMES, connect_budget, scheme_of, sqlite_path
from headgate.client.client import Client
from headgate.core.budgets.ledger import (
    PROBE_SHARE,
    Account,
    Balance,
    Limit,
    Refused,
    ReserveRequest,
    Unit,
    amounts_to_hold,
)
from headgate.core.budgets.reservations import Delta
from headgate.core.budgets.scopes import Scope, ancestors
from headgate.core.estimates import NOTHING, PROBE, Basis, Hold, given
from headgate.core.money import MicroUsd, Tokens, amount_of
from headgate.errors import InvalidSettingError, WorkflowError
from headgate.executors.callable import CallableExecutor
from headgate.redaction import hidden_address
from headgate.workflow.backend import Amounts, Money, StepOrder
from headgate.workflow.budgets import (
    ChangeCommand,
    RunLedger,
    change_at_service,
    change_in_ledger,
    create_limits,
    limits_of,
)
from headgate.workflow.conditions import condition_references, holds
from headgate.workflow.costs import earlier_kinds, estimated
from headgate.workflow.expansion import Expansion, ItemSource
from headgate.workflow.local_backend import (
    StepHolds,
    check_steps,
    in_file,
    missing_keys,
    named_targets,
    search,
    step_executors,
)
from headgate.workflow.placeholders import StepPlaceholder, UnfilledError, references
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.remote_backend import check_known_targets, money_of, own_scope, within
from headgate.workflow.run_record import RunOptions, RunScope
from headgate.workflow.step_executors import CallSteps
from headgate.workflow.step_requests import RefusedAmounts, Variables, request_of
from headgate.workflow.workflow import ModelWork, Step, Workflow

Fate = Literal["runs", "fails", "skipped", "not run"]

MOST_PARTS = 10_000
"""How many parts of the order are kept; what follows is in the sums only."""


class DryHold(msgspec.Struct, frozen=True, kw_only=True):
    """What the first of some runs would hold in one unit, how that comes about, and in words."""

    unit: Unit
    """`micro_usd` or `tokens`."""
    basis: Basis
    """How the amount was found: `given`, `free`, `learned`, `configured`, `probe` or `silent`."""
    amount: int
    """What would be reserved."""
    samples: int
    """How many known costs it was learned from."""
    text: str
    """The same in a sentence."""


class DryPart(msgspec.Struct, kw_only=True):
    """Runs of one step that come one after another in the order, and what becomes of them."""

    step: str
    """The step."""
    first: int | None
    """The number of the first item, or null for a step that runs once."""
    last: int | None
    """The number of the last item."""
    runs: int
    """How many runs these are."""
    fate: Fate
    """What would become of them: `runs`, `fails`, `skipped` or `not run`."""
    why: str = ""
    """Why they would not run."""
    micro_usd: int = 0
    """What they cost together."""
    tokens: int = 0
    """Their tokens together."""
    least_micro_usd: int = 0
    """What the cheapest of them costs."""
    most_micro_usd: int = 0
    """What the dearest of them costs."""
    cumulated_micro_usd: int = 0
    """What everything up to here costs."""
    is_least: bool = False
    """The estimate is a lower bound: it depends on what earlier steps put out."""
    is_unknown: bool = False
    """Nobody knows what one of them costs, and dollars are limited."""
    may_skip: bool = False
    """Its condition depends on what earlier steps put out."""
    holds: tuple[DryHold, ...] = ()
    """What the first of them would reserve, an entry for each limited unit."""


class DryStop(msgspec.Struct, frozen=True, kw_only=True):
    """The first run of a step that a budget would not hold, and the last that began before it."""

    refused: Refused
    """The scope without room, and its amounts."""
    at: str
    """The first run of a step that a budget would refuse."""
    after: str | None
    """The last one that starts before it."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would do and cost."""

    workflow: str
    """The name of the workflow."""
    total: int
    """How many runs of steps there are."""
    concurrency: int
    """How many run at once."""
    parts: tuple[DryPart, ...]
    """The order: runs of one step that come one after another."""
    parts_left_out: int
    """How many parts there are beyond ten thousand."""
    counts: dict[Fate, int]
    """How many runs of steps have which fate."""
    micro_usd: int
    """What would be spent."""
    needed_micro_usd: int
    """What it would cost without limits."""
    tokens: int
    """Tokens that would be used."""
    is_least: bool
    """The cost is a lower bound."""
    unknown: int
    """How many runs have an unknown cost, which no sum contains."""
    accounts: tuple[Account, ...]
    """Each budget as it is now, outermost first."""
    stop: DryStop | None = None
    """Where a budget would stop the run, or null."""


def rehearse(
    workflow: Workflow,
    items: Mapping[str, ItemSource],
    accounts: Sequence[Account],
    *,
    concurrency: int,
    now: float,
    is_limited: bool = True,
    hold: HoldOf | None = None,
) -> DryRun:
    """Go through a run on paper; `is_limited` says whether dollars are.

    `hold` is what the engine of a run would hold; without it only what steps say is known.
    """
    go = partial(
        _Rehearsal,
        workflow,
        items,
        concurrency=concurrency,
        now=now,
        estimates=_Estimates(workflow, is_limited=is_limited, hold=hold),
    )
    found = go(accounts).gone_through()
    if found.stop is None:
        return found
    return msgspec.structs.replace(found, needed_micro_usd=go(()).gone_through().micro_usd)


class _View:
    """What texts are filled with before anything has run: items are known, outputs are null."""

    def __init__(self, item: Any, index: int, run: dict[str, str]) -> None:  # noqa: ANN401
        self.item = item
        self.index = index
        self.run = run

    def field(self, step: str, name: str) -> Any:  # noqa: ANN401, ARG002
        return None


class _Rehearsal:
    """Goes through a run on paper; used once."""

    def __init__(
        self,
        workflow: Workflow,
        items: Mapping[str, ItemSource],
        accounts: Sequence[Account],
        *,
        concurrency: int,
        now: float,
        estimates: _Estimates,
    ) -> None:
        self._workflow = workflow
        self._items = items
        self._expansion = Expansion(workflow, items)
        self._progress = WorkflowProgress(
            workflow,
            {step.id: self._expansion.runs_of(step.id) for step in workflow.steps},
            ended=self._note_end,
        )
        self._books = _DryLedger(accounts, now=now)
        self._order = _Order()
        self._estimates = estimates
        self._concurrency = concurrency
        self._last: str | None = None
        self._stop: DryStop | None = None
        self._errors: dict[int, str] = {}
        self._unknown = 0
        self._has_least = False

    def gone_through(self) -> DryRun:
        running: deque[int] = deque()
        self._progress.start()
        self._start_what_can(running)
        while running:
            self._progress.end(running.popleft(), StepRunState.DONE)
            self._start_what_can(running)
        return self._summed_up()

    def _start_what_can(self, running: deque[int]) -> None:
        while len(running) < self._concurrency:
            number = self._progress.take()
            if number is None:
                return
            run_state = self._began(number)
            if run_state is None:
                self._progress.submit(number)
                running.append(number)
            else:
                self._progress.end(number, run_state)

    def _began(self, number: int) -> StepRunState | None:
        """Begin a run of a step, or return how it ends without."""
        found = self._expansion.run_of(number)
        step, index = found.step, found.index
        item = self._items[step.id].item(index) if step.foreach else None
        view = _View(item, index, {"id": "dry-run", "name": self._workflow.name})
        may_skip = _depends_on_outputs(step)
        if step.when is not None and not may_skip and not holds(step.when, view):
            return StepRunState.CONDITION_FALSE
        try:
            estimate = self._estimates.of(step, view)
        except UnfilledError as error:
            self._errors[number] = str(error)
            return StepRunState.FAILED
        held = self._books.book(step.id, estimate)
        if held is True or isinstance(held, Refused):
            self._note_refusal(number, held)
            return StepRunState.OVER_BUDGET
        self._last = self._expansion.name_of(number)
        part = self._order.add(step, index, "runs")
        self._charge(part, estimate, held)
        part.may_skip = may_skip
        return None

    def _charge(self, part: DryPart, estimate: _Estimate, held: _Held) -> None:
        amount = held.spent(Unit.MICRO_USD)
        part.is_unknown = held.is_unknown(Unit.MICRO_USD)
        if part.runs == 1:
            units = [unit for unit in Unit if self._books.shows(unit)]
            part.holds = tuple([_dry_hold(estimate, held, unit) for unit in units])
        part.least_micro_usd = amount if part.runs == 1 else min(part.least_micro_usd, amount)
        part.most_micro_usd = max(part.most_micro_usd, amount)
        part.micro_usd += amount
        part.tokens += held.spent(Unit.TOKENS)
        part.cumulated_micro_usd = self._books.micro_usd
        part.is_least = estimate.is_least
        self._has_least |= estimate.is_least
        self._unknown += part.is_unknown

    def _note_refusal(self, number: int, refused: Refused | Literal[True]) -> None:
        if self._stop is None and refused is not True:
            name = self._expansion.name_of(number)
            self._stop = DryStop(refused=refused, at=name, after=self._last)

    def _note_end(self, number: int) -> None:
        """Put what did not run into the order as well, with its reason."""
        run_state = self._progress.run_state(number)
        if run_state is StepRunState.DONE:
            return
        fate: Fate = "skipped" if run_state.is_skipped else "not run"
        why = self._errors.pop(number, "")
        if why:
            fate = "fails"
        found = self._expansion.run_of(number)
        self._order.add(found.step, found.index, fate, why or self._progress.why(number))

    def _summed_up(self) -> DryRun:
        return DryRun(
            workflow=self._workflow.name,
            total=self._expansion.total,
            concurrency=self._concurrency,
            parts=tuple(self._order.parts),
            parts_left_out=self._order.left_out,
            counts=self._order.counts,
            micro_usd=self._books.micro_usd,
            needed_micro_usd=self._books.micro_usd,
            tokens=self._books.tokens,
            is_least=self._has_least,
            unknown=self._unknown,
            accounts=self._books.before,
            stop=self._stop,
        )


HoldOf = Callable[[StepOrder], Hold]
"""Returns what a run of a step is to hold."""


class _Estimate(msgspec.Struct, frozen=True):
    """What is known of a run of a step before it runs, and what it is to hold."""

    step: Step
    amounts: Amounts
    hold: Hold
    is_least: bool
    is_learned_here: bool

    def given_as(self, unit: Unit) -> str:
        """Say what gave an amount that somebody gave."""
        said = self.step.estimate
        if unit is Unit.MICRO_USD and self.step.cost_micro_usd is not None:
            return "the cost_usd of the step"
        known = None if said is None else (said.tokens if unit is Unit.TOKENS else said.micro_usd)
        if known is not None:
            return "the estimate of the step"
        is_model = isinstance(self.step.work, ModelWork)
        return "the most that its request can cost" if is_model else ""


class _Estimates:
    """What is held for runs of steps."""

    def __init__(self, workflow: Workflow, *, is_limited: bool, hold: HoldOf | None) -> None:
        self._workflow = workflow
        self._is_limited = is_limited
        self._hold = hold
        self._least = {step.id: _is_least(step) for step in workflow.steps}
        self._unknown: dict[tuple[str, Amounts], Hold] = {}

    def of(self, step: Step, view: _View) -> _Estimate:
        """Return what is held for one run; `UnfilledError` if a placeholder has nothing in it."""
        request = request_of(step.work, view)
        amounts = estimated(self._workflow, step, request, is_limited=self._is_limited)
        hold = self._hold_of(step, request, amounts)
        is_learned_here = self._hold is not None
        return _Estimate(step, amounts, hold, self._least[step.id], is_learned_here)

    def _hold_of(self, step: Step, request: Any, amounts: Amounts) -> Hold:  # noqa: ANN401
        micro_usd, tokens = amounts
        if self._hold is None or (micro_usd is not None and tokens is not None):
            return Hold(
                micro_usd=PROBE if micro_usd is None else given(micro_usd),
                tokens=PROBE if tokens is None else given(tokens),
            )
        # Of a step without an estimate all runs hold the same.
        key = (step.id, amounts)
        if key not in self._unknown:
            if len(self._unknown) >= MOST_PARTS:
                self._unknown.clear()
            order = StepOrder(
                number=0,
                index=0,
                generation=0,
                step=step,
                request=request,
                micro_usd=micro_usd,
                tokens=tokens,
            )
            self._unknown[key] = self._hold(order)
        return self._unknown[key]


class _Held(msgspec.Struct, frozen=True):
    """What budgets would let a run hold, and the tightest limit of each unit."""

    hold: Hold
    amounts: dict[Unit, int]
    limits: dict[Unit, int]

    def is_unknown(self, unit: Unit) -> bool:
        """Tell whether nobody knows what it costs, in a unit that is limited."""
        unknown = (Basis.PROBE, Basis.SILENT)
        return self.hold.estimate(unit).basis in unknown and unit in self.limits

    def spent(self, unit: Unit) -> int:
        """Return what the run would cost; a probe says nothing of it."""
        return 0 if self.hold.estimate(unit).basis is Basis.PROBE else self.amounts[unit]


def _dry_hold(estimate: _Estimate, held: _Held, unit: Unit) -> DryHold:
    one, amount = held.hold.estimate(unit), held.amounts[unit]
    holds = amount_of(amount, unit.value)
    text = one.sentence(amount, unit)
    if one.basis is Basis.GIVEN:
        source = estimate.given_as(unit)
        text = f"reserved {holds}, {source}" if source else NOTHING.sentence(0, unit)
    elif one.basis is Basis.PROBE and unit not in held.limits:
        text = "unknown: no limit, so nothing is reserved"
    elif one.basis is Basis.PROBE:
        is_share = amount * PROBE_SHARE >= held.limits[unit]
        share = "a tenth of the smallest limit" if is_share else "all that is left"
        text = f"unknown: the first runs alone and reserves {holds}, {share}"
        if not estimate.is_learned_here:
            text += ", unless the service has learned what it costs"
    return DryHold(unit=unit, basis=one.basis, amount=amount, samples=one.samples, text=text)


class _DryLedger:
    """The budgets of a run on paper: what is held is spent at once, which comes to the same.

    A probe is not: nobody knows what of it will be spent.
    """

    def __init__(self, accounts: Sequence[Account], *, now: float) -> None:
        self.before = tuple(accounts)
        self.micro_usd = 0
        self.tokens = 0
        self._accounts = list(accounts)
        self._now = now
        self._refusals = RefusedAmounts()
        limits = [one.limit for one in accounts if one.limit is not None]
        found = {unit: [limit.amount(unit) for limit in limits] for unit in Unit}
        known = {unit: [one for one in some if one is not None] for unit, some in found.items()}
        self._limits = {unit: min(some) for unit, some in known.items() if some}

    def shows(self, unit: Unit) -> bool:
        """Tell whether what is held in a unit is worth a word."""
        return unit is Unit.MICRO_USD or unit in self._limits

    def book(self, step_id: str, estimate: _Estimate) -> _Held | Refused | Literal[True]:
        """Book an estimate; otherwise return what refuses it, True for what did so before."""
        # As in a run: what costs as much as something that was refused is not even asked for.
        if self._refusals.cover(step_id, estimate.amounts):
            return True
        hold = estimate.hold
        request = ReserveRequest(
            reservation_id="dry-run",
            scopes=(),
            micro_usd=MicroUsd(hold.micro_usd.amount),
            tokens=Tokens(hold.tokens.amount),
            lease_seconds=None,
            flexible=hold.flexible,
        )
        answer = amounts_to_hold(self._accounts, request, now=self._now)
        if isinstance(answer, Refused):
            self._refusals.add(step_id, estimate.amounts)
            return answer
        amounts = {Unit.MICRO_USD: int(answer[0]), Unit.TOKENS: int(answer[1])}
        held = _Held(hold, amounts, self._limits)
        micro_usd, tokens = held.spent(Unit.MICRO_USD), held.spent(Unit.TOKENS)
        if micro_usd or tokens:
            spent = Delta(spent_micro_usd=MicroUsd(micro_usd), spent_tokens=Tokens(tokens))
            self._accounts = [one.with_balance(one.balance.add(spent)) for one in self._accounts]
        self.micro_usd += micro_usd
        self.tokens += tokens
        return held


class _Order:
    """The parts of the order, grown run by run."""

    def __init__(self) -> None:
        self.parts: list[DryPart] = []
        self.left_out = 0
        self.counts: dict[Fate, int] = {"runs": 0, "fails": 0, "skipped": 0, "not run": 0}
        self._latest: DryPart | None = None

    def add(self, step: Step, index: int, fate: Fate, why: str = "") -> DryPart:
        """Add a run to the latest part if it continues it, else begin another."""
        self.counts[fate] += 1
        latest = self._latest
        if (
            latest is not None
            and latest.step == step.id
            and latest.fate == fate
            and latest.why == why
            and latest.last == index - 1
        ):
            latest.runs += 1
            latest.last = index
            return latest
        number = index if step.foreach else None
        self._latest = DryPart(step=step.id, first=number, last=number, runs=1, fate=fate, why=why)
        if len(self.parts) < MOST_PARTS:
            self.parts.append(self._latest)
        else:
            self.left_out += 1
        return self._latest


def _depends_on_outputs(step: Step) -> bool:
    """Tell whether only the run itself can say whether the condition of a step holds."""
    return any(
        isinstance(placeholder, StepPlaceholder) for placeholder in condition_references(step.when)
    )


def _is_least(step: Step) -> bool:
    """Tell whether what is held for a step depends on what others will have put out."""
    is_said = step.estimate is not None and step.estimate.micro_usd is not None
    if not isinstance(step.work, ModelWork) or is_said or step.cost_micro_usd is not None:
        return False
    return any(
        isinstance(placeholder, StepPlaceholder) for placeholder in references(step.work.body)
    )


# The budgets around a run as they stand before it: read where they are kept, and left as they are.
#
# Limits that the run would found count as if they were there; one that differs is the same error as
# in a run. Rule: looking creates nothing, not even the file of the ledger.


async def budgets_before(
    ledger: RunLedger, scopes: Sequence[RunScope], options: RunOptions
) -> list[Account]:
    """Return what a run would be charged to, the root first, with the limits it would have."""
    charged = ancestors(Scope(scopes[-1].scope))
    kept = await _accounts_in(ledger, charged)
    accounts = [kept.get(scope, Account(scope=scope)) for scope in charged]
    change = change_in_ledger(ledger.tracker, ledger.address)
    return await with_limits(accounts, scopes, options, change)


async def with_limits(
    accounts: Sequence[Account],
    scopes: Sequence[RunScope],
    options: RunOptions,
    change: ChangeCommand | None,
) -> list[Account]:
    """Return accounts with the limits that a run would found; one that differs is an error."""
    await create_limits(_DryLimits(accounts), scopes, options, change=change)
    wanted = limits_of(scopes)
    return [
        account if account.limit is not None else _limited(account, wanted.get(account.scope))
        for account in accounts
    ]


class _DryLimits:
    """Says which limit would be in force, and sets none."""

    def __init__(self, accounts: Sequence[Account]) -> None:
        self._limits = {account.scope: account.limit for account in accounts}

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        return self._limits.get(scope) or limit


async def _accounts_in(ledger: RunLedger, charged: Sequence[Scope]) -> Mapping[Scope, Account]:
    if ledger.url is None or not _is_there(ledger.url):
        return {}
    async with connect_budget(ledger.url) as tracker:
        found = [(await tracker.ledger.accounts(scope, most=1))[0] for scope in charged]
    return {account.scope: account for account in found}


def _is_there(url: str) -> bool:
    return scheme_of(url) not in SCHEMES["sqlite"] or sqlite_path(url).exists()


def _limited(account: Account, limit: Limit | None) -> Account:
    return account if limit is None else msgspec.structs.replace(account, limit=limit)


# What a run in this process would miss before it begins, looked for without beginning one.
#
# Rule: what ends a run before its first step ends its rehearsal, too, in the same words. Functions
# are imported for that, as a run would import them; nothing is called, started or sent.


class Checked(NamedTuple):
    """What steps would hold, and which keys of providers a run would miss: a rehearsal needs none.

    A run is refused for each of them.
    """

    hold: StepHolds
    missing_keys: tuple[WorkflowError | InvalidSettingError, ...]


async def check_here(
    workflow: Workflow, options: RunOptions, environ: Mapping[str, str]
) -> Checked:
    """Check what a run needs, or raise what a run would raise before anything runs."""
    try:
        return await _check(workflow, options, environ)
    except InvalidSettingError as error:
        raise in_file(error, workflow) from error


async def _check(workflow: Workflow, options: RunOptions, environ: Mapping[str, str]) -> Checked:
    missing = dict(missing_keys(workflow, environ))
    environ = {**environ, **dict.fromkeys(missing, _NO_KEY)}
    variables = Variables(environ)
    check_steps(workflow, variables)
    targets = named_targets(workflow, options, environ)
    search(workflow.folder)
    executors = step_executors(workflow, variables, workflow.price_list, targets, concurrency=1)
    for executor in executors.values():
        if isinstance(executor.executor, CallSteps | CallableExecutor):
            await executor.open()
    hold = StepHolds(workflow, targets, earlier_kinds(options.data, workflow.name))
    return Checked(hold, tuple(in_file(error, workflow) for error in missing.values()))


_NO_KEY = "not-set"


# A service before a run: its targets, and the budgets as far as the service tells them.


async def service_budgets(
    url: str,
    token: str | None,
    scopes: Sequence[RunScope],
    options: RunOptions,
    *,
    workflow: Workflow,
) -> list[Account]:
    """Return the scopes of a run as the service has them, with the limits they would have.

    A target that the service does not have is refused, as a run is.
    """
    async with Client(url, token=token) as client:
        await check_known_targets(client, workflow)
        scopes = within(await own_scope(client, scopes), scopes)
        money = await money_of(client, scopes)
    accounts = [_account(one) for one in money]
    return await with_limits(accounts, scopes, options, change_at_service(hidden_address(url)))


def _account(money: Money) -> Account:
    limit = money.limit_micro_usd
    balance = Balance(
        spent_micro_usd=MicroUsd(money.spent_micro_usd),
        reserved_micro_usd=MicroUsd(money.reserved_micro_usd),
    )
    return Account(
        scope=Scope(money.scope),
        limit=None if limit is None else Limit(limit_micro_usd=MicroUsd(limit)),
        balance=balance,
    )
