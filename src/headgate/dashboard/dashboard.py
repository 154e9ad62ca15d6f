"""The dashboard on an application: who may open an address, what is drawn, what is refused.

Every address goes the same way: who asks, may they, the handler, the answer with its headers. Rule:
an action is done only where the dashboard is not read-only, and only with the secret of its form;
whoever is not let in is sent to the login, and anything else that is refused is a page that says
what happened and what to do.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from posixpath import normpath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

import headgate
from headgate.api.api import Api, Handler, Route
from headgate.api.app import App
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Headers, Response, error_response, plain_page
from headgate.api.http.slices import in_slices
from headgate.api.shares import Making
from headgate.config.settings import DashboardMode
from headgate.core.text import Steps, ago, coming, relative
from headgate.dashboard import (
    audit,
    budgets,
    calls,
    formats,
    live,
    overview,
    projects,
    settings,
    slots,
    task,
    tasks,
    tokens,
    webhooks,
)
from headgate.dashboard.errors import error_page, is_of_ledger, page_of_form
from headgate.dashboard.formats import reset_words
from headgate.dashboard.forms import ONCE_FIELD, SentForms
from headgate.dashboard.lists import read_name
from headgate.dashboard.login import (
    LOGIN,
    Tries,
    choose_theme,
    log_in,
    log_out,
    login_path,
    show_login,
)
from headgate.dashboard.page import (
    NO_ANSWER,
    PERMANENT_REDIRECT,
    Done,
    Page,
    PageRoute,
    Recent,
    View,
    compressed,
    page_response,
    redirect,
    response_route,
)
from headgate.dashboard.session import (
    CSRF,
    THEME,
    Cookies,
    Visitor,
    authenticate,
    known_visitor,
    needs_login,
    read_form,
)
from headgate.dashboard.static_files import PREFIX, StaticFiles

ROUTES: tuple[PageRoute, ...] = (
    *overview.ROUTES,
    *tasks.ROUTES,
    *task.ROUTES,
    *calls.ROUTES,
    *projects.ROUTES,
    *budgets.ROUTES,
    *slots.ROUTES,
    *webhooks.ROUTES,
    *settings.ROUTES,
    *audit.ROUTES,
    *tokens.ROUTES,
)
"""Everything that the dashboard shows and does, page by page."""

ROOT = "/"
FOLDER = "/ui"
OK = 200
UNAUTHORIZED = 401
NOT_FOUND = 404
MISDIRECTED = 421
SERVER_FAULT = 500
PAGE_SECONDS = 5.0
"""How long a page waits for what it shows; a person who waits longer has gone."""
MAX_MADE = 4
"""How many whole pages are made at a time, so that a task is not submitted behind hundreds."""
TURN_SECONDS = 15.0
"""How long a page waits for others before it; some 500 are made meanwhile."""

MACROS = "macros.html"
FRAME = "base.html"
CSRF_MARK = f"csrf-{secrets.token_hex(16)}"
"""Stands for the secret of a form while a page is drawn, so that one drawing serves everybody.

