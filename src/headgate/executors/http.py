"""Tasks as HTTP requests: the action goes to the endpoint of a target, the response is the result.

The body is `{"kind": action, "ref": …, "tabId": …, "selector": …, …params}`, or the task's own
input; nothing in `params` replaces a field that the task itself has. Targets and workflows share
`RequestRunner`, which sends a request and judges the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from headgate.core.lifecycle import (
    NOTHING_USED,
    UNKNOWN_USAGE,
    Failed,
    Limited,
    Outcome,
    Succeeded,
    Usage,
)
from headgate.core.task import Submission
from headgate.core.text import found_at, parsed_pointer
from headgate.errors import InvalidSettingError
from headgate.executors.executor import (
    WorkOrder,
    as_json_or_text,
    has_no_descriptor,
    in_slices,
    not_begun,
    shortened,
    too_large,
)
from headgate.executors.targets import HttpTarget, Resolver, has_slot
from headgate.executors.templates import (
    KEY,
    Environment,
    ObserveSlot,
    SlotKeys,
    SlotText,
    UnfilledError,
    UrlTemplate,
    no_slot_keys,
    uses_slot,
)
from headgate.providers.content_coding import ContentCodingError
from headgate.providers.http_client import (
    NOT_SENDABLE,
    NOT_SENT,
    HttpClient,
    explained,
    read_body,
    read_error_body,
)
from headgate.providers.http_headers import (
    FRAMING_HEADERS,
    HEADER_NAME,
    HEADER_VALUE,
    SECRET_NAME,
    check_header_value,
    retry_after_seconds,
)
from headgate.providers.prices import PriceList
from headgate.providers.provider import refuses_key
from headgate.providers.requests import Kind, kind_of
from headgate.providers.usage import usage_of, usage_steps


class HttpExecutor:
    """Sends each task of one target as a request."""

    def __init__(
        self,
        name: str,
        target: HttpTarget,
        *,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        prices: PriceList,
        slot_keys: SlotKeys = no_slot_keys,
        observe_slot: ObserveSlot | None = None,
    ) -> None:
        setting = f"targets.{name}"
        self._target = target
        self._environment = Environment(environ, has_slot=has_slot(target), slot_keys=slot_keys)
        self._url = UrlTemplate(target.url, setting=f"{setting}.url", environment=self._environment)
        by_slot = {name: value for name, value in target.headers.items() if uses_slot(value)}
        fixed = {name: value for name, value in target.headers.items() if name not in by_slot}
        self._headers = filled_headers(
            fixed, setting=f"{setting}.headers", environment=self._environment
        )
        self._sends_key = any(KEY in value for value in by_slot.values())
        self._slot_headers = slot_headers(
            by_slot, setting=f"{setting}.headers", environment=self._environment
        )
        self._resolver = self._resolver_of(target.resolver, setting)
        self._proxy = self._proxy_of(target.proxy, f"{setting}.proxy")
        self._runner = RequestRunner(
            prices=prices,
            clock=clock,
            cleaned=self._environment.cleaned,
            max_result_bytes=target.max_result_bytes,
            books_failures=target.book_failures is True,
            observe_slot=observe_slot,
        )
        self._client: HttpClient | None = None

    async def open(self) -> None:
        """Make the pool of connections; none is opened before a task needs it."""
        self._client = HttpClient(
            max_connections=self._target.max_connections,
            connect_timeout_seconds=self._target.connect_timeout_seconds,
            proxy=self._proxy,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def execute(self, order: WorkOrder) -> Outcome:
        """Send the task, and read what came of it."""
        client = self._client
        if client is None:
            raise RuntimeError("the executor is not open; await its open() first")
        try:
            request = await self._request(order, client)
        except (UnfilledError, ResolveError) as error:
            is_transient = isinstance(error, ResolveError) and error.is_transient
            if is_transient and has_no_descriptor():
                return not_begun()
            return self._runner.not_sent(str(error), is_transient=is_transient)
        except InvalidSettingError as error:
            return self._runner.not_sent(str(error))
        return await self._runner.send(request, client)

    async def _request(self, order: WorkOrder, client: HttpClient) -> HttpRequest:
        return HttpRequest(
            method=self._target.method,
            url=await self._endpoint(order, client),
            content=self._content(order.submission),
            headers=self._headers_for(order),
            slot=order.slot if self._is_answered_by_provider(order) else None,
            slot_key=self._slot_key(order),
        )

    def _slot_key(self, order: WorkOrder) -> str:
        if order.slot is None or not self._sends_key:
            return ""
        return self._environment.key_of(order.slot)

    def _is_answered_by_provider(self, order: WorkOrder) -> bool:
        """Tell whether the answer is that of a slot's provider, and says something of its quota.

        It is where the key is sent, and where the settings of the target name the slot or its
        provider. A slot that only the task names beside any target is none of that target's.
        """
        return self._sends_key or (has_slot(self._target) and not order.names_slot)

    async def _endpoint(self, order: WorkOrder, client: HttpClient) -> str:
        if self._resolver is None:
            return self._url.fill(order)
        resolved = await self._resolver.resolve(order, client)
        return self._url.fill(order, resolved=resolved)

    def _content(self, submission: Submission) -> bytes:
        if self._target.body == "action":
            return action_body(submission)
        if not submission.input:
            raise UnfilledError("input is required for task execution")
        return bytes(submission.input)

    def _headers_for(self, order: WorkOrder) -> dict[str, str]:
        headers = self._own_headers(order)
        for name, text in self._slot_headers.items():
            headers[name] = text.filled(order, written=header_value)
        if order.traceparent is not None:
            headers[TRACEPARENT] = order.traceparent
        if order.gateway is not None:
            headers[BASE_URL], headers[TOKEN] = order.gateway.base_url, order.gateway.token
        return headers

    def _own_headers(self, order: WorkOrder) -> dict[str, str]:
        return {
            "content-type": "application/json",
            **self._headers,
            AGENT_ID: header_value(order.agent_id),
            TASK_ID: header_value(order.task_id),
            ATTEMPT: str(order.attempt),
            IDEMPOTENCY_KEY: header_value(order.task_id),
        }

    def _resolver_of(self, resolver: Resolver | None, setting: str) -> EndpointResolver | None:
        if (resolver is not None) != self._url.needs_resolved:
            setting = f"{setting}.url"
            problem = "{resolved} and a resolver need each other; write both or neither"
            raise InvalidSettingError(setting, problem)
        if resolver is None:
            return None
        return EndpointResolver(
            resolver, setting=f"{setting}.resolver", environment=self._environment
        )

    def _proxy_of(self, proxy: str | None, setting: str) -> str | None:
        if proxy is None:
            return None
        url = self._environment.filled(proxy, setting=setting)
        try:
            scheme = httpx2.URL(url).scheme
        except httpx2.InvalidURL:
            scheme = ""
        if scheme not in {"http", "https"}:
            raise InvalidSettingError(setting, "must be an http:// or https:// URL")
        return url


def action_body(submission: Submission) -> bytes:
    """Write the action as JSON: what the task says first, then its parameters as they came."""
    own = {
        "kind": submission.action,
        "ref": submission.ref,
        "tabId": submission.tab_id,
        "selector": submission.selector,
    }
    said = {name: value for name, value in own.items() if value is not None}
    params = _params(submission.params)
    return msgspec.json.encode(
        said | {name: value for name, value in params.items() if name not in own}
    )


def _params(params: msgspec.Raw) -> dict[str, msgspec.Raw]:
    if not params:
        return {}
    try:
        return msgspec.json.decode(params, type=dict[str, msgspec.Raw] | None) or {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UnfilledError("params must be a JSON object") from None


# Headers of a target, filled from the environment and checked once. Those with a placeholder for
# the slot of an attempt are filled for each attempt.

_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))

# Names are in lower case throughout, so that no header is sent in two spellings.
AGENT_ID = "x-agent-id"
TASK_ID = "x-headgate-task-id"
ATTEMPT = "x-headgate-attempt"
IDEMPOTENCY_KEY = "idempotency-key"
TRACEPARENT = "traceparent"
BASE_URL = "x-headgate-base-url"
TOKEN = "x-headgate-task-token"  # noqa: S105
_NOT_CONFIGURABLE = frozenset(
    (AGENT_ID, TASK_ID, ATTEMPT, IDEMPOTENCY_KEY, BASE_URL, TOKEN, *FRAMING_HEADERS)
)


def filled_headers(
    headers: Mapping[str, str], *, setting: str, environment: Environment
) -> dict[str, str]:
    """Return headers as they are sent; errors name the header, and never its value."""
    return {
        name.lower(): _filled(name, value, f"{setting}.{name}", environment)
        for name, value in headers.items()
    }


def slot_headers(
    headers: Mapping[str, str], *, setting: str, environment: Environment
) -> dict[str, SlotText]:
    """Return headers that are filled for each attempt."""
    return {
        name.lower(): _slot_text(name, value, f"{setting}.{name}", environment)
        for name, value in headers.items()
    }


def header_value(text: str) -> str:
    """Return a text as a header can carry it: as it is, or percent-encoded where it must be."""
    return text if HEADER_VALUE.fullmatch(text) else quote(text, safe=_VISIBLE, errors="replace")


def _slot_text(name: str, value: str, setting: str, environment: Environment) -> SlotText:
    _check_name(name, setting)
    text = SlotText(value, setting=setting, environment=environment)
    check_header_value(text.sample(), setting)
    return text


def _check_name(name: str, setting: str) -> None:
    if not HEADER_NAME.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a header")
    if name.lower() in _NOT_CONFIGURABLE:
        raise InvalidSettingError(setting, "is set for every request; leave it out")


def _filled(name: str, value: str, setting: str, environment: Environment) -> str:
    _check_name(name, setting)
    filled = environment.filled(value, setting=setting)
    check_header_value(filled, setting)
    if SECRET_NAME.search(name):
        # Behind a scheme such as Bearer; who writes a key into the file wants it hidden as well.
        environment.hide(filled.rpartition(" ")[2], f"{{{name}}}")
    return filled


MAX_RESPONSE_BYTES = 64 << 10
_TRY_AGAIN = frozenset((408, 425, 429))
_FIRST_SERVER_ERROR = 500


class ResolveError(Exception):
    """The endpoint of a task is not known; the text is the error of the task."""

    def __init__(self, problem: str, *, is_transient: bool = False) -> None:
        super().__init__(f"the executor's endpoint could not be resolved: {problem}")
        self.is_transient = is_transient


class EndpointResolver:
    """Asks one HTTP address for the endpoints of tasks; a JSON pointer finds them in the response.

    A lookup that fails is an error of the task. Nothing was executed yet, so nothing was charged.
    """

    def __init__(self, resolver: Resolver, *, setting: str, environment: Environment) -> None:
        url_setting = f"{setting}.url"
        self._url = UrlTemplate(resolver.url, setting=url_setting, environment=environment)
        if self._url.needs_resolved:
            problem = "{resolved} is what this lookup finds, it cannot be part of it"
            raise InvalidSettingError(url_setting, problem)
        self._headers = filled_headers(
            resolver.headers, setting=f"{setting}.headers", environment=environment
        )
        self._path = parsed_pointer(resolver.pointer, setting=f"{setting}.pointer")
        self._pointer = resolver.pointer
        self._timeout_seconds = resolver.timeout_seconds

    async def resolve(self, order: WorkOrder, client: HttpClient) -> str:
        """Return what stands for `{resolved}` in the URL of this task."""
        url = self._url.fill(order)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                body = await self._fetched(url, client)
        except TimeoutError:
            problem = f"no answer within {self._timeout_seconds:g} seconds"
            raise ResolveError(problem, is_transient=True) from None
        except NOT_SENDABLE as error:
            raise ResolveError(explained(error)) from None
        except httpx2.RequestError as error:
            raise ResolveError(explained(error), is_transient=True) from None
        except ContentCodingError as error:
            problem = f"the answer cannot be read: {error}"
            raise ResolveError(problem, is_transient=error.is_damaged) from None
        return self._found(body)

    async def _fetched(self, url: str, client: HttpClient) -> bytes:
        response = await client.send("GET", url, self._headers)
        try:
            status = response.status_code
            if not response.is_success:
                problem = f"the lookup returned {status}: {await read_error_body(response)}"
                is_transient = status in _TRY_AGAIN or status >= _FIRST_SERVER_ERROR
                raise ResolveError(problem, is_transient=is_transient)
            body = await read_body(response, MAX_RESPONSE_BYTES)
        finally:
            await response.aclose()
        if body is None:
            problem = f"the answer is larger than {MAX_RESPONSE_BYTES} bytes"
            raise ResolveError(problem)
        return body

    def _found(self, body: bytes) -> str:
        try:
            found = found_at(msgspec.json.decode(body), self._path)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise ResolveError("the answer is not JSON") from None
        except LookupError:
            problem = f"the answer has nothing at {self._pointer!r}"
            raise ResolveError(problem) from None
        if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
            problem = f"what is at {self._pointer!r} is neither a string nor a whole number"
            raise ResolveError(problem)
        return str(found)


# What a response means for a task
#
# | status | outcome | what is charged |
# | --- | --- | --- |
# | 2xx | done | what was reserved |
# | 429, 529; 503 with Retry-After | a pause, which costs no attempt | nothing |
# | 408, 504, 524: a gateway stopped waiting | failed, may be tried again | what was reserved |
# | another 5xx of a model API | failed, may be tried again | nothing |
# | another 5xx | failed, may be tried again | what was reserved |
# | 425 | failed, may be tried again | nothing |
# | other 4xx | failed for good | nothing: the endpoint refused |
# | anything else | failed for good | what was reserved |
# | a body that is damaged | failed, may be tried again | what was reserved |
# | a body that is too large, or not coded as asked | failed for good | what was reserved |
#
# Whatever usage the body tells goes before this.

EXECUTOR = "executor"
"""What an endpoint is called in the error of a task, unless it is something else."""

TOO_MANY_REQUESTS = 429
_UNAVAILABLE = 503
_OVERLOADED = 529
_TIMEOUTS = frozenset((408, 504, 524))
_TOO_EARLY = 425
_CLIENT_ERRORS = range(400, 500)
_SERVER_ERRORS = range(500, 600)


def refused(
    status: int,
    headers: Mapping[str, str],
    text: str,
    *,
    now: float,
    whom: str = EXECUTOR,
    is_model_api: bool = False,
    usage: Usage = UNKNOWN_USAGE,
) -> Failed | Limited:
    """Return the outcome of a response that is not a success; `usage` is what its body tells.

    A model API that answers 5xx has sent no output, and providers charge for output. A target of
    the user's own may have spent a lot before it failed.
    """
    why = f"{whom} returned {status}"
    error = f"{why}: {shortened(text) or '(no body)'}"
    seconds = retry_after_seconds(headers, now=now)
    is_overload = status == _OVERLOADED or (status == _UNAVAILABLE and seconds is not None)
    if is_overload or status == TOO_MANY_REQUESTS:
        return Limited(retry_after_seconds=seconds, error=error, is_overload=is_overload, why=why)
    # A gateway answers so when it has stopped waiting, which the work behind it may not know.
    is_cut = status in _TIMEOUTS
    is_free = status in _CLIENT_ERRORS or (is_model_api and status in _SERVER_ERRORS)
    if usage == UNKNOWN_USAGE and is_free and not is_cut:
        usage = NOTHING_USED
    is_transient = is_cut or status == _TOO_EARLY or status in _SERVER_ERRORS
    return Failed(error=error, is_transient=is_transient, usage=usage, is_cut=is_cut)


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is sent; `priced_as` is the model whose price the response's usage has.

    `slot` is the one whose provider answers it, and `slot_key` its key if that is sent.
    """

    method: str
    url: str
    headers: dict[str, str]
    content: bytes | None = None
    priced_as: str | None = None
    slot: str | None = None
    slot_key: str = ""

    def __repr__(self) -> str:
        return f"HttpRequest({self.method!r})"


