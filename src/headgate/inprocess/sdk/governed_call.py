"""One call to a model: its permit and its money, from before it is sent until its response is read.

| what happens | what is booked |
| --- | --- |
| no permit, no money, cancelled before it was sent | nothing |
| the connection was not made | nothing |
| 408, 504, 524: somebody on the way stopped waiting | the estimate |
| another error status (4xx, 5xx) | nothing: the provider has sent no output |
| a redirect of the call (307, 308) | nothing: it is sent elsewhere, as a call of its own |
| another redirect | the estimate: the work may be done, and only its result is fetched |
| a response that says what it used | that |
| a response that does not | the estimate |
| a stream that was cut off, closed or cancelled | the estimate, or what was counted if it is more |
| no response: timeout, connection lost, cancelled | the estimate |

Rule: however it ends, its permit is freed once and its reservation settled once. A settlement that
fails does not take the response away; the end of its lease books the reservation in full.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx2

from headgate.budgets.tracker import (
    ActiveReservation,
    BudgetTracker,
    budget_queue,
    may_wait,
    reserved,
    scopes_of,
)
from headgate.core.lifecycle import Limited, Outcome, Succeeded, Usage, cost_of, pause_seconds
from headgate.core.load import estimate_weight
from headgate.core.task import Task
from headgate.errors import (
    BudgetExceededError,
    HeadgateError,
    LedgerUnavailableError,
    PermitTimeoutError,
)
from headgate.executors.http import refused
from headgate.inprocess.budget import Estimate
from headgate.inprocess.scheduler import Acquisition
from headgate.providers.content_coding import (
    READABLE_CODINGS,
    ContentCodingError,
    check_one_coding,
    codings_of,
)
from headgate.providers.http_client import NOT_SENDABLE, NOT_SENT
from headgate.providers.requests import ModelCall, with_model, with_stream_usage
from headgate.providers.usage import ResponseReader, UsageHider

if TYPE_CHECKING:
    from headgate.inprocess.sdk.governor import Governor, SharedTracker


_SAME_CALL_ELSEWHERE = frozenset((307, 308))
_log = logging.getLogger("headgate.sdk")


class GovernedCall:
    """A call under way: `begin` before it is sent, `finish` when its response was read."""

    def __init__(
        self,
        governor: Governor,
        request: httpx2.Request,
        body: bytes,
        *,
        asked: ModelCall,
        agent_id: str,
        scopes: tuple[str, ...],
        estimate: Estimate | None,
    ) -> None:
        self._governor = governor
        self._request = request
        self._body = body
        self._asked = asked
        self._agent_id = agent_id
        self._scopes = scopes
        self._estimate = estimate
        self._model = asked.model
        self._permit: Acquisition | None = None
        self._tracker_in_use: SharedTracker | None = None
        self._holding: AbstractAsyncContextManager[ActiveReservation] | None = None
        self._held: ActiveReservation | None = None
        self._reader: ResponseReader | None = None
        self._hider: UsageHider | None = None
        self._refusal: Outcome | None = None
        self._is_sent = False
        self._is_over = False
        # In a program with threads, who gives up waiting may finish what is still beginning.
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Take a permit, then hold the estimate; who does not get both keeps neither."""
        async with self._turn:
            try:
                await self._take_both()
            except BaseException as error:
                self._not_charged()
                await self._end()
                self._held = None
                if isinstance(error, HeadgateError):
                    let_pass(error, self._request.headers)
                raise

    @property
    def held(self) -> ActiveReservation | None:
        """The money that is held for it."""
        return self._held

    @property
    def is_sent(self) -> bool:
        """Whether it may be charged for."""
        return self._is_sent

    def to_send(self) -> httpx2.Request:
        """Return the request as it is to be sent; from here on it may be charged for."""
        self._is_sent = True
        request, given = self._request, self._body
        body = given
        self._body = b""
        if self._model != self._asked.model:
            body = with_model(body, self._model)
        if self._governor.ask_stream_usage:
            asking = with_stream_usage(request.url.path, body)
            self._hider = UsageHider() if asking is not body else None
            body = asking
        if body is not given:
            request = _with_body(request, body)
        _keep_to_readable_codings(request)
        if self._hider is not None:
            # Nothing can be taken out of a stream that is compressed.
            request.headers["accept-encoding"] = "identity"
        return request

    def failed(self, error: BaseException) -> None:
        """Note that there is no response, and why."""
        if isinstance(error, (*NOT_SENT, *NOT_SENDABLE)):
            self._not_charged()

    def received(self, response: httpx2.Response) -> None:
        """Note the head of the response; one with several codings is refused.

        The client behind would decode it all, and they make gigabytes of a few hundred bytes.
        """
        self._governor.responded(response)
        try:
            check_one_coding(response.headers)
        except ContentCodingError as error:
            problem = f"the answer cannot be read: {error}"
            raise httpx2.DecodingError(problem, request=self._request) from None
        if not response.is_success or codings_of(response.headers):
            self._hider = None
        if response.is_success:
            self._reader = ResponseReader(response.headers)
        elif response.status_code in _SAME_CALL_ELSEWHERE and response.has_redirect_location:
            self._not_charged()
        else:
            self._refusal = refused(
                response.status_code, response.headers, "", now=time.time(), is_model_api=True
            )

    def read(self, chunk: bytes) -> bool:
        """Read along with the response, a slice; tell whether some of it is still to be read."""
        if self._reader is None or self._held is None:
            return False
        self._reader.feed(chunk)
        return self._reader.has_more

    def shown(self, chunk: bytes) -> bytes:
        """Return what the program sees of the next bytes: all but a usage that it did not ask for.

        That may be nothing yet, or some of what came before.
        """
        return chunk if self._hider is None else self._hider.feed(chunk)

    def shown_rest(self) -> bytes:
        """Return what the program has not seen when all of the response has come."""
        return b"" if self._hider is None else self._hider.finish()

    async def finish(self) -> None:
        """Free the permit and book what the call cost, once."""
        async with self._turn:
            if self._is_over:
                return
            self._is_over = True
            try:
                self._report()
            except Exception as error:  # noqa: BLE001  prices may be somebody else's
                problem = "what a call cost was not read, the estimate is booked: %s"
                _log.warning(problem, type(error).__name__)
            finally:
                await self._end()

    async def _take_both(self) -> None:
        """Take a permit and then the money; who has to wait for money keeps no permit."""
        governor = self._governor
        seconds = governor.max_wait_seconds
        now = asyncio.get_running_loop().time()
        ends = None if seconds is None else now + seconds
        shared, estimate = governor.tracker, self._estimate
        if shared is None or estimate is None:
            await self._check_budget_price()
            await self._take_permit(ends)
            return
        tracker = await shared.use()
        self._tracker_in_use = shared
        scope, *also = self._scopes
        scopes = scopes_of(scope, also)
        await governor.check_price(tracker, scopes, estimate)
        kind = "" if estimate.hold is None else estimate.hold().waiting_kind

        async def ask() -> None:
            await self._take_permit(ends)
            try:
                await self._reserve_money(tracker, estimate)
            except BudgetExceededError:
                await self._hand_back()
                raise

        if may_wait(tracker, governor.on_exhausted, seconds):
            queue = budget_queue(tracker)
            await queue.reserve(scopes, ask, kind=kind, max_wait_seconds=seconds)
        else:
            await ask()

    async def _check_budget_price(self) -> None:
        """Refuse a model without a price before a scheduler with a limited budget is asked."""
        scheduler = self._governor.scheduler
        if self._estimate is None or scheduler is None or scheduler.budget is None:
            return
        tracker = await scheduler.budget.open()
        scope, *also = scheduler.budget.scopes_of(self._agent_id, self._scopes)
        await self._governor.check_price(tracker, scopes_of(scope, also), self._estimate)

    async def _take_permit(self, ends: float | None) -> None:
        """Take a permit while no pause is on; one that is given during a pause is handed back."""
        pauses = self._governor.pauses
        now = asyncio.get_running_loop().time
        while True:
            if pauses is not None:
                await self._wait_for(pauses, ends)
            await self._ask_for_permit(None if ends is None else max(ends - now(), 0.0))
            if pauses is None or not pauses.is_on:
                return
            await self._hand_back()

    async def _wait_for(self, pauses: Pauses, ends: float | None) -> None:
        try:
            async with asyncio.timeout_at(ends):
                await pauses.wait()
        except TimeoutError:
            raise self._paused_too_long() from None

    def _paused_too_long(self) -> PermitTimeoutError:
        seconds, scheduler = self._governor.max_wait_seconds or 0.0, self._governor.scheduler
        resource = "provider" if scheduler is None else scheduler.resource.name
        error = PermitTimeoutError(resource, self._agent_id, seconds)
        line = f"the provider asked for a pause that takes longer than {seconds:g} seconds"
        error.args = (f"{line}; ask again later, or give longer max_wait_seconds",)
        return error

    async def _ask_for_permit(self, seconds: float | None) -> None:
        scheduler = self._governor.scheduler
        if scheduler is None:
            return
        weight = estimate_weight(self._asked.model, self._asked.prompt_chars)
        permit = scheduler.acquire(
            self._agent_id,
            task=Task(agent_id=self._agent_id, weight=weight, scopes=self._scopes),
            timeout=seconds,
            estimate=self._estimate,
        )
        try:
            grant = await permit
        except PermitTimeoutError as error:
            raise self._without_permit(error) from None
        self._permit, self._held = permit, grant.held
        self._model = grant.model or self._model

    def _without_permit(self, error: PermitTimeoutError) -> PermitTimeoutError:
        """Return the error in the words of whoever made the client, and with the whole wait."""
        seconds, concurrency = self._governor.max_wait_seconds, self._governor.concurrency
        if seconds is None or concurrency is None:
            return error
        return PermitTimeoutError(error.resource, error.agent_id, seconds, concurrency=concurrency)

    async def _reserve_money(self, tracker: BudgetTracker, estimate: Estimate) -> None:
        scope, *also = self._scopes
        holding = reserved(
            tracker,
            scope,
            hold=estimate.hold,
            also=also,
            lease_seconds=self._governor.lease_seconds,
            on_exhausted="reject",
        )
        self._held = await holding.__aenter__()
        self._holding = holding

    def _report(self) -> None:
        """Tell the held money, and those who wait, what became of the call."""
        if not self._is_sent:
            self._not_charged()
            return
        outcome = self._refusal
        pauses = self._governor.pauses
        if pauses is not None:
            if isinstance(outcome, Limited):
                pauses.begin(outcome, asyncio.get_running_loop().time())
            elif self._reader is not None:
                pauses.responded()
        if self._held is None:
            return
        if outcome is None and self._reader is None:
            if not self._held.is_given_back:
                held = self._held
                held.charge(_usd(held.micro_usd), tokens=held.tokens, is_assumed=True)
                self._governor.spent_micro_usd += held.micro_usd
            return
        cost, is_assumed = self._cost(self._held, outcome)
        if cost.micro_usd == 0 and cost.tokens == 0:
            self._held.not_charged()
        else:
            usd = _usd(cost.micro_usd or 0)
            self._held.charge(usd, tokens=cost.tokens, is_assumed=is_assumed)
            self._governor.spent_micro_usd += cost.micro_usd or 0

    def _cost(self, held: ActiveReservation, refusal: Outcome | None) -> tuple[Usage, bool]:
        """Return what a call is booked at, and whether some of that is only assumed."""
        usage, is_all = Usage(), True
        if refusal is None and self._reader is not None:
            usage, is_all = self._reader.usage(self._governor.prices, priced_as=self._model)
            self._governor.learn(self._model, self._asked, self._reader.counts())
        cost = cost_of(
            refusal or Succeeded(usage=usage),
            reserved_tokens=held.tokens,
            reserved_micro_usd=held.micro_usd,
        )
        if is_all:
            return cost, usage.micro_usd is None
        most = Usage(
            tokens=max(cost.tokens or 0, held.tokens),
            micro_usd=max(cost.micro_usd or 0, held.micro_usd),
        )
        return most, True

    def _not_charged(self) -> None:
        if self._held is not None:
            self._held.not_charged()

    async def _hand_back(self) -> None:
        """Give permit and money back before anything was sent, to ask for both again."""
        self._not_charged()
        await self._free_both()
        self._held = None

    async def _end(self) -> None:
        """Free the permit, settle, leave the tracker; what cannot be done stops nothing else."""
        tracker, self._tracker_in_use = self._tracker_in_use, None
        try:
            await self._free_both()
        finally:
            if tracker is not None:
                await self._settled(tracker.leave())

    async def _free_both(self) -> None:
        permit, self._permit = self._permit, None
        holding, self._holding = self._holding, None
        try:
            if permit is not None:
                await self._settled(permit.__aexit__(None, None, None))
        finally:
            if holding is not None:
                await self._settled(holding.__aexit__(None, None, None))

    async def _settled(self, settling: Awaitable[object]) -> None:
        try:
            await settling
        except HeadgateError as error:
            self._governor.not_settled(error)
        except Exception as error:  # noqa: BLE001  a tracker may be somebody else's
            problem = f"the tracker failed with {type(error).__name__}: {error}"
            self._governor.not_settled(LedgerUnavailableError(problem))


