"""Looking up the endpoint of a task: an HTTP address knows it, a JSON pointer finds it there.

A lookup that fails is an error of the task. Nothing was executed yet, so nothing was charged.
"""

from __future__ import annotations

import asyncio

import httpx2
import msgspec

from headgate.core.texts.json_pointer import found_at, parsed_pointer
from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors.environment import Environment
from headgate.executors.headers import filled_headers
from headgate.executors.targets import Resolver
from headgate.executors.templates import UrlTemplate
from headgate.http_transport import (
    NOT_SENDABLE,
    HttpClient,
    explained,
    read_body,
    read_error_body,
)

MAX_ANSWER_BYTES = 64 << 10
_TRY_AGAIN = frozenset((408, 425, 429))
_SERVER_ERRORS = 500


class ResolveError(Exception):
    """The endpoint of a task is not known; the text is the error of the task."""

    def __init__(self, problem: str, *, is_transient: bool = False) -> None:
        super().__init__(f"the executor's endpoint could not be resolved: {problem}")
        self.is_transient = is_transient


class EndpointResolver:
    """Asks one address for the endpoints of tasks."""

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
        return self._found(body)

    async def _fetched(self, url: str, client: HttpClient) -> bytes:
        response = await client.send("GET", url, self._headers)
        try:
            status = response.status_code
            if not response.is_success:
                problem = f"the lookup returned {status}: {await read_error_body(response)}"
                is_transient = status in _TRY_AGAIN or status >= _SERVER_ERRORS
                raise ResolveError(problem, is_transient=is_transient)
            body = await read_body(response, MAX_ANSWER_BYTES)
        finally:
            await response.aclose()
        if body is None:
            problem = f"the answer is larger than {MAX_ANSWER_BYTES} bytes"
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
            problem = f"what is at {self._pointer!r} is neither a text nor a whole number"
            raise ResolveError(problem)
        return str(found)
