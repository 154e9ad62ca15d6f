"""Who a client's calls are for: whose permit they take, whose money they are, at which prices.

Rule: nothing that costs passes unseen. A call whose price nobody knows is refused, and so is a
request of a kind that is not known here, unless it was said that those may pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import httpx2

from headgate.budgets.connect import connect_budget, ledger_address
from headgate.budgets.tracker import (
    DEFAULT_LEASE_SECONDS,
    Amount,
    BudgetTracker,
    LedgerTracker,
    OnExhausted,
)
from headgate.core.budgets.scopes import Scope
from headgate.core.estimates import Hold, Reserve
from headgate.core.money import to_limit_micro_usd, to_micro_usd, to_tokens
from headgate.errors import CallerError, HeadgateError, InvalidFieldError, InvalidSettingError
from headgate.inprocess.budget import Estimate
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk.governed_call import GovernedCall, Pauses, let_pass
from headgate.providers import requests
from headgate.providers.call_estimates import CallEstimates
from headgate.providers.prices import MAX_MODEL_LENGTH, PriceList, UnknownPriceError
from headgate.providers.requests import ModelCall, kind_of, read_call
from headgate.providers.usage import CountedTokens

MAX_CHEAPER = 8
MAX_TOLD = 100
_PROJECT = "sdk"
"""All models of a client are of one project: what is learned of them shares its bound."""

OnResponse = Callable[[int, Mapping[str, str]], None]
"""Is shown the status and the headers of each response, as a `headgate.SlotReporter` is."""

Name = str | Callable[[], str]
"""A name, or a function that gives it for each call, in the task or thread that makes the call."""

_log = logging.getLogger("headgate.sdk")


class UngovernedRequestError(CallerError):
    """A request of a kind whose cost is not known here; it was not sent."""

    def __init__(self, method: str, path: str) -> None:
        advice = "send it with another client, or say allow_other=True to let such requests pass"
        super().__init__(f"{method} {path} is no call whose cost can be read; {advice}")
        self.method = method
        self.path = path


class Governor:
    """What holds for all calls of one client; they belong to one event loop.

    A `scheduler` gives permits, and money if it has a budget; a `tracker` with a `scope` gives
    money. `scope` and `also` of a scheduler with a budget are charged beside its own scopes. A
    tracker may be a URL: its ledger is opened at the first call, and closed with the client.
    `budget_usd` is the limit of the scope, which the first call sets where there is none.

    What a call holds is what its request can cost: the input as it is counted, and the output by
    `reserve`. In `strict` that is as much as the request allows, in `expected` what 95% of the
    model's responses stay below. Where the request leaves the length open it is what was learned,
    otherwise `max_tokens`, and otherwise the call is a probe: it holds a tenth of the smallest
    limit, and is alone of its model until it was answered.

    A model without a price is refused where dollars are limited, unless `estimate_usd` says what a
    call is taken to cost; that is booked then. `cheaper`
    names the model to use instead of another where a budget in mode `downgrade` is too small.

    A call waits for a permit, for the end of a provider's pause and for room in a budget, in all at
    most `max_wait_seconds`. With `on_exhausted="reject"` it does not wait for room in the budget of
    a tracker; that of a scheduler has a mode of its own.
    """

    def __init__(
        self,
        *,
        scheduler: LoadScheduler | None = None,
        agent_id: Name = "default",
        tracker: BudgetTracker | str | None = None,
        scope: Name | None = None,
        budget_usd: Amount | None = None,
        also: Iterable[str] = (),
        prices: PriceList | None = None,
        reserve: Literal["strict", "expected"] = "strict",
        max_tokens: int | None = None,
        estimate_usd: Amount | None = None,
        cheaper: Mapping[str, str] | None = None,
        on_exhausted: OnExhausted = "wait",
        max_wait_seconds: float | None = None,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        ask_stream_usage: bool = False,
        pause_when_limited: bool = False,
        allow_other: bool = False,
        on_unsettled: Callable[[HeadgateError], None] | None = None,
        on_response: OnResponse | None = None,
    ) -> None:
        _check(scheduler, tracker, scope)
        limit = _limit(tracker, scope, budget_usd)
        self.scheduler = scheduler
        self.prices = PriceList() if prices is None else prices
        self.on_exhausted: OnExhausted = on_exhausted
        self.max_wait_seconds = max_wait_seconds
        self.lease_seconds = lease_seconds
        self.ask_stream_usage = ask_stream_usage
        self.pauses = Pauses() if pause_when_limited else None
        self._on_unsettled = _warn if on_unsettled is None else on_unsettled
        self._on_response = on_response
        self._agent_id = agent_id
        self._scope = scope
        self._also = tuple(also)
        self._reserve = _reserve(reserve)
        self._estimate_micro_usd = (
            None if estimate_usd is None else to_micro_usd(estimate_usd, field="estimate_usd")
        )
        self._holds = CallEstimates(
            max_tokens=None if max_tokens is None else to_tokens(max_tokens, field="max_tokens"),
            default_micro_usd=self._estimate_micro_usd,
            is_measured=False,
        )
        self._told: set[str] = set()
        self._cheaper = dict(cheaper or {})
        self._allow_other = allow_other
        self.tracker = None if tracker is None else SharedTracker(tracker, limit)
        self.concurrency: int | None = None
        """How many calls at once whoever made the client has asked for, if it was by number."""
        self.spent_micro_usd = 0
        """What its calls were booked at so far."""

    def is_governed(self, request: httpx2.Request) -> bool:
        """Say whether a request is a call to a model; refuse one that may cost anything else."""
        path = request.url.path
        kind = kind_of(request.method, path)
        if kind is requests.Kind.OTHER and not self._allow_other:
            error = UngovernedRequestError(request.method, path)
            let_pass(error, request.headers)
            raise error
        return kind is requests.Kind.MODEL_CALL

    def call_for(self, request: httpx2.Request, body: bytes) -> GovernedCall:
        """Return the call that a request makes; nothing is asked for yet."""
        try:
            asked = read_call(request.url.path, body)
            agent_id, scopes = given_name("agent_id", self._agent_id), self._scopes()
            whose = scopes[0] if scopes else agent_id
            return GovernedCall(
                self,
                request,
                body,
                asked=asked,
                agent_id=agent_id,
                scopes=scopes,
                estimate=self._estimate(asked, whose) if self.has_budget else None,
            )
        except HeadgateError as error:
            let_pass(error, request.headers)
            raise

    @property
    def has_budget(self) -> bool:
        """Whether anybody's money is held."""
        scheduler = self.scheduler
        return self.tracker is not None or (scheduler is not None and scheduler.budget is not None)

    def not_settled(self, error: HeadgateError) -> None:
        """Tell that a cost was not booked; a listener that fails takes no response away."""
        try:
            self._on_unsettled(error)
        except Exception as problem:  # noqa: BLE001  it is somebody else's function
            _warn(error)
            _log.warning("on_unsettled failed with %s", type(problem).__name__)

    def responded(self, response: httpx2.Response) -> None:
        """Show the head of a response; a listener that fails takes no response away."""
        if self._on_response is None:
            return
        try:
            self._on_response(response.status_code, response.headers)
        except Exception as problem:  # noqa: BLE001  it is somebody else's function
            _log.warning("on_response failed with %s", type(problem).__name__)

    async def check_price(
        self, tracker: BudgetTracker, scopes: Iterable[Scope], estimate: Estimate | None
    ) -> None:
        """Refuse a call to a model without a price where dollars are limited."""
        if self._estimate_micro_usd is not None:
            return
        while estimate is not None:
            problem = self._price_problem(estimate.model or "")
            if problem is not None:
                for scope in scopes:
                    if await tracker.get_budget(scope) is not None:
                        raise problem
                self._tell_unpriced(problem)
            estimate = estimate.cheaper

    def learn(self, model: str, asked: ModelCall, counts: CountedTokens | None) -> None:
        """Learn how long the responses of a model are."""
        if counts is not None:
            self._holds.learn(asked, model=model, project_id=_PROJECT, usage=counts)

    async def close(self) -> None:
        """Close a ledger that was opened here, once the calls that use it are over."""
        if self.tracker is not None:
            await self.tracker.close()

    def _scopes(self) -> tuple[str, ...]:
        own = () if self._scope is None else (given_name("scope", self._scope),)
        return (*own, *self._also)

    def _estimate(self, asked: ModelCall, whose: str) -> Estimate:
        """Return what a call holds, and the cheaper ones that may be used instead."""
        models = [asked.model]
        while len(models) <= MAX_CHEAPER and models[-1] in self._cheaper:
            models.append(self._cheaper[models[-1]])
        estimate: Estimate | None = None
        for model in reversed(models):
            hold = partial(self._hold, asked, model, whose)
            estimate = Estimate(model=model, cheaper=estimate, hold=hold)
        if estimate is None:
            raise AssertionError("a call has a model, if only an unnamed one")
        return estimate

    def _hold(self, asked: ModelCall, model: str, whose: str) -> Hold:
        """Return what a call is to hold now; what was learned meanwhile counts."""
        return self._holds.hold(
            asked,
            model=model,
            project_id=_PROJECT,
            prices=self.prices,
            reserve=self._reserve,
            whose=whose,
        )

    def _price_problem(self, model: str) -> UnknownPriceError | None:
        try:
            self.prices.cost(model, input_tokens=1, output_tokens=1)
        except UnknownPriceError as error:
            price = "Price(input=…, output=…)"
            advice = f"give prices=PriceList({{{model[:MAX_MODEL_LENGTH]!r}: {price}}})"
            origin = f"with both from {PriceList.__module__}"
            error.args = (error.with_advice(f"{advice} {origin}, or estimate_usd=…"),)
            return error
        return None

    def _tell_unpriced(self, problem: UnknownPriceError) -> None:
        """Say once for each model that its dollars are not known; tokens are booked."""
        if problem.model not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(problem.model)
            _log.warning("what calls cost is not booked: %s", problem)


