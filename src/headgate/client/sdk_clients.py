"""SDK clients in one line: `headgate.openai(budget_usd=5, concurrency=8)`.

Each function returns the SDK's own client, so its methods, types and streams are the SDK's. Without
`server` the calls go to the provider, and this process keeps the budget. With `server` they go
through the gateway of that service, with its keys, and the service keeps the budget.

Rule: a call that a limit refuses is not sent, and its error is a `LimitReachedError` that no SDK
hides or tries again.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from decimal import Decimal
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import httpx2
import msgspec

from headgate.budgets.tracker import Amount
from headgate.client.client import Client
from headgate.client.requests import address_of, token_of
from headgate.client.sync_client import SyncClient
from headgate.core.money import plain_usd, to_limit_micro_usd
from headgate.core.text import did_you_mean, nearest
from headgate.errors import (
    HeadgateError,
    InvalidFieldError,
    InvalidSettingError,
    NotAllowedError,
    ServiceLimitError,
)
from headgate.inprocess.permits import SharedResource, whole_number
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk.clients import (
    LIMITS,
    TIMEOUT,
    GovernorFields,
    governed_async_client,
    governed_sync_client,
)
from headgate.inprocess.sdk.governed_call import let_pass
from headgate.inprocess.sdk.governor import Governor, Name, given_name

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

SCOPE = "session:sdk"
"""What a budget in this process is called where nobody names it; each client has its own."""

NO_KEY = "headgate"
"""An SDK wants a key. A service that needs no token ignores this one."""

_LEAST_VERSIONS = {"openai": 3, "anthropic": 2}
"""The first versions that take the HTTP clients of Headgate."""

_FOR_A_SERVICE = frozenset(
    ("agent_id", "scope", "max_wait_seconds", "pause_when_limited", "on_response")
)
_NO_BUDGET = 402
_CAPACITY = "llm"


def openai(
    *,
    budget_usd: Amount | None = None,
    concurrency: int | None = None,
    server: str | None = None,
    **options: Any,  # noqa: ANN401 - fields of a Governor, and whatever the SDK takes
) -> OpenAI:
    """Return an `openai.OpenAI` that spends at most `budget_usd`, `concurrency` calls at once.

    `server` is the address of a service whose gateway the calls go through, with its keys;
    `token` and `project_id` say there who calls. Other options are the fields of a `Governor`,
    such as `scope`, `tracker` and `prices`, and those of the SDK's constructor. With `server`,
    `max_wait_seconds` is refused: the service has the setting `gateway.max_wait_seconds`.
    """
    kind = _sdk("openai").OpenAI
    made = _Options.of("openai", kind, budget_usd, concurrency, server, options)
    client: OpenAI = made.remembered(kind(http_client=made.sync_http(), **made.constructor))
    return client


def async_openai(
    *,
    budget_usd: Amount | None = None,
    concurrency: int | None = None,
    server: str | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncOpenAI:
    """Return an `openai.AsyncOpenAI` with the same options as `openai`."""
    kind = _sdk("openai").AsyncOpenAI
    made = _Options.of("openai", kind, budget_usd, concurrency, server, options)
    client: AsyncOpenAI = made.remembered(kind(http_client=made.async_http(), **made.constructor))
    return client


def anthropic(
    *,
    budget_usd: Amount | None = None,
    concurrency: int | None = None,
    server: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Anthropic:
    """Return an `anthropic.Anthropic` with the same options as `openai`."""
    kind = _sdk("anthropic").Anthropic
    made = _Options.of("anthropic", kind, budget_usd, concurrency, server, options)
    client: Anthropic = made.remembered(kind(http_client=made.sync_http(), **made.constructor))
    return client


def async_anthropic(
    *,
    budget_usd: Amount | None = None,
    concurrency: int | None = None,
    server: str | None = None,
    **options: Any,  # noqa: ANN401
) -> AsyncAnthropic:
    """Return an `anthropic.AsyncAnthropic` with the same options as `openai`."""
    kind = _sdk("anthropic").AsyncAnthropic
    made = _Options.of("anthropic", kind, budget_usd, concurrency, server, options)
    http = made.async_http()
    client: AsyncAnthropic = made.remembered(kind(http_client=http, **made.constructor))
    return client


def spent(client: object) -> Decimal:
    """Return what a client of these functions has spent, in dollars.

    That is what its own calls were booked at. With `server` it is what the service has booked in
    its budget, and the service is asked.
    """
    try:
        source = _sources.get(client)
    except TypeError:
        source = None
    if isinstance(source, _Service):
        return source.spent()
    if source is None or not source.has_budget:
        problem = "has no budget; make it with headgate.openai(budget_usd=…) or the like"
        raise InvalidFieldError("client", problem)
    return Decimal(source.spent_micro_usd).scaleb(-6)


_sources: WeakKeyDictionary[object, Governor | _Service] = WeakKeyDictionary()
"""By client, what knows its money."""


def _sdk(name: str) -> Any:  # noqa: ANN401 - a package that may be missing
    try:
        package = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        message = f"headgate.{name} needs the package {name}; run pip install {name}"
        raise ImportError(message) from None
    least, version = _LEAST_VERSIONS[name], str(package.__version__)
    if int(version.partition(".")[0]) < least:
        problem = f"headgate.{name} needs {name} {least} or later, and this is {version}"
        message = f"{problem}; run pip install -U {name}"
        raise ImportError(message)
    return package


class _Options(NamedTuple):
    """What was asked for: for the governed HTTP client, and for the constructor of the SDK."""

    governor: Governor | None
    constructor: dict[str, Any]
    transport: Any
    service: _Service | None

    @classmethod
    def of(
        cls,
        sdk: str,
        kind: Any,  # noqa: ANN401 - a class of an SDK
        budget_usd: Amount | None,
        concurrency: int | None,
        server: str | None,
        options: dict[str, Any],
    ) -> _Options:
        if "http_client" in options:
            problem = "is what this function makes; give a transport, or use headgate.sdk"
            raise InvalidSettingError("http_client", problem)
        _check_names(sdk, kind, options)
        transport = options.pop("transport", None)
        known = GovernorFields.__annotations__
        fields: Any = {name: options.pop(name) for name in known if name in options}
        if concurrency is not None:
            if fields.get("scheduler") is not None:
                problem = "is the capacity of the scheduler; leave out one of them"
                raise InvalidSettingError("concurrency", problem)
            capacity = whole_number("concurrency", concurrency)
            fields["scheduler"] = LoadScheduler(None, SharedResource(_CAPACITY, capacity))
        if server is not None:
            service = _Service.of(sdk, server, budget_usd, fields, options)
            return cls(_governor(fields, concurrency), options, transport, service)
        for name in ("token", "project_id"):
            if name in options:
                raise InvalidSettingError(name, "is for a service; name one with server")
        if budget_usd is not None:
            fields["budget_usd"] = budget_usd
            fields.setdefault("tracker", "memory:")
        if not fields.keys() & {"scheduler", "tracker"}:
            problem = "is missing, and so are concurrency and server; give at least one"
            raise InvalidSettingError("budget_usd", problem)
        if fields.get("tracker") is not None:
            fields.setdefault("scope", SCOPE)
            fields.setdefault("ask_stream_usage", True)
        return cls(_governor(fields, concurrency), options, transport, None)

    def remembered(self, client: Any) -> Any:  # noqa: ANN401 - a client of an SDK
        """Return a client, and know from now on who knows its money."""
        source = self.service or self.governor
        if source is not None:
            _sources[client] = source
        return client

    def sync_http(self) -> httpx2.Client:
        if self.service is None and self.governor is not None:
            return governed_sync_client(self.governor, self.transport)
        inner = self.transport or httpx2.HTTPTransport(limits=LIMITS)
        transport = inner if self.service is None else _ServiceTransport(inner, self.service)
        if self.governor is not None:
            return governed_sync_client(self.governor, transport)
        return httpx2.Client(transport=transport, timeout=TIMEOUT, follow_redirects=True)

    def async_http(self) -> httpx2.AsyncClient:
        if self.service is None and self.governor is not None:
            return governed_async_client(self.governor, self.transport)
        inner = self.transport or httpx2.AsyncHTTPTransport(limits=LIMITS)
        transport = inner if self.service is None else _AsyncServiceTransport(inner, self.service)
        if self.governor is not None:
            return governed_async_client(self.governor, transport)
        return httpx2.AsyncClient(transport=transport, timeout=TIMEOUT, follow_redirects=True)


def _governor(fields: GovernorFields, concurrency: int | None) -> Governor | None:
    if not fields:
        return None
    governor = Governor(**fields)
    governor.concurrency = concurrency
    return governor


_OWN_NAMES = ("budget_usd", "concurrency", "server", "token", "project_id", "transport")


def _check_names(sdk: str, kind: Any, options: Mapping[str, object]) -> None:  # noqa: ANN401
    """Refuse an option that nobody knows, with the nearest one that somebody does."""
    known = {*_OWN_NAMES, *GovernorFields.__annotations__, *signature(kind).parameters}
    for name in options.keys() - known:
        advice = did_you_mean(nearest(name, known), "leave it out")
        raise InvalidSettingError(name, f"is not an option of headgate.{sdk}; {advice}")


# Through a service: it has the keys, the prices and the ledger.
#
# Only `concurrency` is kept here; the service has caps of its own beside it. A budget is created
# there by the first call, and costs nothing to create again with the same limit.


class _Service:
    """Where calls go, who makes them, and the budget that the service is to keep for them."""

    def __init__(
        self, url: str, token: str | None, scope: Name | None, budget_usd: Amount | None
    ) -> None:
        self.url = url
        self.token = token
        self._scope = scope
        self._limit_usd = (
            None
            if budget_usd is None
            else plain_usd(to_limit_micro_usd(budget_usd, field="budget_usd"))
        )
        self._is_named = scope is not None
        self._lock = threading.Lock()
        self._creating: Future[None] | None = None
        """What first calls wait for at the same time: one of them creates the budget for all."""

        if budget_usd is not None and scope is None:
            self._scope = f"session:sdk-{secrets.token_hex(4)}"
        if budget_usd is not None and callable(scope):
            problem = "is the limit of one scope; name it, or set limits at the service"
            raise InvalidSettingError("budget_usd", problem)

    @classmethod
    def of(
        cls,
        sdk: str,
        server: str,
        budget_usd: Amount | None,
        fields: dict[str, Any],
        options: dict[str, Any],
    ) -> _Service:
        """Return the service, and change the options to those of a client of it."""
        if fields.get("max_wait_seconds") is not None:
            # The calls wait there, and a client cannot tell that wait from a slow answer.
            problem = "does not limit the wait at a service; leave it out with server"
            advice = "the service has the setting gateway.max_wait_seconds"
            raise InvalidSettingError("max_wait_seconds", f"{problem}, {advice}")
        for name in fields.keys() - _FOR_A_SERVICE - {"scheduler"}:
            raise InvalidSettingError(name, "is for the service to say; leave it out with server")
        if "base_url" in options:
            raise InvalidSettingError("base_url", "is that of the server; leave out one of them")
        try:
            url = address_of(server).url
        except InvalidFieldError as error:
            raise InvalidSettingError("server", error.problem) from None
        service = cls(
            url, token_of(options.pop("token", None)), fields.pop("scope", None), budget_usd
        )
        agent_id, project_id = fields.pop("agent_id", None), options.pop("project_id", None)
        if callable(agent_id):
            raise InvalidSettingError("agent_id", "must be a string if you give a server")
        named = {"X-Headgate-Agent": agent_id, "X-Headgate-Project": project_id}
        headers = {name: value for name, value in named.items() if value is not None}
        if "api_key" in options and service.token is not None:
            # The key of a provider goes on to it, and the token stays at the service.
            own = "x-api-key" if sdk == "openai" else "authorization"
            headers[own] = service.token if sdk == "openai" else f"Bearer {service.token}"
        options.setdefault("api_key", service.token or NO_KEY)
        options["base_url"] = url + ("/v1" if sdk == "openai" else "")
        options["default_headers"] = {**headers, **(options.get("default_headers") or {})}
        if "scheduler" in fields:
            fields["allow_other"] = True
        for name in sorted(fields):
            if "scheduler" not in fields:
                raise InvalidSettingError(name, "needs concurrency where there is a server")
        return service

    def spent(self) -> Decimal:
        """Ask the service what the budget of the calls has spent."""
        if not isinstance(self._scope, str):
            problem = "has no budget of its own; name one scope, or give budget_usd"
            raise InvalidFieldError("client", problem)
        if self._limit_usd is not None and not self._is_named:
            # The first call creates the budget, and nobody else knows its name.
            return Decimal(0)
        with SyncClient(self.url, token=self.token) as client:
            status = client.budget_status(self._scope)
        return Decimal(status.spent_usd) + Decimal(status.overrun_usd)

    def headers(self) -> dict[str, str]:
        """Return what a call says of its budget."""
        if self._scope is None:
            return {}
        return {"x-headgate-scope": given_name("scope", self._scope)}

    def create_budget(self) -> None:
        """Have the service keep the budget; a token that is bound keeps it within its own.

        All that call this meanwhile get the same error.
        """
        while (joined := self._join()) is not None:
            creating, is_own = joined
            if not is_own:
                creating.result()
                continue
            with self._sharing(creating):
                limit_usd, scope = self._limit_usd, str(self._scope)
                with SyncClient(self.url, token=self.token) as client:
                    try:
                        client.create_budget(scope, limit_usd=limit_usd)
                    except NotAllowedError as error:
                        self._check_bound(error)
                        scope = f"{client.budget_status().scope}/{scope}"
                        client.create_budget(scope, limit_usd=limit_usd)
                self._scope, self._limit_usd = scope, None

    async def create_budget_async(self) -> None:
        """Do the same on an event loop."""
        while (joined := self._join()) is not None:
            creating, is_own = joined
            if not is_own:
                await asyncio.wrap_future(creating)
                continue
            with self._sharing(creating):
                limit_usd, scope = self._limit_usd, str(self._scope)
                async with Client(self.url, token=self.token) as client:
                    try:
                        await client.create_budget(scope, limit_usd=limit_usd)
                    except NotAllowedError as error:
                        self._check_bound(error)
                        scope = f"{(await client.budget_status()).scope}/{scope}"
                        await client.create_budget(scope, limit_usd=limit_usd)
                self._scope, self._limit_usd = scope, None

    def _join(self) -> tuple[Future[None], bool] | None:
        """Return what creates the budget, and whether the caller is to do it.

        It is None once the budget is there.
        """
        with self._lock:
            if self._creating is not None:
                return self._creating, False
            if self._limit_usd is None:
                return None
            creating: Future[None] = Future()
            # Nobody who waits for it can cancel it.
            creating.set_running_or_notify_cancel()
            self._creating = creating
            return creating, True

    @contextmanager
    def _sharing(self, creating: Future[None]) -> Iterator[None]:
        """Tell those that wait how it has ended; if somebody interrupted it, one does it anew."""
        try:
            yield
        except BaseException as error:
            self._creating = None
            if isinstance(error, Exception):
                creating.set_exception(error)
            else:
                creating.set_result(None)
            raise
        self._creating = None
        creating.set_result(None)

    def _check_bound(self, error: NotAllowedError) -> None:
        if self._is_named or error.details.get("field") != "scope":
            raise error


class _ServiceTransport(httpx2.BaseTransport):
    """Sends calls through a service, which refuses those that its budgets have no room for."""

    def __init__(self, inner: httpx2.BaseTransport, service: _Service) -> None:
        self._inner = inner
        self._service = service

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            self._service.create_budget()
            request.headers.update(self._service.headers())
            response = self._inner.handle_request(request)
            if response.status_code == _NO_BUDGET:
                try:
                    raise _refused(response.read(), response.headers)
                finally:
                    response.close()
        except HeadgateError as error:
            let_pass(error, request.headers)
            raise
        return response

    def close(self) -> None:
        self._inner.close()


class _AsyncServiceTransport(httpx2.AsyncBaseTransport):
    """Does the same for a client with asyncio."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, service: _Service) -> None:
        self._inner = inner
        self._service = service

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            await self._service.create_budget_async()
            request.headers.update(self._service.headers())
            response = await self._inner.handle_async_request(request)
            if response.status_code == _NO_BUDGET:
                try:
                    raise _refused(await response.aread(), response.headers)
                finally:
                    await response.aclose()
        except HeadgateError as error:
            let_pass(error, request.headers)
            raise
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Said(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Said = msgspec.field(default_factory=_Said)


def _refused(body: bytes, headers: Mapping[str, str]) -> ServiceLimitError:
    try:
        said = msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = ""
    return ServiceLimitError(
        said or "a budget of the service has no room for this call",
        code="budget_exceeded",
        status=_NO_BUDGET,
        request_id=headers.get("x-headgate-call-id", ""),
    )
