"""What a page of the dashboard is made of: a view of the service, a handler, a template.

A handler is given a `View` and returns a `Page`; an action is given a form too and returns where to
go next. Neither knows of cookies, headers or templates. Rule: a handler gets its numbers from the
functions behind the API's routes and hands `view.request` and `view.caller` to them, so that the
permissions and the bounds of a token hold here as they do there.
"""

from __future__ import annotations

import asyncio
import gzip
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from headgate.api.api import Api
from headgate.api.callers import Caller
from headgate.api.http.request import Request
from headgate.api.http.response import Headers, Response
from headgate.config.settings import DashboardMode
from headgate.errors import StoreUnavailableError
from headgate.storage.tokens import Permission

NO_ANSWER = "the store did not answer in time"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page that is to be drawn; the template finds `context` beside `view` and `title`."""

    template: str
    title: str
    context: dict[str, Any] = {}
    status: int = 200


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an action: the page to go to, and what is said there once."""

    to: str
    said: str = ""
    is_error: bool = False


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The service as one visitor sees it at one moment.

    `is_let_in` is off on the pages that are shown to anybody: the login, and some errors.
    `is_unchecked` says of such a visitor that a token came along, and could not be looked up.
    """

    api: Api
    request: Request
    caller: Caller
    mode: DashboardMode
    now: float
    theme: str = ""
    theme_cookie: str = ""
    is_let_in: bool = True
    is_unchecked: bool = False
    needs_login: bool = False

    def can(self, permission: Permission) -> bool:
        """Tell whether an action that needs this permission is drawn and done here."""
        return self.mode == "on" and self.is_let_in and self.caller.may(permission)

    def may(self, permission: Permission) -> bool:
        """Tell whether the visitor may look at what needs this permission."""
        return self.is_let_in and self.caller.may(permission)

    @property
    def offers_login(self) -> bool:
        """Whether logging in may help; it does not help whose token may be a good one."""
        return self.needs_login and not self.is_let_in and not self.is_unchecked

    @property
    def path(self) -> str:
        """The path of the page."""
        return self.request.path

    @property
    def url(self) -> str:
        """The address of the page with its query, from which its regions are fetched anew."""
        path, query = self.request.raw_path(), self.request.query_string()
        return f"{path}?{query}" if query else path

    @property
    def address(self) -> str:
        """The address under which the visitor reached the service, for commands to paste."""
        return self.request.address


class Form:
    """The fields of a form that was sent; a name may be there more than once."""

    def __init__(self, fields: dict[str, list[str]]) -> None:
        self._fields = fields

    def get(self, name: str, default: str = "") -> str:
        """Return a field without the spaces around it; the last one if there are several."""
        values = self._fields.get(name)
        return values[-1].strip() if values else default

    def all(self, name: str) -> list[str]:
        """Return every value that was sent under a name."""
        return list(self._fields.get(name, ()))

    def replaced(self, fields: Mapping[str, str]) -> Form:
        """Return the form with some fields as they are given here."""
        return Form({**self._fields, **{name: [value] for name, value in fields.items()}})

    @property
    def digest(self) -> bytes:
        """What tells this form from one that was filled in otherwise."""
        return blake2b(repr(sorted(self._fields.items())).encode(), digest_size=20).digest()

    def has(self, name: str) -> bool:
        """Tell whether a field was sent, as a ticked box is."""
        return name in self._fields


PageHandler = Callable[[View, str], Awaitable[Page]]
ActionHandler = Callable[[View, str, Form], Awaitable[Done | Page]]
"""Does something; it answers with a page only where that shows what nobody may see again."""
AnswerHandler = Callable[[View, str], Awaitable[Response]]


class PageRoute(NamedTuple):
    """One address of the dashboard, with exactly one of the three kinds of handler.

    The regions of a page that `is_personal` show which token is looked with.
    """

    path: str
    needs: Permission | None
    page: PageHandler | None = None
    action: ActionHandler | None = None
    answer: AnswerHandler | None = None
    is_personal: bool = False

    @property
    def method(self) -> str:
        """The method that the address takes."""
        return "GET" if self.action is None else "POST"


def page_route(
    path: str,
    handler: PageHandler,
    needs: Permission | None = "read",
    *,
    is_personal: bool = False,
) -> PageRoute:
    """Return the route of a page; `{id}` in the path is handed over as the handler's text."""
    return PageRoute(path, needs, page=handler, is_personal=is_personal)


