"""One HTTP request and what its answer means for a task; targets and workflows share it.

Rule: what came before the request was sent cannot have been charged; of what came after, only the
answer tells.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import msgspec

from headgate.core.tasks.outcomes import NOTHING_USED, Failed, Outcome, Succeeded
from headgate.executors.http_answers import EXECUTOR, refused
from headgate.executors.results import as_json_or_text, shortened, too_large
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


class WrittenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it is sent; `priced_as` is the model whose price the answer's usage has."""

    method: str
    url: str
    headers: dict[str, str]
    content: bytes | None = None
    priced_as: str | None = None

    def __repr__(self) -> str:
        return f"WrittenRequest({self.method!r})"


class Exchange:
    """Sends requests and judges answers; errors call whoever is asked by the name `whom`."""

    def __init__(
        self,
        *,
        prices: PriceList,
        clock: Callable[[], float],
        cleaned: Callable[[str], str],
        max_result_bytes: int,
        whom: str = EXECUTOR,
    ) -> None:
        self._prices = prices
        self._clock = clock
        self._cleaned = cleaned
        self._max_bytes = max_result_bytes
        self._whom = whom

    async def send(self, request: WrittenRequest, client: HttpClient) -> Outcome:
        """Send a request, and read what came of it."""
        try:
            return await self._sent(request, client)
        except NOT_SENT as error:
            return self.not_sent(f"the {self._whom} cannot be reached: {explained(error)}")
        except NOT_SENDABLE as error:
            problem = f"the request cannot be sent: {explained(error)}"
            return self.not_sent(problem, is_transient=False)
        except httpx2.RequestError as error:
            problem = f"the {self._whom} did not answer: {explained(error)}"
            return Failed(error=self._line(problem), is_transient=True)

    def not_sent(self, problem: str, *, is_transient: bool = True) -> Failed:
        """Return the outcome of a request that nobody has got."""
        return Failed(error=self._line(problem), is_transient=is_transient, usage=NOTHING_USED)

    async def _sent(self, request: WrittenRequest, client: HttpClient) -> Outcome:
        response = await client.send(request.method, request.url, request.headers, request.content)
        try:
            if response.is_success:
                return await self._succeeded(response, request.priced_as)
            text = self._cleaned(await read_error_body(response))
            status, headers = response.status_code, response.headers
            return refused(status, headers, text, now=self._clock(), whom=self._whom)
        finally:
            await response.aclose()

    async def _succeeded(self, response: httpx2.Response, priced_as: str | None) -> Outcome:
        body = await read_body(response, self._max_bytes)
        result = None if body is None else as_json_or_text(body)
        # A text grows when what cannot be written in JSON is replaced and escaped.
        if body is None or (result is not None and memoryview(result).nbytes > self._max_bytes):
            return Failed(error=too_large(self._max_bytes))
        usage = usage_of(body, self._prices, priced_as=priced_as)
        return Succeeded(result=result, usage=usage)

    def _line(self, text: str) -> str:
        return shortened(self._cleaned(text))
