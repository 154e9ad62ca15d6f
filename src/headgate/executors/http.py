"""Tasks as HTTP requests: the action goes to the endpoint of the target, its answer is the result.

The body is `{"kind": action, "ref": …, "tabId": …, "selector": …, …params}`, or the task's own
input. Rule: nothing in `params` takes the place of a field that the task itself has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx2
import msgspec

from headgate.core.tasks.outcomes import Outcome
from headgate.core.tasks.records import Submission
from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors import headers as header_names
from headgate.executors.environment import Environment, SlotKeys, no_slot_keys
from headgate.executors.exchange import Exchange, WrittenRequest
from headgate.executors.headers import filled_headers, header_value, slot_headers
from headgate.executors.resolver import EndpointResolver, ResolveError
from headgate.executors.slot_texts import uses_slot
from headgate.executors.targets import HttpTarget, Resolver, has_slot
from headgate.executors.templates import UnfilledError, UrlTemplate
from headgate.http_transport import HttpClient
from headgate.providers.prices import PriceList


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
        self._exchange = Exchange(
            prices=prices,
            clock=clock,
            cleaned=self._environment.cleaned,
            max_result_bytes=target.max_result_bytes,
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
            return self._exchange.not_sent(str(error), is_transient=is_transient)
        except InvalidSettingError as error:
            return self._exchange.not_sent(str(error))
        return await self._exchange.send(request, client)

    async def _request(self, order: WorkOrder, client: HttpClient) -> WrittenRequest:
        return WrittenRequest(
            method=self._target.method,
            url=await self._endpoint(order, client),
            content=self._content(order.submission),
            headers=self._headers_for(order),
        )

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
