"""Steps that are requests over HTTP: to any endpoint, or to one that answers as models do.

Rule: a key is read for each request, goes into its header and is kept nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from headgate.core.lifecycle import Failed, Outcome, Succeeded
from headgate.errors import InvalidSettingError
from headgate.executors import http as header_names
from headgate.executors.executor import WorkOrder, shortened
from headgate.executors.http import HttpRequest, RequestRunner, header_value
from headgate.executors.targets import MAX_RESULT_BYTES
from headgate.executors.templates import ObserveSlot
from headgate.providers.http_client import HttpClient
from headgate.providers.prices import PriceList
from headgate.workflow import step_requests
from headgate.workflow.step_executors import request_of, setting_of
from headgate.workflow.step_requests import (
    Variables,
    body_of,
    filled_headers,
    has_answer,
    model_headers,
    model_url,
    result_value,
)
from headgate.workflow.workflow import Endpoint

CONNECT_SECONDS = 10.0

_JSON = {"content-type": "application/json"}

Writer = Callable[[WorkOrder], HttpRequest]
"""Writes the request of an attempt, or raises `InvalidSettingError`."""


class Connections:
    """The connections that all requests of a run share; opened with the first executor."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._client: HttpClient | None = None

    @property
    def client(self) -> HttpClient:
        """The client, made when it is first needed."""
        if self._client is None:
            self._client = HttpClient(
                max_connections=self._max_connections, connect_timeout_seconds=CONNECT_SECONDS
            )
        return self._client

    async def close(self) -> None:
        """Close every connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class RequestSteps:
    """Sends what a writer makes of each attempt; errors call whoever is asked `whom`.

    Whatever is no 2xx is a failure.
    """

    def __init__(
        self,
        write: Writer,
        connections: Connections,
        *,
        variables: Variables,
        prices: PriceList,
        whom: str,
        observe_slot: ObserveSlot | None = None,
    ) -> None:
        self._write = write
        self._connections = connections
        self._exchange = RequestRunner(
            prices=prices,
            clock=time.time,
            cleaned=variables.cleaned,
            max_result_bytes=MAX_RESULT_BYTES,
            whom=whom,
            names_host=True,
            observe_slot=observe_slot,
        )

    async def open(self) -> None:
        """Do nothing: connections are opened when they are needed."""

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Send the request, and read what came of it."""
        try:
            request = self._write(order)
        except InvalidSettingError as error:
            return self._exchange.not_sent(str(error), is_transient=False)
        return await self._exchange.send(request, self._connections.client)


class ModelSteps:
    """Asks models; a 2xx without an answer in it is a failure, whoever sent it.

    A page of a proxy would otherwise go on to the next step as the word of a model.
    """

    def __init__(self, requests: RequestSteps, variables: Variables, *, whom: str) -> None:
        self._requests = requests
        self._cleaned = variables.cleaned
        self._whom = whom

    async def open(self) -> None:
        """Do nothing: connections are opened when they are needed."""

    async def close(self) -> None:
        """Close the connections."""
        await self._requests.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Ask the model, and see whether it answered."""
        outcome = await self._requests.execute(order)
        if not isinstance(outcome, Succeeded):
            return outcome
        result = result_value(outcome.result)
        if has_answer(result):
            return outcome
        body = body_of(result)
        said = body if isinstance(body, str) else msgspec.json.encode(body).decode()
        problem = f"{self._whom} answered with no completion: {said}"
        # It may have worked for it all the same: what nobody knows is booked as held.
        return Failed(
            error=shortened(self._cleaned(problem)), is_transient=True, usage=outcome.usage
        )


class Sending:
    """Makes the executors of steps that are requests, over the same connections."""

    def __init__(
        self,
        connections: Connections,
        variables: Variables,
        prices: PriceList,
        observe_slot: ObserveSlot | None = None,
    ) -> None:
        self._connections = connections
        self._variables = variables
        self._prices = prices
        self._observe_slot = observe_slot

    def http(self) -> RequestSteps:
        """Return what sends the requests of `http` steps."""
        return self._steps(http_writer(self._variables), whom="endpoint")

    def model(self, endpoint: Endpoint, slot: str | None = None) -> ModelSteps:
        """Return what asks the models of an endpoint, whose key may be that of a slot."""
        requests = self._steps(model_writer(endpoint, self._variables, slot), whom=endpoint.name)
        return ModelSteps(requests, self._variables, whom=endpoint.name)

    def _steps(self, write: Writer, *, whom: str) -> RequestSteps:
        return RequestSteps(
            write,
            self._connections,
            variables=self._variables,
            prices=self._prices,
            whom=whom,
            observe_slot=self._observe_slot,
        )


def http_writer(variables: Variables) -> Writer:
    """Return what writes the requests of `http` steps."""

    def write(order: WorkOrder) -> HttpRequest:
        request, setting = request_of(order, step_requests.HttpRequest), setting_of(order)
        has_body = request.body is not msgspec.UNSET
        own = _own_headers(order) | (_JSON if has_body else {})
        return HttpRequest(
            method=request.method,
            url=variables.filled(request.url, f"{setting}.http.url"),
            headers=own | filled_headers(request.headers, f"{setting}.http.headers", variables),
            content=msgspec.json.encode(request.body) if has_body else None,
        )

    return write


def model_writer(endpoint: Endpoint, variables: Variables, slot: str | None = None) -> Writer:
    """Return what writes the calls to the models of an endpoint."""

    def write(order: WorkOrder) -> HttpRequest:
        request = request_of(order, step_requests.ModelRequest)
        return HttpRequest(
            method="POST",
            url=model_url(endpoint, variables),
            headers=_own_headers(order) | _JSON | model_headers(endpoint, variables),
            content=msgspec.json.encode(request.body),
            priced_as=request.model,
            slot=slot,
        )

    return write


def _own_headers(order: WorkOrder) -> dict[str, str]:
    return {
        header_names.TASK_ID: header_value(order.task_id),
        header_names.ATTEMPT: str(order.attempt),
        header_names.IDEMPOTENCY_KEY: header_value(order.task_id),
    }
