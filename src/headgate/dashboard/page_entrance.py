"""Who looks at a page: the token in a cookie instead of a header, and proof that a form is ours.

The API never looks at a cookie, so nothing that a page of another site makes a browser send can
reach it. Here the cookie's token is put where the API's own entrance looks for one, and that
decides. Rule: a change is made only if the request brings the secret of its form, equal to that in
a cookie, and if the browser says of itself that the form was a page of this service.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple
from urllib.parse import parse_qs

from headgate.dashboard.cookies import TOKEN, Cookies
from headgate.dashboard.page import Form
from headgate.errors import StoreError
from headgate.web.api import Api
from headgate.web.callers import Permission
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal

CSRF_FIELD = "csrf"
CSRF_HEADER = b"x-csrf-token"
MAX_FORM_BYTES = 64 * 1024
MAX_FORM_FIELDS = 1_100
MAX_NEXT_LENGTH = 2_000

_NO_PAGES = ("/ui/logout", "/ui/theme")
"""What takes forms alone, and is for everybody: nobody can have come from there."""

_OWN_PAGES = (b"", b"same-origin", b"none")
_FORM_TYPE = b"application/x-www-form-urlencoded"
_TOO_LARGE = f"the form has more than {MAX_FORM_BYTES // 1024} KiB; shorten what you entered"
_STALE_FORM = "the form is too old, or cookies are blocked; load the page again and send it anew"


async def let_in(api: Api, request: Request, needs: Permission | None) -> Request:
    """Return the request as its sender, or refuse it; needing nothing is open to all.

    Whatever else a page needs, it shows something, and leads to pages that do: it needs `read` too.
    """
    entrance = api.entrance
    host, origin, _ = request.identity()
    entrance.check_place(host, origin, is_secure=request.is_secure)
    own = request.with_authorization(_authorization(api, request))
    if needs is not None:
        caller = entrance.let_in(own, needs)
        own.caller = await entrance.look_up(own, needs) if caller is None else caller
        own.caller.check("read")
        request.caller = own.caller
    return own


class Visitor(NamedTuple):
    """Who sent a request that was refused, as far as that is known.

    Whoever `is_unchecked` has a token that nobody could be asked about, and it may be a good one.
    """

    request: Request
    is_let_in: bool = False
    is_unchecked: bool = False


async def known_visitor(api: Api, request: Request, *, may_ask: bool) -> Visitor:
    """Return who sent a refused request; the store is asked only if it may be."""
    own = request.with_authorization(_authorization(api, request))
    try:
        caller = api.entrance.let_in(own, "read")
        if caller is None and may_ask:
            caller = await api.entrance.look_up(own, "read")
    except Refusal:
        return Visitor(request)
    except StoreError:
        caller = None
    if caller is None:
        return Visitor(request, is_unchecked=True)
    own.caller = caller
    return Visitor(own, is_let_in=True)


async def token_problem(api: Api, request: Request, token: str) -> str:
    """Return why a token lets nobody in; empty if it does."""
    if not _is_header_text(token):
        return "the token is not known here"
    own = request.with_authorization(f"Bearer {token}".encode("ascii"))
    try:
        await api.entrance.look_up(own, "read")
    except Refusal as refusal:
        return refusal.body.error
    return ""


def needs_login(api: Api) -> bool:
    """Tell whether a token is asked for; on a loopback address there may be none."""
    return api.entrance.rules.needs_token


def _authorization(api: Api, request: Request) -> bytes:
    # Cookies go to every port of a host. Where no token is asked for, one that was kept for
    # another service of this machine must not lock anybody out.
    token = Cookies(request).get(TOKEN) if needs_login(api) else ""
    return f"Bearer {token}".encode("ascii") if token and _is_header_text(token) else b""


def _is_header_text(text: str) -> bool:
    return text.isascii() and text.isprintable()


async def read_form(request: Request) -> Form:
    """Return the fields of a form that one of our pages sent, or refuse it."""
    if request.header(b"sec-fetch-site") not in _OWN_PAGES:
        raise Refusal("forbidden_origin", "forms are not taken from pages of other sites")
    if request.header(b"content-type").partition(b";")[0].strip().lower() != _FORM_TYPE:
        raise Refusal("unsupported_media_type", f"send {_FORM_TYPE.decode()}")
    body = await request.json_body()
    if len(body) > MAX_FORM_BYTES:
        raise Refusal("body_too_large", _TOO_LARGE)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError:
        raise Refusal("bad_request", "the form cannot be read") from None
    form = Form(fields)
    _check_secret(request, form)
    return form


def _check_secret(request: Request, form: Form) -> None:
    kept = Cookies(request).csrf
    sent = request.header(CSRF_HEADER).decode("latin-1") or form.get(CSRF_FIELD)
    if not kept or not hmac.compare_digest(kept.encode(), sent.encode()):
        raise Refusal("forbidden", _STALE_FORM, details={"field": CSRF_FIELD})


def local_path(text: str) -> str:
    """Return where to go after a login: a path of this service, or the first page."""
    is_own = text.startswith("/") and not text.startswith(("//", "/\\"))
    if not is_own or len(text) > MAX_NEXT_LENGTH or not text.isprintable() or "\\" in text:
        return "/"
    return "/" if text.partition("?")[0] in _NO_PAGES else text