def _reserve(name: str) -> Reserve:
    try:
        return Reserve(name)
    except ValueError:
        raise InvalidSettingError("reserve", f"must be strict or expected, not {name!r}") from None


def given_name(field: str, name: Name) -> str:
    """Return a name, or what its function gives for this call."""
    if isinstance(name, str):
        return name
    try:
        given: object = name()
    except HeadgateError:
        raise
    except Exception as error:
        # An SDK may take an error that is none of Headgate's for a lost connection, and try again.
        problem = f"its function failed with {type(error).__name__}: {error}"
        raise InvalidFieldError(field, problem) from error
    if not isinstance(given, str):
        raise InvalidFieldError(field, f"its function gave {type(given).__name__} and no text")
    return given


def _check(
    scheduler: LoadScheduler | None, tracker: BudgetTracker | str | None, scope: Name | None
) -> None:
    if scheduler is None and tracker is None:
        problem = "is missing, and so is a tracker; with neither, nothing is governed"
        raise InvalidSettingError("scheduler", problem)
    has_budget = scheduler is not None and scheduler.budget is not None
    if has_budget and tracker is not None:
        problem = "is one too many: the scheduler has a budget, and each call would be booked twice"
        raise InvalidSettingError("tracker", problem)
    if tracker is not None and scope is None:
        raise InvalidSettingError("scope", "is what the tracker charges; name one, as session:s1")


