"""Tasks as calls of models, through the gateway of the service that runs them.

The action of a task is what is asked, as `chat/completions`; its input is the request, and its
result is the answer. The call is made as the task's own: it draws on what the task holds, takes no
permit but those of the upstream and its key, and what it used is what the task cost.

Rule: while the gateway says that the call is to wait, its task waits with it. Its place is kept,
and nobody else is held up for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from headgate.core.lifecycle import NOTHING_USED, Failed, Limited, Outcome
from headgate.executors import http
from headgate.executors.executor import WorkOrder
from headgate.executors.http import HttpRequest, RequestRunner, header_value
from headgate.executors.targets import GatewayTarget
from headgate.providers.http_client import HttpClient
from headgate.providers.prices import PriceList

ACTIONS = ("chat/completions", "responses", "messages", "completions", "embeddings")
CONNECT_SECONDS = 10.0
SHORTEST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 55.0
"""The gateway keeps the place of a call for as long as it says, and a minute more."""

_NO_GATEWAY = (
    "this service can call no model: give it the key of a provider, such as OPENAI_API_KEY or"
    " [upstreams.NAME], and see that [gateway] is enabled"
)


class GatewayExecutor:
    """Makes the call of each task of one target."""

    def __init__(
        self, target: GatewayTarget, *, clock: Callable[[], float], prices: PriceList
    ) -> None:
        self._target = target
        self._runner = RequestRunner(
            prices=prices,
            clock=clock,
            cleaned=lambda text: text,
            max_result_bytes=target.max_result_bytes,
            whom="gateway",
        )
        self._client: HttpClient | None = None

    async def open(self) -> None:
        """Make the pool of connections; none is opened before a task needs it."""
        self._client = HttpClient(
            max_connections=self._target.max_connections, connect_timeout_seconds=CONNECT_SECONDS
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def execute(self, order: WorkOrder) -> Outcome:
        """Make the call, however long it is to wait; the runner ends it at its timeout."""
        client = self._client
        if client is None:
            raise RuntimeError("the executor is not open; await its open() first")
        access, submission = order.gateway, order.submission
        if access is None:
            return Failed(error=_NO_GATEWAY, usage=NOTHING_USED)
        if submission.action not in ACTIONS:
            known = ", ".join(ACTIONS)
            line = f"action {submission.action!r} is no call of a model; use one of {known}"
            return Failed(error=line, usage=NOTHING_USED)
        if not submission.input:
            line = "input is missing; give the request to the model as the task's input"
            return Failed(error=line, usage=NOTHING_USED)
        request = HttpRequest(
            method="POST",
            url=f"{access.base_url}/v1/{submission.action}",
            headers={
                "content-type": "application/json",
                "authorization": f"Bearer {access.token}",
                http.IDEMPOTENCY_KEY: header_value(f"{order.task_id}:{order.attempt}"),
            },
            content=bytes(submission.input),
        )
        while True:
            outcome = await self._runner.send(request, client)
            if not isinstance(outcome, Limited):
                return _without_usage(outcome)
            seconds = outcome.retry_after_seconds or SHORTEST_WAIT_SECONDS
            await asyncio.sleep(min(max(seconds, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS))


def _without_usage(outcome: Outcome) -> Outcome:
    """Leave the figures to the gateway, which books the call; a refusal still costs nothing."""
    if isinstance(outcome, Failed) and outcome.usage != NOTHING_USED:
        return msgspec.structs.replace(outcome, usage=NOTHING_USED)
    return outcome