def action_route(
    path: str, handler: ActionHandler, needs: Permission | None = "admin"
) -> PageRoute:
    """Return the route of an action; it is refused without the form's secret, and in read-only."""
    return PageRoute(path, needs, action=handler)


def response_route(
    path: str, handler: AnswerHandler, needs: Permission | None = "read"
) -> PageRoute:
    """Return a route that answers with something else than a page, such as raw JSON."""
    return PageRoute(path, needs, answer=handler)


# The headers of every page: what it may load, who may frame it, and that nobody keeps it.

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

PAGE_HEADERS: Headers = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)

HTML = b"text/html; charset=utf-8"
SEE_OTHER = 303
PERMANENT_REDIRECT = 308
NO_CONTENT = 204
COMPRESSION = 5
LEAST_COMPRESSED_BYTES = 1_000

_GZIP = (b"gzip", b"x-gzip", b"*")
"""The names of what a page is compressed with, the most exact first."""

_WEIGHT = re.compile(rb"(?:q=(?:0\.[0-9]*[1-9][0-9]*|1(?:\.0*)?))?")
"""A weight above nothing; without one it is 1."""

_KEPT_IN_ADDRESS = "/?&=%:~@+,;!*'()$-._#"


def page_response(status: int, text: str, headers: Headers = ()) -> Response:
    """Return a page, or a region of one."""
    return Response(status, text.encode("utf-8", "replace"), (*PAGE_HEADERS, *headers), HTML)


def compressed(answer: Response, request: Request) -> Response:
    """Return a page as small as the browser takes it.

    A page has the secret of its visitor in it beside texts of others, and its size tells of both.
    No other site learns that size: its requests come without the cookies, and so get no page.
    """
    if len(answer.body) <= LEAST_COMPRESSED_BYTES:
        return answer
    headers: Headers = (*answer.headers, (b"vary", b"accept-encoding"))
    if not takes_gzip(request.header(b"accept-encoding")):
        return answer._replace(headers=headers)
    return answer._replace(
        body=gzipped(answer.body), headers=(*headers, (b"content-encoding", b"gzip"))
    )


def gzipped(content: bytes) -> bytes:
    """Return a content as it is sent to whoever takes gzip; the same gives the same."""
    return gzip.compress(content, COMPRESSION, mtime=0)


def takes_gzip(accepted: bytes) -> bool:
    """Tell whether an Accept-Encoding takes gzip, by the weight that it gives it."""
    weights = {}
    for coding_range in accepted.lower().split(b","):
        coding, _, parameter = coding_range.partition(b";")
        weights[coding.strip()] = _WEIGHT.fullmatch(parameter.strip()) is not None
    return next((weights[coding] for coding in _GZIP if coding in weights), False)


def redirect(
    to: str, headers: Headers = (), *, is_fragment: bool = False, status: int = SEE_OTHER
) -> Response:
    """Return what sends a browser to another page; a script is told in a header of its own."""
    place = quote(to, safe=_KEPT_IN_ADDRESS).encode("ascii")
    if is_fragment:
        return Response(NO_CONTENT, b"", ((b"hx-redirect", place), *PAGE_HEADERS, *headers))
    return Response(status, b"", ((b"location", place), *PAGE_HEADERS, *headers))


