"""Who looks at a page: the token in a cookie instead of a header, and proof that a form is ours.

The API never looks at a cookie, so nothing that a page of another site makes a browser send can
reach it. Here the cookie's token is put where the API's authenticator looks for one, and that
decides. Rule: a change is made only if the request brings the secret of its form, equal to that in
a cookie, and if the browser says of itself that the form was a page of this service.
"""

from __future__ import annotations

import hmac
import re
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote

from headgate.api.api import Api
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Headers
from headgate.dashboard.page import Form
from headgate.errors import StoreError
from headgate.storage.tokens import Permission

# The cookies of the dashboard: reading what a browser sends, writing what it is to keep.
#
# Over HTTPS every name has a prefix with which browsers keep a cookie for this very host and for
# HTTPS alone, and only such names are read there: whatever came without HTTPS, anybody on the way
# may have set. Rule: what an action said is kept for the page that it leads to, by the address of
# that page, and shown there once. A cookie's own path would not do: every page below it would get
# the message too.

HOST_PREFIX = "__Host-"
TOKEN = "headgate_token"  # noqa: S105 - the name of a cookie
CSRF = "headgate_csrf"
SAID = "headgate_said_"
"""How the names of messages begin; the address of their page makes the rest."""
THEME = "headgate_theme"
MAX_SAID_BYTES = 1_000
"""Three times as much when it is written as a cookie, of which a browser keeps 4,096 bytes."""
MAX_WAITING = 8
"""How many messages wait for their pages; a browser with too many cookies forgets the login."""
YEAR_SECONDS = 365 * 86_400
SAID_SECONDS = 60
THEMES = ("light", "dark")

_ERROR_MARK = "!"
_SECRET = re.compile(r"[0-9a-f]{32}")
_SAID_NAME = re.compile(rf"{SAID}[0-9a-f]{{16}}")

Header = tuple[bytes, bytes]


class Cookies:
    """What the browser of a request has kept, and the headers that have it keep something else."""

    def __init__(self, request: Request) -> None:
        self._is_secure = request.is_secure
        self._kept = _kept(request, self.sent_name(""))

    def get(self, name: str) -> str:
        """Return what is kept under a name; empty if nothing is."""
        return self._kept.get(name, "")

    def sent_name(self, name: str) -> str:
        """Return the name as the browser has it."""
        return f"{HOST_PREFIX if self._is_secure else ''}{name}"

    @property
    def csrf(self) -> str:
        """The secret that forms are sent with; empty if the browser has none yet."""
        value = self.get(CSRF)
        return value if _SECRET.fullmatch(value) else ""

    @property
    def theme(self) -> str:
        """The theme that was chosen; empty leaves it to the system."""
        value = self.get(THEME)
        return value if value in THEMES else ""

    def keep(
        self, name: str, value: str, *, is_hidden: bool = True, max_age_seconds: int | None = None
    ) -> Header:
        """Return the header that has a browser keep a value; without an age, until it is closed."""
        parts = [f"{self.sent_name(name)}={value}", "Path=/", "SameSite=Strict"]
        if is_hidden:
            parts.append("HttpOnly")
        if self._is_secure:
            parts.append("Secure")
        if max_age_seconds is not None:
            parts.append(f"Max-Age={max_age_seconds}")
        return (b"set-cookie", "; ".join(parts).encode("ascii"))

    def drop(self, name: str) -> Header:
        """Return the header that has a browser forget a value."""
        return self.keep(name, "", max_age_seconds=0)

    def said(self, *, at: str) -> tuple[str, bool]:
        """Return what an action said for the page at an address, and whether it went wrong."""
        text = unquote(self.get(self._said_name(at)))[: MAX_SAID_BYTES + 1]
        return text.removeprefix(_ERROR_MARK), text.startswith(_ERROR_MARK)

    def say(self, text: str, *, at: str, is_error: bool) -> Headers:
        """Return what keeps a message until the page at an address shows it.

        Those that have waited longest give way; a browser sends them in the order of their age.
        """
        name = self._said_name(at)
        waiting = [one for one in self._kept if _SAID_NAME.fullmatch(one) and one != name]
        kept = text.encode("utf-8", "replace")[:MAX_SAID_BYTES].decode(errors="ignore")
        value = quote((_ERROR_MARK if is_error else "") + kept, safe="")
        own = self.keep(name, value, max_age_seconds=SAID_SECONDS)
        return (own, *[self.drop(one) for one in waiting[: 1 - MAX_WAITING]])

    def drop_said(self, *, at: str) -> Header:
        """Return the header that has a browser forget what was said for a page."""
        return self.drop(self._said_name(at))

    def _said_name(self, address: str) -> str:
        """Return the name under which a message waits for the page at an address with its query.

        Other services of the host can set cookies too. They cannot know the name of one that is
        made with what only this browser and the service know.
        """
        own = blake2b(f"{self.csrf} {self.get(TOKEN)}".encode()).digest()
        # A browser writes some characters of an address in another way than we do.
        page = unquote(address.partition("#")[0]).encode("utf-8", "replace")
        return f"{SAID}{blake2b(page, key=own, digest_size=8).hexdigest()}"