def _usd(micro_usd: int) -> Decimal:
    return Decimal(micro_usd).scaleb(-6)


def _with_body(request: httpx2.Request, body: bytes) -> httpx2.Request:
    headers = request.headers.copy()
    headers.pop("content-length", None)
    return httpx2.Request(
        request.method,
        request.url,
        headers=headers,
        content=body,
        extensions=request.extensions,
    )


def _keep_to_readable_codings(request: httpx2.Request) -> None:
    """Leave out the codings that could not be read here; the response is the same without them."""
    accepted = request.headers.get("accept-encoding", "").lower()
    codings = [coding.strip() for coding in accepted.split(",")]
    readable = [coding for coding in codings if coding in READABLE_CODINGS]
    request.headers["accept-encoding"] = ", ".join(readable) or "identity"


# Leaving a provider alone for as long as it asked.
#
# Rule: whoever comes during a pause waits before it asks for a permit, and whoever is given one
# during a pause hands it back. So nobody holds a permit or money for a call that would be turned
# away.


class Pauses:
    """When the next call may be sent; it belongs to one event loop."""

    def __init__(self) -> None:
        self._until = 0.0
        self._hits = 0

    @property
    def is_on(self) -> bool:
        """Whether no call is to be sent now."""
        return self._until > asyncio.get_running_loop().time()

    async def wait(self) -> None:
        """Wait until no pause is on; a new one may begin meanwhile."""
        loop = asyncio.get_running_loop()
        while (seconds := self._until - loop.time()) > 0:  # noqa: ASYNC110  it may be prolonged
            await asyncio.sleep(seconds)

    def begin(self, limited: Limited, now: float) -> None:
        """Note that the provider asked for a pause."""
        self._hits += 1
        self._until = max(self._until, now + pause_seconds(limited, self._hits))

    def responded(self) -> None:
        """Note that the provider answered."""
        self._hits = 0


