"""What a page of the dashboard is made of: a view of the service, a handler, a template.

A handler is given a `View` and returns a `Page`; an action is given a form too and returns where to
go next. Neither knows of cookies, headers or templates. Rule: a handler gets its figures from the
functions behind the API's routes and hands `view.request` and `view.caller` to them, so that the
permissions and the bounds of a token hold here as they do there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from headgate.settings.sections import DashboardMode
from headgate.web.api import Api
from headgate.web.callers import Caller, Permission
from headgate.web.http.answers import Answer
from headgate.web.http.requests import Request

NO_ANSWER = "the store has not answered in time"


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
        host = self.request.identity()[0].decode("latin-1") or self.request.served_at
        return f"{'https' if self.request.is_secure else 'http'}://{host}"


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
AnswerHandler = Callable[[View, str], Awaitable[Answer]]


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


def answer_route(path: str, handler: AnswerHandler, needs: Permission | None = "read") -> PageRoute:
    """Return a route that answers with something else than a page, such as raw JSON."""
    return PageRoute(path, needs, answer=handler)