Nobody outside can know it, so no text of theirs can stand for the secret.
"""
ONCE_MARK = f"once-{secrets.token_hex(16)}"
"""Stands for the number of the forms of one answer."""

Result = TypeVar("Result")

_DOT = re.compile("%2e", re.IGNORECASE)
_CROWDED = "too many pages are asked for at once"
_READ_ONLY = "the dashboard of this service is read-only; use the command line or the API"


class Rendering:
    """Draws a page, or one region of it, from its template.

    A region is a block of the template, named as the element that holds it; a page that is open
    fetches its regions anew, and nothing around them is drawn then. Rule: everything is escaped,
    and a name that a template does not know is a fault, not an empty text.
    """

    def __init__(self, static: StaticFiles) -> None:
        self._templates = Environment(
            loader=PackageLoader("headgate.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # An upgrade changes files under a service that runs, which has the old code.
            auto_reload=False,
        )
        self._templates.filters.update(formats.FILTERS)
        self._templates.globals.update(
            static=static.url,
            ago=ago,
            coming=coming,
            relative=relative,
            reset_words=reset_words,
            csrf_mark=CSRF_MARK,
            once_mark=ONCE_MARK,
            version=headgate.__version__,
        )
        # Macros are a global, because a region is drawn without the top of its template.
        self.macros: Any = self._templates.get_template(MACROS).module
        self._templates.globals["m"] = self.macros
        self._frame = frozenset(self._templates.get_template(FRAME).blocks)

    async def page(self, view: View, page: Page, *, flash: tuple[str, bool] = ("", False)) -> str:
        """Return a whole page; `flash` is what the last action said, and whether it failed."""
        template = self._templates.get_template(page.template)
        return await in_slices(_joined(template.generate(_context(view, page), flash=flash)))

    async def region(self, view: View, page: Page, name: str) -> str | None:
        """Return the inside of a region; None if the page has no such region."""
        template = self._templates.get_template(page.template)
        wanted = name.replace("-", "_")
        block = template.blocks.get(wanted)
        # The blocks of the frame are whole parts of a page, with what their template has around.
        if block is None or wanted in self._frame:
            return None
        return await in_slices(_joined(block(template.new_context(_context(view, page)))))


def _joined(pieces: Iterable[str]) -> Steps[str]:
    drawn: list[str] = []
    for piece in pieces:
        drawn.append(piece)
        yield
    return "".join(drawn)


def _context(view: View, page: Page) -> dict[str, Any]:
    return {**page.context, "view": view, "title": page.title}


class Dashboard:
    """All pages of a service; `routes` is what the application serves."""

    def __init__(self, api: Api, mode: DashboardMode) -> None:
        self._api = api
        self._mode: DashboardMode = mode
        self._static = StaticFiles()
        self._rendering = Rendering(self._static)
        self._pages: Recent[Page] = Recent()
        self._regions: Recent[str | None] = Recent()
        self._sent = SentForms()
        self._turns = Making(MAX_MADE)
        self._tries = Tries()
        self.routes = tuple(self._routes())

    def has(self, path: str) -> bool:
        """Tell whether an address is one of the dashboard."""
        return path in (ROOT, FOLDER) or path.startswith(f"{FOLDER}/")

    async def error_page(self, request: Request, api_error: ApiError) -> Response:
        """Return the page that says what was refused, or the way to the login."""
        status = api_error.kind.status
        if status == MISDIRECTED:
            # Under a name that is not ours nothing else is served, no style and no page to go to.
            return plain_page(api_error, request.request_id)
        if status == UNAUTHORIZED:
            to = login_path(_url(request) if request.method in ("GET", "HEAD") else ROOT)
            return redirect(to, is_fragment=_is_fragment(request))
        if status == NOT_FOUND and _has_slash_at_end(request):
            path, query = request.raw_path().rstrip("/"), request.query_string()
            return redirect(f"{path}?{query}" if query else path, status=PERMANENT_REDIRECT)
        visitor = await self._visitor(request, may_ask=status < SERVER_FAULT)
        view = self._view(
            visitor.request, is_let_in=visitor.is_let_in, is_unchecked=visitor.is_unchecked
        )
        of_ledger = is_of_ledger(api_error, request.path, self._api.engine.health().parts)
        request_id, form_page = request.request_id.decode("ascii"), page_of_form(request)
        page = error_page(api_error, request_id, names_ledger=of_ledger, sent_from=form_page)
        return await self._drawn(view, page, error_response(api_error, request.request_id).headers)

    async def _visitor(self, request: Request, *, may_ask: bool) -> Visitor:
        try:
            return await _in_time(known_visitor(self._api, request, may_ask=may_ask))
        except ApiError:
            # What was refused first has its own page, whoever it is that cannot be asked about.
            return Visitor(request, is_unchecked=True)

    @property
    def _has_login(self) -> bool:
        return needs_login(self._api)

    def _routes(self) -> Iterable[Route]:
        own = (
            response_route(f"{PREFIX}{{id}}", self._static.show, needs=None),
            response_route("/favicon.ico", self._static.show_icon, needs=None),
            response_route(f"{FOLDER}/live", live.stream),
        )
        for route in (*ROUTES, *own):
            yield _bound(route.method, route.path, partial(self._answer, route))
        for path in (FOLDER, f"{FOLDER}/"):
            yield _bound("GET", path, _to_overview)
        yield _bound("GET", LOGIN, self._show_login)
        yield _bound("POST", LOGIN, self._log_in)
        yield _bound("POST", f"{FOLDER}/logout", self._log_out)
        yield _bound("POST", f"{FOLDER}/theme", self._choose_theme)

    async def _answer(self, route: PageRoute, api: Api, request: Request, name: str) -> Response:
        own = await _in_time(authenticate(api, request, route.needs))
        view, name = self._view(own, is_let_in=True), read_name(name)
        if route.answer is not None:
            return await route.answer(view, name)
        if route.action is not None:
            return await self._act(route, view, name)
        region = own.header(b"hx-target").decode("latin-1") if _is_fragment(own) else ""
        if region:
            return await self._region(route, view, name, region)
        async with self._turn(own):
            return await self._drawn(view, await self._whole(route, view, name))

    async def _whole(self, route: PageRoute, view: View, name: str) -> Page:
        """Return a page made now; none of its regions is older than that from here on."""
        page, key = await _page(route, view, name), drawing_key(route, view)
        self._pages.forget(key)
        self._regions.forget(key)
        return page

    @asynccontextmanager
    async def _turn(self, request: Request) -> AsyncIterator[None]:
        """Wait until a whole page may be made; regions need no turn: one drawing serves many."""
        async with AsyncExitStack() as made:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await made.enter_async_context(self._turns.turn(request.holder))
            except TimeoutError:
                raise ApiError("limit_reached", _CROWDED) from None
            yield

    async def _region(self, route: PageRoute, view: View, name: str, region: str) -> Response:
        """Answer with the inside of one region; a page that has none of this name comes whole."""
        key, seat = drawing_key(route, view), view.request.seat
        run = None if seat is None else partial(self._api.shares.turns.run, seat=seat)

        async def draw() -> str | None:
            # Several regions of a page are asked for together, and share its numbers.
            page = await self._pages.get(key, partial(_page, route, view, name), run)
            return await self._rendering.region(view, page, region)

        text = await self._regions.get((*key, region), draw, run)
        if text is None:
            # A whole page names its visitor, so it is drawn for each.
            async with self._turn(view.request):
                text = await self._rendering.page(view, await self._whole(route, view, name))
        return compressed(page_response(OK, self._with_secret(text, view)[0]), view.request)

    async def _act(self, route: PageRoute, view: View, name: str) -> Response:
        form = await read_form(view.request)
        if self._mode != "on":
            raise ApiError("forbidden", _READ_ONLY)
        if route.action is None:
            raise ApiError("not_found", "there is nothing to do here")
        deed = partial(route.action, view, name, form)
        if form.has(ONCE_FIELD):
            key = (view.caller.token_id, view.path, form.digest)
            done = await self._sent.once(key, deed, again=view.path)
        else:
            done = await deed()
        return await self._drawn(view, done) if isinstance(done, Page) else self._done(view, done)

    def _done(self, view: View, done: Done) -> Response:
        to = _settled(done.to)
        headers: Headers = ()
        if done.said:
            headers = Cookies(view.request).say(done.said, at=to, is_error=done.is_error)
        return redirect(to, headers, is_fragment=_is_fragment(view.request))

    def _view(self, request: Request, *, is_let_in: bool, is_unchecked: bool = False) -> View:
        cookies = Cookies(request)
        return View(
            api=self._api,
            request=request,
            caller=request.caller,
            mode=self._mode,
            now=self._api.engine.now(),
            theme=cookies.theme,
            theme_cookie=cookies.sent_name(THEME),
            is_let_in=is_let_in,
            is_unchecked=is_unchecked,
            needs_login=self._has_login,
        )

    async def _drawn(self, view: View, page: Page, further: Headers = ()) -> Response:
        """Answer with a whole page, which shows once what an action said that led to it."""
        cookies = Cookies(view.request)
        flash = cookies.said(at=view.url)
        text = await self._rendering.page(view, page, flash=flash)
        text, headers = self._with_secret(text, view)
        if flash[0]:
            headers += (cookies.drop_said(at=view.url),)
        return compressed(page_response(page.status, text, (*headers, *further)), view.request)

    def _with_secret(self, text: str, view: View) -> tuple[str, Headers]:
        """Put the visitor's own secret where it belongs; one that is new is to be kept."""
        cookies = Cookies(view.request)
        secret = cookies.csrf or secrets.token_hex(16)
        headers = () if cookies.csrf else (cookies.keep(CSRF, secret),)
        text = text.replace(ONCE_MARK, secrets.token_hex(8))
        return text.replace(CSRF_MARK, secret), headers

    async def _show_login(self, api: Api, request: Request, name: str) -> Response:
        view = self._view(await authenticate(api, request, None), is_let_in=False)
        return await self._drawn_or(view, await _in_time(show_login(view, name)))

    async def _log_in(self, api: Api, request: Request, _: str) -> Response:
        view = self._view(await authenticate(api, request, None), is_let_in=False)
        form = await read_form(view.request)
        return await self._drawn_or(view, await _in_time(log_in(view, form, self._tries)))

    async def _log_out(self, api: Api, request: Request, _: str) -> Response:
        view = self._view(await authenticate(api, request, None), is_let_in=False)
        await read_form(view.request)
        return await log_out(view)

    async def _choose_theme(self, api: Api, request: Request, _: str) -> Response:
        view = self._view(await authenticate(api, request, None), is_let_in=False)
        return await choose_theme(view, await read_form(view.request))

    async def _drawn_or(self, view: View, page: Page | Response) -> Response:
        return await self._drawn(view, page) if isinstance(page, Page) else page