# Errors that pass through an SDK as they are.
#
# The SDK of Anthropic takes whatever a transport raises for a lost connection, hides it and tries
# again, unless it is an error of its own kind. So what is raised through it is given that kind
# beside its own: `except BudgetExceededError` works, and nothing is tried again. The SDK of
# OpenAI lets errors pass that are none of the HTTP client's.

_ANTHROPIC_HEADER = "anthropic-version"

_passing: dict[type[HeadgateError], type[HeadgateError]] = {}
"""The kinds that were made; as many as there are errors."""


def let_pass(error: HeadgateError, headers: Mapping[str, str]) -> None:
    """Give an error the kind that the SDK which sent these headers lets pass."""
    module = sys.modules.get("anthropic")
    kind = getattr(module, "AnthropicError", None)
    if _ANTHROPIC_HEADER in headers and isinstance(kind, type) and not isinstance(error, kind):
        plain = type(error)
        if plain not in _passing:
            _passing[plain] = _both(plain, kind)
        error.__class__ = _passing[plain]


def _both(plain: type[HeadgateError], kind: type[Any]) -> type[HeadgateError]:
    def reduced(error: HeadgateError) -> tuple[Any, ...]:
        # A class that is made here cannot be found by its name in another process.
        restore, (_, arguments, fields) = HeadgateError.__reduce__(error)
        return restore, (plain, arguments, fields)

    members = {
        "__doc__": plain.__doc__,
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__reduce__": reduced,
    }
    return type(plain.__name__, (plain, kind), members)