def _kept(request: Request, prefix: str) -> dict[str, str]:
    """Return the cookies whose names have a prefix, without it; of one that comes twice, the first.

    Browsers send no cookie with the prefix of HTTPS over anything else, so none is left out there.
    """
    kept: dict[str, str] = {}
    for header in request.headers(b"cookie"):
        for pair in header.decode("latin-1").split(";"):
            name, _, value = pair.strip().partition("=")
            if name.startswith(prefix):
                kept.setdefault(name.removeprefix(prefix), value)
    return kept


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
_STALE_FORM = (
    "the form is too old, or cookies are blocked; load the page again and send the form again"
)


async def authenticate(api: Api, request: Request, needs: Permission | None) -> Request:
    """Return the request as its sender, or refuse it; needing nothing is open to all.

    Whatever else a page needs, it shows something, and leads to pages that do: it needs `read` too.
    """
    auth = api.auth
    host, origin, _ = request.identity()
    auth.check_host_and_origin(host, origin, is_secure=request.is_secure)
    own = request.with_authorization(_authorization(api, request))
    if needs is not None:
        caller = auth.authenticate(own, needs, is_page=True)
        own.caller = await auth.look_up(own, needs) if caller is None else caller
        own.caller.check("read")
        request.identify(own.caller)
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
        caller = api.auth.authenticate(own, "read", is_page=True)
        if caller is None and may_ask:
            caller = await api.auth.look_up(own, "read")
    except ApiError:
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
        return "this service does not recognise that token"
    own = request.with_authorization(f"Bearer {token}".encode("ascii"))
    try:
        await api.auth.look_up(own, "read")
    except ApiError as api_error:
        return api_error.body.error
    return ""


def needs_login(api: Api) -> bool:
    """Tell whether a token is asked for; on a loopback address there may be none."""
    return api.auth.rules.needs_token


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
        raise ApiError("forbidden_origin", "forms from other sites are refused")
    if request.header(b"content-type").partition(b";")[0].strip().lower() != _FORM_TYPE:
        raise ApiError("unsupported_media_type", f"send {_FORM_TYPE.decode()}")
    body = await request.json_body()
    if len(body) > MAX_FORM_BYTES:
        raise ApiError("body_too_large", _TOO_LARGE)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS)
    except ValueError:
        raise ApiError("bad_request", "the form cannot be read") from None
    form = Form(fields)
    _check_secret(request, form)
    return form


def _check_secret(request: Request, form: Form) -> None:
    kept = Cookies(request).csrf
    sent = request.header(CSRF_HEADER).decode("latin-1") or form.get(CSRF_FIELD)
    if not kept or not hmac.compare_digest(kept.encode(), sent.encode()):
        raise ApiError("forbidden", _STALE_FORM, details={"field": CSRF_FIELD})


def local_path(text: str) -> str:
    """Return where to go after a login: a path of this service, or the first page."""
    is_own = text.startswith("/") and not text.startswith(("//", "/\\"))
    if not is_own or len(text) > MAX_NEXT_LENGTH or not text.isprintable() or "\\" in text:
        return "/"
    return "/" if text.partition("?")[0] in _NO_PAGES else text