# What was made a moment ago, so that fifty open pages cost one drawing.
#
# Rule: what is kept is found again only under the same key, and a key has everything in it that
# the result may depend on. What is made soon is not kept beyond the next full second, which is
# when pages are told what changed: what they fetch then was made after the change. What takes
# long is kept for ten times as long, so that the largest page takes a tenth of the time at most,
# however often it is asked for. What is old is let go, also when nobody asks any more: a page may
# hold a whole tree.

FRESH_SECONDS = 1.0
MAKE_SECONDS = 25.0
COST_FACTOR = 10.0
MOST_FRESH_SECONDS = 10.0
MAX_KEPT = 200

Made = TypeVar("Made")


def until_full_second(now: float, seconds: float = FRESH_SECONDS) -> float:
    """Return how long it is until the next moment at which everybody looks."""
    return seconds - now % seconds


class Recent(Generic[Made]):
    """The last result of each key; those who ask while it is made wait for the same one."""

    def __init__(self, ticks: Callable[[], float] | None = None) -> None:
        self._ticks = ticks
        self._kept: OrderedDict[tuple[object, ...], tuple[asyncio.Task[Made], float]] = (
            OrderedDict()
        )
        self._sweep: asyncio.TimerHandle | None = None

    async def get(
        self,
        key: tuple[object, ...],
        make: Callable[[], Awaitable[Made]],
        run: Callable[[Coroutine[Any, Any, Made]], Coroutine[Any, Any, Made]] | None = None,
    ) -> Made:
        """Return what `make` returns, or returned under this key since the last full second.

        It is made in a task of its own: that one visitor leaves is nothing to the others. With
        `run` its time counts for the one who asked first.
        """
        now = self._now()
        making, fresh_until = self._kept.get(key, (None, 0.0))
        if making is None or now >= fresh_until or _has_failed(making):
            work = _within_time(make)
            making = asyncio.create_task(work if run is None else run(work))
            making.add_done_callback(lambda made: self._made(key, made, now))
            self._keep(key, making, now + until_full_second(now, FRESH_SECONDS))
        return await asyncio.shield(making)

    def forget(self, key: tuple[object, ...]) -> None:
        """Let go what was made under a key, or under one that begins with it."""
        for kept in [kept for kept in self._kept if kept[: len(key)] == key]:
            del self._kept[kept]

    def _now(self) -> float:
        return (self._ticks or asyncio.get_running_loop().time)()

    def _made(self, key: tuple[object, ...], made: asyncio.Task[Made], began: float) -> None:
        _look_at(made)
        rest = min(COST_FACTOR * (self._now() - began), MOST_FRESH_SECONDS)
        known, fresh_until = self._kept.get(key, (None, 0.0))
        if known is made and began + rest > fresh_until:
            end = began + rest
            self._kept[key] = (made, end + until_full_second(end, FRESH_SECONDS))

    def _keep(
        self, key: tuple[object, ...], making: asyncio.Task[Made], fresh_until: float
    ) -> None:
        self._kept[key] = (making, fresh_until)
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if self._sweep is None:
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(FRESH_SECONDS, self._let_go) if self._kept else None

    def _let_go(self) -> None:
        now = self._now()
        for key, (made, fresh_until) in list(self._kept.items()):
            if made.done() and now >= fresh_until:
                del self._kept[key]
        self._sweep_soon()


async def _within_time(make: Callable[[], Awaitable[Made]]) -> Made:
    try:
        async with asyncio.timeout(MAKE_SECONDS):
            return await make()
    except TimeoutError:
        raise StoreUnavailableError("the numbers of a page did not come in time") from None


def _has_failed(making: asyncio.Task[Made]) -> bool:
    # Those who waited were told the same failure; whoever comes after them tries again.
    return making.done() and (making.cancelled() or making.exception() is not None)


def _look_at(making: asyncio.Task[Made]) -> None:
    # Whoever asked may have left, and then nobody asks what came of it.
    if not making.cancelled():
        making.exception()