class RequestRunner:
    """Sends requests and judges responses; errors call whoever is asked by the name `whom`.

    A failure before the request was sent cannot have been charged; after that, only the answer
    tells. Whoever answers on the path of a model API counts as a provider, whose 5xx cost nothing,
    unless `books_failures` says that they do. With `names_host` an error says who could not be
    reached; it is for runs whose reader has chosen the address, not for tenants of a service.
    """

    def __init__(
        self,
        *,
        prices: PriceList,
        clock: Callable[[], float],
        cleaned: Callable[[str], str],
        max_result_bytes: int,
        whom: str = EXECUTOR,
        names_host: bool = False,
        books_failures: bool = False,
        observe_slot: ObserveSlot | None = None,
    ) -> None:
        self._prices = prices
        self._observe_slot = observe_slot
        self._books_failures = books_failures
        self._clock = clock
        self._cleaned = cleaned
        self._max_bytes = max_result_bytes
        self._whom = whom
        self._names_host = names_host

    async def send(self, request: HttpRequest, client: HttpClient) -> Outcome:
        """Send a request, and read what came of it."""
        try:
            return await self._sent(request, client)
        except NOT_SENT as error:
            if has_no_descriptor():
                return not_begun()
            return self.not_sent(
                f"{self._whom} cannot be reached{self._at(request)}: {explained(error)}"
            )
        except NOT_SENDABLE as error:
            problem = f"the request cannot be sent: {explained(error)}"
            return self.not_sent(problem, is_transient=False)
        except httpx2.RequestError as error:
            problem = f"{self._whom} did not answer: {explained(error)}"
            return Failed(error=self._line(problem), is_transient=True, is_cut=True)
        except ContentCodingError as error:
            problem = f"{self._whom} sent an answer that cannot be read: {error}"
            is_transient = error.is_damaged
            return Failed(error=self._line(problem), is_transient=is_transient, is_cut=True)

    def not_sent(self, problem: str, *, is_transient: bool = True) -> Failed:
        """Return the outcome of a request that nobody has got."""
        return Failed(error=self._line(problem), is_transient=is_transient, usage=NOTHING_USED)

    async def _sent(self, request: HttpRequest, client: HttpClient) -> Outcome:
        response = await client.send(request.method, request.url, request.headers, request.content)
        text = ""
        try:
            try:
                if not response.is_success:
                    text = await read_error_body(response)
            finally:
                self._observe(request, response, text)
            if response.is_success:
                return await self._succeeded(response, request.priced_as)
            outcome = refused(
                response.status_code,
                response.headers,
                self._cleaned(text),
                now=self._clock(),
                whom=self._whom,
                is_model_api=not self._books_failures and _is_model_api(request),
                usage=usage_of(text.encode(), self._prices, priced_as=request.priced_as),
            )
            if isinstance(outcome, Limited):
                return msgspec.structs.replace(outcome, slot=request.slot)
            return outcome
        finally:
            await response.aclose()

    def _observe(self, request: HttpRequest, response: httpx2.Response, error: str) -> None:
        """Show a slot what came back; only a model API says something of the key itself."""
        if self._observe_slot is None or request.slot is None:
            return
        status, key = response.status_code, request.slot_key
        is_refused = key and _is_model_api(request) and refuses_key(status, error.encode())
        self._observe_slot(
            request.slot,
            status,
            response.headers,
            self._clock(),
            refused_key=key if is_refused else "",
        )

    async def _succeeded(self, response: httpx2.Response, priced_as: str | None) -> Outcome:
        body = await read_body(response, self._max_bytes)
        result = None if body is None else await in_slices(as_json_or_text(body))
        # A text grows when what cannot be written in JSON is replaced and escaped.
        if body is None or (result is not None and memoryview(result).nbytes > self._max_bytes):
            return Failed(error=too_large(self._max_bytes), is_cut=True)
        usage = await in_slices(usage_steps(body, self._prices, priced_as=priced_as))
        return Succeeded(result=result, usage=usage)

    def _at(self, request: HttpRequest) -> str:
        """Name the server of a request, without what may be secret in the rest of the URL."""
        if not self._names_host:
            return ""
        url = urlsplit(request.url)
        return f" at {url.scheme}://{url.netloc.rpartition('@')[2]}"

    def _line(self, text: str) -> str:
        return shortened(self._cleaned(text))


def _is_model_api(request: HttpRequest) -> bool:
    return kind_of(request.method, httpx2.URL(request.url).path) is Kind.MODEL_CALL
