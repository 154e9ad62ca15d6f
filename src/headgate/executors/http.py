"""Tasks as HTTP requests: the action goes to the endpoint of the target, its answer is the result.

The body is `{"kind": action, "ref": …, "tabId": …, "selector": …, …params}`, or the task's own
input. Rule: nothing in `params` takes the place of a field that the task itself has. What came
before the request was sent cannot have been charged; of what came after, only the answer tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx2
import msgspec

from headgate.core.outcomes import NOTHING_USED, Failed, Outcome, Succeeded
from headgate.core.records import Submission
from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors import headers as header_names
from headgate.executors.environment import Environment, SlotKeys, no_slot_keys
from headgate.executors.headers import filled_headers, header_value, slot_headers
from headgate.executors.http_answers import refused
from headgate.executors.resolver import EndpointResolver, ResolveError
from headgate.executors.results import as_json_or_text, shortened, too_large
from headgate.executors.slot_texts import uses_slot
from headgate.executors.targets import HttpTarget, Resolver, has_slot
from headgate.executors.templates import UnfilledError, UrlTemplate
from headgate.http_transport import (
    NOT_SENDABLE,
    NOT_SENT,
    HttpClient,
    explained,
    read_body,
    read_error_body,
)
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_of


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
        self._slot_headers = slot_headers(
            by_slot, setting=f"{setting}.headers", environment=self._environment
        )
        self._resolver = self._resolver_of(target.resolver, setting)
        self._proxy = self._proxy_of(target.proxy, f"{setting}.proxy")
        self._clock = clock
        self._prices = prices
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
            url = await self._endpoint(order, client)
            content = self._content(order.submission)
            headers = self._headers_for(order)
        except (UnfilledError, ResolveError) as error:
            is_transient = isinstance(error, ResolveError) and error.is_transient
            return self._not_sent(str(error), is_transient=is_transient)
        except InvalidSettingError as error:
            return self._not_sent(str(error))
        try:
            return await self._sent(url, headers, content, client)
        except NOT_SENT as error:
            return self._not_sent(f"the executor cannot be reached: {explained(error)}")
        except NOT_SENDABLE as error:
            problem = f"the request cannot be sent: {explained(error)}"
            return self._not_sent(problem, is_transient=False)
        except httpx2.RequestError as error:
            problem = f"the executor did not answer: {explained(error)}"
            return Failed(error=self._line(problem), is_transient=True)

    async def _sent(
        self, url: str, headers: dict[str, str], content: bytes, client: HttpClient
    ) -> Outcome:
        response = await client.send(self._target.method, url, headers, content)
        try:
            if response.is_success:
                return await self._succeeded(response)
            text = self._environment.cleaned(await read_error_body(response))
            return refused(response.status_code, response.headers, text, now=self._clock())
        finally:
            await response.aclose()

    async def _succeeded(self, response: httpx2.Response) -> Outcome:
        max_bytes = self._target.max_result_bytes
        body = await read_body(response, max_bytes)
        result = None if body is None else as_json_or_text(body)
        # A text grows when what cannot be written in JSON is replaced and escaped.
        if body is None or (result is not None and memoryview(result).nbytes > max_bytes):
            return Failed(error=too_large(max_bytes))
        return Succeeded(result=result, usage=usage_of(body, self._prices))

    async def _endpoint(self, order: WorkOrder, client: HttpClient) -> str:
        if self._resolver is None:
            return self._url.fill(order)
        resolved = await self._resolver.resolve(order, client)
        return self._url.fill(order, resolved=resolved)

    def _content(self, submission: Submission) -> bytes:
        if self._target.body == "action":
            return action_body(submission)
        if submission.input is None:
            raise UnfilledError("input is required for task execution")
        return bytes(submission.input)

    def _headers_for(self, order: WorkOrder) -> dict[str, str]:
        headers = self._own_headers(order)
        for name, text in self._slot_headers.items():
            headers[name] = text.filled(order, written=header_value)
        if order.traceparent is not None:
            headers[header_names.TRACEPARENT] = order.traceparent
        return headers

    def _own_headers(self, order: WorkOrder) -> dict[str, str]:
        return {
            "content-type": "application/json",
            **self._headers,
            header_names.AGENT_ID: header_value(order.agent_id),
            header_names.TASK_ID: header_value(order.task_id),
            header_names.ATTEMPT: str(order.attempt),
            header_names.IDEMPOTENCY_KEY: header_value(order.task_id),
        }

    def _not_sent(self, problem: str, *, is_transient: bool = True) -> Failed:
        return Failed(error=self._line(problem), is_transient=is_transient, usage=NOTHING_USED)

    def _line(self, text: str) -> str:
        return shortened(self._environment.cleaned(text))

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


def _params(params: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    if params is None:
        return {}
    try:
        return msgspec.json.decode(params, type=dict[str, msgspec.Raw] | None) or {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UnfilledError("params must be a JSON object") from None
