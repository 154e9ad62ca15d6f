"""The ASGI application: a table of routes, and the edge where errors become answers.

Rule: every request gets an answer in the one shape, and no answer tells how the service is made.
What nobody expected is logged once, under the id that the client is told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from headgate.api import (
    admin,
    budgets,
    calls,
    events,
    models,
    settings,
    slots,
    status,
    tasks,
    tokens,
    usage,
    webhooks,
    workers,
)
from headgate.api.api import Api, Handler, Route
from headgate.api.callers import Caller
from headgate.api.errors import ApiError, api_error_of
from headgate.api.http.request import (
    MAX_BODY_BYTES,
    ClientGoneError,
    Head,
    Request,
    request_ids,
)
from headgate.api.http.response import Response, error_response
from headgate.api.openapi import openapi
from headgate.api.shares import Shares
from headgate.engine.task_runner import DeadlineWatch
from headgate.errors import StoreError

# The table of routes: everything that the service answers to, subject by subject.


def _description(calls: Sequence[Route] = ()) -> Handler:
    """Return a handler that answers with the description of all routes; it is made only once."""
    document, making = b"", threading.Lock()

    def describe() -> bytes:
        nonlocal document
        with making:
            document = document or msgspec.json.encode(openapi(ROUTES, calls))
        return document

    async def show(_api: Api, _: Request, __: str) -> Response:
        # It takes a tenth of a second, in which nobody else would be served.
        return Response(_OK, document or await asyncio.to_thread(describe))

    return show


show_openapi = _description()

ROUTES = (
    *tasks.ROUTES,
    *calls.ROUTES,
    *workers.ROUTES,
    *events.ROUTES,
    *webhooks.ROUTES,
    *budgets.ROUTES,
    *usage.ROUTES,
    *tokens.ROUTES,
    *admin.ROUTES,
    *settings.ROUTES,
    *slots.ROUTES,
    *models.ROUTES,
    *status.ROUTES,
    Route(
        "GET",
        "/openapi.json",
        show_openapi,
        "describe the API to programs",
        None,
        responses={200: "application/json"},
    ),
)


ANSWER_SECONDS = 30.0
OUTAGE_LOG_SECONDS = 10.0
_NO_ANSWER = "the store has not answered; whether the request was carried out is not known"
_STARTING = "the service is starting, and its store is not open yet; try again in a moment"
_PLACEHOLDER = "{id}"
_OK = 200
_NO_CONTENT = 204
_LOG = logging.getLogger("headgate.api")


class Pages(Protocol):
    """What is served to people beside the API; there a refusal is a page as well."""

    @property
    def routes(self) -> tuple[Route, ...]:
        """Everything that is served."""

    def has(self, path: str) -> bool:
        """Tell whether an address is for people, also one where nothing is."""

    async def error_page(self, request: Request, api_error: ApiError) -> Response:
        """Return the page that says what was refused and what to do."""


class Gateway(Protocol):
    """What answers in the protocols of providers; it takes over a whole request."""

    routes: tuple[Route, ...]
    """What it answers to, as the description of the API has it."""

    max_body_bytes: int

    def has(self, method: str, path: str) -> bool:
        """Tell whether a request is for the gateway."""

    def takes(self, url: bytes) -> bool:
        """Tell by its address whether a request with a body is for the gateway."""

    def check_head(self, head: Head) -> Caller | None:
        """Refuse whoever is not let in, as `App.check_head` does."""

    def refusal(
        self, url: bytes, headers: Sequence[tuple[bytes, bytes]], api_error: ApiError
    ) -> Response:
        """Return the answer to a request that is refused by its head."""

    async def serve(self, request: Request, send: Any) -> None:  # noqa: ANN401
        """Answer a request."""


class App:
    """The application of one node. `api` may be given other rules while it serves."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: dict[tuple[str, ...], dict[str, Route]] = {}
        self._open_paths = {route.path.encode() for route in ROUTES if route.needs is None}
        for route in ROUTES:
            self._add(route)
        self._patience: DeadlineWatch[asyncio.Task[Any]] = DeadlineWatch(time.monotonic, self._lose)
        self._lost: set[asyncio.Task[Any]] = set()
        self._request_ids = request_ids()
        self._outage = ("", 0.0)
        self._pages: Pages | None = None
        self._gateway: Gateway | None = None

    def serve_gateway(self, gateway: Gateway) -> None:
        """Answer in the protocols of providers as well, and describe that."""
        self._gateway = gateway
        show = _description(gateway.routes)
        self._add(next(one for one in ROUTES if one.handler is show_openapi)._replace(handler=show))

    def serve_pages(self, pages: Pages) -> None:
        """Serve pages beside the API, which does not describe them."""
        self._pages = pages
        for route in pages.routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        if _PLACEHOLDER not in route.path:
            self._fixed.setdefault(route.path, {})[route.method] = route
            return
        shape = tuple(route.path.split("/")[1:])
        self._patterns.setdefault(shape, {})[route.method] = route

    @property
    def shares(self) -> Shares:
        """What callers have in hand; the connections count there as well."""
        return self.api.shares

    def check_head(self, head: Head) -> Caller | None:
        """Refuse whoever is not let in, by the head of a request whose body is still to come.

        Return who sends it, where that is known already.
        """
        if self._gateway is not None and self._gateway.takes(head.url):
            return self._gateway.check_head(head)
        path = head.url.partition(b"?")[0]
        if self._pages is not None and self._pages.has(path.decode("latin-1")):
            # Who sends it is said by a cookie, which is looked at when the request is complete.
            self.api.auth.check_host_and_origin(head.host, head.origin)
        elif path not in self._open_paths:
            return self.api.auth.check_head(head)
        return None

    def refusal(
        self,
        url: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        api_error: ApiError,
        request_id: bytes,
    ) -> Response:
        """Return the answer to a request that is refused by its head."""
        if self._gateway is not None and self._gateway.takes(url):
            return self._gateway.refusal(url, headers, api_error)
        return error_response(api_error, request_id)

    def most_bytes(self, url: bytes) -> int:
        """Return how long the body of a request to an address may be."""
        if self._gateway is not None and self._gateway.takes(url):
            return self._gateway.max_body_bytes
        return MAX_BODY_BYTES

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        """Answer one request, as ASGI has it."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        request.request_id = request.sent_request_id() or next(self._request_ids)
        gateway = self._gateway
        if gateway is not None and gateway.has(request.method, scope["path"]):
            await gateway.serve(request, send)
            return
        try:
            answer = await self._answer_in_time(request, scope["path"])
        except ClientGoneError:
            return
        head = answer.head(request.request_id)
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        if answer.stream is not None and request.method != "HEAD":
            await self._stream(answer.stream, request, send)
        else:
            await send({"type": "http.response.body", "body": answer.body})

    async def _answer_in_time(self, request: Request, path: str) -> Response:
        """Answer, if need be that the store has not: one that hangs must not hang its clients."""
        task = asyncio.current_task()
        if task is None:
            return await self._answer(request, path)
        self._patience.watch(task, time.monotonic() + ANSWER_SECONDS)
        try:
            return await self._answer(request, path)
        except asyncio.CancelledError:
            if task not in self._lost:
                raise
            self._lost.discard(task)
            task.uncancel()
            return await self._refused(ApiError("unavailable", _NO_ANSWER), request, path)
        finally:
            self._patience.leave(task)

    def _lose(self, task: asyncio.Task[Any]) -> None:
        self._lost.add(task)
        task.cancel()

    async def _answer(self, request: Request, path: str) -> Response:
        try:
            routes, name = self._find(request, path)
            route = routes.get("GET" if request.method == "HEAD" else request.method)
            if route is None:
                return _other_method(request.method, routes)
            auth = self.api.auth
            caller = auth.authenticate(request, route.needs)
            if caller is None:
                caller = await auth.look_up(request, route.needs)
            if route.needs is not None:
                request.identify(caller)
            return await route.handler(self.api, request, name)
        except ApiError as api_error:
            _forget_frames(api_error)
            return await self._refused(api_error, request, path)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge: whatever it is, the client gets an answer
            return await self._answer_to(error, request, path)

    async def _answer_to(self, error: Exception, request: Request, path: str) -> Response:
        api_error = api_error_of(error)
        request_id = request.request_id.decode("ascii")
        if isinstance(error, StoreError) and not self.api.engine.opened.is_set():
            # Nothing is wrong, so the log has no line about it.
            return await self._refused(ApiError("unavailable", _STARTING), request, path)
        if api_error.body.code == "internal":
            _LOG.error("request %s: %s %r", request_id, request.method, path, exc_info=error)
        elif isinstance(error, StoreError) and api_error.kind.is_retryable:
            self._log_outage(str(error), request_id)
        _forget_frames(error)
        return await self._refused(api_error, request, path)

    async def _refused(self, api_error: ApiError, request: Request, path: str) -> Response:
        if self._pages is not None and self._pages.has(path):
            return await self._pages.error_page(request, api_error)
        return error_response(api_error, request.request_id)

    def _log_outage(self, problem: str, request_id: str) -> None:
        """Log what clients are not told; while it stays the same, now and then."""
        now = time.monotonic()
        if problem != self._outage[0] or now - self._outage[1] >= OUTAGE_LOG_SECONDS:
            self._outage = (problem, now)
            _LOG.warning("request %s: the store is unavailable: %s", request_id, problem)

    def _find(self, request: Request, path: str) -> tuple[dict[str, Route], str]:
        routes = self._fixed.get(path)
        if routes is not None:
            return routes, ""
        segments = request.segments()
        for shape, found in self._patterns.items():
            if len(shape) == len(segments):
                name = _name(shape, segments)
                if name is not None:
                    return found, name
        raise ApiError("not_found", "there is nothing at this address")

    async def _stream(
        self,
        pieces: AsyncGenerator[bytes, None],
        request: Request,
        send: Any,  # noqa: ANN401
    ) -> None:
        """Send pieces as they come, until there are no more or the client has gone.

        A client that does not take them is left without an end.
        """
        work = _send_pieces(pieces, send)
        if request.seat is not None:
            work = self.api.shares.turns.run(work, request.seat)
        sending = asyncio.create_task(work)
        leaving = asyncio.create_task(request.gone())
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (sending, leaving):
                one.cancel()
            end, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
        if not isinstance(end, Exception):
            await send({"type": "http.response.body", "body": b""})
        elif not isinstance(end, TimeoutError):
            _LOG.error("request %s: a stream broke off", request.request_id.decode(), exc_info=end)


async def _send_pieces(pieces: AsyncGenerator[bytes, None], send: Any) -> None:  # noqa: ANN401
    async with aclosing(pieces):
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})


def _forget_frames(error: BaseException) -> None:
    """Let go of the frames that a refusal went through, and of the bodies that they keep.

    Frames and errors keep each other, so that only the garbage collector would free them, and a
    tenant that sends bodies which are refused would fill the memory faster than it looks.
    """
    left: BaseException | None = error
    while left is not None:
        left.__traceback__ = None
        left = left.__cause__ or left.__context__


def _name(shape: tuple[str, ...], segments: list[str]) -> str | None:
    name = None
    for wanted, given in zip(shape, segments, strict=True):
        if wanted == _PLACEHOLDER:
            name = given
        elif wanted != given:
            return None
    # Nothing has an empty name.
    return name or None


def _other_method(method: str, routes: dict[str, Route]) -> Response:
    allowed = [*routes, *(["HEAD"] if "GET" in routes else []), "OPTIONS"]
    allow = ", ".join(sorted(allowed))
    if method == "OPTIONS":
        return Response(_NO_CONTENT, b"", ((b"allow", allow.encode()),))
    raise ApiError("method_not_allowed", f"use {allow} here", allow=allow)