async def _to_overview(_: Api, __: Request, ___: str) -> Response:
    return redirect(ROOT)


def _bound(method: str, path: str, handler: Handler) -> Route:
    # The API lets all of them through: the dashboard authenticates its visitors itself.
    return Route(method, path, handler, "", needs=None)


async def _page(route: PageRoute, view: View, name: str) -> Page:
    if route.page is None:
        raise ApiError("not_found", "there is no page here")
    return await _in_time(route.page(view, name))


async def _in_time(work: Awaitable[Result]) -> Result:
    """Wait for what only looks, and so can be left at any time."""
    patience = asyncio.timeout(PAGE_SECONDS)
    try:
        async with patience:
            return await work
    except TimeoutError:
        if not patience.expired():
            raise
        raise ApiError("unavailable", NO_ANSWER) from None


def _settled(to: str) -> str:
    """Return an address as the browser has it in the end: there a message waits for its page.

    Our own pages lead to no other; a form can be sent with any.
    """
    parts = urlsplit(to)
    path = normpath(_DOT.sub(".", parts.path))
    return parts._replace(path=ROOT if path == FOLDER else path).geturl()


def drawing_key(route: PageRoute, view: View) -> tuple[object, ...]:
    """Return everything that a region may look different by.

    What a token may see follows from its bounds and permissions. Which token it is stands in the
    frame of a page, and in the regions of a page that says so of itself; everywhere else those with
    equal rights share a drawing.
    """
    caller = view.caller
    own = (caller.bounds, caller.permissions, caller.token_id if route.is_personal else "")
    return (view.url, view.address, view.mode, view.needs_login, *own, view.theme)


def _is_fragment(request: Request) -> bool:
    return bool(request.header(b"hx-request"))


def _has_slash_at_end(request: Request) -> bool:
    path = request.raw_path()
    return request.method in ("GET", "HEAD") and path.endswith("/") and path.strip("/") != ""


def _url(request: Request) -> str:
    path, query = request.raw_path(), request.query_string()
    return f"{path}?{query}" if query else path


# Putting the dashboard on the application of a service, unless it is switched off.


def attach_dashboard(app: App, mode: DashboardMode) -> None:
    """Serve the pages at `/` and below `/ui`; what is off is not there at all."""
    if mode == "off":
        return
    app.serve_pages(Dashboard(app.api, mode))