class ScopeLimit(NamedTuple):
    """The most that a scope may spend."""

    scope: str
    usd: Amount


def _limit(
    tracker: BudgetTracker | str | None, scope: Name | None, budget_usd: Amount | None
) -> ScopeLimit | None:
    if budget_usd is None:
        return None
    to_limit_micro_usd(budget_usd, field="budget_usd")
    if not isinstance(tracker, (str, LedgerTracker)):
        problem = "needs a tracker of Headgate, or its URL, as memory:"
        raise InvalidSettingError("budget_usd", problem)
    if not isinstance(scope, str):
        problem = "is the limit of one scope; name it, or set limits with the tracker"
        raise InvalidSettingError("budget_usd", problem)
    return ScopeLimit(scope, budget_usd)


def _warn(error: HeadgateError) -> None:
    _log.warning("a call was answered, and what it cost was not booked: %s", error)


# The tracker of a client, and when its ledger is opened and closed.
#
# Rule: a ledger is open while any call holds money in it. It is opened by the first call and closed
# with the client, or by the last call that outlives it. A tracker that was given open stays so.


class SharedTracker:
    """One tracker, used by calls on one event loop at a time."""

    def __init__(self, tracker: BudgetTracker | str, limit: ScopeLimit | None = None) -> None:
        self._own: LedgerTracker | None = None
        self._limit = limit
        self._address = ""
        if isinstance(tracker, str):
            self._address = ledger_address(tracker)
            tracker = self._own = connect_budget(tracker)
        self._tracker: BudgetTracker = tracker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._users = 0
        self._is_closing = False
        self.is_open = self._own is None

    async def use(self) -> BudgetTracker:
        """Return the tracker, open until whoever uses it leaves."""
        self._come_to_this_loop()
        self._users += 1
        self._is_closing = False
        try:
            if not self.is_open or self._limit is not None:
                async with self._turn:
                    await self._open()
        except BaseException:
            self._users -= 1
            raise
        return self._tracker

    async def leave(self) -> None:
        """Note that a call is settled; the last one closes what the client left open."""
        self._users = max(self._users - 1, 0)
        await self._close_unused()

    async def close(self) -> None:
        """Close the ledger when nobody uses it any more; the next call opens it again."""
        self._come_to_this_loop()
        self._is_closing = True
        await self._close_unused()

    def _come_to_this_loop(self) -> None:
        """Forget the calls of a loop that is over: nobody is left to end them."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turn, self._users = loop, asyncio.Lock(), 0

    async def _open(self) -> None:
        if self._own is not None and not self.is_open:
            await self._own.__aenter__()
            self.is_open = True
        limit, tracker = self._limit, self._tracker
        if limit is not None and isinstance(tracker, LedgerTracker):
            await tracker.create_budget(
                limit.scope, limit.usd, source="budget_usd", ledger=self._address
            )
            self._limit = None

    async def _close_unused(self) -> None:
        if self._own is None or not self._is_unused:
            return
        async with self._turn:
            # Another call may have come while an earlier closing was waited for.
            if self._is_unused:
                self.is_open = False
                await self._own.__aexit__(None, None, None)

    @property
    def _is_unused(self) -> bool:
        return self._is_closing and not self._users and self.is_open
